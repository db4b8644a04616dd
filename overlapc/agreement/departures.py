"""Records of ended ranks of this host, written by `overlapc run`, so that other ranks do not wait for them.

When rank 3 has ended for any reason, the launching process writes `rank3/ended.json` into the folder of the run; ranks
that wait in a meeting read it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from overlapc.documents import write_file

RUN_DIR = "OVERLAPC_RUN_DIR"  # where each rank leaves its record and, if it fails, its error
ENDED = "ended.json"  # file name, in the folder of a rank


@dataclass(frozen=True)
class Departure:
    """How and when a rank's process ended."""

    rank: int
    at_ns: int  # wall clock, as in the errors that ranks write; equal for ranks that were seen to end together
    exit_code: int | None  # as in subprocess: negative for a signal; None: not known yet
    finished: bool  # the script ran to its end or called sys.exit

    def __str__(self) -> str:
        if self.exit_code is None:
            return "ended"
        if self.exit_code < 0:
            return f"died of {_signal_name(-self.exit_code)}"
        if self.exit_code or self.finished:
            return f"exited with code {self.exit_code}"
        return "exited with code 0 in the middle of its script"

    def write(self, run_dir: Path) -> None:
        """Write the departure to the file where other ranks look for it."""
        write_file(rank_dir(run_dir, self.rank) / ENDED, json.dumps(asdict(self)))


def rank_dir(run_dir: Path, rank: int) -> Path:
    """Return the folder `run_dir/rank3`; create it if it does not exist."""
    folder = run_dir / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def departures(run_dir: Path) -> list[Departure]:
    """Return all departures written to `run_dir`."""
    return [Departure(**json.loads(path.read_text())) for path in run_dir.glob(f"rank*/{ENDED}")]


def departed(ranks: Iterable[int]) -> Mapping[int, str]:
    """Return, for each of `ranks` known to have ended, how it ended; empty if `overlapc run` did not start the job."""
    run_dir = os.environ.get(RUN_DIR)
    if not run_dir:
        return {}
    wanted = set(ranks)
    return {each.rank: str(each) for each in departures(Path(run_dir)) if each.rank in wanted}


def is_watched() -> bool:
    """Whether `overlapc run` started this process, and writes departures."""
    return bool(os.environ.get(RUN_DIR))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
