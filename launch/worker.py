"""Runs the user's script on one rank, and writes its error or its record to the run folder.

python -m overlapc.launch.worker script.py --steps 20
python -m overlapc.launch.worker -m package.module --steps 20
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from overlapc.agreement.departures import RUN_DIR, rank_dir
from overlapc.errors import ConfigError, OverlapcError, ToolchainError
from overlapc.launch.stall import SECONDS, report_steps
from overlapc.launch.torchrun import RankError
from overlapc.launch.watch_ranks import finished, started

_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], None]
_LAUNCHING = (__file__, runpy.__file__, "<frozen runpy>")  # files whose frames are above the user's script
# Error texts of gloo, NCCL and the store if the process at the other end has ended.
_LOST_ANOTHER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection was likely closed",
    "remote process exited or there was a network error",
)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Entry point of `python -m overlapc.launch.worker`."""
    run_dir = Path(os.environ[RUN_DIR])
    rank = int(os.environ.get("RANK", "0"))
    started(run_dir, rank)
    _die_with_parent()
    sys.excepthook = _recorder(run_dir, rank)
    if os.environ.get(SECONDS):
        report_steps(run_dir, rank)
    command = sys.argv[1:]
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path[0] = str(Path(command[0]).resolve().parent)
            runpy.run_path(command[0], run_name="__main__")
        finished(run_dir, rank)
    except SystemExit:
        finished(run_dir, rank)
        raise
    finally:
        _save_record(run_dir, rank)


def _save_record(run_dir: Path, rank: int) -> None:
    if "overlapc.report.record" not in sys.modules:
        return  # nothing was compiled with our backend
    from overlapc.report import record

    report = record.report_of_process()
    if report.steps[0].graphs:
        report.save(rank_dir(run_dir, rank) / "record.json")


def _recorder(run_dir: Path, rank: int) -> _Hook:
    def record_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = our_error(error)
        text = "".join(traceback.format_exception(kind, error, _from_the_script_on(trace)))
        inner = getattr(error, "inner_exception", error)  # what Dynamo wraps when a backend fails
        message = str(ours) if ours else f"{type(inner).__name__}: {inner}".splitlines()[0]
        code = 2 if isinstance(ours, (ConfigError, ToolchainError)) else 1
        lost = any(sign in text for sign in _LOST_ANOTHER)
        RankError(rank, time.time_ns(), message, "" if ours else text, code, lost).write(run_dir)

    return record_error


def _from_the_script_on(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` without the frames above the script: overlapc's and those of Python's runpy."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in _LAUNCHING:
        inner = inner.tb_next
    return inner or trace


def our_error(error: BaseException | None) -> OverlapcError | None:
    """Return the overlapc error behind `error`, as Dynamo wraps the errors of a backend; None if there is none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OverlapcError):
            return error
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None


def _die_with_parent() -> None:
    """End this rank if the launcher dies without ending it, for example by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main()
