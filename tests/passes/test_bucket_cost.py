from dataclasses import replace

import pytest

from overlapc.passes.bucket_cost import BucketCost
from overlapc.schedule.model import Estimate
from overlapc.schedule.text import parse
from tests.passes.buckets import LAYER, ROOMY, bucketed


@pytest.mark.parametrize(
    ("asked_us", "one", "latency_us"),
    [(3, "30us", 10), (12, "30us", 12), (55, "30us", 30), (55, "", 55), (None, "30us", 10)],
    ids=["floor", "asked", "no-longer-than-one", "one-is-unknown", "no-estimate"],
)
def test_latency_is_between_the_profiles_floor_and_the_time_of_the_collective(asked_us, one, latency_us):
    node = parse(f"a = all_gather(p) @dp : 8B {one}; u = wait(a)").node("a")
    asked = None if asked_us is None else Estimate(asked_us * 1e3, "asked")
    assert BucketCost(replace(ROOMY, estimate=lambda node: asked), node).latency_ns == latency_us * 1e3


def test_buckets_are_estimated_by_the_given_estimator():
    moved, _ = bucketed(LAYER, estimate=lambda node: Estimate(node.comm.bytes * 1e3, "asked"))
    assert moved.node("a+1").estimate == Estimate(16e3, "asked")


@pytest.mark.parametrize(
    ("first", "second", "both_ns"),
    [("30us", "30us", 50e3), ("11us", "2us", 11e3), ("2us", "11us", 11e3), ("30us", "", None), ("", "30us", None)],
)
def test_a_bucket_saves_a_latency_but_is_no_shorter_than_its_longest(first, second, both_ns):
    text = f"""
        a = all_gather(p) @dp unit=m : 8B {first}; b = all_gather(q) @dp unit=m : 8B {second}
        k = kernel(x) : 0B 900us; u = wait(a); v = wait(b); y = kernel(u, v, k)
    """
    estimate = bucketed(text)[0].node("a+1").estimate
    assert (None if estimate is None else estimate.ns) == both_ns


def test_a_bucket_is_no_longer_than_its_members_one_after_the_other():
    moved, _ = bucketed(LAYER, estimate=lambda node: Estimate(node.comm.bytes * 9e3, "asked"))
    assert moved.node("a+1").estimate.ns == 60e3
