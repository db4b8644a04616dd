"""What becomes of a job when a rank is killed, stopped or interrupted at a random time while it compiles.

python benchmarks/faults.py                                  # all rows: some 15 minutes on 2 idle cores
python benchmarks/faults.py --only kill,stop --times 5

Two ranks over gloo compile and train a small sharded model, each time on an empty cache; one of them (for Ctrl-C, both)
gets a signal at a random time of a cold run's duration. Counted are jobs in which every survivor ended by itself, with
its last error message, and the time from the fault until the last survivor ended; then the job is started again on the
cache that the fault left, and has to give the losses of a job without faults, bit for bit. `compilations` is one
process that compiles 200 different functions: what it holds at its 50th and at its last. Prints the table for
docs/BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = multiprocessing.get_context("forkserver")
RANK_TIMEOUT_S = 5.0
HANGS_S = 120.0  # a survivor that still runs this long after the fault hangs
COMPILATIONS = 200

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.faults import train
train({out!r}, {cache!r})
"""


def train(out: str, cache: str, rank_timeout_s: float = RANK_TIMEOUT_S) -> None:
    """Two steps of a small sharded model on this rank; its losses go to a file."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import overlapc

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = overlapc.fully_shard(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
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


def rank_main(rank: int, port: int, out: str, cache: str, rank_timeout_s: float) -> None:
    """A rank's process, from start to end."""
    log = os.open(Path(out) / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(out, cache, rank_timeout_s)


@dataclass
class Fault:
    """What happens to a job, and what came of it, by job."""

    name: str
    strike: Callable[[list[BaseProcess], random.Random], list[BaseProcess]]  # returns those that shall survive
    seconds: list[float] = field(default_factory=list)  # until the last survivor had ended
    messages: Counter[str] = field(default_factory=Counter)
    finished: int = 0  # before the fault could come
    hung: int = 0
    restarts_failed: int = 0


def kill(ranks: list[BaseProcess], choice: random.Random) -> list[BaseProcess]:
    """SIGKILL to one rank."""
    return _signalled(ranks, choice.randrange(2), signal.SIGKILL)


def stop(ranks: list[BaseProcess], choice: random.Random) -> list[BaseProcess]:
    """SIGSTOP to one rank."""
    return _signalled(ranks, choice.randrange(2), signal.SIGSTOP)


def interrupt(ranks: list[BaseProcess], _: random.Random) -> list[BaseProcess]:
    """Ctrl-C in a terminal reaches all ranks."""
    for rank in ranks:
        _send(rank, signal.SIGINT)
    return ranks


def interrupt_one(ranks: list[BaseProcess], choice: random.Random) -> list[BaseProcess]:
    """SIGINT to one rank, as a cluster's agent may send it."""
    _signalled(ranks, choice.randrange(2), signal.SIGINT)
    return ranks


def _signalled(ranks: list[BaseProcess], struck: int, number: int) -> list[BaseProcess]:
    _send(ranks[struck], number)
    return [ranks[1 - struck]]


def _send(rank: BaseProcess, number: int) -> None:
    if rank.is_alive():
        assert rank.pid is not None
        os.kill(rank.pid, number)


FAULTS = {
    "kill": ("one rank killed (SIGKILL)", kill),
    "stop": (f"one rank stopped (SIGSTOP), rank_timeout {RANK_TIMEOUT_S:g} s", stop),
    "interrupt": ("Ctrl-C, all ranks", interrupt),
    "interrupt_one": ("Ctrl-C, one rank", interrupt_one),
}


def start(out: Path, cache: Path, rank_timeout_s: float = RANK_TIMEOUT_S) -> list[BaseProcess]:
    """The two ranks of a job, started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        SERVER.Process(target=rank_main, args=(rank, port, str(out), str(cache), rank_timeout_s)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def end(ranks: list[BaseProcess]) -> None:
    """Kills what still runs of these ranks."""
    for rank in ranks:
        rank.kill()
        rank.join()


def losses(out: Path) -> list[str]:
    """Of the ranks that came to their end."""
    return [path.read_text() for path in sorted(out.glob("losses.[01]"))]


def whole_job(cache: Path) -> tuple[list[str], float]:
    """The losses of a job to which nothing happens, and how long it took."""
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        began = time.monotonic()
        ranks = start(Path(folder), cache, HANGS_S)
        for rank in ranks:
            rank.join(max(0.0, began + HANGS_S - time.monotonic()))
        took = time.monotonic() - began
        end(ranks)
        return losses(Path(folder)), took


def last_words(out: Path, ranks: list[int]) -> str:
    """The error of the first of `ranks` that printed one, without what differs from run to run."""
    for rank in ranks:
        path = out / f"log.{rank}"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Interrupt|Disagree|Exception)\b", line)]
        if errors:
            text = errors[-1].removeprefix("overlapc.errors.").removeprefix("torch.distributed.")
            text = re.sub(r"\[?(127\.0\.0\.1|::ffff:[\d.]+|localhost)\]?:\d+", "HOST", text)
            text = re.sub(r"/\S+?/(\w+\.cc:\d+)", r"\1", text)
            text = re.sub(r"\brank [01]\b", "rank N", text)
            text = re.sub(r"compilation \d+ \(\w+\), (graph|estimates|sizes|order of collectives)", "a meeting", text)
            return text[:120]
    return "no error"


def try_fault(fault: Fault, reference: list[str], cold_s: float, choice: random.Random) -> None:
    """One job with the fault at a random time, and one without on the same cache."""
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        out, cache = Path(folder) / "out", Path(folder) / "cache"
        out.mkdir()
        ranks = start(out, cache)
        time.sleep(choice.uniform(0.0, cold_s))
        running = [rank.is_alive() for rank in ranks]
        began = time.monotonic()
        survivors = fault.strike(ranks, choice)
        for rank in survivors:
            rank.join(max(0.0, began + HANGS_S - time.monotonic()))
        took = time.monotonic() - began
        if not all(running):
            fault.finished += 1
        else:
            fault.seconds.append(took)
            if any(rank.is_alive() for rank in survivors):
                fault.hung += 1
                fault.messages["HANGS"] += 1
            else:
                fault.messages[last_words(out, [ranks.index(rank) for rank in survivors])] += 1
        end(ranks)
        if whole_job(cache)[0] != reference:
            fault.restarts_failed += 1


def launcher_fault(how: str, cold_s: float, choice: random.Random) -> tuple[float, str]:
    """`overlapc run`, a signal to one of its ranks or to itself: seconds until its end; its words."""
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        script = Path(folder) / "job.py"
        script.write_text(SCRIPT.format(root=str(ROOT), out=folder, cache=f"{folder}/cache"))
        command = [
            sys.executable,
            "-m",
            "overlapc.launch.cli",
            "run",
            "--nproc",
            "2",
            "--report",
            "overlap.json",
            str(script),
        ]
        job = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
        pids: list[Path] = []
        while len(pids) < 2:
            time.sleep(0.02)
            pids = sorted(Path(folder).glob(".overlap.json.ranks/rank*/pid"))
        struck = int(choice.choice(pids).read_text())
        time.sleep(choice.uniform(0.0, cold_s))
        began = time.monotonic()
        os.kill(job.pid if how == "interrupt" else struck, signal.SIGINT if how == "interrupt" else signal.SIGKILL)
        _, said = job.communicate(timeout=HANGS_S)
        words = [line for line in said.splitlines() if line.startswith("overlapc: ")]
        return time.monotonic() - began, re.sub(r"\brank [01]\b", "rank N", words[0] if words else said[-100:])


def holds() -> dict[str, int]:
    """What this process holds."""
    status = Path("/proc/self/status").read_text()
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid="], capture_output=True, text=True)
    return {
        "resident MiB": int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(re.findall(r"Threads:\s+(\d+)", status)[0]),
        "children": len(children.stdout.split()) - 1,  # ps itself
    }


def compile_many(times: int) -> list[tuple[int, dict[str, int]]]:
    """What this process holds after a quarter of `times` compilations, half, and all; none is used any more then."""
    import torch

    torch.set_num_threads(1)
    weight = torch.randn(16, 16, requires_grad=True)
    seen = []
    for at in range(1, times + 1):
        step = torch.compile(lambda x, at=at: ((x @ weight).sin() * at).sum(), backend="overlapc", dynamic=False)
        step(torch.randn(4, 16)).backward()
        del step
        if at % 8 == 0:  # Dynamo runs what shares code with eight others eagerly
            torch._dynamo.reset()
        if at in (times // 4, times // 2, times):
            seen.append((at, holds()))
    return seen


def main() -> None:
    """Runs what was asked for, and prints a table of each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = [*FAULTS, "launcher", "compilations"]
    parser.add_argument("--only", default=",".join(kinds), help=f"some of {','.join(kinds)}")
    parser.add_argument("--times", type=int, help="jobs a fault (default: 50 of kill, 20 of the others)")
    parser.add_argument("--seconds", type=float, default=1200.0, help="after which a row begins no more jobs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asked = args.only.split(",")
    choice = random.Random(args.seed)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    os.environ["OMP_NUM_THREADS"] = "1"
    SERVER.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "overlapc.compilation"])

    if set(asked) - {"compilations"}:
        cache = Path(tempfile.mkdtemp(prefix="faults"))
        whole_job(cache / "first")  # starts the server
        reference, cold_s = whole_job(cache / "cold")
        shutil.rmtree(cache)
        assert len(reference) == 2, "the job does not even run without a fault"
        print(f"a cold job takes {cold_s:.1f} s", flush=True)
    rows = []
    for kind, (name, strike) in FAULTS.items():
        if kind not in asked:
            continue
        fault = Fault(name, strike)
        until = time.monotonic() + args.seconds
        for _ in range(args.times or (50 if kind == "kill" else 20)):
            if time.monotonic() > until:
                break
            try_fault(fault, reference, cold_s, choice)
        rows.append(fault)
        said = "; ".join(f"{text} ({count})" for text, count in fault.messages.most_common())
        middle, last = (statistics.median(fault.seconds), max(fault.seconds)) if fault.seconds else (0.0, 0.0)
        print(
            f"| {name} | {len(fault.seconds)} | {fault.hung} | {middle:.1f} / {last:.1f} | {fault.restarts_failed} |"
            f" {said} |",
            flush=True,
        )
    if "launcher" in asked:
        for how, what in (("kill", "one rank killed"), ("interrupt", "Ctrl-C")):
            seen = [launcher_fault(how, cold_s, choice) for _ in range(args.times or 5)]
            said = "; ".join(f"{text} ({n})" for text, n in Counter(text for _, text in seen).most_common())
            seconds = [took for took, _ in seen]
            print(
                f"| under overlapc run: {what} | {len(seen)} | 0 | {statistics.median(seconds):.1f} /"
                f" {max(seconds):.1f} | - | {said} |",
                flush=True,
            )
    if "compilations" in asked:
        for at, held in compile_many(args.times or COMPILATIONS):
            print(f"after {at} compilations: " + ", ".join(f"{value} {what}" for what, value in held.items()))


if __name__ == "__main__":
    main()
