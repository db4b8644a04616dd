"""One round of bucketing: group collectives of one kind by unit, cut the groups as requested, and merge them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from overlapc.passes.base import Context, PassReport
from overlapc.passes.bucket_cost import BucketCost, bucket_node, comm_of
from overlapc.passes.bucket_places import Bucket, Places
from overlapc.passes.merging import with_merged
from overlapc.passes.reasons import Reason
from overlapc.schedule.collective_kinds import KINDS, one_dtype
from overlapc.schedule.model import Comm, Node, Schedule

# A bucket that takes at most this many latencies would hardly take longer with more members.
LATENCY_BOUND = 2.0


@dataclass(frozen=True, slots=True)
class Partition:
    """Which collectives share buckets, where that deviates from their units.

    across: whether units that are mostly latency may share a bucket.
    begins: names of collectives that do not join the bucket before them.
    """

    across: bool = False
    begins: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class BucketKind:
    """The properties that all collectives of one bucket share; in short, their kind."""

    collective: str
    group: str
    dtype: str  # "" if dtypes may differ
    size: int
    via: str
    variant: str

    @classmethod
    def of(cls, comm: Comm) -> BucketKind:
        dtype = comm.dtype if one_dtype(comm.collective, comm.via) else ""
        return cls(comm.collective, comm.group, dtype, comm.size, comm.via, comm.variant)


def may_merge(schedule: Schedule) -> list[Node]:
    """Return the collectives that may join a bucket.

    One without a wait may not: its buffers may be overwritten right behind it, but in a bucket only after the others'
    waits.
    """
    starts = (node for node in schedule.starts() if node.comm is not None and not node.mutates)
    return [node for node in starts if schedule.wait_of(node) is not None]


class Round:
    """Merges the collectives of one kind. Nodes are positions."""

    def __init__(
        self, schedule: Schedule, ctx: Context, kind: BucketKind, partition: Partition, report: PassReport
    ) -> None:
        self.schedule = schedule
        self.nodes = schedule.nodes
        self.ctx = ctx
        self.kind = kind
        self.partition = partition
        self.forward = KINDS[kind.collective].brings_inputs
        self.joined = False  # whether a run has collectives of more than one unit
        self.report = report
        self.place = Places(schedule, ctx, report, forward=self.forward).place
        comms = ((schedule.position(node.name), comm_of(node)) for node in may_merge(schedule))
        self.ours = [at for at, comm in comms if BucketKind.of(comm) == kind]
        self.cost = BucketCost(ctx, self.nodes[self.ours[0]])

    def run(self) -> Schedule:
        """Return the schedule with this round's buckets; the schedule itself if there are none."""
        buckets = [part for unit in self._units() for part in self._in_parts(unit) if len(part.members) > 1]
        merged = [(bucket, node) for bucket in buckets if (node := self._node(bucket.members))]
        if self.ctx.most_moves is not None:
            del merged[self.ctx.most_moves - len(self.report.merged) :]
        return self._rebuilt(merged) if merged else self.schedule

    # Which collectives belong together

    def _units(self) -> list[Bucket]:
        """Return the largest possible buckets."""
        runs = self._runs()
        joined = self._joined(runs) if self.partition.across else runs
        self.joined = len(joined) < len(runs)
        return [bucket for run in joined for bucket in self.place(run)]

    def _in_parts(self, whole: Bucket) -> list[Bucket]:
        parts: list[list[int]] = []
        for at in whole.members:
            if not parts or self.nodes[at].name in self.partition.begins:
                parts.append([])
            parts[-1].append(at)
        if len(parts) == 1:
            return [whole]
        for at in whole.members:
            self.report.because(self.nodes[at], Reason.CUT)
        return [bucket for part in parts for bucket in self.place(part)]

    def _runs(self) -> list[list[int]]:
        """Return runs of collectives of one unit, with no other unit's collective of this kind in between."""
        runs = [(unit, list(run)) for unit, run in groupby(self.ours, key=lambda at: comm_of(self.nodes[at]).unit)]
        return [run for unit, run in runs if unit]

    def _joined(self, runs: list[list[int]]) -> list[list[int]]:
        """Join consecutive runs that are mostly latency until the joined run is not.

        Not more, so that the next bucket can be transferred while the compute that needs this one runs.
        """
        number = {at: number for number, at in enumerate(self.ours)}
        joined: list[list[int]] = []
        for run in runs:
            follows = joined and number[joined[-1][-1]] + 1 == number[run[0]]
            if follows and self._is_latency(joined[-1]) and self._is_latency(run):
                joined[-1] = [*joined[-1], *run]
            else:
                joined.append(run)
        return joined

    def _is_latency(self, run: Sequence[int]) -> bool:
        estimate = self.cost.estimate([self.nodes[at] for at in run])
        return estimate is not None and 0 < estimate.ns <= LATENCY_BOUND * self.cost.latency_ns

    # The merged nodes

    def _node(self, members: Sequence[int]) -> Node | None:
        nodes = [self.nodes[at] for at in members]
        payload = None
        if any(node.payload is not None for node in nodes):
            merge = self.ctx.merge_payloads
            payload = "no code for merged collectives" if merge is None else merge([node.payload for node in nodes])
            if isinstance(payload, str):
                for node in nodes:
                    self.report.because(node, Reason.NO_BUCKET, payload)
                return None
        return bucket_node(nodes, payload, self.cost)

    def _rebuilt(self, merged: Sequence[tuple[Bucket, Node]]) -> Schedule:
        """Return the schedule with `merged` buckets, and report them."""
        removed: set[int] = set()
        inserted: dict[int, list[Node]] = {}
        renamed: dict[str, str] = {}
        for bucket, node in merged:
            members = [self.nodes[at] for at in bucket.members]
            self.report.merged[node.name] = tuple(
                name for member in members for name in self.report.merged.pop(member.name, (member.name,))
            )
            self.report.because(node, Reason.MERGED, comm_of(node).unit)
            for at, member in zip(bucket.members, members, strict=True):
                renamed[member.name] = node.name
                self.report.reasons.pop(member.name, None)
                self.report.limits.pop(member.name, None)
                removed.add(at)
            removed.update(bucket.carried)
            carried = [self.nodes[at] for at in sorted(bucket.carried)]
            self.report.moved(node, abs(bucket.members[-1] - bucket.members[0]))
            if self.forward:
                inserted[bucket.members[0]] = [*carried, node]
            else:
                inserted[bucket.members[-1]] = [node, *carried]
        return with_merged(self.schedule, inserted, removed, renamed)
