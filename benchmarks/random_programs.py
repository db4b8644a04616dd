"""Compile random programs and compare them with eager; shrink those that fail, and compare them with Inductor, too.

    python benchmarks/random_programs.py --count 3000 --jobs 16 --beside-inductor
    python benchmarks/random_programs.py --count 1000 --device cuda --jobs 8 --report failures.jsonl
    python benchmarks/random_programs.py --from failures.jsonl --jobs 16 --beside-inductor      # these programs again
    python benchmarks/random_programs.py --count 50 --triton             # Triton's kernels without a GPU (slow)
    python benchmarks/random_programs.py --seed 123 --count 1 --script        # print the program as a file to run

A program has 20 to 45 statements (tests/programs/statements.py): views, changes in place through views, arguments that
share memory, low precision, special values, scatters, control flow, nested checkpoints, custom functions, torch.func;
forward and backward; three in ten have dynamic sizes and are called with two sizes. Worker processes take one program
after the other; a program whose worker dies or takes more than --limit seconds is a failure. A seed always gives the
same program.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the programs are shared with the tests

from tabulate import tabulate

RIGHT = ("right", "undecidable")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="first of consecutive seeds")
    parser.add_argument("--short", action="store_true", help="programs of 2 to 6 statements, as in the tests")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--triton", action="store_true", help="on a CPU: interpret Triton's kernels, and compile them for sm_90"
    )
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one program, without shrinking")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this many seconds")
    parser.add_argument("--shrink", type=float, default=60, help="seconds to spend at most on shrinking one failure")
    parser.add_argument("--beside-inductor", action="store_true", help="also run each failure with Inductor")
    parser.add_argument("--report", type=Path, help="file to append one JSON line per program to")
    parser.add_argument("--gpus", type=int, default=1, help="with --device cuda: number of GPUs to spread workers over")
    parser.add_argument("--script", action="store_true", help="print the program of --seed and stop")
    parser.add_argument("--from", dest="source", type=Path, help="take the programs of this --report")
    parser.add_argument("--worker", type=int, metavar="JOB", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options)
    if options.device == "cuda" and not (options.script and options.source):
        _require_gpu(parser)
    if options.script:
        return show(options)
    results = run_all(options)
    tell(results, options)
    return int(any(result["kind"] not in RIGHT for result in results))


def _require_gpu(parser: argparse.ArgumentParser) -> None:
    """End with an error if there is no GPU: drawing a program for one would try seed after seed without end."""
    import torch

    if not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU, and a seed's program depends on what runs on one")


def show(options: argparse.Namespace) -> int:
    """Print a program as a self-contained file."""
    from tests.programs.draw import draw

    program = reported(options.source).get(options.seed) or draw(options.seed, options.device, short=options.short)
    print(program.script(f"seed {options.seed}", options.device))
    return 0


@cache
def reported(path: Path | None) -> dict[int, Any]:
    """Return the programs of a report by seed."""
    from tests.programs.program import Program

    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    return {result["seed"]: Program(**result["program"]) for result in map(json.loads, lines) if "program" in result}


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Judge every seed on the workers; return the results in the order in which they finish."""
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in reported(options.source) or range(options.seed, options.seed + options.count):
        seeds.put(seed)
    results: list[dict[str, Any]] = []
    ends = time.monotonic() + options.seconds
    threads = [threading.Thread(target=feed, args=(job, seeds, results, options, ends)) for job in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def feed(
    job: int, seeds: queue.SimpleQueue[int], results: list[dict[str, Any]], options: argparse.Namespace, ends: float
) -> None:
    """Give seeds to one worker, replacing its process when needed, until no seed or time is left."""
    worker = None
    while time.monotonic() < ends:
        try:
            seed = seeds.get_nowait()
        except queue.Empty:
            break
        if worker is None:
            worker = Worker(job, options)
        result = worker.judge(seed, options.limit, 3 * options.limit + 3 * options.shrink, ends)
        lost = result is None or result.pop("unfinished", False)
        if lost or worker.done >= 60:  # compiled code stays in a process's memory
            worker.end()
        if result is None:
            if worker.timed_out and time.monotonic() >= ends:
                break
            kind = "timeout" if worker.timed_out else "crash"
            result = {"seed": seed, "kind": kind, "message": worker.last_words(), "seconds": options.limit}
        if lost or worker.done >= 60:
            worker = None
        results.append(result)
        if result["kind"] not in RIGHT:
            print(f"{result['seed']}: {result['kind']}: {result['message'][:300]}", flush=True)
        if options.report:
            with options.report.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        if len(results) % 100 == 0:
            print(f"{len(results)} programs", flush=True)
    if worker is not None:
        worker.end()


class Worker:
    """A process that judges the seeds written to it."""

    def __init__(self, job: int, options: argparse.Namespace) -> None:
        given = ["--device", options.device, "--shrink", str(options.shrink), "--jobs", str(options.jobs)]
        given += ["--short"] if options.short else []
        given += ["--from", str(options.source)] if options.source else []
        given += ["--beside-inductor"] if options.beside_inductor else []
        given += ["--triton"] if options.triton else []
        environment = {
            "OMP_NUM_THREADS": "1",
            "OVERLAPC_WARM_START": "0",
            "MALLOC_PERTURB_": "85",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            **os.environ,
        }
        if options.gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(job % options.gpus)
        self.errors = (Path(os.environ.get("TMPDIR", "/tmp")) / f"random_programs_{os.getpid()}_{id(self)}").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(job), *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            start_new_session=True,
        )
        self.done, self.timed_out = 0, False

    def judge(self, seed: int, limit: float, limit_to_shrink: float, ends: float) -> dict[str, Any] | None:
        """Return the verdict on `seed`, or None if the process died or took too long. If that happened while it was
        shrinking a failure, return the failure as first seen."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{seed}\n".encode())
        self.process.stdin.flush()
        if self.done == 0:
            limit += 60  # the process has yet to start
        self.done += 1
        line = self.line(min(limit, ends - time.monotonic()))
        result = json.loads(line) if line.startswith(b"{") else None
        if result and result.get("unfinished"):
            line = self.line(min(limit_to_shrink, ends - time.monotonic()))
            result = json.loads(line) if line.startswith(b"{") else result
        return result

    def line(self, seconds: float) -> bytes:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, seconds)):
                self.timed_out = True
                return b""
        return self.process.stdout.readline()

    def end(self) -> None:
        """Kill the process and the compilers that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        self.errors.seek(0)
        return f"exit code {self.process.returncode}: " + self.errors.read().decode(errors="replace")[-1500:]


def work(options: argparse.Namespace) -> int:
    """Run a worker: read seeds from stdin, write verdicts to stdout."""
    import torch

    import overlapc  # noqa: F401 (registers the backend, also where the package is not installed)

    logging.disable(logging.WARNING)
    if options.jobs > 1:  # one core per worker: the C++ compiler then runs once per graph, not once per core
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[options.worker % len(cores)]})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of programs and compilers must not mix with verdicts
    for line in sys.stdin:
        began = time.monotonic()
        result = verdict_on(int(line), options, out)
        result["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(result), file=out, flush=True)
    return 0


def verdict_on(seed: int, options: argparse.Namespace, out: Any) -> dict[str, Any]:
    from tests.programs.by_triton import judge_triton
    from tests.programs.draw import draw
    from tests.programs.judge import Verdict, by_aot_eager, by_inductor
    from tests.programs.judge import judge as judge_generated
    from tests.programs.shrink import shrink

    judge = judge_triton if options.triton else judge_generated
    program = reported(options.source).get(seed) or draw(seed, options.device, short=options.short)
    verdict = judge(program, options.device)
    result = {"seed": seed, "kind": verdict.kind, "message": verdict.message, "statements": len(program.body)}
    result |= {"dynamic": program.dynamic, "backward": bool(program.leaves)}
    if not verdict.wrong:
        return result
    first = result | {"unfinished": True, "program": asdict(program), "code": program.code(), "seconds": 0}
    print(json.dumps(first), file=out, flush=True)
    traced = judge(program, options.device, by_aot_eager)
    result["tracing"] = "wrong" if traced.wrong else "right"
    if verdict.kind == "error" and traced.what == verdict.what:  # raised before any backend sees a graph
        return result | {"program": asdict(program), "code": program.code(), "inductor": "as aot_eager"}
    if options.beside_inductor:
        beside = judge(program, options.device, by_inductor)
        result |= {"inductor": beside.kind, "inductor_message": beside.message}

    def judged(candidate: Any, device: str) -> Verdict:
        ours = judge(candidate, device)
        ask = ours.what == verdict.what and options.beside_inductor and not beside.wrong
        if ask and judge(candidate, device, by_inductor).wrong:
            return Verdict("right")  # not the failure that is being shrunk
        return ours

    if traced.wrong and (not options.beside_inductor or beside.wrong):
        small = program  # wrong before any backend sees a graph, so it is torch's own failure
    else:
        small = shrink(program, verdict, options.device, options.shrink, judged)
    return result | {"program": asdict(small), "code": small.code(), "small": judge(small, options.device).message}


def tell(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print every failure, and counts by verdict."""
    rows: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for result in results:
        beside = (
            ("", "") if result["kind"] in RIGHT else (result.get("tracing", ""), result.get("inductor", "not asked"))
        )
        rows[(result["kind"], *beside)] += 1
    table = [(*row, count) for row, count in sorted(rows.items())]
    failures = sorted((result for result in results if result["kind"] not in RIGHT), key=lambda x: x["message"])
    for result in failures:
        print(
            f"\n=== seed {result['seed']}: {result['kind']}, Inductor {result.get('inductor', 'not asked')},"
            f" aot_eager {result.get('tracing', 'not asked')}"
        )
        print(result["message"][:1500])
        print(result.get("code", ""))
    print(tabulate(table, ["verdict", "aot_eager", "Inductor", "programs"]))
    total = sum(result["seconds"] for result in results)
    print(
        f"{len(results)} programs on {options.device}, {total / max(1, len(results)):.1f} s each, {options.jobs} jobs"
    )


if __name__ == "__main__":
    sys.exit(main())
