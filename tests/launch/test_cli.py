"""The command line: bad input gives one line on stderr and exit code 2 before any process starts."""

from __future__ import annotations

import re

import pytest

import overlapc.config
from overlapc.errors import ConfigError
from overlapc.estimators.profiles.profile_file import profile_path
from overlapc.launch import cli
from overlapc.report import record
from tests.report.sample import REPORT

SCHEDULE = """\
schedule step
%p0 = input : 1MiB
%p1 = input : 1MiB
ag0 = all_gather(%p0) @dp(2) : 2MiB  100us [table x]
%w0 = wait(ag0)
mm0 = extern:mm(%w0) : 1MiB  80us [roofline]
ag1 = all_gather(%p1) @dp(2) : 2MiB  100us [table x]
%w1 = wait(ag1)
mm1 = extern:mm(%w1, mm0) : 1MiB  80us [roofline]
return mm1
"""


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Return a function that runs the command in an empty folder and returns (exit code, stdout, stderr).

    The test fails if the command starts ranks.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OVERLAPC_PROFILE", raising=False)
    for name in ("calibrate", "demo", "run"):
        replaced = f"overlapc.launch.commands.{name}.run_ranks"
        monkeypatch.setattr(replaced, lambda *_: pytest.fail("ranks were started"))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--nproc", "0"), "--nproc 0: a job needs at least 1 process"),
        (("run", "--nproc", "0", "x.py"), "--nproc 0: a job needs at least 1 process"),
        (("demo", "--nproc", "3", "--tp", "2"), "--nproc 3 does not divide into --tp 2; use a multiple of 2"),
        (("demo", "--nproc", "9999", "--device", "cuda"), "--nproc 9999: this machine has"),
        (("demo", "--nproc", "3", "--tp", "3"), "--tp 3 does not divide the key-value heads of this model (4)"),
        (("demo", "--tp", "2", "--seq", "33"), "--seq 33 does not divide among --tp 2 ranks"),
        (("demo", "--device", "tpu"), "--device tpu: cpu or cuda"),
        (("demo", "--dtype", "fp8"), "--dtype fp8: fp32 or bf16"),
        (("demo", "--model", "70b"), "--model 70b: one of demo, tiny, 8b"),
        (("demo", "--steps", "0"), "--steps 0: at least 1"),
        (("demo", "--nproc", "two"), "Invalid value for '--nproc'"),
        (("demo", "--nprocs", "2"), "--nproc"),
        (("demo", "-o", "memory_budgt=1GiB"), "no option named 'memory_budgt'; nearest: memory_budget"),
        (("demo", "-o", "memory_budget=lots"), "memory_budget: 'lots' is not a size"),
        (("demo", "-o", "memory_budget"), "--option memory_budget: write it as NAME=VALUE"),
        (("demo", "--passes", "sink_wait"), "no pass named 'sink_wait'; nearest: sink_waits"),
        (("run", "--passes", "sink_wait", "x.py"), "no pass named 'sink_wait'; nearest: sink_waits"),
        (("run", "missing.py"), "no script 'missing.py'"),
        (("report", "missing.json"), "cannot read missing.json: No such file or directory"),
        (("plan", "missing.txt"), "cannot read missing.txt: No such file or directory"),
        (("plan", "train.py", "--seq", "64"), "--seq needs --model: train.py makes its model and its mesh, from"),
        (("plan", "a.txt", "--no-reshard"), "--no-reshard does not apply to the schedules in a.txt, whose ranks and"),
        (("plan", "a.txt", "--budget", "1GiB"), "--budget does not apply to the schedules in a.txt"),
        (("plan", "a.txt", "--", "1"), "the argument 1 does not apply to the schedules in a.txt"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, arguments, message):
    code, out, error = command(*arguments)
    assert (code, out) == (2, "")
    assert error.startswith("overlapc: ")
    assert error.count("\n") == 1
    assert message in error


def test_without_a_subcommand_help_is_shown(command):
    code, out, error = command()
    assert (code, error) == (2, "")
    assert "\n  report  " in out


def test_a_missing_compiler_is_an_error_before_ranks_start(command, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, _, error = command("demo")
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith("overlapc: no C++ compiler found (tried no-such-compiler); install g++")


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0+cpu"])
def test_an_unsupported_torch_is_an_error_before_ranks_start(command, monkeypatch, version):
    monkeypatch.setattr("torch.__version__", version)
    code, _, error = command("demo")
    assert (code, error.count("\n")) == (2, 1)
    assert f"torch {version} is not supported: overlapc needs torch>=2.11,<2.14" in error


def test_an_unwritable_output_folder_is_an_error(command, tmp_path):
    (tmp_path / "file").touch()
    code, _, error = command("demo", "--out", "file/run")
    assert (code, error) == (2, "overlapc: cannot write to folder file/run: Not a directory\n")


@pytest.mark.parametrize(
    ("arguments", "what", "form"),
    [
        (("run", "--report", "{}", "train.py"), "a record", ".json"),
        (("calibrate", "--quick", "--device", "cpu", "--out", "{}"), "a profile", ".json"),
        (("calibrate", "--from", "missing.json", "--out", "{}"), "a profile", ".json"),
        (("report", "missing.json", "--save", "{}"), "a report", ".html"),
        (("diff", "missing.json", "missing.json", "--save", "{}"), "a comparison", ".html"),
        (("plan", "missing.txt", "--save", "{}"), "a plan", ".html"),
        (("plan", "--model", "llama-70b", "--save", "{}"), "a plan", ".json"),
        (("plan", "--model", "llama-70b", "--seq", "1024,2048", "--save", "{}"), "several plans", ".html"),
    ],
    ids=lambda each: " ".join(each[:2]) if isinstance(each, tuple) else None,
)
def test_output_files_are_checked_before_any_work(command, tmp_path, arguments, what, form):
    (tmp_path / "train.py").touch()
    (tmp_path / "file").touch()
    (tmp_path / f"folder{form}").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for name, message in (
        ("lost.csv", f"lost.csv: {what} can only be saved as "),
        (f"folder{form}", f"folder{form}: it is a folder; give the name of a file"),
        (f"file/out{form}", "cannot write to folder "),
    ):
        code, out, error = command(*(each.format(name) for each in arguments))
        assert (code, out) == (2, "")
        assert message in error
        assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unusable_variable_is_an_error_before_ranks_start(command, monkeypatch):
    monkeypatch.setenv("OVERLAPC_RANK_TIMEOUT", "soon")
    code, _, error = command("demo")
    assert (code, error) == (2, "overlapc: OVERLAPC_RANK_TIMEOUT: 'soon' is not a number of seconds\n")


def test_options_lists_every_knob_with_its_variable(command):
    code, out, _ = command("options")
    assert code == 0
    for name, variable, _, _ in overlapc.config.describe():
        assert name in out
        assert variable in out


def test_version_lists_the_software_that_overlapc_uses(command):
    code, out, _ = command("version")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["overlapc", "torch", "triton", "sympy", "python", "C++"]


@pytest.mark.parametrize("name", ["demo", "run", "report", "plan"])
def test_help_shows_an_example_command(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert f"example: overlapc {name}" in " ".join(out.split())


def test_report_shows_and_saves(command, tmp_path):
    REPORT.save(tmp_path / "overlap.json")
    assert command("report", "overlap.json") == (0, f"{REPORT}\n", "")
    code, out, _ = command("report", "overlap.json", "--save", "report.html", "--save", "again.json")
    assert (code, out) == (0, "written to report.html\nwritten to again.json\n")
    assert record.load("again.json") == REPORT


def test_plan_runs_passes_on_a_schedule_text_and_shows_what_they_gained(command, tmp_path):
    (tmp_path / "step.txt").write_text(SCHEDULE)
    saves = ("--save", "plan.json", "--save", "schedule.txt")
    code, out, error = command("plan", "step.txt", "-o", "peak_increase=1", *saves)
    assert (code, error) == (0, "")
    assert "ag1 all_gather" in out
    graph = record.load(tmp_path / "plan.json").steps[0].graphs[0]
    assert graph.before.step_ns == 360_000.0
    assert graph.after.step_ns < graph.before.step_ns
    planned = (tmp_path / "schedule.txt").read_text()
    assert planned.index("ag1") < planned.index("mm0")


def test_plan_without_passes_leaves_the_order(command, tmp_path):
    (tmp_path / "step.txt").write_text(SCHEDULE)
    code, out, _ = command("plan", "step.txt", "--passes", "none")
    assert code == 0
    assert "0.360 ms -> 0.360 ms" in out


def test_plan_stays_within_the_given_memory(command, tmp_path):
    (tmp_path / "step.txt").write_text(SCHEDULE)
    code, out, _ = command("plan", "step.txt", "-o", "peak_increase=0")
    assert code == 0
    assert "0.360 ms -> 0.360 ms" in out
    assert "peak memory" in out.partition("ag1 all_gather")[2].splitlines()[0]
    code, _, error = command("plan", "step.txt", "-o", "memory_budget=1MiB")
    assert code == 1
    assert "memory_budget leaves 1MiB" in error


def test_plan_estimates_with_a_profile_and_names_it(command, tmp_path):
    bare = SCHEDULE.replace("100us [table x]", "").replace("80us [roofline]", "")
    (tmp_path / "step.txt").write_text(bare)
    _, out, _ = command("plan", "step.txt")
    unknown = re.search(r"unknown +(.*): no estimate;", out)
    assert unknown is not None
    assert sorted(unknown[1].split(", ")) == ["ag0", "ag1", "mm0", "mm1"]
    _, out, _ = command("plan", "step.txt", "--profile", "h200-nvlink")
    assert "h200-nvlink" in out.partition("ag1 all_gather")[2].splitlines()[0]
    assert "unknown      mm0, mm1:" in out
    code, _, error = command("plan", "step.txt", "--profile", "h200")
    assert code == 2
    assert error.startswith("overlapc: no device profile named 'h200'; nearest: ")
    assert "h200-nvlink" in error
    assert error.count("\n") == 1


def test_plan_finds_a_profile_in_the_home_folder(command, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.json").write_bytes(profile_path("h200-nvlink").read_bytes())
    (tmp_path / "step.txt").write_text(SCHEDULE)
    for what in (("step.txt",), ("--model", "tiny", "--mesh", "dp=2")):
        code, _, error = command("plan", *what, "-o", "profile=~/mine.json")
        assert (code, error) == (0, "")


def test_plan_takes_a_file_of_several_schedules(command, tmp_path):
    (tmp_path / "step.txt").write_text(SCHEDULE + "\n" + SCHEDULE.replace("schedule step", "schedule again"))
    code, out, _ = command("plan", "step.txt")
    assert code == 0
    assert "graph step\n" in out
    assert "graph again\n" in out


def test_plan_names_the_line_that_it_cannot_read(command, tmp_path):
    (tmp_path / "step.txt").write_text(SCHEDULE + "\n" + "schedule again\nag0 = = wait(ag0)\n")
    code, _, error = command("plan", "step.txt")
    assert code == 2
    assert "line 13" in error


def test_a_run_keeps_its_report_beside_those_of_earlier_runs(command, monkeypatch, tmp_path):
    def ranks(arguments, nproc, run_dir, variables, **_):
        (run_dir / "rank0").mkdir()
        REPORT.save(run_dir / "rank0" / "record.json")
        return run_dir

    monkeypatch.setattr("overlapc.launch.commands.run.run_ranks", ranks)
    (tmp_path / "train.py").touch()
    for number in (1, 2):
        code, out, _ = command("run", "train.py")
        kept = list((tmp_path / "runs").glob("*/overlap.json"))
        assert (code, len(kept)) == (0, number)
    assert re.search(r"written to (runs/\S+/overlap.json); as a web page: overlapc report \1 --save", out)
    assert not list(tmp_path.rglob(".overlap.json.*"))
    assert command("run", "--report", "mine.json", "train.py")[0] == 0
    assert (tmp_path / "mine.json").is_file()


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_without_a_report_leaves_no_folder(command, monkeypatch, tmp_path, fails):
    def ranks(arguments, nproc, run_dir, variables, **_):
        if fails:
            raise ConfigError("a rank failed")
        return run_dir

    monkeypatch.setattr("overlapc.launch.commands.run.run_ranks", ranks)
    (tmp_path / "train.py").touch()
    (tmp_path / "out").mkdir()
    command("run", "train.py")
    command("run", "--report", "out/mine.json", "train.py")
    assert not list((tmp_path / "runs").iterdir())
    assert (tmp_path / "out").is_dir()
