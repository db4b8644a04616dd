"""The ranks of this host as torch's elastic launcher starts them, and starts them again: each time watched again.

The launcher asks for places of logs whenever it starts ranks: for the first time, after a failure, and when ranks of
other hosts failed, came or went. What ranks leave behind is of one such attempt, and lies in a folder of its own.
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

from overlapc.estimators.agreement.departures import RUN_DIR
from overlapc.launch.stall import StallWatch
from overlapc.launch.watch_ranks import Watch, forget


class Attempts(DefaultLogsSpecs):
    """Folder and watches of the current attempt; a context, as the last one has to end.

    failure: says what failed on this host in an attempt that is over.
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
        """Called before ranks start, with the variables that each will have."""
        failures = int(next(iter(envs.values()))["TORCHELASTIC_RESTART_COUNT"])  # of ranks of this host
        if self._number:
            why = self._failure(self) if failures > self._failures else "ranks of another host failed, came or went"
            print(f"overlapc: {why}\noverlapc: all ranks start again", file=sys.stderr, flush=True)
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
