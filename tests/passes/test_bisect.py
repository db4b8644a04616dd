import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.config import Config
from overlapc.errors import ConfigError
from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.passes.base import Context
from overlapc.passes.pipeline import ORDER
from overlapc.passes.run import run_pipeline
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify
from tests.graphs import order_of, schedules
from tests.passes.buckets import BACKWARD, LAYER, ROOMY

STEP = """
    k = kernel(x) : 0B 90us; rs = reduce_scatter(k) @dp : 0B 60us; s = wait(rs)
    ag = all_gather(p) @dp : 8B 60us; w = wait(ag); y = kernel(k, w) : 0B 90us; return s
"""


def stopped(text: str, stop_after: str) -> list[str]:
    ctx = Context(reorder_collectives=True, budget_bytes=1000, stop_after=stop_after)
    return order_of(run_pipeline(parse(text), ctx).schedule)


def test_passes_after_stop_after_do_not_run():
    result = run_pipeline(parse(STEP), Context(stop_after="plan_overlap"))
    assert [report.name for report in result.reports] == ["bucket", "plan_overlap"]


@pytest.mark.parametrize("name", ORDER)
def test_stopping_after_a_default_pass_runs_it_and_those_before_it_once_each(name):
    """The resulting order is that of running these passes by name."""
    names, dumped = ORDER[: ORDER.index(name) + 1], {}
    result = run_pipeline(parse(STEP), Context(stop_after=name, dump=dumped.__setitem__))
    assert [report.name for report in result.reports] == list(names)
    assert list(dumped) == [
        f"{at:02}_{each}.{when}" for at, each in enumerate(names, 1) for when in ("before", "after")
    ]
    assert order_of(result.schedule) == order_of(run_pipeline(parse(STEP), Context(passes=names)).schedule)


def test_moves_of_a_plan_are_made_one_by_one():
    whole = stopped(STEP, "plan_overlap")
    assert whole == ["ag", "k", "rs", "w", "y", "s"]
    assert stopped(STEP, "plan_overlap:0") == order_of(parse(STEP))
    assert stopped(STEP, "plan_overlap:1") == ["ag", "k", "rs", "s", "w", "y"]
    assert stopped(STEP, "plan_overlap:99") == whole


@pytest.mark.parametrize(("stop", "made"), [("bucket:0", []), ("bucket:1", ["a+1"]), ("bucket:2", ["a+1", "r+1"])])
def test_buckets_are_made_one_by_one(stop, made):
    ctx = replace(ROOMY, passes=("bucket", "plan_overlap"), stop_after=stop)
    starts = run_pipeline(parse(BACKWARD), ctx).schedule.starts()
    assert [node.name for node in starts if "+" in node.name] == made


TWO_TO_MOVE = """
    k = kernel(x) : 0B 90us; a = all_gather(p) @dp : 0B 20us; u = wait(a); y = kernel(k, u) : 0B 90us
    b = all_gather(q) @dp : 0B 20us; v = wait(b); z = kernel(y, v) : 0B 90us
"""


@pytest.mark.parametrize(("moves", "moved"), [(0, []), (1, ["a"]), (2, ["a", "b"]), (9, ["a", "b"])])
def test_starts_are_raised_one_by_one(moves, moved):
    ctx = Context(stop_after=f"raise_under_memory:{moves}", passes=("raise_under_memory",))
    assert list(run_pipeline(parse(TWO_TO_MOVE), ctx).reports[0].moves) == moved


def test_a_move_that_would_be_undone_is_kept_when_stopping_after_it():
    profile = DeviceProfile("slow", slowdowns={"other": Slowdown(3.0, 3.0)}, collective_slowdown=2.0)
    text = "a = all_gather(p) @dp : 1B 10ns; w = wait(a); h = kernel(x) : 1B 100ns; y = kernel(h, w) : 1B"
    ctx = Context(profile=profile, passes=("sink_under_memory",), stop_after="sink_under_memory:1")
    assert order_of(run_pipeline(parse(text), ctx).schedule) == ["a", "h", "w", "y"]


@pytest.mark.parametrize("stop", [":3", "plan_overlap:", "plan_overlap:x", ""])
def test_a_malformed_stop_after_is_an_error(stop):
    if stop:
        with pytest.raises(ConfigError, match=re.escape(f"stop_after='{stop}' is neither PASS nor PASS:MOVES")):
            stopped(LAYER, stop)
    else:
        assert Config(stop_after=stop).stop_after is None


def test_unknown_passes_offer_their_neighbours():
    with pytest.raises(ConfigError, match="stop_after: no pass named 'plan_overlop'; nearest: plan_overlap"):
        stopped(STEP, "plan_overlop")


def test_a_margin_below_the_estimate_is_refused():
    with pytest.raises(ConfigError, match=r"overlap_margin: '0.5' is less than 1"):
        Config(overlap_margin="0.5")


@given(
    schedules(),
    st.sampled_from(["plan_overlap", "raise_under_memory", "sink_under_memory", "sink_waits", "refine"]),
    st.integers(0, 15),
)
@settings(max_examples=200)
def test_stopping_anywhere_within_a_pass_gives_a_valid_order(schedule, name, moves):
    ctx = Context(reorder_collectives=True, stop_after=f"{name}:{moves}", passes=("plan_overlap", name))
    result = run_pipeline(schedule, ctx)
    verify(result.schedule, "test", reference=schedule, may_reorder_collectives=True)
