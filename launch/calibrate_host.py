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
    (few, few_ns), (many, many_ns) = (_beside_nodes(clock, mesh, count, nodes) for count in (_FEW, _MANY))
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


def _beside_nodes(clock: Clock, mesh: DeviceMesh, count: int, nodes: HostCosts) -> tuple[int, float]:
    """Of a step (forward and backward) of a model with so many parameters: how many tensors go into its graphs or come
    out, and the host's time in ns for what is no node."""
    model, x = _Scaled(mesh, count), torch.ones(16, device=mesh.device_type)
    # Any stored profile does: nodes are counted by what `nodes` says.
    run = torch.compile(model, backend="overlapc", dynamic=False, options={"profile": "h200-nvlink"})

    def step() -> None:
        run(x).backward()
        model.zero_grad(set_to_none=True)

    for _ in range(3):  # compiles, and takes a later call's ways
        step()
    schedules = [parse(graph.schedule) for graph in record.report_of_process().steps[0].graphs[-2:]]
    of_nodes = sum(host_ns(schedule, DeviceProfile("", host=nodes)) or 0.0 for schedule in schedules)
    step_ns = launch_ns(clock, step, _STEP_LAUNCHES) * _STEP_LAUNCHES
    return sum(map(crossing, schedules)), max(0.0, step_ns - of_nodes)
