"""The cost by which orders are compared, and the check that undoes a pass that did not pay off."""

from __future__ import annotations

from overlapc.passes.base import Context, PassReport
from overlapc.passes.reasons import Reason
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Schedule

_ROUNDING = 1e-9  # relative: sums of the same times in another order differ by this much


def cost(schedule: Schedule, ctx: Context) -> tuple[float, float]:
    """Return the cost of an order in ns: the step with collectives as estimated plus the step with all collectives
    late; then, to break ties, the exposed time."""
    timeline = ctx.timeline(schedule)
    late_ns = ctx.timeline(ctx.late(schedule)).step_ns if ctx.overlap_margin != 1 else timeline.step_ns
    return timeline.step_ns + late_ns, timeline.exposed_ns


def keep_if_better(
    schedule: Schedule, moved: Schedule, ctx: Context, report: PassReport
) -> tuple[Schedule, PassReport]:
    """Return `moved`, or `schedule`, and why, if `moved` is slower in the simulator or exceeds the memory limit."""
    if moved is schedule:
        return schedule, report
    if analyze(moved).peak_bytes > ctx.limit_bytes(schedule):
        why = Reason.MEMORY
    elif ctx.timeline(moved).step_ns > ctx.timeline(schedule).step_ns * (1 + _ROUNDING):
        why = Reason.SLOWER
    else:
        return moved, report
    undone = PassReport(report.name, counted=report.counted)
    for name in report.moves:
        undone.because(name, why)
    return schedule, undone
