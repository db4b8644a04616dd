"""Runs a command on N ranks of this host with torch's elastic launcher, and reports the first error once."""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlapc.agreement.departures import Departure, rank_dir
from overlapc.documents import write_file
from overlapc.errors import ConfigError, OverlapcError
from overlapc.launch.environment import environment
from overlapc.launch.stall import SECONDS

if TYPE_CHECKING:
    from overlapc.launch.attempts import Attempts


class JobFailed(OverlapcError):
    """A rank failed. `exit_code` is the code that the command should exit with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RankError:
    """The error that a rank's excepthook wrote (launch/worker.py)."""

    rank: int
    at_ns: int  # wall clock time, to find the first error
    message: str
    traceback: str  # empty for errors that overlapc raised deliberately
    exit_code: int
    lost_another: bool = False  # the rank lost its connection to another rank, which ended before it

    def write(self, run_dir: Path) -> None:
        """Write this error to the file where the launching process looks for it."""
        write_file(rank_dir(run_dir, self.rank) / "error.json", json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> RankError:
        """Read the error in an `error.json`."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of the launchers on a job's hosts, as torchrun's options; the default is a job on this host."""

    nnodes: str = "1"  # number of hosts, or MIN:MAX
    endpoint: str = ""  # HOST[:PORT] of one of the hosts
    run_id: str = ""  # equal on all hosts, and different for each job that uses this endpoint
    max_restarts: int = 0  # how often all ranks are restarted after one has failed

    @property
    def nodes(self) -> tuple[int, int]:
        """The minimum and maximum number of hosts; ConfigError for an invalid range, or for several hosts without an
        endpoint."""
        low, _, high = self.nnodes.partition(":")
        try:
            fewest, most = int(low), int(high or low)
        except ValueError:
            fewest, most = 0, 0
        if not 1 <= fewest <= most:
            raise ConfigError(f"--nnodes {self.nnodes}: a number of hosts, or MIN:MAX")
        if most > 1 and not self.endpoint:
            raise ConfigError(
                f"--nnodes {self.nnodes} needs --rdzv-endpoint HOST:PORT, one of the hosts, for their rendezvous"
            )
        return fewest, most


def run_ranks(
    command: Sequence[str],
    nproc: int,
    run_dir: Path,
    variables: Mapping[str, str] | None = None,
    *,
    watchdog_s: float = 0.0,
    rendezvous: Rendezvous | None = None,
) -> Path:
    """Run `command` (a script and its arguments, or `-m module ...`) on `nproc` ranks of this host and wait for them.

    Every rank inherits this process's output. Return the folder of the files that ranks wrote: `run_dir`, or one in it
    if ranks were restarted. Raise JobFailed if a rank fails: it names the rank that failed first, with its message, and
    its traceback unless overlapc raised the error. Also raised after Ctrl-C, when every rank has ended.

    watchdog_s: if a step takes longer, all ranks print their stacks and are ended; 0: no limit.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from overlapc.launch.attempts import Attempts  # imports torch

    rendezvous = rendezvous or Rendezvous()
    fewest, most = rendezvous.nodes
    endpoint = rendezvous.endpoint or "localhost:0"
    threads = str(max(1, cpus() // nproc))
    settings = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    if most > 1:
        # With a shared store, ranks look up addresses by the number of restarts. Each host counts only restarts after
        # failures of its own ranks, so they would find addresses of an earlier attempt. Without it, each attempt has a
        # store of its own.
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if watchdog_s:
        settings[SECONDS] = str(watchdog_s)
    # A temporary folder for torchrun's own files, which contain nothing that is not in `run_dir`.
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
            run_id=rendezvous.run_id or ("overlapc" if rendezvous.endpoint else uuid.uuid4().hex),
            rdzv_backend="c10d",
            rdzv_endpoint=endpoint,
            local_addr="localhost" if endpoint.partition(":")[0] == "localhost" else None,
            max_restarts=rendezvous.max_restarts,
            monitor_interval=0.1,
            logs_specs=attempts,
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "overlapc.launch.worker", *command)
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            raise _failure(attempts, codes) or JobFailed("ranks of another host failed") from None
        except RendezvousError as error:
            raise JobFailed(f"the rendezvous of this job's hosts at {endpoint} failed: {error}") from None
        except SignalException as stopped:
            how = "interrupted" if stopped.sigval == signal.SIGINT else f"stopped by {stopped.sigval.name}"
            raise JobFailed(f"{how}; every rank has ended", 128 + stopped.sigval) from None
        return attempts.folder


def cpus() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _failure(attempt: Attempts, exit_codes: Mapping[int, int]) -> JobFailed | None:
    """Return the error that ended an attempt on this host; None if it was ended because ranks of other hosts failed."""
    assert attempt.watch is not None, "the attempt was never started"
    assert attempt.stall is not None, "the attempt was never started"
    if attempt.stall.findings:
        return JobFailed(attempt.stall.findings)
    return _first_error(attempt.folder, exit_codes, attempt.watch.departed(exit_codes))


def _first_error(run_dir: Path, exit_codes: Mapping[int, int], departed: Sequence[Departure]) -> JobFailed | None:
    """Return the error of the first rank that failed by itself; None if none did.

    departed: ranks that the launcher did not end, in the order in which they ended. A rank that lost its connection to
    another rank failed because of that rank, no matter which error was written first.
    """
    errors = sorted((RankError.read(path) for path in run_dir.glob("rank*/error.json")), key=lambda error: error.at_ns)
    explained = {error.rank for error in errors}
    left = [departure for departure in departed if departure.rank not in explained]
    own = next((error for error in errors if not error.lost_another), None)
    died = next((departure for departure in left if departure.exit_code), None)
    if died is not None and (own is None or died.at_ns < own.at_ns):
        return _died(died)
    if own is None and errors and left:
        noticed = f"rank {errors[0].rank} lost the connection to it: {errors[0].message}"
        return JobFailed(f"rank {left[0].rank} {left[0]} while other ranks still needed it\n   {noticed}")
    if errors:
        first = own or errors[0]
        same = sorted(error.rank for error in errors if error.message == first.message)
        where = f"rank {first.rank}" if len(same) == 1 else f"ranks {_spans(same)}"
        trace = f"\n{first.traceback.rstrip()}" if first.traceback else ""
        return JobFailed(f"{where}: {first.message}{trace}", first.exit_code)
    # Prefer exit codes other than SIGTERM, with which the launcher ended ranks because of the first failure.
    codes = sorted(exit_codes.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[0]))
    return _died(Departure(codes[0][0], 0, codes[0][1], finished=True)) if codes else None


def _died(departure: Departure) -> JobFailed:
    return JobFailed(f"rank {departure.rank} {departure}", max(departure.exit_code or 0, 0) or 1)


def _spans(ranks: Sequence[int]) -> str:
    """Format `[0, 1, 2, 5]` as `0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence torch's launcher inside the block: it would log failures and signals that we report ourselves."""
    prefix = "torch.distributed.elastic"
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefix)]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}  # not inherited: each has a level set
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def check_world(nproc: int, device: str, **axes: int) -> None:
    """Raise ConfigError unless `nproc` ranks can run on this machine and divide into the mesh `axes`."""
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
            raise ConfigError(f"--nproc {nproc}: this machine has {have} CUDA device(s), and each process needs one")
