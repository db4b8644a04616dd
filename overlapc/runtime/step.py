"""A compiled forward and backward as one differentiable function, for graphs without special inputs or outputs.

AOTAutograd's own wrapper handles aliased outputs, inputs whose memory is replaced, and tensor subclasses. A graph that
has none of these needs only this module, which costs less host time and can be rebuilt from a few numbers (`StepPlan`),
so that a warm start need not trace anything below Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.decorators import skip

from overlapc.errors import OverlapcError
from overlapc.runtime.tangents import SizedTangent, Tangent

if TYPE_CHECKING:  # a step of plain tensors does not import DTensor
    from overlapc.runtime.dtensors import Borders

Call = Callable[[list[Any]], Any]
Step = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How to call a step's graphs: forward returns `outputs` results, then what it saves for backward."""

    outputs: int
    constant: tuple[int, ...]  # outputs without gradient
    tangents: tuple[Tangent | SizedTangent, ...]
    trains: bool  # whether there is a backward
    autocast: bool  # autocast was on: the graphs contain its casts already, and it must be off while they run
    changed: tuple[int, ...] = ()  # inputs that a graph changes in place
    detached: tuple[int, ...] = ()  # inputs that other autograd nodes computed and that get no gradient
    sizes: int = 0  # number of symbolic sizes: saved last by forward, the first arguments of backward
    objects: int = 0  # number of meshes of DTensors: saved by forward before the sizes, passed after saved tensors
    dynamic: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (output, its dims of symbolic size)
    deterministic: bool = True  # whether backward may run under torch.use_deterministic_algorithms
    borders: Borders | None = None  # for a cached step that takes DTensors
    communicates: bool = False  # whether forward or backward communicates

    def of_static_sizes(self) -> bool:
        """Whether no size of the step is symbolic."""
        return not self.sizes and not self.dynamic and all(isinstance(each, Tangent) for each in self.tangents)


def step_function(
    plan: StepPlan, forward: Call, backward: Call, mark_dynamic: Callable[[Tensor, Iterable[int]], None] | None = None
) -> Step:
    """Return `step(*inputs) -> outputs`, which is differentiable if `plan` trains.

    `forward` and `backward` take one list, which they empty. `mark_dynamic` is called for the outputs in
    `plan.dynamic`.
    """
    if plan.autocast:
        forward, backward = _without_autocast(forward), _without_autocast(backward)
    step = _differentiable(plan, forward, backward) if plan.trains else _without_gradient(forward)
    if plan.changed or plan.detached:
        step = _prepared(step, plan.changed, plan.detached)
    if plan.dynamic:
        assert mark_dynamic is not None
        step = _marked(step, plan.dynamic, mark_dynamic)
    return step


def _differentiable(plan: StepPlan, forward: Call, backward: Call) -> Step:
    outputs, constant, deterministic = plan.outputs, plan.constant, plan.deterministic
    sizes, objects = plan.sizes, plan.objects
    materializes = any(isinstance(each, SizedTangent) for each in plan.tangents)  # autograd knows their sizes
    tangents = tuple((each.output, each.stride, each.dtype, each) for each in plan.tangents)

    class Step(torch.autograd.Function):
        boxed_grads_call = True  # torch 2.13 then releases gradients that backward has read

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            results = forward(list(inputs))
            if sizes:
                ctx.sizes = results[-sizes:]
                results = results[:-sizes]
            if objects:
                ctx.objects = results[-objects:]
                results = results[:-objects]
            ctx.save_for_backward(*results[outputs:])
            if not materializes:
                ctx.set_materialize_grads(False)
            returned = tuple(results[:outputs])
            if constant:
                ctx.mark_non_differentiable(*(returned[at] for at in constant))
            return returned

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if len(grads) == 1 and isinstance(grads[0], list):
                (grads,) = grads
            if torch._C._are_functorch_transforms_active():
                raise OverlapcError(_TRANSFORMED)
            if not deterministic and torch._C._get_deterministic_algorithms():
                raise OverlapcError(_NOT_DETERMINISTIC)
            arguments = list(ctx.saved_tensors)
            ctx.maybe_clear_saved_tensors()
            if objects:
                arguments += ctx.objects
            for output, stride, dtype, tangent in tangents:
                grad = grads[output]
                if type(grad) is not Tensor or grad.stride() != stride or grad.dtype != dtype:
                    grad = tangent.fitted(grad)
                arguments.append(grad)
            grad = None  # only `arguments` may hold gradients: backward frees those that it has read
            if isinstance(grads, list):
                grads.clear()
            if sizes:
                arguments[:0] = ctx.sizes
            # If backward runs inside a compiled function, Dynamo would trace code that is generated already. The
            # setting is per thread, and `set_eval_frame` hands over the reference to the previous one, as in Dynamo.
            evaluates = set_eval_frame(None)
            try:
                if torch.is_grad_enabled():  # create_graph=True
                    return _Differentiated.apply(backward, torch.empty(0, requires_grad=True), *arguments)
                return backward(arguments)
            finally:
                if evaluates is not None:
                    set_eval_frame(evaluates)

    skip(Step.backward)  # only marks the code object: adds no wrapper
    # In torch 2.11 to 2.13 autograd's engine calls these two functions, which look up `backward` and call it. On a GPU
    # this happens on another thread than forward, where each Python function costs cache misses, so call it directly.
    # The engine looks up the names at each call, on a class that belongs to this step only.
    for entry in ("apply", "apply_boxed"):
        setattr(Step._backward_cls, entry, Step.backward)
    # `Step.apply` ends in this call. Before it, `apply` unwraps dead functorch tensors, which Dynamo's guards on
    # dispatch keys exclude, and checks whether functorch is active: then Dynamo runs the original code, not this step.
    return _with_gradient(super(torch.autograd.Function, Step).apply)


_TRANSFORMED = (
    "the backward of a compiled step was called inside a transform of torch.func (such as grad or vmap), which cannot"
    " transform a compiled backward\nhint: apply the transform inside the function that is given to torch.compile"
)
_NOT_DETERMINISTIC = (
    "torch.use_deterministic_algorithms is on in the backward of a step, but was off when the step was compiled\n"
    "hint: turn it on before the forward, or off for the backward"
)


def _with_gradient(apply: Step) -> Step:
    """Return `apply` run with gradients: a function called without them may enable them inside."""

    def step(*inputs: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return apply(*inputs)
        torch._C._set_grad_enabled(True)
        try:
            return apply(*inputs)
        finally:
            torch._C._set_grad_enabled(False)

    return step


def _without_gradient(forward: Call) -> Step:
    """Return `forward` run without gradients: autograd must not record what only a `no_grad` block reads."""

    def step(*inputs: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return forward(list(inputs))
        torch._C._set_grad_enabled(False)
        try:
            return forward(list(inputs))
        finally:
            torch._C._set_grad_enabled(True)

    return step


def _prepared(step: Step, changed: tuple[int, ...], detached: tuple[int, ...]) -> Step:
    """Return `step` preceded by marking `changed` inputs as modified and detaching `detached` ones from autograd."""

    def prepared(*inputs: Any) -> tuple[Any, ...]:
        if changed:
            torch.autograd.graph.increment_version([inputs[at] for at in changed])
        if detached:
            given = list(inputs)
            for at in detached:
                given[at] = given[at].detach()
            return step(*given)
        return step(*inputs)

    return prepared


def _marked(
    step: Step, dynamic: tuple[tuple[int, tuple[int, ...]], ...], mark: Callable[[Tensor, Iterable[int]], None]
) -> Step:
    def marked(*inputs: Any) -> tuple[Any, ...]:
        returned = step(*inputs)
        for output, dims in dynamic:
            mark(returned[output], dims)
        return returned

    return marked


class _Differentiated(torch.autograd.Function):
    """Computes gradients that raise an error if they are differentiated again.

    The gradients are connected to the arguments they were computed from, because `autograd.grad` runs only nodes
    between its outputs and inputs, and would otherwise treat them as constants. `needed` makes them require gradients
    whatever the arguments are.
    """

    @staticmethod
    def forward(ctx: Any, backward: Call, needed: Tensor, *arguments: Any) -> Any:
        return tuple(backward(list(arguments)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise OverlapcError(
            "a compiled step was differentiated twice; compiled graphs have first derivatives only\n"
            "hint: do not compile the part that needs second derivatives"
        )


def _without_autocast(call: Call) -> Call:
    def run(arguments: list[Any]) -> Any:
        with torch._C._DisableAutocast():
            return call(arguments)

    return run
