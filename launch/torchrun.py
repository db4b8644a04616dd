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

from overlapc.errors import ConfigError, OverlapcError
from overlapc.estimators.agreement.departures import RUN_DIR, Departure, rank_dir
from overlapc.launch.environment import environment
from overlapc.launch.stall import SECONDS, StallWatch
from overlapc.launch.watch import Watch, forget


class JobFailed(OverlapcError):
    """A rank failed. `exit_code` is what the command should exit with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RankError:
    """What the excepthook of a rank wrote down (launch/worker.py)."""

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


def run_ranks(
    command: Sequence[str],
    nproc: int,
    run_dir: Path,
    variables: Mapping[str, str] | None = None,
    *,
    watchdog_s: float = 0.0,
) -> None:
    """Runs `command` (a script and its arguments, or `-m module ...`) on `nproc` ranks and waits for them.

    Every rank inherits this process's output. JobFailed names the rank that failed first, with its
    message, and its traceback when the error was not one of ours; after Ctrl-C it says that, and every
    rank has ended.

    watchdog_s: how long a step may take until all ranks say where they stand, and end; 0: as long as it wants.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = str(max(1, cpus() // nproc))
    settings = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), RUN_DIR: str(run_dir)}
    if watchdog_s:
        settings[SECONDS] = str(watchdog_s)
    forget(run_dir)
    # torchrun leaves a folder of its own behind for each run, which holds nothing that is not in `run_dir`.
    with (
        environment({**settings, **(variables or {})}),
        _quiet_launcher(),
        tempfile.TemporaryDirectory(prefix="overlapc-run-") as logs,
        Watch(run_dir, nproc) as watch,
        StallWatch(run_dir, nproc, watchdog_s) as stall,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "overlapc.launch.worker", *command)
        except ChildFailedError as failed:
            if stall.said:
                raise JobFailed(stall.said) from None
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            raise _first_error(run_dir, codes, watch.departed(codes)) from None
        except SignalException as stopped:
            how = "interrupted" if stopped.sigval == signal.SIGINT else f"stopped by {stopped.sigval.name}"
            raise JobFailed(f"{how}; every rank has ended", 128 + stopped.sigval) from None


def cpus() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_error(run_dir: Path, exit_codes: Mapping[int, int], departed: Sequence[Departure]) -> JobFailed:
    """What ended the job: the first rank that failed by itself, and how.

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
    rank, code = min(exit_codes.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[0]), default=(0, 1))
    return _died(Departure(rank, 0, code, finished=True))


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
