"""Assigns the reductions of a kernel to passes over its data."""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy
import torch

from overlapc.codegen.triton.accumulate import (
    Accumulation,
    Moments,
    Online,
    Plain,
    Position,
    Scanning,
    State,
)
from overlapc.codegen.triton.expressions import neutral
from overlapc.ir.body import Body, Cast, Index, Op, Reduce, Scan, Value, as_number


def accumulations(
    body: Body,
    joined: bool,
    position_dtype: torch.dtype,
    width: int = 1,
    scans: Mapping[Scan, Scanning] | None = None,
) -> list[list[Accumulation]]:
    """Return the reductions of `body` by depth: those of entry d need only results of entries before d.

    joined: two successive reductions of the same values become one accumulation where possible: a maximum and the sum
    of exponentials relative to it, in lanes of `width`; a sum and the squared distances from the mean.
    scans: scans that must be accumulated before their results can be computed.
    """
    scans = scans or {}
    second = _partners(body) if joined else {}
    first = {later: sooner for sooner, later in second.items()}
    values = _without_joined(body, first) if first else body.values()
    depth: dict[Value, int] = {}
    levels: list[list[Accumulation]] = []
    for value in values:
        if not isinstance(value, Reduce) and value not in scans:
            depth[value] = max((depth[operand] for operand in value.operands()), default=0)
            continue
        if value in first:
            depth[value] = depth[first[value]]
            continue
        assert isinstance(value, Reduce | Scan)
        depth[value] = depth[value.arg] + 1
        while len(levels) < depth[value]:
            levels.append([])
        if isinstance(value, Scan):
            levels[depth[value] - 1].append(scans[value])
            continue
        number = sum(len(level) for level in levels)
        later = second.get(value)
        levels[depth[value] - 1].append(
            _single(value, number, position_dtype) if later is None else _joined(value, later, number, width)
        )
    return levels


def _partners(body: Body) -> dict[Reduce, Reduce]:
    """Map each reduction to the later one, relative to its result, that can be computed in the same pass."""
    reduces = [value for value in body.values() if isinstance(value, Reduce)]
    found: dict[Reduce, Reduce] = {}
    for later in reduces:
        sooner = _peak_of(later) or _total_of(later, body.reduction_numel())
        if sooner is None or sooner in found or sooner in found.values() or later in found:
            continue
        if sooner.dtype == later.dtype and later.dtype.is_floating_point:
            found[sooner] = later
    return found


def _without_joined(body: Body, first: Mapping[Reduce, Reduce]) -> list[Value]:
    """Return the values in order, without those that only reductions read which are computed with their `first`."""
    read: set[Value] = set()
    roots: list[Value] = [value for store in body.stores for value in store.operands()]
    while roots:
        value = roots.pop()
        if value not in read:
            read.add(value)
            roots += [first[value]] if isinstance(value, Reduce) and value in first else value.operands()
    return [value for value in body.values() if value in read]


def _peak_of(total: Reduce) -> Reduce | None:
    """Return max(x) if `total` is sum(exp(x - max(x))), else None."""
    exp = total.arg
    if total.kind != "sum" or not isinstance(exp, Op) or exp.name != "exp":
        return None
    difference = exp.args[0]
    if not isinstance(difference, Op) or difference.name != "sub":
        return None
    x, peak = difference.args
    peak = _unguarded(peak) or peak
    return peak if isinstance(peak, Reduce) and peak.kind == "max" and peak.arg is x else None


def _total_of(squares: Reduce, count: sympy.Expr) -> Reduce | None:
    """Return sum(x) if `squares` is sum((x - mean)²), else None.

    The mean must be sum(x) / count, possibly clamped to the range of x.
    """
    square = squares.arg
    if squares.kind != "sum" or not isinstance(square, Op) or square.name != "mul":
        return None
    distance, again = square.args
    if distance is not again or not isinstance(distance, Op) or distance.name != "sub":
        return None
    x, mean = distance.args
    mean = _unbounded(mean, x)
    if not isinstance(mean, Op) or mean.name != "div" or not _is_number(mean.args[1], count):
        return None
    total = mean.args[0]
    return total if isinstance(total, Reduce) and total.kind == "sum" and total.arg is x else None


def _unbounded(mean: Value, x: Value) -> Value:
    """Return a if `mean` is `minimum(maximum(a, min(x)), max(x))`, else `mean`."""
    for name, kind in (("minimum", "max"), ("maximum", "min")):
        if isinstance(mean, Op) and mean.name == name and mean.args[1] is Reduce(kind, x, x.dtype):
            mean = mean.args[0]
    return mean


def _is_number(value: Value, number: sympy.Expr) -> bool:
    """Whether `value` is `number`, which may be a symbolic size."""
    value = value.arg if isinstance(value, Cast) else value
    if isinstance(value, Index):
        return bool(value.expr == number)
    return bool(number.is_Integer) and as_number(value) == int(number)


def _unguarded(value: Value) -> Value | None:
    """Return peak if `value` is `where(abs(peak) == inf, 0, peak)`, as in torch's logsumexp, else None."""
    if not isinstance(value, Op) or value.name != "where" or as_number(value.args[1]) != 0:
        return None
    condition, _, peak = value.args
    if not isinstance(condition, Op) or condition.name != "eq" or as_number(condition.args[1]) != math.inf:
        return None
    size = condition.args[0]
    return peak if isinstance(size, Op) and size.name == "abs" and size.args[0] is peak else None


def _joined(sooner: Reduce, later: Reduce, number: int, width: int) -> Online | Moments:
    """Return one accumulation for both reductions; `number` is its number in the kernel."""
    if sooner.kind == "sum":
        names = (f"sum{number}", f"mean{number}", f"squares{number}", f"count{number}")
        return Moments(sooner, later, tuple(State(name, sooner.dtype, "0.0") for name in names))
    peak = State(f"peak{number}", sooner.dtype, neutral("max", sooner.dtype), width)
    total = State(f"total{number}", later.dtype, "0.0", width)
    (difference,) = later.arg.operands()
    return Online(sooner, later, (peak, total), guarded=sooner not in difference.operands())


def _single(value: Reduce, number: int, position_dtype: torch.dtype) -> Plain | Position:
    kind = value.kind
    if kind in ("argmax", "argmin"):
        dtype = torch.int32 if value.arg.dtype is torch.bool else value.arg.dtype
        best = State(f"{kind.removeprefix('arg')}{number}", dtype, neutral(kind, dtype))
        return Position(value, (best, State(f"at{number}", position_dtype, "0")))
    if value.dtype is torch.bool:
        kind = {"max": "any", "min": "all"}.get(kind, kind)
    dtype = torch.int32 if value.dtype is torch.bool or kind in ("any", "all") else value.dtype
    return Plain(value, (State(f"{value.kind}{number}", dtype, neutral(kind, dtype)),))


def scanning(scan: Scan, number: int, position_dtype: torch.dtype) -> Scanning:
    """Return the accumulation of `scan`; `number` is its number in the kernel."""
    kind, dtype = scan.kind, scan.arg.dtype
    if dtype is torch.bool:
        dtype = torch.int32
    start = neutral({"logsumexp": "max"}.get(kind, kind), dtype)
    states: tuple[State, ...] = (State(f"scan{number}", dtype, start),)
    if kind in ("argmax", "argmin"):
        states += (State(f"scan_at{number}", position_dtype, "0"),)
    return Scanning(scan, states)
