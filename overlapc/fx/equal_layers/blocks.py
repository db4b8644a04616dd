"""Finds equal blocks of a model in the graph that Dynamo captured: stretches of nodes that compute the same.

    a = f(x, w0); b = g(a, m); c = f(b, w1); d = g(c, m)
 -> two stretches of one form: f(operand 0, operand 1), g(%0, operand 2); its last value is used elsewhere

A block is a member of a module list (`layers.0`); its stretch consists of all nodes of its modules, which must be
adjacent. If no other block equals it, the members of lists within it are blocks, too (`stages.1.layers.0`). Two
stretches have the same form if they are equal in everything that tracing depends on: ops, constants, data flow, and
properties of operands (sizes, strides, dtype, device, whether they require gradients).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from overlapc.fx.constants import exactly
from overlapc.fx.source import members_of_lists, module_path
from overlapc.fx.subgraphs import carried, nodes_within
from overlapc.fx.versions.graphs import is_object, value_of_object

Describe = Callable[[fx.Node], Any]
"""Returns a value that represents the constants of a node which are names; None for nodes without names."""

_LEAST_SAVED = 5  # least number of nodes whose tracing is saved: tracing a block by itself costs as much as a few nodes
# Functions by name: those that change a mode until a function of the next set undoes it, and those without an effect.
_BEGINS = frozenset({"_enter_autocast", "_vmap_increment_nesting"})
_ENDS = frozenset({"_exit_autocast", "_vmap_decrement_nesting"})
_HARMLESS = frozenset({"_log_api_usage_once", "lazy_load_decompositions"})
# Methods that return their argument if it is of the right kind already.
_CONVERSIONS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "cpu", "cuda"})


class Unfit(Exception):
    """The reason why a stretch, or a whole graph, is traced without folding."""


@dataclass(frozen=True)
class Stretch:
    """The nodes of one block, its operands from other nodes, and its results that other nodes use."""

    block: str  # path of its module
    nodes: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]  # tensors
    objects: tuple[fx.Node, ...]  # other inputs of the graph, such as meshes; the same for all stretches of one form
    results: tuple[fx.Node, ...]
    form: Any  # equal for stretches that are traced alike

    def all_nodes(self) -> Iterator[fx.Node]:
        """Yield all nodes, including those of nested graphs; in the same order for stretches of one form."""
        for node in self.nodes:
            yield node
            yield from nodes_within(node)


def read_originals(graph: fx.Graph) -> None:
    """Let users of a conversion that returned its argument (`x.to(x.device)`) read the argument, in all of `graph`.

    A block that returns the result of such a call would return an operand.
    """
    for node in graph.nodes:
        if node.op == "call_method" and node.target in _CONVERSIONS:
            given, value = node.args[0], node.meta.get("example_value")
            if isinstance(value, Tensor) and given.meta.get("example_value") is value:
                node.replace_all_uses_with(given)


def equal_blocks(graph: fx.Graph, describe: Describe) -> list[list[Stretch]]:
    """Return the groups of stretches of one form that are large enough to save time.

    Unfit if the graph changes a mode in an unsupported way.
    """
    found: list[list[Stretch]] = []
    done: set[fx.Node] = set()
    levels = max((len(_members(inner)) for node in graph.nodes for inner in (node, *nodes_within(node))), default=0)
    for level in range(levels):
        forms: dict[Any, list[Stretch]] = {}
        for block, nodes in _stretches(graph, _Level(level, done)):
            try:
                stretch = _stretch(block, nodes, describe)
            except Unfit:
                continue
            forms.setdefault(stretch.form, []).append(stretch)
        for equal in forms.values():
            count = sum(1 for _ in equal[0].all_nodes())
            if (len(equal) - 1) * (count - 1) >= _LEAST_SAVED:  # each call costs as much as a node
                found.append(equal)
                done.update(node for stretch in equal for node in stretch.nodes)
    return found


def as_module(stretch: Stretch) -> fx.GraphModule:
    """Return the stretch as a graph of its own, which takes its operands and returns a tuple of its results."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for at, operand in enumerate(stretch.operands):
        copies[operand] = graph.placeholder(f"operand_{at}")
    for at, given in enumerate(stretch.objects):
        copies[given] = graph.get_attr(f"object_{at}")
    for node in stretch.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[result] for result in stretch.results))
    held: dict[str, Any] = {str(node.target): carried(node) for node in stretch.nodes if node.op == "get_attr"}
    held |= {f"object_{at}": value_of_object(given) for at, given in enumerate(stretch.objects)}
    return fx.GraphModule(held, graph)


class Call(NamedTuple):
    """A call `target(*constants, *operands)` in place of a stretch.

    It returns all results of the stretch, and then the new values of the operands that the stretch changes.
    """

    stretch: Stretch
    target: Callable[..., Any]
    constants: tuple[Any, ...]
    changed: tuple[int, ...]  # positions of these operands


def replace_by_calls(graph: fx.Graph, calls: Sequence[Call]) -> None:
    """Replace stretches by calls."""
    now: dict[fx.Node, fx.Node] = {}  # result of a stretch -> node that replaces it
    made: list[fx.Node] = []
    for stretch, target, constants, _ in calls:
        last = stretch.nodes[-1]
        with graph.inserting_before(stretch.nodes[0]):
            call = graph.call_function(target, constants)
            for at, result in enumerate(stretch.results):
                now[result] = graph.call_function(operator.getitem, (call, at))
                now[result].meta = dict(result.meta)
        call.meta = {key: last.meta[key] for key in ("stack_trace", "nn_module_stack") if key in last.meta}
        made.append(call)
    for call, (stretch, _, constants, changed) in zip(made, calls, strict=True):
        operands = [now.get(operand, operand) for operand in stretch.operands]
        call.args = (*constants, *operands)
        with graph.inserting_before(stretch.nodes[0]):
            for at, position in enumerate(changed, len(stretch.results)):
                value = graph.call_function(operator.getitem, (call, at))
                graph.call_method("copy_", (operands[position], value))
    for stretch, *_ in calls:
        for result in stretch.results:
            result.replace_all_uses_with(now[result])
    for node in reversed([node for stretch, *_ in calls for node in stretch.nodes]):
        graph.erase_node(node)


# --- which nodes belong together


def _stretches(graph: fx.Graph, level: _Level) -> Iterator[tuple[str, tuple[fx.Node, ...]]]:
    """Yield every block whose nodes are adjacent, with these nodes; not those that begin or end in changed modes."""
    runs: list[tuple[str, list[fx.Node]]] = [("", [])]
    unusual: set[int] = set()  # runs that begin or end in changed modes
    modes = _Modes()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        block = level.block(node)
        if block is None and _changes_modes(node):  # Dynamo records no module for these nodes
            block = level.next_block(node) if modes.usual else runs[-1][0]
        if (block or "") != runs[-1][0]:
            if not modes.usual:
                unusual |= {len(runs) - 1, len(runs)}
            runs.append((block or "", []))
        runs[-1][1].append(node)
        modes.after(node)
    times = Counter(block for block, _ in runs)
    for at, (block, nodes) in enumerate(runs):
        if block and times[block] == 1 and at not in unusual:
            yield block, tuple(nodes)


class _Level:
    """The blocks at one level of nested module lists."""

    def __init__(self, level: int, done: Container[fx.Node]) -> None:
        """done: nodes that belong to no block of this level, because they are part of an outer one."""
        self._level, self._done = level, done

    def block(self, node: fx.Node) -> str | None:
        """Return the member of a module list that contains the node's module; "" if none does, None if it is unknown.

        A call with nested graphs (a checkpoint), and the `getitem` nodes on its results, belong to the block of these
        graphs.
        """
        if node in self._done:
            return ""
        source = node.args[0] if node.target is operator.getitem else next(iter(node.users), None)
        caller = source if isinstance(source, fx.Node) and (node.target is operator.getitem or carried(node)) else node
        within = {found for inner in nodes_within(caller) if (found := self._block_of_module(inner)) is not None}
        if within:
            return within.pop() if len(within) == 1 else ""
        return self._block_of_module(node)

    def next_block(self, node: fx.Node) -> str:
        """Return the block of the next node whose module is known."""
        while node.op != "output":
            block = self.block(node)
            if block is not None:
                return block
            node = node.next
        return ""

    def _block_of_module(self, node: fx.Node) -> str | None:
        members = _members(node)
        return members[self._level] if self._level < len(members) else "" if module_path(node) else None


def _members(node: fx.Node) -> tuple[str, ...]:
    return members_of_lists(module_path(node))


class _Modes:
    """Modes that nodes change for later nodes: grad mode, autocast and vmap."""

    def __init__(self) -> None:
        self._gradients = True
        self._open = 0

    @property
    def usual(self) -> bool:
        """Whether all modes are as at the beginning of the graph."""
        return self._gradients and not self._open

    def after(self, node: fx.Node) -> None:
        """Apply the mode change of one node. Unfit for a node of unknown effect."""
        if not _changes_modes(node):
            return
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled" and isinstance(node.args[0], bool):
            self._gradients = node.args[0]
        elif name in _BEGINS:
            self._open += 1
        elif name in _ENDS:
            self._open -= 1
        elif name not in _HARMLESS:
            raise Unfit(f"{node.name} = {name or node.target} may change how later nodes are traced")


def _changes_modes(node: fx.Node) -> bool:
    """Whether a node may change modes: it returns no value to compute with, so it is called for its effect.

    An assignment to elements of a tensor returns none, either, but its effect is known.
    """
    if node.op not in ("call_function", "call_method") or node.target is operator.setitem:
        return False
    return not isinstance(node.meta.get("example_value"), Tensor | tuple | list | int | float)


# --- forms of stretches


class _Lines:
    """Converts nodes into hashable values that are equal for nodes that compute the same."""

    def __init__(self, nodes: Iterable[fx.Node], describe: Describe) -> None:
        self._numbers = {node: at for at, node in enumerate(nodes)}
        self._describe = describe
        self.operands: dict[fx.Node, int] = {}  # nodes from elsewhere -> number

    def number(self, node: fx.Node) -> int | None:
        """Return the position of `node` among the nodes; None for one from elsewhere."""
        return self._numbers.get(node)

    def line(self, node: fx.Node) -> Any:
        """Return the value of a node. Unfit for a node that is neither a call nor a nested graph."""
        if node.op == "get_attr":
            module = carried(node)
            if module is None:
                raise Unfit(f"{node.name} is a tensor attribute of the graph")
            return ("graph", _graph_lines(module, self._describe))
        if node.op not in ("call_function", "call_method"):
            raise Unfit(f"{node.name} is a {node.op}")
        names = self._describe(node)
        args = self.form(node.args) if names is None else (names, *map(self.form, node.all_input_nodes))
        return (node.op, node.target, args, self.form(node.kwargs))

    def form(self, value: Any) -> Any:
        """Return the value of an argument."""
        if isinstance(value, fx.Node):
            if value in self._numbers:
                return ("node", self._numbers[value])
            return ("operand", self.operands.setdefault(value, len(self.operands)))
        if isinstance(value, list | tuple):
            return (type(value).__name__, *map(self.form, value))
        if isinstance(value, Mapping):
            return ("dict", *((name, self.form(item)) for name, item in value.items()))
        if isinstance(value, slice):
            return ("slice", self.form(value.start), self.form(value.stop), self.form(value.step))
        return exactly(value)


def _graph_lines(module: fx.GraphModule, describe: Describe) -> Any:
    """Return the value of a nested graph. Metadata of its module (a checkpoint's policy) are compared by identity."""
    lines = _Lines(module.graph.nodes, describe)
    noted = tuple(sorted((str(key), id(value)) for key, value in module.meta.items()))
    body = [
        (node.op, lines.form(node.args)) if node.op in ("placeholder", "output") else lines.line(node)
        for node in module.graph.nodes
    ]
    return (noted, *body)


def _stretch(block: str, nodes: Sequence[fx.Node], describe: Describe) -> Stretch:
    lines = _Lines(nodes, describe)
    body = tuple(map(lines.line, nodes))
    results = tuple(node for node in nodes if any(lines.number(user) is None for user in node.users))
    taken = tuple(map(_described, lines.operands))
    given = tuple((lines.number(node), _described(node)) for node in results)
    whole = (body, taken, given)
    try:
        hash(whole)
    except TypeError as error:
        raise Unfit(f"{block} holds a constant that cannot be compared") from error
    if not any(node.meta["example_value"].requires_grad for node in results):
        raise Unfit(f"no result of {block} requires gradients")
    objects = [node for node in lines.operands if is_object(node)]
    operands = [node for node in lines.operands if not is_object(node)]
    return Stretch(block, tuple(nodes), tuple(operands), tuple(objects), results, whole)


def _described(node: fx.Node) -> tuple[Any, ...]:
    """Return the properties of a tensor that tracing depends on; for an object, its node.

    Unfit for other values, tensor subclasses and symbolic sizes.
    """
    if is_object(node):
        return (node,)
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or type(value) not in (FakeTensor, Tensor, torch.nn.Parameter):
        raise Unfit(f"{node.name} is a {type(value).__name__}")
    if value.layout != torch.strided:
        raise Unfit(f"{node.name} is {value.layout}")
    form = (*value.shape, *value.stride())
    if not all(isinstance(each, int) for each in form):
        raise Unfit(f"{node.name} has symbolic sizes")
    flags = (value.is_conj(), value.is_neg())
    return tuple(value.shape), value.stride(), value.dtype, value.device, flags, value.requires_grad
