"""The limiting factor of a step and its shares of compute, on hand-made spans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapc.report.limiting_factor import ComputeShare, Spent, sources
from overlapc.report.model import GraphRecord, Plan, Span, StepRecord
from overlapc.report.text import totals_text
from tests.report.sample import FORWARD


def step(compute_us: float, queue_us: float, exposed_us: float, host_us: float | None = None) -> StepRecord:
    """Return a step that waits for a collective and then computes."""
    step_us = compute_us + exposed_us
    spans = (
        Span("ag", "@dp", 0.0, queue_us * 1e3, "start"),
        Span("ag", "compute", 0.0, exposed_us * 1e3, "idle"),
        Span("mm", "compute", exposed_us * 1e3, (exposed_us + compute_us) * 1e3, "extern"),
    )
    row = replace(FORWARD.collectives[0], exposed_after_ns=exposed_us * 1e3)
    host_ns = None if host_us is None else host_us * 1e3
    return StepRecord(graphs=(replace(FORWARD, collectives=(row,), after=Plan(step_us * 1e3, spans), host_ns=host_ns),))


@pytest.mark.parametrize(
    ("compute_us", "queue_us", "exposed_us", "host_us", "why", "advised"),
    [
        (90, 100, 40, 140, "the host: it needs 0.140 ms, the device 0.130 ms", True),
        (90, 100, 40, 120, "communication: @dp takes 0.100 ms, longer than all compute (0.090 ms)", True),
        (90, 80, 10, None, "exposed communication, 10.0% of the step: see below", False),
        (98, 80, 2, 99, "compute, 98.0% of the step; communication is hidden except as listed below", False),
    ],
)
def test_the_longest_part_is_named_as_the_limit(compute_us, queue_us, exposed_us, host_us, why, advised):
    cause = Spent.of(step(compute_us, queue_us, exposed_us, host_us)).limiting_factor()
    assert cause.why == why
    assert bool(cause.advice) == advised


def test_compute_is_added_up_by_library_op_and_all_that_is_generated_together():
    spans = (
        Span("mm", "compute", 0.0, 10e3, "extern"),
        Span("mm_12", "compute", 10e3, 30e3, "extern"),
        Span("add_3", "compute", 30e3, 35e3, "kernel"),
        Span("gelu", "compute", 35e3, 41e3, "kernel"),
        Span("ag", "compute", 41e3, 99e3, "idle"),
        Span("_scaled_dot_product_flash_attention_for_cpu_backward_3", "compute", 99e3, 100e3, "extern"),
    )
    spent = Spent.of(StepRecord(graphs=(replace(FORWARD, after=Plan(100e3, spans)),)))
    # Plans for GPUs may be traced on CPUs, so "_for_cpu" is removed from names.
    attention = "_scaled_dot_product_flash_attention_backward"
    assert spent.work == (
        ComputeShare("mm", 30e3, 2), ComputeShare("generated kernels", 11e3, 2), ComputeShare(attention, 1e3, 1),
    )  # fmt: skip
    assert spent.compute_ns == pytest.approx(42e3)


def test_time_lost_to_contention_is_shown_where_it_is_known_and_large():
    compute = (Span("mm", "compute", 0.0, 60e3, "extern"), Span("add", "compute", 60e3, 100e3, "kernel"))
    slowed = replace(FORWARD, after=Plan(100e3, compute), alone_ns=80e3)
    assert Spent.of(StepRecord(graphs=(slowed, slowed))).slowed_ns == pytest.approx(40e3)

    def said(*graphs: GraphRecord) -> str:
        (line,) = (each for each in totals_text(StepRecord(graphs=graphs)).splitlines() if each.startswith("compute "))
        return line

    assert said(slowed) == (
        "compute      0.100 ms, 0.020 ms of it because communication overlaps it: mm 60% (1), generated kernels 40% (1)"
    )
    for unsaid in (replace(slowed, alone_ns=99.5e3), replace(slowed, alone_ns=None)):
        assert "overlaps" not in said(unsaid)
    assert "overlaps" not in said(slowed, replace(slowed, alone_ns=None))


def test_an_empty_step_is_reported_without_communication():
    nothing = Spent.of(StepRecord(graphs=(replace(FORWARD, collectives=(), after=Plan(0.0)),)))
    assert nothing.limiting_factor().why == "compute, 0% of the step; these graphs do not communicate"


def test_sources_of_estimates_are_weighted_by_time():
    text = "a = kernel(x) : 0B 30us [roofline r]; g = all_gather(a) @dp : 0B 50us [table t]; w = wait(g)"
    graph = replace(FORWARD, schedule=f"{text}; b = extern:mm(w) : 0B 20us [roofline r]; c = kernel(b) : 0B")
    assert sources(StepRecord(graphs=(graph, graph))) == {"roofline r": 0.5, "table t": 0.5}
    assert sources(StepRecord(graphs=(replace(graph, schedule="c = kernel(x) : 0B"),))) == {}
