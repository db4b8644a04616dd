from unittest.mock import patch

from hypothesis import given, settings

from overlapc.estimators.timeline import simulate
from overlapc.passes import bucket, bucket_cuts
from overlapc.passes.base import Context
from overlapc.passes.bucket_cuts import MOST_PLACES, in_order
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
    assert set(reasons.values()) == {"its bucket is cut: a whole bucket would cost more time or memory"}
    assert starts(bucketed(gathers(4, 5))[0]) == ["ma0+2", "ma3"]
    assert starts(bucketed(gathers(4, 1))[0]) == ["ma0+3"]


def test_the_last_bucket_is_cut_and_each_part_starts_where_its_inputs_are_ready():
    moved, _ = bucketed(reductions(4, 50))
    assert starts(moved) == ["r0", "r1", "r2", "r3"]
    order = [node.name for node in moved.nodes]
    assert order.index("r0") < order.index("k1")


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


@given(with_units())
@settings(max_examples=60, deadline=None)
def test_cuts_never_make_a_step_longer(schedule):
    """Both are judged in the order that the passes' rules give."""
    ctx = Context(overlap_margin=1.5, reorder_collectives=True)
    with patch.object(bucket, "CUTS", 0):
        whole, _ = bucket.bucket(schedule, ctx)
    finer, _ = bucket.bucket(schedule, ctx)
    assert cost(in_order(finer, ctx), ctx) <= cost(in_order(whole, ctx), ctx)
