"""The table and the page that show several plans, as from a sweep of `overlapc plan`."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from overlapc.launch.cli import main
from overlapc.report import plans
from overlapc.report.model import StepRecord
from tests.report.sample import FORWARD

GIB = 2**30
AXES = {"world size": ["8", "64"], "seq": ["4096"], "batch": ["1"], "budget": ["", "70GiB"]}


def step(ranks: int, step_us: float, peak_gib: int, tokens: int = 0) -> StepRecord:
    graph = replace(FORWARD, after=replace(FORWARD.after, step_ns=step_us * 1e3), peak_bytes=peak_gib * GIB)
    return StepRecord(0, ranks, (graph,), tokens=tokens)


FOUND: list[tuple[plans.Point, plans.Outcome]] = [
    ({"world size": "8", "seq": "4096", "batch": "1", "budget": ""}, step(8, 1000, 80, 8 * 4096)),
    ({"world size": "8", "seq": "4096", "batch": "1", "budget": "70GiB"}, "memory_budget leaves 70GiB"),
    ({"world size": "64", "seq": "4096", "batch": "1", "budget": ""}, step(64, 2000, 40, 64 * 4096)),
    ({"world size": "64", "seq": "4096", "batch": "1", "budget": "70GiB"}, step(64, 2500, 30, 64 * 4096)),
]


def test_the_table_shows_the_axes_that_vary_and_the_rates():
    assert re.split(r"  +", plans.table(AXES, FOUND).splitlines()[0].strip()) == [
        "world size", "budget", "step", "exposed", "lower bound", "tokens/s", "tokens/s a GPU", "peak",
        "bound by",
    ]  # fmt: skip
    rows = plans.table_rows(AXES, FOUND)[1]
    assert rows[0][:2] == ["8", ""]
    assert rows[0][5:8] == ["32,768,000", "4,096,000", "80GiB"]
    assert rows[1] == ["8", "70GiB", "", "", "", "", "", "", "memory_budget leaves 70GiB"]


def test_without_tokens_there_are_no_rates():
    heads, _ = plans.table_rows(AXES, [(point, replace(FOUND[0][1], tokens=0)) for point, _ in FOUND])
    assert "tokens/s" not in heads
    drawn = plans.plot_data(AXES, [(point, replace(FOUND[0][1], tokens=0)) for point, _ in FOUND])
    assert drawn["measures"][0] == "step, ms"


def test_a_plot_has_a_line_for_each_budget_and_a_gap_where_a_step_does_not_fit():
    drawn = plans.plot_data(AXES, FOUND)
    assert (drawn["across"], drawn["places"]) == ("GPUs", [8.0, 64.0])
    assert drawn["measures"] == [
        "tokens/s a GPU", "tokens/s", "step, ms", "exposed communication, ms", "peak memory, GiB",
    ]  # fmt: skip
    lines = {line["name"]: line["values"] for line in drawn["lines"]}
    assert list(lines) == ["no budget", "budget 70GiB"]
    assert lines["no budget"][2] == [1.0, 2.0]
    assert lines["budget 70GiB"][0] == [None, pytest.approx(4096 / 2.5e-3)]
    assert lines["budget 70GiB"][4] == [None, 30.0]


def test_with_a_fixed_number_of_gpus_the_first_varying_axis_is_the_x_axis():
    axes = {**AXES, "world size": ["8"], "budget": ["40GiB", "80GiB"]}
    found = [({**FOUND[0][0], "budget": budget}, FOUND[0][1]) for budget in axes["budget"]]
    drawn = plans.plot_data(axes, found)
    assert (drawn["across"], drawn["places"]) == ("memory budget, GiB", [40.0, 80.0])
    assert [line["name"] for line in drawn["lines"]] == [""]


def test_the_page_contains_plot_data_and_table_and_loads_nothing():
    page = plans.page(AXES, FOUND, "assumed <this>")
    assert "assumed &lt;this&gt;" in page
    assert "http" not in page
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == plans.plot_data(AXES, FOUND)
    assert page.count("<tr>") == 5


def test_a_record_of_several_plans_is_refused_before_they_are_made(capsys):
    assert main(["plan", "--model", "tiny", "--world-size", "2,4", "--save", "record.json"]) == 2
    assert "several plans can only be saved as .html" in capsys.readouterr().err
