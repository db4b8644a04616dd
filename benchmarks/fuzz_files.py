"""Damage files that people exchange: every command that reads one must accept it or refuse it with a short message.

    python benchmarks/fuzz_files.py --each 250 [--seed 0] [--kinds schedule,record] [--keep DIR]

A file of each kind (schedule, record, profile, trace, cache entry) is mutated, and a command reads it in a forked
process, with at most 10 s of CPU time. A file is refused with exit code 2 and a short message, or 1 if a plan does not
fit its memory; a traceback, any other exit code, a signal, a message longer than 2,000 characters, and 2 GiB of memory
are failures. A program that finds a damaged cache entry must compute eager's results. One in 50 commands runs in a new
process from the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from overlapc import documents
from overlapc.config import Config
from overlapc.launch import cli
from overlapc.launch.plan import plan_text
from overlapc.report import html, trace  # noqa: F401 - imported before the forks, as are the next modules
from overlapc.report.model import Measured
from overlapc.report.record import Report

CPU_S = 10
MEMORY_BYTES = 2 * 2**30
MESSAGE = 2000
HANG_S = 300  # wall time, because the machine may be busy

SCHEDULE = """\
schedule step budget=64MiB
%p0 = input freeable : 1MiB
%p1 = input : 1MiB
%x = input : 4MiB
ag0 = all_gather(%p0) @dp(2) dtype=bf16 ranks=0-1 unit=layers.0 channels=4 : 2MiB  100us [table h200-nvlink]
%w0 = wait(ag0)
h0 = extern:mm(%x, %w0) flops=68719476736 read=6MiB write=4MiB in=bf16 scratch=1MiB : 4MiB  80us [roofline]
k0 = kernel:add(h0, %x) read=8MiB write=4MiB form=rows : 4MiB
ag1 = all_gather(%p1) @dp(2) after=k0 : 2MiB  100us [table h200-nvlink]
%w1 = wait(ag1)
h1 = extern:mm(k0, %w1) flops=68719476736 read=6MiB write=4MiB in=bf16 : 4MiB
v0 = view(h1)
u0 = kernel:update(v0, h0) mutates=h0 node=step_0 : =h0
rs0 = reduce_scatter(h1) @"a group"(2) moves=4MiB collective=reduce_scatter : 2MiB  90us
%w2 = wait(rs0)
ar0, ar1 = all_reduce(%w2, u0) @tp(4) ranks=0-3 : 2MiB, 4MiB
%w3, %w4 = wait(ar0, ar1)
c0 = comm:unknown(%w3) @pp safe=yes : none
n0 = noop(%w4) : none
return %w3, %w4, h1
"""


def record_of(text: str) -> Report:
    """Plan the schedules in `text`; return the report as if it had been measured."""
    report = plan_text(text, Config(profile="h200-nvlink"))
    (step,) = report.steps
    graphs = []
    for graph in step.graphs:
        spans = {span.node: span.end_ns - span.start_ns for span in graph.after.spans if span.kind != "idle"}
        nodes = {name: 1.1 * ns for name, ns in spans.items() if ns > 0}
        times = Measured(3, graph.after.step_ns * 1.1, 3e5, 2e5, 1e5, 1e4, nodes, dict.fromkeys(nodes, 0.5), 100.0)
        graphs.append(replace(graph, measured=times))
    return Report((replace(step, graphs=tuple(graphs), measured_peak_bytes=2**25),))


def trace_of(report: Report) -> str:
    """Return a profiler's trace of two runs of the report's graphs on a GPU."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
    at = 0.0
    for number in range(2):
        for graph in report.steps[0].graphs:
            for node in dict.fromkeys(span.node for span in graph.after.spans if span.kind != "idle"):
                correlation = len(events)
                mark = {"ph": "X", "cat": "user_annotation", "name": f"overlapc/{graph.name}/launch/1/{node}"}
                events += [
                    mark | {"ts": at, "dur": 5.0, "tid": 1, "pid": 1, "args": {"External id": correlation}},
                    {
                        "ph": "X",
                        "cat": "cuda_runtime",
                        "name": "cudaLaunchKernel",
                        "ts": at + 1,
                        "dur": 2.0,
                        "tid": 1,
                        "args": {"correlation": correlation},
                    },
                    {
                        "ph": "X",
                        "cat": "kernel",
                        "name": "k",
                        "ts": at + 9,
                        "dur": 20.0 + number,
                        "tid": 7,
                        "args": {"correlation": correlation, "External id": correlation},
                    },
                ]
                at += 40.0
    return json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": events})


# --- mutations: each returns changed bytes


def _number(rng: random.Random) -> str:
    return rng.choice(
        [
            "0",
            "-1",
            "-0.0",
            "1e308",
            "1e999",
            "-1e999",
            "NaN",
            "Infinity",
            "1e-300",
            "2147483648",
            "9223372036854775808",
            "18446744073709551616",
            "1" * 5000,
            "0." + "3" * 5000,
            "0-4000000000",
            "4000000000",
            "1.5",
            "0x10",
            "١٢",
        ]
    )


def flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def insert_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    what = rng.choice([b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", "\u2028".encode(), b"\\", b'"'])
    return data[:at] + what + data[at:]


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def repeat_slice(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at : at + rng.choice([3, 30, 300])] * rng.choice([2, 20, 1000]) + data[at:]


def drop_slice(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice([1, 5, 50]) :]


def swap_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def other_number(data: bytes, rng: random.Random) -> bytes:
    """Replace a number in the text by one that is out of range."""
    text = data.decode()
    starts = [at for at, each in enumerate(text) if each.isdigit() and (not at or not text[at - 1].isalnum())]
    if not starts:
        return flip(data, rng)
    at = end = rng.choice(starts)
    while end < len(text) and text[end].isdigit():
        end += 1
    return (text[:at] + _number(rng) + text[end:]).encode()


def other_word(data: bytes, rng: random.Random) -> bytes:
    text = data.decode().split(" ")
    text[rng.randrange(len(text))] = rng.choice(
        [
            "x" * 100_000,
            "@dp(" + "9" * 5000 + ")",
            "ranks=0-4000000000",
            "ranks=" + "0-1048575," * 50 + "1",
            "=",
            ":",
            '"\\q"',
            '"\\ud800"',
            "-",
            "%",
            "nan",
            "1e999GiB",
            "1e999s",
            "budget=1e999GiB",
            "flops=" + "9" * 400,
            "",
        ]
    )
    return " ".join(text).encode()


def nothing_like_it(data: bytes, rng: random.Random) -> bytes:
    deep = b"[" * 200_000
    return rng.choice(
        [
            b"",
            b"\n" * 100_000,
            deep,
            b'{"a":' * 200_000,
            b'{"overlapc_record": 1, "steps": ' + deep,
            rng.randbytes(5000),
            b'{"traceEvents": ' + deep,
            b"null",
            b"{}",
            b"[]",
            b'""',
            b"\x1f\x8b" + rng.randbytes(100),
        ]
    )


ANY = (flip, insert_bytes, truncate, repeat_slice, drop_slice, swap_lines, other_number, nothing_like_it)


def json_value(data: bytes, rng: random.Random) -> bytes:
    """Replace, remove, double or rename a value somewhere in the document."""
    document = json.loads(data)
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            places.append((value, key))
            visit(value[key])

    visit(document)
    inside, key = rng.choice(places)
    how = rng.randrange(8)
    if how == 0:
        del inside[key]
    elif how == 1 and isinstance(inside, dict):
        inside[rng.choice(["x" * 10_000, "", "name", str(key) + "s", "\x00"])] = inside.pop(key)
    elif how == 2 and isinstance(inside, list):
        inside[:] = inside * rng.choice([2, 50])
    else:
        inside[key] = rng.choice(
            [
                None,
                "",
                "x" * 10_000,
                -1,
                0,
                -1.0,
                1e308,
                -1e308,
                2**31,
                2**63,
                2**70,
                10**400,
                True,
                [],
                {},
                [[]],
                {"": 0},
                [0] * 1000,
                "<script>",
                "nan",
                "../../x",
                0.5,
                1e-300,
                float("nan"),
                float("inf"),
                SCHEDULE,
                "\ud800",
                1e17,
            ]
        )
    return json.dumps(document).encode()


JSON = (json_value,) * 12  # as likely as all other mutations
TEXT = (other_word,) * 6


# --- commands and programs that read the files


@dataclass
class Seeds:
    """Undamaged files by kind, and a folder for the commands' output."""

    folder: Path
    texts: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path) -> Seeds:
        report = record_of(SCHEDULE)
        profiles = Path(documents.__file__).parent / "estimators" / "profiles"
        seeds = cls(folder)
        seeds.texts = {
            "schedule": SCHEDULE.encode(),
            "record": report.to_json().encode(),
            "trace": trace_of(report).encode(),
            "profile": (profiles / "h200-nvlink.json").read_bytes(),
            "small profile": (profiles / "cpu-gloo.json").read_bytes(),
        }
        for kind in ("schedule", "record", "trace"):
            (folder / f"whole.{kind}").write_bytes(seeds.texts[kind])
        return seeds

    def command(self, kind: str, file: Path, rng: random.Random) -> list[str]:
        """Return a random command that reads the file."""
        at = str(file)
        schedule, record = str(self.folder / "whole.schedule"), str(self.folder / "whole.record")
        names = ("report.html", "trace.pftrace", "schedule.txt", "record.json", "table.txt")
        save = [part for name in names for part in ("--save", str(self.folder / "out" / name))]
        out = ["--out", str(self.folder / "out" / "fitted.json")]
        ways = {
            "schedule": [
                ["plan", at],
                ["plan", at, "--passes", "none", *save],
                ["plan", at, "--profile", "h200-nvlink", *save],
            ],
            "record": [
                ["report", at],
                ["report", at, "--all"],
                ["report", at, *save],
                ["calibrate", "--from", at, *out],
                ["plan", schedule, "-o", f"estimates={at}"],
            ],
            "trace": [["report", record, "--profile", at], ["plan", schedule, "-o", f"estimates={at}", *save]],
            "profile": [
                ["plan", schedule, "--profile", at],
                ["plan", schedule, "-o", f"profile={at}", *save],
                ["calibrate", "--from", record, "--profile", at, *out],
            ],
        }
        return rng.choice(ways[kind.removeprefix("small ")])


PROGRAMS: tuple[Callable[..., torch.Tensor], ...] = (lambda x: x.sin() + 1, lambda x: x.cos() * 2 + x.tan())


def run_programs(cache: Path) -> int:
    """Run compiled programs with this cache; return 0 if they compute eager's results, or 3."""
    from overlapc.runtime import cpp_launch
    from overlapc.warm import cached_graph, cached_step

    for each in (cached_graph._cache, cached_step._cache, cpp_launch._cache, cpp_launch._files):
        each.cache_clear()
    torch._dynamo.reset()
    x = torch.linspace(0, 1, 64)
    options = {"cache_dir": str(cache), "warm_start": True, "profile": "cpu-gloo"}
    for program in PROGRAMS:
        if not torch.allclose(torch.compile(program, backend="overlapc", options=options)(x), program(x), atol=1e-6):
            print("WRONG NUMBERS", file=sys.stderr)
            return 3
    return 0


def damage(cache: Path, rng: random.Random) -> None:
    """Replace or damage an entry, a checksum file, a lock or a folder of the cache, or exchange two entries."""
    paths = sorted(path for path in cache.rglob("*") if not path.name.startswith("."))
    path = rng.choice(paths)
    how = rng.choice(["bytes", "bytes", "bytes", "gone", "folder", "loop", "pipe", "swap", "mode", "empty"])
    if how == "swap":
        files = [each for each in paths if Path(f"{each}.sha256").is_file()]
        one, other = rng.sample(files, 2)
        for end in ("", ".sha256"):
            first, second, aside = Path(f"{one}{end}"), Path(f"{other}{end}"), cache / "aside"
            first.rename(aside)
            second.rename(first)
            aside.rename(second)
        return
    if how == "mode":
        path.chmod(rng.choice([0o777, 0o666, 0o1777]))
        return
    if how in ("bytes", "empty"):
        path = rng.choice([each for each in paths if each.is_file() and each.stat().st_size])
        path.write_bytes(b"" if how == "empty" else rng.choice(ANY[:6])(path.read_bytes(), rng))
        return
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how == "folder":
        (path / "with" / "a").mkdir(parents=True)
    elif how == "loop":
        path.symlink_to(path)
    elif how == "pipe":
        os.mkfifo(path)


# --- runs


@dataclass
class Tally:
    """Results of the mutations of one kind."""

    ends: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    most_bytes: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class End:
    """How a process ended."""

    status: str  # "refused", "taken" (accepted), or what is wrong
    cpu_s: float
    peak_bytes: int
    said: str


def in_fork(run: Callable[[], int], errors: Path) -> End:
    """Run `run` in a fork of this process."""
    child = os.fork()
    if not child:
        with errors.open("wb") as file, open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(file.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("ignore")
        code = 1
        try:
            code = run()
        except BaseException:  # noqa: BLE001 - every exception is a finding
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    until = time.monotonic() + HANG_S
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    said = errors.read_bytes().decode(errors="replace")
    return End(
        judged(os.waitstatus_to_exitcode(status), said), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, said
    )


def in_process(command: Sequence[str]) -> End:
    """Run the command from the command line, in a new process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "overlapc.launch.cli", *command], capture_output=True, timeout=HANG_S)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = done.stderr.decode(errors="replace")
    return End(judged(done.returncode, said), used.ru_utime - before.ru_utime, 0, said)


def judged(code: int, said: str) -> str:
    if "Traceback (most recent" in said:
        return "traceback"
    if code == 0:
        return "taken"
    does_not_fit = code == 1 and said.startswith("overlapc: ") and "memory_budget" in said
    if does_not_fit or (code == 2 and said.strip()):
        return "refused" if len(said) <= MESSAGE else "long message"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--each", type=int, default=250, help="mutations of each kind (default: 250)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="schedule,record,profile,trace,cache")
    parser.add_argument("--keep", type=Path, help="folder for files whose commands failed")
    given = parser.parse_args()
    tallies = {kind: Tally() for kind in given.kinds.split(",")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "out").mkdir()
        seeds = Seeds.make(folder)
        cache = folder / "cache"
        if "cache" in tallies:
            assert run_programs(cache) == 0
        for kind, tally in tallies.items():
            for number in range(given.each):
                rng = random.Random(f"{given.seed} {kind} {number}")
                file = folder / "mutated.json"
                if kind == "cache":
                    damaged = folder / "damaged"
                    shutil.copytree(cache, damaged)
                    damage(damaged, rng)
                    command = ["cache", str(number)]
                    end = in_fork(lambda damaged=damaged: run_programs(damaged), folder / "errors")
                    shutil.rmtree(damaged)
                else:
                    of = "small profile" if kind == "profile" and rng.random() < 0.5 else kind
                    mutators = (*ANY, *(TEXT if kind == "schedule" else JSON))
                    data = rng.choice(mutators)(seeds.texts[of], rng)
                    file.write_bytes(data)
                    command = seeds.command(of, file, rng)
                    if number % 50 == 49:
                        end = in_process(command)
                    else:
                        end = in_fork(lambda command=command: cli.main(command), folder / "errors")
                tally.ends[end.status] += 1
                tally.longest_s = max(tally.longest_s, end.cpu_s)
                tally.most_bytes = max(tally.most_bytes, end.peak_bytes)
                if end.status not in ("refused", "taken") or end.peak_bytes > MEMORY_BYTES:
                    tally.failures.append(f"{kind} {number}: {end.status}: {' '.join(command)}\n{end.said[-1500:]}")
                    print(tally.failures[-1], flush=True)
                    if given.keep is not None and kind != "cache":
                        given.keep.mkdir(parents=True, exist_ok=True)
                        shutil.copy(file, given.keep / f"{kind}-{number}")
    rows = [
        (
            kind,
            each.ends.total(),
            each.ends["refused"],
            each.ends["taken"],
            each.ends["traceback"],
            each.ends.total() - each.ends["refused"] - each.ends["taken"] - each.ends["traceback"],
            f"{each.longest_s:.1f} s",
            f"{each.most_bytes / 2**30:.2f} GiB",
        )
        for kind, each in tallies.items()
    ]
    headers = (
        "kind",
        "mutations",
        "refused with one line",
        "accepted",
        "tracebacks",
        "other failures",
        "longest",
        "most memory",
    )
    print(tabulate(rows, headers, tablefmt="github"))
    return int(any(each.failures for each in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
