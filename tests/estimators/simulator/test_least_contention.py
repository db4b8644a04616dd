"""The time that every order loses to contention: computed by hand, and never above that of an order that was found."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.estimators.simulator.least_contention import least_contention_ns
from overlapc.estimators.simulator.lower_bound import lower_bound
from overlapc.estimators.simulator.machine import costs_of
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.refine import refine
from overlapc.schedule.text import parse
from tests.graphs import schedules

# Beside a collective, attention takes 1.25 times as long, so it loses a fifth of the time; memory-bound kernels half.
SLOW = DeviceProfile("slow", slowdowns={"other": Slowdown(attention=1.25, memory=2.0)})
STEP = """
    a = extern:attention(x) flops=100 : 0B {attention}us; k = kernel(x) : 0B 100us
    g = all_gather(p) @dp : 0B 100us; w = wait(g); b = kernel(w) : 0B 0us
"""


@pytest.mark.parametrize(
    ("attention", "idle_us", "least_us"),
    [
        (400, 0, 20),  # all of it beside attention
        (40, 0, 10 + 25),  # 50us beside attention, the other half beside the kernel
        (400, 60, 8),  # 60us of it while the stream is idle anyway
    ],
)
def test_the_bound_lets_collectives_overlap_the_least_affected_kernels(attention, idle_us, least_us):
    schedule = parse(STEP.format(attention=attention))
    found = least_contention_ns(costs_of(schedule, SLOW), idle_us * 1e3)
    assert found == pytest.approx(least_us * 1e3, rel=1e-3)
    assert found <= least_us * 1e3


def test_the_bound_counts_idle_time_if_kernels_are_shorter_than_collectives():
    schedule = parse("g = all_gather(p) @dp : 0B 100us; w = wait(g); b = kernel(w) : 0B 1us")
    assert least_contention_ns(costs_of(schedule, SLOW), 0.0) == pytest.approx(100e3 - 1e3, rel=0.01)


@given(schedules())
@settings(max_examples=60)
def test_no_refined_order_beats_the_bound(schedule):
    profile = replace(SLOW, launch_ns=2e3, kernel_gap_ns=700.0, collective_gap_ns=900.0, collective_slowdown=1.3)
    ctx = Context(profile=profile, reorder_collectives=True)
    shortest, _ = refine(schedule, ctx)
    assert lower_bound(schedule, profile).ns <= simulate(shortest, profile).step_ns
