"""Expressions in kernels of many shapes, in all of which an expression must give the same bits.

A kernel computes a group of expressions of the numbers x and y and stores each: alone, in rows that are reduced or
scanned, read transposed, in short rows, over a symbolic size, beside other dtypes, and as operands of other operations
that a compiler could contract. The first kernel that stores an expression defines its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import sympy
import torch

from overlapc.ir.body import LOW_PRECISION, Body, Cast, Load, Reduce, Scan, Store, Value, compute_dtype, op
from overlapc.lowering.precision import coarsened
from tests.codegen.terms import f32, f64, i64, loop, number, p0, p1, r0, s0

Expression = Callable[[Value, Value], Value]

UNARY = (
    "reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh erf erfc lgamma sigmoid"
).split()
BINARY = "div pow atan2 hypot fmod remainder floor_div".split()
ROWS, COLUMNS = 6, 77  # rows are no multiple of a vector; 462 elements
GROUP = 8


def _chain(x: Value, y: Value) -> Value:
    """Nested products and sums, which contraction to fma would change."""
    return op("sub", op("mul", op("add", op("mul", x, y), x), y), op("mul", x, x))


def _gelu(x: Value, y: Value) -> Value:
    half, one = number(0.5, x.dtype), number(1.0, x.dtype)
    return op("mul", op("mul", x, half), op("add", one, op("erf", op("mul", x, number(0.7071067811865476, x.dtype)))))


def _softmax_term(x: Value, y: Value) -> Value:
    return op("div", op("exp", op("sub", x, y)), op("add", op("exp", y), number(1.0, x.dtype)))


MIXED: dict[str, Expression] = {
    "product_plus": lambda x, y: op("add", op("mul", x, y), y),
    "chain": _chain,
    "gelu": _gelu,
    "softmax_term": _softmax_term,
    "sine_times": lambda x, y: op("mul", op("sin", x), x),
    "silu": lambda x, y: op("mul", x, op("sigmoid", x)),
    "tanh_scaled": lambda x, y: op("mul", op("tanh", op("mul", x, y)), op("rsqrt", op("add", op("mul", x, x), y))),
    "fma": lambda x, y: op("fma", x, y, x),
}


def expressions() -> dict[str, Expression]:
    """Return all expressions by name."""
    unary: dict[str, Expression] = {name: lambda x, y, name=name: op(name, x) for name in UNARY}
    binary: dict[str, Expression] = {name: lambda x, y, name=name: op(name, x, y) for name in BINARY}
    return unary | binary | MIXED


def groups(shift: int = 0) -> list[list[str]]:
    """Divide all names into groups of one kernel each; with another `shift`, an expression is grouped with others."""
    names = list(expressions())
    names = names[shift:] + names[:shift]
    return [names[at : at + GROUP] for at in range(0, len(names), GROUP)]


@dataclass(frozen=True)
class Kernel:
    """A body that stores the results of `names` as `out_<name>`, of ROWS x COLUMNS numbers each."""

    shape: str
    names: tuple[str, ...]
    dtype: torch.dtype
    body: Body
    sizes: Mapping[str, int] = field(default_factory=dict)

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        """Return inputs, and memory for everything that the kernel stores."""
        x, y = inputs(self.dtype, device)
        found = {"x": x, "y": y, "x_turned": x.t().contiguous(), "y_turned": y.t().contiguous()}
        for store in self.body.stores:
            found[store.buffer] = torch.zeros(ROWS * COLUMNS, dtype=store.memory_dtype, device=device)
        return found


def inputs(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers of several magnitudes, with special values, among which every function is defined for some."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, COLUMNS, generator=generator, dtype=f64)
    y = torch.rand(ROWS, COLUMNS, generator=generator, dtype=f64) + 0.1
    x[1] *= 30
    x[2] = x[2].abs() * 0.9
    x[3] = x[3].abs() + 1
    x[4, :6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40])
    x[5, ::3] *= 1e4
    return x.to(dtype).to(device), y.to(dtype).to(device)


def kernels(dtype: torch.dtype) -> Iterator[Kernel]:
    """Generate kernels with every expression in every shape."""
    for names in groups():
        yield _kernel("alone", names, dtype, _alone)
    for names in groups(2):
        yield _kernel("reduced", names, dtype, _reduced)
    for names in groups(5):
        yield _kernel("scanned", names, dtype, _scanned)
        yield _kernel("turned", names, dtype, _turned)
    for names in groups(3):
        yield _kernel("short rows", names, dtype, _short_rows)
        yield _kernel("symbolic", names, dtype, _symbolic, {"s0": ROWS * COLUMNS})
        yield _kernel("beside others", names, dtype, _beside_others)
        yield _kernel("with neighbours", names, dtype, _with_neighbours)
    for name in ("sin", "exp", "erf", "tanh", "log", "pow", "chain", "gelu", "sine_times"):
        yield _kernel("by itself", [name], dtype, _reduced)


def _kernel(
    shape: str,
    names: list[str],
    dtype: torch.dtype,
    make: Callable[[list[str], torch.dtype], Body],
    sizes: Mapping[str, int] | None = None,
) -> Kernel:
    return Kernel(shape, tuple(names), dtype, make(names, dtype), sizes or {})


def _value(name: str, dtype: torch.dtype, x: Value, y: Value) -> Value:
    """Return an expression as lowering writes a node's op: in low precision it is approximate inside and rounded."""
    value = expressions()[name](x, y)
    if dtype not in LOW_PRECISION:
        return value
    body = coarsened(Body((loop(p0, 1),), (), (Store("out", p0, value, dtype),)))
    return Cast(body.stores[0].value, dtype)


def _stores(
    names: list[str], dtype: torch.dtype, index: sympy.Expr, read: sympy.Expr | None = None, turned: str = ""
) -> list[Store]:
    at = index if read is None else read
    x, y = Load(f"x{turned}", at, dtype), Load(f"y{turned}", at, dtype)
    return [Store(f"out_{name}", index, _value(name, dtype, x, y), dtype) for name in names]


def _alone(names: list[str], dtype: torch.dtype) -> Body:
    return Body((loop(p0, ROWS * COLUMNS),), (), tuple(_stores(names, dtype, p0)))


def _symbolic(names: list[str], dtype: torch.dtype) -> Body:
    return Body((loop(p0, s0),), (), tuple(_stores(names, dtype, p0)))


def _rows(names: list[str], dtype: torch.dtype, columns: int) -> tuple[list[Store], tuple[Value, ...]]:
    stores = _stores(names, dtype, columns * p0 + r0)
    return stores, tuple(store.value for store in stores)


def _reduced(names: list[str], dtype: torch.dtype) -> Body:
    stores, values = _rows(names, dtype, COLUMNS)
    for at, value in enumerate(values):
        kind = ("max", "sum", "min")[at % 3]
        stores.append(Store(f"total{at}", p0, Reduce(kind, value, value.dtype), dtype))
    return Body((loop(p0, ROWS),), (loop(r0, COLUMNS),), tuple(stores))


def _short_rows(names: list[str], dtype: torch.dtype) -> Body:
    stores, values = _rows(names, dtype, 3)
    stores.append(Store("total", p0, Reduce("sum", values[0], values[0].dtype), dtype))
    return Body((loop(p0, ROWS * COLUMNS // 3),), (loop(r0, 3),), tuple(stores))


def _scanned(names: list[str], dtype: torch.dtype) -> Body:
    stores, values = _rows(names, dtype, COLUMNS)
    scanned = Scan("sum", values[0], values[0].dtype, r0)
    stores.append(Store("scan", COLUMNS * p0 + r0, scanned, dtype))
    return Body((loop(p0, ROWS),), (loop(r0, COLUMNS),), tuple(stores))


def _turned(names: list[str], dtype: torch.dtype) -> Body:
    stores = _stores(names, dtype, COLUMNS * p0 + p1, ROWS * p1 + p0, "_turned")
    return Body((loop(p0, ROWS), loop(p1, COLUMNS)), (), tuple(stores))


def _beside_others(names: list[str], dtype: torch.dtype) -> Body:
    """Return a body that also has wider dtypes, so that its loop processes fewer elements at once."""
    stores = _stores(names, dtype, p0)
    first = stores[0].value
    stores.append(Store("wide", p0, op("exp", Cast(first, f64 if first.dtype is not f64 else f32)), f32))
    finite = op("where", op("lt", op("abs", first), number(1e6, first.dtype)), first, number(0.0, first.dtype))
    stores.append(Store("long", p0, Cast(finite, i64), i64))
    return Body((loop(p0, ROWS * COLUMNS),), (), tuple(stores))


def _with_neighbours(names: list[str], dtype: torch.dtype) -> Body:
    """Return a body in which every expression is also a factor and a term of another stored value."""
    stores = _stores(names, dtype, p0)
    x, y = Load("x", p0, dtype), Load("y", p0, dtype)
    for at, store in enumerate(list(stores)):
        more = op("add", op("mul", store.value, x), op("sub", y, op("mul", y, store.value)))
        stores.append(Store(f"more{at}", p0, more, compute_dtype(dtype)))
    return Body((loop(p0, ROWS * COLUMNS),), (), tuple(stores))


class Bits:
    """The first result of every expression, and the kernels whose results differ from it."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Expressions with one correct result are compared with eager's from the start."""
        self.first: dict[str, tuple[str, torch.Tensor]] = {}
        self.problems: list[str] = []
        if dtype not in LOW_PRECISION:
            x, y = inputs(dtype, "cpu")
            self.look_at("eager", "product_plus", x * y + y)
            self.look_at("eager", "chain", (x * y + x) * y - x * x)
        if dtype is f32:
            self.look_at("eager", "fma", (x.double() * y.double() + x.double()).float())

    def look_at(self, where: str, name: str, result: torch.Tensor) -> None:
        """Compare the bits of `result`, which the kernel `where` computed for the expression `name`."""
        result = torch.where(result.isnan(), torch.nan, result).reshape(-1).cpu()  # all NaNs count as equal
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[result.element_size()]
        known, bits = self.first.setdefault(name, (where, result.clone()))
        different = (bits.view(width) != result.view(width)).nonzero().reshape(-1)
        if different.numel():
            at = int(different[0])
            self.problems.append(
                f"{name}: {different.numel()} of {result.numel()} differ between {known} and {where}; at {at}"
                f" {bits[at].item()!r} and {result[at].item()!r}"
            )
