"""Steps that hold only for inputs at the same place in their memory, which neither Dynamo nor AOTAutograd guards.

Two kinds of programs compute with how far into its memory an input begins, and AOTAutograd traces that as a constant:
`as_strided` with an offset, in its gradient and where it is written to, and changes of an input that lies in one memory
with another. Called with inputs elsewhere, such a step would be wrong, so it runs eagerly then, as Dynamo captured it.
For a changed input AOTAutograd traces a copy that begins its own memory: `as_strided` with an offset is right only for
an input that does so, too. And it cannot trace changes of inputs in one memory whose sizes were symbols, but turned out
to be constant while Dynamo traced. Both kinds of graphs run eagerly from the start.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapc.runtime.counters import count


class InputPlaces:
    """Where the inputs of a graph lie in memory, as far as the graph computes with it."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        self._strided = set(_strided_memories(gm))
        self._inputs = _strided_inputs(inputs)
        self._in_memory: dict[int, list[int]] = {}  # positions of the inputs that lie in it
        for at, value in self._inputs.items():
            self._in_memory.setdefault(_memory(value), []).append(at)
        if not self._strided and len(self._in_memory) == len(self._inputs):
            self._inputs = {}
        self._examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]

    def why_eagerly(self) -> str | None:
        """Why no compiled step is right for these inputs, whatever they hold; None where one is."""
        for at, value in self._inputs.items():
            if value.storage_offset() and _changes(self._examples[at]) and self._read_by_strided(at):
                return (
                    "it changes an input that does not begin its memory, and reads it by as_strided with an offset,"
                    " which counts from there"
                )
            if self._changes_beside_another(at) and self._turned_constant(self._in_memory[_memory(value)]):
                return "it changes an input that shares memory with another, and torch cannot trace their sizes"
        return None

    def offsets(self) -> dict[int, int]:
        """Position -> elements of its memory before an input, where its place in memory was traced as a constant."""
        offsets: dict[int, int] = {}
        for at, value in self._inputs.items():
            counts = self._read_by_strided(at) and (value.requires_grad or _changes(self._examples[at]))
            if counts or self._changes_beside_another(at):
                offsets[at] = int(value.storage_offset())
        return offsets

    def _read_by_strided(self, at: int) -> bool:
        """Whether `as_strided` with an offset reads the input's memory."""
        example = self._examples[at]
        return None in self._strided or (isinstance(example, Tensor) and _memory(example) in self._strided)

    def _changes_beside_another(self, at: int) -> bool:
        return len(self._in_memory[_memory(self._inputs[at])]) > 1 and _changes(self._examples[at])

    def _turned_constant(self, group: Sequence[int]) -> bool:
        """Whether sizes of these inputs were symbols, and are numbers now."""
        examples = [self._examples[at] for at in group]
        numbers = [
            number for example in examples for number in (*example.shape, *example.stride(), example.storage_offset())
        ]
        if any(isinstance(number, torch.SymInt) and number.node.maybe_as_int() is None for number in numbers):
            return False
        return any(_was_symbolic(self._inputs[at], self._examples[at]) for at in group)


def always_eagerly(eager: GraphModule, reason: str) -> Callable[..., Any]:
    """`eager`, with one warning."""
    warned = _Warning()

    def call(*inputs: Any) -> Any:
        warned.give(f"overlapc runs a graph eagerly: {reason}")
        return eager(*inputs)

    return call


def eagerly_elsewhere(step: Callable[..., Any], eager: GraphModule, offsets: Mapping[int, int]) -> Callable[..., Any]:
    """`step` for inputs at these offsets; for others `eager`, the same computation op by op."""
    warned = _Warning()

    def call(*inputs: Any) -> Any:
        for at, offset in offsets.items():
            if inputs[at].storage_offset() != offset:
                break
        else:
            return step(*inputs)
        warned.give(
            f"overlapc runs a call eagerly: it was compiled for an input that begins {offset} elements into its"
            f" memory, and this one begins at {inputs[at].storage_offset()}. as_strided with an offset, or a change"
            " of an input that shares memory with another, computes with that"
        )
        return eager(*inputs)

    return call


class _Warning:
    """Counts eager calls of one step, and warns of the first."""

    def __init__(self) -> None:
        self.given = False

    def give(self, reason: str) -> None:
        count("calls_run_eagerly_for_offsets")
        if not self.given:
            self.given = True
            hint = "give the compiled function the whole tensor, and slice it there"
            warnings.warn(f"{reason}\nhint: {hint}", stacklevel=3)


def _strided_inputs(inputs: Sequence[Any]) -> dict[int, Tensor]:
    return {
        at: value
        for at, value in enumerate(inputs)
        if isinstance(value, Tensor)
        and not is_traceable_wrapper_subclass(value)
        and value.layout == torch.strided
        and isinstance(value.storage_offset(), int)
    }


def _was_symbolic(value: Tensor, example: Tensor) -> bool:
    """Whether a tensor is still marked as one of symbolic sizes; AOTAutograd makes the example of a view anew."""
    return example._has_symbolic_sizes_strides and not value._is_view()


def _changes(example: Any) -> bool:
    """Whether the graph changes the memory of an input: Dynamo did so with its example."""
    return isinstance(example, Tensor) and example._version > 0


def _strided_memories(gm: GraphModule) -> Iterator[int | None]:
    """The memory that each `as_strided` with an offset counts in; None for that of a graph within `gm`: unknown."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if _counts_from_the_start(node):
                    example = node.args[0].meta.get("example_value")
                    known = module is gm and isinstance(example, Tensor) and not is_traceable_wrapper_subclass(example)
                    yield _memory(example) if known else None


def _counts_from_the_start(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if not str(name).startswith("as_strided") or not node.args or not isinstance(node.args[0], Node):
        return False
    at = 4 if "scatter" in str(name) else 3
    given = node.args[at] if len(node.args) > at else node.kwargs.get("storage_offset")
    return given is not None


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
