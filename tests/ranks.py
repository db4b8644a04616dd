"""Run a function on real ranks: N processes under torchrun, joined by gloo.

    def work(scale: float) -> float:            # at the top level of a test file; sees an initialized process group
        ...

    outcomes = run_on_ranks(work, 2, 0.5)       # one Outcome per rank; errors are outcomes too
    values = values_on_ranks(work, 2, 0.5)      # or: the values, and the test fails with every rank's traceback

A launch costs a few seconds, so tests share one: let `work` go through many cases and return what it saw.
Whatever happens, the launcher and all ranks are gone when the call returns.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """What one rank did in its last attempt."""

    rank: int
    attempt: int  # elastic restarts before it
    pid: int
    seconds: float
    value: Any = None
    error_type: str = ""  # "" when it returned
    error: str = ""  # the message
    traceback: str = ""


class LaunchFailed(AssertionError):
    """Ranks hung, died or left no outcome; holds what they printed."""


def values_on_ranks(function: Callable[..., Any], nproc: int, *args: Any, **how: Any) -> list[Any]:
    """`function(*args)` on every rank, by rank; LaunchFailed with the tracebacks when one raises."""
    outcomes = run_on_ranks(function, nproc, *args, **how)
    failed = [outcome for outcome in outcomes if outcome.error_type]
    if failed:
        raise LaunchFailed("\n".join(f"--- rank {each.rank}\n{each.traceback}" for each in failed))
    return [outcome.value for outcome in outcomes]


def run_on_ranks(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout_s: float = 90.0,
    env: dict[str, str] | None = None,
    max_restarts: int = 0,
    backend: str = "gloo",
) -> list[Outcome]:
    """Run `function(*args)` on `nproc` ranks; arguments and values must pickle.

    A rank whose function raises still lets the others finish, except with `max_restarts`: then it fails as
    a user's would, and torchrun starts all ranks again. LaunchFailed after `timeout_s`, or without an outcome.
    """
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        out = Path(folder)
        job = {
            "file": inspect.getfile(function),
            "name": function.__name__,
            "args": args,
            "raises": max_restarts > 0,
            "backend": backend,
            "timeout_s": timeout_s,
        }
        (out / "job").write_bytes(pickle.dumps(job))
        log = _launch(out, nproc, timeout_s, max_restarts, env or {})
        outcomes = []
        for rank in range(nproc):
            attempts = [pickle.loads(path.read_bytes()) for path in out.glob(f"outcome.{rank}.*")]
            if not attempts:
                raise LaunchFailed(f"rank {rank} of {nproc} left no outcome (it died)\n{log}")
            outcomes.append(max(attempts, key=lambda outcome: outcome.attempt))
        return outcomes


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _launch(out: Path, nproc: int, timeout_s: float, max_restarts: int, env: dict[str, str]) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={nproc}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--max-restarts={max_restarts}"]
    command += ["--monitor-interval=0.1", str(Path(__file__).resolve()), str(out)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}
    # Otherwise restarted ranks may read gloo addresses that the ended ones left in the shared store (torch 2.13).
    given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    log = out / "log"
    with log.open("wb") as sink:
        launcher = subprocess.Popen(command, stdout=sink, stderr=sink, env=given, start_new_session=True)
    try:
        launcher.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise LaunchFailed(f"ranks still ran after {timeout_s:g} s\n{log.read_text(errors='replace')}") from None
    finally:
        launcher.terminate()  # torchrun passes it on; nothing happens to one that has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(5)
        launcher.kill()
        launcher.wait()
        for pid in _pids(out):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return log.read_text(errors="replace")


def _pids(out: Path) -> Iterator[int]:
    for path in out.glob("pid.*"):
        pid = int(path.suffix[1:])
        if alive(pid):
            yield pid


def _worker(out: Path) -> None:
    pid, rank = os.getpid(), int(os.environ["RANK"])
    (out / f"pid.{pid}").touch()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    job = pickle.loads((out / "job").read_bytes())
    faulthandler.dump_traceback_later(0.9 * job["timeout_s"])  # where it hangs, if it does
    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location(f"ranks_{Path(job['file']).stem}", job["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    dist.init_process_group(job["backend"], timeout=timedelta(seconds=job["timeout_s"]))
    began = time.monotonic()
    outcome = None
    try:
        value = getattr(module, job["name"])(*job["args"])
        outcome = Outcome(rank, attempt, pid, time.monotonic() - began, value)
    except BaseException as error:
        seconds = time.monotonic() - began
        outcome = Outcome(rank, attempt, pid, seconds, None, type(error).__name__, str(error), traceback.format_exc())
        if job["raises"] or not isinstance(error, Exception):
            raise
    finally:
        if outcome is not None:
            unfinished = out / f"unfinished.{rank}"
            unfinished.write_bytes(pickle.dumps(outcome))
            unfinished.rename(out / f"outcome.{rank}.{attempt}")
    dist.destroy_process_group()


if __name__ == "__main__":
    # Outcomes must pickle as tests.ranks.Outcome, not as __main__.Outcome.
    from tests import ranks

    ranks._worker(Path(sys.argv[1]))
