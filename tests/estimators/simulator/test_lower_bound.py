"""The lower bound is at most the exact optimum of small schedules."""

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("ortools", reason="the exact optimum needs ortools (pip install ortools)")

from overlapc.estimators.timeline import simulate
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Estimate
from overlapc.schedule.text import parse
from tests.estimators.simulator.exact import optimum
from tests.graphs import schedules


def test_the_solver_finds_the_known_optimum():
    schedule = parse("""
        a = kernel(x) : 0B 10ns; b = kernel(y) : 0B 20ns
        g = all_gather(p) @dp : 0B 30ns; w = wait(g); c = kernel(w, a, b) : 0B 5ns
    """)
    best, order = optimum(schedule)
    assert best == 35  # the gather first, beside a and b
    assert simulate(order).step_ns == 35
    assert simulate(schedule).step_ns == 65


def check(schedule):
    launched = [node for node in schedule.nodes if node.kind in (*COMPUTE, *COMMUNICATION)]
    times = {node.name: 1.0 if node.estimate is None else max(1.0, node.estimate.ns) for node in launched}
    schedule = schedule.with_estimates({name: Estimate(ns, "given") for name, ns in times.items()})
    bound = simulate(schedule).lower_bound_ns
    best, order = optimum(schedule)
    assert bound <= best + 1e-6, f"{bound} ns are no lower bound: {best} ns are possible\n{order}"
    assert simulate(order).step_ns == pytest.approx(best), f"the solver's order takes something else\n{order}"


@given(schedules(most_nodes=12))
@settings(max_examples=60)
def test_no_order_of_a_small_schedule_beats_the_bound(schedule):
    check(schedule)


@pytest.mark.slow
@given(schedules(most_nodes=16))
@settings(max_examples=500, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_order_of_500_schedules_beats_the_bound(schedule):
    check(schedule)
