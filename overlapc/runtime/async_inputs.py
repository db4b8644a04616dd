"""Results of collectives that nobody has waited for yet, as inputs of a compiled graph.

Outside of graphs a functional collective returns an `AsyncCollectiveTensor`, which waits when it is first used. Such
tensors reach a graph where tensor parallelism goes on across a graph break, or where each block is compiled by itself.
What they hold is no part of autograd's graph, and torch 2.13 hands just that to AOTAutograd: the input then seems to
need no gradient, and what was computed before the graph gets none. So they are waited for before, in sight of autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def not_waited_for(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the inputs that are such results."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is None:
        return ()
    return tuple(at for at, value in enumerate(inputs) if isinstance(value, collectives.AsyncCollectiveTensor))


def plain_examples(inputs: Sequence[Any], late: Sequence[int]) -> list[Any]:
    """`inputs` as the graph will see them: plain tensors in place of the `late` ones."""
    examples = list(inputs)
    for at in late:
        examples[at] = inputs[at].elem.detach().requires_grad_(inputs[at].requires_grad)
    return examples


def waits_first(step: Callable[..., Any], late: Sequence[int]) -> Callable[..., Any]:
    """`step`, with its `late` inputs waited for before it is called."""

    def call(*inputs: Any) -> Any:
        given = list(inputs)
        for at in late:
            given[at] = _Waited.apply(inputs[at])
        return step(*given)

    return call


class _Waited(torch.autograd.Function):
    """The tensor within, in whose place the gradient goes to what computed the outer one."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Tensor:
        waited: Tensor = value.trigger_wait()
        return waited

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
