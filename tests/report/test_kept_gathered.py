"""The report lists the parameters that stay gathered until backward, those that do not and why, and the time that more
memory would save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from overlapc.compilation.plan_only import plan_schedules
from overlapc.config import Config
from overlapc.report import record
from overlapc.report.kept_gathered import gathered_lines, saved_by_keeping, savings_text
from overlapc.report.record import Report
from tests.planning.test_keep_gathered import step_within

MIB = 2**20
ALL = "layers.0, layers.1, layers.2, layers.3"


@pytest.fixture(autouse=True)
def _nothing_recorded() -> Iterator[None]:
    yield
    record.clear()


def planned(budget: str | None = None, **options: object) -> Report:
    """Return the report of a plan of four layers with parameters of 4 MiB that gather in 40 us (layer 2: 80 us)."""
    record.clear()
    step = step_within(budget)
    config = Config.of({**options, **({} if budget is None else {"memory_budget": budget})})
    plan_schedules((step.forward, step.forward_ctx), (step.backward, step.backward_ctx), config)
    return record.report_of_process()


def said(report: Report) -> list[str]:
    """Return the lines about gathered parameters, except those about the time that more memory would save."""
    lines = [line.removeprefix("parameters").strip() for line in gathered_lines(report.steps[0])]
    return [line for line in lines if "saves" not in line]


def test_without_a_budget_all_are_gathered_again() -> None:
    report = planned()
    (repeated,) = said(report)
    assert repeated.startswith("16MiB (layers.2, ")
    assert repeated.endswith("again in backward: no memory_budget is set")
    backward = report.steps[0].graphs[1]
    assert next(each.of for each in backward.repeated_gathers) == "layers.2", "the most time per byte"
    assert saved_by_keeping(report.steps[0]) == [(16 * MIB, pytest.approx(200e3, abs=10e3))]


def test_with_room_all_stay_gathered_and_no_more_memory_is_asked_for() -> None:
    report = planned("1GiB")
    assert said(report) == [f"16MiB ({ALL}) stay gathered until backward: memory_budget has room for them"]
    assert not saved_by_keeping(report.steps[0])


def test_parameters_without_room_are_gathered_again() -> None:
    reports = [planned(f"{mib}MiB") for mib in (18, 22)]
    saved_ns = [saved_by_keeping(report.steps[0])[-1][1] for report in reports]
    assert saved_ns == sorted(set(saved_ns), reverse=True), "the more parameters are kept, the less the others save"
    gained_ns = reports[0].steps[0].step_ns - planned("1GiB").steps[0].step_ns
    assert gained_ns == pytest.approx(saved_ns[0], rel=0.05), "the gain must be the one that was predicted"
    kept, repeated = said(reports[0])
    assert kept.startswith("8MiB (layers.2, layers.3) stay gathered until backward")
    assert repeated.startswith("8MiB (")
    assert repeated.endswith("memory_budget has no room for more")


def test_keep_gathered_off_is_named_as_the_reason() -> None:
    (repeated,) = said(planned("1GiB", keep_gathered=False))
    assert repeated.endswith("keep_gathered is off")


def test_every_form_of_the_report_shows_gathered_parameters(tmp_path: Path) -> None:
    report = planned("18MiB")
    page = report.save(tmp_path / "report.html").read_text()
    table = report.save(tmp_path / "report.txt").read_text()
    for text in (table, page):
        assert "stay gathered until backward: memory_budget has room for them" in text
        assert "are gathered again in backward: memory_budget has no room for more" in text
        assert "in the planned order, keeping all 8MiB of them saves 0." in text
    assert "backward gathers 8MiB of parameters again" in page, "the page must list it among the advice"
    assert record.load(report.save(tmp_path / "overlap.json")) == report


def test_amounts_that_print_alike_are_listed_once():
    text = savings_text([(MIB, 1e5), (16 * MIB, 2e5), (16 * MIB + 1, 3e5)])
    assert text == "in the planned order, keeping 1MiB of them saves 0.100 ms, all 16MiB 0.300 ms"
