"""Loop bodies: the computation of one iteration of a kernel, as a hash-consed DAG of typed values.

Building a value that equals an existing one returns that object, so equality is identity, common subexpressions are
shared by construction, and a rewrite is a function from value to value.

Dtypes: a value's `dtype` is the one in which the kernel computes. `LOW_PRECISION` are memory formats: a `Load` of one
yields float32, a `Store` to one rounds, and a `Cast` to one rounds to it and yields float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast
from weakref import WeakValueDictionary

import sympy
import torch

from overlapc.ir.indexing import Ranges, free_symbols, numel

LOW_PRECISION = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a kernel computes on elements stored as `dtype`."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


_made: WeakValueDictionary[tuple[Any, ...], Value]


class _Interned(type):
    """Metaclass that returns the existing value for equal arguments."""

    _fields: tuple[str, ...]  # fields that distinguish values of this class

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_fields" not in cls.__dict__:
            cls._fields = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        if not kwargs and len(args) == len(cls._fields):  # most are made again: every layer has them, and every rewrite
            known = _made.get((cls, *args))
            if known is not None:
                return known
        value = super().__call__(*args, **kwargs)
        return _made.setdefault(value._key(), value)


class Value(metaclass=_Interned):
    """Base of all values; compares and hashes by identity."""

    __slots__ = ("__weakref__",)
    dtype: torch.dtype

    def _key(self) -> tuple[Any, ...]:
        return (type(self), *[getattr(self, name) for name in type(self)._fields])

    def operands(self) -> tuple[Value, ...]:
        """Return the values that this value is computed from."""
        return ()

    def indices(self) -> tuple[sympy.Expr, ...]:
        """Return the index expressions in this value itself, not in its operands."""
        return ()


_made = WeakValueDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class Load(Value):
    """Read `buffer[index]`, stored as `memory_dtype`.

    Where `mask` (bool) is false, nothing is read and the value is 0. `indirect` binds symbols of `index` to integer
    values of this body, as in `table[4096*i0 + p1]` with i0 loaded from memory; they must be in bounds.
    """

    buffer: str
    index: sympy.Expr
    memory_dtype: torch.dtype
    mask: Value | None = None
    indirect: tuple[tuple[sympy.Symbol, Value], ...] = ()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return compute_dtype(self.memory_dtype)

    def operands(self) -> tuple[Value, ...]:
        index_values = tuple(value for _, value in self.indirect)
        return index_values if self.mask is None else (*index_values, self.mask)

    def indices(self) -> tuple[sympy.Expr, ...]:
        return (self.index,)


@dataclass(frozen=True, slots=True, eq=False)
class Constant(Value):
    """A number (or bool) of `dtype`."""

    number: float | int | bool
    dtype: torch.dtype

    def _key(self) -> tuple[Any, ...]:
        # repr distinguishes 0.0 from -0.0, and 1 from 1.0 and True, which compare equal.
        return (Constant, repr(self.number), self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Index(Value):
    """An index expression as a number that `dtype` can hold, for `arange`, masks and positions."""

    expr: sympy.Expr
    dtype: torch.dtype = torch.int64

    def indices(self) -> tuple[sympy.Expr, ...]:
        return (self.expr,)


@dataclass(frozen=True, slots=True, eq=False)
class Op(Value):
    """An element-wise operation. `name` is one of `OPERATIONS`; its arguments have one dtype, except where noted there.

    `coarse`: errors of a few units in the last place do not matter (lowering/precision.py), so a generator may use an
    approximation. This is a property of the operation and not of its readers, so it gives the same bits in every
    kernel.
    """

    name: str
    args: tuple[Value, ...]
    dtype: torch.dtype
    coarse: bool = False

    def operands(self) -> tuple[Value, ...]:
        return self.args


@dataclass(frozen=True, slots=True, eq=False)
class Cast(Value):
    """`arg` converted to dtype `to` as by `tensor.to`; a cast to a low-precision float rounds and yields float32."""

    arg: Value
    to: torch.dtype

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return compute_dtype(self.to)

    def operands(self) -> tuple[Value, ...]:
        return (self.arg,)


@dataclass(frozen=True, slots=True, eq=False)
class Checked(Value):
    """`arg`, with a check: if `condition` (bool) is false anywhere, the launch fails with IndexError(`message`).

    The kernel continues with `arg` in either case, so an access at `arg` needs its own mask. On a GPU, the failure is a
    device-side assert.
    """

    arg: Value
    condition: Value
    message: str

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.arg.dtype

    def operands(self) -> tuple[Value, ...]:
        return (self.arg, self.condition)


@dataclass(frozen=True, slots=True, eq=False)
class Reduce(Value):
    """`arg` reduced over all reduction loops of the kernel; the same value in every iteration of these.

    `kind` is one of `REDUCTIONS`. argmax/argmin yield the int64 position in the flattened reduction space: the first on
    ties, and a NaN counts as the extreme. "dot" is the sum of a product (an `Op` "mul" of two float32 values): an
    element of a matrix product. Factors that are a `Cast` to a low precision may be multiplied in that precision.
    """

    kind: str
    arg: Value
    dtype: torch.dtype

    def operands(self) -> tuple[Value, ...]:
        return (self.arg,)


@dataclass(frozen=True, slots=True, eq=False)
class Scan(Value):
    """`arg` combined over the iterations of the reduction loops up to and including this one.

    The loops run in order, the innermost fastest. `position` is the number of the iteration as an index expression,
    which remains correct when loops are split or merged. `kind` is one of `SCANS`: a NaN propagates, "logsumexp" is the
    logarithm of a sum of exponentials, and argmax/argmin yield the int64 position of the extreme so far: the last on
    ties, and a NaN counts as the extreme (as in torch.cummax).
    """

    kind: str
    arg: Value
    dtype: torch.dtype
    position: sympy.Expr

    def operands(self) -> tuple[Value, ...]:
        return (self.arg,)

    def indices(self) -> tuple[sympy.Expr, ...]:
        return (self.position,)


# Number of arguments of every operation. Floats follow IEEE and C's math.h, also for NaN; integers wrap around.
OPERATIONS: Mapping[str, int] = {
    **dict.fromkeys(
        "neg abs sign signbit reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan "
        "sinh cosh tanh asinh acosh atanh erf erfc lgamma sigmoid relu floor ceil trunc round isnan isinf "
        "logical_not bitwise_not bitcast".split(),
        1,
    ),
    # bitcast: the same bits as the `dtype` of the Op: a float as an integer of the same size, or the reverse.
    # maximum/minimum propagate NaN; remainder has the divisor's sign (Python), fmod the dividend's (C);
    # floor_div rounds down, trunc_div toward zero, both exact for integers; `div` is for floats only.
    **dict.fromkeys(
        "add sub mul div floor_div trunc_div remainder fmod pow atan2 hypot copysign nextafter maximum minimum "
        "eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
        "shift_left shift_right".split(),
        2,
    ),
    "where": 3,  # condition (bool), value if true, value if false
    "fma": 3,  # a * b + c of floats with one rounding; generators never contract "mul" and "add" into it
    # Both take key, upper counter and position (int64 each), as in runtime/philox.py. "random_word" is a number from 0
    # to 2^32 - 1 as int64, "random" a float32 in [0, 1) from its upper 24 bits.
    "random_word": 3,
    "random": 3,
}
COMPARISONS = frozenset("eq ne lt le gt ge isnan isinf signbit logical_not logical_and logical_or logical_xor".split())
REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin", "dot")
SCANS = ("sum", "prod", "logsumexp", "max", "min", "argmax", "argmin")
ATOMICS = ("add", "max", "min")  # modes of a `Store` that combine atomically
TOTALS = ("sum", "prod")  # modes of a `Store` that reduce


def op(name: str, *args: Value, dtype: torch.dtype | None = None) -> Op:
    """Return an `Op` whose dtype, unless given, is bool for comparisons, else that of the last argument."""
    assert OPERATIONS[name] == len(args), f"{name} takes {OPERATIONS[name]} arguments, got {len(args)}"
    if dtype is None:
        dtype = torch.bool if name in COMPARISONS else args[-1].dtype
    return Op(name, args, dtype)


@dataclass(frozen=True, slots=True)
class Store:
    """Write `value` to `buffer[index]`, rounded to the buffer's dtype.

    `mode` "set" writes the value. A mode in `ATOMICS` combines it atomically with the element in memory (iterations may
    share an element): "add" on float32, float64 and integers of 4 or 8 bytes, "max" and "min" only on such integers. A
    mode in `TOTALS` writes the total of `value` over all iterations that store to the element, in a fixed order: one
    pass over the rows of a matrix can so reduce its columns, too. A total is known only when the kernel has finished.
    Where `mask` (bool) is false, nothing is written. `indirect` binds symbols of `index` as in `Load`.
    """

    buffer: str
    index: sympy.Expr
    value: Value
    memory_dtype: torch.dtype
    mode: str = "set"  # or one of ATOMICS, or one of TOTALS
    mask: Value | None = None
    indirect: tuple[tuple[sympy.Symbol, Value], ...] = ()
    wide: bool = False  # readers in the same kernel use the value before it is rounded to `memory_dtype`
    total_dtype: torch.dtype | None = None  # a `LOW_PRECISION` dtype to which a total is rounded before it is stored

    def operands(self) -> tuple[Value, ...]:
        index_values = tuple(value for _, value in self.indirect)
        return (self.value, *index_values) if self.mask is None else (self.value, *index_values, self.mask)

    @property
    def is_atomic(self) -> bool:
        """Whether the store combines the value with the element in memory."""
        return self.mode in ATOMICS

    @property
    def is_total(self) -> bool:
        """Whether the element becomes a total over iterations."""
        return self.mode in TOTALS


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over 0 … size-1."""

    symbol: sympy.Symbol
    size: sympy.Expr


@dataclass(frozen=True)
class Body:
    """A kernel: parallel loops, reduction loops inside them, and stores.

    Values and stores that do not depend on reduction symbols (a `Reduce` does not, whatever its argument) run once per
    iteration of the parallel loops; all others run once per iteration of all loops. Iterations are independent, except
    that a `Reduce` needs all iterations of the reduction loops first, and a `Scan` the earlier ones. Loops are named
    p0, p1, … and r0, r1, … in order, outermost first, so that equal kernels compare and hash equal.
    """

    loops: tuple[Loop, ...]
    reduction: tuple[Loop, ...]
    stores: tuple[Store, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.loops, self.reduction, self.stores))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _values(self) -> tuple[Value, ...]:
        return tuple(topological(value for store in self.stores for value in store.operands()))

    def values(self) -> tuple[Value, ...]:
        """Return every value once, operands before users."""
        return self._values

    def checks(self) -> list[str]:
        """Return the messages of all checks, each once, in the order of the values."""
        return list(dict.fromkeys(value.message for value in self.values() if isinstance(value, Checked)))

    @cached_property
    def _loads(self) -> tuple[Load, ...]:
        return tuple(value for value in self.values() if isinstance(value, Load))

    def loads(self) -> list[Load]:
        """Return every load once, in the order of the values."""
        return list(self._loads)

    @cached_property
    def _dots(self) -> tuple[Reduce, ...]:
        return tuple(value for value in self.values() if isinstance(value, Reduce) and value.kind == "dot")

    def dots(self) -> list[Reduce]:
        """Return the matrix products ("dot" reductions)."""
        return list(self._dots)

    def stores_terms(self) -> bool:
        """Whether a store runs once per iteration of the reduction loops."""
        reduced = {loop.symbol for loop in self.reduction}
        roots = [value for store in self.stores for value in store.operands()]
        varies = depends_on(roots, reduced)
        return any(varies[value] for value in roots) or any(reduced & store.index.free_symbols for store in self.stores)

    def scans(self) -> bool:
        """Whether there are scans, so that the reduction loops must run in order."""
        return any(isinstance(value, Scan) for value in self.values())

    def expressions(self) -> set[sympy.Expr]:
        """Return all index expressions and loop sizes."""
        found = {loop.size for loop in (*self.loops, *self.reduction)} | {store.index for store in self.stores}
        return found.union(*(value.indices() for value in self.values()))

    def ranges(self) -> Ranges:
        """Return the range of each loop symbol."""
        return ranges_of((*self.loops, *self.reduction))

    @cached_property
    def _numels(self) -> tuple[sympy.Expr, sympy.Expr]:
        return numel(loop.size for loop in self.loops), numel(loop.size for loop in self.reduction)

    def numel(self) -> sympy.Expr:
        """Return the number of iterations of the parallel loops."""
        return self._numels[0]

    def reduction_numel(self) -> sympy.Expr:
        """Return the number of iterations of the reduction loops; 1 if there are none."""
        return self._numels[1]

    def size_symbols(self) -> list[sympy.Symbol]:
        """Return the symbols that are neither loops nor indirect, sorted by name: the sizes that a launch must pass."""
        exprs = [loop.size for loop in (*self.loops, *self.reduction)]
        own_symbols: set[sympy.Symbol] = {loop.symbol for loop in (*self.loops, *self.reduction)}
        for value in self.values():
            exprs.extend(value.indices())
            if isinstance(value, Load):
                own_symbols.update(symbol for symbol, _ in value.indirect)
        for store in self.stores:
            exprs.append(store.index)
            own_symbols.update(symbol for symbol, _ in store.indirect)
        return sorted(free_symbols(exprs) - own_symbols, key=str)

    def __str__(self) -> str:
        from overlapc.ir.printer import print_body

        return print_body(self)


def ranges_of(loops: Iterable[Loop]) -> Ranges:
    """Return (symbol, first, last) of each loop, in the form that `indexing` takes."""
    return tuple((loop.symbol, sympy.S.Zero, loop.size - 1) for loop in loops)


def topological(roots: Iterable[Value]) -> list[Value]:
    """Return every value reachable from `roots` once, operands before users. Not recursive: fused bodies are deep."""
    order: list[Value] = []
    done: set[Value] = set()
    for root in roots:
        stack = [root]
        while stack:
            value = stack[-1]
            if value not in done:
                below = [operand for operand in value.operands() if operand not in done]
                if below:
                    stack += reversed(below)
                    continue
                done.add(value)
                order.append(value)
            stack.pop()
    return order


def depends_on(roots: Iterable[Value], symbols: Iterable[sympy.Symbol]) -> dict[Value, bool]:
    """Return, for every value under `roots`, whether it varies with `symbols`; a `Reduce` never does."""
    wanted = set(symbols)
    varies: dict[Value, bool] = {}
    for value in topological(roots):
        varies[value] = not isinstance(value, Reduce) and (
            any(varies[operand] for operand in value.operands())
            or any(not wanted.isdisjoint(free_symbols((expr,))) for expr in value.indices())
        )
    return varies


def reduction_depth(roots: Iterable[Value]) -> dict[Value, int]:
    """Return, for every value, the number of reductions that must finish one after another before it is known."""
    depth: dict[Value, int] = {}
    for value in topological(roots):
        below = max((depth[operand] for operand in value.operands()), default=0)
        depth[value] = below + 1 if isinstance(value, Reduce) else below
    return depth


def as_number(value: Value) -> float | int | bool | None:
    """Return the number of a `Constant`; None for any other value."""
    return cast(Constant, value).number if isinstance(value, Constant) else None
