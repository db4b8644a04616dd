"""The text report: the overlap table and the summary, word for word."""

from __future__ import annotations

from dataclasses import replace

from overlapc.report import saved_schedules
from overlapc.report.model import Measured, StepRecord
from overlapc.report.record import Report
from overlapc.report.text import graph_text, render, totals_text
from tests.report.sample import FORWARD, REPORT

GOLDEN = """\
graph forward
collective      of        group    via        size    time µs  by         hidden µs    exposed µs    moves  \
limited by
--------------  --------  -------  -------  ------  ---------  -------  -----------  ------------  -------  \
-----------------
ag0 all_gather            @dp(2)   library    1MiB        100  table x   0.0 -> 0.0    100 -> 100        0  \
start of schedule
ag1 all_gather  layers.1  @dp(2)   library    1MiB        100  table x  0.0 -> 80.0   100 -> 20.0        2  peak memory
all 2                                         2MiB        200           0.0 -> 80.0    200 -> 120        2
step time    0.360 ms -> 0.280 ms; lower bound 0.260 ms (gap 7.7%)
peak memory  2MiB -> 3MiB (budget 4MiB)
kernels      1 generated, 1 library calls, 3 fallbacks (aten.topk 2, aten.sort 1)
compiled in  1.50 s; passes: raise_collectives 0.002 s
unknown      strange: no estimate; the times above do not include these nodes"""


def test_the_table_of_one_graph():
    assert graph_text(FORWARD) == GOLDEN


def test_a_collective_without_an_estimate_is_unknown_and_not_zero():
    row = replace(FORWARD.collectives[0], estimate_ns=None, source="")
    line = graph_text(replace(FORWARD, collectives=(row,))).splitlines()[3]
    assert " unknown " in line


def test_every_rank_that_differs_gets_a_line_and_equal_ones_none():
    assert "rank 1: 1 graph(s), step time 0.280 ms, exposed 0.120 ms" in render(REPORT.steps)
    same = Report((REPORT.steps[0], replace(REPORT.steps[0], rank=1)))
    assert "\nrank 1" not in render(same.steps)


SUMMARY = """\
rank 0 of 2: 2 compiled graph(s), predicted times
step time    0.720 ms -> 0.560 ms; lower bound 0.520 ms (gap 7.7%)
bound by     communication: @dp takes 0.400 ms, longer than all compute (0.320 ms)
             try: more compute on each rank (batch, sequence); fewer bytes (mp_policy, reshard_after_forward=False, \
overlapc.no_sync); fewer ranks on this mesh axis (HSDP)
exposed      0.200 ms -> 0.120 ms of communication
  0.100 ms  a collective of forward (ag0): the graph begins here: no compute can run before this communication is done
            try: a small fully_shard group for what is used first; in backward, reshard_after_forward=False for it
  0.020 ms  a collective of forward (layers.1): more collectives in flight at once would exceed the memory limit
            try: a larger memory_budget; without one, a larger peak_increase
busy @dp     0.400 ms
compute      0.320 ms: mm0 50% (2), generated kernels 50% (2)
estimates    100% table <x>
kernels      2 generated; eager fallbacks: 3
peak memory  3MiB

graph forward
"""


def test_a_report_begins_with_what_is_exposed_and_why():
    assert render(REPORT.steps).startswith(SUMMARY)


def test_a_step_takes_as_long_as_the_slower_of_host_and_device():
    def lines(*host_us: float | None) -> list[str]:
        graphs = [replace(FORWARD, host_ns=None if us is None else us * 1e3) for us in host_us]
        return totals_text(StepRecord(graphs=tuple(graphs))).splitlines()

    step, bound, tried, *rest = lines(500.0, 500.0)
    assert (step, bound) == (
        "step time    1.000 ms -> 1.000 ms; lower bound 1.000 ms (gap 0.0%)",
        "bound by     the host: it needs 1.000 ms, the device 0.560 ms",
    )
    assert tried.lstrip().startswith("try: ")
    step, bound, *rest = lines(300.0, 200.0)
    assert step == "step time    0.720 ms -> 0.560 ms; lower bound 0.520 ms (gap 7.7%)"
    assert bound.startswith("bound by     communication")
    assert "host         0.500 ms, if it never waits for the device" in rest
    assert not any(line.startswith("host") for line in lines(300.0, None))  # one graph's host time is unknown


def test_measured_times_are_shown_with_the_prediction():
    measured = Measured(3, 300e3, 170e3, 200e3, 100e3, 30e3)
    step = StepRecord(graphs=(replace(FORWARD, measured=measured), replace(FORWARD, measured=measured)))
    assert totals_text(step).splitlines()[0] == (
        "measured     0.600 ms: compute 0.340 ms, exposed 0.200 ms, idle 0.060 ms"
    )
    late = replace(FORWARD, measured=replace(measured, late_ns=20e3))
    shown = totals_text(replace(step, graphs=(step.graphs[0], late))).splitlines()[0]
    assert shown.endswith("idle 0.060 ms (0.020 ms of it waiting for the host)")
    half = replace(step, graphs=(*step.graphs, FORWARD))
    assert not any(line.startswith("measured") for line in totals_text(half).splitlines())


def test_a_long_table_leaves_out_hidden_collectives_unless_all_rows_are_requested():
    hidden = replace(FORWARD.collectives[1], name="ag2", exposed_after_ns=0.0, limit="hidden", causes=())
    rows = (*FORWARD.collectives, *(replace(hidden, name=f"ag{at}") for at in range(2, 40)))
    report = Report((StepRecord(graphs=(replace(FORWARD, collectives=rows),)),))
    assert "ag39" not in render(report.steps)
    assert "ag1 all_gather" in render(report.steps)
    assert "\nall 40 " in render(report.steps)
    assert "38 more are hidden" in render(report.steps)
    assert "ag39" in render(report.steps, all_rows=True)
    assert "more are hidden" not in render(report.steps, all_rows=True)


def test_nothing_compiled_says_so():
    assert render((StepRecord(),)) == "nothing was compiled with backend='overlapc' yet"


def test_schedules_follow_one_another():
    assert saved_schedules.render(REPORT.steps).count("schedule forward\n") == 2
