"""How each kind of reduction and scan accumulates in C++."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from overlapc.codegen.cpp.expressions import C_TYPE, constant_text
from overlapc.ir.body import Reduce, Scan


@dataclass(frozen=True, slots=True)
class Variable:
    """A C++ variable, or an array of them with one for each column."""

    kind: str
    name: str
    identity: str


@dataclass(frozen=True, slots=True)
class Accumulator:
    """Lines that accumulate one `Reduce`; in a tile of columns every variable is indexed by `lane`."""

    reduce: Reduce
    number: int
    totals: tuple[Variable, ...]  # kept across the whole reduction
    partial: str | None  # declaration of the sum over one block, "float sum7": a short sum, folded into a double total
    fold: str  # adds the partial to the total
    clause: str | None  # of `#pragma omp simd reduction(...)`; None when the loop must run in order
    result: str  # the value, from the totals
    add: Callable[[str, str], list[str]]  # (value, flat position) -> lines
    combine: Callable[[list[str]], str]  # other totals -> a line


_LIMITS = {
    torch.int64: ("INT64_MIN", "INT64_MAX"),
    torch.int32: ("INT32_MIN", "INT32_MAX"),
    torch.int16: ("int16_t(INT16_MIN)", "int16_t(INT16_MAX)"),
    torch.int8: ("int8_t(INT8_MIN)", "int8_t(INT8_MAX)"),
    torch.uint8: ("uint8_t(0)", "uint8_t(UINT8_MAX)"),
    torch.bool: ("false", "true"),
}


def accumulator(reduce: Reduce, number: int, columns: bool, in_order: bool) -> Accumulator:
    """The lines for `reduce`.

    `columns` when there is one result for each lane of a tile; `in_order` when the loops visit positions of the
    flattened reduction space from first to last.
    """
    lane = "[lane]" if columns else ""
    kind, dtype = reduce.kind, reduce.arg.dtype
    if kind in ("argmax", "argmin"):
        return _position(reduce, number, lane, in_order)
    if dtype == torch.bool and reduce.dtype == torch.bool:
        kind = {"sum": "any", "max": "any", "prod": "all", "min": "all"}.get(kind, kind)
    if kind in ("any", "all"):
        return _logical(reduce, number, lane, kind)
    if kind in ("max", "min"):
        if dtype.is_floating_point and not columns:
            return _ordered(reduce, number)
        return _extreme(reduce, number, lane)
    return _arithmetic(reduce, number, lane)


def _arithmetic(reduce: Reduce, number: int, lane: str) -> Accumulator:
    sign = "+" if reduce.kind == "sum" else "*"
    kind = C_TYPE[reduce.dtype]
    name = f"total{number}"
    start = "0" if reduce.kind == "sum" else "1"

    def combine(other: list[str]) -> str:
        return f"{name}{lane} {sign}= {other[0]};"

    if reduce.kind == "sum" and reduce.dtype.is_floating_point:
        # Lanes sum a block; blocks add up in double: as exact as pairwise summation, whatever the length.
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


def _limit(dtype: torch.dtype, larger: bool) -> str:
    """What every number of `dtype` is at least as large as (`larger`), or as small as."""
    if dtype.is_floating_point:
        return constant_text(float("-inf") if larger else float("inf"), dtype)
    return _LIMITS[dtype][0 if larger else 1]


def _extreme(reduce: Reduce, number: int, lane: str) -> Accumulator:
    """max or min of integers, or of floats a column each: compare and blend, which vectorizes."""
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
        (Variable(kind, name, _limit(reduce.arg.dtype, reduce.kind == "max")),),
        None,
        "",
        f"{reduce.kind}: {name}",
        f"{name}{lane}",
        add,
        combine,
    )


def _ordered(reduce: Reduce, number: int) -> Accumulator:
    """max or min of floats along a row, on integers of the same order: see `ordered` in prelude.h."""
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
        (Variable(f"int{bits}_t", name, f"ordered({_limit(reduce.arg.dtype, reduce.kind == 'max')}, {of_nan})"),),
        None,
        "",
        f"{reduce.kind}: {name}",
        f"from_ordered({name})",
        lambda value, at: [f"const int{bits}_t {key} = ordered({value}, {of_nan});", combine([key])],
        combine,
    )


def _position(reduce: Reduce, number: int, lane: str, in_order: bool) -> Accumulator:
    best, place = f"total{number}{lane}", f"at{number}{lane}"
    kind = C_TYPE[reduce.arg.dtype]
    order = "max" if reduce.kind == "argmax" else "min"

    def replace(condition: str, value: str, at: str) -> str:
        if lane:  # selects, which vectorize
            select = f"{best} = better ? {value} : {best}; {place} = better ? {at} : {place};"
            return f"{{ const bool better = {condition}; {select} }}"
        return f"if ({condition}) {{ {best} = {value}; {place} = {at}; }}"

    def any_order(value: str, at: str) -> str:
        return replace(f"before_{order}<{kind}>({value}, {at}, {best}, {place})", value, at)

    def add(value: str, at: str) -> list[str]:
        if not in_order:
            return [any_order(value, at)]
        # Going forward, an equal one never replaces an earlier one; the very first, at INT64_MAX, is always replaced.
        return [replace(f"beyond_{order}<{kind}>({value}, {best}) | ({place} == INT64_MAX)", value, at)]

    return Accumulator(
        reduce,
        number,
        (
            Variable(kind, f"total{number}", _limit(reduce.arg.dtype, reduce.kind == "argmax")),
            Variable("int64_t", f"at{number}", "INT64_MAX"),
        ),
        None,
        "",
        None,
        place,
        add,
        lambda other: any_order(other[0], other[1]),
    )


def scan_state(scan: Scan, number: int) -> tuple[Variable, ...]:
    """What a scan carries from one iteration to the next, at its start."""
    name = f"scan{number}"
    if scan.kind in ("sum", "prod", "logsumexp"):
        # As in eager, whose kernels carry a double for floats.
        kind = "double" if scan.dtype.is_floating_point else C_TYPE[scan.dtype]
        start = {"sum": "0", "prod": "1", "logsumexp": "-INFINITY"}[scan.kind]
        return (Variable(kind, name, start),)
    limit = _limit(scan.arg.dtype, larger=scan.kind.endswith("max"))
    best = Variable(C_TYPE[scan.arg.dtype], name, limit)
    return (best, Variable("int64_t", f"{name}_at", "0")) if scan.kind.startswith("arg") else (best,)


def scan_text(scan: Scan, number: int, value: str, position: str, lane: str) -> str:
    """An expression that takes `value` into the state and is the scan's value there; `lane` indexes the state."""
    state = f"scan{number}{lane}"
    kind = C_TYPE[scan.arg.dtype]
    if scan.kind in ("sum", "prod"):
        return f"{C_TYPE[scan.dtype]}({state} {'+' if scan.kind == 'sum' else '*'}= {value})"
    if scan.kind == "logsumexp":
        return f"{C_TYPE[scan.dtype]}({state} = log_add_exp({state}, {value}))"
    if scan.kind in ("max", "min"):
        return f"{state} = {'maximum' if scan.kind == 'max' else 'minimum'}<{kind}>({state}, {value})"
    return f"running_{scan.kind}<{kind}>({value}, {position}, {state}, scan{number}_at{lane})"
