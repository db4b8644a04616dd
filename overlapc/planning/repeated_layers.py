"""Compiles the equal layers of a graph once: four of them are lowered and fused, and all others are copies of one.

    layers      0    1    2    3    4   …   k-1
    lowered     0    1    2                 k-1      layer k-1 reads the results of layer 2 instead of those of k-2
    fused       0    1    2                 k-1
    written     0    1    2    3    4   …   k-1      layers 3 to k-2 by the ops of layer 1, with other names

Fusion also joins ops of one layer with ops of the next, and places them among those. So what is copied is a piece of
the fused order: from the first op of layer 1 up to the first op of layer 2. It must equal the next piece, up to the
first op of layer k-1, except for the names; if it does not, the whole graph is lowered and fused. The first and the
last layer may be different, because ops before and after all layers may be fused into them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from overlapc.fusion.deps import output_buffers
from overlapc.fx.equal_layers.repeats import KEPT, Repeats
from overlapc.ir.ops import (
    Attention,
    Combo,
    Extern,
    Handle,
    IROp,
    Loops,
    LoweredGraph,
    Provenance,
    Start,
    View,
    Wait,
    buffers_read,
    buffers_written,
    tree_map,
)
from overlapc.ir.template import over_buffers
from overlapc.lowering.provenance import provenance

_NODE = "\0"


def stand_ins(repeats: Repeats) -> dict[fx.Node, fx.Node]:
    """Map each node that `lower` leaves out to the node of the third layer that its readers read instead."""
    third = repeats.stretches[KEPT - 2]
    left_out = repeats.stretches[KEPT - 1 : -1]
    return {node: stand_in for nodes in left_out for node, stand_in in zip(nodes, third, strict=True)}


class Repeated:
    """A graph of which `lower` left out `stand_ins`, and how its ops are written for the layers that were left out."""

    def __init__(self, gm: fx.GraphModule, lowered: LoweredGraph, repeats: Repeats, comm_of: Callable[[str], Any]):
        """comm_of: the communication (`schedule.model.Comm`) of a node that starts some, by its name."""
        self._lowered, self._comm_of = lowered, comm_of
        self._results: Any = gm.graph.output_node().args[0]
        self._nodes = {node.name: node for node in gm.graph.nodes}
        self._repeats = repeats
        self._more = len(repeats.stretches) - KEPT
        kept = (*repeats.stretches[: KEPT - 1], repeats.stretches[-1])
        self._layer_of = {node.name: at for at, nodes in enumerate(kept) for node in nodes}
        place = {node.name: place for nodes in kept for place, node in enumerate(nodes)}
        # The names of a layer's ops and buffers: name, place of the node that it was made for, and its form.
        self._made: list[list[tuple[str, int, str]]] = [[] for _ in kept]
        self._results_of = {op.name: op.result for op in lowered.ops if isinstance(op, Extern)}
        self._changes_inputs = False
        for op in lowered.ops:
            node = next(iter(op.origin.fx), "")
            if node not in place:
                continue
            for name in dict.fromkeys((op.name, *buffers_written(op))):
                self._changes_inputs |= not name.startswith(node)
                self._made[self._layer_of[node]].append((name, place[node], _form(name, node)))

    # --- names

    def _names(self, layer: int, target: int) -> Iterator[tuple[str, str]]:
        """Yield the names of a kept layer with those of layer `target` of the model."""
        nodes, inputs = self._repeats.stretches, self._repeats.inputs
        source = layer if layer < KEPT - 1 else len(nodes) - 1
        for name, place, form in self._made[layer]:
            yield name, form.replace(_NODE, nodes[target][place].name)
        for one, other in zip(nodes[source], nodes[target], strict=True):
            yield one.name, other.name
        for one, other in zip(inputs[source], inputs[target], strict=True):
            yield self._given(one), self._given(other)

    def _given(self, node: fx.Node) -> str:
        """Return the buffer of an input, or of a seed that the graph draws before its layers."""
        if node.op == "placeholder":
            return node.name
        source, item = node.args
        assert isinstance(source, fx.Node)
        return self._results_of[source.name][item].buffer

    def _moved(self, by: int) -> dict[str, str]:
        """Return the names of the first three layers -> those of the layers `by` behind them."""
        return dict(pair for layer in range(KEPT - 1) for pair in self._names(layer, layer + by))

    def _next(self) -> dict[str, str]:
        """Return the names of the first three layers -> those of the kept layer behind each."""
        last = len(self._repeats.stretches) - 1
        return dict(pair for layer in range(KEPT - 1) for pair in self._names(layer, (1, 2, last)[layer]))

    # --- memory

    def left_out_bytes(self, ops: Sequence[IROp], live_bytes: Sequence[int]) -> list[int]:
        """Return the bytes that the layers that are left out add to the live bytes at each of `ops`.

        live_bytes: at each op, without them. If live memory grows from layer to layer, as in forward, the layers after
        the second have the additional bytes; if it shrinks, those up to the third have them. So the two layers in the
        middle count as if they ran when most memory is in use.
        """
        home = [self._home(op) for op in ops]
        if any(layer not in home for layer in range(KEPT)):
            return [0] * len(ops)
        begin = [home.index(layer) for layer in range(KEPT)]
        growth = (live_bytes[begin[2]] - live_bytes[begin[1]]) * self._more
        if growth > 0:
            return [growth * (at >= begin[1]) for at in range(len(ops))]
        return [-growth * (at < begin[3]) for at in range(len(ops))]

    def left_out_inputs(self) -> set[str]:
        """Return the inputs and seeds of the layers that were left out."""
        return {node.name for inputs in self._repeats.inputs[KEPT - 1 : -1] for node in inputs}

    # --- ops

    def _home(self, op: IROp) -> int:
        """Return the first layer that an op computes a part of; -1 if it is of no layer."""
        return min(self._layers(op), default=-1)

    def _layers(self, op: IROp) -> set[int]:
        """Return the kept layers that an op computes a part of."""
        return {self._layer_of[name] for name in op.origin.fx if name in self._layer_of}

    def written(self, ops: Sequence[IROp]) -> LoweredGraph | None:
        """Return the graph with all layers; its ops are `ops`, which were fused from the lowered ones, and the copies.

        None if the layers in the middle were fused differently.
        """
        if self._changes_inputs or any(isinstance(op, Attention) for op in ops) or not all(self._made):
            return None
        home = [self._home(op) for op in ops]
        if any(layer not in home for layer in range(KEPT)):
            return None
        second, third, last = (home.index(layer) for layer in range(1, KEPT))
        if any(max(self._layers(op), default=0) > at + 1 for op, at in zip(ops, home, strict=True)):
            return None  # an op computes a part of a layer and of one that is not the next
        if 0 in home[third:] or 1 in home[last:]:
            return None  # a layer's op runs later than the next layer
        piece, rest, following = ops[second:third], ops[third:], self._next()
        if not second < third < last or [self._renamed(op, following) for op in piece] != list(ops[third:last]):
            return None
        copies = [self._moved(by) for by in range(1, self._more + 1)]
        to_end = copies[-1]
        every = [*ops[:third], *(self._renamed(op, names) for names in copies for op in piece)]
        every += [self._renamed(op, to_end) for op in rest]
        graph = self._graph(copies, every)
        return graph if graph is not None and _defines_what_it_reads(graph) else None

    def __str__(self) -> str:
        first, last = self._repeats.stretches[0][0].name, self._repeats.stretches[-1][0].name
        return f"{self._more + KEPT} equal layers from {first} and {last} on, of which {self._more} are left out here"

    def _renamed(self, op: IROp, names: Mapping[str, str]) -> IROp:
        """Return `op` with the names of another layer."""

        def leaf(value: Any) -> Any:
            return _renamed_leaf(value, names)

        assert not isinstance(op, Combo | Attention)  # `written` refuses one, and `combine` makes the other later
        name = names.get(op.name, op.name)
        origin = self._origin(op.origin, names)
        if isinstance(op, Loops):
            body, outputs, mutates = (
                over_buffers(op.body, names),
                tuple(map(leaf, op.outputs)),
                tuple(map(leaf, op.mutates)),
            )
            before = tuple(names.get(each, each) for each in op.before)
            return Loops(name, op.device, body, outputs, mutates, before, origin)
        if isinstance(op, Wait):
            return Wait(name, leaf(op.source), leaf(op.result), origin)
        if isinstance(op, Start):
            call = self._renamed(op.call, names)
            assert isinstance(call, Extern)
            return Start(name, call, self._comm_of(name), origin)
        return dataclasses.replace(
            op,
            name=name,
            args=tree_map(leaf, op.args),
            kwargs=tree_map(leaf, op.kwargs),
            result=tree_map(leaf, op.result),
            comm=None if op.comm is None else self._comm_of(name),
            origin=origin,
        )

    def _origin(self, origin: Provenance, names: Mapping[str, str]) -> Provenance:
        found = Provenance()
        for name in origin.fx:
            found = found.joined(provenance(self._nodes[names.get(name, name)]))
        return found

    def _graph(self, copies: Sequence[Mapping[str, str]], ops: list[IROp]) -> LoweredGraph | None:
        """Return the lowered graph with all layers; None if two buffers would get one name."""
        lowered = self._lowered
        views, aliases = dict(lowered.views), dict(lowered.aliases)
        to_end = copies[-1]
        third = {name for name, _, _ in self._made[KEPT - 2]}
        for names in copies:
            for name in third:
                other = names[name]
                if other in views or other in aliases:
                    return None
                if name in lowered.views:
                    views[other] = View(other, lowered.views[name].layout)
                if name in lowered.aliases:
                    aliases[other] = names.get(lowered.aliases[name], lowered.aliases[name])
        for name, _, _ in self._made[KEPT - 1]:
            if name in aliases:
                aliases[name] = to_end.get(aliases[name], aliases[name])
        outputs = tuple(self._outputs(copies))
        return dataclasses.replace(lowered, views=views, aliases=aliases, ops=ops, outputs=outputs)

    def _outputs(self, copies: Sequence[Mapping[str, str]]) -> Iterator[Any]:
        """Yield the results of the whole graph in order."""
        stretches = self._repeats.stretches
        left_out = {
            node: (place, names)
            for nodes, names in zip(stretches[KEPT - 1 : -1], copies, strict=True)
            for place, node in enumerate(nodes)
        }
        lowered = [each for each in self._results if each not in left_out]
        settled = {node for nodes in stretches[: KEPT - 1] for node in nodes}
        settled |= {node for node in lowered if isinstance(node, fx.Node) and node.op == "placeholder"}
        leaf_of = dict(zip(lowered, self._lowered.outputs, strict=True))
        for result in self._results:
            if result in left_out:
                place, names = left_out[result]
                yield _renamed_leaf(leaf_of[stretches[KEPT - 2][place]], names)
            else:
                yield _renamed_leaf(leaf_of[result], {} if result in settled else copies[-1])


def _defines_what_it_reads(graph: LoweredGraph) -> bool:
    """Whether each buffer is written before it is read, and only once, and all results are written."""
    known = {*graph.inputs, *graph.constants}
    for op in graph.ops:
        written = buffers_written(op)
        if not buffers_read(op) <= known or not known.isdisjoint(written):
            return False
        known.update(written)
    return output_buffers(graph) <= known


def _form(name: str, node: str) -> str:
    """Return the name of an op or buffer that was made for a node, with `_NODE` for the node's name.

    A buffer that the node changes has two names joined by `__`: of its memory, and of the node (lowering/context.py).
    """
    form = _NODE + name.removeprefix(node)
    return form.removesuffix(node) + _NODE if form.endswith(f"__{node}") else form


def _renamed_leaf(value: Any, names: Mapping[str, str]) -> Any:
    """Return a view or handle under another name; any other value as it is."""
    if isinstance(value, View | Handle):
        return dataclasses.replace(value, buffer=names.get(value.buffer, value.buffer))
    return value
