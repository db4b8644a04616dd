"""What every order loses to contention: by hand, and below whatever an order really takes."""

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

# Beside a collective attention takes 1.25 times as long, so it loses a fifth of the time; what is bound by memory half.
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
        (400, 60, 8),  # 60us of it while the stream stands still anyhow
    ],
)
def test_collectives_run_where_they_cost_least(attention, idle_us, least_us):
    schedule = parse(STEP.format(attention=attention))
    found = least_contention_ns(costs_of(schedule, SLOW), idle_us * 1e3)
    assert found == pytest.approx(least_us * 1e3, rel=1e-3)
    assert found <= least_us * 1e3


def test_without_a_kernel_that_lasts_the_stream_stands_still():
    schedule = parse("g = all_gather(p) @dp : 0B 100us; w = wait(g); b = kernel(w) : 0B 1us")
    assert least_contention_ns(costs_of(schedule, SLOW), 0.0) == pytest.approx(100e3 - 1e3, rel=0.01)


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_no_order_that_is_found_takes_less(schedule):
    profile = replace(SLOW, launch_ns=2e3, kernel_gap_ns=700.0, collective_gap_ns=900.0, collective_slowdown=1.3)
    ctx = Context(profile=profile, reorder_collectives=True)
    shortest, _ = refine(schedule, ctx)
    assert lower_bound(schedule, profile).ns <= simulate(shortest, profile).step_ns
