"""The C++ statements that accumulate each kind of reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from overlapc.codegen.cpp.expressions import C_TYPE, constant_text
from overlapc.codegen.cpp.loop_plan import BLOCK
from overlapc.ir.body import Reduce


@dataclass(frozen=True, slots=True)
class Variable:
    """A C++ variable, or an array with one element for each column."""

    kind: str
    name: str
    identity: str


@dataclass(frozen=True, slots=True)
class Accumulator:
    """The C++ lines that accumulate one `Reduce`; in a tile of columns every variable is indexed by `lane`."""

    reduce: Reduce
    number: int
    totals: tuple[Variable, ...]  # live during the whole reduction
    partial: str | None  # declaration of the sum over one block ("float sum7"), which is folded into a double total
    fold: str  # line that adds a block's partial result to the totals
    # Clause in `#pragma omp simd reduction(...)`; "" if none is needed, None if the loop must run in order.
    clause: str | None
    result: str  # expression of the result, from the totals
    add: Callable[[str, str], list[str]]  # (value, flat position) -> lines that accumulate the value
    combine: Callable[[list[str]], str]  # other totals -> line that adds them to these totals
    # Flat position of a block's first element -> lines before that block of a row; `fold` comes after the block.
    opening: Callable[[str], list[str]] = field(default=lambda first: [])


_LIMITS = {
    torch.int64: ("INT64_MIN", "INT64_MAX"),
    torch.int32: ("INT32_MIN", "INT32_MAX"),
    torch.int16: ("int16_t(INT16_MIN)", "int16_t(INT16_MAX)"),
    torch.int8: ("int8_t(INT8_MIN)", "int8_t(INT8_MAX)"),
    torch.uint8: ("uint8_t(0)", "uint8_t(UINT8_MAX)"),
    torch.bool: ("false", "true"),
}


def accumulator(
    reduce: Reduce, number: int, columns: bool, in_order: bool, short: bool, row: tuple[str, int] | None = None
) -> Accumulator:
    """Return the accumulator for `reduce`; `number` makes its variables unique.

    columns: there is one result for each lane of a tile.
    in_order: the loops visit positions of the flattened reduction space from first to last.
    short: positions of the flattened reduction space fit 32 bits.
    row: if the vector loop is short, its variable, which starts at zero, and its number of iterations.
    """
    lane = "[lane]" if columns else ""
    kind, dtype = reduce.kind, reduce.arg.dtype
    if kind in ("argmax", "argmin"):
        return _first_position(reduce, number) if in_order and not columns else _position(reduce, number, lane, short)
    if dtype == torch.bool and reduce.dtype == torch.bool:
        kind = {"sum": "any", "max": "any", "prod": "all", "min": "all"}.get(kind, kind)
    if kind in ("any", "all"):
        return _logical(reduce, number, lane, kind)
    if kind in ("max", "min"):
        if dtype.is_floating_point and not columns:
            return _ordered(reduce, number)
        return _extreme(reduce, number, lane)
    if row is not None and kind == "sum" and reduce.dtype.is_floating_point:
        return _short_sum(reduce, number, *row)
    return _arithmetic(reduce, number, lane)


def _short_sum(reduce: Reduce, number: int, variable: str, length: int) -> Accumulator:
    """Return the accumulator for the sum of a short row, which stores all terms and adds them up at the row's end.

    Compilers combine the lanes of a simd reduction one after another, which takes longer than a short row itself.
    """
    name, terms, kind = f"total{number}", f"terms{number}", C_TYPE[reduce.dtype]
    return Accumulator(
        reduce,
        number,
        (Variable("double", name, "0"),),
        None,
        f"{name} += sum_terms<{length}>({terms});",
        "",
        f"{kind}({name})",
        lambda value, at: [f"{terms}[{variable}] = {value};"],
        lambda other: f"{name} += {other[0]};",
        lambda first: [f"{kind} {terms}[{length}];"],
    )


def _arithmetic(reduce: Reduce, number: int, lane: str) -> Accumulator:
    sign = "+" if reduce.kind == "sum" else "*"
    kind = C_TYPE[reduce.dtype]
    name = f"total{number}"
    start = "0" if reduce.kind == "sum" else "1"

    def combine(other: list[str]) -> str:
        return f"{name}{lane} {sign}= {other[0]};"

    if reduce.kind == "sum" and reduce.dtype.is_floating_point:
        # Lanes sum a block; sums of blocks are added in double: as accurate as pairwise summation at any length.
        part = f"sum{number}"
        return Accumulator(
            reduce,
            number,
            (Variable("double", name, start),),
            f"{kind} {part}",
            f"{name}{lane} += {part}{lane};",
            f"+: {part}",
            f"{kind}({name}{lane})",
            lambda value, at: [f"{part}{lane} += {value};"],
            combine,
            lambda first: [f"{kind} {part} = 0;"],
        )
    return Accumulator(
        reduce,
        number,
        (Variable(kind, name, start),),
        None,
        "",
        f"{sign}: {name}",
        f"{name}{lane}",
        lambda value, at: [f"{name}{lane} {sign}= {value};"],
        combine,
    )


def _logical(reduce: Reduce, number: int, lane: str, kind: str) -> Accumulator:
    sign, start = ("|", "false") if kind == "any" else ("&", "true")
    name = f"total{number}"

    def combine(other: list[str]) -> str:
        return f"{name}{lane} {sign}= {other[0]};"

    return Accumulator(
        reduce,
        number,
        (Variable("bool", name, start),),
        None,
        "",
        f"{sign}: {name}",
        f"{name}{lane}",
        lambda value, at: [f"{name}{lane} {sign}= ({value}) != 0;"],
        combine,
    )


def limit_of(dtype: torch.dtype, larger: bool) -> str:
    """Return the identity of max (if `larger`) or of min: the lowest or the highest number of `dtype`."""
    if dtype.is_floating_point:
        return constant_text(float("-inf") if larger else float("inf"), dtype)
    return _LIMITS[dtype][0 if larger else 1]


def _extreme(reduce: Reduce, number: int, lane: str) -> Accumulator:
    """Return the accumulator for max or min of integers, or of columns of floats: a compare and select, vectorized."""
    name, kind = f"total{number}", C_TYPE[reduce.arg.dtype]
    function = "maximum" if reduce.kind == "max" else "minimum"

    def combine(other: list[str]) -> str:
        return f"{name}{lane} = {function}<{kind}>({name}{lane}, {other[0]});"

    sign = ">" if reduce.kind == "max" else "<"

    def add(value: str, at: str) -> list[str]:
        if lane:
            return [combine([value])]
        return [f"{name} = {value} {sign} {name} ? {value} : {name};"]

    return Accumulator(
        reduce,
        number,
        (Variable(kind, name, limit_of(reduce.arg.dtype, reduce.kind == "max")),),
        None,
        "",
        f"{reduce.kind}: {name}",
        f"{name}{lane}",
        add,
        combine,
    )


def _ordered(reduce: Reduce, number: int) -> Accumulator:
    """Return the accumulator for max or min of floats along a row, computed on integers: see `ordered` in prelude.h."""
    name = f"total{number}"
    bits = 32 if reduce.arg.dtype == torch.float32 else 64
    of_nan = f"INT{bits}_MAX" if reduce.kind == "max" else f"INT{bits}_MIN"
    sign = ">" if reduce.kind == "max" else "<"
    key = f"key{number}"

    def combine(other: list[str]) -> str:
        return f"{name} = {other[0]} {sign} {name} ? {other[0]} : {name};"

    return Accumulator(
        reduce,
        number,
        (Variable(f"int{bits}_t", name, f"ordered({limit_of(reduce.arg.dtype, reduce.kind == 'max')}, {of_nan})"),),
        None,
        "",
        f"{reduce.kind}: {name}",
        f"from_ordered({name})",
        lambda value, at: [f"const int{bits}_t {key} = ordered({value}, {of_nan});", combine([key])],
        combine,
    )


@dataclass(frozen=True, slots=True)
class _Key:
    """Integers that are ordered as the values of a dtype, for argmax or argmin (`ordered` in prelude.h)."""

    kind: str  # C++ type
    limit: str  # the key that no other one is worse than
    of_nan: str  # key of NaN, for floats

    def of(self, value: str) -> str:
        """Return the expression of a value's key; adding 0 makes both zeros equal."""
        return f"ordered({value} + 0, {self.of_nan})" if self.of_nan else f"{self.kind}({value})"


def _key(dtype: torch.dtype, larger: bool, narrow: bool) -> _Key:
    """Return the keys of `dtype`; larger: for argmax; narrow: as narrow as its values, else of 32 bits at least."""
    limit = limit_of(dtype, larger)
    if dtype.is_floating_point:
        bits = 32 if dtype == torch.float32 else 64
        of_nan = f"INT{bits}_{'MAX' if larger else 'MIN'}"
        return _Key(f"int{bits}_t", f"ordered({limit}, {of_nan})", of_nan)
    if dtype == torch.int64 or (narrow and dtype != torch.bool):
        return _Key(C_TYPE[dtype], limit, "")
    return _Key("uint8_t" if narrow else "int32_t", limit, "")


def _precedes(new: str, at: str, best: str, place: str, sign: str) -> str:
    """Return the condition that key `new` is better than `best`, or equal and before it."""
    return f"({new} {sign} {best}) | (({new} == {best}) & ({at} < {place}))"


def _position(reduce: Reduce, number: int, lane: str, short: bool) -> Accumulator:
    """Return the accumulator for argmax or argmin of columns, or of rows whose positions are not visited in order.

    Keys and positions of columns have the same width if these are few (`short`): then the selects are vectorized.
    """
    key = _key(reduce.arg.dtype, reduce.kind == "argmax", narrow=False)
    best, place = f"total{number}{lane}", f"at{number}{lane}"
    sign = ">" if reduce.kind == "argmax" else "<"
    place_kind = key.kind if short else "int64_t"

    def replaced(new: str, at: str) -> str:
        better = _precedes(new, at, best, place, sign)
        if lane:
            return (
                f"{{ const bool better = {better}; {best} = better ? {new} : {best}; "
                f"{place} = better ? {at} : {place}; }}"
            )
        return f"if ({better}) {{ {best} = {new}; {place} = {at}; }}"

    def add(value: str, at: str) -> list[str]:
        name = f"key{number}"
        return [f"const {key.kind} {name} = {key.of(value)};", replaced(name, f"{place_kind}({at})")]

    return Accumulator(
        reduce,
        number,
        (
            Variable(key.kind, f"total{number}", key.limit),
            Variable(place_kind, f"at{number}", "INT64_MAX" if place_kind == "int64_t" else "INT32_MAX"),
        ),
        None,
        "",
        None,
        place,
        add,
        lambda other: replaced(other[0], other[1]),
    )


def _first_position(reduce: Reduce, number: int) -> Accumulator:
    """Return the accumulator for argmax or argmin along a row.

    It computes the extreme of each block, and searches its first position only if it is a new extreme.
    """
    key = _key(reduce.arg.dtype, reduce.kind == "argmax", narrow=True)
    kind, limit = key.kind, key.limit
    sign = ">" if reduce.kind == "argmax" else "<"
    best, place, block, keys, first = (f"{name}{number}" for name in ("total", "at", "best", "keys", "first"))

    def opening(position: str) -> list[str]:
        return [f"{kind} {keys}[{BLOCK}], {block} = {limit};", f"const int64_t {first} = {position};"]

    def add(value: str, at: str) -> list[str]:
        found = f"const {kind} key{number} = {keys}[{at} - {first}] = {key.of(value)};"
        return [found, f"{block} = key{number} {sign} {block} ? key{number} : {block};"]

    def combine(other: list[str]) -> str:
        return (
            f"if ({_precedes(other[0], other[1], best, place, sign)}) {{ {best} = {other[0]}; {place} = {other[1]}; }}"
        )

    return Accumulator(
        reduce,
        number,
        (Variable(kind, best, limit), Variable("int64_t", place, "INT64_MAX")),
        None,
        f"if (({block} {sign} {best}) | ({place} == INT64_MAX)) "
        f"{{ {best} = {block}; {place} = {first} + first_equal({keys}, {block}); }}",
        f"{reduce.kind[3:]}: {block}",
        place,
        add,
        combine,
        opening,
    )
