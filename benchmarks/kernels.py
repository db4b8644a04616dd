"""Generated kernels as they occur in training: overlapc beside Inductor and eager, in one alternating run.

    python benchmarks/kernels.py --prepare 12 --json kernels.json           # one GPU, about four minutes
    python benchmarks/kernels.py --device cpu --size small                  # this machine's cores
    python benchmarks/kernels.py --cases 'softmax|cross' --systems overlapc,inductor --profile --json slow.json
    python benchmarks/kernels.py --device cpu --size tiny --host-only --threads 1   # what calls cost the host
    python benchmarks/kernels.py --autotune --cases 'Norm|RoPE'             # and with measured block sizes

The list is kernel_cases.py. On a GPU a case is timed twice: with launches hidden (calls queued behind a held stream,
device time between two events) and with them (until the device is idle again). `share` is the least bytes the case
must move over the hidden time, relative to a device copy of 1 GiB in the same run. `host` is what one forward +
backward call through autograd keeps the host busy, with the device held. On a CPU there is one time, the call's; CPU
time where there is one thread.

Every result is compared with a float64 run: it may be off by at most twice what eager is off.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch._functorch import config as functorch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import overlapc
from benchmarks.kernel_cases import BACKWARD, BOTH, FORWARD, PROBLEMS, RARE, SCALES, Inputs, Problem
from overlapc.errors import OverlapcError
from overlapc.report import record as reports

TUNED = "overlapc-tuned"
SYSTEMS = ("overlapc", "inductor", "eager")
SHOWN = ("overlapc", TUNED, "inductor", "eager")
NOT_CHECKED = "not checked"
CALLS = 10  # queued behind one held stream


# --- what is run


class Subject:
    """One problem under one system: a callable for each kind."""

    def __init__(self, problem: Problem, system: str, name: str) -> None:
        functorch.donated_buffer = False  # a backward is timed again and again on what forward saved
        self.problem = replace(problem, inputs=_own_inputs(problem))
        function = _copied(problem.function, re.sub(r"[^a-zA-Z0-9]+", "_", f"{name}_{system}"))
        self.function = (
            function
            if system == "eager"
            else torch.compile(function, backend=_backend(system), dynamic=False, options=_options(system))
        )
        self.leaves = [self.problem.inputs[at] for at in problem.gradients]
        self.tangents: list[Tensor] = []
        self.kept: list[Tensor] = []

    def forward(self) -> Any:
        if self.leaves:
            return self.function(*self.problem.inputs)
        with torch.no_grad():
            return self.function(*self.problem.inputs)

    def backward(self) -> tuple[Tensor, ...]:
        """Of a forward run that stays alive."""
        if not self.kept:
            self.kept = self._results()
        return torch.autograd.grad(self.kept, self.leaves, self.tangents, retain_graph=True)

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._results(), self.leaves, self.tangents)

    def call(self, kind: str) -> Callable[[], Any]:
        return {FORWARD: self.forward, BACKWARD: self.backward, BOTH: self.both}[kind]

    def results(self) -> list[Tensor]:
        """Everything the problem computes: outputs, changed inputs, gradients."""
        found = [leaf for leaf in pytree.tree_leaves(self.forward()) if isinstance(leaf, Tensor)]
        if self.problem.mutates:
            found += self.problem.tensors()
        return [*found, *self.both()] if self.leaves else found

    def _results(self) -> list[Tensor]:
        found = [leaf for leaf in pytree.tree_leaves(self.forward()) if leaf.requires_grad]
        if not self.tangents:
            torch.manual_seed(7)
            self.tangents = [torch.randn(leaf.shape, device=leaf.device).to(leaf.dtype) for leaf in found]
        return found


def _options(system: str) -> dict[str, bool] | None:
    return {"autotune": True} if system == TUNED else None


def _backend(system: str) -> Any:
    if not system.startswith("overlapc"):
        return system
    from overlapc.backend import overlapc as backend  # by function: the package need not be installed

    return backend


def _own_inputs(problem: Problem) -> tuple[Any, ...]:
    """Leaves of their own for a system that changes or differentiates them; the others are shared."""
    if problem.mutates:
        return pytree.tree_map_only(Tensor, torch.clone, problem.inputs)
    return tuple(
        value.detach().clone().requires_grad_() if at in problem.gradients else value
        for at, value in enumerate(problem.inputs)
    )


def _copied(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` with a code object of its own, so that no system sees what Dynamo noted for another."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def checked(problem: Problem, subject: Subject, eager: Subject, reference: Sequence[Tensor]) -> str:
    """ "ok", or what is wrong with the results of `subject`."""
    results = subject.results()
    if problem.random is not None:
        return problem.random(problem, results[0].detach()) or "ok"
    for at, (result, standard, exact) in enumerate(zip(results, eager.results(), reference, strict=True)):
        if result.shape != standard.shape or result.dtype != standard.dtype:
            return f"result {at}: {result.dtype} {tuple(result.shape)}"
        if not result.dtype.is_floating_point:
            equal = (result == standard).float().mean().item()
            if equal < 0.9999:
                return f"result {at}: {equal:.4%} equal eager's"
            continue
        error, allowed = _error(result, exact), 2 * _error(standard, exact) + 1e-5
        if not error <= allowed:
            return f"result {at}: error {error:.2g}, allowed {allowed:.2g}"
    return "ok"


def _error(result: Tensor, exact: Tensor) -> float:
    exact = exact.detach().double()
    return ((result.detach().double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def _reference(problem: Problem, name: str) -> list[Tensor]:
    """Results of a float64 run, none for a random problem."""
    if problem.random is not None:
        return []
    wide = pytree.tree_map_only(
        Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, problem.inputs
    )
    subject = Subject(replace(problem, inputs=wide), "eager", name)
    eager = Subject(problem, "eager", name)
    if problem.gradients:  # the tangents that eager sees
        eager.both()
        subject.tangents = [tangent.double() for tangent in eager.tangents]
    return [result.detach() for result in subject.results()]


# --- timing


@dataclass
class Times:
    """Seconds a call, a sample a round."""

    hidden: list[float] = field(default_factory=list)
    launched: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    waits: bool = False  # the call waits for the device: its launches are not hidden


class GpuClock:
    """Device time of calls queued behind a held stream."""

    def __init__(self) -> None:
        self.cycles = 2_000_000
        self.waiting: set[Callable[[], Any]] = set()  # calls in which the host waits for the device

    def queued(self, call: Callable[[], Any]) -> tuple[float, float]:
        """(device seconds a call, host seconds a call), the host never waiting for the device.

        Of a call that waits for the device itself, both times hold its launches.
        """
        while True:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            if call not in self.waiting:
                torch.cuda._sleep(self.cycles)
            start.record()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            host = time.perf_counter() - began
            held = not start.query()
            end.record()
            torch.cuda.synchronize()
            if held or call in self.waiting:
                return start.elapsed_time(end) / CALLS / 1e3, host / CALLS
            if self.cycles > 5e8:
                self.waiting.add(call)
                self.cycles = 2_000_000
            else:
                self.cycles *= 2

    def launched(self, call: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / CALLS


def on_gpu(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    clock = GpuClock()
    times = {system: Times() for system in calls}
    for number in range(rounds + 1):  # the first is a warm-up, and finds how long to hold the stream
        for system, call in calls.items():
            hidden, host = clock.queued(call)
            launched = clock.launched(call)
            if number:
                times[system].hidden.append(hidden)
                times[system].host.append(host)
                times[system].launched.append(launched)
    for system, call in calls.items():
        times[system].waits = call in clock.waiting
    return times


def on_cpu(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    """A sample is the mean of as many calls as take two milliseconds.

    With one thread it is CPU time of that thread, which other work on the machine does not lengthen much.
    """
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    repeats: dict[str, int] = {}
    for system, call in calls.items():
        call()
        began = time.perf_counter()
        call()
        repeats[system] = max(1, round(2e-3 / max(time.perf_counter() - began, 1e-6)))
    times = {system: Times() for system in calls}
    for _ in range(rounds):
        for system, call in calls.items():
            began = now()
            for _ in range(repeats[system]):
                call()
            times[system].launched.append((now() - began) / repeats[system])
    for each in times.values():
        each.hidden = each.launched
    return times


def copy_bandwidth() -> float:
    """Bytes a second, reads and writes counted, of a device-to-device copy of 1 GiB."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    clock = GpuClock()
    seconds = [clock.queued(lambda: target.copy_(source))[0] for _ in range(7)]
    return 2 * source.nbytes / statistics.median(seconds)


def profiled(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """Device kernels of one call in order of their time: name, microseconds."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for event in recorded.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            totals[event.name()] = totals.get(event.name(), 0.0) + event.duration_ns() / 3e3
    return sorted(totals.items(), key=lambda item: -item[1])


# --- one problem, all systems


@dataclass
class Result:
    """A case's medians in microseconds, by system."""

    case: str
    check: str
    least_bytes: int
    matmul_bound: bool
    hidden_us: dict[str, float]
    launched_us: dict[str, float]
    host_us: dict[str, float]  # of forward + backward, for trained problems
    host_least_us: dict[str, float]  # the same, the least sample: what the host itself adds is not in it
    profile: dict[str, list[tuple[str, float]]]
    tuned: list[str]  # what was measured of its kernels' block sizes, a line a graph

    def speed(self, times: dict[str, float], other: str = "inductor") -> float | None:
        """How many times as fast as `other` ours is."""
        if "overlapc" not in times or other not in times:
            return None
        return times[other] / times["overlapc"]


def least_bytes(problem: Problem, kind: str, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> int:
    """Every input and every output once, unless the problem knows of less."""
    if kind in problem.least:
        return problem.least[kind]
    inputs = sum(tensor.nbytes for tensor in problem.tensors())
    written = sum(tensor.nbytes for tensor in outputs)
    found = sum(tensor.nbytes for tensor in gradients)
    backward = inputs + written + found  # the inputs, or results as large, and the outputs' gradients
    return {FORWARD: inputs + written, BACKWARD: backward, BOTH: inputs + written + backward}[kind]


def measured(name: str, make: Callable[[Inputs], Problem], arguments: argparse.Namespace) -> list[Result]:
    torch.manual_seed(0)
    reports.clear()
    problem = make(Inputs(SCALES[arguments.size], arguments.device))
    kinds = problem.kinds
    if arguments.host_only:
        kinds = (BOTH,) if problem.gradients else ()
    if not kinds:
        return []
    subjects, failed = {}, []
    eager = Subject(problem, "eager", name)
    reference = _reference(problem, name) if arguments.check else []
    for system in arguments.systems:
        subject = eager if system == "eager" else Subject(problem, system, name)
        try:
            if system != "eager" and arguments.check:
                verdict = checked(problem, subject, Subject(problem, "eager", name), reference)
                if verdict != "ok":
                    failed.append(f"{system}: {verdict}")
            for kind in kinds:
                subject.call(kind)()
        except (RuntimeError, OverlapcError, NotImplementedError) as error:
            failed.append(f"{system}: {type(error).__name__}: {str(error).strip().splitlines()[0][:80]}")
            continue
        subjects[system] = subject
    del reference
    if arguments.compile_only:
        return []
    outputs = [leaf for leaf in pytree.tree_leaves(eager.forward()) if isinstance(leaf, Tensor)]
    gradients = eager.both() if problem.gradients else ()
    clock = on_cpu if arguments.device == "cpu" else on_gpu
    samples: dict[str, list[float]] = {}
    both: dict[str, Times] = {}
    if problem.gradients:
        both = clock({system: subject.both for system, subject in subjects.items()}, arguments.rounds)
        samples = {system: each.host or each.launched for system, each in both.items()}
    host = {system: 1e6 * statistics.median(each) for system, each in samples.items()}
    least = {system: 1e6 * min(each) for system, each in samples.items()}
    compiled = (graph for step in reports.report_of_process().steps for graph in step.graphs)
    tuned = [f"{graph.name}: {graph.tuned}" for graph in compiled if graph.tuned]
    results = []
    for kind in kinds:
        calls = {system: subject.call(kind) for system, subject in subjects.items()}
        times = both if arguments.host_only else clock(calls, arguments.rounds)
        waits = [f"{system} waits for the device" for system, each in times.items() if each.waits]
        results.append(
            Result(
                f"{name} {kind}" if problem.gradients else name,
                "; ".join([*failed, *waits]) or ("ok" if arguments.check else NOT_CHECKED),
                least_bytes(problem, kind, outputs, gradients),
                problem.matmul_bound,
                {system: 1e6 * statistics.median(each.hidden) for system, each in times.items()},
                {system: 1e6 * statistics.median(each.launched) for system, each in times.items()},
                host,
                least,
                {system: profiled(call) for system, call in calls.items()} if arguments.profile else {},
                tuned,
            )
        )
    return results


# --- the report


def geometric_mean(numbers: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, numbers)) / len(numbers)) if numbers else float("nan")


def table(results: Sequence[Result], bandwidth: float | None) -> str:
    systems = [system for system in SHOWN if any(system in result.hidden_us for result in results)]
    headers = ["case"]
    if bandwidth is not None:
        headers += [f"{system} share" for system in systems if system != "eager"]
    headers += [f"{system} us" for system in systems] + ["x inductor", "x eager", "check"]
    if bandwidth is not None:
        headers.insert(-1, "launched x ind.")
    rows = []
    for result in results:
        row: list[Any] = [result.case]
        if bandwidth is not None:
            row += [share(result, system, bandwidth) for system in systems if system != "eager"]
        row += [result.hidden_us.get(system) for system in systems]
        row += [result.speed(result.hidden_us), result.speed(result.hidden_us, "eager")]
        if bandwidth is not None:
            row.append(result.speed(result.launched_us))
        rows.append([*(_shown(item) for item in row), result.check])
    return tabulate(rows, headers=headers)


def _shown(item: Any) -> str:
    if item is None:
        return "-"
    if isinstance(item, str):
        return item
    return f"{item:.1f}" if item >= 10 else f"{item:.2f}"


def share(result: Result, system: str, bandwidth: float) -> float | None:
    """Least bytes over time, in percent of a device copy."""
    if system not in result.hidden_us:
        return None
    return 100 * result.least_bytes / (result.hidden_us[system] / 1e6) / bandwidth


def summary(results: Sequence[Result], bandwidth: float | None) -> str:
    lines = [f"{len(results)} cases"]
    if bandwidth is not None:
        for system in SHOWN:
            of_all = [each for result in results if (each := share(result, system, bandwidth)) is not None]
            bound = [
                each
                for result in results
                if not result.matmul_bound and (each := share(result, system, bandwidth)) is not None
            ]
            if not of_all:
                continue
            lines.append(
                f"{system}: {geometric_mean(of_all):.1f}% of copy bandwidth in geometric mean"
                f" ({geometric_mean(bound):.1f}% without the matmuls)"
            )
    for other in ("inductor", "eager"):
        for label, pick in (("hidden", "hidden_us"), ("with launches", "launched_us")):
            speeds = [each for result in results if (each := result.speed(getattr(result, pick), other)) is not None]
            if speeds:
                lines.append(
                    f"times {other}'s speed, {label}: {geometric_mean(speeds):.3f} in geometric mean,"
                    f" worst {min(speeds):.2f}"
                )
    slow = [
        (each, result.case)
        for result in results
        if (each := result.speed(result.hidden_us)) is not None and each < 0.95
    ]
    lines.append(
        "below 0.95 of inductor: " + (", ".join(f"{name} {each:.2f}" for each, name in sorted(slow)) or "none")
    )
    gains = {
        result.case: result.hidden_us["overlapc"] / result.hidden_us[TUNED]
        for result in results
        if {"overlapc", TUNED} <= set(result.hidden_us)
    }
    if gains:
        changed = [f"{name} {gain:.2f}" for name, gain in sorted(gains.items(), key=lambda item: -item[1])]
        lines.append(
            f"with measured block sizes: {geometric_mean(list(gains.values())):.3f} times as fast in geometric mean;"
            f" most {', '.join(changed[:8])}; least {changed[-1]}"
        )
    lines += _host_lines(results)
    wrong = [f"{result.case}: {result.check}" for result in results if result.check not in ("ok", NOT_CHECKED)]
    lines += dict.fromkeys(f"{result.case}: {line}" for result in results for line in result.tuned)
    unchecked = any(result.check == NOT_CHECKED for result in results)
    lines.append("checks: " + ("; ".join(dict.fromkeys(wrong)) or (NOT_CHECKED if unchecked else "all ok")))
    return "\n".join(lines)


_HOST_FORMAT = ("", *2 * (".0f", ".0f", ".0f", ".2f"))


def _host_lines(results: Sequence[Result]) -> list[str]:
    """Host time of forward + backward by problem: medians, and the least samples."""
    by_problem = {re.sub(" (forward|backward|forward \\+ backward)$", "", each.case): each for each in results}
    rows: list[list[Any]] = []
    for name, result in by_problem.items():
        if {"overlapc", "inductor"} <= set(result.host_us):
            row: list[Any] = [name]
            for times in (result.host_us, result.host_least_us):
                row += [times["overlapc"], times["inductor"], times.get("eager"), times["overlapc"] / times["inductor"]]
            rows.append(row)
    if not rows:
        return []
    headers = ["host, us", "overlapc", "inductor", "eager", "ratio"]
    lines = [tabulate(rows, headers=[*headers, *(f"least {each}" for each in headers[1:])], floatfmt=_HOST_FORMAT)]
    for label, at in (("", 4), (", least samples", 8)):
        ratios = [row[at] for row in rows]
        lines.append(
            f"host time of forward + backward{label}: {statistics.median(row[at - 3] for row in rows):.0f} us,"
            f" {geometric_mean(ratios):.2f} of inductor's in geometric mean over {len(rows)} (worst {max(ratios):.2f})"
        )
    return lines


def prepare(arguments: argparse.Namespace) -> None:
    """Fills both systems' caches in parallel: this script, compiling only, on shards of the list."""
    passed = ["--device", arguments.device, "--size", arguments.size, "--cases", arguments.cases]
    systems = [system for system in arguments.systems if system != TUNED]  # which needs the device to itself
    passed += ["--systems", ",".join(systems), "--no-check", "--compile-only"]
    passed += ["--host-only"] if arguments.host_only else []
    passed += ["--rare"] if arguments.rare else []
    passed += ["--threads", str(torch.get_num_threads())]  # Inductor writes them into its code, and keeps that
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, *passed, "--shard", f"{at}/{arguments.prepare}"],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for at in range(arguments.prepare)
    ]
    for process in running:
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", choices=tuple(SCALES), help="default: gpu on cuda, small on cpu")
    parser.add_argument("--cases", default="", help="only problems whose name matches this expression")
    parser.add_argument("--rare", action="store_true", help="instead of the list what training seldom needs")
    parser.add_argument("--systems", default=",".join(SYSTEMS), type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, systems alternating (default: 7)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--shard", default="0/1", help="I/N: every Nth problem, from the Ith")
    parser.add_argument("--prepare", type=int, default=0, help="fill the caches with this many processes first")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not compare with float64")
    parser.add_argument("--host-only", action="store_true", help="only what forward + backward calls cost the host")
    parser.add_argument("--autotune", action="store_true", help="also with measured block sizes (overlapc-tuned)")
    parser.add_argument("--profile", action="store_true", help="device kernels of every case, into --json")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no problem after this time")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    arguments = parser.parse_args()
    if arguments.autotune:
        arguments.systems.insert(1, TUNED)
    arguments.size = arguments.size or ("gpu" if arguments.device == "cuda" else "small")
    began = time.perf_counter()
    first, count = map(int, arguments.shard.split("/"))
    problems = RARE if arguments.rare else PROBLEMS
    names = [name for name in problems if re.search(arguments.cases, name)][first::count]
    if arguments.list:
        for name in names:
            made = problems[name](Inputs(SCALES["tiny"], "cpu"))
            print("\n".join(f"{name} {kind}" if made.gradients else name for kind in made.kinds))
        return
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.prepare:
        prepare(arguments)
        print(f"caches filled in {time.perf_counter() - began:.0f} s", flush=True)
    bandwidth = copy_bandwidth() if arguments.device == "cuda" and not arguments.compile_only else None
    results: list[Result] = []
    for name in names:
        print(f"{time.perf_counter() - began:5.0f} s  {name}", file=sys.stderr, flush=True)
        if time.perf_counter() - began > arguments.seconds:
            print(f"time is up: not run from {name} on", flush=True)
            break
        results += measured(name, problems[name], arguments)
        if arguments.json:  # after every problem: a run may be cut short
            record = {"bandwidth": bandwidth, "results": [asdict(result) for result in results]}
            arguments.json.write_text(json.dumps(record, indent=1))
        torch._dynamo.reset()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    if arguments.compile_only:
        return
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, overlapc {overlapc.__version__}, {time.perf_counter() - began:.0f} s")
    if bandwidth is not None:
        print(f"device copy {bandwidth / 1e12:.2f} TB/s")
    print(table(results, bandwidth))
    print(summary(results, bandwidth))


if __name__ == "__main__":
    main()
