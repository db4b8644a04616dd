"""Merge the collectives of one module into buckets: one launch over many tensors, without copies.

    a = all_gather(p) @dp unit=m; u = wait(a); x = kernel(u); b = all_gather(q) @dp unit=m; v = wait(b); y = kernel(v)
 -> a, b = all_gather(p, q) @dp unit=m node=a+1; u = wait(a); x = kernel(u); v = wait(b); y = kernel(v)

A bucket saves the latency of every collective but one, and ranks meet once for all of it. It costs waiting (no
result before the last one has arrived, none sent before the last one is computed) and memory. Which is why

- only collectives of one process group, kind and `Comm.unit` share a bucket, all-reduces of one dtype, and no other
  unit's stands between them: what is needed at another time (embedding and head of one root module) stays apart;
- units that nothing covers and that are mostly latency (many ranks, small parameters) are joined with their
  neighbours, if that simulates faster than each on its own;
- gathers start where the first of them did, with the casts and views that the others need in front; reductions where
  the last did, with what reads them behind. A collective that cannot move there begins a bucket of its own;
- a bucket that no compute can cover (the first gathers of a step, the last reductions) is cut into pieces, each
  long enough that latency does not matter: so the first is there sooner, and the last is shorter;
- if whole buckets exceed the memory limit or simulate slower, all are cut into pieces; if those do too, none is made.

Keeps: data dependences, mutations and barriers. Collectives of a group are passed only where
`Context.reorder_collectives` allows it.
"""

from __future__ import annotations

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.bucket_round import Alike, Cut, Round
from overlapc.passes.judge import keep_if_better
from overlapc.schedule.collective_kinds import several_in_one
from overlapc.schedule.model import Schedule

# Last what may need the results of those before: an all-reduce those of a reduce-scatter, or of what replaces one.
ROUNDS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


@register_pass("bucket")
def bucket(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Whole units first, then pieces; see the module."""
    across, report, joined = _merged(schedule, ctx, Cut(across=True))
    kept, said = keep_if_better(schedule, across, ctx, report)
    if joined:
        within, report, _ = _merged(schedule, ctx, Cut())
        kept, said = _better((kept, said), keep_if_better(schedule, within, ctx, report), ctx)
    if kept is schedule and across is not schedule:
        in_pieces, report, _ = _merged(schedule, ctx, Cut(everything=True))
        kept, said = keep_if_better(schedule, in_pieces, ctx, report)
    if kept is not schedule or not report.merged:
        return kept, said
    undone = PassReport("bucket", counted=True)
    for name, members in report.merged.items():
        for member in members:
            undone.because(member, said.limits[name])
    return schedule, undone


def _better(
    one: tuple[Schedule, PassReport], other: tuple[Schedule, PassReport], ctx: Context
) -> tuple[Schedule, PassReport]:
    return one if ctx.timeline(one[0]).step_ns < ctx.timeline(other[0]).step_ns else other


def _merged(schedule: Schedule, ctx: Context, cut: Cut) -> tuple[Schedule, PassReport, bool]:
    """All rounds, one for collectives that are alike, each on what the one before left; whether units were joined."""
    report, joined = PassReport("bucket", counted=True), False
    comms = [node.comm for node in schedule.starts() if node.comm and not node.mutates]
    alike = dict.fromkeys(Alike.of(comm) for comm in comms if comm.unit and several_in_one(comm.collective, comm.via))
    for each in sorted(alike, key=lambda each: ROUNDS.index(each.collective)):
        round_ = Round(schedule, ctx, each, cut, report)
        schedule = round_.run()
        joined |= round_.joined
    return schedule, report, joined
