"""A compiled forward and backward as one differentiable function, for graphs with nothing special about them.

AOTAutograd's own wrapper handles aliased outputs, mutated inputs and tensor subclasses; a graph that has none of these
needs only what is here. That costs the host less, and it can be rebuilt from a few numbers (`StepPlan`), so that a warm
start need not trace anything below Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlapc.errors import OverlapcError

Call = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Tangent:
    """The gradient that backward takes for one output, in the layout it was compiled for."""

    output: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def fitted(self, given: Tensor | None) -> Tensor:
        """`given`, which has another layout, copied into this one; zeros for None."""
        if given is None:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).zero_()
        if given.shape != self.size:
            raise OverlapcError(f"the gradient of output {self.output} has size {tuple(given.shape)}, not {self.size}")
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).copy_(given)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How a step's graphs are called: forward returns `outputs` results, then what it saves for backward."""

    outputs: int
    constant: tuple[int, ...]  # outputs without gradient
    tangents: tuple[Tangent, ...]
    trains: bool  # there is a backward
    autocast: bool  # autocast was on: it is in the graphs already, and must be off while they run


def step_function(plan: StepPlan, forward: Call, backward: Call) -> Callable[..., tuple[Any, ...]]:
    """`step(*inputs) -> outputs`, differentiable if `plan` trains.

    `forward` and `backward` take one list, which they empty.
    """
    if plan.autocast:
        forward, backward = _without_autocast(forward), _without_autocast(backward)
    if not plan.trains:
        return _without_gradient(forward)
    # Of a backward inside of a compiled function Dynamo would trace what is generated already.
    backward = torch._dynamo.disable(backward)
    outputs, constant = plan.outputs, plan.constant
    tangents = tuple((each.output, each.stride, each.dtype, each) for each in plan.tangents)

    class Step(torch.autograd.Function):
        boxed_grads_call = True  # torch 2.13 then lets go of the gradients that backward has read

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            results = forward(list(inputs))
            ctx.save_for_backward(*results[outputs:])
            ctx.set_materialize_grads(False)
            returned = tuple(results[:outputs])
            if constant:
                ctx.mark_non_differentiable(*(returned[at] for at in constant))
            return returned

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if len(grads) == 1 and isinstance(grads[0], list):
                (grads,) = grads
            arguments = list(ctx.saved_tensors)
            ctx.maybe_clear_saved_tensors()
            for output, stride, dtype, tangent in tangents:
                grad = grads[output]
                if grad is None or grad.stride() != stride or grad.dtype != dtype:
                    grad = tangent.fitted(grad)
                arguments.append(grad)
            grad = None  # nothing but `arguments` may hold it: backward frees what it has read
            if isinstance(grads, list):
                grads.clear()
            if torch.is_grad_enabled():  # create_graph=True
                return _Differentiated.apply(torch.empty(0, requires_grad=True), backward, arguments)
            return tuple(backward(arguments))

    torch._dynamo.disable(Step.backward, recursive=False)  # marks its code only: no wrapper
    # The engine calls these two in torch 2.11 to 2.13, which look `backward` up and call it. On a GPU that happens on
    # another thread than forward's: every Python function less spares a core some cold memory.
    for entry in ("apply", "apply_boxed"):
        setattr(Step._backward_cls, entry, Step.backward)
    # What `Step.apply` ends in. Before that it unwraps tensors that functorch left behind, which Dynamo's guards on
    # dispatch keys keep out, and asks whether functorch is at work, as we do.
    apply = super(torch.autograd.Function, Step).apply

    def step(*inputs: Any) -> tuple[Any, ...]:
        if torch._C._are_functorch_transforms_active():
            return Step.apply(*inputs)
        return apply(*inputs)

    return step


def _without_gradient(forward: Call) -> Callable[..., tuple[Any, ...]]:
    """Gradients are off in it: a parameter that only a `no_grad` block reads must not be recorded outside of it."""

    def step(*inputs: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return forward(list(inputs))
        torch._C._set_grad_enabled(False)
        try:
            return forward(list(inputs))
        finally:
            torch._C._set_grad_enabled(True)

    return step


class _Differentiated(torch.autograd.Function):
    """Gradients that say so when somebody differentiates them again."""

    @staticmethod
    def forward(ctx: Any, connected: Tensor, backward: Call, arguments: list[Any]) -> Any:
        return tuple(backward(arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise OverlapcError(
            "a compiled step was differentiated twice; compiled graphs have first derivatives only\n"
            "hint: leave the part that needs second derivatives out of torch.compile"
        )


def _without_autocast(call: Call) -> Call:
    def run(arguments: list[Any]) -> Any:
        with torch._C._DisableAutocast():
            return call(arguments)

    return run
