"""`overlapc run --watchdog S`: prints the stacks of all ranks and ends the job if no optimizer step ends in time.

A thread of each rank reports optimizer steps through a file in the run's folder. If no step is reported in time, the
launching process requests the stacks of all ranks (a stopped process cannot answer) and ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from overlapc.agreement.departures import rank_dir
from overlapc.documents import read_text, write_file
from overlapc.launch.watching import WatchThread

SECONDS = "OVERLAPC_WATCHDOG_S"  # variable by which the launching process tells its ranks the time limit
_BEAT, _ASKED, _STACKS, _PID = "beat", "stacks.wanted", "stacks.txt", "pid"
_LOOK_S = 0.2
_ANSWER_S = 5.0  # time that ranks have to write their stacks
_FRAMES = 12  # how many innermost frames of a stack are shown
_FIRST = 10  # the first step, which compiles, may take this many times the limit
_STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
    "D": "in the kernel",
    "R": "running",
    "S": "waiting",
}


def report_steps(run_dir: Path, rank: int) -> None:
    """Start the thread that reports steps; each rank calls this before its script."""
    from overlapc.runtime.steps import STEPS, watch_optimizers

    watch_optimizers()
    folder = rank_dir(run_dir, rank)

    def report() -> None:
        reported = 0
        while not (run_dir / _ASKED).exists():
            if STEPS.stepped != reported:
                reported = STEPS.stepped
                (folder / _BEAT).write_text(str(reported))
            time.sleep(_LOOK_S)
        write_file(folder / _STACKS, "\n".join(_stacks()))

    threading.Thread(target=report, name="overlapc step reports", daemon=True).start()


def _stacks() -> Iterator[str]:
    """Yield the lines of the stacks of all Python threads except this one, the main thread first."""
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sys._current_frames()
    for ident in sorted(frames, key=lambda each: each != main):
        if ident == own:
            continue
        name = next((thread.name for thread in threading.enumerate() if thread.ident == ident), "(of torch)")
        yield f"  thread {name}{_graph(frames[ident])}"
        for line in traceback.format_stack(frames[ident])[-_FRAMES:]:
            yield "    " + line.rstrip().replace("\n", "\n    ")


def _graph(frame: FrameType | None) -> str:
    """Return the compiled graph that a stack is in and its current line, which names the collective it waits for."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<overlapc "):
            line = traceback.extract_stack(frame, limit=1)[0].line
            return f", in {name[1:-1].removeprefix('overlapc ')}: {line}"
        frame = frame.f_back
    return ""


class StallWatch(WatchThread):
    """Watches for steps while its `with` block runs; `findings` is the message if it has ended the ranks, else ""."""

    def __init__(self, run_dir: Path, ranks: Iterable[int], seconds: float) -> None:
        self._run_dir, self._ranks, self._seconds = run_dir, sorted(ranks), seconds
        self.findings = ""
        super().__init__("overlapc watchdog")

    def __enter__(self) -> StallWatch:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        for pattern in (_ASKED, f"rank*/{_BEAT}", f"rank*/{_STACKS}"):
            for stale in self._run_dir.glob(pattern):
                stale.unlink()
        if self._seconds:
            self.thread.start()
        return self

    def watch(self) -> None:
        latest, steps, since = 0.0, 0, time.monotonic()
        while not self.over.wait(_LOOK_S):
            beats = [path for rank in self._ranks if (path := self._file(rank, _BEAT)).exists()]
            newest = max((path.stat().st_mtime for path in beats), default=0.0)
            if newest > latest:
                latest, since = newest, time.monotonic()
                steps = max((int(path.read_text() or 0) for path in beats), default=0)
            limit_s = self._seconds * (1 if steps else _FIRST)
            if time.monotonic() - since > limit_s:
                self._end(steps, limit_s)
                return

    def _end(self, steps: int, limit_s: float) -> None:
        (self._run_dir / _ASKED).touch()
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until and any(
            not self._file(rank, _STACKS).exists() and self._state(rank) != _STATES["T"] for rank in self._ranks
        ):
            time.sleep(_LOOK_S)
        lines = [
            f"no optimizer step ended within {limit_s:g} s, after {steps} steps; all ranks of this host were ended"
        ]
        for rank in self._ranks:
            stacks = self._file(rank, _STACKS)
            lines.append(f"rank {rank}, {self._state(rank)}")
            lines.append(read_text(stacks) if stacks.exists() else "  no stack: the process did not answer")
        self.findings = "\n".join(lines)
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
                os.kill(int(self._file(rank, _PID).read_text()), signal.SIGKILL)

    def _state(self, rank: int) -> str:
        try:
            pid = int(self._file(rank, _PID).read_text())
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            return "ended"
        return _STATES.get(state, state)

    def _file(self, rank: int, name: str) -> Path:
        return self._run_dir / f"rank{rank}" / name
