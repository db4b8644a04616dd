"""Break a step's GPU time down by class of kernel, in the same way for every system."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

Span = tuple[str, int, int, int]  # name, start and end in ns, stream
PROFILED_STEPS = 2
_CLASSES = (  # a kernel belongs to the first class whose pattern its name matches
    ("communication", r"nccl|memcpy ptop"),
    ("copies", r"^memcpy|^memset"),
    ("attention", r"flash|fmha|sdpa|attention|mem_eff|efficient|flex"),
    ("matmuls", r"gemm|nvjet|cutlass|xmma|cublas|splitk|_mm_|cijk"),
    ("optimizer", r"multi_tensor_apply|fused_?adam"),
    ("eager kernels", r"at::|at_cuda|void |<"),
    ("generated kernels", r""),
)


def class_of(kernel: str) -> str:
    """Return the class of a kernel, judged by its name."""
    return next(what for what, pattern in _CLASSES if re.search(pattern, kernel, re.IGNORECASE))


def communicates(kernel: str) -> bool:
    return class_of(kernel) == "communication"


def spans_of(step: Callable[[], Any]) -> list[Span]:
    """Profile PROFILED_STEPS steps and return all their kernels and copies.

    The profilers of several ranks become ready at different times, and the first collective waits for the last rank
    (40 ms were seen): an extra step before the counted ones absorbs this.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
        began_ns = time.time_ns()  # the profiler's clock
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    return [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns(), event.device_resource_id())
        for event in recorded.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
        and event.duration_ns() > 0
        and event.start_ns() >= began_ns
    ]


def kernel_times(spans: list[Span]) -> dict[str, float]:
    """Return milliseconds per step of compute kernels, of communication (NCCL kernels and copies between GPUs), of
    exposed communication (while no compute runs), and of idle time (while neither runs)."""
    nccl = merged([(start, end) for name, start, end, _ in spans if communicates(name)])
    compute = merged([(start, end) for name, start, end, _ in spans if not communicates(name)])
    both = merged(compute + nccl)
    whole = max(end for _, end in both) - min(start for start, _ in both)
    busy, computing = total(both), total(compute)
    scale = 1e6 * PROFILED_STEPS
    return {
        "compute_ms": computing / scale,
        "nccl_ms": total(nccl) / scale,
        "exposed_ms": (busy - computing) / scale,
        "idle_ms": (whole - busy) / scale,
    }


def times_by_class(spans: Iterable[Span]) -> dict[str, float]:
    """Return the summed kernel time of each class, in milliseconds per step."""
    found: Counter[str] = Counter()
    for name, start, end, _ in spans:
        found[class_of(name)] += end - start
    return {what: ns / 1e6 / PROFILED_STEPS for what, ns in found.most_common()}


def longest(spans: Iterable[Span], most: int) -> list[tuple[float, float, str]]:
    """Return (milliseconds per step, launches per step, name) of the `most` kernels with the longest total time."""
    ns: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for name, start, end, _ in spans:
        ns[name] += end - start
        launches[name] += 1
    return [(each / 1e6 / PROFILED_STEPS, launches[name] / PROFILED_STEPS, name) for name, each in ns.most_common(most)]


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def total(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)
