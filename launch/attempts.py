"""Watches the ranks of this host each time torch's elastic launcher starts or restarts them.

The launcher asks for log files whenever it starts ranks: at first, after a failure, and when ranks of other hosts
failed, joined or left. The files that ranks write belong to one such attempt, which has a folder of its own.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest

from overlapc.agreement.departures import RUN_DIR
from overlapc.launch.stall import StallWatch
from overlapc.launch.watch_ranks import Watch, forget


class Attempts(DefaultLogsSpecs):
    """The folder and the watches of the current attempt. A context manager, which ends the watches of the last attempt.

    failure: returns what failed on this host in an attempt that has ended.
    """

    def __init__(self, logs: str, run_dir: Path, watchdog_s: float, failure: Callable[[Attempts], str]) -> None:
        super().__init__(log_dir=logs)
        self.folder = run_dir
        self.watch: Watch | None = None  # None until ranks start
        self.stall: StallWatch | None = None
        self._run_dir, self._watchdog_s, self._failure = run_dir, watchdog_s, failure
        self._number = self._failures = 0
        self._watches = ExitStack()
        for earlier in run_dir.glob("attempt*"):
            shutil.rmtree(earlier)

    def __enter__(self) -> Attempts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._watches.close()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Prepare an attempt: torch calls this before ranks start, with the environment variables of each rank."""
        failures = int(next(iter(envs.values()))["TORCHELASTIC_RESTART_COUNT"])  # counts failures on this host only
        if self._number:
            why = self._failure(self) if failures > self._failures else "ranks of another host failed, joined or left"
            print(f"overlapc: {why}\noverlapc: restarting all ranks", file=sys.stderr, flush=True)
            self._watches.close()
            self.folder = self._run_dir / f"attempt{self._number}"
        self._number, self._failures = self._number + 1, failures
        forget(self.folder)
        ranks = [int(variables["RANK"]) for variables in envs.values()]
        for variables in envs.values():
            variables[RUN_DIR] = str(self.folder)
        self.watch = self._watches.enter_context(Watch(self.folder, ranks))
        self.stall = self._watches.enter_context(StallWatch(self.folder, ranks, self._watchdog_s))
        return super().reify(envs)
