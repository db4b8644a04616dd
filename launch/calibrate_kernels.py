"""Measures the bandwidth that generated kernels achieve, for `overlapc calibrate`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.backend import overlapc
from overlapc.estimators.calibration.clock import compute_ns
from overlapc.estimators.calibration.measure_machine import Measurement
from overlapc.estimators.calibration.profiled_contention import kernels_of
from overlapc.estimators.calibration.quick_profile import median_of
from overlapc.report import record
from overlapc.schedule.model import COMPUTE
from overlapc.schedule.text import parse

_WIDTH = 4096  # columns of the generated kernels' inputs
_LONG_ROW = 32768  # columns of the kernel whose rows do not fit into registers
_CACHE_BYTES = 2**27  # size of inputs that together do not fit into a GPU's cache
_MOST_SETS = 32  # limit on the sets of inputs


def residual_norm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of a residual connection and its RMSNorm; both are used later, as in a transformer block."""
    total = x + y
    return total, F.rms_norm(total, (_WIDTH,), weight, 1e-5)


def swiglu(x: Tensor, y: Tensor, _: Tensor) -> tuple[Tensor]:
    return (F.silu(x) * y,)


def cast(x: Tensor, _: Tensor, __: Tensor) -> tuple[Tensor]:
    return (x.to(torch.float64 if x.dtype == torch.float32 else torch.float32),)


def column_sum(x: Tensor, _: Tensor, __: Tensor) -> tuple[Tensor]:
    return (x.float().sum(0),)


def long_rows(x: Tensor, _: Tensor, __: Tensor) -> tuple[Tensor]:
    return (F.log_softmax(x.view(-1, _LONG_ROW).float(), -1).to(x.dtype),)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A generated kernel that represents all kernels of its form (`Work.form`).

    moves: the bytes that it reads and writes, in multiples of the bytes of `x`.
    """

    function: Callable[..., Any]
    form: str
    moves: float


KERNELS: Mapping[str, Kernel] = {
    "swiglu": Kernel(swiglu, "", 3),
    "cast": Kernel(cast, "", 3),
    "residual_norm": Kernel(residual_norm, "rows", 4),
    "long_rows": Kernel(long_rows, "long_rows", 2),
    "column_sum": Kernel(column_sum, "columns", 1),
}


def generated(measurement: Measurement) -> None:
    """Measure the achieved bandwidth of generated kernels, by form and size."""
    points: dict[str, dict[int, list[float]]] = {}
    for size in measurement.effort.generated_bytes:
        measurement.say(f"generated kernels, {size} B")
        for name, kernel in KERNELS.items():
            rate = _rate(measurement, kernel, size)
            measurement.facts[f"generated {name}, {size} B, bytes/s"] = rate
            points.setdefault(kernel.form, {}).setdefault(size, []).append(rate)
    for form, rates in points.items():
        if len(rates) > 1:
            curve = f"generated.{form}" if form else "generated"
            measurement.curves[curve] = [[size, median_of(found)] for size, found in rates.items()]


def _rate(measurement: Measurement, kernel: Kernel, size_bytes: int) -> float:
    """Return bytes/s of a kernel that moves about `size_bytes`. On a GPU it reads its inputs from memory, not from the
    cache."""
    device = measurement.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    unit = _LONG_ROW if kernel.form == "long_rows" else _WIDTH
    rows = max(1, int(size_bytes / kernel.moves / dtype.itemsize / unit)) * unit // _WIDTH
    ones = torch.ones(_WIDTH, dtype=dtype, device=device)

    def arguments() -> tuple[Tensor, ...]:
        x, y = (torch.randn(rows, _WIDTH, device=device).to(dtype) for _ in range(2))
        return x, y, ones

    first = arguments()
    compiled, moved, _ = compile_alone(kernel.function, first)
    with torch.no_grad():
        if not measurement.clock.queued:
            return moved / compute_ns(measurement.clock, partial(compiled, *first)) * 1e9
        several = [first, *(arguments() for _ in range(min(_MOST_SETS, _CACHE_BYTES // max(1, 2 * first[0].nbytes))))]
        for inputs in several[:2]:
            compiled(*inputs)
        spans = kernels_of(lambda: [compiled(*inputs) for inputs in several])
        return moved / (sum(span.ns for span in spans) / len(several)) * 1e9


UNLIKE = (torch.sin, torch.exp, torch.cos, torch.tanh, torch.sigmoid, torch.atan, torch.erf, torch.relu)
_GAP_BYTES = 2**22  # bytes that each of these functions reads, enough to hide the launch of the next one
_GAP_CALLS = 10


def gap_ns(measurement: Measurement) -> float:
    """Return the median time between the end of a kernel and the start of the next, different one, on a GPU."""
    x = torch.ones(_GAP_BYTES // 4, device=measurement.device)
    compiled, _, _ = compile_alone(unlike, (x,), fusion=False)

    def launch() -> None:
        measurement.clock.hold(1e-2)
        for _ in range(_GAP_CALLS):
            compiled(x)

    with torch.no_grad():
        spans = [span for span in kernels_of(launch) if not span.is_mark]
    return statistics.median(after.start_ns - before.end_ns for before, after in itertools.pairwise(spans))


def unlike(x: Tensor) -> tuple[Tensor]:
    for function in UNLIKE:
        x = function(x)
    return (x,)


def compile_alone(
    function: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Tensor], **options: Any
) -> tuple[Callable[..., Any], int, int]:
    """Compile `function` without Dynamo, whose guards cost time per step and not per kernel.

    Return the compiled function, the bytes that one call moves according to its schedule, and the number of kernels and
    library calls that it launches.
    """
    settings = {"profile": "h200-nvlink", "rank_check": False, **options}  # estimates are not used here
    with torch.no_grad():
        compiled = overlapc(make_fx(function)(*arguments), list(arguments), options=settings)
        compiled(*arguments)
    graph = record.report_of_process().steps[0].graphs[-1]
    nodes = [node for node in parse(graph.schedule).nodes if node.kind in COMPUTE]
    moved = sum(node.work.read_bytes + node.work.write_bytes for node in nodes if node.work is not None)
    return compiled, moved, len(nodes)
