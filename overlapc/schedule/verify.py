"""Rules that every schedule must satisfy: one small function for each rule, run after every stage and pass.

A rule yields the problems it finds; `verify` raises ScheduleError for the first one, with the lines of the
schedule around it. Every rule is linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

from overlapc.errors import ScheduleError
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import COMMUNICATION, Kind, Schedule
from overlapc.units import human_bytes

HINT = "hint: OVERLAPC_DUMP=passes writes the schedule before and after every pass"
_SHOWN = 6  # lines of the schedule that an error shows


@dataclass(frozen=True, slots=True)
class Problem:
    """A violation of a rule: message, position, and the other end of the lines to show (no lines if `at` is None)."""

    message: str
    at: int | None = None
    until: int | None = None


def verify(
    schedule: Schedule,
    where: str,
    *,
    reference: Schedule | None = None,
    may_reorder_collectives: bool = False,
    limit_bytes: int | None = None,
    merged: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> None:
    """Raise ScheduleError if a rule is violated.

    where: the stage or pass to name in the error. reference: the schedule that this one was made from; nodes and the
    order of collectives are compared with it. limit_bytes: the peak memory that the schedule claims not to exceed.
    merged: nodes that replace several nodes of the reference, with the names of these.
    """
    for problem in problems(
        schedule,
        reference=reference,
        may_reorder_collectives=may_reorder_collectives,
        limit_bytes=limit_bytes,
        merged=merged,
    ):
        lines = _lines(schedule, problem)
        raise ScheduleError("\n".join([f"{where}: {problem.message}", *lines, HINT]))


def problems(
    schedule: Schedule,
    *,
    reference: Schedule | None = None,
    may_reorder_collectives: bool = False,
    limit_bytes: int | None = None,
    merged: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Iterator[Problem]:
    """Yield all violations, the most serious first; `verify` reports the first one."""
    yield from reads_are_defined(schedule)
    if reference is not None:
        yield from is_complete(schedule, reference, merged)
    yield from starts_are_waited_once(schedule)
    yield from results_are_waited_for(schedule)
    yield from is_topological(schedule)
    if reference is not None and not may_reorder_collectives:
        yield from keeps_collective_order(schedule, reference, merged)
    if limit_bytes is not None:
        yield from fits(schedule, limit_bytes)


def reads_are_defined(schedule: Schedule) -> Iterator[Problem]:
    """Every name is a buffer; a read buffer is an input or was written earlier; outputs exist."""
    buffers, producers = schedule.buffers, schedule.producers
    for at, node in enumerate(schedule.nodes):
        for name in (*node.reads, *node.writes, *node.mutates):
            if name not in buffers:
                yield Problem(f"{node.name} uses {name}, which is not a buffer of the schedule", at)
                return
        for name in node.reads:
            producer = producers.get(name)
            if producer is None:
                if not buffers[name].is_input:
                    yield Problem(f"{node.name} reads {name}, which is neither an input nor written by a node", at)
            elif producer >= at:
                yield Problem(_too_early(schedule, at, name), at, producer)
        for name in node.mutates:
            if not any(schedule.root(made) == schedule.root(name) for made in node.writes):
                yield Problem(f"{node.name} overwrites {name} but defines no alias of it", at)
    for name in schedule.outputs:
        if name not in schedule.buffers:
            yield Problem(f"the output {name} is not a buffer of the schedule")


def is_complete(
    schedule: Schedule, reference: Schedule, merged: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> Iterator[Problem]:
    """No node was lost, added or duplicated; a merged node reads and writes everything that its members did."""
    inside = {member: name for name, members in merged.items() for member in members}
    had = {inside.get(node.name, node.name) for node in reference.nodes}
    has = {node.name for node in schedule.nodes}
    for node in reference.nodes:
        name = inside.get(node.name, node.name)
        if name not in has:
            yield Problem(f"{node.name} is missing")
        elif name != node.name:
            made = schedule.node(name)
            lost = [*(set(node.reads) - set(made.reads)), *(set(node.writes) - set(made.writes))]
            if lost:
                yield Problem(f"{name} lacks {lost[0]} of its member {node.name}", schedule.position(name))
            if node.name in has:
                yield Problem(f"{node.name} occurs twice: alone and merged into {name}", schedule.position(node.name))
    for at, node in enumerate(schedule.nodes):
        if node.name not in had:
            yield Problem(f"{node.name} is not a node of the original schedule", at)


def starts_are_waited_once(schedule: Schedule) -> Iterator[Problem]:
    """Every WAIT has its START, and each output of a START has at most one WAIT."""
    waited: dict[str, str] = {}
    for at, node in enumerate(schedule.nodes):
        if node.kind is not Kind.WAIT:
            continue
        try:
            start = schedule.start_of(node).name
        except ScheduleError as error:
            yield Problem(str(error), at)
            continue
        for root in {schedule.root(name) for name in node.reads}:
            if root in waited:
                yield Problem(f"{node.name} waits for {start}, which {waited[root]} already waits for", at)
            waited[root] = node.name


def results_are_waited_for(schedule: Schedule) -> Iterator[Problem]:
    """Only WAIT and VIEW nodes read what a START writes; all other nodes read the wait's result."""
    for at, node in enumerate(schedule.nodes):
        if node.kind in (Kind.WAIT, Kind.VIEW):
            continue
        for name in node.reads:
            start = _in_flight(schedule, name)
            if start is not None and start != node.name:
                yield Problem(f"{node.name} reads {name}, a result of {start}, instead of its wait's result", at)


def is_topological(schedule: Schedule) -> Iterator[Problem]:
    """Every dependence points forward."""
    for before, after, why in dependencies.of(schedule).edges():
        if before >= after:
            early, late = schedule.nodes[after], schedule.nodes[before]
            reason = {
                Why.DATA: f"{early.name} comes before {late.name}, whose result it uses",
                Why.MUTATION: f"{early.name} comes before {late.name}, but one overwrites a buffer of the other",
                Why.AFTER: f"{early.name} comes before {late.name}, but must come after it",
                Why.COLLECTIVE_ORDER: f"{early.name} was moved before {late.name} of the same process group",
                Why.BARRIER: f"{early.name} was moved before {late.name}, but one is a barrier for communication",
            }[why]
            yield Problem(reason, after, before)


def keeps_collective_order(
    schedule: Schedule, reference: Schedule, merged: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> Iterator[Problem]:
    """The STARTs of each process group are in the order of the reference; merged ones where their members were."""
    inside = {member: name for name, members in merged.items() for member in members}
    wanted = {
        group: [name for name, _ in groupby(inside.get(name, name) for name in names)]
        for group, names in collective_order(reference).items()
    }
    for group, names in collective_order(schedule).items():
        for found, expected in zip(names, wanted.get(group, ()), strict=False):
            if found != expected:
                yield Problem(f"{found} starts in the place of {expected} on {group}", schedule.position(found))
                break


def fits(schedule: Schedule, limit_bytes: int) -> Iterator[Problem]:
    """The exact peak memory is within the limit."""
    profile = analyze(schedule)
    if profile.peak_bytes > limit_bytes:
        yield Problem(
            f"needs {human_bytes(profile.peak_bytes)} at its peak, but claims at most {human_bytes(limit_bytes)}",
            profile.peak_at,
        )


def collective_order(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Return, by process group, the names of its STARTs and synchronous collectives in launch order."""
    order: dict[str, list[str]] = {}
    for node in schedule.nodes:
        if node.kind in COMMUNICATION and node.comm is not None:
            order.setdefault(node.comm.group, []).append(node.name)
    return {group: tuple(names) for group, names in order.items()}


def _too_early(schedule: Schedule, at: int, name: str) -> str:
    node, producer = schedule.nodes[at], schedule.producer(name)
    assert producer is not None
    if producer.kind is Kind.WAIT:
        return f"{node.name} reads {name} before it is waited for"
    return f"{node.name} reads {name} before {producer.name} defines it"


def _in_flight(schedule: Schedule, name: str) -> str | None:
    """Return the START that writes a buffer, directly or behind views; None if another node writes it."""
    while True:
        at = schedule.producers.get(name)
        if at is None:
            return None
        producer = schedule.nodes[at]
        if producer.kind is Kind.START:
            return producer.name
        alias_of = schedule.buffers[name].alias_of
        if producer.kind is not Kind.VIEW or alias_of is None:
            return None
        name = alias_of


def _lines(schedule: Schedule, problem: Problem) -> list[str]:
    """Return the statement at fault, marked with `>`, with the lines up to `until` or a few around it."""
    if problem.at is None:
        return []
    last = problem.until if problem.until is not None else problem.at
    low = max(0, min(problem.at, last) - 1)
    shown = list(range(low, min(len(schedule.nodes), max(problem.at, last) + 2)))
    if len(shown) > _SHOWN:  # the two ends of a long stretch
        shown = [*shown[: _SHOWN // 2], -1, *shown[-(_SHOWN // 2) :]]
    return ["   ..." if at < 0 else f"{' > ' if at == problem.at else '   '}{brief(schedule, at)}" for at in shown]


def brief(schedule: Schedule, at: int) -> str:
    """Return one node in its short form: `%y = kernel(%h, %w0)`."""
    node = schedule.nodes[at]
    names = ", ".join(node.writes) or node.name
    group = f" @{node.group}" if node.group else ""
    return f"{names} = {node.op}({', '.join(node.reads)}){group}"
