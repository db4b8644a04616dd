"""Run subjects of a benchmark in turns, each in its own processes; one that fails or hangs does not affect the others.

turns = Turns(ranks=2, folder=logs, serve=serve)     # serve(subject, rank, ranks, port) is a subject's main function:
turns.begin("eager", {"NCCL_MAX_CTAS": "8"})         #     it calls answer(store_at(port), subject, rank, do)
turns.take("time", ["eager"], seconds=60)            # what do("time") returned on rank 0, by subject
turns.failed                                         # subject -> why it failed
turns.end()
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlapc.runtime.copies.pool import pools_bytes

Serve = Callable[[str, int, int, int], None]  # subject, rank, ranks, port of the store
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Failed)\b.*")


class Turns:
    """The subjects' processes, and the store through which they get their turns."""

    def __init__(self, ranks: int, folder: Path, serve: Serve) -> None:
        """folder: where a rank's output goes, as <subject>_<rank>.log. serve: must be picklable."""
        self.ranks, self.folder, self.serve = ranks, folder, serve
        self.failed: dict[str, str] = {}
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: dict[str, list[BaseProcess]] = {}
        self._taken: dict[str, int] = {}

    def begin(self, subject: str, environment: Mapping[str, str]) -> None:
        """Start a subject's ranks with these extra environment variables; they then wait for turns."""
        self._taken[subject] = 0
        self._processes[subject] = []
        for rank in range(self.ranks):
            process = multiprocessing.get_context("spawn").Process(
                target=_run, args=(self.serve, subject, rank, self.ranks, self._store.port, environment, self.folder)
            )
            process.start()
            self._processes[subject].append(process)

    def alive(self, subjects: Sequence[str]) -> list[str]:
        """Return the subjects whose processes still run."""
        return [subject for subject in subjects if subject in self._processes]

    def take(self, turn: str, subjects: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
        """Let these subjects do `turn` at the same time; return rank 0's result of each one that finished in time."""
        subjects = self.alive(subjects)
        for subject in subjects:
            self._store.set(f"{subject}/turn/{self._taken[subject]}", turn)
        until = time.monotonic() + seconds
        found: dict[str, dict[str, Any]] = {}
        while left := [subject for subject in self.alive(subjects) if subject not in found]:
            for subject in left:
                keys = [f"{subject}/result/{self._taken[subject]}/{rank}" for rank in range(self.ranks)]
                if self._store.check(keys):
                    found[subject] = json.loads(self._store.get(keys[0]))
                    self._taken[subject] += 1
                elif any(process.exitcode is not None for process in self._processes[subject]):
                    self._give_up(subject, f"{turn}: {self._last_words(subject)}")
                elif time.monotonic() > until:
                    self._give_up(subject, f"{turn}: no answer in {seconds:.0f} s")
            time.sleep(0.01)
        return found

    def stop(self, subject: str) -> None:
        """Kill a subject's processes."""
        for process in self._processes.pop(subject):
            process.kill()
            process.join()

    def end(self) -> None:
        """Ask all remaining subjects to end, and kill those that do not."""
        for subject in self._processes:
            self._store.set(f"{subject}/turn/{self._taken[subject]}", "")
        for subject, processes in list(self._processes.items()):
            for process in processes:
                process.join(timeout=10)
            self.stop(subject)

    def _give_up(self, subject: str, why: str) -> None:
        self.failed[subject] = why
        print(f"{subject} failed in {why}", file=sys.stderr, flush=True)
        self.stop(subject)

    def _last_words(self, subject: str) -> str:
        """Return the error that a rank raised first; if none did, the end of the log of the rank that ended first.

        Errors of other ranks follow from the first one, such as a lost connection: they came later.
        """
        if self._store.check([raised := f"{subject}/raised"]):
            return self._store.get(raised).decode()
        processes = self._processes[subject]
        failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
        if not failed:
            return "a rank ended early"
        logs = {rank: self.folder / f"{subject}_{rank}.log" for rank in failed}
        first = min(failed, key=lambda rank: logs[rank].stat().st_mtime_ns)
        lines = logs[first].read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if _ERROR.match(line)]
        said = (errors or lines or ["no output"])[-1]
        return f"rank {first} ended with {processes[first].exitcode}: {said[:160]}"


def store_at(port: int) -> dist.TCPStore:
    """Connect a rank to the store of `Turns`; its process group may use the same store under its own prefix."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(hours=1))


def answer(store: dist.TCPStore, subject: str, rank: int, do: Callable[[str], dict[str, Any]]) -> None:
    """Do turn after turn until there are no more. Results are stored as JSON; an exception in `do` ends the subject."""
    for number in itertools.count():
        turn = store.get(f"{subject}/turn/{number}").decode()
        if not turn:
            return
        try:
            result = do(turn)
        except Exception as error:  # before this rank ends: other ranks fail when they lose the connection to it
            said = f"rank {rank} raised {type(error).__name__}: {error}"
            store.compare_set(f"{subject}/raised", "", said[:160])
            raise
        store.set(f"{subject}/result/{number}/{rank}", json.dumps(result))


def answer_on_rank(make: Callable[[], object], device: str, subject: str, rank: int, ranks: int, port: int) -> None:
    """Run a rank of a subject from its process group to its end; a turn calls the method of that name on `make()`.

    device: "cuda" (NCCL, one GPU per rank, whose cached memory is released after each turn) or "cpu" (gloo).
    """
    torch._dynamo.config.recompile_limit = 64
    store = store_at(port)
    meeting = dist.PrefixStore(f"{subject}/group", store)
    if device == "cuda":
        torch.cuda.set_device(rank)
        gpu = torch.device("cuda", rank)
        dist.init_process_group("nccl", store=meeting, rank=rank, world_size=ranks, device_id=gpu)
    else:
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    made = make()

    def do(turn: str) -> dict[str, Any]:
        result: dict[str, Any] = getattr(made, turn)()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # other subjects need this memory
        return result

    answer(store, subject, rank, do)
    dist.destroy_process_group()


def each_step_ms(step: Callable[[], object], steps: int, device: str) -> list[float]:
    """Return the milliseconds of each of `steps` steps: between CUDA events (device "cuda") or by the host's clock."""
    if device != "cuda":
        clock = [time.perf_counter()]
        for _ in range(steps):
            step()
            clock.append(time.perf_counter())
        return [(after - before) * 1e3 for before, after in itertools.pairwise(clock)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def of_all_ranks(value: Any) -> list[Any]:
    """Return what each rank passed, in the order of ranks; all must call it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def step_times(step: Callable[[], object], steps: int, device: str) -> dict[str, Any]:
    """Return `times_ms` of each of `steps` steps, by CUDA events or the host's clock, and `peak_gib` of this GPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # the allocator's cache is empty when a turn begins
        step()
    times = each_step_ms(step, steps, device)
    if device == "cpu":
        return {"times_ms": times}
    peak = torch.cuda.max_memory_allocated() + pools_bytes()  # torch's allocator does not count memory that ranks share
    return {"times_ms": times, "peak_gib": peak / 2**30}


def _run(
    serve: Serve, subject: str, rank: int, ranks: int, port: int, environment: Mapping[str, str], folder: Path
) -> None:
    log = os.open(folder / f"{subject}_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    serve(subject, rank, ranks, port)
