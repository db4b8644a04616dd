"""What became of each collective: exposed before and after, how far it moved, and what it stopped at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlapc.estimators.timeline import Timeline
from overlapc.passes.base import PassReport
from overlapc.passes.reasons import Reason
from overlapc.schedule.model import Node


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective before and after the passes, for reports. Times in ns, bytes by its definition."""

    name: str
    op: str
    group: str
    size: int  # ranks
    bytes: int
    estimate_ns: float | None  # None: nobody could estimate it
    source: str
    exposed_before_ns: float
    hidden_before_ns: float
    exposed_after_ns: float
    hidden_after_ns: float
    moves: int  # positions that its start and its wait moved
    limit: str  # the limiting factor in words
    causes: tuple[Reason, ...] = ()  # the named reasons in it: of the start, of the wait
    via: str = ""  # what carries it, as `Comm.via`
    members: tuple[str, ...] = ()  # the collectives that came in and were merged into it


def records_of(reports: Sequence[PassReport], before: Timeline, after: Timeline) -> tuple[CollectiveRecord, ...]:
    """One record a collective of the final schedule, in its order."""
    records = []
    schedule = after.schedule
    merged: dict[str, tuple[str, ...]] = {}
    for report in reports:
        for name, members in report.merged.items():
            merged[name] = tuple(each for member in members for each in merged.get(member, (member,)))
    for node in schedule.nodes:
        if node.name not in after.collectives:
            continue
        wait = schedule.wait_of(node)
        members = merged.get(node.name, ())
        names = [node.name, *members] if wait is None else [node.name, *members, wait.name]
        comm, now = node.comm, after.collectives[node.name]
        was = [before.collectives[name] for name in members or (node.name,)]
        limit, causes = _limit(reports, node, wait, hidden=node.estimate is not None and now.exposed_ns <= 0)
        records.append(
            CollectiveRecord(
                name=node.name,
                op=node.op if comm is None else comm.collective,
                group=node.group,
                size=0 if comm is None else comm.size,
                bytes=0 if comm is None else comm.bytes,
                estimate_ns=None if node.estimate is None else node.estimate.ns,
                source="unknown" if node.estimate is None else node.estimate.source,
                exposed_before_ns=sum(each.exposed_ns for each in was),
                hidden_before_ns=sum(each.hidden_ns for each in was),
                exposed_after_ns=now.exposed_ns,
                hidden_after_ns=now.hidden_ns,
                moves=sum(report.moves.get(name, 0) for report in reports for name in names),
                limit=limit,
                causes=causes,
                members=members,
                via="" if comm is None else comm.via,
            )
        )
    return tuple(records)


def _limit(
    reports: Sequence[PassReport], node: Node, wait: Node | None, *, hidden: bool
) -> tuple[str, tuple[Reason, ...]]:
    """What keeps a collective from being hidden, in words and by name: its start's last reason, then its wait's."""
    if hidden:
        return Reason.HIDDEN.about(), ()
    parts, causes = [], []
    for label, name in (("start", node.name), ("wait", "" if wait is None else wait.name)):
        said = [(report.reasons[name], report.limits.get(name)) for report in reports if name in report.reasons]
        # A pass that was undone as a whole says less than one that decided about this node.
        said = [(text, reason) for text, reason in said if reason is not Reason.SLOWER] or said
        if not said or said[-1][1] is Reason.HIDDEN:
            continue
        text, reason = said[-1]
        parts.append(f"{label}: {text}")
        if reason is not None:
            causes.append(reason)
    words = "; ".join(parts) or ("no pass looked at it" if node.estimate is not None else "no estimate")
    return words, tuple(causes)
