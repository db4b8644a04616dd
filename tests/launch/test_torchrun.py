"""`overlapc run` on real ranks: their arguments and environment, how their errors reach the user, and that no process
is left behind.

Each command runs in a separate process with a timeout; most scripts do not import torch, so a launch is short.
"""

from __future__ import annotations

import json
import os
import select as select_module
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlapc.agreement.departures import departures
from overlapc.errors import CompileError, ConfigError
from overlapc.launch import torchrun, worker
from overlapc.launch.torchrun import check_world
from overlapc.launch.watch_ranks import Watch

TIMEOUT_S = 120

SCRIPT = """
import json, os, sys, time
from pathlib import Path
from overlapc.errors import ConfigError, RanksDisagree

out, what = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
if what == "show":
    names = ("WORLD_SIZE", "OMP_NUM_THREADS", "OVERLAPC_PASSES", "OVERLAPC_MEMORY_BUDGET")
    seen = {name: os.environ.get(name) for name in names}
    seen |= {"argv": sys.argv[2:], "path": sys.path[0], "pid": os.getpid()}
    (out / f"{rank}.json").write_text(json.dumps(seen))
if what == "config":
    raise ConfigError("rank_timeout: 'x' is not a number of seconds")
if what == "disagree":
    try:
        raise RanksDisagree("rank 1 compiled another graph")
    except RanksDisagree as error:
        raise RuntimeError("a framework's own words") from error
if what == "crash":
    if rank == 1:
        {}["missing"]
    time.sleep(60)
if what == "kill":
    if rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(60)
if what == "vanish":  # in the middle of a step, which the other rank notices at once
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 1:
        (sys.exit if sys.argv[3] == "sys" else os._exit)(int(sys.argv[4]))
    dist.barrier()
if what == "vanish_early":  # before its first compilation, in which the other rank waits for it
    import torch.distributed as dist
    from overlapc.agreement.rank_agreement import GraphText, peers_of
    dist.init_process_group("gloo")
    dist.barrier()
    passed = out / "passed"  # by rank 0: rank 1 may be through a barrier, and end, while rank 0 still waits in it
    if rank == 1:
        while not passed.exists():
            time.sleep(0.01)
        (sys.exit if sys.argv[3] == "sys" else os._exit)(int(sys.argv[4]))
    passed.touch()
    peers_of().agreement("forward", 300.0).agree_on_graph(GraphText([]))
if what == "sleep":
    (out / f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Return the folder in which processes of the test create temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it when it first makes that folder
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def script(tmp_path, temporary):
    path = tmp_path / "job" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def command(script: Path, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    report = ("--report", str(script.parent / "overlap.json"))
    return [
        sys.executable,
        "-m",
        "overlapc.launch.cli",
        "run",
        "--nproc",
        "2",
        *report,
        *options,
        str(script),
        *arguments,
    ]


def run(script: Path, what: str, *options: str) -> subprocess.CompletedProcess[str]:
    full = command(script, str(script.parent), *what.split(), "--steps", "20", options=options)
    return subprocess.run(full, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_ranks_get_arguments_variables_and_a_share_of_the_cores(script, temporary, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = run(script, "show", "-o", "memory_budget=1GiB", "--passes", "none")
    assert done.returncode == 0, done.stderr
    seen = [json.loads((script.parent / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank in seen:
        assert rank["argv"] == ["show", "--steps", "20"]
        assert rank["path"] == str(script.parent)
        assert rank["WORLD_SIZE"] == "2"
        assert (rank["OVERLAPC_PASSES"], rank["OVERLAPC_MEMORY_BUDGET"]) == ("none", "1GiB")
        assert int(rank["OMP_NUM_THREADS"]) == max(1, torchrun.cpus() // 2)
    assert seen[0]["pid"] != seen[1]["pid"]
    assert "compiled nothing with backend='overlapc'" in done.stderr
    assert sorted(path.name for path in script.parent.iterdir()) == ["0.json", "1.json", "script.py"]
    assert list(temporary.iterdir()) == []


def test_ranks_start_before_the_launcher_imports_dynamo(tmp_path):
    """The import takes a second, and once made a folder for Inductor's caches where temporary files are."""
    lines = (
        "import sys",
        "from pathlib import Path",
        "from overlapc.launch.commands import run",
        "run.run_ranks = lambda *_, **__: sys.exit(f'dynamo: {\"torch._dynamo\" in sys.modules}')",
        f"run.run(__file__, report=Path({str(tmp_path / 'overlap.json')!r}))",
    )
    start = tmp_path / "start.py"
    start.write_text("\n".join(lines))
    done = subprocess.run([sys.executable, start], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "dynamo: False\n" in done.stderr


def test_a_module_runs_as_a_script_does(script):
    name = "overlapc_test_job"
    script.rename(script.parent / f"{name}.py")
    full = command(Path(name), str(script.parent), "show", options=("-m",))
    done = subprocess.run(full, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert [json.loads((script.parent / f"{rank}.json").read_text())["argv"] for rank in (0, 1)] == [["show"]] * 2


def test_bad_input_on_every_rank_is_one_line_and_exit_code_2(script):
    done = run(script, "config")
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(": rank_timeout: 'x' is not a number of seconds")
    assert lines[0].startswith("overlapc: rank")


def test_our_error_inside_a_frameworks_error_is_shown_without_traceback(script):
    done = run(script, "disagree")
    assert done.returncode == 1
    assert "rank 1 compiled another graph" in done.stderr
    assert "Traceback" not in done.stderr
    assert "a framework's own words" not in done.stderr


def test_any_other_error_keeps_the_traceback_of_the_first_rank_that_failed(script):
    done = run(script, "crash")
    assert done.returncode == 1
    assert "overlapc: rank 1: KeyError: 'missing'" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert '{}["missing"]' in done.stderr
    assert "runpy" not in done.stderr  # frames of the launcher do not help to find the error
    assert "worker.py" not in done.stderr


def test_a_rank_that_is_killed_is_named_with_its_signal(script):
    done = run(script, "kill")
    assert done.returncode == 1
    assert done.stderr.strip() == "overlapc: rank 1 died of SIGKILL"


@pytest.mark.parametrize(
    ("how", "code", "expected"),
    [
        ("os 9", 9, "rank 1 exited with code 9"),
        ("sys 0", 1, "rank 1 exited with code 0 while other ranks still needed it"),
    ],
)
def test_a_rank_that_exits_by_itself_in_a_step_is_named_first(script, how, code, expected):
    done = run(script, f"vanish {how}")
    lines = done.stderr.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("overlapc: "))
    assert lines[first] == f"overlapc: {expected}"
    assert len(lines[first + 1 :]) == (1 if how.endswith(" 0") else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == code


def test_the_others_do_not_wait_for_a_rank_that_ended_before_its_first_compilation(script):
    done = run(script, "vanish_early os 0")  # the other rank would wait for 300 s, longer than this test may run
    ended = "rank 1 exited with code 0 in the middle of its script and will not reach compilation 1 (forward), graph"
    # Before it, torch may say that the process of rank 0 ended while a thread of gloo ran ("terminate called").
    first = next(line for line in done.stderr.splitlines() if line.startswith("overlapc: "))
    assert first == f"overlapc: rank 0: {ended}"
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_a_rank_whose_exit_code_the_launcher_has_collected_is_the_first(tmp_path):
    alive = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    try:
        for rank, process in enumerate((alive, gone)):
            (tmp_path / f"rank{rank}").mkdir()
            (tmp_path / f"rank{rank}" / "pid").write_text(str(process.pid))
        with Watch(tmp_path, [0, 1]) as watch:
            while not departures(tmp_path):
                time.sleep(0.01)
            alive.terminate()
            found = watch.departed({0: -signal.SIGTERM, 1: -signal.SIGKILL})
    finally:
        alive.kill()
        alive.wait()
    assert [(each.rank, each.exit_code) for each in found] == [(1, -signal.SIGKILL)]  # the launcher ended rank 0


@pytest.mark.parametrize("collected", [False, True])
def test_a_rank_that_started_and_died_unwatched_is_the_first(tmp_path, monkeypatch, collected):
    """The launcher has collected its exit code, and ends the other rank before the watch sees that it had started.

    collected: whether the launcher has collected the other rank's exit code, too.
    """
    for rank in (0, 1):
        (tmp_path / f"rank{rank}").mkdir()
    survivor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    (tmp_path / "rank0" / "pid").write_text(str(survivor.pid))
    select = select_module.select

    def select_late(*of):
        if not of[0]:
            return select(*of)
        (tmp_path / "rank1" / "pid").write_text(str(killed.pid))
        survivor.terminate()
        if collected:
            survivor.wait()
        return select(*of[:3], TIMEOUT_S)

    monkeypatch.setattr(select_module, "select", select_late)
    try:
        with Watch(tmp_path, [0, 1]) as watch:
            while len(departures(tmp_path)) < 2:
                time.sleep(0.01)
            found = watch.departed({0: -signal.SIGTERM, 1: -signal.SIGKILL})
    finally:
        survivor.kill()
        survivor.wait()
    assert [(each.rank, each.exit_code) for each in found] == [(1, -signal.SIGKILL)]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(script, temporary, how):
    """After Ctrl-C, and also when the launcher is killed outright."""
    full = command(script, str(script.parent), "sleep")
    process = subprocess.Popen(full, stderr=subprocess.PIPE, text=True)
    pids = [_read_pid(script.parent / f"{rank}.pid") for rank in (0, 1)]
    process.send_signal(how)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert errors.strip() == "overlapc: interrupted; every rank has ended"
        assert list(temporary.iterdir()) == []
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if _alive(pid)] == []


def _read_pid(path: Path) -> int:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.05)
    return int(path.read_text())


def _alive(pid: int) -> bool:
    """Whether the process is running (a zombie that its new parent does not collect is not)."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_ranks_are_listed_in_spans():
    assert torchrun._spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_the_first_error_by_time_is_the_one_shown(tmp_path):
    torchrun.RankError(0, 200, "connection closed by peer", "Traceback of 0", 1).write(tmp_path)
    torchrun.RankError(1, 100, "ValueError: bad", "Traceback of 1", 1).write(tmp_path)
    failed = torchrun._first_error(tmp_path, {0: 1, 1: 1}, [])
    assert str(failed) == "rank 1: ValueError: bad\nTraceback of 1"


def test_a_rank_that_is_ended_while_it_writes_its_error_leaves_no_part_of_it(tmp_path, monkeypatch):
    torchrun.RankError(1, 100, "ValueError: bad", "Traceback of 1", 1).write(tmp_path)

    def ended(path, mode="r", *_, **__):
        if "w" in mode:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))  # the file exists, but is empty
        raise SystemExit(128 + signal.SIGTERM)

    with monkeypatch.context() as during:
        during.setattr(Path, "open", ended)
        with pytest.raises(SystemExit):
            torchrun.RankError(0, 50, "ValueError: first", "", 1).write(tmp_path)
    assert str(torchrun._first_error(tmp_path, {0: -15, 1: 1}, [])) == "rank 1: ValueError: bad\nTraceback of 1"


def test_our_error_is_found_inside_dynamos_error():
    class BackendCompilerFailed(Exception):
        inner_exception = CompileError("no lowering")

    assert str(worker.our_error(BackendCompilerFailed())) == "no lowering"


def test_an_error_of_ours_that_was_handled_does_not_hide_a_later_one():
    later = ValueError("the real one")
    later.__context__ = ConfigError("handled")  # as `raise` inside an `except` sets it
    assert worker.our_error(later) is None


@pytest.mark.parametrize(
    ("nproc", "axes", "message"),
    [
        (0, {}, "--nproc 0: a job needs at least 1 process"),
        (3, {"tp": 2}, "--nproc 3 does not divide into --tp 2; use a multiple of 2"),
        (2, {"tp": 2, "hsdp": 2}, "--nproc 2 does not divide into --tp 2 x --hsdp 2; use a multiple of 4"),
        (2, {"tp": 0}, "--tp 0: a mesh axis has at least 1 rank"),
    ],
)
def test_world_sizes_that_a_mesh_does_not_divide_are_an_error(nproc, axes, message):
    with pytest.raises(ConfigError) as caught:
        check_world(nproc, "cpu", **axes)
    assert str(caught.value) == message


def test_more_processes_than_gpus_are_an_error():
    import torch

    have = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"--nproc {have + 1}: this machine has {have} CUDA device"):
        check_world(have + 1, "cuda")
