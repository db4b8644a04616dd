"""Functions and names that random programs use. A printed program begins with this file, so it is self-contained."""

# ruff: noqa: F401 (programs use the imports)
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I8, I16, I32, I64, U8, BOOL = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool
DEVICE = "cpu"
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38, -65504.0, 2.0**-24, 1.0, -1.0, 88.8)


def numbers(seed, shape, dtype, kind="normal", layout="plain"):
    """Return a tensor of numbers: "normal", "quarters" (many ties), "special" (with NaN, infinities, ...), or integers
    from -`kind` to `kind` - 1 (their absolute values for U8 and BOOL)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if isinstance(kind, int):
        x = torch.randint(-kind, kind, shape, generator=generator).double()
        x = x.abs() if dtype in ("U8", "BOOL") else x
    elif kind == "quarters":
        x = (x * 4).round() / 4
    elif kind == "special":
        chosen = torch.tensor(SPECIAL, dtype=torch.float64)
        at = torch.randint(0, 5 * len(SPECIAL), shape, generator=generator)
        x = torch.where(at < len(SPECIAL), chosen[at % len(SPECIAL)], x)
    return laid(x.to(globals()[dtype]).to(DEVICE), layout)


def laid(x, layout):
    """Return the same values in another memory layout."""
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced" and x.ndim:
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "offset" and x.ndim:
        long = x.new_zeros(x.shape[0] + 1, *x.shape[1:])
        long[1:] = x
        return long[1:]
    return x


def leaf(x):
    """Return a leaf that requires a gradient, with the values and layout of `x`."""
    return x.detach().requires_grad_()


def cond(predicate, yes, no, operands):
    """torch.cond when compiling; in eager, Python's `if`, because torch.cond would compile in eager, too."""
    if torch.compiler.is_compiling():
        return torch.cond(predicate, yes, no, operands)
    return (yes if predicate else no)(*operands)


def while_loop(condition, body, operands):
    """torch.while_loop when compiling; in eager, Python's `while`."""
    if torch.compiler.is_compiling():
        return torch._higher_order_ops.while_loop(condition, body, operands)
    while condition(*operands):
        operands = body(*operands)
    return operands


class Cubed(torch.autograd.Function):
    """x ** 3 with half of the true gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 1.5 * x * x


class Straight(torch.autograd.Function):
    """Rounds in forward and passes the gradient through (clamped)."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-2, 2), None


class Both(torch.autograd.Function):
    """Two differentiable results and a mask of two arguments; saves an argument, a result and an intermediate value."""

    @staticmethod
    def forward(ctx, x, y):
        mixed = torch.tanh(x) * y
        out = mixed + x
        ctx.save_for_backward(y, mixed, out)
        ctx.mark_non_differentiable(signs := out > 0.0123)
        return out, mixed * 2, signs

    @staticmethod
    def backward(ctx, g, h, _):
        y, mixed, out = ctx.saved_tensors
        return g * y + h * out.sigmoid(), (g + 2 * h) * mixed
