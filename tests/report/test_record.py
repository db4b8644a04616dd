"""Records survive a round trip through JSON and can be saved in every form; errors say why they cannot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlapc.report
from overlapc.config import Config
from overlapc.errors import ConfigError
from overlapc.launch.plan import plan_text
from overlapc.report import record
from overlapc.report.model import Plan, Span, StepRecord
from overlapc.report.record import Report
from tests.report.sample import FORWARD, REPORT


def test_json_round_trip(tmp_path):
    assert record.load(REPORT.save(tmp_path / "record.json")) == REPORT


def test_the_suffix_selects_the_form(tmp_path):
    page = REPORT.save(tmp_path / "deep" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "steps" in json.loads(REPORT.save(tmp_path / "overlap.json").read_text())
    assert REPORT.save(tmp_path / "schedule.txt").read_text().startswith("schedule forward")
    assert REPORT.save(tmp_path / "table.txt").read_text() == f"{REPORT}\n"
    assert not list(tmp_path.glob(".*"))  # no temporary file is left


@pytest.mark.parametrize("suffix", record.FORMS)
def test_a_step_that_takes_no_time_is_saved_in_every_form(tmp_path, suffix):
    views = plan_text("schedule views; %x = input : 1KiB; %y = view(%x); return %y", Config(passes="none"))
    assert views.save(tmp_path / f"report{suffix}").stat().st_size


@pytest.mark.parametrize("suffix", record.FORMS)
def test_a_rank_that_compiled_nothing_is_saved_in_every_form(tmp_path, suffix):
    assert Report((StepRecord(),)).save(tmp_path / f"report{suffix}").stat().st_size


def test_an_unknown_suffix_names_the_forms(tmp_path):
    with pytest.raises(ConfigError, match=r"report.pdf: a report can only be saved as .html, .pftrace, .json or .txt"):
        REPORT.save(tmp_path / "report.pdf")


def test_an_unwritable_path_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*report.html: \w+"):
        REPORT.save(tmp_path / "file" / "report.html")


def test_a_report_that_cannot_replace_its_target_leaves_no_temporary_file(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*report.html: Is a directory"):
        REPORT.save(tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a record: Input data was truncated"),
        ("[]", "not a record: Expected `object`"),
        ('{"overlapc_record": 0}', "of this version"),
    ],
)
def test_a_file_that_is_not_a_record_is_refused(tmp_path, text, message):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        record.load(tmp_path / "record.json")


def test_the_found_field_accepts_only_known_words(tmp_path):
    path = Report((StepRecord(0, 1, (replace(FORWARD, found="graph"),)),)).save(tmp_path / "record.json")
    assert record.load(path).steps[0].graphs[0].found == "graph"
    path.write_text(path.read_text().replace('"found": "graph"', '"found": "half"'))
    with pytest.raises(ConfigError, match="found"):
        record.load(path)


def test_spans_of_unknown_kinds_and_profiles_that_are_not_json_are_refused(tmp_path):
    path = REPORT.save(tmp_path / "record.json")
    text = path.read_text()
    path.write_text(text.replace('"kind": "idle"', '"kind": "idling"'))
    with pytest.raises(ConfigError, match=r"kind|pattern"):
        record.load(path)
    path.write_text(text.replace('"profile": ""', '"profile": "h200"'))
    with pytest.raises(ConfigError, match="the device profile of forward"):
        record.load(path).save(tmp_path / "report.html")


def test_a_span_that_begins_before_zero_by_a_rounding_error_is_saved_as_a_trace(tmp_path):
    graph = replace(FORWARD, after=Plan(9.0, (Span("ag0", "@dp", -0.6, 9.0, "start"),)))
    assert Report((StepRecord(0, 1, (graph,)),)).save(tmp_path / "report.pftrace").stat().st_size


def test_a_missing_record_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        record.load(tmp_path / "none.json")


def test_gather_sorts_ranks_by_number(tmp_path):
    for rank in (10, 2, 0):
        Report((StepRecord(rank, 11, (FORWARD,)),)).save(tmp_path / f"rank{rank}" / "record.json")
    assert [step.rank for step in record.gather(tmp_path).steps] == [0, 2, 10]


def test_the_report_package_is_callable_and_returns_the_records(monkeypatch):
    record.clear()  # remove what other tests in this process recorded
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(overlapc.report.NothingCompiled, match="run one step before the report"):
        overlapc.report(object())
    record.add(FORWARD)
    (step,) = overlapc.report(object()).steps
    assert replace(step, seconds={}) == StepRecord(3, 4, (FORWARD,))  # `seconds` covers all compilations of the process
    record.clear()
    assert overlapc.report().steps[0].graphs == ()


def test_the_rank_is_that_of_the_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # as if ranks were not started by torchrun
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        (step,) = record.report_of_process().steps
    finally:
        dist.destroy_process_group()
    assert (step.rank, step.world_size) == (3, 8)
