"""Fits a link (bandwidth, latency, two protocols) to measured times of collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from overlapc.estimators.device import Link, Protocol, Table
from overlapc.estimators.nccl import last_slope, ring_or_tree_ns
from overlapc.schedule.model import Comm

_ROUNDS = 400
_LEAST_STEP = 0.02  # smallest time of a ring step, as a fraction of the floor
_NEAR = 0.2  # the part of an error above this counts four times


@dataclass(frozen=True)
class Fit:
    """A fitted link. The link's times come on top of `floor_ns`."""

    floor_ns: float  # time that every collective takes at least
    link: Link


def fit(tables: Sequence[Table]) -> Fit:
    """Minimize the sum of errors of the logarithm of times by coordinate descent.

    The start is the bandwidth of the largest all-gather and the shortest of all times. Raise ValueError if no
    all-gather was measured.
    """
    gathers = [(size, ns, t.ranks) for t in tables if t.collective == "all_gather" for size, ns in t.points]
    if not gathers:
        raise ValueError("no gather was measured")
    size, ns, ranks = max(gathers)
    shortest_ns = min(ns for table in tables for _, ns in table.points)
    # bytes/s; floor; share, base and step of the low-latency protocol; base and step of the full-bandwidth one
    best = [size * (ranks - 1) / ranks / ns * 1e9, 0.8 * shortest_ns, 0.5, 0.1 * shortest_ns, 0.02 * shortest_ns]
    best += [shortest_ns, 0.1 * shortest_ns]
    error, step = _error(best, tables), 0.5
    for _ in range(_ROUNDS):
        improved = False
        for at in range(len(best)):
            for factor in (1 + step, 1 / (1 + step)):
                tried = [*best[:at], best[at] * factor, *best[at + 1 :]]
                tried[2] = min(tried[2], 1.0)
                found = _error(tried, tables)
                if found < error:
                    best, error, improved = tried, found, True
        if not improved:
            step /= 2
            if step < 1e-3:
                break
    return _fit_of(best)


def fit_copies(tables: Sequence[Table]) -> Link:
    """Return the link of copies between ranks, from the bytes that a rank sends to the others.

    The rate follows from the slope above the largest size, the latency is the rest of the smallest size's time; with
    several tables, the slowest rate and the longest latency. Raise ValueError if no table has two sizes.
    """
    found = []
    for table in tables:
        if len(table.points) > 1:
            share = (table.ranks - 1) / table.ranks
            small, small_ns = table.points[0]
            rate = share / last_slope(table.points) * 1e9
            found.append(Link(rate, max(0.0, small_ns - share * small / rate * 1e9)))
    if not found:
        raise ValueError("no copies were measured in two sizes")
    return Link(min(each.bytes_per_s for each in found), max(each.step_ns for each in found))


def _fit_of(values: Sequence[float]) -> Fit:
    rate, floor_ns, share, base, step, wide_base, wide_step = values
    least_ns = _LEAST_STEP * floor_ns  # groups of 2 and 4 ranks may show no time per step, but 64 ranks have one
    step, wide_step = max(step, least_ns), max(wide_step, least_ns)
    protocols = (Protocol(share, base, step), Protocol(1.0, wide_base, wide_step))
    return Fit(floor_ns, Link(rate, wide_step, protocols))


def _error(values: Sequence[float], tables: Sequence[Table]) -> float:
    found = _fit_of(values)
    total = 0.0
    for table in tables:
        comm = Comm(table.collective, 0, "", table.ranks)
        for size, ns in table.points:
            predicted_ns = ring_or_tree_ns(replace(comm, bytes=size), found.link)
            if predicted_ns is not None:
                off = abs(math.log((found.floor_ns + predicted_ns) / ns))
                total += off + 3 * max(0.0, off - _NEAR)
    return total
