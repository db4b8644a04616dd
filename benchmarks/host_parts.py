"""What the parts of one compiled forward + backward call cost the host: torch's own, and ours.

    python benchmarks/host_parts.py --device cuda --problems 'RMSNorm,RoPE'
    python benchmarks/host_parts.py --device cuda --sharding TP    # of a step of a small sharded model

Three kinds of tables: single calls (allocation, checks, launches); a whole forward + backward beside the same without
launches, and beside a differentiable function that computes nothing, under Dynamo and without it (what no backend can
go below); and where a call spends its time, the change of threads between forward and backward included. Microseconds,
medians of samples of many calls.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.guards
from tabulate import tabulate
from torch import Tensor
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.host_time import sample
from benchmarks.kernel_cases import PROBLEMS, SCALES, Inputs
from benchmarks.kernel_subject import Subject
from benchmarks.sharded_subject import SHARDINGS, TRUSTING, ShardedSubject
from overlapc.warm import watch

ROWS, WIDTH = 16, 64


def measured(calls: dict[str, Callable[[], Any]], device: str, repeats: int = 200, rounds: int = 15) -> list[Any]:
    """Rows of name and microseconds; the calls alternate."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            samples[name].append((time.perf_counter() - began) / repeats * 1e6)
    return [[name, statistics.median(each)] for name, each in samples.items()]


def single_calls(device: str) -> dict[str, Callable[[], Any]]:
    """Allocation, inspection and launches one at a time."""
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    tensor = torch.empty(ROWS, WIDTH, device=where)
    guards = torch._C._dynamo.guards
    direct = guards._empty_strided_cuda if device == "cuda" else guards._empty_strided_cpu
    calls = {
        "empty_strided": lambda: torch.empty_strided((ROWS, WIDTH), (WIDTH, 1), dtype=torch.float32, device=where),
        "_empty_strided, no dispatch": lambda: direct((ROWS, WIDTH), (WIDTH, 1), torch.float32),
        "assert_size_stride": lambda: guards.assert_size_stride(tensor, (ROWS, WIDTH), (WIDTH, 1)),
        "data_ptr": tensor.data_ptr,
        "add_ (one op with its launch)": lambda: tensor.add_(1.0),
    }
    if device == "cuda":
        calls["current device"] = torch._C._cuda_getDevice
        calls["current stream"] = lambda: torch._C._cuda_getCurrentRawStream(0)
    return calls


def computing_nothing(of: Subject, under_dynamo: bool) -> Subject:
    """A differentiable function that takes and returns what `of` does, without computing: no backend can go below."""
    inputs = of.problem.inputs
    with torch.no_grad():
        outputs = [leaf.detach() for leaf in pytree.tree_leaves(of.function(*inputs))]
    gradients = dict(zip(of.problem.gradients, of.both(), strict=True))
    given = tuple(gradients.get(at) for at, value in enumerate(inputs) if isinstance(value, Tensor))

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            ctx.save_for_backward(*inputs)
            ctx.set_materialize_grads(False)
            return tuple(output.detach() for output in outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            assert len(ctx.saved_tensors) == len(given)
            return given

    def tensors(*inputs: Any) -> tuple[Tensor, ...]:
        return Nothing.apply(*(value for value in inputs if isinstance(value, Tensor)))

    def traced(*inputs: Any) -> tuple[Tensor, ...]:
        total = sum(value.sum() for value in inputs if isinstance(value, Tensor))
        return tuple(total * 1.0 for _ in outputs)

    found = Subject(of.problem, "eager", "nothing")
    found.function = tensors
    if under_dynamo:
        found.function = torch.compile(traced, backend=lambda gm, inputs: Nothing.apply, dynamic=False)
    return found


def wrappers() -> dict[int, types.FunctionType]:
    """All generated functions, by id."""
    functions = (each for each in gc.get_objects() if type(each) is types.FunctionType)
    return {id(each): each for each in functions if each.__code__.co_filename.startswith("<overlapc ")}


def kernels_of(subject: Subject) -> list[tuple[dict[str, Any], str]]:
    """Where the functions that are generated for `subject`, which is compiled now, find kernels: (namespace, name)."""
    before = wrappers()
    subject.both()
    spaces = [each.__globals__ for found, each in wrappers().items() if found not in before]
    return [(space, name) for space in spaces for name, value in space.items() if "Launcher" in type(value).__name__]


def without_parts(name: str, device: str, rounds: int = 25) -> list[Any]:
    """Rows of what is run, median and least microseconds of forward + backward: all of a call, and less and less of it.

    The calls alternate, in samples of 50.
    """
    problem = PROBLEMS[name](Inputs(SCALES["tiny"], device))
    ours, inductor, eager = (Subject(problem, system, name) for system in ("overlapc", "inductor", "eager"))
    kernels = kernels_of(ours)
    launchers = [space[kernel] for space, kernel in kernels]
    calls = {
        "eager": eager.both,
        "inductor": inductor.both,
        "overlapc": ours.both,
        f"overlapc, its {len(kernels)} kernels not launched": ours.both,
        "nothing computed, under Dynamo": computing_nothing(ours, True).both,
        "nothing computed": computing_nothing(ours, False).both,
    }
    samples: dict[str, list[float]] = {each: [] for each in calls}
    for turn in range(rounds + 1):
        for each, call in calls.items():
            for (space, kernel), launcher in zip(kernels, launchers, strict=True):
                space[kernel] = (lambda *tensors: None) if "not launched" in each else launcher
            time_us = sample(call, device)
            if turn:  # the first compiles
                samples[each].append(time_us)
    return [[each, statistics.median(times), min(times)] for each, times in samples.items()]


def where_time_goes(subject: Subject, device: str, calls: int = 500) -> list[Any]:
    """Medians between points of a call: forward, the way into backward, backward, the way back, release."""
    inputs, leaves = subject.problem.inputs, subject.leaves
    subject.both()
    tangents = subject.tangents
    points: dict[str, list[float]] = {}
    entered: list[float] = []

    class Probe(torch.autograd.Function):
        """Notes when backward reaches it: before everything of the compiled function's."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            entered.append(time.perf_counter())
            return grad

    for _ in range(calls):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = subject.function(*inputs)
        forward = time.perf_counter()
        result = Probe.apply(result)
        probed = time.perf_counter()
        gradients = torch.autograd.grad([result], leaves, tangents)
        done = time.perf_counter()
        del result, gradients
        released = time.perf_counter()
        reached = entered.pop()
        for name, seconds in (
            ("forward", forward - start),
            ("probe's forward", probed - forward),
            ("from grad() into the first node", reached - probed),
            ("backward, and back to the caller", done - reached),
            ("release", released - done),
        ):
            points.setdefault(name, []).append(seconds * 1e6)
    return [[name, statistics.median(each)] for name, each in points.items()]


PARTS = {  # of a sharded step: the two points it lies between
    "Dynamo and its guards, before the step": ("began", "into step"),
    "step, before its forward graph": ("into step", "into forward"),
    "forward graph": ("into forward", "out of forward"),
    "step, after its forward graph": ("out of forward", "out of step"),
    "Dynamo, after the step": ("out of step", "returned"),
    "into the backward graph": ("returned", "into backward"),
    "backward graph, with its gradients made DTensors": ("into backward", "out of backward"),
    "gradients put into parameters": ("out of backward", "done"),
    "gradients dropped": ("done", "dropped"),
}


def parts_of_a_sharded_step(sharding: str, system: str, device: str, steps: int = 100) -> dict[str, list[float]]:
    """Microseconds of each part of a step of sharded_subject.py, step by step."""
    at: dict[str, float] = {}
    make = watch.step_function

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            at[f"into {name}"] = time.perf_counter()
            results = call(*arguments)
            at[f"out of {name}"] = time.perf_counter()
            return results

        return timed

    def watched(plan: Any, forward: Callable[..., Any], backward: Callable[..., Any], mark: Any) -> Callable[..., Any]:
        return noted("step", make(plan, noted("forward", forward), noted("backward", backward), mark))

    watch.step_function = watched
    try:
        subject = ShardedSubject(sharding, system, device)
    finally:
        watch.step_function = make
    samples: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(steps):
        if device == "cuda":
            torch.cuda.synchronize()
        at["began"] = time.perf_counter()
        loss = subject.forward()
        at["returned"] = time.perf_counter()
        loss.backward()
        at["done"] = time.perf_counter()
        subject.model.zero_grad(set_to_none=True)
        at["dropped"] = time.perf_counter()
        for part, (start, end) in PARTS.items():
            samples[part].append((at[end] - at[start]) * 1e6)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--problems", default="RMSNorm", type=lambda text: text.split(","))
    parser.add_argument("--systems", default="overlapc,eager", type=lambda text: text.split(","))
    parser.add_argument("--sharding", choices=sorted(SHARDINGS), help="the parts of a step of a model sharded so")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = arguments.device
    if arguments.sharding:
        systems = ("overlapc", TRUSTING)
        found = [parts_of_a_sharded_step(arguments.sharding, system, device) for system in systems]
        rows = [[part, *(of(each[part]) for each in found for of in (statistics.median, min))] for part in PARTS]
        headers = [text for system in systems for text in (f"{system}, median us", "least")]
        print(tabulate(rows, (arguments.sharding, *headers), floatfmt=".1f"))
        return
    print(tabulate(measured(single_calls(device), device), ("call", "us"), floatfmt=".2f"))
    for name in arguments.problems:
        torch._dynamo.reset()
        print(
            tabulate(without_parts(name, device), (f"{name}, both", "median us", "least"), floatfmt=".1f"), flush=True
        )
    problem = PROBLEMS[arguments.problems[0]](Inputs(SCALES["tiny"], device))
    for system in arguments.systems:
        subject = Subject(problem, system, arguments.problems[0])
        rows = where_time_goes(subject, device)
        print(tabulate(rows, (f"{arguments.problems[0]}, {system}", "us"), floatfmt=".2f"))


if __name__ == "__main__":
    main()
