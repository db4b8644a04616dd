"""How much compute and collectives that run at the same time slow each other.

Three effects, each with its numbers in the device profile:

- A collective holds multiprocessors. A matmul hands out its tiles in waves, one a multiprocessor; with fewer of them it
  needs more waves. One that just fills the device takes twice as long beside the smallest collective, a large one as
  much longer as there are fewer multiprocessors. In between the library's own ways to place tiles decide, so the
  slowdown is measured for matmuls of several numbers of waves.
- A collective takes memory bandwidth from kernels that need it, and they from it: factors. What small kernels read is
  in the cache, which collectives sweep: they are slowed more.
- Collectives of different process groups that cross the same links share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from overlapc.estimators.device import DeviceProfile, Slowdown, rate_at
from overlapc.estimators.links import crossed
from overlapc.schedule.model import Kind, Node

_TILE = 256 * 128  # results of one tile; cuBLAS took 256x128 or 320x128 for every matmul of a Llama-8B step on H200s
_SMALLEST_TILE = 128 * 64  # of matmuls whose results make too few of those to fill the device
_ITEMSIZE = {"float32": 4, "fp32": 4, "float64": 8, "fp64": 8}  # others of a matmul's dtypes have 2 bytes


class ComputeKind(Enum):
    """Kinds of compute that contention treats differently."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Contender:
    """The facts of a compute node that decide contention. results: elements that a matmul writes; 0 if unknown."""

    kind: ComputeKind
    results: int = 0
    bytes: int = 0  # read and written


@dataclass(frozen=True, slots=True)
class Traffic:
    """The facts of a collective that decide contention. demand: the share of link bandwidth that it takes alone."""

    slowdown: Slowdown
    link: str
    demand: float


def contender_of(node: Node) -> Contender:
    """The `Contender` of a node (KERNEL or EXTERN)."""
    work = node.work
    loops = node.kind is Kind.KERNEL and node.op == "kernel"  # other kernels are products and attention
    if loops or work is None or work.flops <= 0:
        return Contender(ComputeKind.MEMORY, bytes=0 if work is None else work.read_bytes + work.write_bytes)
    if "attention" in node.op:
        return Contender(ComputeKind.ATTENTION)
    results = work.write_bytes // _ITEMSIZE.get(work.dtype.removeprefix("torch."), 2)
    return Contender(ComputeKind.MATMUL, results)


def traffic_of(node: Node, profile: DeviceProfile) -> Traffic:
    """The `Traffic` of a node (START or COMM)."""
    comm = node.comm
    if comm is None:
        return Traffic(profile.slowdown("unknown"), "", 0.0)
    slowdown = profile.slowdown(comm.carried, comm.channels)
    way = crossed(comm, profile)
    if way is None or node.estimate is None or node.estimate.ns <= 0:
        return Traffic(slowdown, "", 0.0)
    name, link = way
    alone_ns = comm.bytes / link.bytes_per_s * 1e9
    return Traffic(slowdown, name, min(1.0, alone_ns / node.estimate.ns))


def tiles_of(results: int) -> int:
    """Tiles of a matmul with so many results."""
    return -(-results // _TILE)


def waves(tiles: int, multiprocessors: int) -> int:
    """Rounds in which so many multiprocessors compute so many tiles."""
    return math.ceil(tiles / max(1, multiprocessors))


def compute_stretch(load: Contender, beside: Sequence[Traffic], profile: DeviceProfile) -> float:
    """How many times as long compute takes while these collectives run."""
    if not beside:
        return 1.0
    if load.kind is ComputeKind.MATMUL:  # each takes multiprocessors of its own
        return 1.0 + sum(_matmul_stretch(load.results, each.slowdown, profile) - 1.0 for each in beside)
    return max(each.slowdown.of(load.kind.value, load.bytes) for each in beside)


def _matmul_stretch(results: int, slowdown: Slowdown, profile: DeviceProfile) -> float:
    held = slowdown.multiprocessors
    if not results or not profile.multiprocessors or held is None:
        return slowdown.matmul
    left = profile.multiprocessors - round(held)
    if -(-results // _SMALLEST_TILE) <= left:
        return 1.0
    alone = waves(tiles_of(results), profile.multiprocessors)
    if slowdown.matmuls:
        return rate_at(slowdown.matmuls, alone)
    return waves(tiles_of(results), left) / alone


def collective_stretches(load: Contender | None, running: Sequence[Traffic], profile: DeviceProfile) -> list[float]:
    """How many times as long each of the running collectives takes beside `load` (None: nothing) and each other."""
    stretches = [1.0] * len(running)
    if load is not None:
        stretches = [each.slowdown.own(load.kind.value) or profile.collective_slowdown for each in running]
    if len(running) > 1:
        demand: dict[str, float] = {}
        for each in running:
            demand[each.link] = demand.get(each.link, 0.0) + each.demand
        stretches = [
            stretch * max(1.0, demand[each.link]) if each.demand else stretch
            for stretch, each in zip(stretches, running, strict=True)
        ]
    return stretches
