"""The estimators that are asked for the time of a node, in this order; every estimate names its source.

1. the user's times: a function, or a measured run of this job     (`estimates=`)
2. inner graphs, such as branches of conditionals                  (simulated before)
3. times measured on this device: matmuls, attention, convolutions (`measure_matmuls=`; once per shape, cached on disk)
   and generated kernels                                           (`autotune=`)
4. the profile's tables of collectives                             (measured by `overlapc calibrate`)
5. NCCL's own estimate
6. models: rings and trees for collectives, the roofline at achieved rates for compute
"""

from __future__ import annotations

import torch

from overlapc.codegen.library_calls import calls_of
from overlapc.config import Config
from overlapc.estimators.base import Estimator, FirstKnown
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.measured import MeasuredCalls, Times
from overlapc.estimators.nccl import AnalyticCollectives, MeasuredCollectives
from overlapc.estimators.nccl_own import LibraryCollectives
from overlapc.estimators.roofline import Roofline
from overlapc.ir.ops import LoweredGraph, Start
from overlapc.report.earlier import users_estimator


def chain_of(
    profile: DeviceProfile, config: Config, graph: LoweredGraph, inner: Estimator, tuned: Estimator | None = None
) -> FirstKnown:
    """Return the estimators for `graph`.

    inner: estimates calls of its inner graphs. tuned: the times of kernels that autotuning measured.
    """
    chain: list[Estimator] = []
    times: Times | None = None
    user = users_estimator(config.estimates, graph.name)
    if user is not None:
        chain.append(user)
    chain.append(inner)
    device = _device_of(graph)
    here = device is not None and config.profile is None  # a profile that the user names may be of another machine
    communicates = any(isinstance(op, Start) for op in graph.ops)
    if device is not None and measures(config, device, communicates=communicates):
        times = Times(config.cache_dir, device)
        chain.append(MeasuredCalls(calls_of(graph), times, profile))
    if tuned is not None and here:
        chain.append(tuned)
    chain.append(MeasuredCollectives(profile))
    if here and device is not None and device.type == "cuda":
        chain.append(LibraryCollectives())
    estimators = (*chain, AnalyticCollectives(profile), Roofline(profile))
    return FirstKnown(estimators) if times is None else FirstKnown(estimators, store=times.store)


def measures(config: Config, device: torch.device, *, communicates: bool) -> bool:
    """Whether matmuls, attention and convolutions may be measured now for estimates.

    By default only on GPUs (on CPUs, other processes disturb a measurement), and only for graphs that communicate: in
    other graphs no estimate changes the generated code, and measuring takes a tenth of a second per shape.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    if config.measure_matmuls is None:
        return device.type == "cuda" and config.profile is None and communicates
    return config.measure_matmuls


def _device_of(graph: LoweredGraph) -> torch.device | None:
    """Return the GPU that the graph runs on, else any of its devices; None if it has none."""
    devices = {view.layout.device for view in graph.views.values()}
    return next((each for each in devices if each.type == "cuda"), next(iter(devices), None))
