"""Which causes and advice a report derives from the reasons of passes, on hand-made rows and on planned schedules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from overlapc.passes.base import Context
from overlapc.passes.reasons import Reason
from overlapc.passes.run import run_pipeline
from overlapc.report import advice
from overlapc.report.advice import cause_of, exposures
from overlapc.report.graph_record import graph_record
from overlapc.report.model import CollectiveRow, Plan, Span, StepRecord
from overlapc.schedule.text import parse
from tests.report.sample import FORWARD


def row(name: str, exposed_us: float, *causes: str, group: str = "dp") -> CollectiveRow:
    sample = FORWARD.collectives[0]
    return replace(sample, name=name, group=group, exposed_after_ns=exposed_us * 1e3, causes=causes)


def of(*rows: CollectiveRow) -> StepRecord:
    return StepRecord(graphs=(replace(FORWARD, collectives=rows),))


def test_every_reason_that_can_expose_a_collective_has_a_cause():
    nothing_to_say = {Reason.HIDDEN, Reason.NO_BUCKET, Reason.MERGED}
    unknown = {reason for reason in Reason if cause_of(row("ag", 1, reason.name)).why == row("ag", 1).limit}
    assert unknown == nothing_to_say


def test_causes_that_an_option_can_change_come_first():
    assert cause_of(row("ag", 1, "SCHEDULE_START", "MEMORY")) is advice.MEMORY
    assert cause_of(row("rs", 1, "DATA", "SCHEDULE_END")) is advice.END
    assert cause_of(row("ar", 1, "DATA", "READER")) is advice.CHAIN


def test_without_a_named_reason_the_limit_of_the_table_is_the_cause():
    old = replace(row("ag", 1), limit="no pass looked at it")
    assert cause_of(old) == advice.Cause("no pass looked at it")
    assert cause_of(replace(old, causes=("OF_A_LATER_VERSION",))).why == "no pass looked at it"


def test_exposed_time_adds_up_by_cause_and_the_worst_comes_first():
    found = exposures(of(row("a", 1, "DATA", "READER"), row("b", 5, "MEMORY"), row("c", 7, "DATA", "READER")))
    assert [(each.cause, each.exposed_ns, [one.name for one in each.rows]) for each in found] == [
        (advice.CHAIN, 8e3, ["c", "a"]),
        (advice.MEMORY, 5e3, ["b"]),
    ]


def test_less_than_one_percent_of_the_exposed_time_is_left_out():
    assert [each.cause for each in exposures(of(row("a", 0.9, "DATA"), row("b", 99.1, "MEMORY")))] == [advice.MEMORY]


def test_gathers_queued_behind_the_first_are_exposed_for_the_same_cause():
    first, second = row("ag0", 5, "SCHEDULE_START", "FILLED"), row("ag1", 5, "QUEUE", "FILLED")
    assert [each.cause for each in exposures(of(first, second))] == [advice.BEGIN]
    hidden = row("ag_hidden", 0)
    later = exposures(of(first, hidden, second))
    assert {each.cause for each in later} == {advice.BEGIN, advice.BUSY}
    other_queue = exposures(of(first, row("ar", 5, "QUEUE", group="tp")))
    assert {each.cause for each in other_queue} == {advice.BEGIN, advice.BUSY}


@pytest.mark.parametrize(
    ("before_us", "after_us", "cause"), [(0, 90, "BEGIN"), (5, 90, "BEGIN"), (90, 5, "END"), (90, 90, None)]
)
def test_without_a_reason_the_compute_before_and_after_decides_the_cause(before_us, after_us, cause):
    """These reasons (made into a bucket, undone because slower) explain no exposure."""
    ends_us = list(itertools.accumulate((before_us, 100, after_us)))
    spans = (
        Span("early", "compute", 0.0, ends_us[0] * 1e3, "kernel"),
        Span("ag", "@dp", ends_us[0] * 1e3, ends_us[1] * 1e3, "start"),
        Span("ag", "compute", ends_us[0] * 1e3, ends_us[1] * 1e3, "idle"),
        Span("late", "compute", ends_us[1] * 1e3, ends_us[2] * 1e3, "kernel"),
    )
    for causes in ((), ("MERGED",), ("MERGED", "SLOWER")):
        rows = (replace(row("ag", 100, *causes), op="reduce_scatter", limit="bucket of root"),)
        graph = replace(FORWARD, collectives=rows, after=Plan(ends_us[2] * 1e3, spans))
        (found,) = exposures(StepRecord(graphs=(graph,)))
        assert found.cause == (getattr(advice, cause) if cause else cause_of(rows[0]))


def test_a_start_at_the_beginning_whose_wait_sank_to_the_end_is_exposed_by_the_beginning():
    spans = (
        Span("ag", "@dp", 0.0, 100e3, "start"),
        Span("ag", "compute", 0.0, 100e3, "idle"),
        Span("late", "compute", 100e3, 190e3, "kernel"),
    )
    rows = (row("ag", 100, "SCHEDULE_START", "SCHEDULE_END"),)
    (found,) = exposures(StepRecord(graphs=(replace(FORWARD, collectives=rows, after=Plan(190e3, spans)),)))
    assert found.cause is advice.BEGIN


def test_only_reductions_get_the_advice_to_accumulate_gradients():
    rows = [replace(row(op, 1, "DATA", "SCHEDULE_END"), op=op) for op in ("all_reduce", "all_to_all")]
    assert {each.rows[0].name: each.cause for each in exposures(of(*rows))} == {
        "all_reduce": advice.END,
        "all_to_all": advice.CHAIN,
    }


@pytest.mark.parametrize(
    ("text", "budget_bytes", "cause"),
    [
        ("ag = all_gather(%p) @dp(2) : 1MiB 100us; w = wait(ag); mm = kernel(w) : 1MiB 50us; return mm", None, "BEGIN"),
        (
            "mm = kernel(%x) : 1MiB 50us; rs = reduce_scatter(mm) @dp(2) : 1MiB 100us; w = wait(rs); return w",
            None,
            "END",
        ),
        (
            "a = kernel(%x) : 1MiB 50us; ar = all_reduce(a) @tp(2) : 1MiB 100us; w = wait(ar);"
            " b = kernel(w) : 1MiB 50us; return b",
            None,
            "CHAIN",
        ),
        (
            "a = kernel(%x) : 1MiB 500us; ag = all_gather(%p) @dp(2) : 9MiB 100us; w = wait(ag);"
            " b = kernel(a, w) : 1MiB 50us; return b",
            None,
            "",
        ),
        (
            "a = kernel(%x) : 4MiB 500us; c = kernel(a) : 1MiB 10us; ag = all_gather(%p) @dp(2) : 4MiB 100us;"
            " w = wait(ag); b = kernel(c, w) : 1MiB 50us; return b",
            6 * 2**20,
            "MEMORY",
        ),
    ],
)
def test_planned_schedules_say_why(text, budget_bytes, cause):
    planned = run_pipeline(parse("schedule s\n" + text.replace("; ", "\n")), Context(budget_bytes=budget_bytes))
    found = exposures(StepRecord(graphs=(graph_record(planned),)))
    assert [each.cause for each in found] == ([getattr(advice, cause)] if cause else [])
