"""Fits a device profile to measured nodes, which improves later predictions.

Four parts of a profile are fitted one after the other: tables of collectives, rates of generated kernels, rates of
library calls (matmuls, attention), and contention between compute and collectives. A part is accepted only if fitting
it to one half of the nodes improves the predictions of the other half; it is then fitted to all nodes.

Every fitted number is a median over at least `MIN_NODES` nodes of one kind and size, and changes by at most
`MOST_FACTOR`: a larger error has another cause than a number in the profile.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from overlapc.estimators.calibration.observed import KINDS, ObservedNode, Run, observe
from overlapc.estimators.contention import ComputeKind, compute_stretch, traffic_of
from overlapc.estimators.device import DeviceProfile, Slowdown, Table
from overlapc.estimators.links import ranks_by_host
from overlapc.estimators.roofline import curve_of
from overlapc.schedule.model import Kind, Node

MIN_NODES = 3  # that a number is fitted to
MOST_FACTOR = 3.0
_SAME_SIZE = 8  # bins an octave: sizes within 9% of each other are one
_WORTH_IT = 0.01  # a factor of contention that changes by less stays


@dataclass(frozen=True, slots=True)
class ProfileChange:
    """A number of the profile that was fitted."""

    parameter: str
    before: float | None  # None: the profile had none
    after: float
    nodes: int  # number of nodes that it was fitted to


@dataclass(frozen=True, slots=True)
class Error:
    """The median relative error of the predictions for a kind of nodes, before and after."""

    kind: str
    nodes: int
    before: float
    after: float


@dataclass(frozen=True)
class Feedback:
    """The fitted profile, its changes, and the errors before and after."""

    profile: DeviceProfile
    changes: tuple[ProfileChange, ...]
    errors: tuple[Error, ...]  # of held-out nodes, predicted with a profile fitted to the other nodes
    refused: tuple[str, ...]  # parts whose fit did not improve predictions


_Fit = Callable[[DeviceProfile, Sequence[ObservedNode]], tuple[DeviceProfile, list[ProfileChange]]]


def feed_back(profile: DeviceProfile, runs: Sequence[Run]) -> Feedback:
    """Fit `profile` to runs. Quantities that no measured node depends on stay unchanged."""
    now, tried = profile, profile
    changes: list[ProfileChange] = []
    refused = []
    parts: tuple[tuple[str, _Fit], ...] = (
        ("collectives", _fit_tables), ("kernels", _fit_kernels), ("library calls", _fit_calls),
        ("contention", _fit_contention),
    )  # fmt: skip
    for part, fit in parts:
        fitted_on, held_out = _halves(observe(tried, runs))
        better, _ = fit(tried, fitted_on)
        _, after = _halves(observe(better, runs))
        kinds = set(KINDS.values()) if part == "contention" else {part}
        if _sum_off(after, kinds) < _sum_off(held_out, kinds):
            tried = better
            now, made = fit(now, observe(now, runs))
            changes += made
        elif better != tried:
            refused.append(part)
    _, before = _halves(observe(profile, runs))
    _, after = _halves(observe(tried, runs))
    return Feedback(now, tuple(changes), tuple(_errors(before, after)), tuple(refused))


def _halves(seen: Sequence[ObservedNode]) -> tuple[list[ObservedNode], list[ObservedNode]]:
    """Divide the nodes of each kind alternately into two halves."""
    by_kind: dict[str, list[ObservedNode]] = defaultdict(list)
    for each in seen:
        by_kind[each.kind].append(each)
    return (
        [each for members in by_kind.values() for each in members[::2]],
        [each for members in by_kind.values() for each in members[1::2]],
    )


def _sum_off(seen: Sequence[ObservedNode], kinds: set[str]) -> float:
    """Return the sum over `kinds` of the median error."""
    return sum(median(offs) for kind in kinds if (offs := [each.off for each in seen if each.kind == kind]))


def _errors(before: Sequence[ObservedNode], after: Sequence[ObservedNode]) -> Iterable[Error]:
    for kind in dict.fromkeys(KINDS.values()):
        offs = [[each.off for each in seen if each.kind == kind] for seen in (before, after)]
        if all(offs):
            was, now = (math.expm1(median(off)) for off in offs)
            yield Error(kind, len(offs[1]), was, now)


# Points of tables and curves


def _fit_tables(profile: DeviceProfile, seen: Sequence[ObservedNode]) -> tuple[DeviceProfile, list[ProfileChange]]:
    by_table: dict[Table, list[tuple[int, ObservedNode]]] = defaultdict(list)
    for each in seen:
        comm = each.node.comm
        if comm is None or not comm.bytes or comm.channels or ranks_by_host(comm, profile) != {0: comm.size}:
            continue
        table = profile.table(comm.carried, comm.size, comm.dtype)
        if table is not None:
            by_table[table].append((comm.bytes, each))
    changes: list[ProfileChange] = []
    tables = []
    for table in profile.tables:
        name = f"{table.collective} of {table.ranks} ranks {table.dtype}".rstrip()
        fitted, made = _fit_points(name, table.points, by_table.get(table, ()))
        ascending: list[tuple[int, float]] = []
        for size, ns in fitted:
            ascending.append((size, max(ns, ascending[-1][1]) if ascending else ns))
        tables.append(replace(table, points=tuple(ascending)) if made else table)
        changes += made
    return replace(profile, tables=tuple(tables)), changes


def _fit_kernels(profile: DeviceProfile, seen: Sequence[ObservedNode]) -> tuple[DeviceProfile, list[ProfileChange]]:
    return _fit_curves(profile, [each for each in seen if each.node.kind is Kind.KERNEL])


def _fit_calls(profile: DeviceProfile, seen: Sequence[ObservedNode]) -> tuple[DeviceProfile, list[ProfileChange]]:
    return _fit_curves(profile, [each for each in seen if each.node.kind is Kind.EXTERN])


def _fit_curves(profile: DeviceProfile, seen: Sequence[ObservedNode]) -> tuple[DeviceProfile, list[ProfileChange]]:
    by_curve: dict[str, list[tuple[int, ObservedNode]]] = defaultdict(list)
    for each in seen:
        found = curve_of(each.node, profile)
        if found is not None:
            by_curve[found[0]].append((found[1], each))
    changes: list[ProfileChange] = []
    curves = dict(profile.curves)
    for name, sized in by_curve.items():
        rates = dict(curves[name])
        times = {size: size / rate * 1e9 for size, rate in rates.items()}
        fitted, made = _fit_points(name, tuple(times.items()), sized)
        if made:
            curves[name] = tuple(
                (size, rates[size] if times.get(size) == ns else size / ns * 1e9) for size, ns in fitted
            )
            changes += made
    return replace(profile, curves=curves), changes


def _fit_points(
    name: str, points: Sequence[tuple[int, float]], sized: Sequence[tuple[int, ObservedNode]]
) -> tuple[list[tuple[int, float]], list[ProfileChange]]:
    """Return (size, ns) points fitted to measured nodes, and the changes.

    There is a point at every size with enough nodes. Earlier points between these are scaled by the interpolated ratio.
    """
    bins: dict[int, list[tuple[int, ObservedNode]]] = defaultdict(list)
    for size, each in sized:
        bins[_bin(size)].append((size, each))
    ratios: list[tuple[int, float]] = []  # size, measured / predicted
    fitted: dict[int, float] = {}
    changes = []
    for _, members in sorted(bins.items()):
        apart = [(size, each) for size, each in members if each.was_alone]
        chosen = apart if len(apart) >= MIN_NODES else members
        ratio = median(each.seen_alone_ns / each.alone_ns for _, each in chosen)
        if len(chosen) < MIN_NODES or not 1 / MOST_FACTOR <= ratio <= MOST_FACTOR:
            continue
        size = sorted(size for size, _ in chosen)[len(chosen) // 2]
        alone_ns = median(each.alone_ns for _, each in chosen)
        ratios.append((size, ratio))
        fitted[size] = alone_ns * ratio
        changes.append(ProfileChange(f"{name} at {size}, ns", alone_ns, alone_ns * ratio, len(chosen)))
    if not ratios:
        return list(points), changes
    least, most = ratios[0][0], ratios[-1][0]
    ends = {_bin(least), _bin(most)}
    for size, ns in points:
        if least < size < most:
            fitted.setdefault(size, ns * _between(ratios, size))
        elif _bin(size) not in ends:  # an old point this near to a fitted one would contradict it
            fitted[size] = ns
    return sorted(fitted.items()), changes


def _bin(size: int) -> int:
    return round(_SAME_SIZE * math.log2(size))


def _between(points: Sequence[tuple[int, float]], size: int) -> float:
    """Interpolate in the logarithm of `size`, which must lie between the first and the last point."""
    for (low, low_value), (high, high_value) in itertools.pairwise(points):
        if low <= size <= high:
            share = math.log(size / low) / math.log(high / low)
            return low_value + (high_value - low_value) * share
    raise AssertionError(f"{size} lies outside of {points}")


# Contention


def _fit_contention(profile: DeviceProfile, seen: Sequence[ObservedNode]) -> tuple[DeviceProfile, list[ProfileChange]]:
    changes: list[ProfileChange] = []
    groups: dict[tuple[str, str], list[ObservedNode]] = defaultdict(list)
    slowdowns: dict[str, Slowdown] = {}
    fitted = dict(profile.slowdowns)
    for each in seen:
        comm = each.overlapping if each.node.comm is None else each.node.comm
        if comm is None or each.load is None or not each.overlapped_throughout:
            continue
        key = f"{comm.carried}@{comm.channels}" if comm.channels else comm.carried
        slowdowns[key] = profile.slowdown(comm.carried, comm.channels)
        groups[key, _field(each, slowdowns[key], profile)].append(each)
    for (key, name), members in sorted(groups.items()):
        if len(members) < MIN_NODES:
            continue
        before = getattr(slowdowns[key], name)
        if isinstance(before, tuple):
            factor = _common_factor(members, slowdowns[key], profile)
            if factor is not None and abs(factor - 1) > _WORTH_IT:
                points = tuple((size, max(1.0, times * factor)) for size, times in before)
                fitted[key] = slowdowns[key] = replace(slowdowns[key], **{name: points})  # type: ignore[arg-type]
                changes.append(ProfileChange(f"slowdowns.{key}.{name}, factor", 1.0, factor, len(members)))
            continue
        after = _fitted(name, before, members, slowdowns[key], profile)
        if after is not None and abs(after / (before or profile.collective_slowdown) - 1) > _WORTH_IT:
            fitted[key] = slowdowns[key] = replace(slowdowns[key], **{name: after})  # type: ignore[arg-type]
            changes.append(ProfileChange(f"slowdowns.{key}.{name}", before, after, len(members)))
    return replace(profile, slowdowns=fitted), changes


def _field(each: ObservedNode, slowdown: Slowdown, profile: DeviceProfile) -> str:
    """Return the field of `Slowdown` that a node's time depends on."""
    assert each.load is not None
    if each.node.comm is not None:
        return "own_memory" if each.load.kind is ComputeKind.MEMORY else "own_matmul"
    if each.load.kind is ComputeKind.MEMORY and slowdown.memories and each.load.bytes:
        return "memories"
    if each.load.kind is not ComputeKind.MATMUL:
        return each.load.kind.value
    if not each.load.results or not profile.multiprocessors or slowdown.multiprocessors is None:
        return "matmul"
    return "matmuls" if slowdown.matmuls else "multiprocessors"


def _fitted(
    name: str, before: float | None, members: Sequence[ObservedNode], slowdown: Slowdown, profile: DeviceProfile
) -> float | None:
    """Return the value of a `Slowdown` field that fits the times best; None if no plausible value does."""
    slowed = [each.measured_ns / each.alone_ns for each in members]
    if name.startswith("own"):
        # The compute beside a collective changes while it runs, so the simulated time is scaled.
        usual = before or profile.collective_slowdown
        return _in_time(usual * median(each.measured_ns / each.predicted_ns for each in members))
    if name != "multiprocessors":
        return _in_time(median(slowed))
    assert before is not None

    def off(held: float) -> float:
        predicted = [_beside(each, replace(slowdown, multiprocessors=held), profile) for each in members]
        return median(abs(ours - theirs) for ours, theirs in zip(predicted, slowed, strict=True))

    best = min(range(1, profile.multiprocessors // 2 + 1), key=lambda held: (off(held), abs(held - before)))
    return float(best) if off(best) < off(before) else None


def _common_factor(members: Sequence[ObservedNode], slowdown: Slowdown, profile: DeviceProfile) -> float | None:
    """Return the median ratio of measured to predicted slowdown, by which a curve is scaled; None if implausible."""
    factor = median(each.measured_ns / each.alone_ns / _beside(each, slowdown, profile) for each in members)
    return factor if 1 / MOST_FACTOR <= factor <= MOST_FACTOR else None


def _beside(each: ObservedNode, slowdown: Slowdown, profile: DeviceProfile) -> float:
    """Return the predicted slowdown factor of a compute node beside its collective, given that `slowdown`."""
    assert each.load is not None
    assert each.overlapping is not None
    beside = Node("beside", Kind.START, each.overlapping.collective, comm=each.overlapping)
    return compute_stretch(each.load, [replace(traffic_of(beside, profile), slowdown=slowdown)], profile)


def _in_time(factor: float) -> float | None:
    return max(1.0, factor) if factor <= MOST_FACTOR else None


def provenance(feedback: Feedback, source: str) -> list[dict[str, Any]]:
    """Return the changes in the form of a profile file."""
    return [
        {
            "parameter": each.parameter,
            "before": each.before,
            "after": each.after,
            "nodes": each.nodes,
            "origin": source,
        }
        for each in feedback.changes
    ]
