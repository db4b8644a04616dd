"""Measures the host time of compiled graphs, by kind of node, for `overlapc calibrate`.

Small graphs with one kind of node give the cost of such a node. The cost of a call of a graph, and of each tensor that
a graph takes or returns, are solved from the step times of two models, one with few and one with many parameters, after
subtracting the cost of their nodes. The parameters are DTensors, as with `fully_shard` and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from overlapc.estimators.calibration.clock import Clock, launch_ns
from overlapc.estimators.device import DeviceProfile, HostCosts
from overlapc.estimators.host import crossing, host_ns
from overlapc.launch.calibrate_kernels import compile_alone
from overlapc.report import record
from overlapc.schedule.text import parse

_CHAIN = 24  # nodes of a small graph
_FEW, _MANY = 4, 44  # parameters of the two models
_TURNS = 3  # how often each model is measured
_STEP_LAUNCHES = 20  # upper bound of the launches of a model's step: a GPU's launch queue must never be full
_c10d = torch.ops._c10d_functional


def kernel_launch_ns(clock: Clock, device: torch.device) -> float:
    """Return the host time of launching a generated kernel, in ns."""
    return _node_ns(clock, _sines, [torch.ones(16, device=device)])


def host_costs(clock: Clock, device: torch.device, kernel_ns: float) -> HostCosts:
    """Measure all host costs. Collective: every rank must call it at the same time.

    kernel_ns: the result of `kernel_launch_ns`.
    """
    group = dist.group.WORLD
    assert group is not None
    several = [torch.ones(16, 16, device=device) for _ in range(_CHAIN)]
    apart_ns = _node_ns(clock, partial(_gathers, group), several)
    together_ns = _node_ns(clock, partial(_coalesced_gather, group), several)
    nodes = HostCosts(
        kernel=kernel_ns,
        call=_node_ns(clock, _products, several[:1]),
        collective=apart_ns,
        tensor=max(0.0, together_ns * _CHAIN - apart_ns) / (_CHAIN - 1),
        graph=0.0,
        argument=0.0,
    )
    mesh = init_device_mesh(device.type, (group.size(),))
    steps = [_Step(mesh, count, nodes) for count in (_FEW, _MANY)]
    # The models take turns, and the minimum of each counts: other work of the host only makes a time longer, and might
    # hit only one of the two models.
    taken = [[launch_ns(clock, step.run, _STEP_LAUNCHES) * _STEP_LAUNCHES for step in steps] for _ in range(_TURNS)]
    few_ns, many_ns = (
        max(0.0, min(ns) - step.nodes_ns) for ns, step in zip(zip(*taken, strict=True), steps, strict=True)
    )
    few, many = (step.crossing for step in steps)
    argument_ns = max(0.0, (many_ns - few_ns) / (many - few))
    return replace(nodes, argument=argument_ns, graph=max(0.0, few_ns - few * argument_ns) / 2)


# --- nodes


def _node_ns(clock: Clock, function: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Tensor]) -> float:
    """Return the host time in ns of one of the `_CHAIN` nodes of `function`, compiled."""
    compiled, _, _ = compile_alone(function, arguments, fusion=False, passes="none")
    with torch.no_grad():
        return launch_ns(clock, lambda: compiled(*arguments), _CHAIN)


def _sines(x: Tensor) -> tuple[Tensor]:
    for _ in range(_CHAIN):
        x = torch.sin(x)
    return (x,)


def _products(x: Tensor) -> tuple[Tensor]:
    for _ in range(_CHAIN):
        x = torch.mm(x, x)
    return (x,)


def _gathers(group: dist.ProcessGroup, *shards: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        _c10d.wait_tensor(_c10d.all_gather_into_tensor(shard, group.size(), group.group_name)) for shard in shards
    )


def _coalesced_gather(group: dist.ProcessGroup, *shards: Tensor) -> tuple[Tensor, ...]:
    gathered = _c10d.all_gather_into_tensor_coalesced(list(shards), group.size(), group.group_name)
    return tuple(map(_c10d.wait_tensor, gathered))


# --- calls of graphs


class _Scaled(nn.Module):
    """Multiplies by replicated parameters, so that nothing is communicated."""

    def __init__(self, mesh: DeviceMesh, count: int) -> None:
        super().__init__()
        whole = torch.ones(16, device=mesh.device_type)
        self.factors = nn.ParameterList(
            nn.Parameter(distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x * factor.to_local()
        return x.sum()


class _Step:
    """A step (forward and backward) of a model with `count` parameters.

    crossing: number of tensors that its graphs take and return. nodes_ns: the host time of their nodes.
    """

    def __init__(self, mesh: DeviceMesh, count: int, nodes: HostCosts) -> None:
        self._model, self._x = _Scaled(mesh, count), torch.ones(16, device=mesh.device_type)
        # Any stored profile will do: the costs of nodes are taken from `nodes`.
        self._compiled = torch.compile(
            self._model, backend="overlapc", dynamic=False, options={"profile": "h200-nvlink"}
        )
        for _ in range(3):  # the first call compiles; later calls take other code paths
            self.run()
        schedules = [parse(graph.schedule) for graph in record.report_of_process().steps[0].graphs[-2:]]
        self.crossing = sum(map(crossing, schedules))
        self.nodes_ns = sum(host_ns(schedule, DeviceProfile("", host=nodes)) or 0.0 for schedule in schedules)

    def run(self) -> None:
        """Run the step once."""
        self._compiled(self._x).backward()
        self._model.zero_grad(set_to_none=True)
