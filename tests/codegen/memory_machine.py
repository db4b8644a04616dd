"""Runs a program's instructions on names instead of numbers, and checks which buffer every piece of memory holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch

from overlapc.codegen.program import (
    Allocate,
    AllocateArena,
    Call,
    Carve,
    Free,
    Instruction,
    Launch,
    Program,
    Return,
    Reuse,
    TakeOver,
)
from overlapc.ir.body import Body, Load, Store, depends_on
from overlapc.ir.ops import Layout, Loops, LoweredGraph, View, buffers_read, buffers_written, loops_of, tree_leaves
from tests.ir.interpret import evaluate


@dataclass
class Block:
    """Memory of one allocation or of one place in an arena. `holds` names the buffer whose content it has."""

    bytes: int
    holds: str | None = None
    place: tuple[str, int] | None = None  # arena and offset


@dataclass
class Machine:
    """An interpreter that asserts every rule of memory use. Sizes must be static."""

    program: Program
    graph: LoweredGraph
    blocks: dict[str, Block] = field(default_factory=dict)  # by variable
    arenas: dict[str, int] = field(default_factory=dict)  # bytes
    # Includes arguments and whole arenas; a buffer that may reuse an argument's memory counts in addition to it.
    peak_bytes: int = 0

    def run(self) -> None:
        """Run all instructions, and assert that only arguments and results are left at the end."""
        for name in (*self.program.inputs, *self.program.constants):
            if name in self.graph.views:
                self.blocks[name] = Block(self._bytes(self.graph.views[name].layout), name)
        owned = set(self.blocks)
        for item in self.program.instructions:
            self._step(item)
            alone = (block.bytes for block in self.blocks.values() if block.place is None)
            self.peak_bytes = max(self.peak_bytes, sum(self.arenas.values()) + sum(alone))
        returned = {self.graph.root(view.buffer) for view in tree_leaves(self.graph.outputs) if isinstance(view, View)}
        assert set(self.blocks) - owned == returned - owned, "something is never freed"
        assert not self.arenas
        blocks = [id(self.blocks[name]) for name in returned]
        assert len(set(blocks)) == len(blocks), "two results in one memory"

    def _bytes(self, layout: Layout) -> int:
        return int(layout.storage_bytes())

    def _new(self, variable: str, block: Block) -> None:
        assert variable not in self.blocks, f"{variable} is there already"
        self.blocks[variable] = block

    def _step(self, item: Instruction) -> None:
        if isinstance(item, Allocate):
            self._new(item.variable, Block(self._bytes(item.layout)))
        elif isinstance(item, AllocateArena):
            self.arenas[item.variable] = item.bytes
        elif isinstance(item, Carve):
            self._carve(item)
        elif isinstance(item, TakeOver):
            assert self._bytes(item.layout) == self.blocks[item.source].bytes
            self._new(item.variable, self.blocks.pop(item.source))
        elif isinstance(item, Reuse):
            assert self._bytes(item.layout) == self.blocks[item.source].bytes
            self._new(item.variable, self.blocks[item.source])
        elif isinstance(item, Free):
            for name in item.variables:
                del (self.arenas if name in self.arenas else self.blocks)[name]
        elif isinstance(item, Launch):
            self._launch(item)
        elif isinstance(item, Call):
            self._call(item)
        elif isinstance(item, Return):
            for view in tree_leaves(item.values):
                if isinstance(view, View):
                    self._holds(self.program.variables[view.buffer], view.buffer)

    def _carve(self, item: Carve) -> None:
        """Take a free place in an arena, or the place of a buffer of the same size that is freed next (a take-over)."""
        begin, size = item.offset, self._bytes(item.layout)
        assert begin + size <= self.arenas[item.arena]
        for block in list(self.blocks.values()):
            if block.place is None or block.place[0] != item.arena:
                continue
            if block.place[1] == begin and block.bytes == size:
                return self._new(item.variable, block)
            assert begin + size <= block.place[1] or block.place[1] + block.bytes <= begin, "places overlap"
        return self._new(item.variable, Block(size, place=(item.arena, begin)))

    def _holds(self, variable: str, buffer: str) -> None:
        held = self.blocks[variable].holds
        assert held == buffer, f"{variable} holds {held} where {buffer} is read"

    def _launch(self, item: Launch) -> None:
        variable = dict(zip(item.kernel.buffers, item.variables, strict=True))
        for name in buffers_read(item.op) & variable.keys():
            self._holds(variable[name], name)
        block = {name: self.blocks[each] for name, each in variable.items()}
        parts = loops_of(item.op)
        for part in parts:
            for store in part.body.stores:
                self._stores(store, part, parts, block)
        for name in buffers_written(item.op):
            block[name].holds = name

    def _stores(self, store: Store, part: Loops, parts: tuple[Loops, ...], block: dict[str, Block]) -> None:
        """Assert that no other buffer needs the memory that `store` writes, and that the kernel reads it no more."""
        there = block[store.buffer]
        kept = [name for name, other in self.blocks.items() if other is there]
        assert len(kept) == 1 or kept[0] in self.graph.inputs, f"{store.buffer} is stored over what {kept} still need"
        for other in parts:
            for load in other.body.loads():
                if block[load.buffer] is there:
                    assert other is part, f"{load.buffer} is read beside the part that stores {store.buffer} there"
                    assert not races(part.body, load, store), f"{store.buffer} is stored over {load.buffer} too early"
            for another in other.body.stores:
                assert another.buffer == store.buffer or block[another.buffer] is not there

    def _call(self, item: Call) -> None:
        for name in buffers_read(item.op):
            if name in self.graph.views:
                self._holds(self.program.variables[name], name)
        if not item.op.out:  # the memory of an `out` call was allocated before
            for variable, _ in item.results:
                self._new(variable, Block(self._bytes(self.program.layouts[variable])))
        for name in buffers_written(item.op):
            self.blocks[self.program.variables[name]].holds = name


def races(body: Body, load: Load, store: Store) -> bool:
    """Whether an iteration may load an element that another one has stored, found by trying all iterations.

    Iterations of parallel loops run in any order; those of a reduction run one after the other, before stores per row.
    """
    if load.indirect or store.indirect:
        return True
    loops = (*body.loops, *body.reduction)
    grid = torch.meshgrid(*(torch.arange(int(loop.size)) for loop in loops), indexing="ij") if loops else ()
    at = {loop.symbol: each.flatten() for loop, each in zip(loops, grid, strict=True)}
    count = grid[0].numel() if grid else 1
    symbols = {loop.symbol for loop in body.reduction}
    each_item = bool(symbols & store.index.free_symbols) or depends_on([store.value], symbols)[store.value]
    rows = 1
    for loop in body.reduction if not each_item else ():
        rows *= int(loop.size)  # for a store per row, the iterations of the reduction count as one

    def elements(index: sympy.Expr) -> list[int]:
        found = evaluate(index, at)
        return found.tolist() if isinstance(found, torch.Tensor) else [found] * count

    iteration = (torch.arange(count) // rows).tolist()
    stored: dict[int, set[int]] = {}
    for element, who in zip(elements(store.index), iteration, strict=True):
        stored.setdefault(element, set()).add(who)
    return any(
        stored.get(element, {who}) != {who} for element, who in zip(elements(load.index), iteration, strict=True)
    )
