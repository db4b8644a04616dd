"""`DeviceProfile`: the rates and links of a machine, as data; every number names its origin.

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

# What a profile that comes from elsewhere may say (profiles/profile_file.py).
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
    """A library's protocol for moving data over a link: its latency, and the share of bandwidth that it reaches."""

    share: Annotated[float, Meta(gt=1e-6, le=1e6)]
    base_ns: Ns
    step_ns: Ns


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between ranks, as the models of ring and tree collectives describe it."""

    bytes_per_s: Rate  # one rank's bus bandwidth
    step_ns: Ns  # one step of a ring or tree
    protocols: tuple[Protocol, ...] = ()  # the fastest one is taken; none: full bandwidth at `step_ns` a step

    def ns(self, steps: int, moved_bytes: float) -> float:
        """Time for a rank to move so many bytes in so many steps."""
        full_ns = moved_bytes / self.bytes_per_s * 1e9
        if not self.protocols:
            return steps * self.step_ns + full_ns
        return min(each.base_ns + steps * each.step_ns + full_ns / each.share for each in self.protocols)


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times of one collective on a group of `ranks` within one host."""

    collective: str
    ranks: Number
    points: Points  # (bytes by the collective's definition, ns), ascending
    dtype: str = ""  # "bf16", "fp32"; "" when it was not recorded


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer compute takes beside a running collective: 1.29 is 29% longer. At least 1. None: not measured."""

    matmul: Factor = 1.0  # a large matmul
    memory: Factor = 1.0  # large memory-bound kernels
    attention: Factor | None = None
    own_matmul: Factor | None = None  # the collective itself, beside matmuls
    own_memory: Factor | None = None  # the collective itself, beside memory-bound kernels
    multiprocessors: Factor | None = None  # that the collective holds: decides the waves of a matmul beside it
    alone: Factor = 1.0  # the collective itself on these channels, against default channels
    matmuls: Points = ()  # by the waves that a matmul needs alone, ascending
    memories: Points = ()  # by the bytes that a memory-bound kernel reads and writes, ascending

    def of(self, beside: str, size_bytes: int = 0) -> float:
        """Of "matmul", "attention" or "memory", which depends on the bytes moved."""
        if beside == "matmul":
            return self.matmul
        if beside == "memory" or self.attention is None:
            return rate_at(self.memories, size_bytes) if self.memories and size_bytes else self.memory
        return self.attention

    def own(self, beside: str) -> float | None:
        """Of the collective beside that; attention counts as a matmul."""
        return self.own_memory if beside == "memory" else self.own_matmul


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Host time in ns of what a compiled graph does, by kind; see host.py."""

    kernel: Ns  # a launch
    call: Ns  # of a library
    collective: Ns  # its start and its wait
    tensor: Ns  # each tensor but the first of a coalesced collective, and its wait
    graph: Ns  # a call of a compiled graph: guards, autograd
    argument: Ns  # each tensor that goes into a graph or comes out, of a model whose parameters are DTensors


@dataclass(frozen=True)
class DeviceProfile:
    """The measured and published numbers of a machine that estimators and the simulator use."""

    name: str
    flops_per_s: Mapping[str, Rate] = field(default_factory=dict)  # by dtype; "vector" for generated kernels
    memory_bytes_per_s: Rate | None = None  # read + written
    kernel_floor_ns: Ns = 0.0  # the shortest a launched node takes on the device
    kernel_gap_ns: Ns = 0.0  # between the end of one kernel and the beginning of the next on its stream
    launch_ns: Ns = 0.0  # host time to launch one node, whatever it is: how late an idle device begins with it
    host: HostCosts | None = None  # what a whole graph costs the host; None: not measured
    synchronous: bool = False  # compute runs on the launching thread, which so cannot run ahead
    multiprocessors: Number = 0  # that kernels and collectives share; 0: not known
    # A collective that comes while a kernel runs begins with the kernel's last wave, as GPUs hand out blocks in order.
    collectives_wait_for_kernels: bool = False
    collective_floor_ns: Ns = 0.0  # launch and synchronization of one collective
    ranks_per_host: Annotated[int, Meta(ge=1, le=2**31)] = 1
    host_link: Link | None = None  # between ranks of one host
    network_link: Link | None = None  # one rank's way to other hosts
    copy_link: Link | None = None  # what copies between ranks of one host see; `step_ns`: all but moving bytes
    # Between the end of a kernel and the start of a collective that waits for it, and back: the simulator adds it.
    collective_gap_ns: Ns = 0.0
    coalesced_tensor_ns: Ns = 0.0  # what each tensor but the first adds to a coalesced collective
    tables: tuple[Table, ...] = ()
    # Achieved rates by size, ascending: "matmul.bf16", "attention.bf16" and "attention_backward.bf16" give FLOP/s by
    # FLOPs; "generated" (element-wise) and "generated.FORM" (`Work.form`) give bytes/s by bytes read and written.
    curves: Mapping[str, Points] = field(default_factory=dict)
    # By collective, "other" for the rest; "all_gather@16" on that many channels.
    slowdowns: Mapping[str, Slowdown] = field(default_factory=dict)
    # By "matmul" or "attention": how many times as long work of so many FLOPs takes at the clock of full load as at the
    # highest. The curves of rates above are of full load. See simulator/clock_under_load.py.
    throttle: Mapping[str, Points] = field(default_factory=dict)
    # By thousandths of the time that the device computes: the clock of full load, as a part of the clock then. What
    # takes `throttle` times as long at full load as in a burst takes that part of it, but no less than in a burst.
    clock_by_utilization: Points = ()
    collective_load: Part = (
        0.0  # what a collective draws of what compute draws, for which it counts in `clock_by_utilization`
    )
    collective_slowdown: Factor = 1.0  # of a collective beside compute where its Slowdown says nothing; at least 1
    origins: Mapping[str, str] = field(default_factory=dict)  # field -> where its number comes from

    def slowdown(self, collective: str, channels: int = 0) -> Slowdown:
        """Beside this collective, on the measured number of channels that is nearest; 0 channels: the default."""
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
        """FLOP/s in a dtype, by short or torch name; None when the profile has no number for it."""
        return self.flops_per_s.get(_short(dtype))

    def table(self, collective: str, ranks: int, dtype: str = "") -> Table | None:
        """Measured times of a collective on that many ranks of one host, in that dtype if it was measured."""
        found = [t for t in self.tables if t.collective == collective and t.ranks == ranks]
        dtype = _short(dtype)
        return next((t for t in found if t.dtype == dtype), found[0] if found else None)

    def curve_name(self, name: str, dtype: str) -> str | None:
        """The curve of that name and dtype as `curves` has it; None if it has none."""
        full = f"{name}.{_short(dtype)}" if dtype else name
        return full if self.curves.get(full) else None

    def curve_rate(self, name: str, dtype: str, size: int) -> float | None:
        """The rate that work of `size` achieves; None without a curve of that name and dtype.

        Between two measured sizes the rate changes with the logarithm of the size; beyond them it stays.
        """
        found = self.curve_name(name, dtype)
        return None if found is None or size <= 0 else rate_at(self.curves[found], size)

    def throttled(self, kind: str, flops: int) -> float:
        """How many times as long "matmul" or "attention" of so many FLOPs takes under full load as in a short burst."""
        points = self.throttle.get(kind)
        return rate_at(points, flops) if points and flops > 0 else 1.0

    def generated_ns(self, form: str, size_bytes: int) -> float | None:
        """Time of a generated kernel of that form that moves so many bytes; None without a curve.

        Between two measured sizes time grows evenly; beyond them the rate stays, but no size takes less than the first.
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
    """`torch.bfloat16`, `bfloat16` and `bf16` -> `bf16`."""
    dtype = dtype.removeprefix("torch.")
    return _DTYPES.get(dtype, dtype)


def rate_at(points: Sequence[tuple[int, float]], size: int) -> float:
    """A curve's rate at `size`; `points` are (size, rate), ascending, at least one."""
    at = bisect_left(points, (size, -math.inf))
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (low, low_rate), (high, high_rate) = points[at - 1], points[at]
    share = math.log(size / low) / math.log(high / low)
    return low_rate + (high_rate - low_rate) * share


IDEAL = DeviceProfile("ideal")  # launches cost nothing, nothing disturbs anything: for tests and text schedules
