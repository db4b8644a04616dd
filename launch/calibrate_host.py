"""Host time of compiled graphs, by kind of node, as `overlapc calibrate` measures it.

Small graphs of one kind of node say what a node costs. What a call of a graph costs beside its nodes, and each tensor
that goes in or comes out, is left of the steps of two models, of few and of many parameters: DTensors, as `fully_shard`
and tensor parallelism make them.
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
_FEW, _MANY = 4, 44  # parameters
_TURNS = 3  # of measuring each
_STEP_LAUNCHES = 20  # of a model's step, at most: so that a GPU's queue of launches never is full
_c10d = torch.ops._c10d_functional


def kernel_launch_ns(clock: Clock, device: torch.device) -> float:
    """Host time of launching a generated kernel."""
    return _of_each(clock, _sines, [torch.ones(16, device=device)])


def host_costs(clock: Clock, device: torch.device, kernel_ns: float) -> HostCosts:
    """Everything; all ranks must ask for it at once. kernel_ns: the result of `kernel_launch_ns`."""
    group = dist.group.WORLD
    assert group is not None
    several = [torch.ones(16, 16, device=device) for _ in range(_CHAIN)]
    apart_ns = _of_each(clock, partial(_gathers, group), several)
    together_ns = _of_each(clock, partial(_coalesced_gather, group), several)
    nodes = HostCosts(
        kernel=kernel_ns,
        call=_of_each(clock, _products, several[:1]),
        collective=apart_ns,
        tensor=max(0.0, together_ns * _CHAIN - apart_ns) / (_CHAIN - 1),
        graph=0.0,
        argument=0.0,
    )
    mesh = init_device_mesh(device.type, (group.size(),))
    steps = [_Step(mesh, count, nodes) for count in (_FEW, _MANY)]
    # In turns, and the least of each: what else the host does only adds to a time, and would to one of the two alone.
    taken = [[launch_ns(clock, each.run, _STEP_LAUNCHES) * _STEP_LAUNCHES for each in steps] for _ in range(_TURNS)]
    few_ns, many_ns = (
        max(0.0, min(ns) - each.nodes_ns) for ns, each in zip(zip(*taken, strict=True), steps, strict=True)
    )
    few, many = (each.crossing for each in steps)
    argument_ns = max(0.0, (many_ns - few_ns) / (many - few))
    return replace(nodes, argument=argument_ns, graph=max(0.0, few_ns - few * argument_ns) / 2)


# --- nodes


def _of_each(clock: Clock, function: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Tensor]) -> float:
    """Host time in ns of each of the `_CHAIN` things that `function` does, compiled."""
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
    """Multiplies by parameters that every rank has whole, so that nothing is communicated."""

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
    """A step (forward and backward) of a model with so many parameters.

    crossing: how many tensors go into its graphs or come out; nodes_ns: the host's time for their nodes.
    """

    def __init__(self, mesh: DeviceMesh, count: int, nodes: HostCosts) -> None:
        self._model, self._x = _Scaled(mesh, count), torch.ones(16, device=mesh.device_type)
        # Any stored profile does: nodes are counted by what `nodes` says.
        self._compiled = torch.compile(
            self._model, backend="overlapc", dynamic=False, options={"profile": "h200-nvlink"}
        )
        for _ in range(3):  # compiles, and takes a later call's ways
            self.run()
        schedules = [parse(graph.schedule) for graph in record.report_of_process().steps[0].graphs[-2:]]
        self.crossing = sum(map(crossing, schedules))
        self.nodes_ns = sum(host_ns(schedule, DeviceProfile("", host=nodes)) or 0.0 for schedule in schedules)

    def run(self) -> None:
        """Once."""
        self._compiled(self._x).backward()
        self._model.zero_grad(set_to_none=True)
