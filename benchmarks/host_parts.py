"""What the parts of one compiled forward + backward call cost the host: torch's own, and ours.

    python benchmarks/host_parts.py --device cuda

Three tables: single calls (allocation, checks, launches), a differentiable function that does nothing under Dynamo and
without it (what no backend can go below), and where a whole RMSNorm call spends its time, the change of threads
between forward and backward included. Microseconds, medians of samples of many calls.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_cases import PROBLEMS, SCALES, Inputs
from benchmarks.kernels import Subject

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


def empty_functions(device: str) -> dict[str, Callable[[], Any]]:
    """Forward and backward of functions that compute nothing."""
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    w = torch.ones(WIDTH, device=device, requires_grad=True)
    tangent = torch.ones(ROWS, WIDTH, device=device)
    result, of_x, of_w = torch.empty_like(tangent), torch.empty_like(tangent), torch.empty(WIDTH, device=device)

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            ctx.set_materialize_grads(False)
            return result.detach()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            assert len(ctx.saved_tensors) == 2
            return of_x, of_w

    def backend(gm: Any, inputs: Any) -> Callable[..., Any]:
        return lambda *arguments: (Nothing.apply(*arguments),)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    def own(name: str) -> Callable[..., Any]:
        return types.FunctionType(function.__code__.replace(co_name=name), globals(), name)

    compiled = torch.compile(own("nothing"), backend=backend)
    only = torch.compile(own("only"), backend=lambda gm, inputs: lambda *arguments: (result,))

    def both(call: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad([call(x, w)], [x, w], [tangent])

    return {
        "Dynamo alone": lambda: only(x, w),
        "autograd function, forward": lambda: Nothing.apply(x, w),
        "autograd function, both": both(Nothing.apply),
        "autograd function under Dynamo, both": both(compiled),
        "eager x * w, forward": lambda: function(x, w),
        "eager x * w, both": both(function),
    }


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--problem", default="RMSNorm", choices=sorted(PROBLEMS))
    parser.add_argument("--systems", default="overlapc,eager", type=lambda text: text.split(","))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(tabulate(measured(single_calls(arguments.device), arguments.device), ("call", "us"), floatfmt=".2f"))
    rows = measured(empty_functions(arguments.device), arguments.device)
    print(tabulate(rows, ("computes nothing", "us"), floatfmt=".2f"))
    problem = PROBLEMS[arguments.problem](Inputs(SCALES["tiny"], arguments.device))
    for system in arguments.systems:
        subject = Subject(problem, system, arguments.problem)
        rows = where_time_goes(subject, arguments.device)
        rows += measured({"both": subject.both, "forward": subject.forward, "backward": subject.backward}, "cpu")
        print(tabulate(rows, (f"{arguments.problem}, {system}", "us"), floatfmt=".2f"))


if __name__ == "__main__":
    main()
