from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.estimators.timeline import simulate
from overlapc.passes import bucket, bucket_cuts
from overlapc.passes.base import Context
from overlapc.passes.bucket import _Merged
from overlapc.passes.bucket_cuts import MOST_PLACES, in_order
from overlapc.passes.bucket_round import Partition
from overlapc.passes.judge import cost
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse
from tests.passes.buckets import FLOOR, ROOMY, bucketed, with_units

WARM = "warm = kernel(x) : 0B 900us"


def gathers(count: int, compute_us: float, unit: str = "m") -> str:
    """Return the text of gathers, each right before its result is read, as in the order of a program."""
    return "\n".join(
        f"{unit}a{at} = all_gather({unit}p{at}) @dp unit={unit} : 8B 60us; {unit}w{at} = wait({unit}a{at})\n"
        f"{unit}k{at} = kernel({unit}w{at}, x) : 0B {compute_us}us"
        for at in range(count)
    )


def reductions(count: int, compute_us: float) -> str:
    return "\n".join(
        f"k{at} = kernel(x) : 8B {compute_us}us\n"
        f"r{at} = reduce_scatter(k{at}) @dp unit=m : 0B 60us; w{at} = wait(r{at})"
        for at in range(count)
    )


def starts(schedule: Schedule) -> list[str]:
    return [node.name for node in schedule.starts()]


def test_a_bucket_that_compute_hides_stays_whole():
    assert starts(bucketed(WARM + "\n" + gathers(4, 50))[0]) == ["ma0+3"]
    assert starts(bucketed(reductions(4, 50) + "\nlast = kernel(x) : 0B 900us")[0]) == ["r0+3"]


def test_the_first_bucket_is_cut_where_compute_hides_the_later_parts():
    """With one bucket, compute begins after 210us. Cut into four, compute begins after 60us and hides nearly all other
    gathers. If compute is short, a bucket of three (160us) and the last gather alone (60us) are best."""
    moved, reasons = bucketed(gathers(4, 50))
    assert starts(moved) == ["ma0", "ma1", "ma2", "ma3"]
    assert set(reasons.values()) == {
        "split off from its bucket: launching the whole bucket at once would cost more time or memory"
    }
    assert starts(bucketed(gathers(4, 5))[0]) == ["ma0+2", "ma3"]
    assert starts(bucketed(gathers(4, 1))[0]) == ["ma0+3"]


def test_the_last_bucket_is_cut_and_each_part_starts_where_its_inputs_are_ready():
    moved, _ = bucketed(reductions(4, 50))
    assert starts(moved) == ["r0", "r1", "r2", "r3"]
    order = [node.name for node in moved.nodes]
    assert order.index("r0") < order.index("k1")


def test_a_bucket_that_no_wait_closes_is_cut_too():
    """Together both take 90us after y, but a does not need y."""
    scatters = "a = reduce_scatter(p) @dp unit=m : 0B 50us; b = reduce_scatter(y) @dp unit=m : 0B 50us"
    assert starts(bucketed(f"y = kernel(x) : 8B 500us; {scatters}")[0]) == ["a", "b"]


def test_only_exposed_buckets_are_cut():
    """The first two kernels hide the other gathers of their module, and the whole module hides the second's bucket."""
    moved, _ = bucketed(gathers(4, 120) + "\n" + gathers(4, 120, "n"))
    assert starts(moved) == ["ma0", "ma1", "ma2+1", "na0+3"]


def test_a_large_bucket_is_cut_at_a_limited_number_of_places():
    text = gathers(3 * MOST_PLACES, 50)
    moved, _ = bucketed(text, budget_bytes=10_000)
    assert 2 <= len(starts(moved)) <= MOST_PLACES
    assert simulate(in_order(moved, ROOMY), FLOOR).step_ns < 0.6 * simulate(parse(text), FLOOR).step_ns


def test_large_schedules_are_not_cut(monkeypatch):
    monkeypatch.setattr(bucket_cuts, "MOST_NODES", 0)
    assert starts(bucketed(gathers(4, 50))[0]) == ["ma0+3"]


@given(with_units(), st.sampled_from([1.0, 1.5]))
@settings(max_examples=60)
def test_a_window_of_the_whole_step_costs_as_much_as_the_step(schedule, margin):
    ctx = replace(ROOMY, overlap_margin=margin, reorder_collectives=True)
    with patch.object(bucket, "CUTS", 0):
        whole, report = bucket.bucket(schedule, ctx)
    ordered = in_order(whole, ctx)
    for name, names in report.merged.items():
        window = bucket_cuts._Window(ordered, name, [schedule.node(member) for member in names], ctx)
        if len(window.places) == len(ordered.nodes):
            assert window._cost(frozenset()) == cost(ordered, ctx)


@pytest.mark.parametrize("make", [gathers, reductions])
def test_a_cut_in_a_window_costs_as_much_as_in_the_step(make):
    """Cut gathers start where their bucket did, reductions where they can; waits stay where they are."""
    ctx, schedule = replace(ROOMY, overlap_margin=1.5), parse(make(4, 50))
    names = starts(schedule)
    members = [schedule.node(name) for name in names]
    whole, finer = (
        _Merged.of(schedule, ctx, Partition(begins=frozenset(begins))).schedule for begins in ((), names[2:3])
    )
    if make is gathers:
        finer = finer.move(finer.starts()[1], after=finer.starts()[0])
    else:
        finer = finer.move("w0", before="w2").move("w1", before="w2")
    window = bucket_cuts._Window(whole, f"{names[0]}+3", members, ctx)
    assert window._cost(frozenset({2})) == cost(finer, ctx)


@given(with_units())
@settings(max_examples=60)
def test_cuts_never_make_a_step_longer(schedule):
    """Both are judged in the order that the passes' rules give."""
    ctx = Context(overlap_margin=1.5, reorder_collectives=True)
    with patch.object(bucket, "CUTS", 0):
        whole, _ = bucket.bucket(schedule, ctx)
    finer, _ = bucket.bucket(schedule, ctx)
    assert cost(in_order(finer, ctx), ctx) <= cost(in_order(whole, ctx), ctx)
