"""Merge the collectives of one module into buckets: one launch over many tensors, without copies.

    a = all_gather(p) @dp unit=m; u = wait(a); x = kernel(u); b = all_gather(q) @dp unit=m; v = wait(b); y = kernel(v)
 -> a, b = all_gather(p, q) @dp unit=m node=a+1; u = wait(a); x = kernel(u); v = wait(b); y = kernel(v)

A bucket saves the latency of all its collectives except one, and the ranks synchronize only once. It costs waiting (no
result is available before all are, and nothing is sent before all inputs are computed) and memory. Therefore:

- Only collectives of one process group, kind and `Comm.unit` (all-reduces: of one dtype, too) share a bucket, and only
  without another unit's in between: tensors needed at other times (embedding and head of a root module) stay apart.
- Units that are mostly latency (many ranks, small parameters) are joined with their neighbours if the resulting step,
  after ordering, is shorter than with separate units.
- Gathers start where the first of them did, preceded by the casts and views that the others need; reductions where the
  last did, followed by the nodes that read them. A collective that cannot move there begins a bucket of its own.
- A bucket is cut wherever that makes the step shorter (`bucket_cuts.py`). Most are not cut, but no compute can hide the
  first gathers of a step and its last reductions; cut, their first tensors are used, or sent, before the others.
- If whole buckets exceed the memory limit or simulate slower, all buckets are halved until they do not. Halves are also
  tried if memory has no room to start whole buckets in time: they take less memory, and for a shorter time.

Keeps: data dependences, mutations and barriers. Collectives of one group pass each other only where
`Context.reorder_collectives` allows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.bucket_cost import comm_of
from overlapc.passes.bucket_cuts import cuts, in_order, short_of_memory
from overlapc.passes.bucket_round import BucketKind, Partition, Round, may_merge
from overlapc.passes.judge import cost, keep_if_better
from overlapc.schedule.collective_kinds import several_in_one
from overlapc.schedule.model import Schedule

# Kinds that may need results of others come later: an all-reduce those of a reduce-scatter, or of what replaces one.
ROUNDS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
# Rounds of cutting exposed buckets. Cuts may expose other collectives, which only the next round considers.
CUTS = 3
# Joining units must gain this share of the step. Smaller gains are lost in `refine`, which then has fewer and larger
# buckets to move: moe.forward of the captured steps is 1.7% shorter before `refine`, and longer after it.
JOINED_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class _Merged:
    """A schedule merged into the buckets of one partition."""

    partition: Partition
    schedule: Schedule
    report: PassReport
    units_joined: bool

    @classmethod
    def of(cls, schedule: Schedule, ctx: Context, partition: Partition) -> _Merged:
        """Run all rounds, one for each kind of collective, each on the result of the round before."""
        report, joined = PassReport("bucket", counted=True), False
        comms = [comm for comm in map(comm_of, may_merge(schedule)) if comm.unit]
        kinds = dict.fromkeys(BucketKind.of(comm) for comm in comms if several_in_one(comm.collective, comm.via))
        for kind in sorted(kinds, key=lambda kind: ROUNDS.index(kind.collective)):
            round_ = Round(schedule, ctx, kind, partition, report)
            schedule = round_.run()
            joined |= round_.joined
        return cls(partition, schedule, report, joined)


@register_pass("bucket")
def bucket(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Merge whole units into buckets, and cut these where that pays off; see the module docstring."""
    unlimited = replace(ctx, most_moves=None)
    whole, undone = _whole(schedule, unlimited)
    if not whole:
        return schedule, undone
    _, merged = min((_cut(schedule, one, unlimited) for one in whole), key=lambda cut: cut[0])
    if ctx.most_moves is not None:
        merged = _Merged.of(schedule, ctx, merged.partition)
    return merged.schedule, merged.report


def _whole(schedule: Schedule, ctx: Context) -> tuple[list[_Merged], PassReport]:
    """Return the largest buckets that fit and do not slow down the step, joined, apart or halved; or report why."""
    fitting: list[_Merged] = []
    partition, undone = Partition(across=True), PassReport("bucket", counted=True)
    while True:
        merged = _Merged.of(schedule, ctx, partition)
        judged, report = keep_if_better(schedule, merged.schedule, ctx, merged.report)
        if judged is merged.schedule and (merged.report.merged or not undone.reasons):
            fitting.append(merged)
        if merged.units_joined:
            partition = Partition()
        elif not merged.report.merged or (fitting and (partition.begins or not short_of_memory(merged.schedule, ctx))):
            return fitting, undone
        else:
            for name, members in merged.report.merged.items() if not fitting else ():
                for member in members:
                    undone.because(member, report.limits[name])
            halves = {members[len(members) // 2] for members in merged.report.merged.values()}
            partition = Partition(begins=partition.begins | halves)


def _cut(schedule: Schedule, merged: _Merged, ctx: Context) -> tuple[float, _Merged]:
    """Cut the buckets of `merged` where that makes the step shorter. Return its cost, and the buckets."""
    ordered = in_order(merged.schedule, ctx)
    for _ in range(CUTS):
        members = {name: [schedule.node(member) for member in names] for name, names in merged.report.merged.items()}
        begins = cuts(ordered, members, ctx)
        if not begins:
            break
        finer = _Merged.of(schedule, ctx, replace(merged.partition, begins=merged.partition.begins | begins))
        fits = keep_if_better(schedule, finer.schedule, ctx, finer.report)[0] is finer.schedule
        if not fits or cost(in_order(finer.schedule, ctx), ctx) >= cost(ordered, ctx):
            break
        merged, ordered = finer, in_order(finer.schedule, ctx)
    return cost(ordered, ctx)[0] * (1 + JOINED_GAIN if merged.units_joined else 1), merged
