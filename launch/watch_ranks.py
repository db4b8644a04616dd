"""Records when, how and in which order the ranks of a run end, before torch's launcher notices.

The launcher checks every 0.1 s which ranks have failed. By then other ranks may have failed too, because they lost
their connection to the first. And a rank that exits with code 0 has not failed for the launcher, although others wait
for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from overlapc.agreement.departures import ENDED, Departure, departures, rank_dir
from overlapc.documents import write_file
from overlapc.launch.watching import WatchThread

_PID, _FINISHED = "pid", "finished"  # files of a rank
_LOOK_S = 0.05  # how often to look for ranks that have started
_DRAIN_S = 1.0  # time to handle ends that the kernel has reported but the thread has not read yet


def started(run_dir: Path, rank: int) -> None:
    """Write the process id of a rank, so that its end is seen from now on; called by the rank."""
    write_file(rank_dir(run_dir, rank) / _PID, str(os.getpid()))


def finished(run_dir: Path, rank: int) -> None:
    """Record that a rank's script has ended or exits; called by the rank."""
    (rank_dir(run_dir, rank) / _FINISHED).touch()


def forget(run_dir: Path) -> None:
    """Remove the files of an earlier run's ranks."""
    for name in (_PID, _FINISHED, ENDED, "error.json"):
        _remove(run_dir, name)


def _remove(run_dir: Path, name: str) -> None:
    for stale in run_dir.glob(f"rank*/{name}"):
        stale.unlink()


class Watch(WatchThread):
    """Waits for ranks to end while its `with` block runs. Linux only: on other systems it sees nothing."""

    def __init__(self, run_dir: Path, ranks: Iterable[int]) -> None:
        self._run_dir = run_dir
        self._ranks = set(ranks)
        super().__init__("overlapc watch of ranks")

    def __enter__(self) -> Watch:
        if hasattr(os, "pidfd_open"):
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, where)
        for name in (_PID, _FINISHED, ENDED):
            _remove(self._run_dir, name)

    def departed(self, exit_codes: Mapping[int, int]) -> list[Departure]:
        """Return the ranks that ended by themselves, in order; to be called when all ranks have ended.

        exit_codes: the launcher's exit codes of ranks that failed.
        """
        if self.thread.is_alive():
            self.thread.join(_DRAIN_S)
        known = [
            replace(each, exit_code=exit_codes.get(each.rank)) if each.exit_code is None else each
            for each in departures(self._run_dir)
        ]
        by_themselves, failed = [], False
        # Of ranks seen to end at the same time, those that the launcher may have ended come last.
        for each in sorted(known, key=lambda each: (each.at_ns, each.exit_code == -signal.SIGTERM)):
            if not (failed and each.exit_code in (-signal.SIGTERM, -signal.SIGKILL)):
                by_themselves.append(replace(each, exit_code=each.exit_code or 0))
            failed = failed or _has_failed(each)
        return by_themselves

    def watch(self) -> None:
        unseen = set(self._ranks)
        running: dict[int, int] = {}  # descriptor of a process -> rank
        while (unseen or running) and not self.over.is_set():
            ready, _, _ = select.select(list(running), [], [], _LOOK_S)
            ended = [(running.pop(descriptor), _exit_code(descriptor)) for descriptor in ready]
            for descriptor in ready:
                os.close(descriptor)
            # A rank that started during the wait may also have ended in it, and be the reason why others were ended.
            for rank in [rank for rank in unseen if self._pid(rank).exists()]:
                unseen.discard(rank)
                try:
                    running[os.pidfd_open(int(self._pid(rank).read_text()))] = rank
                except ProcessLookupError:  # it has ended, and the launcher has reaped it and knows its exit code
                    ended.append((rank, None))
            at_ns = time.time_ns()
            for rank, exit_code in ended:
                self._ended(rank, at_ns, exit_code, running.values())
        for descriptor in running:
            os.close(descriptor)

    def _pid(self, rank: int) -> Path:
        return self._run_dir / f"rank{rank}" / _PID

    def _ended(self, rank: int, at_ns: int, exit_code: int | None, others: Iterable[int]) -> None:
        """Write the departure of a rank for the other ranks. If it failed, wake stopped ranks, which must end too."""
        finished = (self._run_dir / f"rank{rank}" / _FINISHED).exists()
        departure = Departure(rank, at_ns, exit_code, finished)
        departure.write(self._run_dir)
        if _has_failed(departure):
            for other in others:  # a stopped process would not handle the launcher's SIGTERM
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(self._pid(other).read_text()), signal.SIGCONT)


def _has_failed(departure: Departure) -> bool:
    """Whether the launcher ends the other ranks because of this one, as far as is known."""
    return bool(departure.exit_code) or (departure.exit_code is None and not departure.finished)


def _exit_code(descriptor: int) -> int | None:
    """Return the exit code of an ended process without reaping it; None if the launcher has reaped it already."""
    try:
        end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
