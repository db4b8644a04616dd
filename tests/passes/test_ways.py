from dataclasses import replace

import pytest
from hypothesis import given, settings

from overlapc.estimators.device import DeviceProfile
from overlapc.passes.base import Context, run_passes, run_pipeline, select
from overlapc.passes.pipeline import FIRST, ORDER, WAYS
from overlapc.schedule.text import parse
from tests.graphs import check_kept, order_of, peak, schedules

# The gradient of the weight (dw) is all that can cover the scatter, and stands behind its wait.
COMPUTE_COVERS = """
    dx = extern:mm(g, w) flops=9 : 0B 50us; rs = reduce_scatter(dx) @tp : 0B 40us; s = wait(rs)
    y = kernel(s) : 0B 50us; dw = extern:mm(g, x) flops=9 : 0B 50us; return y, dw
"""


def test_compute_moves_under_what_nothing_else_covers():
    result = run_pipeline(parse(COMPUTE_COVERS), Context())
    assert order_of(result.schedule) == ["dx", "rs", "dw", "s", "y"]
    assert result.after.exposed_ns == 0
    assert {report.name for report in result.reports} == set(ORDER)


def test_the_first_way_that_leaves_nothing_exposed_is_taken():
    result = run_pipeline(parse("ag = all_gather(p) @dp : 0B 5us; a = kernel(x) : 0B 9us; w = wait(ag)"), Context())
    assert [report.name for report in result.reports] == list(ORDER)


@pytest.mark.parametrize("stop", ["plan_overlap", "fill_collectives"])
def test_stopping_early_stops_on_the_way_that_was_chosen(stop):
    schedule, dumped = parse(COMPUTE_COVERS), {}
    whole = run_pipeline(schedule, Context())
    ctx = Context(stop_after=stop, dump=dumped.__setitem__)
    names = [report.name for report in whole.reports]
    expected = names[: names.index(stop) + 1]
    assert [report.name for report in run_pipeline(schedule, ctx).reports] == expected
    assert list(dumped) == [
        f"{at:02}_{name}.{when}" for at, name in enumerate(expected, 1) for when in ("before", "after")
    ]


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_no_way_is_better_than_the_one_taken(schedule):
    for ctx in (Context(), Context(reorder_collectives=True, profile=DeviceProfile("d", launch_ns=3.0))):
        result = run_pipeline(schedule, ctx)
        check_kept(schedule, result.schedule, ctx)
        if result.after.exposed_ns <= 0.01 * result.after.step_ns:
            continue
        for way in WAYS:
            margin = ctx.overlap_margin * way.margin
            tried = replace(ctx, overlap_margin=margin, incoming_peak_bytes=peak(schedule))
            ended, _ = run_passes(schedule, tried, select((*FIRST, *way.passes)))
            assert result.after.step_ns <= ctx.timeline(ended).step_ns * (1 + 1e-9)
