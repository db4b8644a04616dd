"""Malformed or malicious input files (schedules, records, profiles, traces) are refused quickly, in a short message."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from overlapc.documents import read_text
from overlapc.errors import ConfigError
from overlapc.estimators.profiles.profile_file import PROFILES
from overlapc.launch import cli
from tests.report.sample import REPORT

DEEP = "[" * 200_000
SCHEDULE = "schedule s\nag0 = all_gather(%p0) @dp(2) : 1MiB 10us [t]\n%w0 = wait(ag0)\nreturn %w0\n"
Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Said:
    """Return a function that writes a file `x`, runs a command that must refuse it, and returns the error message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schedule.txt").write_text(SCHEDULE)
    REPORT.save(tmp_path / "record.json")

    def run(content: str | bytes | None, *arguments: str) -> str:
        if content is not None:
            (tmp_path / "x").write_bytes(content if isinstance(content, bytes) else content.encode())
        capsys.readouterr()
        assert cli.main(arguments) == 2
        message = capsys.readouterr().err
        assert message.startswith("overlapc: ")
        assert len(message) < 1500
        return message

    return run


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (b"\xff\xfe", "is not text in UTF-8"),
        (DEEP, "it contains JSON"),
        ("a = all_gather(b) @dp(" + "9" * 5000 + ")", "is more than 1,048,576"),
        ("a = all_gather(b) @dp ranks=0-4000000000", "is neither a rank nor a range"),
        ("a = all_gather(b) @dp ranks=" + "0-1048575," * 9 + "1", "more than 1,048,576 ranks"),
        ("a = kernel(b) flops=" + "9" * 5000, "is more than"),
        ("a = kernel(b) : " + "9" * 400 + "GiB", "is out of range for a size in bytes"),
        ("a = kernel(b) : 1MiB 1e999s", "is out of range for a time"),
        ('"\\q" = kernel(b)', "not a valid JSON string"),
        ('"\\ud800" = kernel(b)', "not a valid JSON string"),
        ("a = kernel(b) " + "x" * 500_000, "no key named 'xxx"),
        ("a = " + "x" * 5000, "' is not a collective or a kind of node"),
        (f"{'x' * 5000} = kernel(b); {'x' * 5000} = kernel(b)", "is defined a second time"),
        (f"{'x' * 5000} = kernel(b); a = kernel(b) node={'x' * 5000}", "a second node named xxx"),
    ],
)
def test_a_malformed_schedule_is_refused(said: Said, statement: str | bytes, message: str) -> None:
    assert message in said(statement, "plan", "x")


def test_a_record_given_as_a_schedule_is_recognized(said: Said) -> None:
    told = said(None, "plan", "record.json")
    assert "it contains JSON; for a record, run overlapc report FILE --save schedule.txt" in told


def changed(document: str, *path: str | int, to: object) -> str:
    """Return a JSON document with the value at `path` replaced."""
    data = json.loads(document)
    inside = data
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = to
    return json.dumps(data)


GRAPH = ("steps", 0, "graphs", 0)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        DEEP,
        '{"overlapc_record": 1, "steps": ' + DEEP,
        '{"overlapc_record": 1}',
        "{}",
        "null",
        changed(REPORT.to_json(), "steps", to=[3]),
        changed(REPORT.to_json(), *GRAPH, "after", "step_ns", to="long"),
        changed(REPORT.to_json(), *GRAPH, "after", "step_ns", to=-1e9),
        changed(REPORT.to_json(), *GRAPH, "after", "step_ns", to=float("nan")),
        changed(REPORT.to_json(), *GRAPH, "peak_bytes", to=2**70),
        changed(REPORT.to_json(), *GRAPH, "name", to=None),
        changed(REPORT.to_json(), *GRAPH, "memory", to=[[0]]),
        changed(REPORT.to_json(), "overlapc_record", to=2),
    ],
)
@pytest.mark.parametrize("command", [("report", "x"), ("calibrate", "--from", "x")])
def test_a_malformed_record_is_refused(said: Said, command: tuple[str, ...], content: str | bytes) -> None:
    assert "x is not " in said(content, *command)


PROFILE = (PROFILES / "cpu-gloo.json").read_text()
QUANTITIES = ("quantities", "memory_bytes_per_s")


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        DEEP,
        "[]",
        changed(PROFILE, "overlapc_profile", to=7),
        changed(PROFILE, *QUANTITIES, "value", to=0),
        changed(PROFILE, *QUANTITIES, "value", to=-1.0),
        changed(PROFILE, *QUANTITIES, "value", to="fast"),
        changed(PROFILE, *QUANTITIES, to=1.0),
        changed(PROFILE, "quantities", "memory_bytes_per_z", to={"value": 1.0, "origin": ""}),
        changed(PROFILE, "quantities", "launch_ns", "value", to=10**400),
        changed(PROFILE, "quantities", "host_link", "value", to={"step_ns": 1.0}),
        changed(PROFILE, "tables", 0, "points", to=[[1, 2.0], [1, 3.0]]),
        changed(PROFILE, "tables", 0, "points", to=[[0, 2.0]]),
        changed(PROFILE, "name", to=None),
    ],
)
def test_a_malformed_profile_is_refused(said: Said, content: str | bytes, tmp_path: Path) -> None:
    said(content, "report", "x")
    (tmp_path / "x").rename(tmp_path / "x.json")
    assert "x.json" in said(None, "plan", "schedule.txt", "--profile", "x.json")
    assert "x.json" in said(None, "demo", "-o", "profile=x.json")  # before any rank starts


EVENT = {"ph": "X", "cat": "user_annotation", "name": "overlapc/f/launch/1/k", "ts": 1.0, "dur": 1.0, "tid": 1}
WRONG: list[dict[str, object]] = [{"ts": "x"}, {"dur": -1}, {"name": 3}, {"args": []}]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        DEEP,
        '{"traceEvents": ' + DEEP,
        '{"traceEvents": 3}',
        '{"traceEvents": []}',
        *(json.dumps({"traceEvents": [EVENT | wrong]}) for wrong in WRONG),
    ],
)
def test_a_malformed_trace_is_refused(said: Said, content: str | bytes) -> None:
    refused = ("overlapc: x is not ", "overlapc: x has no marks of overlapc")
    assert said(content, "report", "record.json", "--profile", "x").startswith(refused)
    assert said(content, "plan", "schedule.txt", "-o", "estimates=x").startswith(refused)


def test_a_missing_file_of_estimates_is_an_error(said: Said) -> None:
    assert "estimates: cannot read" in said(None, "plan", "schedule.txt", "-o", "estimates=nowhere.json")


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("dp=1000000000", "--mesh: dp: '1000000000' is more than 131,072"),
        ("dp=" + "9" * 5000, "(5002 characters) is more than 131,072"),
        ("dp=100000,tp=100000", "10,000,000,000 ranks: a plan can have at most 131,072"),
        ("dp=2,dp=2", "--mesh: dp is given twice"),
        ("dp=-1", "--mesh: dp: '-1' is not a whole number"),
    ],
)
def test_an_absurd_mesh_is_refused(said: Said, mesh: str, message: str) -> None:
    assert message in said(None, "plan", "--model", "tiny", "--mesh", mesh)


def test_an_endless_file_is_read_only_up_to_the_limit() -> None:
    with pytest.raises(ConfigError, match="longer than 1 MiB"):
        read_text("/dev/zero", 2**20)


def test_a_short_file_takes_little_memory() -> None:
    tracemalloc.start()
    try:
        read_text(__file__)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
