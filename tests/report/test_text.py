"""The overlap table, word for word."""

from __future__ import annotations

from dataclasses import replace

from overlapc.report.record import Report, StepRecord
from overlapc.report.text import graph_text, render, schedules
from tests.report.sample import FORWARD, REPORT

GOLDEN = """\
graph forward
collective      of        group      size    time µs  by         hidden µs    exposed µs    moves  limited by
--------------  --------  -------  ------  ---------  -------  -----------  ------------  -------  -----------------
ag0 all_gather            @dp(2)     1MiB        100  table x   0.0 -> 0.0    100 -> 100        0  start of schedule
ag1 all_gather  layers.1  @dp(2)     1MiB        100  table x  0.0 -> 80.0   100 -> 20.0        2  peak memory
all 2                                2MiB        200           0.0 -> 80.0    200 -> 120        2
step time    0.360 ms -> 0.280 ms; no order can beat 0.260 ms (gap 7.7%)
peak memory  2MiB -> 3MiB (budget 4MiB)
kernels      1 generated, 1 library calls, 3 fallbacks (aten.topk 2, aten.sort 1)
compiled in  1.50 s; passes: raise_collectives 0.002 s
unknown      strange: nobody could estimate these, the times above leave them out"""


def test_the_table_of_one_graph():
    assert graph_text(FORWARD) == GOLDEN


def test_a_collective_nobody_could_estimate_is_unknown_and_not_zero():
    row = replace(FORWARD.collectives[0], estimate_ns=None, source="")
    line = graph_text(replace(FORWARD, collectives=(row,))).splitlines()[3]
    assert " unknown " in line


def test_every_rank_that_differs_gets_a_line_and_equal_ones_none():
    assert "rank 1: 1 graph(s), step time 0.280 ms, exposed 0.120 ms" in render(REPORT)
    same = Report((REPORT.steps[0], replace(REPORT.steps[0], rank=1)))
    assert "\nrank 1" not in render(same)


def test_totals_add_up_over_graphs():
    totals = render(REPORT).partition("all graphs\n")[2]
    assert totals.startswith("step time    0.720 ms -> 0.560 ms; no order can beat 0.520 ms (gap 7.7%)\n")
    assert "exposed      0.200 ms -> 0.120 ms of communication" in totals


def test_nothing_compiled_says_so():
    assert render(Report((StepRecord(),))) == "nothing was compiled with backend='overlapc' yet"


def test_schedules_follow_one_another():
    assert schedules(REPORT).count("schedule forward\n") == 2
