"""Which op needs which: true dependences through buffers, order around mutations, dead code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy

from overlapc.ir.ops import (
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
    tree_leaves,
    views_read,
)


def symbols_used(op: IROp) -> set[str]:
    """Names of the size symbols that running the op needs."""
    exprs: list[sympy.Expr] = []
    views: list[View] = []
    if isinstance(op, Loops):
        exprs += op.body.size_symbols()
        views += op.outputs
    elif isinstance(op, Wait):
        return set()
    else:
        call = op.call if isinstance(op, Start) else op
        leaves = tree_leaves((call.args, dict(call.kwargs)))
        views += [leaf for leaf in leaves if isinstance(leaf, View)]
        exprs += [leaf for leaf in leaves if isinstance(leaf, sympy.Expr)]
    for view in views:
        exprs += [*view.layout.size, *view.layout.stride, view.layout.offset]
    return {str(symbol) for expr in exprs for symbol in expr.free_symbols}


def reads_of(op: IROp, graph: LoweredGraph) -> set[str]:
    """Buffers the op needs, those that bring a size it uses included."""
    reads = buffers_read(op)
    if graph.sources:
        reads |= {graph.sources[name] for name in symbols_used(op) if name in graph.sources}
    return reads


def output_buffers(graph: LoweredGraph) -> set[str]:
    """Buffers that the graph returns."""
    found = set()
    for leaf in tree_leaves(graph.outputs):
        if isinstance(leaf, View | Handle):
            found.add(leaf.buffer)
        elif isinstance(leaf, sympy.Expr):
            found |= {graph.sources[str(symbol)] for symbol in leaf.free_symbols if str(symbol) in graph.sources}
    return found


def without_dead_ops(graph: LoweredGraph) -> list[IROp]:
    """The ops whose result somebody uses, or that do something else: communicate, mutate, assert."""
    needed = output_buffers(graph)
    kept: list[IROp] = []
    for op in reversed(graph.ops):
        effect = isinstance(op, Start) or (isinstance(op, Extern) and not op.pure)
        effect = effect or (isinstance(op, Loops) and bool(op.body.checks()))
        if effect or any(name in needed for name in buffers_written(op)):
            kept.append(op)
            needed |= reads_of(op, graph)
    kept.reverse()
    return kept


@dataclass(slots=True)
class Edges:
    """Who must come before whom, by position in a list of ops."""

    before: list[set[int]] = field(default_factory=list)  # for each op, the ops it needs done
    after: list[set[int]] = field(default_factory=list)  # the reverse


def edges(ops: Sequence[IROp], graph: LoweredGraph) -> Edges:
    """Dependences between `ops`, which stand in a legal order.

    A reader needs the op that wrote the buffer. An op that overwrites memory runs after everything that read an
    earlier content of it. Communication keeps its order per process group.
    """
    found = Edges([set() for _ in ops], [set() for _ in ops])
    writer: dict[str, int] = {}
    readers: defaultdict[str, list[int]] = defaultdict(list)  # by root: who read the present content
    last_of_group: dict[str, int] = {}

    def need(position: int, earlier: int | None) -> None:
        if earlier is not None and earlier != position:
            found.before[position].add(earlier)
            found.after[earlier].add(position)

    for position, op in enumerate(ops):
        for name in reads_of(op, graph):
            need(position, writer.get(name))
            readers[graph.root(name)].append(position)
        call = op.call if isinstance(op, Start) else op
        if isinstance(call, Extern):
            for view in call.mutates:
                root = graph.root(view.buffer)
                for reader in readers[root]:
                    need(position, reader)
                readers[root] = [position]
        for name in buffers_written(op):
            writer[name] = position
        if isinstance(op, Start):
            group = getattr(op.comm, "group", "")
            need(position, last_of_group.get(group))
            last_of_group[group] = position
    return found


__all__ = ["Edges", "edges", "output_buffers", "reads_of", "symbols_used", "views_read", "without_dead_ops"]
