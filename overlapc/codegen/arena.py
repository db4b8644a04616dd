"""One allocation for all buffers that are allocated and freed within a graph (`memory="pool"`).

    a = allocate 64KiB; b = allocate 64KiB; free a; c = allocate 32KiB
 -> arena = allocate 128KiB; a = arena[0:]; b = arena[64KiB:]; free a; c = arena[0:]

There is one arena per device. Three kinds of buffers keep an allocation of their own: buffers that are returned
(results, activations saved for backward), because their owner frees them independently; buffers of symbolic size; and
arguments of calls that depend on where memory begins (`as_strided_scatter`), because the buffer must begin there, too.
`Arena` assigns offsets by best fit in program order, so it may be larger than the peak of live bytes;
`peak_bytes` accounts for that, and the report shows the difference.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import sympy
import torch

from overlapc.codegen.program import (
    Allocate,
    AllocateArena,
    Call,
    Carve,
    Free,
    Instruction,
    NodeInstruction,
    Program,
    Return,
    TakeOver,
)
from overlapc.ir.ops import inputs_of, sees_where_memory_begins, views_in
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Schedule

ALIGNMENT_BYTES = 512  # alignment of torch's CUDA allocator, more than any kernel assumes


class Arena:
    """Assigns offsets in one allocation: the best fit among the holes, or the end if no hole is large enough."""

    def __init__(self) -> None:
        self.bytes = 0  # size of the whole arena so far
        self._holes: list[tuple[int, int]] = []  # (offset, bytes), by offset, never adjacent
        self._taken: dict[int, int] = {}  # offset -> bytes

    def take(self, size_bytes: int) -> int:
        """Reserve memory for a new buffer and return its offset."""
        size = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        fitting = [(free, offset) for offset, free in self._holes if free >= size]
        if fitting:
            free, offset = min(fitting)
            at = bisect.bisect_left(self._holes, (offset, 0))
            self._holes[at : at + 1] = [(offset + size, free - size)] if free > size else []
        else:
            offset = self.bytes
            if self._holes and sum(self._holes[-1]) == self.bytes:  # the last hole reaches the end: it grows
                offset = self._holes.pop()[0]
            self.bytes = offset + size
        self._taken[offset] = size
        return offset

    def give_back(self, offset: int) -> None:
        """Free the buffer at `offset` and merge its hole with adjacent holes."""
        size = self._taken.pop(offset)
        at = bisect.bisect_left(self._holes, (offset, 0))
        if at < len(self._holes) and self._holes[at][0] == offset + size:
            size += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == offset:
            before, free = self._holes.pop(at - 1)
            at, offset, size = at - 1, before, size + free
        self._holes.insert(at, (offset, size))


@dataclass
class _Chain:
    """Memory of one buffer, shared by all variables that take it over one after another."""

    device: torch.device
    bytes: int
    offset: int = -1


def in_arena(program: Program) -> Program:
    """Return `program` with one arena per device for the buffers that it allocates and frees itself.

    Return the same object if no buffer can be in one.
    """
    chains = _chains(program)
    if not chains:
        return program
    arenas: dict[torch.device, Arena] = {}
    names = {device: f"arena_{str(device).replace(':', '')}" for device in {chain.device for chain in chains.values()}}
    last = _last_frees(program, chains)
    body: list[Instruction] = []
    for at, item in enumerate(program.instructions):
        if isinstance(item, Allocate | TakeOver) and item.variable in chains:
            chain = chains[item.variable]
            if isinstance(item, Allocate):
                chain.offset = arenas.setdefault(chain.device, Arena()).take(chain.bytes)
            body.append(Carve(item.variable, names[chain.device], chain.offset, item.layout))
            if isinstance(item, TakeOver):
                body.append(Free((item.source,)))
            continue
        body.append(item)
        if isinstance(item, Free):
            for name in item.variables:
                if name in chains:
                    arenas[chains[name].device].give_back(chains[name].offset)
            done = tuple(names[device] for device, when in last.items() if when == at)
            if done:
                body.append(Free(done))
    first = _first_of_body(body)
    allocations = [AllocateArena(names[device], device, arena.bytes) for device, arena in arenas.items()]
    return replace(program, instructions=(*body[:first], *allocations, *body[first:]))


def peak_bytes(program: Program, schedule: Schedule, hint: Callable[[sympy.Expr], int]) -> int:
    """Return the peak of live bytes while `program`, built from `schedule`, runs; `hint` evaluates symbolic sizes."""
    live = peak = analyze(schedule).base_bytes
    sizes = {buffer.name: buffer.bytes for buffer in schedule.buffers.values() if buffer.freeable}
    scratch = {node.name: node.scratch_bytes for node in schedule.nodes}
    for item in program.instructions:
        allocated = [(name, hint(size)) for name, size in item.allocates(program)]
        if isinstance(item, TakeOver):
            sizes[item.variable] = sizes.pop(item.source, 0)
        else:
            live -= sum(sizes.pop(name, 0) for name in item.frees())
        sizes.update(allocated)
        live += sum(size for _, size in allocated)
        if isinstance(item, NodeInstruction):
            peak = max(peak, live + scratch.get(item.op.name, 0))
    return peak


def _chains(program: Program) -> dict[str, _Chain]:
    """Map each variable that can be in an arena to its chain: buffers of static size that the program frees."""
    found: dict[str, _Chain] = {}
    freed: set[str] = set()
    for item in program.instructions:
        if isinstance(item, Allocate):
            size = item.layout.storage_bytes()
            if size.is_Integer and size > 0:
                found[item.variable] = _Chain(item.layout.device, int(size))
        elif isinstance(item, TakeOver) and item.source in found:
            found[item.variable] = found[item.source]
        elif isinstance(item, Free):
            freed.update(item.variables)
    outside = {id(found[name]) for name in (*_returned(program), *_address_dependent(program)) if name in found}
    ending = {id(found[name]) for name in freed if name in found}
    return {name: chain for name, chain in found.items() if id(chain) in ending - outside}


def _returned(program: Program) -> Iterable[str]:
    for item in program.instructions:
        if isinstance(item, Return):
            yield from (program.variables[view.buffer] for view in views_in(item.values))


def _address_dependent(program: Program) -> Iterable[str]:
    for item in program.instructions:
        if isinstance(item, Call) and sees_where_memory_begins(item.op):
            yield from (
                program.variables[leaf.buffer] for leaf in inputs_of(item.op) if leaf.buffer in program.variables
            )


def _last_frees(program: Program, chains: Mapping[str, _Chain]) -> dict[torch.device, int]:
    """Map each device to the position of the last Free of a buffer in its arena."""
    found: dict[torch.device, int] = {}
    for at, item in enumerate(program.instructions):
        if isinstance(item, Free):
            found.update((chains[name].device, at) for name in item.variables if name in chains)
    return found


def _first_of_body(body: Iterable[Instruction]) -> int:
    """Return the position of the first Carve: the arena is allocated only after the inputs have been checked."""
    return next(at for at, item in enumerate(body) if isinstance(item, Carve))
