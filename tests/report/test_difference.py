"""The comparison of two records: every change has its cause, and parts add up to the step."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from overlapc.launch.cli import main
from overlapc.report.difference import differences, page, text
from overlapc.report.model import Measured, StepRecord
from overlapc.report.record import Report
from tests.report.sample import FORWARD

BEFORE = StepRecord(graphs=(replace(FORWARD, after=FORWARD.before, collectives=tuple(
    replace(row, exposed_after_ns=row.exposed_before_ns) for row in FORWARD.collectives)),))  # fmt: skip
AFTER = StepRecord(graphs=(FORWARD,))


def test_the_gain_of_overlap_is_a_change_of_exposed_communication():
    rows = {(row.section, row.what): row for row in differences(BEFORE, AFTER)}
    assert rows["step", "predicted"].change == -80e3
    assert rows["where it goes", "exposed communication"].change == -80e3
    assert [row.change for key, row in rows.items() if key[0] == "compute"] == [0.0]  # a single row for all compute
    (cause,) = (row for key, row in rows.items() if "would exceed the memory limit" in key[1])
    assert (cause.first, cause.second) == (100e3, 20e3)


@pytest.mark.parametrize("pair", [(BEFORE, AFTER), (AFTER, BEFORE), (AFTER, replace(AFTER, calls={"forward": 3}))])
def test_parts_add_up_to_the_steps(pair):
    rows = [row for row in differences(*pair) if row.section == "where it goes"]
    for side, step in zip(("first", "second"), pair, strict=True):
        assert sum(getattr(row, side) for row in rows) == pytest.approx(step.step_ns)


def test_a_figure_that_only_one_record_has_is_not_known_for_the_other():
    measured = Measured(3, 300e3, 170e3, 200e3, 100e3, 30e3)
    seen = StepRecord(graphs=(replace(FORWARD, measured=measured),))
    (line,) = (line for line in text(differences(BEFORE, seen), ("a", "b")).splitlines() if "measured" in line)
    assert line.split() == ["measured", "not", "known", "0.300", "ms"]


def test_peaks_are_compared_without_optimizers_unless_both_steps_know_their_state():
    trained = replace(AFTER, optimizer_bytes={"AdamW": 2**20}, update_peak_bytes=2**30)
    peak = differences(trained, AFTER)[-1]
    assert (peak.what, peak.first, peak.second) == ("peak without optimizers", 3 * 2**20, 3 * 2**20)
    assert differences(trained, trained)[-1].first == 2**30


def test_the_command_compares_records_as_table_and_page(tmp_path, capsys):
    first = Report((BEFORE,)).save(tmp_path / "a.json")
    second = Report((AFTER,)).save(tmp_path / "b.json")
    assert main(["diff", str(first), str(second)]) == 0
    shown = capsys.readouterr().out
    assert "-0.080 ms" in shown
    assert "-22.2%" in shown
    assert main(["diff", str(first), str(second), "--save", str(tmp_path / "diff.html")]) == 0
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, given: found.append(dict(given).get("style", "") if tag == "i" else "")  # type: ignore[method-assign]
    parser.feed((tmp_path / "diff.html").read_text())
    assert any("left: 0.00%; width: 50.00%" in style for style in found)  # the largest change; to the left if shorter
    assert main(["diff", str(first), str(tmp_path / "diff.html")]) == 2


def test_names_from_records_are_escaped():
    evil = StepRecord(graphs=(replace(FORWARD, collectives=(replace(FORWARD.collectives[0], group="<b>"),)),))
    assert "<b>" not in page(differences(evil, AFTER), ("<i>", "b")).partition("<h1>")[2].replace("<i class", "")
