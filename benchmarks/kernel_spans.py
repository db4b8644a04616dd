"""Where a step's time goes on a GPU, by what its kernels are: the same question for every system."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

Span = tuple[str, int, int, int]  # name, start and end in ns, stream
PROFILED_STEPS = 2
_CLASSES = (  # the first whose pattern a kernel's name has
    ("communication", r"nccl|memcpy ptop"),
    ("copies", r"^memcpy|^memset"),
    ("attention", r"flash|fmha|sdpa|attention|mem_eff|efficient|flex"),
    ("matmuls", r"gemm|nvjet|cutlass|xmma|cublas|splitk|_mm_|cijk"),
    ("optimizer", r"multi_tensor_apply|fused_?adam"),
    ("eager kernels", r"at::|at_cuda|void |<"),
    ("generated kernels", r""),
)


def class_of(kernel: str) -> str:
    """What kind of work a kernel does, by its name."""
    return next(what for what, pattern in _CLASSES if re.search(pattern, kernel, re.IGNORECASE))


def communicates(kernel: str) -> bool:
    return class_of(kernel) == "communication"


def spans_of(step: Callable[[], Any]) -> list[Span]:
    """Every kernel and copy of PROFILED_STEPS steps.

    The profilers of several ranks are ready at different times, and the first collective waits for the last of
    them (40 ms were seen): one step before those that count takes that.
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
    """Milliseconds a step: compute kernels, communication (NCCL's kernels, copies between GPUs), that while no compute
    runs, neither."""
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
    """Milliseconds a step that the kernels of a class take, all added up."""
    found: Counter[str] = Counter()
    for name, start, end, _ in spans:
        found[class_of(name)] += end - start
    return {what: ns / 1e6 / PROFILED_STEPS for what, ns in found.most_common()}


def longest(spans: Iterable[Span], most: int) -> list[tuple[float, float, str]]:
    """(milliseconds a step, launches a step, name) of the kernels that take longest in sum."""
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
