"""Lowers reductions, and ops made of one or more reductions: softmax, variance."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from overlapc.ir.body import Body, Loop, Reduce, Value, compute_dtype, op
from overlapc.ir.conversions import cast, constant, converted
from overlapc.ir.indexing import loop_symbol, numel
from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.pointwise import settled, truth
from overlapc.lowering.table import Impossible, lowers

aten = torch.ops.aten


def normalized(dims: Any, rank: int) -> tuple[int, ...]:
    """Return dims as sorted non-negative ints; None or an empty list means all dims."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return tuple(range(rank))
    given = dims if isinstance(dims, Sequence) else (dims,)
    return tuple(sorted(int(dim) % max(rank, 1) for dim in given)) if rank else ()


def reduction_loops(
    context: Lowering, x: View, dims: tuple[int, ...]
) -> tuple[tuple[Loop, ...], tuple[Loop, ...], list[sympy.Expr]]:
    """Return parallel loops over the kept dims, reduction loops over `dims`, and the position in `x`.

    Both are in the memory order of `x`, so that neighbouring loops merge.
    """
    position: list[sympy.Expr] = [sympy.S.Zero] * len(x.size)
    parallel: list[Loop] = []
    inner: list[Loop] = []
    for dim in x.layout.dim_order():
        group, prefix = (inner, "r") if dim in dims else (parallel, "p")
        symbol = loop_symbol(prefix, len(group))
        position[dim] = symbol
        group.append(Loop(symbol, x.size[dim]))
    if not inner:
        inner.append(Loop(loop_symbol("r", 0), sympy.S.One))
    return tuple(parallel), tuple(inner), position


def reduce(
    context: Lowering,
    x: View,
    dims: Any,
    finish: Callable[[Value], Value],
    keepdim: bool = False,
) -> View:
    """Add a kernel with one output per kept position: `finish` maps an element of `x` to the reduced value."""
    which = normalized(dims, len(x.size))

    def body(out: View) -> Body:
        parallel, inner, position = reduction_loops(context, x, which)
        value = finish(context.element(x, position))
        kept = [at if dim not in which else sympy.S.Zero for dim, at in enumerate(position)]
        if not keepdim:
            kept = [at for dim, at in enumerate(position) if dim not in which]
        return Body(parallel, inner, (context.store(out, kept, value),))

    return context.loops(body)


def nonempty(context: Lowering, dims: Any, what: str) -> None:
    """Raise Impossible if the node, `what` over `dims`, may reduce no elements: its op raises an error then."""
    x: Any = context.node.args[0]
    size = x.meta["val"].shape
    if not all(statically_known_true(size[dim] > 0) for dim in normalized(dims, len(size))):
        raise Impossible(f"{what} of what may be nothing")


@lowers(aten.sum.dim_IntList, aten.sum.default)
def sum_(context: Lowering, x: View, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> View:
    out = context.value_of().dtype
    return reduce(
        context, x, dim, lambda value: Reduce("sum", converted(value, x.dtype, out), compute_dtype(out)), keepdim
    )


@lowers(aten.mean.dim, aten.mean.default)
def mean(context: Lowering, x: View, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> View:
    result = context.value_of().dtype
    out = compute_dtype(result)
    count = numel(x.size[at] for at in normalized(dim, len(x.size)))

    def finish(value: Value) -> Value:
        on_cpu = x.layout.device.type == "cpu"  # eager converts to float32 there, for every result dtype
        given = cast(value, out) if on_cpu else converted(value, x.dtype, result)
        return op("div", Reduce("sum", given, out), cast(context.scalar(count), out))

    return reduce(context, x, dim, finish, keepdim)


@lowers(aten.prod.dim_int, aten.prod.default)
def prod(context: Lowering, x: View, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> View:
    out = context.value_of().dtype
    return reduce(
        context, x, dim, lambda value: Reduce("prod", converted(value, x.dtype, out), compute_dtype(out)), keepdim
    )


@lowers(aten.amax.default, aten.max.default)
def amax(context: Lowering, x: View, dim: Any = None, keepdim: bool = False) -> View:
    nonempty(context, dim, "a maximum")
    return reduce(context, x, dim, lambda value: Reduce("max", value, value.dtype), keepdim)


@lowers(aten.amin.default, aten.min.default)
def amin(context: Lowering, x: View, dim: Any = None, keepdim: bool = False) -> View:
    nonempty(context, dim, "a minimum")
    return reduce(context, x, dim, lambda value: Reduce("min", value, value.dtype), keepdim)


@lowers(aten.any.dim, aten.any.dims, aten.any.default)
def any_(context: Lowering, x: View, dim: Any = None, keepdim: bool = False) -> View:
    return _truth(context, "any", x, dim, keepdim)


@lowers(aten.all.dim, aten.all.dims, aten.all.default)
def all_(context: Lowering, x: View, dim: Any = None, keepdim: bool = False) -> View:
    return _truth(context, "all", x, dim, keepdim)


def _truth(context: Lowering, kind: str, x: View, dim: Any, keepdim: bool) -> View:
    dtype = context.value_of().dtype
    if isinstance(dim, Sequence) and not dim:  # no dims, unlike for all other reductions
        return context.pointwise(lambda value: cast(truth(value), dtype), x)
    return reduce(context, x, dim, lambda value: cast(Reduce(kind, truth(value), torch.bool), dtype), keepdim)


@lowers(aten.argmax.default)
def argmax(context: Lowering, x: View, dim: Any = None, keepdim: bool = False) -> View:
    return _arg(context, "argmax", x, dim, keepdim)


@lowers(aten.argmin.default)
def argmin(context: Lowering, x: View, dim: Any = None, keepdim: bool = False) -> View:
    return _arg(context, "argmin", x, dim, keepdim)


def _arg(context: Lowering, kind: str, x: View, dim: Any, keepdim: bool) -> View:
    nonempty(context, dim, f"{kind}")
    if dim is None and x.layout.dim_order() != [at for at, extent in enumerate(x.size) if extent != 1]:
        raise Impossible("a flat position in a permuted tensor")  # because loops are in memory order
    return reduce(context, x, dim, lambda value: Reduce(kind, settled(context, value, x), torch.int64), keepdim)


@lowers(aten.max.dim)
def max_and_where(context: Lowering, x: View, dim: int, keepdim: bool = False) -> Any:
    return _extreme(context, "max", x, dim, keepdim)


@lowers(aten.min.dim)
def min_and_where(context: Lowering, x: View, dim: int, keepdim: bool = False) -> Any:
    return _extreme(context, "min", x, dim, keepdim)


def _extreme(context: Lowering, kind: str, x: View, dim: int, keepdim: bool) -> Any:
    """Add kernels for the extreme values and for their positions; as both read `x`, fusion makes one kernel of them."""
    nonempty(context, dim, f"{kind} and its position")
    with context.for_item(0):
        values = reduce(context, x, dim, lambda value: Reduce(kind, value, value.dtype), keepdim)
    with context.for_item(1):
        return values, reduce(
            context, x, dim, lambda value: Reduce(f"arg{kind}", settled(context, value, x), torch.int64), keepdim
        )


def rowwise(context: Lowering, x: View, dims: tuple[int, ...], finish: Callable[[Value], Value]) -> View:
    """Add a kernel with an output of x's shape; `finish` may reduce over `dims` any number of times."""

    def body(out: View) -> Body:
        parallel, inner, position = reduction_loops(context, x, dims)
        return Body(parallel, inner, (context.store(out, position, finish(context.element(x, position))),))

    return context.loops(body)


@lowers(aten._softmax.default)
def softmax(context: Lowering, x: View, dim: int, half_to_float: bool) -> View:
    def finish(value: Value) -> Value:
        exponential = op("exp", _below_max(value))
        return op("div", exponential, Reduce("sum", exponential, value.dtype))

    return _softmax_like(context, x, dim, finish)


@lowers(aten._log_softmax.default)
def log_softmax(context: Lowering, x: View, dim: int, half_to_float: bool) -> View:
    def finish(value: Value) -> Value:
        shifted = _below_max(value)
        return op("sub", shifted, op("log", Reduce("sum", op("exp", shifted), value.dtype)))

    return _softmax_like(context, x, dim, finish)


def _below_max(value: Value) -> Value:
    return op("sub", value, Reduce("max", value, value.dtype))


def _softmax_like(context: Lowering, x: View, dim: int, finish: Callable[[Value], Value]) -> View:
    if not x.size:
        raise Impossible("a softmax of a single number")
    dims = (dim % len(x.size),)
    if any(extent == 0 for extent in x.size):
        raise Impossible("a softmax of nothing")
    return rowwise(context, x, dims, finish)


@lowers(aten._softmax_backward_data.default)
def softmax_backward(context: Lowering, grad: View, output: View, dim: int, input_dtype: torch.dtype) -> View:
    return _softmax_gradient(
        context,
        grad,
        output,
        dim,
        lambda g, y: op("mul", y, op("sub", g, Reduce("sum", op("mul", g, y), g.dtype))),
    )


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(context: Lowering, grad: View, output: View, dim: int, input_dtype: torch.dtype) -> View:
    return _softmax_gradient(
        context,
        grad,
        output,
        dim,
        lambda g, y: op("sub", g, op("mul", op("exp", y), Reduce("sum", g, g.dtype))),
    )


def _softmax_gradient(
    context: Lowering, grad: View, output: View, dim: int, finish: Callable[[Value, Value], Value]
) -> View:
    if not grad.size or any(extent == 0 for extent in grad.size):
        raise Impossible("a softmax of nothing")

    def body(out: View) -> Body:
        parallel, inner, position = reduction_loops(context, output, (dim % len(grad.size),))
        dtype = compute_dtype(grad.dtype)
        value = finish(cast(context.element(grad, position), dtype), cast(context.element(output, position), dtype))
        return Body(parallel, inner, (context.store(out, position, value),))

    return context.loops(body)


@lowers(aten.var.correction)
def var(context: Lowering, x: View, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> View:
    return reduce(context, x, dim, lambda value: variance(context, x, dim, value, correction), keepdim)


@lowers(aten.var_mean.correction)
def var_mean(context: Lowering, x: View, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    which = normalized(dim, len(x.size))
    outputs = context.value_of()
    results = []
    for at, kind in enumerate(("var", "mean")):

        def body(out: View, kind: str = kind) -> Body:
            parallel, inner, position = reduction_loops(context, x, which)
            value = context.element(x, position)
            if kind == "var":
                value = variance(context, x, dim, value, correction)
            else:
                value = average(context, x, which, value)
            kept = [p for d, p in enumerate(position) if keepdim or d not in which]
            kept = [sympy.S.Zero if keepdim and d in which else p for d, p in enumerate(kept)] if keepdim else kept
            return Body(parallel, inner, (context.store(out, kept, value),))

        layout = context.layout(outputs[at], offset=sympy.S.Zero)
        results.append(context.loops(body, layout, context.name_for(at)))
    return tuple(results)


def average(context: Lowering, x: View, dims: tuple[int, ...], value: Value) -> Value:
    count = numel(x.size[at] for at in dims)
    return op("div", Reduce("sum", value, value.dtype), cast(context.scalar(count), value.dtype))


def variance(context: Lowering, x: View, dim: Any, value: Value, correction: Any) -> Value:
    """Return the variance by two passes, the mean and then squared distances: as accurate as Welford and vectorizable.

    Rounding may put the mean outside of the range of its numbers, and then the variance of equal numbers would not be
    0. Therefore the mean is clamped to the smallest and the largest number, except where eps is added, as in norms:
    the two extra reductions take a fifth of a layer norm's time on a CPU.
    """
    dims = normalized(dim, len(x.size))
    if x.dtype.is_complex or not x.dtype.is_floating_point:
        raise Impossible("a variance of numbers that are not real floats")
    less = 1 if correction is None else correction
    mean = average(context, x, dims, value)
    if not _only_added_to_numbers(context.node):
        least, largest = (Reduce(kind, value, value.dtype) for kind in ("min", "max"))
        mean = op("minimum", op("maximum", mean, least), largest)
    distance = op("sub", value, mean)
    total = Reduce("sum", op("mul", distance, distance), value.dtype)
    count = numel(x.size[at] for at in dims)
    if isinstance(less, float):  # as in `x.std()`
        if not less.is_integer():
            raise Impossible("a fractional correction")
        less = int(less)
    divisor = sympy.Max(0, count - less)
    return op("div", total, cast(context.scalar(divisor), value.dtype))


def _only_added_to_numbers(node: fx.Node) -> bool:
    """Whether each reader of a variance, which `node` returns alone or first, adds a number other than 0 to it."""
    own = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    readers = [reader for result in own or [node] for reader in result.users]
    return all(
        reader.target in (aten.add.Tensor, aten.add.Scalar)
        and any(isinstance(number, int | float) and number != 0 for number in reader.args)
        for reader in readers
    )


__all__ = ["average", "constant", "reduce", "rowwise", "variance"]
