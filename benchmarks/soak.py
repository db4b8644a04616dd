"""Train small sharded models for many steps, in several configurations at once, and compare each with a run alone.

    python benchmarks/soak.py --steps 20000                          # CPU ranks over gloo
    python benchmarks/soak.py --steps 20000 --device cuda --ranks 2  # two GPUs over NCCL
    python benchmarks/soak.py --system eager                         # the control: FSDP2 and tensor parallelism, eager

This finds rare errors: writes to freed memory, collectives that hang, races between threads. Every configuration
repeats the same round from the same initial weights; every few rounds a new model is compiled. The first round runs
while all other configurations wait; the losses of each later round, run at the same time as the others, must have the
same bits on every rank. Ranks that die or hang are reported with their stacks, in Python and, if gdb is installed, in
C.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

COMMAND = [sys.executable, "-u", os.path.abspath(__file__)]  # starts a rank
_POLL_S = 0.1
_GDB_S = 60.0
_LAST_LINES = 60  # lines of a log that a report quotes
_GRACE_S = 15.0  # for the round or compilation that runs when the time is over


@dataclass(frozen=True)
class Soak:
    """One configuration: how the model is sharded and compiled."""

    layout: str  # fsdp, tp or hsdp
    dtype: str  # fp32 or bf16
    wrapper: str = "python"
    memory: str = "reuse"

    @property
    def name(self) -> str:
        """Name in the table."""
        return " ".join((self.layout, self.dtype, self.wrapper, *([self.memory] if self.memory != "reuse" else [])))

    def ranks(self, most: int) -> int:
        """Return the number of ranks: 2, or for HSDP two replicas of two shards if `most` allows 4."""
        return min(most, 4) if self.layout == "hsdp" else 2


SOAKS = (
    Soak("fsdp", "bf16"),
    Soak("fsdp", "fp32", "fx"),
    Soak("fsdp", "fp32", memory="pool"),
    Soak("tp", "fp32"),
    Soak("tp", "bf16", "fx"),
    Soak("tp", "bf16", memory="pool"),
    Soak("hsdp", "bf16"),
    Soak("hsdp", "fp32", "fx"),
    Soak("hsdp", "bf16", memory="pool"),
)


@dataclass(frozen=True)
class Plan:
    """Settings that all configurations share. Times are in seconds."""

    device: str = "cpu"
    system: str = "overlapc"
    rounds: int = 10
    steps: int = 100  # steps per round
    renew: int = 5  # rounds after which a new model is made and compiled
    batch: int = 4
    seq: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)  # further options of torch.compile


# --- a rank


def train(soak: Soak, plan: Plan, rank: int, ranks: int, folder: Path) -> None:
    """Run a rank; write its results to `done<rank>` after every round."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    device = torch.device(plan.device, rank) if plan.device == "cuda" else torch.device(plan.device)
    if plan.device == "cuda":
        torch.cuda.set_device(device)
        # Otherwise gradients of an embedding are added in any order, in eager and in overlapc, and bits would differ.
        torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl" if plan.device == "cuda" else "gloo")
    tp, hsdp = (2, 1) if soak.layout == "tp" else (1, 2 if soak.layout == "hsdp" else 1)
    mesh = init_device_mesh(plan.device, (hsdp, ranks // (tp * hsdp), tp), mesh_dim_names=("replicate", "dp", "tp"))
    clock = _Progress(folder, rank)
    run = _Run(soak, plan, mesh, device, clock)
    run.renew()
    run.round(2)  # compiles
    run.round(2)  # runs as later steps do
    _meet(folder, "ready", rank, "reference")
    reference = run.round(plan.steps)
    _meet(folder, "referenced", rank, "go")
    differ: list[tuple[int, int, str, str]] = []
    began = time.perf_counter()
    for number in range(plan.rounds):
        if number and number % plan.renew == 0:
            run.renew()
        losses = run.round(plan.steps)
        wrong = [at for at, (have, want) in enumerate(zip(losses, reference, strict=True)) if have != want]
        if wrong:
            at = wrong[0]
            differ.append((number, at, losses[at].hex(), reference[at].hex()))
        outcome = {
            "steps": (number + 1) * plan.steps,
            "differ": differ,
            "seconds": time.perf_counter() - began,
            "finite": all(math.isfinite(loss) for loss in reference),
        }
        _publish(folder / f"done{rank}", json.dumps(outcome))
        stops = torch.tensor([int((folder / "stop").exists())], device=device)
        dist.all_reduce(stops, dist.ReduceOp.MAX)
        if stops.item():
            break
    dist.barrier()
    dist.destroy_process_group()


class _Run:
    """One model, its initial weights, and the data of a round."""

    def __init__(self, soak: Soak, plan: Plan, mesh: Any, device: Any, clock: _Progress) -> None:
        from overlapc.launch import corpus
        from overlapc.launch.demo import DemoConfig
        from overlapc.launch.llama import LlamaConfig

        self.soak, self.plan, self.mesh, self.device, self.clock = soak, plan, mesh, device, clock
        # Large enough for activations of 64 KiB and more, which backward may take over.
        self.shape = LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn=192, max_seq=plan.seq)
        hsdp, shards, tp = mesh.shape
        self.demo = DemoConfig(nproc=mesh.size(), device=plan.device, dtype=soak.dtype, tp=tp, hsdp=hsdp)
        part = mesh.get_local_rank("replicate") * shards + mesh.get_local_rank("dp")
        batches = corpus.batches(plan.steps, plan.batch, plan.seq, part, hsdp * shards)
        self.data = [(tokens.to(device), targets.to(device)) for tokens, targets in batches]

    def renew(self) -> None:
        """Make another model with the same weights and compile it from scratch."""
        import torch

        from overlapc.launch.demo import shard
        from overlapc.launch.llama import Llama, tensor_parallel

        torch._dynamo.reset()
        with torch.device(self.device):
            model = Llama(self.shape)
        model.reset_parameters(0)
        if self.demo.tp > 1:
            tensor_parallel(model, self.mesh["tp"])
        ours = self.plan.system == "overlapc"
        shard(self.plan.system, model, self.demo, self.mesh)
        self.model = model
        self.step: Any = model
        if ours:
            options = {"wrapper": self.soak.wrapper, "memory": self.soak.memory, **self.plan.options}
            self.step = torch.compile(model, backend="overlapc", fullgraph=True, options=options)
        self.first = [parameter.detach().clone() for parameter in model.parameters()]

    def round(self, steps: int) -> list[float]:
        """Train `steps` steps from the initial weights; return this rank's loss of each step."""
        import torch

        with torch.no_grad():
            for parameter, first in zip(self.model.parameters(), self.first, strict=True):
                parameter.copy_(first)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        losses = []
        for tokens, targets in self.data[:steps]:
            loss = self.step(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            self.clock.tick()
        return torch.stack([_plain(loss).float() for loss in losses]).tolist()


def _plain(loss: Any) -> Any:
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


class _Progress:
    """A step counter in a file that the parent watches."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(folder / f"progress{rank}", os.O_CREAT | os.O_WRONLY)
        self._steps = 0

    def tick(self) -> None:
        """Count one more step."""
        self._steps += 1
        os.pwrite(self._file, struct.pack("q", self._steps), 0)


def _publish(path: Path, text: str = "") -> None:
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text)
    beside.rename(path)


def _meet(folder: Path, there: str, rank: int, until: str) -> None:
    """Publish that this rank has reached `there`, and wait until the parent publishes `until`."""
    _publish(folder / f"{there}{rank}")
    while not (folder / until).exists():
        time.sleep(_POLL_S)


# --- the parent


class Job:
    """The rank processes of one configuration, and how they ended."""

    def __init__(self, soak: Soak, plan: Plan, ranks: int, folder: Path) -> None:
        self.soak, self.plan, self.count, self.folder = soak, plan, ranks, folder
        self.dead = self.still = ""  # what happened, with the end of a log
        self.late = False  # whether the job was ended because the time was over
        self._seen: list[bytes] = []
        self._moved = time.monotonic()
        folder.mkdir(parents=True)
        port = str(_free_port())
        self.ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            }
            given = json.dumps({"soak": asdict(soak), "plan": asdict(plan), "folder": str(folder)})
            with (folder / f"rank{rank}.log").open("wb") as log:
                command = [*COMMAND, "--rank", given]
                self.ranks.append(
                    subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT)
                )

    def at(self, mark: str) -> bool:
        """Whether every rank has published `mark`."""
        return all((self.folder / f"{mark}{rank}").exists() for rank in range(self.count))

    @property
    def over(self) -> bool:
        """Whether the job has ended, for whatever reason."""
        return bool(self.dead or self.still or self.late) or all(rank.poll() is not None for rank in self.ranks)

    def tell(self, mark: str) -> None:
        """Publish `mark`, for which the ranks wait."""
        self._moved = time.monotonic()
        (self.folder / mark).touch()

    def watch(self, still_s: float) -> None:
        """End the job if a rank died, or if no rank has finished a step for `still_s` seconds."""
        if self.over:
            return
        codes = [rank.poll() for rank in self.ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            time.sleep(1)  # the first to die is not always the first seen
            codes = [rank.poll() for rank in self.ranks]
            # Prefer a rank killed by a signal: others often exit with an error only because of that.
            first = min((rank for rank, code in enumerate(codes) if code), key=lambda rank: (codes[rank] or 0) > 0)
            self.dead = f"rank {first} {_how(codes[first] or 0)}\n{self._tail(first)}"
            self.end()
            return
        seen = [path.read_bytes() for path in sorted(self.folder.glob("progress*"))]
        if seen != self._seen:
            self._seen, self._moved = seen, time.monotonic()
        elif time.monotonic() - self._moved > still_s:
            self._stacks()
            self.still = "\n".join(f"rank {rank}\n{self._tail(rank)}" for rank in range(self.count))
            self.end()

    def waiting(self) -> None:
        """Restart the time without a step, because the parent lets the job wait."""
        self._moved = time.monotonic()

    def cut(self) -> None:
        """End the job because the time is over."""
        if not self.over:
            self.late = True
            self.end()

    def end(self) -> None:
        """Kill the rank processes."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()

    def outcomes(self) -> list[dict[str, Any]]:
        """Return each rank's results over the rounds that it has finished."""
        paths = [self.folder / f"done{rank}" for rank in range(self.count)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def steps(self) -> int:
        """Return the number of steps that every rank has finished, including compilation and the reference round."""
        made = [path.read_bytes() for path in self.folder.glob("progress*")]
        return min((struct.unpack("q", each)[0] for each in made if each), default=0)

    def row(self) -> tuple[Any, ...]:
        """Return the job's row of the table."""
        found = self.outcomes()
        whole = len(found) == self.count
        same = whole and not any(each["differ"] for each in found) and all(each["finite"] for each in found)
        per_step = f"{found[0]['seconds'] / max(found[0]['steps'], 1) * 1e3:.1f}" if whole else ""
        return (
            self.soak.name,
            self.count,
            self.steps(),
            int(bool(self.dead)),
            int(bool(self.still)),
            "yes" if same else "NO" if whole else "not known",
            per_step,
        )

    def trouble(self) -> list[str]:
        """Return one text for each thing that went wrong."""
        found = [f"{self.soak.name} died: {self.dead}"] if self.dead else []
        found += [f"{self.soak.name} stands still after {self.steps()} steps:\n{self.still}"] if self.still else []
        for rank, outcome in enumerate(self.outcomes()):
            found += [
                f"{self.soak.name}: rank {rank}, round {number}, step {at}: loss {have}, alone {want}"
                for number, at, have, want in outcome["differ"]
            ]
            found += [] if outcome["finite"] else [f"{self.soak.name}: rank {rank} has losses that are no numbers"]
        if not found and len(self.outcomes()) < self.count:
            why = "the time was over" if self.late else "it ended"
            found.append(f"{self.soak.name}: {why} before a round was compared, after {self.steps()} steps")
            found[-1] += f"\n{self._tail(0)}"
        return found

    def _stacks(self) -> None:
        """Write every thread's stack to the logs: in Python and, if gdb is installed, in C."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGUSR1)
        time.sleep(1)
        gdb = shutil.which("gdb")
        for number, rank in enumerate(self.ranks):
            if gdb is None or rank.poll() is not None:
                continue
            with (self.folder / f"rank{number}.native.log").open("wb") as log:
                command = [gdb, "-p", str(rank.pid), "-batch", "-ex", "thread apply all bt 40"]
                try:
                    subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=_GDB_S)
                except subprocess.TimeoutExpired:
                    log.write(b"gdb did not end\n")

    def _tail(self, rank: int) -> str:
        log = self.folder / f"rank{rank}.log"
        lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
        return "\n".join(["", *(f"   {line}" for line in lines[-_LAST_LINES:]), f"   ({log})"])


def _how(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def soak_together(
    soaks: Sequence[Soak], plan: Plan, most: int, folder: Path, still_s: float, minutes: float, load: int
) -> list[Job]:
    """Run these configurations: all compile, each runs its reference round alone, then all run at once."""
    ends = time.monotonic() + minutes * 60
    jobs: list[Job] = []
    busy: list[subprocess.Popen[bytes]] = []
    try:
        jobs += [Job(soak, plan, soak.ranks(most), folder / soak.name.replace(" ", "-")) for soak in soaks]
        _until(jobs, "ready", still_s, ends)
        for job in jobs:
            if job.over:
                continue
            for other in jobs:
                other.waiting()
            job.tell("reference")
            _until([job], "referenced", still_s, ends)
        busy += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        for job in jobs:
            job.tell("go")
        while not all(job.over for job in jobs):
            over = time.monotonic() > ends
            for job in jobs:
                if over and not (job.folder / "stop").exists():
                    (job.folder / "stop").touch()
                if time.monotonic() > ends + _GRACE_S:
                    job.cut()
                job.watch(still_s)
            time.sleep(_POLL_S)
    finally:
        for process in busy:
            process.kill()
            process.wait()
        for job in jobs:
            job.end()
    return jobs


def _until(jobs: Sequence[Job], mark: str, still_s: float, ends: float) -> None:
    while not all(job.over or job.at(mark) for job in jobs):
        for job in jobs:
            if time.monotonic() > ends:
                job.cut()
            if job.at(mark):
                job.waiting()
            job.watch(still_s)
        time.sleep(_POLL_S)


def table(jobs: Sequence[Job]) -> str:
    """Return the table, with a row for each configuration and one for all."""
    rows = [job.row() for job in jobs]
    dead, still = (sum(row[at] for row in rows) for at in (3, 4))
    compared = {row[5] for row in rows}
    same = next(each for each in ("NO", "not known", "yes") if each in compared)
    rows.append(("all", "", sum(row[2] for row in rows), dead, still, same, ""))
    head = ("configuration", "ranks", "steps", "dead", "still", "losses as alone", "ms a step")
    return tabulate(rows, head, disable_numparse=True)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if anything died, hung or computed other losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--system", choices=("overlapc", "eager"), default="overlapc")
    parser.add_argument("--ranks", type=int, default=4, help="most ranks of a configuration: 2 or 4 (default: 4)")
    parser.add_argument("--steps", type=int, default=20_000, help="sum over all configurations (default: 20000)")
    parser.add_argument("--round", type=int, default=100, help="steps per round (default: 100)")
    parser.add_argument("--renew", type=int, default=5, help="rounds until a new model is compiled (default: 5)")
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--at-once", type=int, default=len(SOAKS), help="configurations at a time (default: all)")
    parser.add_argument("--load", type=int, default=0, help="additional busy processes (default: 0)")
    parser.add_argument("--still", type=float, default=300, help="seconds without a step, or to compile (default: 300)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no round after that (default: none)")
    parser.add_argument("--option", action="append", default=[], help="option of torch.compile, as name=JSON")
    parser.add_argument("--keep", type=Path, help="folder for logs (default: a temporary one, kept after trouble)")
    given = parser.parse_args(arguments)
    if given.rank is not None:
        what = json.loads(given.rank)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        train(Soak(**what["soak"]), Plan(**what["plan"]), rank, ranks, Path(what["folder"]))
        return 0
    chosen = [soak for soak in SOAKS if given.only in soak.name]
    if not chosen:
        parser.error(f"--only {given.only}: none of {', '.join(soak.name for soak in SOAKS)}")
    options = {name: json.loads(value) for name, _, value in (each.partition("=") for each in given.option)}
    rounds = max(1, math.ceil(given.steps / len(chosen) / given.round))
    plan = Plan(given.device, given.system, rounds, given.round, given.renew, options=options)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="overlapc-soak-"))
    jobs: list[Job] = []
    for first in range(0, len(chosen), given.at_once):
        together = chosen[first : first + given.at_once]
        jobs += soak_together(together, plan, given.ranks, folder, given.still, given.minutes, given.load)
    trouble = [text for job in jobs for text in job.trouble()]
    for text in trouble:
        print(text, end="\n\n")
    print(table(jobs), flush=True)
    if trouble:
        print(f"logs in {folder}")
        return 1
    if given.keep is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
