"""Contention: how much overlapping compute and collectives slow each other down.

There are three effects, each with its numbers in the device profile:

- A collective occupies multiprocessors. A matmul runs its tiles in waves, one tile per multiprocessor, and with fewer
  multiprocessors it needs more waves. A matmul that just fills the device takes twice as long beside the smallest
  collective; a large one is slowed in proportion to the lost multiprocessors. In between, the slowdown depends on how
  the library places tiles, so it is measured for matmuls of several numbers of waves.
- A collective and a memory-bound kernel take memory bandwidth from each other: both have a slowdown factor. Small
  kernels are slowed more, because they read from the cache, and collectives evict its contents.
- Collectives of different process groups that cross the same links share the links' bandwidth.
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
_SMALLEST_TILE = 128 * 64  # tile of matmuls whose results are too small to fill the device with the tiles above
_ITEMSIZE = {"float32": 4, "fp32": 4, "float64": 8, "fp64": 8}  # a matmul's other dtypes have 2 bytes


class ComputeKind(Enum):
    """Kinds of compute with different contention."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Contender:
    """The properties of a compute node that determine contention."""

    kind: ComputeKind
    results: int = 0  # elements that a matmul writes; 0: unknown
    bytes: int = 0  # read and written


@dataclass(frozen=True, slots=True)
class Traffic:
    """The properties of a collective that determine contention."""

    slowdown: Slowdown
    link: str
    demand: float  # fraction of the link's bandwidth that the collective uses when it runs alone


def contender_of(node: Node) -> Contender:
    """Return the `Contender` of a KERNEL or EXTERN node."""
    work = node.work
    loops = node.kind is Kind.KERNEL and node.op == "kernel"  # the other generated kernels are products and attention
    if loops or work is None or work.flops <= 0:
        return Contender(ComputeKind.MEMORY, bytes=0 if work is None else work.read_bytes + work.write_bytes)
    if "attention" in node.op:
        return Contender(ComputeKind.ATTENTION)
    results = work.write_bytes // _ITEMSIZE.get(work.dtype.removeprefix("torch."), 2)
    return Contender(ComputeKind.MATMUL, results)


def traffic_of(node: Node, profile: DeviceProfile) -> Traffic:
    """Return the `Traffic` of a START or COMM node."""
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
    """Return the number of tiles of a matmul with `results` elements."""
    return -(-results // _TILE)


def waves(tiles: int, multiprocessors: int) -> int:
    """Return the number of waves in which `multiprocessors` compute `tiles`."""
    return math.ceil(tiles / max(1, multiprocessors))


def compute_stretch(load: Contender, beside: Sequence[Traffic], profile: DeviceProfile) -> float:
    """Return the factor by which compute takes longer while the collectives `beside` run."""
    if not beside:
        return 1.0
    if load.kind is ComputeKind.MATMUL:  # each collective occupies its own multiprocessors
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
    """Return each running collective's slowdown factor beside `load` (None: no compute) and the other collectives."""
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
