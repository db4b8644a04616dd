"""Copies the traced graph of one block into the joint graph of the step, once for every equal block.

The joint graph of a block holds its forward, then its backward. Both parts of a copy are in one graph, so backward
simply reads the values of forward; which values are saved or recomputed is decided later, for the whole step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg

from overlapc.fx.arguments import declared_arguments, is_written
from overlapc.fx.comm.labels import KEY
from overlapc.fx.equal_layers.blocks import Stretch, Unfit
from overlapc.fx.node_writer import described_like, fake_result
from overlapc.fx.versions.graphs import belongs_to_backward
from overlapc.fx.versions.tensors import fake_like

_NUMBER = re.compile(r"_\d+$")
_CHECKPOINT = "ac_graph_id"  # where torch notes which call of a checkpoint a node belongs to
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
aten = torch.ops.aten


@dataclass(frozen=True)
class TracedBackward:
    """Backward of a block, for tangents with certain strides."""

    tangents: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]  # by operand
    forward: tuple[fx.Node, ...]  # operands and forward of the trace that it is part of

    def fits(self, tangents: Sequence[Tensor]) -> bool:
        """Whether it was traced with the strides of `tangents`."""
        pairs = zip(self.tangents, tangents, strict=True)
        return all(traced.meta["val"].stride() == tangent.stride() for traced, tangent in pairs)


@dataclass(frozen=True)
class TracedBlock:
    """Forward and backward of a block as AOTAutograd traced them."""

    operands: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]  # the last ones are the new values of operands that it changes
    differentiable: tuple[bool, ...]  # by result
    changed: tuple[int, ...]  # positions of these operands
    backwards: tuple[TracedBackward, ...]  # the last one is for tangents with other strides, which are copied
    constants: Mapping[str, Tensor]  # tensors that its nodes read from the graph's module, by attribute

    @classmethod
    def of(cls, joint: fx.Graph, forward_results: int, differentiable: Sequence[bool], name: str) -> TracedBlock:
        """Take a joint graph apart. Unfit unless it only computes results from operands and gradients from tangents.

        It may copy results to operands without gradients (buffers) in the end.

        name: what its constants are called in the graph of the step, with their own names appended.
        """
        placeholders = joint.find_nodes(op="placeholder")
        tangents = tuple(node for node in placeholders if "tangents" in node.name)
        operands = tuple(node for node in placeholders if "tangents" not in node.name)
        writes = [
            node
            for node in joint.find_nodes(op="call_function", target=aten.copy_.default)
            if node.args[0] in operands and not belongs_to_backward(node)
        ]
        skipped = {*placeholders, *writes, joint.output_node()}
        nodes = [node for node in joint.nodes if node not in skipped]
        returned: Any = joint.output_node().args[0]
        results, gradients = tuple(returned[:forward_results]), tuple(returned[forward_results:])
        if len(results) != len(differentiable) or len(tangents) != sum(differentiable):
            raise Unfit("it returns views, or changes its inputs")
        if len(gradients) != len(operands):
            raise Unfit("its joint graph returns more than results and gradients")
        changed = tuple(operands.index(node.args[0]) for node in writes)
        if any(gradients[at] is not None for at in changed):
            raise Unfit("it changes an input that has a gradient")
        results = (*results, *(node.args[1] for node in writes))
        constants: dict[str, Tensor] = {}
        for node in nodes:
            constant = getattr(joint.owning_module, str(node.target)) if node.op == "get_attr" else None
            if type(constant) is Tensor:
                node.target = name + str(node.target)
                constants[node.target] = constant
                continue
            if node.op != "call_function":
                raise Unfit(f"its graph holds a {node.op}")
            if any(is_written(declared) for declared, _ in declared_arguments(node.target, node.args, node.kwargs)):
                raise Unfit(f"{node.target} changes memory")
            if not is_plain(node.meta.get("val")):
                raise Unfit(f"{node.target} returns a {type(node.meta.get('val')).__name__}")
        for node in results:
            if not isinstance(node, fx.Node) or any(_shares(node, operand) for operand in operands):
                raise Unfit("it returns an input, or a view of one")
        within = set(tangents)
        first = len(nodes)
        for at, node in enumerate(nodes):
            if belongs_to_backward(node) or not within.isdisjoint(node.all_input_nodes):
                first = at
                break
        forward, backward = tuple(nodes[:first]), tuple(nodes[first:])
        if not set(results) <= set(forward):
            raise Unfit("its results are computed in backward")
        whole = TracedBackward(tangents, backward, gradients, (*operands, *forward))
        flags = (*differentiable, *(False for _ in changed))
        return cls(operands, forward, results, flags, changed, (whole,), constants)

    @property
    def takes_contiguous_tangents(self) -> bool:
        """Whether the last trace has contiguous tangents: a tangent with other strides can then be copied."""
        return all(node.meta["val"].is_contiguous() for node in self.backwards[-1].tangents)

    def with_backward_of(self, other: TracedBlock) -> TracedBlock:
        """Add the backward of another trace, for tangents with other strides. Unfit if its forward differs."""
        added = other.backwards[0]
        pairs = zip(self.backwards[0].forward, added.forward, strict=False)
        if len(self.forward) != len(other.forward) or any(ours.name != theirs.name for ours, theirs in pairs):
            raise Unfit("its forward depends on the strides of its gradients")
        constants = {**self.constants, **other.constants}
        return replace(self, backwards=(*self.backwards, added), constants=constants)

    def backward_for(self, tangents: Sequence[Tensor]) -> TracedBackward:
        """Return the backward for tangents with these strides."""
        return next((each for each in self.backwards if each.fits(tangents)), self.backwards[-1])


@dataclass(frozen=True)
class Names:
    """A mapping from the traced block's names of modules and parameters to those of another block."""

    stacks: Mapping[tuple[str, ...], Any]  # paths of the traced block's modules -> modules of this one
    notes: Mapping[str, Mapping[str, Any]]  # `custom` entries, by their text
    labels: Mapping[str, Any]  # parameter -> label

    @classmethod
    def of(cls, traced: Stretch, this: Stretch, label: Callable[[fx.Node], Mapping[str, Any] | None]) -> Names:
        """Map names of `traced` to those of `this`, a stretch of the same form.

        label: returns the label of the parameter that a node names; None if it names none.
        """
        stacks: dict[tuple[str, ...], Any] = {}
        notes: dict[str, Mapping[str, Any]] = {}
        labels: dict[str, Any] = {}
        for theirs, ours in zip(traced.all_nodes(), this.all_nodes(), strict=True):
            stack = theirs.meta.get("nn_module_stack")
            if stack:
                stacks[_paths(stack)] = ours.meta.get("nn_module_stack")
            note = theirs.meta.get("custom")
            if note:
                notes[_text(note)] = ours.meta.get("custom") or {}
            known = label(theirs)
            if known is not None:
                labels[known["param"]] = label(ours)
        return cls(stacks, notes, labels)

    def rename(self, meta: dict[str, Any]) -> None:
        """Replace the traced block's names by this block's in the metadata of a copied node."""
        for key in _STACKS:
            if meta.get(key):
                meta[key] = self.stacks.get(_paths(meta[key]), meta[key])
        custom = meta.get("custom")
        if isinstance(custom, Mapping) and custom:
            rest = {key: value for key, value in custom.items() if key != KEY}
            renamed = dict(self.notes.get(_text(rest), rest))
            if KEY in custom:
                renamed[KEY] = self.labels.get(custom[KEY]["param"], custom[KEY])
            meta["custom"] = renamed


class FakesAlike:
    """Makes fake tensors like traced ones: two share memory if and only if the traced ones do."""

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        """mode: of the tensors to make; default: that of each traced one."""
        self._mode = mode
        # Storage of a traced tensor -> a tensor in the storage made for it, and how much larger offsets are there.
        self._memory: dict[int, tuple[Tensor | None, Any]] = {}

    def bind(self, traced: Tensor, given: Tensor) -> None:
        """Take `given` for `traced`, and its memory for that of `traced`."""
        self._memory[traced.untyped_storage()._cdata] = given, given.storage_offset() - traced.storage_offset()

    def like(self, traced: FakeTensor) -> FakeTensor:
        memory = traced.untyped_storage()._cdata
        base, shift = self._memory.get(memory, (None, 0))
        made = fake_like(traced, base, shift, self._mode)
        self._memory.setdefault(memory, (made, 0))
        return made


class Stamp:
    """One copy of a traced block: its forward, and then its backward, each appended to a graph."""

    def __init__(self, block: TracedBlock, names: Names, number: Any) -> None:
        """number: identifies this copy among all copies."""
        self._block, self._names, self._number = block, names, number
        self._copies: dict[fx.Node, fx.Node] = {}
        self._fakes = FakesAlike()

    def forward(self, graph: fx.Graph, operands: Sequence[fx.Node]) -> list[fx.Node]:
        """Append forward to `graph`; return its results."""
        for traced, operand in zip(self._block.operands, operands, strict=True):
            self._bind(traced, operand)
        self._append(graph, self._block.forward)
        return [self._copies[node] for node in self._block.results]

    def backward(self, graph: fx.Graph, tangents: Sequence[fx.Node]) -> list[fx.Node]:
        """Append backward to `graph`; return the gradients that are not None, in the order of operands."""
        backward = self._block.backward_for([tangent.meta["val"] for tangent in tangents])
        for traced, node in zip(backward.forward, self._block.backwards[0].forward, strict=True):
            if traced is not node:
                self._bind(traced, self._copies[node])
        for traced, tangent in zip(backward.tangents, tangents, strict=True):
            self._bind(traced, _laid_out_like(traced, tangent, graph))
        self._append(graph, backward.nodes)
        return [self._copies[node] for node in backward.gradients if node is not None]

    def _bind(self, traced: fx.Node, given: fx.Node) -> None:
        self._copies[traced] = given
        if isinstance(traced.meta["val"], Tensor):
            self._fakes.bind(traced.meta["val"], given.meta["val"])

    def _append(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            copied = append_copy(graph, node, self._copies)
            self._names.rename(copied.meta)
            copied.meta["val"] = self._value(node.meta.get("val"))
            if _CHECKPOINT in copied.meta:
                copied.meta[_CHECKPOINT] = (self._number, copied.meta[_CHECKPOINT])

    def _value(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._value, value))
        return self._fakes.like(value) if isinstance(value, FakeTensor) else value


def number_checkpoints(graph: fx.Graph) -> None:
    """Number checkpoints in the order of forward, as torch's partitioner expects."""
    numbers: dict[Any, int] = {}
    for node in graph.nodes:
        if _CHECKPOINT in node.meta:
            node.meta[_CHECKPOINT] = numbers.setdefault(node.meta[_CHECKPOINT], len(numbers))


def append_copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Append a copy of `node` to `graph` that reads `copies`, and add it to these.

    The copy gets the name that torch's tracing would give it, with numbers in graph order. The names of collectives are
    therefore the same in graphs of the same function that were traced without folding (with symbolic sizes).
    """
    name = node.name if node.op == "placeholder" else _NUMBER.sub("", node.name)
    args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
    copied = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    copied.meta = dict(node.meta)
    copies[node] = copied
    return copied


def _laid_out_like(traced: fx.Node, given: fx.Node, graph: fx.Graph) -> fx.Node:
    """Return tangent `given` in the layout that backward was traced with, copied if needed; Unfit if a copy differs."""
    expected, value = traced.meta["val"], given.meta["val"]
    if expected.stride() == value.stride():
        return given
    if not expected.is_contiguous():
        raise Unfit("a gradient has another layout than it was traced with")
    copied = graph.call_function(aten.clone.default, (given,), {"memory_format": torch.contiguous_format})
    copied.meta = described_like(given)
    copied.meta["val"] = fake_result(copied)
    return copied


def is_plain(value: Any) -> bool:
    """Whether a node's value is None, an integer, or fake tensors that sizes, strides and offsets describe in full."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if type(value) is FakeTensor:
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        odd = value.layout != torch.strided or value.is_conj() or value.is_neg()
        return not odd and all(isinstance(each, int) for each in sizes)
    return value is None or type(value) is int  # attention ops on GPUs also return sequence lengths as integers


def _shares(node: fx.Node, other: fx.Node) -> bool:
    memory = [each.meta["val"].untyped_storage()._cdata for each in (node, other)]
    return memory[0] == memory[1]


def _paths(stack: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(path for path, _ in stack.values())


def _text(note: Mapping[str, Any]) -> str:
    return repr(sorted((key, repr(value)) for key, value in note.items() if key != KEY))
