"""Merge the collectives of one module into buckets: one launch over many tensors, without copies.

    a = all_gather(p) @dp unit=m; u = wait(a); x = kernel(u); b = all_gather(q) @dp unit=m; v = wait(b); y = kernel(v)
 -> a, b = all_gather(p, q) @dp unit=m node=a+1; u = wait(a); x = kernel(u); v = wait(b); y = kernel(v)

A bucket saves the latency of every collective but one, and ranks meet once for all of it. It costs waiting (no
result before the last one has arrived, none sent before the last one is computed) and memory. Which is why

- only collectives of one process group, kind and `Comm.unit` share a bucket, all-reduces of one dtype, and no other
  unit's stands between them: what is needed at another time (embedding and head of one root module) stays apart;
- units that are mostly latency (many ranks, small parameters) are joined with their neighbours, if the step that this
  leads to, ordered, is shorter than with each on its own;
- gathers start where the first of them did, with the casts and views that the others need in front; reductions where
  the last did, with what reads them behind. A collective that cannot move there begins a bucket of its own;
- a bucket is cut wherever that makes the step shorter (`bucket_cuts.py`): most are not, but no compute can cover the
  first gathers of a step and its last reductions, and there the first tensors are used, or sent, before the others;
- if whole buckets exceed the memory limit or simulate slower, all are cut in halves until they do not.

Keeps: data dependences, mutations and barriers. Collectives of a group are passed only where
`Context.reorder_collectives` allows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.bucket_cuts import cuts, in_order
from overlapc.passes.bucket_round import Alike, Partition, Round
from overlapc.passes.judge import cost, keep_if_better
from overlapc.schedule.collective_kinds import several_in_one
from overlapc.schedule.model import Schedule

# Last what may need the results of those before: an all-reduce those of a reduce-scatter, or of what replaces one.
ROUNDS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
# What is exposed where buckets are cut may be another collective then: so often all that is exposed is looked at.
CUTS = 3
# Units are joined for this share of the step. For less it is lost in the search, which then moves fewer and larger
# buckets: moe.forward of the captured steps is 1.7% shorter before it, and longer after it.
JOINED_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class _Merged:
    """A schedule with the buckets of one partition."""

    partition: Partition
    schedule: Schedule
    report: PassReport
    units_joined: bool

    @classmethod
    def of(cls, schedule: Schedule, ctx: Context, partition: Partition) -> _Merged:
        """All rounds, one for collectives that are alike, each on what the one before left."""
        report, joined = PassReport("bucket", counted=True), False
        comms = [node.comm for node in schedule.starts() if node.comm and not node.mutates]
        kinds = dict.fromkeys(
            Alike.of(comm) for comm in comms if comm.unit and several_in_one(comm.collective, comm.via)
        )
        for kind in sorted(kinds, key=lambda kind: ROUNDS.index(kind.collective)):
            round_ = Round(schedule, ctx, kind, partition, report)
            schedule = round_.run()
            joined |= round_.joined
        return cls(partition, schedule, report, joined)


@register_pass("bucket")
def bucket(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Whole units, cut where that pays; see the module."""
    unlimited = replace(ctx, most_moves=None)
    whole, undone = _whole(schedule, unlimited)
    if not whole:
        return schedule, undone
    _, merged = min((_cut(schedule, one, unlimited) for one in whole), key=lambda cut: _cost(cut, ctx))
    if ctx.most_moves is not None:
        merged = _Merged.of(schedule, ctx, merged.partition)
    return merged.schedule, merged.report


def _cost(cut: tuple[Schedule, _Merged], ctx: Context) -> float:
    ordered, merged = cut
    return cost(ordered, ctx)[0] * (1 + JOINED_GAIN if merged.units_joined else 1)


def _whole(schedule: Schedule, ctx: Context) -> tuple[list[_Merged], PassReport]:
    """The largest buckets that fit and are no slower than none, units joined and apart; else none, and why."""
    fitting: list[_Merged] = []
    partition, undone = Partition(across=True), PassReport("bucket", counted=True)
    while True:
        merged = _Merged.of(schedule, ctx, partition)
        judged, report = keep_if_better(schedule, merged.schedule, ctx, merged.report)
        if judged is merged.schedule and (merged.report.merged or not undone.reasons):
            fitting.append(merged)
        if merged.units_joined:
            partition = Partition()
        elif fitting or not merged.report.merged:
            return fitting, undone
        else:
            for name, members in merged.report.merged.items():
                for member in members:
                    undone.because(member, report.limits[name])
            halves = {members[len(members) // 2] for members in merged.report.merged.values()}
            partition = Partition(begins=partition.begins | halves)


def _cut(schedule: Schedule, merged: _Merged, ctx: Context) -> tuple[Schedule, _Merged]:
    """`merged`, its buckets cut where that makes the step shorter; before it, the order that it leads to."""
    ordered = in_order(merged.schedule, ctx)
    for _ in range(CUTS):
        members = {name: [schedule.node(member) for member in names] for name, names in merged.report.merged.items()}
        begins = cuts(ordered, members, ctx)
        if not begins:
            break
        partition = replace(merged.partition, begins=merged.partition.begins | begins)
        finer = _Merged.of(schedule, ctx, partition)
        if keep_if_better(schedule, finer.schedule, ctx, finer.report)[0] is not finer.schedule:
            break
        finer_ordered = in_order(finer.schedule, ctx)
        if cost(finer_ordered, ctx) >= cost(ordered, ctx):
            break
        merged, ordered = finer, finer_ordered
    return ordered, merged
