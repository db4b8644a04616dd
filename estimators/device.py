"""`DeviceProfile`: the rates and links of a machine as data, with the origin of every number.

Rates are per second, times in nanoseconds, sizes in bytes. profiles/profile_file.py reads and writes profiles.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from overlapc.units import MOST_NS

# Limits that profiles/profile_file.py checks.
Ns = Annotated[float, Meta(ge=0, le=MOST_NS)]
Rate = Annotated[float, Meta(ge=1, le=1e24)]  # per second
Factor = Annotated[float, Meta(ge=1, le=1e6)]
Part = Annotated[float, Meta(ge=0, le=1e6)]
Number = Annotated[int, Meta(ge=0, le=2**31)]
Points = tuple[tuple[Annotated[int, Meta(ge=1, le=2**62)], Annotated[float, Meta(gt=0, le=1e24)]], ...]

_DTYPES = {
    "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
    "float64": "fp64", "double": "fp64", "tfloat32": "tf32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Protocol:
    """A library's protocol for moving data over a link, with its latency and the fraction of bandwidth it reaches."""

    share: Annotated[float, Meta(gt=1e-6, le=1e6)]
    base_ns: Ns
    step_ns: Ns


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between ranks, with the numbers that models of ring and tree collectives need."""

    bytes_per_s: Rate  # one rank's bus bandwidth
    step_ns: Ns  # time of one step of a ring or tree
    protocols: tuple[Protocol, ...] = ()  # the fastest is used; if empty: full bandwidth, `step_ns` per step

    def ns(self, steps: int, moved_bytes: float) -> float:
        """Return the time for a rank to move `moved_bytes` in `steps` steps."""
        full_ns = moved_bytes / self.bytes_per_s * 1e9
        if not self.protocols:
            return steps * self.step_ns + full_ns
        return min(each.base_ns + steps * each.step_ns + full_ns / each.share for each in self.protocols)


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times of one collective over `ranks` ranks of one host."""

    collective: str
    ranks: Number
    points: Points  # (bytes by the collective's definition, ns), ascending
    dtype: str = ""  # "bf16", "fp32"; "": not recorded


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Slowdown factors of compute beside a collective: 1.29 is 29% longer. At least 1. None: not measured."""

    matmul: Factor = 1.0  # a large matmul
    memory: Factor = 1.0  # large memory-bound kernels
    attention: Factor | None = None
    own_matmul: Factor | None = None  # the collective itself, beside matmuls
    own_memory: Factor | None = None  # the collective itself, beside memory-bound kernels
    multiprocessors: Factor | None = None  # number that the collective occupies, from which a matmul's waves follow
    alone: Factor = 1.0  # the collective itself on this number of channels, relative to the default number
    matmuls: Points = ()  # (waves that a matmul needs alone, factor), ascending
    memories: Points = ()  # (bytes that a memory-bound kernel reads and writes, factor), ascending

    def of(self, beside: str, size_bytes: int = 0) -> float:
        """Return the factor of "matmul", "attention" or "memory"; that of "memory" depends on the bytes moved."""
        if beside == "matmul":
            return self.matmul
        if beside == "memory" or self.attention is None:
            return rate_at(self.memories, size_bytes) if self.memories and size_bytes else self.memory
        return self.attention

    def own(self, beside: str) -> float | None:
        """Return the factor of the collective itself beside such compute; attention counts as a matmul."""
        return self.own_memory if beside == "memory" else self.own_matmul


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Host time in ns of each kind of operation in a compiled graph; see host.py."""

    kernel: Ns  # launch of a generated kernel
    call: Ns  # library call
    collective: Ns  # start and wait of a collective
    tensor: Ns  # each tensor after the first of a coalesced collective, with its wait
    graph: Ns  # call of a compiled graph: guards, autograd
    argument: Ns  # each input or output tensor of a graph, measured with a model whose parameters are DTensors


@dataclass(frozen=True)
class DeviceProfile:
    """The numbers of a machine, measured or published, that estimators and the simulator use."""

    name: str
    flops_per_s: Mapping[str, Rate] = field(default_factory=dict)  # by dtype; "vector" for generated kernels
    memory_bytes_per_s: Rate | None = None  # read + written
    kernel_floor_ns: Ns = 0.0  # shortest time of a launched node on the device
    kernel_gap_ns: Ns = 0.0  # between the end of one kernel and the start of the next on its stream
    launch_ns: Ns = 0.0  # host time to launch one node of any kind: the delay before an idle device starts it
    host: HostCosts | None = None  # host costs of a whole graph; None: not measured
    synchronous: bool = False  # compute runs on the launching thread, which therefore cannot run ahead
    multiprocessors: Number = 0  # shared by kernels and collectives; 0: not known
    # GPUs dispatch blocks in order, so a collective issued while a kernel runs starts with the kernel's last wave.
    collectives_wait_for_kernels: bool = False
    collective_floor_ns: Ns = 0.0  # launch and synchronization of one collective
    ranks_per_host: Annotated[int, Meta(ge=1, le=2**31)] = 1
    host_link: Link | None = None  # between ranks of one host
    network_link: Link | None = None  # one rank's connection to other hosts
    copy_link: Link | None = None  # for copies between ranks of one host; `step_ns`: all time except moving the bytes
    # Time from the end of a kernel to the start of a collective that waits for it, and vice versa, in the simulator.
    collective_gap_ns: Ns = 0.0
    coalesced_tensor_ns: Ns = 0.0  # time that each tensor after the first adds to a coalesced collective
    tables: tuple[Table, ...] = ()
    # Achieved rates by size, ascending: "matmul.bf16", "attention.bf16" and "attention_backward.bf16" give FLOP/s by
    # FLOPs; "generated" (element-wise) and "generated.FORM" (`Work.form`) give bytes/s by bytes read and written.
    curves: Mapping[str, Points] = field(default_factory=dict)
    # By collective; "other" for collectives without an entry, "all_gather@16" for 16 channels.
    slowdowns: Mapping[str, Slowdown] = field(default_factory=dict)
    # By "matmul" or "attention", (FLOPs, factor): time at the clock under full load relative to the highest clock. The
    # curves of rates above are for full load. See simulator/clock_under_load.py.
    throttle: Mapping[str, Points] = field(default_factory=dict)
    # (thousandths of the time in which the device computes, clock under full load relative to the clock then). The time
    # at full load is multiplied by that ratio; the result is at least the time in a burst (see `throttle`).
    clock_by_utilization: Points = ()
    collective_load: Part = (
        0.0  # power of a collective relative to compute: its weight in the utilization of `clock_by_utilization`
    )
    collective_slowdown: Factor = 1.0  # of a collective beside compute if its Slowdown has no value; at least 1
    origins: Mapping[str, str] = field(default_factory=dict)  # field -> where its number comes from

    def slowdown(self, collective: str, channels: int = 0) -> Slowdown:
        """Return the Slowdown of a collective, for the nearest measured number of channels; 0: default channels."""
        found = self.slowdowns.get(collective) or self.slowdowns.get("other") or Slowdown()
        if not channels:
            return found
        measured = {
            int(key.partition("@")[2]): each for key, each in self.slowdowns.items() if key.startswith(f"{collective}@")
        }
        return measured[min(measured, key=lambda each: abs(each - channels))] if measured else found

    @property
    def collective_latency_ns(self) -> float:
        """Latency of a collective within a host: its time beyond moving its bytes at full bandwidth."""
        ways = self.host_link.protocols if self.host_link is not None else ()
        return self.collective_floor_ns + max((each.base_ns + each.step_ns for each in ways), default=0.0)

    def rate(self, dtype: str) -> float | None:
        """Return FLOP/s for a dtype, given by short or torch name; None if the profile has no number for it."""
        return self.flops_per_s.get(_short(dtype))

    def table(self, collective: str, ranks: int, dtype: str = "") -> Table | None:
        """Return the table of a collective over `ranks` ranks of one host, for `dtype` if there is one; else None."""
        found = [t for t in self.tables if t.collective == collective and t.ranks == ranks]
        dtype = _short(dtype)
        return next((t for t in found if t.dtype == dtype), found[0] if found else None)

    def curve_name(self, name: str, dtype: str) -> str | None:
        """Return the key in `curves` for a name and dtype; None if there is no such curve."""
        full = f"{name}.{_short(dtype)}" if dtype else name
        return full if self.curves.get(full) else None

    def curve_rate(self, name: str, dtype: str, size: int) -> float | None:
        """Return the rate that work of `size` achieves; None without a curve of that name and dtype.

        The rate is interpolated over the logarithm of the size; outside the measured sizes it is constant.
        """
        found = self.curve_name(name, dtype)
        return None if found is None or size <= 0 else rate_at(self.curves[found], size)

    def throttled(self, kind: str, flops: int) -> float:
        """Return the time of a "matmul" or "attention" of `flops` under full load, relative to a short burst."""
        points = self.throttle.get(kind)
        return rate_at(points, flops) if points and flops > 0 else 1.0

    def generated_ns(self, form: str, size_bytes: int) -> float | None:
        """Return the time of a generated kernel of a form that moves `size_bytes`; None without a curve.

        Time is interpolated linearly between measured sizes. Above them the rate is constant; below them the time is
        that of the smallest size.
        """
        points = (self.curves.get(f"generated.{form}") if form else None) or self.curves.get("generated")
        if not points:
            return None
        at = bisect_left(points, (size_bytes, -math.inf))
        if at == len(points):
            return size_bytes / points[-1][1] * 1e9
        high, high_rate = points[at]
        high_ns = high / high_rate * 1e9
        if at == 0:
            return high_ns
        low, low_rate = points[at - 1]
        low_ns = low / low_rate * 1e9
        return low_ns + (high_ns - low_ns) * (size_bytes - low) / (high - low)


def _short(dtype: str) -> str:
    """Return the short name of a dtype: `torch.bfloat16`, `bfloat16` and `bf16` -> `bf16`."""
    dtype = dtype.removeprefix("torch.")
    return _DTYPES.get(dtype, dtype)


def rate_at(points: Sequence[tuple[int, float]], size: int) -> float:
    """Return a curve's rate at `size`; `points` are (size, rate), ascending, at least one."""
    at = bisect_left(points, (size, -math.inf))
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (low, low_rate), (high, high_rate) = points[at - 1], points[at]
    share = math.log(size / low) / math.log(high / low)
    return low_rate + (high_rate - low_rate) * share


IDEAL = DeviceProfile("ideal")  # no launch costs and no contention: for tests and text schedules
