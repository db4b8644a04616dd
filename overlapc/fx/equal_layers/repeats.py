"""Finds the layers of a model in its traced graph: a stretch of nodes that is repeated directly behind itself.

    a = f(x, w0); b = g(a, m); c = f(b, w1); d = g(c, m); e = f(d, w2); h = g(e, m)
 -> three stretches: f reads the end of the stretch before it and an input of its own, g reads an input of all

Where a stretch begins does not matter: it may begin in the middle of a layer. Unlike `fx/equal_layers/blocks.py`, which
finds equal modules before AOTAutograd traces them, this works on any graph, also on backward.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from overlapc.fx.arguments import declared_arguments, is_written
from overlapc.fx.control import order_of
from overlapc.fx.random import ops as random_ops
from overlapc.fx.versions.graphs import binds_sizes

aten = torch.ops.aten
seeds = random_ops.seeds.default  # draws the seeds of a whole graph before it computes anything else
_WINDOW = 16  # equal nodes in a row that count as the same place of a layer
_TRIED = 8  # most frequent distances that are tried as periods
KEPT = 4  # stretches that are compiled, see planning/repeated_layers.py
LEAST = 2 * KEPT  # fewest stretches for which this pays


@dataclass(frozen=True)
class Repeats:
    """Stretches of nodes, each directly behind the one before it and equal to it.

    A node reads nodes of its own stretch, nodes of the stretch before it at the same places as in every other stretch,
    nodes before all stretches, and inputs. It is read in its own stretch, in the next, and by the graph's output; the
    nodes of the last stretch by anything. The first and the last stretch may be read and returned in other places.
    """

    stretches: tuple[tuple[fx.Node, ...], ...]
    inputs: tuple[tuple[fx.Node, ...], ...]  # of each stretch, inputs and seeds that no other reads, in one order

    def in_pairs(self) -> Repeats | None:
        """Return the same nodes as stretches of twice the length; None if these are fewer than `LEAST`."""
        first = len(self.stretches) % 2
        stretches, inputs = (
            tuple(one + other for one, other in zip(each[first::2], each[first + 1 :: 2], strict=True))
            for each in (self.stretches, self.inputs)
        )
        return Repeats(stretches, inputs) if len(stretches) >= LEAST else None


def find_repeats(graph: fx.Graph, same: Callable[[fx.Node], Hashable]) -> Repeats | None:
    """Return the longest run of at least `LEAST` equal stretches; None if there is none.

    same: what must be equal of corresponding nodes besides ops, constants, layouts and data flow.
    None for a graph with symbolic sizes; nodes that change memory or wait for others are in no stretch.
    """
    if any(_is_symbolic(node.meta.get("val")) for node in graph.find_nodes(op="placeholder")):
        return None
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    layouts: dict[Hashable, int] = {}
    layout_of = {node: layouts.setdefault(_layout(node.meta.get("val")), len(layouts)) for node in graph.nodes}
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(_kind(node, layout_of, same), len(numbers)) for node in nodes]
    period, first, count = max(
        ((period, *_longest(kinds, period)) for period in _periods(kinds)),
        key=lambda run: run[0] * (run[2] - KEPT),  # nodes that need not be compiled
        default=(0, 0, 0),
    )
    if count < LEAST:
        return None
    stretches = [tuple(nodes[at : at + period]) for at in range(first, first + count * period, period)]
    return _Run(stretches, graph).longest()


def place_results(graph: fx.Graph) -> None:
    """Move what is computed for the graph's output alone from its end to the layer that it belongs to.

    The partitioner lets forward compute what it saves last, and AOTAutograd makes views of gradients last. A node moves
    directly behind the last node that it reads, unless that needs more memory: one of these must be as large, and not
    be returned.
    """
    if any(getattr(node.target, "_schema", None) and node.target._schema.is_mutable for node in graph.nodes):
        return  # a node could read memory before a change that it has to follow
    output = graph.output_node()
    position = {node: at for at, node in enumerate(graph.nodes)}
    for node in output.all_input_nodes:
        moves = node.target is aten.view.default or torch.Tag.pointwise in getattr(node.target, "tags", ())
        if (
            moves
            and set(node.users) == {output}
            and any(_outlives(read, node, output) for read in node.all_input_nodes)
        ):
            max(node.all_input_nodes, key=position.__getitem__).append(node)


def _outlives(read: fx.Node, node: fx.Node, output: fx.Node) -> bool:
    """Whether memory that `node` reads is needed until `node` runs, and no smaller than its result's."""
    before, after = read.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or _is_symbolic(before) or _is_symbolic(after):
        return False
    return read.op == "call_function" and output not in read.users and before.nbytes >= after.nbytes


def _kind(node: fx.Node, layout_of: Mapping[fx.Node, int], same: Callable[[fx.Node], Hashable]) -> Hashable:
    """Return a key that is equal for nodes that may be at the same place of two stretches."""
    target: Any = node.target
    if (
        node.op != "call_function"
        or order_of(node) is not None
        or binds_sizes(node)
        or any(is_written(declared) for declared, _ in declared_arguments(target, node.args, node.kwargs))
    ):
        return node
    reads = tuple(map(layout_of.__getitem__, node.all_input_nodes))
    return target, _form(node.args), _form(node.kwargs), layout_of[node], reads, same(node)


def _form(value: Any) -> Hashable:
    """Return an argument as a key, in which all nodes are equal."""
    if isinstance(value, fx.Node):
        return fx.Node
    if isinstance(value, tuple | list):
        return (type(value).__name__, *map(_form, value))
    if isinstance(value, Mapping):
        return tuple((key, _form(each)) for key, each in value.items())
    return type(value), repr(value)  # by their text: 0.0 is not -0.0


def _layout(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or _is_symbolic(value):
            return object()  # equal to nothing else
        place = (tuple(value.shape), value.stride(), value.storage_offset())
        return place, value.dtype, value.device, value.is_conj(), value.is_neg()
    if isinstance(value, tuple | list):
        return tuple(map(_layout, value))
    if isinstance(value, int | float):  # attention on a GPU returns lengths beside its tensors
        return type(value), value
    return None if value is None else object()


def _is_symbolic(value: Any) -> bool:
    numbers: Sequence[Any] = (value,)
    if isinstance(value, Tensor):
        numbers = value.shape
        if value.layout == torch.strided:
            numbers = (*value.shape, *value.stride(), value.storage_offset())
    return any(isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) for number in numbers)


def _periods(kinds: Sequence[int]) -> list[int]:
    """Return numbers of nodes that a stretch may have: distances between places where the same nodes follow.

    A stretch may be several layers long, for example if torch's partitioner saves other values in every third layer.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for at in range(len(kinds) - _WINDOW + 1):
        places.setdefault(tuple(kinds[at : at + _WINDOW]), []).append(at)
    distances: Counter[int] = Counter()
    for found in places.values():
        for apart in range(1, len(found) // LEAST + 1):
            distances.update(later - earlier for earlier, later in zip(found, found[apart:], strict=False))
    return [distance for distance, _ in distances.most_common(_TRIED)]


def _longest(kinds: Sequence[int], period: int) -> tuple[int, int]:
    """Return where the longest run of equal stretches of `period` nodes begins, and their number."""
    best = start = end = 0
    for at in range(len(kinds) - period):
        if kinds[at] != kinds[at + period]:
            start = at + 1
        elif at + 1 - start > end - best:
            best, end = start, at + 1
    return best, (end - best) // period + 1


class _Run:
    """Stretches whose nodes are of the same kinds; their data flow decides which of them are equal."""

    def __init__(self, stretches: Sequence[tuple[fx.Node, ...]], graph: fx.Graph) -> None:
        self._stretches = stretches
        self._output = graph.output_node()
        self._place = {node: (at, place) for at, nodes in enumerate(stretches) for place, node in enumerate(nodes)}

    def longest(self) -> Repeats | None:
        """Return the longest part of the run that is a `Repeats`, or None."""
        ends = [self._ends(nodes, at) for at, nodes in enumerate(self._stretches)]
        own: list[dict[fx.Node, fx.Node] | None] = [None]  # of each stretch: input of the one before it -> its own
        own += [self._own_inputs(at) for at in range(1, len(self._stretches))]
        best, start = range(0), 0
        for at in range(1, len(self._stretches)):
            inner = at - 1
            if not _continues(own, start, at) or ends[inner] is None:
                start = at
            elif inner > start and ends[inner] != ends[start + 1]:
                start = inner  # the first stretch may be returned in other places than all others
            if at + 1 - start > len(best):
                best = range(start, at + 1)
        if len(best) < LEAST or self._adds_up(best[1]):
            return None
        given = own[best[1]]
        assert given is not None
        inputs = [tuple(given)]
        for at in best[1:]:
            given = own[at]
            assert given is not None
            inputs.append(tuple(given[each] for each in inputs[-1]))
        return Repeats(tuple(self._stretches[at] for at in best), tuple(inputs))

    def _adds_up(self, at: int) -> bool:
        """Whether a value is only passed on to its place in the next stretch, as gradients of what all layers read are
        added up: one kernel may then add those of all layers."""
        return any(
            list(node.users) == [after]
            for node, after in zip(self._stretches[at], self._stretches[at + 1], strict=True)
        )

    def _ends(self, nodes: Sequence[fx.Node], at: int) -> Hashable:
        """Return which of a stretch's nodes the graph returns; None if nodes behind the next stretch read them."""
        returned = []
        for place, node in enumerate(nodes):
            for user in node.users:
                if user is self._output:
                    returned.append(place)
                elif user not in self._place or self._place[user][0] - at > 1:
                    return None
        return tuple(returned)

    def _own_inputs(self, at: int) -> dict[fx.Node, fx.Node] | None:
        """Map the inputs that the stretch before `at` reads to those that `at` reads in their place.

        None if the two differ in their data flow. Inputs that both read in the same places are not listed.
        """
        found: dict[fx.Node, fx.Node] = {}
        shared: set[fx.Node] = set()
        for before, node in zip(self._stretches[at - 1], self._stretches[at], strict=True):
            for theirs, ours in zip(_read_by(before), _read_by(node), strict=True):
                if ours in self._place:
                    from_, place = self._place[ours]
                    if from_ < at - 1 or self._place.get(theirs, (-1, place)) != (from_ - 1, place):
                        return None  # the first stretch reads what another reads from the one before it, from anywhere
                elif ours is theirs:
                    shared.add(ours)
                elif not (_is_given(ours) and _is_given(theirs)) or found.setdefault(theirs, ours) is not ours:
                    return None
        if not shared.isdisjoint(found) or not shared.isdisjoint(found.values()):
            return None
        if len(set(found.values())) < len(found) or not self._only_in(found.values(), at):
            return None
        return found if self._only_in(found, at - 1) else None

    def _only_in(self, inputs: Iterable[fx.Node], at: int) -> bool:
        """Whether only the stretch `at` reads these inputs; the graph may return them."""
        users = (user for node in inputs for user in node.users if user is not self._output)
        return all(user in self._place and self._place[user][0] == at for user in users)


def _continues(own: Sequence[Mapping[fx.Node, fx.Node] | None], start: int, at: int) -> bool:
    """Whether stretch `at` is equal to the one before it, and to all from `start` on."""
    before, this = own[at - 1], own[at]
    if this is None:
        return False
    return at - 1 == start or (before is not None and list(before.values()) == list(this))


def _is_given(node: fx.Node) -> bool:
    """Whether a node's value may belong to one stretch although it is no node of it: inputs, and seeds for dropout."""
    source = node.args[0] if node.target is operator.getitem else None
    return node.op == "placeholder" or (isinstance(source, fx.Node) and source.target is seeds)


def _read_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a node's arguments, in order, as often as they occur."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found
