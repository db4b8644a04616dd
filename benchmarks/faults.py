"""Test jobs whose ranks are killed, stopped or interrupted at random times, share a cache, or fill a disk.

python benchmarks/faults.py                                  # all rows
python benchmarks/faults.py --only kill,stop --times 5 --at-once 4

Two ranks over gloo compile and train a small sharded model, each time on an empty cache.

kill, stop, interrupt, interrupt_one, run_kill, run_stop, run_interrupt: one rank, or all ranks, get a signal at a
random time within the duration of a cold run; `run_` jobs run under `overlapc run`, `run_stop` with a watchdog. The row
has the number of jobs in which a survivor hung, the time from the fault until the last survivor ended, and the
survivors' last error messages. Then the job is started again on the cache that the fault left, and has to give the
losses of a job without faults, bit for bit.

cold: 8 processes that compile the same step start together on one empty cache. two: two jobs with different models
start on one empty cache. disk: the cache lies on a filesystem of a random size, which may be too small. These jobs have
to give the losses of a job without faults, or to end with an error that says what to do.

compilations: one process compiles 200 different functions; printed are its memory, descriptors, threads and children
after the 50th, the 100th and the last one.

Prints the table for docs/BENCHMARKS.md, and to stderr the logs of jobs that failed these checks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = multiprocessing.get_context("forkserver")
RANK_TIMEOUT_S = 5.0
WATCHDOG_S = 5.0  # --watchdog of `run_stop`; the first step may take ten times as long
HANGS_S = 120.0  # a process that still runs this long after the fault, or after its start if there is no fault, hangs
COMPILATIONS = 200
COLD = 8  # processes that start together
DISK_KIB = (64, 1024)  # the smallest and the largest filesystem; a job's cache takes some 300 KiB
WIDTHS = (64, 96)  # widths of the models of two jobs that share a cache
_TAIL = 30  # lines to show of a log
_APART = "OVERLAPC_BENCHMARK_MOUNTS"  # set in a process that may mount filesystems

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.faults import train
train({out!r}, {cache!r})
"""


# --- what a rank runs


def train(out: str, cache: str, rank_timeout_s: float = RANK_TIMEOUT_S, width: int = WIDTHS[0]) -> None:
    """Run two steps of a small sharded model on this rank; write its losses to a file."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    import overlapc

    if not dist.is_initialized():
        # If a rank is stopped before all ranks have joined, torch's timeout must end the others before they count as
        # hanging.
        dist.init_process_group("gloo", timeout=timedelta(seconds=HANGS_S / 2))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))
    if dist.get_world_size() > 1:
        model = overlapc.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    options = {"rank_timeout": rank_timeout_s, "cache_dir": cache}
    step = torch.compile(model, backend="overlapc", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = step(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    unfinished = Path(out) / f"losses.{dist.get_rank()}.unfinished"
    unfinished.write_text(" ".join(losses))
    unfinished.rename(Path(out) / f"losses.{dist.get_rank()}")
    dist.destroy_process_group()


def rank_main(
    rank: int, ranks: int, port: int, out: str, cache: str, rank_timeout_s: float, width: int = WIDTHS[0]
) -> None:
    """Run a rank's process from start to end."""
    log = os.open(Path(out) / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(out, cache, rank_timeout_s, width)


# --- a job


class Job:
    """The processes of a job, with their logs and losses in `out`."""

    def __init__(
        self, out: Path, cache: Path, rank_timeout_s: float = RANK_TIMEOUT_S, ranks: int = 2, width: int = WIDTHS[0]
    ) -> None:
        out.mkdir(parents=True)
        self.out = out
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ranks: list[BaseProcess] = [
            SERVER.Process(target=rank_main, args=(rank, ranks, port, str(out), str(cache), rank_timeout_s, width))
            for rank in range(ranks)
        ]
        for rank in self.ranks:
            rank.start()

    def join(self, ranks: Sequence[int], seconds: float) -> bool:
        """Wait for these ranks; return whether they ended within `seconds`."""
        until = time.monotonic() + seconds
        for rank in ranks:
            self.ranks[rank].join(max(0.0, until - time.monotonic()))
        return not any(self.ranks[rank].is_alive() for rank in ranks)

    def end(self) -> None:
        """Kill the processes that still run."""
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def losses(self) -> list[str]:
        """Return the losses of the ranks that finished."""
        return [path.read_text() for path in sorted(self.out.glob("losses.[0-9]"))]

    def error(self, ranks: Sequence[int] = (0, 1)) -> str:
        """Return the last error of the first of `ranks` that printed one, without parts that differ from run to run."""
        for rank in ranks:
            found = last_error(read(self.out / f"log.{rank}"))
            if found:
                return found
        return "no error"

    def tails(self) -> str:
        """Return the last lines of all logs."""
        logs = [(path.name, read(path).splitlines()[-_TAIL:]) for path in sorted(self.out.glob("log.*"))]
        return "\n".join("\n".join([f"--- {name}", *lines]) for name, lines in logs)


def read(path: Path) -> str:
    """Return a log's text; "" if there is no log."""
    return path.read_text(errors="replace") if path.exists() else ""


def last_error(log: str) -> str:
    """Return the last line of a log that names an error, without parts that differ from run to run."""
    errors = [line for line in log.splitlines() if re.match(r"[\w.]*(Error|Interrupt|Disagree|Exception)\b", line)]
    if not errors:
        return ""
    text = errors[-1].removeprefix("overlapc.errors.").removeprefix("torch.distributed.")
    text = re.sub(r"\[?(127\.0\.0\.1|::ffff:[\d.]+|localhost)\]?:\d+", "HOST", text)
    text = re.sub(r"/\S+?/(\w+\.cc:\d+)", r"\1", text)
    text = re.sub(r"/tmp/faults\S*", "CACHE", text)
    text = re.sub(r"\brank [01]\b", "rank N", text)
    text = re.sub(r"compilation \d+ \(\w+\), [a-z ]+?(?= within\b|[^a-z ]|$)", "a meeting", text)
    return text[:120]


@dataclass(frozen=True)
class Setting:
    """The references that all jobs of a run are compared with."""

    references: dict[int, list[str]]  # width -> losses of a job of two ranks without faults
    of_one_rank: list[str]  # losses of the usual model on one rank
    cold_s: float  # duration of a job on an empty cache, with as many jobs at once as in this run

    @property
    def reference(self) -> list[str]:
        """Losses of the default job."""
        return self.references[WIDTHS[0]]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one job."""

    message: str
    seconds: float  # from the fault (or from the start) until the last survivor had ended
    hung: bool = False
    early: bool = False  # the job ended before the fault: not counted
    wrong: str = ""  # what this job, or the next one on the same cache, did wrong; "" if nothing


@contextmanager
def folder_for_a_job() -> Iterator[Path]:
    """Yield a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="faults", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def started_again(folder: Path, reference: list[str]) -> str:
    """Run a job on the cache in `folder`; return what is wrong, or "" if its losses are those without faults."""
    began = time.monotonic()
    job = Job(folder / "again", folder / "cache", HANGS_S)
    ended = job.join((0, 1), HANGS_S)
    took = time.monotonic() - began
    job.end()
    if ended and job.losses() == reference:
        return ""
    what = "gave other losses" if ended and len(job.losses()) == 2 else f"did not finish in {took:.0f} s"
    return f"the job on this cache {what}\n{job.tails()}"


# --- faults: each function sends signals to the ranks of one job

Strike = Callable[[list[BaseProcess], random.Random], list[int]]  # returns the ranks that must end by themselves


def kill(ranks: list[BaseProcess], choice: random.Random) -> list[int]:
    """Send SIGKILL to one rank."""
    return _signalled(ranks, choice.randrange(2), signal.SIGKILL)


def stop(ranks: list[BaseProcess], choice: random.Random) -> list[int]:
    """Send SIGSTOP to one rank."""
    return _signalled(ranks, choice.randrange(2), signal.SIGSTOP)


def interrupt(ranks: list[BaseProcess], _: random.Random) -> list[int]:
    """Send SIGINT to all ranks, as Ctrl-C in a terminal does."""
    for rank in ranks:
        _send(rank, signal.SIGINT)
    return [0, 1]


def interrupt_one(ranks: list[BaseProcess], choice: random.Random) -> list[int]:
    """Send SIGINT to one rank, as a cluster's agent may do."""
    _signalled(ranks, choice.randrange(2), signal.SIGINT)
    return [0, 1]


def _signalled(ranks: list[BaseProcess], struck: int, number: int) -> list[int]:
    _send(ranks[struck], number)
    return [1 - struck]


def _send(rank: BaseProcess, number: int) -> None:
    if rank.is_alive():
        assert rank.pid is not None
        os.kill(rank.pid, number)


def struck(strike: Strike, setting: Setting, choice: random.Random) -> Outcome:
    """Run one job with the fault at a random time, then one without a fault on the same cache."""
    with folder_for_a_job() as folder:
        job = Job(folder / "job", folder / "cache")
        time.sleep(choice.uniform(0.0, setting.cold_s))
        early = not all(rank.is_alive() for rank in job.ranks)
        began = time.monotonic()
        survivors = strike(job.ranks, choice)
        ended = job.join(survivors, HANGS_S)
        took = time.monotonic() - began
        message = job.error(survivors) if ended else "HANGS"
        job.end()
        again = started_again(folder, setting.reference)
        wrong = "\n".join(filter(None, ("" if ended else f"a survivor hangs\n{job.tails()}", again)))
        return Outcome(message, took, not ended, early, wrong)


def under_the_launcher(how: str, setting: Setting, choice: random.Random) -> Outcome:
    """Run a job under `overlapc run` and signal one rank or the launcher; then run the job again on the same cache."""
    with folder_for_a_job() as folder:
        (folder / "job").mkdir()
        script = folder / "job.py"
        script.write_text(SCRIPT.format(root=str(ROOT), out=f"{folder}/job", cache=f"{folder}/cache"))
        run = [sys.executable, "-m", "overlapc.launch.cli", "run", "--nproc", "2", "--report", "overlap.json"]
        run += ["--watchdog", str(WATCHDOG_S)] if how == "stop" else []
        with (folder / "log").open("w") as log:
            job = subprocess.Popen([*run, script], cwd=folder, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + HANGS_S
        pids: list[Path] = []
        while len(pids) < 2 and job.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
            pids = sorted(folder.glob(".overlap.json.*/rank*/pid"))
        ranks = [int(path.read_text()) for path in pids]
        time.sleep(choice.uniform(0.0, setting.cold_s + 5.0))  # 5 s: a rank imports torch first
        early = job.poll() is not None
        began = time.monotonic()
        if not early and how == "interrupt":
            os.kill(job.pid, signal.SIGINT)
        elif not early:
            os.kill(choice.choice(ranks), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            job.wait(HANGS_S)
        took = time.monotonic() - began
        left = [pid for pid in ranks if _runs(pid, str(script))]
        hung = job.poll() is None or bool(left)
        for pid in [*left, *([job.pid] if job.poll() is None else [])]:
            os.kill(pid, signal.SIGKILL)
        job.wait()
        text = read(folder / "log")
        words = [line for line in text.splitlines() if line.startswith("overlapc: ")]
        message = re.sub(r"\brank [01]\b", "rank N", words[0] if words else "no sentence of overlapc's")
        wrong = f"the launcher or ranks {left} hang\n{text[-3000:]}" if hung else ""
        if not words and not early:
            wrong = f"no sentence of overlapc's\n{text[-3000:]}"
        again = started_again(folder, setting.reference)
        return Outcome(message, took, hung, early, "\n".join(filter(None, (wrong, again))))


def _runs(pid: int, script: str) -> bool:
    """Whether this process exists and runs `script`."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and script in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False


# --- shared caches, and full caches


def started_together(jobs: Sequence[Job], references: Sequence[list[str]], of: str) -> Outcome:
    """Wait for jobs that were just started, each of which must give its reference's losses; return their outcome."""
    began = time.monotonic()
    ended = [job.join(range(len(job.ranks)), max(0.0, began + HANGS_S - time.monotonic())) for job in jobs]
    took = time.monotonic() - began
    for job in jobs:
        job.end()
    right = sum(job.losses() == reference for job, reference in zip(jobs, references, strict=True))
    message = f"{right} of {len(jobs)} {of} give the losses of one alone"
    wrong = "" if right == len(jobs) else "\n".join([message, *(job.tails() for job in jobs)])
    return Outcome(message, took, not all(ended), wrong=wrong)


def cold_together(setting: Setting, _: random.Random) -> Outcome:
    """Let many processes compile the same unsharded step on one empty cache."""
    with folder_for_a_job() as folder:
        jobs = [Job(folder / str(at), folder / "cache", HANGS_S, ranks=1) for at in range(COLD)]
        return started_together(jobs, [setting.of_one_rank] * COLD, "processes")


def two_jobs(setting: Setting, choice: random.Random) -> Outcome:
    """Let two jobs with different models compile on one empty cache, the second a little later."""
    with folder_for_a_job() as folder:
        jobs = []
        for width in WIDTHS:
            jobs.append(Job(folder / str(width), folder / "cache", HANGS_S, width=width))
            time.sleep(choice.uniform(0.0, 1.0))
        return started_together(jobs, [setting.references[width] for width in WIDTHS], "jobs")


def full_disk(setting: Setting, choice: random.Random) -> Outcome:
    """Run a job whose cache lies on a filesystem that may be too small."""
    with folder_for_a_job() as folder:
        cache = folder / "cache"
        cache.mkdir(mode=0o700)
        size = choice.randint(*DISK_KIB)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k,mode=700", "tmpfs", str(cache)], check=True)
        try:
            began = time.monotonic()
            job = Job(folder / "job", cache, HANGS_S)
            ended = job.join((0, 1), HANGS_S)
            took = time.monotonic() - began
            job.end()
        finally:
            subprocess.run(["umount", str(cache)], check=True)
        if job.losses() == setting.reference:
            warned = "No space left on device" in read(job.out / "log.0") + read(job.out / "log.1")
            return Outcome(f"the losses of a job without faults, {'and a warning' if warned else 'in silence'}", took)
        message = job.error()
        told = "No space left on device; make room there" in message
        return Outcome(message, took, not ended, wrong="" if told else f"{size} KiB: {message}\n{job.tails()}")


# --- many compilations in one process


def holds() -> dict[str, int]:
    """Return this process's memory, descriptors, threads and children."""
    status = Path("/proc/self/status").read_text()
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid="], capture_output=True, text=True)
    return {
        "resident MiB": int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(re.findall(r"Threads:\s+(\d+)", status)[0]),
        "children": len(children.stdout.split()) - 1,  # ps itself
    }


def compile_many(times: int) -> list[tuple[int, dict[str, int]]]:
    """Return `holds()` after a quarter, half and all of `times` compilations, whose functions are then unreferenced."""
    import torch

    import overlapc  # noqa: F401 (registers the backend, also where the package is not installed)

    torch.set_num_threads(1)
    weight = torch.randn(16, 16, requires_grad=True)
    seen = []
    for at in range(1, times + 1):
        step = torch.compile(lambda x, at=at: ((x @ weight).sin() * at).sum(), backend="overlapc", dynamic=False)
        step(torch.randn(4, 16)).backward()
        del step
        if at % 8 == 0:  # Dynamo runs a function eagerly after eight others with the same code
            torch._dynamo.reset()
        if at in (times // 4, times // 2, times):
            seen.append((at, holds()))
    return seen


# --- the table


@dataclass(frozen=True)
class Row:
    """A row of the table: the fault, the number of jobs, and the function that runs one job."""

    name: str
    times: int
    trial: Callable[[Setting, random.Random], Outcome]


ROWS = {
    "kill": Row("one rank killed (SIGKILL)", 50, partial(struck, kill)),
    "stop": Row(f"one rank stopped (SIGSTOP), rank_timeout {RANK_TIMEOUT_S:g} s", 20, partial(struck, stop)),
    "interrupt": Row("Ctrl-C, all ranks", 20, partial(struck, interrupt)),
    "interrupt_one": Row("Ctrl-C, one rank", 20, partial(struck, interrupt_one)),
    "run_kill": Row("`overlapc run`, one rank killed", 10, partial(under_the_launcher, "kill")),
    "run_stop": Row(
        f"`overlapc run --watchdog {WATCHDOG_S:g}`, one rank stopped", 10, partial(under_the_launcher, "stop")
    ),
    "run_interrupt": Row("`overlapc run`, Ctrl-C", 10, partial(under_the_launcher, "interrupt")),
    "cold": Row(f"{COLD} processes start cold on one cache", 5, cold_together),
    "two": Row("two jobs start cold on one cache", 5, two_jobs),
    "disk": Row(f"cache on a disk of {DISK_KIB[0]} to {DISK_KIB[1]} KiB", 20, full_disk),
}


def measured(ranks: int, width: int) -> tuple[list[str], float]:
    """Return the losses and the seconds of a job without a fault."""
    with folder_for_a_job() as folder:
        began = time.monotonic()
        job = Job(folder / "job", folder / "cache", HANGS_S, ranks, width)
        job.join(range(ranks), HANGS_S)
        took = time.monotonic() - began
        job.end()
        found = job.losses()
        assert len(found) == ranks, f"the job does not even run without a fault\n{job.tails()}"
        return found, took


def setting_of(pool: ThreadPoolExecutor, at_once: int) -> Setting:
    """Return reference losses, and the time of a cold job with `at_once` jobs running."""
    alone, _ = measured(1, WIDTHS[0])
    other, _ = measured(2, WIDTHS[1])
    beside = list(pool.map(lambda _: measured(2, WIDTHS[0]), range(at_once)))
    assert all(found == beside[0][0] for found, _ in beside)
    took = statistics.median(seconds for _, seconds in beside)
    return Setting({WIDTHS[0]: beside[0][0], WIDTHS[1]: other}, alone, took)


def trial(row: Row, number: int, setting: Setting, seed: int, until: float) -> Outcome | None:
    """Run one job of a row; None if the time is over."""
    if time.monotonic() > until:
        return None
    return row.trial(setting, random.Random(f"{seed} {row.name} {number}"))


def show(row: Row, outcomes: Sequence[Outcome]) -> bool:
    """Print a row; return whether every job passed."""
    counted = [outcome for outcome in outcomes if not outcome.early]
    for outcome in outcomes:
        if outcome.wrong:
            print(f"{row.name}: {outcome.wrong}\n", file=sys.stderr, flush=True)
    messages = Counter(outcome.message for outcome in counted)
    told = "; ".join(f"{text} ({count})" for text, count in messages.most_common())
    seconds = [outcome.seconds for outcome in counted] or [0.0]
    hung, wrong = sum(outcome.hung for outcome in counted), sum(bool(outcome.wrong) for outcome in outcomes)
    times_text = f"{statistics.median(seconds):.1f} / {max(seconds):.1f}"
    print(f"| {row.name} | {len(counted)} | {hung} | {times_text} | {wrong} of {len(outcomes)} | {told} |", flush=True)
    return not wrong


def main() -> int:
    """Run the selected rows and print a table; return 1 if a job failed its checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [*ROWS, "compilations"]
    parser.add_argument("--only", default=",".join(kinds), help=f"some of {','.join(kinds)}")
    parser.add_argument("--times", type=int, help="jobs per row (default: 50 for kill, 5 to 20 for other rows)")
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run at once (default: 1)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no job after this time (default: 3600)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asked = args.only.split(",")
    if unknown := set(asked) - set(kinds):
        parser.error(f"no row named {', '.join(unknown)}; there are {', '.join(kinds)}")
    if "disk" in asked and _APART not in os.environ:  # a mount namespace, whose mounts vanish with its processes
        apart = ["unshare", "--map-root-user", "--mount"]
        if subprocess.run([*apart, "true"], stderr=subprocess.DEVNULL).returncode == 0:
            os.execvpe(apart[0], [*apart, sys.executable, *sys.argv], {**os.environ, _APART: "1"})
        print("disk is left out: this user may not mount filesystems here", file=sys.stderr)
        asked.remove("disk")
    until = time.monotonic() + args.seconds
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    os.environ["OMP_NUM_THREADS"] = "1"
    SERVER.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "overlapc.compilation.stages"])
    right = True
    if set(asked) & set(ROWS):
        with ThreadPoolExecutor(args.at_once) as pool:
            setting = setting_of(pool, args.at_once)
            print(f"a cold job takes {setting.cold_s:.1f} s, {args.at_once} at once", flush=True)
            times = {kind: args.times or ROWS[kind].times for kind in ROWS if kind in asked}
            jobs = [(kind, number) for kind, count in times.items() for number in range(count)]
            jobs.sort(key=lambda job: (job[1] + 0.5) / times[job[0]])  # interleave rows, in case the time runs out
            coming: dict[str, list[Future[Outcome | None]]] = {kind: [] for kind in times}
            for kind, number in jobs:
                coming[kind].append(pool.submit(trial, ROWS[kind], number, setting, args.seed, until))
            for kind, futures in coming.items():
                outcomes = [future.result() for future in futures]
                right &= show(ROWS[kind], [outcome for outcome in outcomes if outcome is not None])
    if "compilations" in asked:
        for at, held in compile_many(args.times or COMPILATIONS):
            print(f"after {at} compilations: " + ", ".join(f"{value} {what}" for what, value in held.items()))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
