"""Functions whose gradient is routed by comparing computed values (max, sort, where, clamp): backward must recompute
exactly the bits that forward compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from overlapc.backend import overlapc

Function = Callable[[Tensor, Tensor], Tensor]


def _value(x: Tensor, y: Tensor) -> Tensor:
    return x.sin() * x + y


def _picked(value: Tensor) -> Tensor:
    return value.gather(1, value.argmax(1, keepdim=True))


# Name -> function of two matrices x and y.
COMPARISONS: dict[str, Function] = {
    "amax": lambda x, y: (x.sin() * x).amax(1),
    "amin": lambda x, y: (x.exp() * y).amin(1),
    "amax of columns": lambda x, y: _value(x, y).amax(0),
    "amax of all": lambda x, y: _value(x, y).amax(),
    "max and where": lambda x, y: _value(x, y).max(1).values,
    "min and where": lambda x, y: (x.tanh() * y).min(1).values,
    "smallest and largest": lambda x, y: _value(x, y).amax(1) - _value(x, y).amin(1),
    "sort": lambda x, y: _value(x, y).sort(1).values * torch.arange(x.shape[1], device=x.device),
    "top-k": lambda x, y: _value(x, y).topk(5).values,
    "argmax": lambda x, y: _picked(_value(x, y)),
    "equals its maximum": lambda x, y: (_value(x, y) == _value(x, y).amax(1, keepdim=True)) * x,
    "where": lambda x, y: torch.where(_value(x, y) >= y.cos() * x, x * y, y),
    "where of sums": lambda x, y: torch.where(x * y + x >= x + x * y, x * y, y),
    "maximum": lambda x, y: torch.maximum(_value(x, y), y.exp() * x),
    "clamp": lambda x, y: _value(x, y).clamp(-0.5, 0.5) * x,
    "relu of what is below the top": lambda x, y: torch.relu(_value(x, y) - _value(x, y).amax(1, keepdim=True) + 0.5),
    "log-sum-exp": lambda x, y: _value(x, y).logsumexp(1),
    "norm of the largest": lambda x, y: _value(x, y).norm(float("inf"), dim=1),
    "cummax": lambda x, y: _value(x, y).cummax(1).values,
    "median": lambda x, y: _value(x, y).median(1).values,
    "softmax's largest": lambda x, y: torch.softmax(_value(x, y), 1).amax(1),
    "normalized, largest": lambda x, y: torch.nn.functional.layer_norm(_value(x, y), (x.shape[1],)).amax(1),
}


def gradients_differ(name: str, dtype: torch.dtype, device: str, shape: tuple[int, int] = (5, 67)) -> str:
    """Return how the compiled result or gradients of a comparison differ from eager's, or "" if they agree."""
    function = COMPARISONS[name]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(2)]

    def results(run: Function) -> list[Tensor]:
        x, y = (tensor.clone().requires_grad_() for tensor in given)
        out = run(x, y)
        found = torch.autograd.grad(out.float().sum(), (x, y), allow_unused=True, materialize_grads=True)
        return [out.detach(), *found]

    torch._dynamo.reset()
    wanted, got = results(function), results(torch.compile(function, backend=overlapc))
    steps = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for what, want, have in zip(("the result", "the gradient of x", "the gradient of y"), wanted, got, strict=True):
        where = ((want == 0) != (have == 0)).sum()
        if where:
            return f"{name}, {dtype}: {what} is 0 at {int(where)} other places than eager's"
        if not torch.allclose(want.double(), have.double(), rtol=steps, atol=steps):
            return f"{name}, {dtype}: {what} is off by {float((want.double() - have.double()).abs().max()):.3g}"
    return ""
