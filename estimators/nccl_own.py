"""Estimates of collectives by NCCL itself, which knows the topology, through torch."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from overlapc.estimators.calibration.workloads import launcher
from overlapc.schedule.collective_kinds import KINDS
from overlapc.schedule.model import Estimate, Node

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


class LibraryCollectives:
    """Estimates collectives of this process's groups whose communicator exists and can estimate, without communication.

    On 4 H200s NCCL 2.28 estimated 10 to 20% too little from 64 MiB on, and down to a third of the time for small
    messages, so measured tables are asked first.
    """

    name = "NCCL's estimate"

    def estimate(self, node: Node) -> Estimate | None:
        comm = node.comm
        dtype = _DTYPES.get(comm.dtype.removeprefix("torch.")) if comm is not None else None
        if comm is None or dtype is None or comm.via or comm.collective not in KINDS or not comm.ranks:
            return None
        ns = _estimate_ns(comm.collective, comm.bytes, comm.ranks, dtype)
        return None if ns is None else Estimate(ns, self.name)


@functools.lru_cache(maxsize=1024)
def _estimate_ns(collective: str, size_bytes: int, ranks: tuple[int, ...], dtype: torch.dtype) -> float | None:
    group = _group(ranks)
    if group is None:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    backend = group._get_backend(device)
    if not backend.supports_time_estimate or not backend._is_initialized():  # type: ignore[attr-defined]
        return None
    launch = launcher(collective, group, size_bytes, dtype, device)
    with distributed_c10d._time_estimator(group, device) as found:
        launch()
    microseconds = float(found.estimated_time)
    return microseconds * 1e3 if microseconds > 0 else None  # negative: NCCL has no estimate


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return an NCCL group of this process over exactly these ranks, or None."""
    if not dist.is_initialized():
        return None
    for group in distributed_c10d._world.pg_map:
        if dist.get_backend(group) == "nccl" and tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    return None
