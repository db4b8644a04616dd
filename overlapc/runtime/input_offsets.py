"""Steps that are valid only for certain places of inputs in their storages, which nothing in torch guards.

Two kinds of programs depend on an input's storage offset, and AOTAutograd traces it as a constant: `as_strided` with an
offset, in its gradient and where it is written to, and changes of an input that shares memory with another input. For
the latter AOTAutograd traces the tensor that both are views of, with its sizes. Called with inputs at other places, the
compiled step would be wrong, so the call then runs eagerly the graph that Dynamo captured.

Three kinds of graphs always run eagerly. For a changed input AOTAutograd traces a copy with offset 0, so `as_strided`
with an offset is right only for inputs that have offset 0, too. And AOTAutograd cannot trace changes of inputs that
share memory if their sizes were symbolic and turned out to be constant while Dynamo traced, or if autograd does not
record either as a view of the other: it refuses these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapc.runtime.counters import count

HINT = "pass the whole tensor to the compiled function, and slice it there"
# A part of AOTAutograd's error -> why the graph that it refuses has to run eagerly.
_UNTRACEABLE = {
    "non-differentiable view input mutations": "it modifies an input that shares memory with another input, and"
    " autograd does not record either as a view of the other",
    "aliased inputs that are mutated": "it modifies an input that shares memory with another input, which torch cannot"
    " trace in a graph that also takes or returns DTensors",
}


@dataclass(frozen=True, slots=True)
class InputPlace:
    """Where an input lies in its storage, as far as that was traced as constants."""

    offset: int  # in elements
    memory: tuple[int | None, ...] | None = None  # see `_memory_form`; None for a symbolic number, or if none counts

    def difference(self, value: Tensor) -> str:
        """Return how the place of another input differs; "" if it does not."""
        if value.storage_offset() != self.offset:
            return f"an input with storage offset {self.offset}, and this input has {value.storage_offset()}"
        if self.memory is None:
            return ""
        form = _memory_form(value, value)
        same = len(form) == len(self.memory) and all(
            known in (None, number) for known, number in zip(self.memory, form, strict=True)
        )
        return "" if same else "an input that is part of a tensor or storage of another size or layout"


class InputPlaces:
    """The storage offsets and shared memory of a graph's inputs, as far as the graph depends on them."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        self._strided = set(_strided_memories(gm))
        self._inputs = _strided_inputs(inputs)
        self._in_memory: dict[int, list[int]] = {}  # memory -> positions of the inputs that lie in it
        for at, value in self._inputs.items():
            self._in_memory.setdefault(_memory(value), []).append(at)
        if not self._strided and len(self._in_memory) == len(self._inputs):
            self._inputs = {}
        self._examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]

    def why_eagerly(self) -> str | None:
        """Return why no compiled step is right for these inputs, whatever their values; None if one can be."""
        for at, value in self._inputs.items():
            if value.storage_offset() and self._read_by_strided(at) and self._changes(at):
                return (
                    "it modifies an input whose storage offset is not 0, and reads it by as_strided with an offset,"
                    " which counts from the beginning of the storage"
                )
            if self._changes_beside_another(at) and self._untraceable(self._in_memory[_memory(value)]):
                return "it modifies an input that shares memory with another input, and torch cannot trace their sizes"
        return None

    def constant(self) -> dict[int, InputPlace]:
        """Return position -> place of the inputs whose places were traced as constants."""
        places: dict[int, InputPlace] = {}
        for at, value in self._inputs.items():
            offset = int(value.storage_offset())
            if self._changes_beside_another(at):
                numbers = _memory_form(value, self._examples[at])
                places[at] = InputPlace(offset, tuple(each if isinstance(each, int) else None for each in numbers))
            elif self._read_by_strided(at) and (value.requires_grad or self._changes(at)):
                places[at] = InputPlace(offset)
        return places

    def _read_by_strided(self, at: int) -> bool:
        """Whether `as_strided` with an offset reads the input's memory."""
        example = self._examples[at]
        return None in self._strided or (isinstance(example, Tensor) and _memory(example) in self._strided)

    def _changes_beside_another(self, at: int) -> bool:
        return len(self._in_memory[_memory(self._inputs[at])]) > 1 and self._changes(at)

    def _changes(self, at: int) -> bool:
        """Whether the graph changes an input in place: then Dynamo changed its example, too.

        torch sets the memory of some examples after it has made them, which counts as one version, too.
        """
        example = self._examples[at]
        if not isinstance(example, Tensor) or example._version == 0:
            return False
        return example._version > FakeTensorMode().from_tensor(self._inputs[at])._version

    def _untraceable(self, group: Sequence[int]) -> bool:
        """Whether sizes of these inputs were symbolic and are constant now; or, where none of them is a view, whether
        the size of their storage is symbolic."""
        examples = [self._examples[at] for at in group]
        if not any(self._inputs[at]._is_view() for at in group):
            return isinstance(examples[0].untyped_storage().nbytes(), torch.SymInt)
        numbers = [
            number for example in examples for number in (*example.shape, *example.stride(), example.storage_offset())
        ]
        if any(isinstance(number, torch.SymInt) and number.node.maybe_as_int() is None for number in numbers):
            return False
        return any(_was_symbolic(self._inputs[at], self._examples[at]) for at in group)


def why_untraceable(error: Exception) -> str | None:
    """Return why AOTAutograd refuses a graph whose inputs share memory; None if the error is another one."""
    return next((reason for text, reason in _UNTRACEABLE.items() if text in str(error)), None)


def always_eagerly(eager: GraphModule, reason: str, hint: str = HINT) -> Callable[..., Any]:
    """Return a function that runs `eager`, and warns once."""
    warned = _Warning(hint)

    def call(*inputs: Any) -> Any:
        warned.give(f"overlapc runs a graph eagerly: {reason}")
        return eager(*inputs)

    return call


def eagerly_elsewhere(
    step: Callable[..., Any], eager: GraphModule, places: Mapping[int, InputPlace]
) -> Callable[..., Any]:
    """Return a function that runs `step` for inputs at these places, and else `eager`: the same, op by op."""
    warned = _Warning(HINT)

    def call(*inputs: Any) -> Any:
        difference = next(filter(None, (place.difference(inputs[at]) for at, place in places.items())), "")
        if not difference:
            return step(*inputs)
        warned.give(
            f"overlapc runs a call eagerly: the graph was compiled for {difference}. The result depends on it, because"
            " the graph calls as_strided with an offset, or modifies an input that shares memory with another input"
        )
        return eager(*inputs)

    return call


class _Warning:
    """Counts the eager calls of one step, and warns at the first."""

    def __init__(self, hint: str) -> None:
        self.hint = hint
        self.given = False

    def give(self, reason: str) -> None:
        count("calls_run_eagerly")
        if not self.given:
            self.given = True
            warnings.warn(f"{reason}\nhint: {self.hint}", stacklevel=3)


def _strided_inputs(inputs: Sequence[Any]) -> dict[int, Tensor]:
    return {
        at: value
        for at, value in enumerate(inputs)
        if isinstance(value, Tensor)
        and not is_traceable_wrapper_subclass(value)
        and value.layout == torch.strided
        and isinstance(value.storage_offset(), int)
    }


def _memory_form(value: Tensor, example: Tensor) -> tuple[Any, ...]:
    """Return the sizes and strides of the tensor that `value` is a view of, or else the bytes of its storage.

    example: the tensor in place of `value` that was traced; its storage may be smaller.
    """
    base = value._base
    return (example.untyped_storage().nbytes(),) if base is None else (*base.shape, *base.stride())


def _was_symbolic(value: Tensor, example: Tensor) -> bool:
    """Whether a tensor is still marked as having symbolic sizes; AOTAutograd recreates the example of a view."""
    return example._has_symbolic_sizes_strides and not value._is_view()


def _strided_memories(gm: GraphModule) -> Iterator[int | None]:
    """Yield the memory that each `as_strided` with an offset reads; None (unknown) inside nested graphs of `gm`."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                whole = _strided_from_the_start(node)
                if whole is not None:
                    example: Any = whole.meta.get("example_value")
                    known = module is gm and isinstance(example, Tensor) and not is_traceable_wrapper_subclass(example)
                    yield _memory(example) if known else None


def _strided_from_the_start(node: Node) -> Node | None:
    """Return the tensor of an `as_strided` with an offset, which counts from the start of the tensor's storage."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if not str(name).startswith("as_strided"):
        return None
    whole = node.args[0] if node.args else node.kwargs.get("input")
    at = 4 if "scatter" in str(name) else 3
    given = node.args[at] if len(node.args) > at else node.kwargs.get("storage_offset")
    return whole if isinstance(whole, Node) and given is not None else None


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
