"""Run a function on real ranks: N processes under torchrun's own launcher, joined by gloo.

    def work(scale: float) -> float:            # at the top level of a test file; sees an initialized process group
        ...

    outcomes = run_on_ranks(work, 2, 0.5)       # one Outcome per rank; errors are outcomes too
    values = values_on_ranks(work, 2, 0.5)      # or: the values, and the test fails with every rank's traceback

Launcher and ranks are forked from a server process that has only imported torch and the compiler: starting a new
interpreter for each would take 2 to 5 CPU seconds. Only ranks on GPUs are new interpreters. Tests still share a launch
where they can: let `work` run many cases and return their results. In every case, including errors and timeouts, all
processes have ended when the call returns.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

# Without the second variable, restarted ranks may read gloo addresses that the previous ranks left in the shared store
# (torch 2.13).
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_STARTING = threading.Lock()  # tests may launch from several threads


@dataclass(frozen=True)
class Outcome:
    """Result or error of one rank's last attempt."""

    rank: int
    attempt: int  # elastic restarts before it
    pid: int
    seconds: float
    value: Any = None
    error_type: str = ""  # "" if the function returned
    error: str = ""  # the message
    traceback: str = ""


class LaunchFailed(AssertionError):
    """Ranks hung, died or wrote no outcome; the message contains their output."""


def values_on_ranks(function: Callable[..., Any], nproc: int, *args: Any, **how: Any) -> list[Any]:
    """Return the value of `function(*args)` on every rank, in rank order.

    Raises LaunchFailed with the tracebacks of all ranks that raised.
    """
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
    prepare: Callable[[], Any] = int,
) -> list[Outcome]:
    """Run `function(*args)` on `nproc` ranks and return their outcomes; arguments and values must pickle.

    If the function raises on one rank, the other ranks still run to their end. With `max_restarts`, the rank fails
    like a user's rank would, and the launcher restarts all ranks. Raises LaunchFailed after `timeout_s`, or if a rank
    left no outcome.
    env: additional variables, set before the function is called but after torch was imported.
    prepare: called once before the ranks are forked, for imports that take seconds and that all ranks then share.
    """
    with _STARTING:
        server = _server()
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        ends = time.monotonic() + timeout_s
        job = _Job(Path(folder), function, args, timeout_s, ends, max_restarts, backend, prepare)
        log = _launched(server, job, nproc, env or {})
        outcomes = []
        for rank in range(nproc):
            attempts = [pickle.loads(path.read_bytes()) for path in job.out.glob(f"outcome.{rank}.*")]
            if not attempts:
                raise LaunchFailed(f"rank {rank} of {nproc} left no outcome (it died)\n{log}")
            outcomes.append(max(attempts, key=lambda outcome: outcome.attempt))
        return outcomes


def on_gpus(ranks: int) -> dict[str, Any]:
    """Return the arguments with which `values_on_ranks` launches ranks on this machine's GPUs.

    With a GPU for every rank: NCCL. With fewer: ranks share GPUs, which NCCL refuses, and communicate over gloo.
    A rank's function must begin with `take_gpu`.
    """
    import torch

    if torch.cuda.device_count() >= ranks:
        return {"backend": "nccl"}
    return {"backend": "cpu:gloo,cuda:gloo", "env": {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}}


def take_gpu() -> None:
    """Make this rank's GPU the current device."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


def whole_tensor(tensor: Any) -> Any:
    """Return the tensor, or the full tensor of a DTensor.

    Gathers on the CPU if gloo communicates GPU tensors, because torch's gather of GPU tensors crashes ranks then.
    """
    import torch.distributed as dist

    if not hasattr(tensor, "full_tensor"):
        return tensor
    if "cuda:gloo" in str(dist.get_backend_config()):
        return tensor.cpu().full_tensor().to(tensor.device)
    return tensor.full_tensor()


def alive(pid: int) -> bool:
    """Whether the process is running (a zombie is not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@dataclass(frozen=True)
class _Job:
    """What every rank runs, and how."""

    out: Path  # the folder for the files that launcher and ranks write
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout_s: float
    ends: float  # deadline, on the clock of time.monotonic
    max_restarts: int
    backend: str
    prepare: Callable[[], Any]


@lru_cache(None)
def _server() -> ForkServerContext:
    """Start the fork server of this process, wait until it has imported what launches need, and return it.

    The server ends with this process.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.rank_server"])
    with mock.patch.dict(os.environ, _ENVIRONMENT):  # because some variables are read at import
        first = server.Process(target=int)
        first.start()
    first.join()
    return server


def _launched(server: ForkServerContext, job: _Job, nproc: int, env: dict[str, str]) -> str:
    """Run a job to its end and return the output of launcher and ranks; LaunchFailed if it exceeds its deadline."""
    log = job.out / "log"
    log.touch()
    launcher = server.Process(target=_launch, args=(job, nproc, {**os.environ, **_ENVIRONMENT, **env}))
    launcher.start()
    try:
        launcher.join(job.ends - time.monotonic())
        if launcher.is_alive():
            printed = (path.read_text(errors="replace") for path in (log, *sorted(job.out.glob("stacks.*"))))
            raise LaunchFailed(f"ranks still ran after {job.timeout_s:g} s\n" + "".join(printed))
    finally:
        launcher.terminate()  # the launcher forwards the signal to its ranks; no effect if it has ended
        launcher.join(5)
        launcher.kill()
        launcher.join()
        for pid in _pids(job.out):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return log.read_text(errors="replace")


def _launch(job: _Job, nproc: int, environment: dict[str, str]) -> None:
    """Run the launcher's process from start to end."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    sink = os.open(job.out / "log", os.O_WRONLY | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ.clear()
    os.environ.update(environment)
    # A process that has queried CUDA devices cannot use CUDA after a fork. LaunchConfig queries them, hence the patch.
    # Modules of GPU tests, which unpickling `job` imported here, do so as well: their ranks are new interpreters.
    with mock.patch("torch.cuda.is_available", return_value=False):
        how = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id="ranks",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=job.max_restarts,
            monitor_interval=0.1,
            start_method="fork" if job.backend == "gloo" else "spawn",
            logs_specs=DefaultLogsSpecs(log_dir=str(job.out / "torchrun")),
        )
    job.prepare()
    # The name of each step of the rendezvous, which nothing records: finding it takes nearly all time of a launcher.
    with mock.patch("torch.distributed.elastic.rendezvous.dynamic_rendezvous.get_method_name", return_value=""):
        elastic_launch(how, _work)(job)


def _work(job: _Job) -> None:
    """Run a rank's process from start to end."""
    import torch.distributed as dist

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the launcher's handlers raise
    pid, rank = os.getpid(), int(os.environ["RANK"])
    (job.out / f"pid.{pid}").touch()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    stacks = (job.out / f"stacks.{rank}").open("w")  # one file per rank, so that concurrent dumps do not mix
    faulthandler.dump_traceback_later(max(0.9 * (job.ends - time.monotonic()), 0.1), file=stacks)  # if it hangs
    # It discards Dynamo's rules in case they were computed before torch.distributed was imported; here they were not.
    with mock.patch("torch._dynamo.trace_rules.clear_lru_cache"):
        dist.init_process_group(job.backend, timeout=timedelta(seconds=job.timeout_s))
    # A function may end at once: then another rank, still connecting, would fail instead.
    (job.out / f"connected.{rank}.{attempt}").touch()
    while len(list(job.out.glob(f"connected.*.{attempt}"))) < dist.get_world_size() and time.monotonic() < job.ends:
        time.sleep(0.002)
    began = time.monotonic()
    outcome = None
    try:
        value = job.function(*job.args)
        outcome = Outcome(rank, attempt, pid, time.monotonic() - began, value)
    except BaseException as error:
        seconds = time.monotonic() - began
        outcome = Outcome(rank, attempt, pid, seconds, None, type(error).__name__, str(error), traceback.format_exc())
        if job.max_restarts or not isinstance(error, Exception):
            raise
    finally:
        if outcome is not None:
            unfinished = job.out / f"unfinished.{rank}"
            unfinished.write_bytes(pickle.dumps(outcome))
            unfinished.rename(job.out / f"outcome.{rank}.{attempt}")
    dist.destroy_process_group()


def _pids(out: Path) -> Iterator[int]:
    for path in out.glob("pid.*"):
        pid = int(path.suffix[1:])
        if alive(pid):
            yield pid
