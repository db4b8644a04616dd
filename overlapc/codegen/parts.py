"""Splits a program into parts that are captured as CUDA graphs, and single instructions between (`cuda_graphs=True`).

    launch a; call mm; call nonzero; launch b; launch c; return
 -> part_0[launch a; call mm]; call nonzero; part_1[launch b; launch c]; return

`codegen.capturable` decides what a part may contain. A collective is either launched and waited for in one part, or
both happen outside of parts, because a capture cannot wait for a collective that was launched elsewhere. A part is a
function of variables, run by `overlapc.runtime.cuda_graphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from overlapc.codegen.capturable import Rules, over_nccl
from overlapc.codegen.program import (
    Allocate,
    Call,
    ExpectLayout,
    Free,
    Instruction,
    NodeInstruction,
    Program,
    Return,
    TakeOver,
    WaitFor,
)
from overlapc.ir.ops import Extern

# A replay costs the host about as much as two launches, and more if inputs must be copied.
LEAST_NODES = 4


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """Instructions captured together, as a function of `inputs` that returns `outputs` (variables)."""

    name: str
    instructions: tuple[Instruction, ...]
    inputs: tuple[str, ...]
    inner: frozenset[str]  # inputs that earlier parts define, at the same addresses in every replay
    written: frozenset[str]  # inputs whose contents change
    freed: frozenset[str]  # inputs that are not used afterwards
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        lines = (f"    {item}" for item in self.instructions)
        return "\n".join([f"{self.name}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}", *lines])


@dataclass(frozen=True, slots=True)
class Cut:
    """A node that is in no part, and the reason."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Partition:
    """A program as captured parts and the instructions between them.

    leaving: returned variables whose memory belongs to a part.
    """

    steps: tuple[Instruction | CapturedPart, ...]
    cuts: tuple[Cut, ...]
    leaving: tuple[str, ...]

    @property
    def parts(self) -> tuple[CapturedPart, ...]:
        """The captured parts, in order."""
        return tuple(step for step in self.steps if isinstance(step, CapturedPart))

    def summary(self) -> str:
        """Return `2 captured parts of 14 nodes; outside: 1 x its result must be read on the host (nonzero)`."""
        held = sum(isinstance(item, NodeInstruction) for part in self.parts for item in part.instructions)
        by_reason: dict[str, list[str]] = {}
        for cut in self.cuts:
            by_reason.setdefault(cut.reason, []).append(cut.node)
        why = [f"{len(nodes)} x {reason} ({nodes[0]})" for reason, nodes in by_reason.items()]
        parts = f"{len(self.parts)} captured part{'' if len(self.parts) == 1 else 's'} of {held} nodes"
        return f"{parts}; outside: {'; '.join(why)}" if why else parts

    def __str__(self) -> str:
        cuts = (f"{cut.node}: {cut.reason}" for cut in self.cuts)
        return "\n".join([self.summary(), *cuts, *map(str, self.steps)])


def split(program: Program, device_type: str = "cuda", takes: Callable[[Extern], bool] = over_nccl) -> Partition:
    """Split `program` into parts on its first device of this type. takes: whether a collective can be captured."""
    items = program.instructions
    home = _home(program, device_type)
    if home is None:
        return Partition(items, (Cut(program.name, f"nothing runs on {device_type}"),), ())
    rules = Rules(program, home, takes)
    refused = {at: reason for at, item in enumerate(items) if (reason := item.refusal(rules)) is not None}
    edges = {at for at, item in enumerate(items) if item.outside_captures}
    _cut_collectives(program, refused, edges)
    cuts = [Cut(_name(items[at]), refused[at]) for at in sorted(refused) if isinstance(items[at], NodeInstruction)]
    builder = _Builder(program)
    for begin, end in _runs(len(items), {*refused, *edges}):
        nodes = [item for item in items[begin:end] if isinstance(item, NodeInstruction)]
        if len(nodes) >= LEAST_NODES:
            builder.add(begin, end)
        elif nodes:
            cuts += [Cut(_name(node), f"fewer than {LEAST_NODES} nodes between two cuts") for node in nodes]
    return builder.finish(cuts)


def _name(item: Instruction) -> str:
    assert isinstance(item, NodeInstruction)
    return item.op.name


def _home(program: Program, device_type: str) -> torch.device | None:
    """Return the device that is captured: the first one of this type that holds a variable; None if there is none."""
    devices = (layout.device for layout in program.layouts.values())
    return next((device for device in devices if device.type == device_type), None)


def _runs(count: int, cut: set[int]) -> Iterable[tuple[int, int]]:
    """Yield [begin, end) of every run of positions between cuts."""
    begin = 0
    for at in (*sorted(cut), count):
        if at > begin:
            yield begin, at
        begin = at + 1


# --- collectives


def _cut_collectives(program: Program, refused: dict[int, str], edges: set[int]) -> None:
    """Refuse the launch and the waits of each collective that would be in flight at a cut.

    The refused launch and waits are cuts themselves, so collectives in flight there are refused in turn.
    """
    launched: dict[str, int] = {}  # variable -> its launch
    waits: dict[int, list[int]] = {}
    for at, item in enumerate(program.instructions):
        if isinstance(item, Call) and item.starts:
            launched.update((name, at) for name in (*item.makes(), *item.overwrites(program)))
            waits[at] = []
        elif isinstance(item, WaitFor):
            start = launched.get(item.variable)
            if start is None:
                refused.setdefault(at, "another graph launched its collective")
            else:
                waits[start].append(at)
    spans = {start: max(ends, default=len(program.instructions)) for start, ends in waits.items()}
    points = {at for start, ends in waits.items() for at in (start, *ends)} | set(refused) | edges
    over = _in_flight(spans, sorted(points))
    todo = [(at, start) for at in (*refused, *edges) for start in over[at]]
    todo += [(start, start) for start in spans if start in refused]
    done: set[int] = set()
    while todo:
        cause, start = todo.pop()
        if start in done:
            continue
        done.add(start)
        reason = f"in flight across the cut at {_shown(program.instructions[cause])}"
        for at in (start, *waits[start]):
            refused.setdefault(at, reason if cause != start else "its collective is launched outside of a part")
            todo += [(at, other) for other in over[at]]


def _in_flight(spans: Mapping[int, int], points: list[int]) -> dict[int, list[int]]:
    """Map each point to the launches of the collectives that are in flight there."""
    found: dict[int, list[int]] = {}
    in_flight: list[int] = []
    for at in points:
        in_flight = [start for start in in_flight if spans[start] > at]
        found[at] = list(in_flight)
        if at in spans:
            in_flight.append(at)
    return found


def _shown(item: Instruction) -> str:
    if isinstance(item, Return):
        return "the end"
    return _name(item) if isinstance(item, NodeInstruction) else type(item).__name__


# --- variables


class _Builder:
    """Builds a Partition; call `add` for the parts in program order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps: list[Instruction | CapturedPart] = []
        self.next = 0  # position of the first instruction that is not in `steps`
        self.parts = 0
        self.captured: set[str] = set()  # variables in memory of parts
        self.last_use: dict[str, int] = {}
        for at, item in enumerate(program.instructions):
            self.last_use.update(dict.fromkeys(item.reads(program), at))

    def add(self, begin: int, end: int) -> None:
        """Append the instructions since the last part, then a part of the instructions [begin, end).

        Allocations after the part's last node stay outside, because the part would hold their memory forever. Frees of
        variables that the part does not use stay outside, too.
        """
        self._pass(self.next, begin)
        self.next = end
        program = self.program
        last = max(at for at in range(begin, end) if isinstance(program.instructions[at], NodeInstruction))
        items = list(program.instructions[begin:end])
        behind = [item for item in items[last + 1 - begin :] if isinstance(item, Allocate | TakeOver)]
        inside = [item for item in items if not any(item is other for other in behind)]
        while isinstance(inside[0], ExpectLayout):  # belongs to the call before this part
            self.steps.append(inside.pop(0))
        touched = {
            name for item in inside if not isinstance(item, Free) for name in (*item.reads(program), *item.makes())
        }
        idle = {name for item in inside if isinstance(item, Free) for name in item.variables} - touched
        if idle:
            self.steps.append(Free(tuple(sorted(idle))))
        kept = tuple(item for item in (_without(item, idle) for item in inside) if item is not None)
        part = self._part(kept, last)
        self.parts += 1
        self.captured.update(part.outputs)
        self.steps.append(part)
        self._append(behind)

    def finish(self, cuts: Iterable[Cut]) -> Partition:
        self._pass(self.next, len(self.program.instructions))
        returned = {
            name
            for item in self.program.instructions
            if isinstance(item, Return)
            for name in item.reads(self.program)
            if name in self.program.layouts
        }
        return Partition(tuple(self.steps), tuple(cuts), tuple(sorted(returned & self.captured)))

    def _pass(self, begin: int, end: int) -> None:
        self._append(self.program.instructions[begin:end])

    def _append(self, items: Iterable[Instruction]) -> None:
        for item in items:
            self.steps.append(item)
            if isinstance(item, TakeOver) and item.source in self.captured:
                self.captured.add(item.variable)

    def _part(self, items: tuple[Instruction, ...], last: int) -> CapturedPart:
        program = self.program
        inputs: dict[str, None] = {}
        made: set[str] = set()
        freed: set[str] = set()
        written: set[str] = set()
        for item in items:
            inputs.update((name, None) for name in item.reads(program) if name not in made)
            made.update(item.makes())
            written.update(item.overwrites(program))
            freed.update(item.frees())
        given = [name for name in inputs if name not in program.constants]
        return CapturedPart(
            f"part_{self.parts}",
            items,
            tuple(given),
            frozenset(given) & self.captured,
            frozenset(given) & written,
            frozenset(given) & freed,
            tuple(sorted(name for name in made - freed if self.last_use.get(name, -1) > last)),
        )


def _without(item: Instruction, names: set[str]) -> Instruction | None:
    if not isinstance(item, Free):
        return item
    left = tuple(name for name in item.variables if name not in names)
    return replace(item, variables=left) if left else None
