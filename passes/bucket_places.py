"""Find where a bucket of collectives can stand, and which nodes must move there with it.

Gathers move up to the first of them, with the nodes that the other gathers need; reductions move down to the last of
them, with the nodes that read the other reductions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from overlapc.passes.base import Context, PassReport
from overlapc.passes.bucket_cost import ns_of
from overlapc.passes.queues import CARRIED_SHARE
from overlapc.passes.reasons import Reason
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.model import COMPUTE, Kind, Schedule


@dataclass
class Bucket:
    """Positions of members and of nodes that move with them: in front of gathers, behind reductions."""

    members: list[int]
    carried: set[int] = field(default_factory=set)


class Places:
    """Splits a run of collectives into buckets that can each stand at one position. Nodes are positions."""

    def __init__(self, schedule: Schedule, ctx: Context, report: PassReport, *, forward: bool) -> None:
        """forward: whether the collectives are gathers, which move up."""
        self.nodes = schedule.nodes
        self.ctx = ctx
        self.report = report
        self.deps = dependencies.of(schedule)
        self.place = self._up if forward else self._down

    def _up(self, run: list[int]) -> list[Bucket]:
        """Move gathers up to the first of them, if the nodes that they need are cheap and may move along."""
        buckets: list[Bucket] = []
        for at in run:
            if buckets:
                current = buckets[-1]
                needs = self._needs(at, current)
                if needs is not None:
                    current.members.append(at)
                    current.carried |= needs
                    continue
            buckets.append(Bucket([at]))
        return buckets

    def _needs(self, start: int, bucket: Bucket) -> set[int] | None:
        """Return the nodes that must move for `start` to join a bucket of gathers; None if they may not."""
        if not self.ctx.reorder_collectives and self._passes_others(bucket.members[-1], start):
            return None
        first = bucket.members[0]
        beside_compute = self.ctx.profile.collective_slowdown * self.ctx.overlap_margin  # as in `Queues.of`
        allowed_ns = CARRIED_SHARE * beside_compute * ns_of(self.nodes[start])
        needs: set[int] = set()
        stack = [start]
        while stack:
            for before in self._preds(stack.pop()):
                if before < first or before in bucket.carried or before in needs:
                    continue
                node = self.nodes[before]
                allowed_ns -= ns_of(node)
                if node.kind not in (*COMPUTE, Kind.VIEW, Kind.NOOP) or allowed_ns < 0:
                    self.report.because(self.nodes[start], Reason.DATA, node.name)
                    return None
                needs.add(before)
                stack.append(before)
        return needs

    def _down(self, run: list[int]) -> list[Bucket]:
        """Move reductions down to the last of them, with the nodes that need the earlier ones."""
        buckets: list[Bucket] = []
        held: set[int] = set()  # members so far, and the nodes that need them
        behind: set[int] = set()
        for number, at in enumerate(run):
            if number:
                for between in range(run[number - 1] + 1, at):
                    if any(before in held for before in self._preds(between)):
                        held.add(between)
                        behind.add(between)
            joins = bool(buckets) and self._may_sink(behind, buckets[-1].members[-1], at)
            if joins and any(before in held for before in self._preds(at)):
                self.report.because(self.nodes[at], Reason.DATA, self.nodes[buckets[-1].members[0]].name)
                joins = False
            if joins:
                buckets[-1].members.append(at)
                buckets[-1].carried |= behind
            else:
                buckets.append(Bucket([at]))
                held, behind = set(), set()
            held.add(at)
        return buckets

    def _may_sink(self, behind: Iterable[int], last: int, at: int) -> bool:
        """Whether the order of collectives allows the move; barriers are dependences already."""
        if self.ctx.reorder_collectives:
            return True
        return not self._passes_others(last, at) and all(self.nodes[b].kind is not Kind.START for b in behind)

    def _passes_others(self, low: int, high: int) -> bool:
        """Whether another collective of the group stands between two members."""
        group = self.nodes[low].group
        return any(node.group == group for node in self.nodes[low + 1 : high])

    def _preds(self, at: int) -> Iterator[int]:
        why = self.deps.why
        return (before for before in self.deps.preds[at] if why[before, at] is not Why.COLLECTIVE_ORDER)
