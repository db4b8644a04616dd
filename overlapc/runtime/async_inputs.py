"""Results of collectives in flight that are inputs of a compiled graph.

In eager code a functional collective returns an `AsyncCollectiveTensor`, which waits when it is first used. A compiled
graph receives these tensors, alone or inside a DTensor, where tensor parallelism continues across a graph break or each
block is compiled by itself. The graph reads the memory of the tensor inside, where the result may not have arrived.

The tensor inside a bare `AsyncCollectiveTensor` is not part of autograd's graph, and torch 2.13 passes just that tensor
to AOTAutograd: the input then seems to need no gradient, and earlier computations get none. So the step waits for it
first, recorded by autograd. For a collective inside another tensor, autograd knows only the outer tensor, which stays;
inside it the collective is replaced by its result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def not_waited_for(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the inputs that are themselves results in flight."""
    kind = _async_tensor_type()
    return () if kind is None else tuple(at for at, value in enumerate(inputs) if isinstance(value, kind))


def tensors_of_tensors(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the other inputs that hold tensors, as DTensors do, and may hold results in flight."""
    kind = _async_tensor_type()
    if kind is None:
        return ()
    return tuple(
        at for at, value in enumerate(inputs) if is_traceable_wrapper_subclass(value) and not isinstance(value, kind)
    )


def _async_tensor_type() -> Any:
    """Return the class AsyncCollectiveTensor; None in a process that has not imported functional collectives."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    return None if collectives is None else collectives.AsyncCollectiveTensor


def plain_examples(inputs: Sequence[Any], late: Sequence[int]) -> list[Any]:
    """Return `inputs` as the graph will see them: plain tensors in place of those at the positions `late`."""
    examples = list(inputs)
    contexts = _contexts()
    for at in late:
        given = inputs[at]
        examples[at] = given.elem.detach().requires_grad_(given.requires_grad)
        context = contexts.get(given)
        if context is not None:  # it says which sizes Dynamo made symbolic
            contexts[examples[at]] = context.inner_contexts["elem"]
    return examples


def _contexts() -> Any:
    """Return Dynamo's mapping from each traced input tensor to its tracing context."""
    found = torch._guards.TracingContext.try_get()
    return {} if found is None else found.tensor_to_context


@contextmanager
def arrived(examples: Sequence[Any], within: Iterable[int]) -> Iterator[None]:
    """Replace the collectives inside the tensors at the positions `within` by their results while a graph is traced.

    Afterwards the tensors hold the collectives again, because Dynamo checks the guards that it has just made on them.
    """
    contexts = _contexts()
    before: list[tuple[Any, str, Any]] = []
    noted: list[tuple[Any, Any]] = []
    for at in within:
        held = list(_collectives_in(examples[at]))
        if not held:
            continue
        before += held
        context = contexts.get(examples[at])
        if context is not None:
            noted.append((examples[at], context))
            contexts[examples[at]] = _arrived_context(examples[at], context)
        wait_within(examples[at])
    try:
        yield
    finally:
        for holder, name, collective in before:
            setattr(holder, name, collective)
        for example, context in noted:
            contexts[example] = context


def _arrived_context(value: Any, context: Any) -> Any:
    """Return Dynamo's tracing context of `value` with each collective inside it replaced by its result."""
    kind = _async_tensor_type()
    inner = dict(context.inner_contexts)
    for name in value.__tensor_flatten__()[0]:
        part = getattr(value, name)
        if isinstance(part, kind):
            inner[name] = inner[name].inner_contexts["elem"]
        elif is_traceable_wrapper_subclass(part):
            inner[name] = _arrived_context(part, inner[name])
    return replace(context, inner_contexts=inner)


def _collectives_in(value: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (holder, attribute, collective) for each collective inside `value`, at any depth."""
    kind = _async_tensor_type()
    for name in value.__tensor_flatten__()[0]:
        part = getattr(value, name)
        if isinstance(part, kind):
            yield value, name, part
        elif is_traceable_wrapper_subclass(part):
            yield from _collectives_in(part)


def _tensors_in(value: Any) -> tuple[str, ...]:
    """Return the names of the attributes of `value` that are tensors."""
    return tuple(name for name in value.__tensor_flatten__()[0] if isinstance(getattr(value, name), Tensor))


def wait_within(value: Any) -> None:
    """Wait for each collective inside `value` and replace it by its result."""
    for holder, name, collective in list(_collectives_in(value)):
        setattr(holder, name, collective.trigger_wait())


def waits_first(step: Callable[..., Any], late: Sequence[int], within: Sequence[int]) -> Callable[..., Any]:
    """Return `step` preceded by a wait for its `late` inputs and for collectives inside those at `within`."""
    held: list[tuple[int, tuple[str, ...]]] | None = None

    def call(*inputs: Any) -> Any:
        nonlocal held
        if held is None:
            held = [(at, _tensors_in(inputs[at])) for at in within]
        for at, names in held:
            value = inputs[at]
            for name in names:
                if type(getattr(value, name)) is not Tensor:  # most hold plain tensors, and there may be hundreds
                    wait_within(value)
        if not late:
            return step(*inputs)
        given = list(inputs)
        for at in late:
            given[at] = _Waited.apply(inputs[at])
        return step(*given)

    return call


class _Waited(torch.autograd.Function):
    """Return the tensor inside an AsyncCollectiveTensor; the gradient flows to what computed the outer tensor."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Tensor:
        waited: Tensor = value.trigger_wait()
        return waited

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
