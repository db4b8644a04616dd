"""Dependences between ops: through buffers, around mutations and side effects; and dead code elimination."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from overlapc.ir.ops import (
    Attention,
    Combo,
    Extern,
    Handle,
    IROp,
    Loops,
    LoweredGraph,
    Start,
    View,
    Wait,
    buffers_read,
    buffers_written,
    loops_of,
    tree_leaves,
    views_in,
)


def symbols_used(op: IROp) -> set[str]:
    """Return the names of the size symbols that running the op needs."""
    exprs: list[sympy.Expr] = []
    views: list[View] = []
    if isinstance(op, Loops | Combo):
        for part in loops_of(op):
            exprs += part.body.size_symbols()
        views += [*op.outputs, *op.mutates]
    elif isinstance(op, Wait | Attention):  # an attention has static sizes
        return set()
    else:
        call = op.call if isinstance(op, Start) else op
        views += views_in(call.arguments)
        exprs += [leaf for leaf in tree_leaves(call.arguments) if isinstance(leaf, sympy.Expr)]
    for view in views:
        exprs += [*view.layout.size, *view.layout.stride, view.layout.offset]
    return {str(symbol) for expr in exprs for symbol in expr.free_symbols}


def reads_of(op: IROp, graph: LoweredGraph) -> set[str]:
    """Return the buffers that the op reads, including those that define a size it uses."""
    reads = buffers_read(op)
    if graph.sources:
        reads |= {graph.sources[name] for name in symbols_used(op) if name in graph.sources}
    return reads


def output_buffers(graph: LoweredGraph) -> set[str]:
    """Return the buffers that the graph returns."""
    found = set()
    for leaf in tree_leaves(graph.outputs):
        if isinstance(leaf, View | Handle):
            found.add(leaf.buffer)
        elif isinstance(leaf, sympy.Expr):
            found |= {graph.sources[str(symbol)] for symbol in leaf.free_symbols if str(symbol) in graph.sources}
    return found


def callers_memory(graph: LoweredGraph) -> frozenset[str]:
    """Return the buffers whose contents outlive a call that fails: arguments and constants."""
    return frozenset((*graph.inputs, *graph.constants))


def without_dead_ops(graph: LoweredGraph) -> list[IROp]:
    """Return the ops whose result is used or that have effects: communication, mutation, assertion.

    A wait whose result is not read stays, too: the memory of its collective is needed until then.
    """
    needed = output_buffers(graph)
    given = callers_memory(graph)
    kept: list[IROp] = []
    for op in reversed(graph.ops):
        effect = isinstance(op, Start | Wait) or (isinstance(op, Extern) and not op.pure)
        if isinstance(op, Loops):
            effect = bool(op.body.checks()) or any(graph.root(view.buffer) in given for view in op.mutates)
        if effect or any(name in needed for name in buffers_written(op)):
            kept.append(op)
            needed |= reads_of(op, graph)
    kept.reverse()
    return kept


@dataclass(slots=True)
class Edges:
    """Dependences by position in a list of ops."""

    before: list[set[int]]  # for each op, the ops that must run before it

    def need(self, position: int, earlier: int | None) -> None:
        """Add the edge from `earlier` to `position`, unless `earlier` is None or `position` itself."""
        if earlier is not None and earlier != position:
            self.before[position].add(earlier)


def edges(ops: Sequence[IROp], graph: LoweredGraph) -> Edges:
    """Return the dependences between `ops`, which are in a legal order.

    A reader depends on the op that wrote the buffer or defined a size that it uses. An op that overwrites memory runs
    after all readers of the earlier contents; a start reads its inputs until its wait. Collectives keep their order per
    process group, no other communication is moved past blocking communication, and calls with side effects (random
    numbers, asserts, unknown functions) keep their order.
    """
    found = Edges([set() for _ in ops])
    _order_memory(found, ops, graph)
    _order_communication(found, ops)
    _order_as_requested(found, ops, graph)
    last: int | None = None
    for position, op in enumerate(ops):
        if has_effect(op):
            found.need(position, last)
            last = position
    return found


def has_effect(op: IROp) -> bool:
    """Whether the op has effects beyond its buffers: draws random numbers, asserts, calls an unknown function."""
    return isinstance(op, Extern) and not op.pure and not op.mutates and op.comm is None


def mutated(op: IROp) -> tuple[View, ...]:
    """Return the buffers that the op overwrites, under the names of their new contents."""
    call = op.call if isinstance(op, Start) else op
    return call.mutates if isinstance(call, Extern | Loops | Combo) else ()


def _order_memory(found: Edges, ops: Sequence[IROp], graph: LoweredGraph) -> None:
    writer: dict[str, int] = {}
    readers: defaultdict[str, list[int]] = defaultdict(list)  # root -> readers of its present contents
    started: dict[str, int] = {}  # result of a start -> its position
    for position, op in enumerate(ops):
        for name in reads_of(op, graph):
            found.need(position, writer.get(name))
            readers[graph.root(name)].append(position)
        if isinstance(op, Wait) and op.source.buffer in started:
            start = ops[started[op.source.buffer]]  # buffers that the start reads or overwrites are in use until here
            for name in (*buffers_read(start), *(view.buffer for view in mutated(start))):
                readers[graph.root(name)].append(position)
        for view in mutated(op):
            root = graph.root(view.buffer)
            for reader in readers[root]:
                found.need(position, reader)
            readers[root] = [position]
        for name in buffers_written(op):
            writer[name] = position
            if isinstance(op, Start):
                started[name] = position


def _order_as_requested(found: Edges, ops: Sequence[IROp], graph: LoweredGraph) -> None:
    """Add the order that the graph requests (`LoweredGraph.order`) between ops that are not dead."""
    if graph.order:
        position = {op.name: at for at, op in enumerate(ops)}
        for later, earlier in graph.order.items():
            for name in earlier if later in position else ():
                found.need(position[later], position.get(name))


def _order_communication(found: Edges, ops: Sequence[IROp]) -> None:
    last_of_group: dict[str, int] = {}
    barrier: int | None = None
    since_barrier: list[int] = []
    for position, op in enumerate(ops):
        comm = op.comm if isinstance(op, Extern | Start) else None
        if isinstance(op, Extern) and comm is not None and not getattr(comm, "safe", False):
            for earlier in since_barrier:
                found.need(position, earlier)
            found.need(position, barrier)
            barrier, since_barrier = position, []
            last_of_group.clear()
        elif comm is not None or isinstance(op, Start | Wait):
            found.need(position, barrier)
            since_barrier.append(position)
            if isinstance(op, Wait):
                continue
            group = getattr(comm, "group", "")
            found.need(position, last_of_group.get(group))
            last_of_group[group] = position
