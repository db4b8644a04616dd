"""Runs a command on N ranks of this host with torch's elastic launcher, and says once what went wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlapc.errors import ConfigError, OverlapcError
from overlapc.estimators.agreement.departures import Departure, rank_dir
from overlapc.launch.environment import environment
from overlapc.launch.stall import SECONDS

if TYPE_CHECKING:
    from overlapc.launch.attempts import Attempts


class JobFailed(OverlapcError):
    """A rank failed. `exit_code` is what the command should exit with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RankError:
    """The error that a rank's excepthook wrote (launch/worker.py)."""

    rank: int
    at_ns: int  # wall clock, to find the first
    message: str
    traceback: str  # empty for errors that overlapc raised on purpose
    exit_code: int
    lost_another: bool = False  # the connection to another rank, which then ended first

    def write(self, run_dir: Path) -> None:
        """Leaves this error where the launching process looks for it."""
        target = rank_dir(run_dir, self.rank) / "error.json"
        target.write_text(json.dumps({slot: getattr(self, slot) for slot in self.__dataclass_fields__}))

    @classmethod
    def read(cls, path: Path) -> RankError:
        """The error in an `error.json`."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Meeting:
    """Where the launchers of a job's hosts meet, in torchrun's words; by itself, a job of this host."""

    nnodes: str = "1"  # hosts, or MIN:MAX
    endpoint: str = ""  # HOST[:PORT] of one of them
    run_id: str = ""  # the same on all hosts, another for each job that meets at this endpoint
    max_restarts: int = 0  # of all ranks after one has failed

    @property
    def nodes(self) -> tuple[int, int]:
        """The fewest and the most hosts; ConfigError for what is no such range, or has nowhere to meet."""
        low, _, high = self.nnodes.partition(":")
        try:
            fewest, most = int(low), int(high or low)
        except ValueError:
            fewest, most = 0, 0
        if not 1 <= fewest <= most:
            raise ConfigError(f"--nnodes {self.nnodes}: a number of hosts, or MIN:MAX")
        if most > 1 and not self.endpoint:
            raise ConfigError(f"--nnodes {self.nnodes} needs --rdzv-endpoint HOST:PORT, where the hosts meet")
        return fewest, most


def run_ranks(
    command: Sequence[str],
    nproc: int,
    run_dir: Path,
    variables: Mapping[str, str] | None = None,
    *,
    watchdog_s: float = 0.0,
    meeting: Meeting | None = None,
) -> Path:
    """Runs `command` (a script and its arguments, or `-m module ...`) on `nproc` ranks of this host and waits for them.

    Every rank inherits this process's output. JobFailed names the rank that failed first, with its message, and its
    traceback when the error was not one of overlapc's; after Ctrl-C it says that, and every rank has ended. Returns the
    folder of what ranks left: `run_dir`, or one in it if they were started again.

    watchdog_s: how long a step may take until all ranks say where they stand, and end; 0: as long as it wants.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from overlapc.launch.attempts import Attempts  # which needs torch

    meeting = meeting or Meeting()
    fewest, most = meeting.nodes
    endpoint = meeting.endpoint or "localhost:0"
    threads = str(max(1, cpus() // nproc))
    settings = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    if most > 1:
        # Ranks of a launcher's own store look under the number of restarts, of which each host counts only those after
        # failures of its own ranks: they would find addresses of an earlier attempt. Without it, each has its own.
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if watchdog_s:
        settings[SECONDS] = str(watchdog_s)
    # torchrun leaves a folder of its own behind for each run, which holds nothing that is not in `run_dir`.
    with (
        environment({**settings, **(variables or {})}),
        _quiet_launcher(),
        tempfile.TemporaryDirectory(prefix="overlapc-run-") as logs,
        Attempts(logs, run_dir, watchdog_s, lambda attempt: str(_failure(attempt, {}) or "")) as attempts,
    ):
        config = LaunchConfig(
            min_nodes=fewest,
            max_nodes=most,
            nproc_per_node=nproc,
            run_id=meeting.run_id or ("overlapc" if meeting.endpoint else uuid.uuid4().hex),
            rdzv_backend="c10d",
            rdzv_endpoint=endpoint,
            local_addr="localhost" if endpoint.partition(":")[0] == "localhost" else None,
            max_restarts=meeting.max_restarts,
            monitor_interval=0.1,
            logs_specs=attempts,
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "overlapc.launch.worker", *command)
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            raise _failure(attempts, codes) or JobFailed("ranks of another host failed") from None
        except RendezvousError as error:
            raise JobFailed(f"the hosts of this job did not meet at {endpoint}: {error}") from None
        except SignalException as stopped:
            how = "interrupted" if stopped.sigval == signal.SIGINT else f"stopped by {stopped.sigval.name}"
            raise JobFailed(f"{how}; every rank has ended", 128 + stopped.sigval) from None
        return attempts.folder


def cpus() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _failure(attempt: Attempts, exit_codes: Mapping[int, int]) -> JobFailed | None:
    """The error that ended an attempt on this host; None if the launcher ended it, for ranks of other hosts."""
    assert attempt.watch is not None, "an attempt that is over has begun"
    assert attempt.stall is not None, "an attempt that is over has begun"
    if attempt.stall.findings:
        return JobFailed(attempt.stall.findings)
    return _first_error(attempt.folder, exit_codes, attempt.watch.departed(exit_codes))


def _first_error(run_dir: Path, exit_codes: Mapping[int, int], departed: Sequence[Departure]) -> JobFailed | None:
    """What ended the job: the first rank that failed by itself, and how; None if none did.

    departed: ranks that the launcher did not end, in order. A rank that lost its connection to another one failed
    because of that one, whenever it noticed.
    """
    errors = sorted((RankError.read(path) for path in run_dir.glob("rank*/error.json")), key=lambda each: each.at_ns)
    explained = {error.rank for error in errors}
    left = [each for each in departed if each.rank not in explained]
    own = next((error for error in errors if not error.lost_another), None)
    died = next((each for each in left if each.exit_code), None)
    if died is not None and (own is None or died.at_ns < own.at_ns):
        return _died(died)
    if own is None and errors and left:
        noticed = f"rank {errors[0].rank} lost it: {errors[0].message}"
        return JobFailed(f"rank {left[0].rank} {left[0]}, and others needed it still\n   {noticed}")
    if errors:
        first = own or errors[0]
        same = sorted(error.rank for error in errors if error.message == first.message)
        where = f"rank {first.rank}" if len(same) == 1 else f"ranks {_spans(same)}"
        trace = f"\n{first.traceback.rstrip()}" if first.traceback else ""
        return JobFailed(f"{where}: {first.message}{trace}", first.exit_code)
    # Ranks that the launcher ended because of the first failure died of SIGTERM: look at them last.
    codes = sorted(exit_codes.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[0]))
    return _died(Departure(codes[0][0], 0, codes[0][1], finished=True)) if codes else None


def _died(departure: Departure) -> JobFailed:
    return JobFailed(f"rank {departure.rank} {departure}", max(departure.exit_code or 0, 0) or 1)


def _spans(ranks: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """The launcher logs failures and signals in its own words too; ours says each once."""
    prefix = "torch.distributed.elastic"
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefix)]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}  # each has a level of its own
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def check_world(nproc: int, device: str, **axes: int) -> None:
    """ConfigError unless `nproc` ranks exist on this machine and divide into the mesh `axes`."""
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: a job needs at least 1 process")
    for name, size in axes.items():
        if size < 1:
            raise ConfigError(f"--{name} {size}: a mesh axis has at least 1 rank")
    product = 1
    for size in axes.values():
        product *= size
    if nproc % product:
        asked = " x ".join(f"--{name} {size}" for name, size in axes.items() if size > 1)
        raise ConfigError(f"--nproc {nproc} does not divide into {asked}; use a multiple of {product}")
    if device == "cuda":
        import torch

        have = torch.cuda.device_count()
        if nproc > have:
            raise ConfigError(f"--nproc {nproc}: this machine has {have} CUDA device(s); one process needs one")
