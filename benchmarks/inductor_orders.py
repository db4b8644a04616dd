"""Run Inductor's overlap passes on our schedules: each returns a `Schedule` with the same nodes in Inductor's order.

Its scheduler passes (torch._inductor.comms) move scheduler nodes, its overlap scheduling moves FX nodes. Both get
stand-ins with the attributes that the passes read: dependences, live bytes and estimates, all of them ours. So the
simulator judges Inductor's orders and ours on the same graph. Written for torch 2.13; needs no GPU.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._inductor import comms, config_comms
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.fx_passes import overlap_scheduling
from torch._inductor.memory import FreeableInputBuffer, MemoryPlanningInfoForBuffer
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._ordered_set import OrderedSet
from torch.utils.flop_counter import flop_registry

from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.memory import lifetimes
from overlapc.schedule.model import Kind, Node, Schedule

_c10d = torch.ops._c10d_functional
ITERATIVE = (
    comms.reorder_communication_preserving_peak_memory,
    comms.sink_waits_iterative,
    comms.reorder_communication_preserving_peak_memory,
)


class NoStandIn(Exception):
    """Raised for a schedule that has no stand-in for Inductor's passes; the message says why."""


def orders() -> dict[str, Callable[[Schedule], Schedule]]:
    """Return every order of Inductor's that is compared, by name."""
    return {
        "raise + sink greedily": lambda schedule: by_scheduler(schedule, (comms.raise_comms, comms.sink_waits)),
        "reorder for overlap": lambda schedule: by_scheduler(schedule, (comms.reorder_compute_for_overlap,)),
        "raise, sink, raise": lambda schedule: by_scheduler(schedule, ITERATIVE),
        "the same by estimates": lambda schedule: by_scheduler(schedule, ITERATIVE, by_estimates=True),
        "overlap scheduling": by_overlap_scheduling,
    }


# Scheduler nodes


class _Buffer:
    """Stand-in for a `SchedulerBuffer`: a name, and the storage that is allocated with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mpi_buffer = MemoryPlanningInfoForBuffer()

    def get_name(self) -> str:
        return self.name


class _Stub:
    """Stand-in for a `BaseSchedulerNode`."""

    def __init__(self, at: int, node: Node, earlier: Sequence[_Stub], schedule: Schedule) -> None:
        self.at, self.kind = at, node.kind
        self.name = node.name
        self.outputs = [_Buffer(name) for name in node.writes] or [_Buffer(f"token of {node.name}")]
        self.ns = 0.0 if node.estimate is None else node.estimate.ns
        matmul = node.kind is Kind.EXTERN and node.work is not None and node.work.flops > 0
        self.node = SimpleNamespace(python_kernel_name="extern_kernels.matmul" if matmul else "")
        self.preds = [earlier[before] for before in dependencies.of(schedule).preds[at]]
        self.unmet_dependencies = OrderedSet(self._dependences(schedule))

    def _dependences(self, schedule: Schedule) -> Iterator[StarDep | WeakDep]:
        why, here = dependencies.of(schedule).why, self.outputs[0].name
        for pred in self.preds:
            reason = why[pred.at, self.at]
            if reason is Why.DATA:
                yield from (StarDep(buffer.name) for buffer in pred.outputs)
            else:
                yield WeakDep(pred.outputs[0].name, here, is_fake=reason is Why.COLLECTIVE_ORDER)

    @property
    def ancestors(self) -> set[str]:
        found: set[_Stub] = set()
        stack = list(self.preds)
        while stack:
            each = stack.pop()
            if each not in found:
                found.add(each)
                stack.extend(each.preds)
        return {each.name for each in found}

    def get_name(self) -> str:
        return self.name

    def get_operation_names(self) -> OrderedSet[str]:
        return OrderedSet([self.name])

    def get_buffer_names(self) -> OrderedSet[str]:
        return OrderedSet(buffer.name for buffer in self.outputs)

    def get_outputs(self) -> list[_Buffer]:
        return self.outputs

    def get_estimated_runtime(self) -> float:
        return self.ns


def by_scheduler(
    schedule: Schedule, passes: Sequence[Callable[[list[Any]], list[Any]]], by_estimates: bool = False
) -> Schedule:
    """Return `schedule` in the order that these passes of `torch._inductor.comms` give it, one after the other.

    by_estimates: the iterative passes stop where their estimates say that a collective is hidden.
    """
    stubs: list[Any] = []
    for at, node in enumerate(schedule.nodes):
        stubs.append(_Stub(at, node, stubs, schedule))
    with _stands_for_inductor(schedule, stubs, by_estimates):
        for each in passes:
            stubs = each(stubs)
    return schedule.replace_order((stub.name for stub in stubs), reorder_collectives=True)


@contextmanager
def _stands_for_inductor(schedule: Schedule, stubs: Sequence[_Stub], by_estimates: bool) -> Iterator[None]:
    """Answer the passes' queries about the graph from `schedule`, inside the block."""
    inputs, outputs = _liveness(schedule, stubs)
    graph = SimpleNamespace(graph_inputs=dict.fromkeys(inputs), get_output_names=lambda: list(outputs))

    def is_collective(stub: _Stub, wanted: Callable[[_Stub], bool] | None = None) -> bool:
        return stub.kind is Kind.START or (stub.kind is Kind.COMM and wanted is None)

    with ExitStack() as stack:
        for name, value in (
            ("contains_collective", is_collective),
            ("contains_wait", lambda stub: stub.kind is Kind.WAIT),
            ("contains_async_collective", lambda stub: stub.kind is Kind.START),
            ("get_freeable_input_buf", lambda *_: inputs),
        ):
            stack.enter_context(patch.object(comms, name, value))
        stack.enter_context(V.set_graph_handler(graph))  # type: ignore[arg-type]
        stack.enter_context(
            config_comms.patch(
                reorder_iterative_use_runtime_estimations=by_estimates,
                sink_iterative_use_runtime_estimations=by_estimates,
            )
        )
        yield


def _liveness(schedule: Schedule, stubs: Sequence[_Stub]) -> tuple[dict[str, FreeableInputBuffer], set[str]]:
    """Return freeable inputs, and names that are never freed; set sizes and users of the stubs' buffers."""
    life = lifetimes(schedule)
    users: dict[str, OrderedSet[Any]] = {}
    for at, storages in enumerate(life.touches):
        for storage in storages:
            users.setdefault(life.roots[storage], OrderedSet()).add(stubs[at])
    never: set[str] = set()
    produced: set[str] = set()
    for stub in stubs:
        for buffer in stub.outputs:
            if buffer.name not in schedule.buffers or schedule.root(buffer.name) != buffer.name:
                continue
            produced.add(buffer.name)
            size = schedule.buffers[buffer.name].bytes
            buffer.mpi_buffer = _planning(size, users.get(buffer.name))
            if buffer.name not in users:
                never.add(buffer.name)
    inputs = {
        root: FreeableInputBuffer(root, _planning(schedule.buffers[root].bytes, found))
        for root, found in users.items()
        if root not in produced
    }
    return inputs, never


def _planning(size: int, users: OrderedSet[Any] | None) -> MemoryPlanningInfoForBuffer:
    if users is None:
        return MemoryPlanningInfoForBuffer(size_alloc=size)
    return MemoryPlanningInfoForBuffer(size, size, users, users)


# FX nodes


def launch(*_: Any) -> None:
    """Represents any node on the compute stream that is not a matmul."""


def matmul(*_: Any) -> None:
    """Represents the nodes that overlap scheduling counts as compute: ops with a FLOP formula."""


def together(*_: Any) -> None:
    """Represents the tensors of a bucket as one tensor."""


def by_overlap_scheduling(schedule: Schedule) -> Schedule:
    """Return `schedule` in the order of Inductor's overlap scheduling, with its default memory limits.

    Buckets are those of the schedule: making buckets is not part of an order. Raises NoStandIn for nodes that an FX
    graph of functional collectives cannot express.
    """
    graph = _Graph(schedule)
    ns = {node: schedule.nodes[at].estimate for node, at in graph.stands_for.items()}

    def estimate_ms(node: fx.Node, _: int | None = None) -> float:
        known = ns.get(node)
        return 0.0 if known is None else known.ns / 1e6

    registry = patch.dict(flop_registry, {matmul: lambda *_, **__: 0})
    roofline = patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", estimate_ms)
    # All ranks have this process's estimates.
    align = "_align_compute_nodes_runtime_estimations_across_all_distributed_ranks"
    aligned = patch.object(overlap_scheduling.OverlapScheduler, align, lambda self: None)
    sys.setrecursionlimit(100_000)  # it calls itself for collective after collective
    with registry, roofline, aligned:
        overlap_scheduling.schedule_overlap_bucketing(
            fx.GraphModule({}, graph.graph),
            custom_runtime_estimation=estimate_ms,
            compute_estimator="analytical",
            pre_bucketing_fsdp_collectives=False,
        )
    placed = [graph.stands_for[node] for node in graph.graph.nodes if node in graph.stands_for]
    return schedule.replace_order((schedule.nodes[at].name for at in placed), reorder_collectives=True)


class _Graph:
    """A schedule as an FX graph over fake tensors of its sizes; `stands_for` maps FX nodes to positions in it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.graph = fx.Graph()
        self.stands_for: dict[fx.Node, int] = {}
        self.mode = FakeTensorMode()
        self.named: dict[str, fx.Node] = {}  # buffer -> the FX node whose value it is
        self.made: list[fx.Node] = []
        for name, buffer in schedule.buffers.items():
            if schedule.producer(name) is None:
                self.named[name] = self._add(self.graph.placeholder(f"p{len(self.named)}"), self._tensor(buffer.bytes))
        for at, node in enumerate(schedule.nodes):
            self.made.append(self._node(at, node))
        self.graph.output(tuple(self.named[name] for name in schedule.outputs))

    def _node(self, at: int, node: Node) -> fx.Node:
        if node.kind is Kind.COMM or node.mutates:
            raise NoStandIn(f"has no stand-in for a barrier or a mutation ({node.name})")
        first: fx.Node
        args = [] if node.kind is Kind.WAIT else [self.named[name] for name in node.reads]
        if node.kind is Kind.START:
            return self._start(at, node, args)
        if node.kind is Kind.WAIT:
            start = self.made[self.schedule.started[at]]
            waits = [user for user in start.users if user.target is _c10d.wait_tensor.default]
            if not waits:
                first = self._call(_c10d.wait_tensor.default, (start,), start.meta["val"])
            else:  # further results of a bucket are ready with the first one
                first = self._call(operator.getitem, (waits[0], at), waits[0].meta["val"])
            self.named[node.writes[0]] = first
        elif node.kind is Kind.VIEW:
            first = self._call(launch, tuple(args), args[0].meta["val"])
            self.named.update(dict.fromkeys(node.writes, first))
        else:
            flops = node.kind is Kind.EXTERN and node.work is not None and node.work.flops > 0
            values = tuple(self._value(name) for name in node.writes)
            first = self._call(matmul if flops else launch, tuple(args), values[0] if len(values) == 1 else values)
            if len(values) == 1:
                self.named[node.writes[0]] = first
            else:
                for number, name in enumerate(node.writes):
                    self.named[name] = self._call(operator.getitem, (first, number), values[number])
        self.stands_for[first] = at
        return first

    def _start(self, at: int, node: Node, args: list[fx.Node]) -> fx.Node:
        comm = node.comm
        assert comm is not None
        whole = args[0]
        if len(args) > 1:
            whole = self._call(together, tuple(args), self._tensor(0))
        size, group = comm.size, comm.group
        target, rest = {
            "all_gather": (_c10d.all_gather_into_tensor.default, (size, group)),
            "reduce_scatter": (_c10d.reduce_scatter_tensor.default, ("sum", size, group)),
            "all_reduce": (_c10d.all_reduce.default, ("sum", group)),
            "all_to_all": (_c10d.all_to_all_single.default, ([], [], group)),
        }[comm.collective]
        written = sum(self.schedule.buffers[name].bytes for name in node.writes)
        start = self._call(target, (whole, *rest), self._tensor(written))
        self.stands_for[start] = at
        return start

    def _value(self, name: str) -> Any:
        alias = self.schedule.buffers[name].alias_of
        return self.named[alias].meta["val"] if alias is not None else self._tensor(self.schedule.buffers[name].bytes)

    def _tensor(self, size: int) -> Any:
        with self.mode:
            return torch.empty(size, dtype=torch.uint8)

    def _call(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        return self._add(self.graph.call_function(target, args), value)

    def _add(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta["val"] = value
        return node
