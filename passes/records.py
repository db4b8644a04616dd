"""Records of collectives: exposed time before and after the passes, distance moved and limiting factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlapc.estimators.timeline import Timeline
from overlapc.passes.base import PassReport
from overlapc.passes.reasons import Reason
from overlapc.schedule.model import Node


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective before and after the passes, for reports. Times in ns, bytes as in `Comm`."""

    name: str
    op: str
    group: str
    size: int  # ranks
    bytes: int
    estimate_ns: float | None  # None: no estimator knows it
    source: str
    exposed_before_ns: float
    hidden_before_ns: float
    exposed_after_ns: float
    hidden_after_ns: float
    moves: int  # positions that its start and its wait moved
    limit: str  # the limiting factor in words
    causes: tuple[Reason, ...] = ()  # the reasons in `limit`: that of the start, that of the wait
    via: str = ""  # transport, as `Comm.via`
    members: tuple[str, ...] = ()  # the incoming collectives that were merged into it


def records_of(reports: Sequence[PassReport], before: Timeline, after: Timeline) -> tuple[CollectiveRecord, ...]:
    """Return one record for each collective of the final schedule, in its order."""
    records = []
    schedule = after.schedule
    merged: dict[str, tuple[str, ...]] = {}
    for report in reports:
        for name, members in report.merged.items():
            merged[name] = tuple(original for member in members for original in merged.get(member, (member,)))
    for node in schedule.nodes:
        if node.name not in after.collectives:
            continue
        wait = schedule.wait_of(node)
        members = merged.get(node.name, ())
        names = [node.name, *members] if wait is None else [node.name, *members, wait.name]
        comm, now = node.comm, after.collectives[node.name]
        was = [before.collectives[name] for name in members or (node.name,)]
        limit, causes = _limit(reports, node, wait, hidden=node.estimate is not None and now.exposed_ns <= 0)
        records.append(CollectiveRecord(
            name=node.name, op=node.op if comm is None else comm.collective,
            group=node.group, size=0 if comm is None else comm.size, bytes=0 if comm is None else comm.bytes,
            estimate_ns=None if node.estimate is None else node.estimate.ns,
            source="unknown" if node.estimate is None else node.estimate.source,
            exposed_before_ns=sum(each.exposed_ns for each in was), exposed_after_ns=now.exposed_ns,
            hidden_before_ns=sum(each.hidden_ns for each in was), hidden_after_ns=now.hidden_ns,
            moves=sum(report.moves.get(name, 0) for report in reports for name in names),
            limit=limit, causes=causes, members=members, via="" if comm is None else comm.via,
        ))  # fmt: skip
    return tuple(records)


def _limit(
    reports: Sequence[PassReport], node: Node, wait: Node | None, *, hidden: bool
) -> tuple[str, tuple[Reason, ...]]:
    """Return what keeps a collective exposed, in words and as reasons: the last of its start, then of its wait."""
    if hidden:
        return Reason.HIDDEN.about(), ()
    parts, causes = [], []
    for label, name in (("start", node.name), ("wait", "" if wait is None else wait.name)):
        given = [(report.reasons[name], report.limits.get(name)) for report in reports if name in report.reasons]
        # "Undone" is about a whole pass, so a reason that is about this node is preferred.
        given = [(text, reason) for text, reason in given if reason is not Reason.SLOWER] or given
        if not given or given[-1][1] is Reason.HIDDEN:
            continue
        text, reason = given[-1]
        parts.append(f"{label}: {text}")
        if reason is not None:
            causes.append(reason)
    words = "; ".join(parts) or ("no pass looked at it" if node.estimate is not None else "no estimate")
    return words, tuple(causes)
