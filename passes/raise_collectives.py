"""Start every collective as soon as its dependences and its group's order allow.

    %h = kernel(%x); ag0 = all_gather(%p0) @dp; %w0 = wait(ag0); %y = kernel(%h, %w0)
 -> ag0 = all_gather(%p0) @dp; %h = kernel(%x); %w0 = wait(ag0); %y = kernel(%h, %w0)

Views that a collective needs move with it. Keeps: data dependences, and the order of collectives on each
process group. Ignores how much memory that takes, so it is undone if the limit is exceeded; raise_under_memory
moves starts only as far as that pays off and fits.
"""

from __future__ import annotations

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.judge import keep_if_better
from overlapc.passes.reasons import Reason, reason_of
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Dependencies
from overlapc.schedule.model import Kind, Schedule


@register_pass("raise_collectives")
def raise_collectives(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Place every node once (linear time): starts, and views that they need, as soon as dependences allow."""
    report = PassReport("raise_collectives")
    deps = dependencies.of(schedule)
    eager = _eager(schedule, deps)
    missing = [len(preds) for preds in deps.preds]
    placed: list[int] = []
    done = [False] * len(schedule.nodes)

    def place(first: int) -> None:
        ready = [first]
        while ready:
            at = ready.pop()
            done[at] = True
            placed.append(at)
            freed = []
            for after in deps.succs[at]:
                missing[after] -= 1
                if not missing[after] and after in eager:
                    freed.append(after)
            ready.extend(sorted(freed, reverse=True))

    for at in sorted(at for at in eager if not missing[at]):
        place(at)
    for at in range(len(schedule.nodes)):
        if not done[at]:
            place(at)
    moved = schedule.replace_order(schedule.nodes[at].name for at in placed)
    position = {at: new for new, at in enumerate(placed)}
    for start in schedule.starts():
        at = schedule.position(start.name)
        report.moved(start, max(0, at - position[at]))
        _explain(report, schedule, deps, at, position)
    return keep_if_better(schedule, moved, ctx, report)


def _eager(schedule: Schedule, deps: Dependencies) -> set[int]:
    """Return the starts, and the views that a start needs."""
    eager: set[int] = set()
    for at in range(len(schedule.nodes) - 1, -1, -1):
        kind = schedule.nodes[at].kind
        if kind is Kind.START or (kind is Kind.VIEW and any(after in eager for after in deps.succs[at])):
            eager.add(at)
    return eager


def _explain(report: PassReport, schedule: Schedule, deps: Dependencies, at: int, position: dict[int, int]) -> None:
    """Report the last of the nodes that a start must follow as its limit."""
    if not deps.preds[at]:
        report.because(schedule.nodes[at], Reason.SCHEDULE_START)
        return
    last = max(deps.preds[at], key=position.__getitem__)
    report.because(schedule.nodes[at], reason_of(deps.why[last, at]), schedule.nodes[last].name)
