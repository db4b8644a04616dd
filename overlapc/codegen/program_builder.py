"""Turns the final schedule into a program.

Memory is assigned here: which arguments a kernel overwrites in place, which freed buffer the next allocation takes
over, and where each buffer is freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import sympy
import torch

from overlapc.codegen.capturable import carried_by
from overlapc.codegen.copies import Copied
from overlapc.codegen.generators import KernelSource
from overlapc.codegen.program import (
    Allocate,
    BindSize,
    Call,
    CheckInput,
    ComputeSize,
    ExpectLayout,
    Free,
    Instruction,
    Launch,
    OutputMemory,
    Program,
    Release,
    Return,
    Reuse,
    Shared,
    TakeOver,
    WaitFor,
)
from overlapc.ir.body import Body
from overlapc.ir.hazards import overwrites_in_place
from overlapc.ir.ops import (
    Attention,
    Combo,
    Extern,
    Handle,
    IROp,
    Kernel,
    Layout,
    Loops,
    LoweredGraph,
    Start,
    View,
    Wait,
    buffers_read,
    inputs_of,
    loops_of,
    named_in,
    views_in,
)
from overlapc.runtime.collective_ops import SAFE_OVER_GLOO, SAFE_OVER_GLOO_ON_GPUS
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Schedule

# Arguments of fewer bytes are not reused: allocating new memory costs the host less than checking that only this graph
# holds the argument (2 us).
SMALLEST_REUSED = 64 << 10


def build_program(
    schedule: Schedule,
    graph: LoweredGraph,
    kernels: Mapping[str, KernelSource],
    *,
    donated: Collection[str] = (),
    copies: Mapping[str, Copied] = MappingProxyType({}),
) -> Program:
    """Build the program for `schedule`; `kernels` holds the source of every generated kernel by the name of its op.

    donated: arguments that may be overwritten after their last use if only this graph holds their memory at run time.
    copies: collectives that run by copies, by the name of their start.
    """
    return _Builder(schedule, graph, kernels, donated, copies).build()


class _Builder:
    def __init__(
        self,
        schedule: Schedule,
        graph: LoweredGraph,
        kernels: Mapping[str, KernelSource],
        donated: Collection[str],
        copies: Mapping[str, Copied],
    ) -> None:
        self.copies = copies
        self.shards = _shards(schedule, copies)
        self.unread = {start: set(copied.held) for start, copied in copies.items() if copied.held}
        self.schedule = schedule
        self.graph = graph
        self.kernels = kernels
        self.instructions: list[Instruction] = []
        self.layouts: dict[str, Layout] = {}
        self.donated = set(donated)
        self.planned: set[str] = set()  # roots whose memory this program allocated
        self.spare: dict[tuple[torch.device, sympy.Expr], str] = {}  # dead since the last node, not yet freed
        self.sizes_known: set[str] = set()
        self.relied_on: set[str] = set()
        self.taken: dict[str, str] = {}  # root -> the output that took over its memory

    def build(self) -> Program:
        self.relied_on = self._layouts_relied_on()
        self._bind_inputs()
        profile = analyze(self.schedule)
        waits = self._waits_by_start()
        for at, (node, frees) in enumerate(zip(self.schedule.nodes, profile.frees, strict=True)):
            op: IROp = node.payload
            dying = {self.graph.root(name) for name in frees}
            if isinstance(op, Kernel):
                self._launch(op, dying)
            elif isinstance(op, Wait):
                # The first wait of a bucket waits for all its results: each later wait would cost a gap on the device.
                start = self.schedule.started.get(at)
                together = waits.pop(at if start is None else start, [])
                self.instructions += self._waits(None if start is None else self.schedule.nodes[start].name, together)
            elif node.name in self.copies:
                self._call(self._by_copies(op, self.copies[node.name]), True)
            elif isinstance(op, Start):
                self._call(_safe_start(op.call), True)
            else:
                self._call(op, False)
            self._free(dying)
            self._release(dying)
        self._free_spare()
        self.instructions.append(Return(self.graph.outputs))
        names = [*self.graph.inputs, *self.graph.constants, *(n for node in self.schedule.nodes for n in node.writes)]
        return Program(
            self.graph.name,
            self.graph.inputs,
            tuple(self.instructions),
            {name: self._variable(name) for name in names},
            self.layouts,
            self.graph.constants,
            on_failure=tuple(copies.failed for copies in {copied.copies: None for copied in self.copies.values()}),
        )

    def _waits(self, start: str | None, waits: list[Wait]) -> list[Instruction]:
        by = None if start is None else self.copies.get(start)
        if by is None or not waits:
            return [WaitFor(self._variable(wait.source.buffer), wait) for wait in waits]
        return [WaitFor(self._variable(waits[0].source.buffer), waits[0], partial(by.copies.wait, by.index))]

    def _by_copies(self, op: IROp, by: Copied) -> Extern:
        """Return the call that starts a collective by copies; it takes and returns lists."""
        assert isinstance(op, Start)
        call = op.call
        lists = [list(value) if isinstance(value, list | tuple) else [value] for value in (call.args[0], call.result)]
        return replace(call, target=partial(by.copies.start, by.index), args=(lists[0],), kwargs={}, result=lists[1])

    def _release(self, dying: set[str]) -> None:
        for start in [start for start, names in self.unread.items() if names & dying]:
            self.unread[start] -= dying
            if not self.unread[start]:
                del self.unread[start]
                by = self.copies[start]
                self.instructions.append(Release(partial(by.copies.release, by.index)))

    def _waits_by_start(self) -> dict[int, list[Wait]]:
        """Map the position of each start to its waits; a wait for another graph's start is under its own position."""
        found: dict[int, list[Wait]] = {}
        for at, node in enumerate(self.schedule.nodes):
            if isinstance(node.payload, Wait):
                found.setdefault(self.schedule.started.get(at, at), []).append(node.payload)
        return found

    def _variable(self, buffer: str) -> str:
        """Return the variable of a buffer: waits and mutations rename a buffer, but it stays the same Python object."""
        return self.graph.root(buffer)

    # --- arguments

    def _bind_inputs(self) -> None:
        for name, expr in self.graph.scalars.items():
            if expr.is_Symbol:
                self._bind(BindSize(expr, name))
        used = self._inputs_used()
        # Arguments that the graph does not use may be passed as None, so sizes are read from used arguments first.
        for name in sorted((*self.graph.inputs, *self.graph.constants), key=lambda name: name not in used):
            view = self.graph.views.get(name)
            if view is None:
                continue
            self.layouts[name] = view.layout
            if name not in self.graph.constants:
                self._bind_layout(name, view.layout)
        for name in self.graph.inputs:
            view = self.graph.views.get(name)
            if view is not None and name in self.relied_on:
                self.instructions.append(CheckInput(name, view.layout))

    def _layouts_relied_on(self) -> set[str]:
        """Return the buffers whose traced layout must hold: kernels or collectives read them, or views of them exist.

        Buffers that are only passed to calls as they are may have another layout than traced: the fake implementations
        of some ops return another one (`_embedding_bag`).
        """
        found: set[str] = set()
        for node in self.schedule.nodes:
            op: IROp = node.payload
            if isinstance(op, Attention):
                found |= {view.buffer for view in op.inputs}
            elif isinstance(op, Loops | Combo):
                found |= {load.buffer for part in loops_of(op) for load in part.body.loads()}
                found |= {view.buffer for view in op.mutates}
            elif isinstance(op, Start):
                found |= {leaf.buffer for leaf in inputs_of(op)}
            else:
                found |= {leaf.buffer for leaf in inputs_of(op) if self._is_other_view(leaf)}
        found |= {leaf.buffer for leaf in named_in(self.graph.outputs) if self._is_other_view(leaf)}
        return {self.graph.root(name) for name in found}

    def _is_other_view(self, leaf: View | Handle) -> bool:
        own = self.graph.views.get(self.graph.root(leaf.buffer))
        return isinstance(leaf, View) and own is not None and leaf.layout != own.layout

    def _inputs_used(self) -> set[str]:
        """Return the arguments that some op reads or overwrites, or that are returned."""
        read = {name for node in self.schedule.nodes for name in (*node.reads, *node.mutates)}
        returned = {view.buffer for view in named_in(self.graph.outputs)}
        return {self.graph.root(name) for name in read | returned}

    def _bind_layout(self, buffer: str, layout: Layout) -> None:
        """Assign the sizes and strides of a tensor to their symbols."""
        for stride, exprs in ((False, layout.size), (True, layout.stride)):
            for dim, expr in enumerate(exprs):
                if expr.is_Symbol:
                    self._bind(BindSize(expr, buffer, dim, stride))

    def _bind(self, binding: BindSize | ComputeSize) -> None:
        if str(binding.symbol) not in self.sizes_known:
            self.sizes_known.add(str(binding.symbol))
            self.instructions.append(binding)

    # --- ops

    def _launch(self, op: Kernel, dying: set[str]) -> None:
        parts = loops_of(op)
        readers = Counter(root for part in parts for root in {self.graph.root(name) for name in buffers_read(part)})
        shared = {root for root in dying if readers[root] > 1}  # parts run concurrently: no part may overwrite these
        if isinstance(op, Attention):
            self._allocate([self._memory_not_shared(view) for view in op.outputs])
        else:
            self._allocate([self._memory_for(view, part, dying, shared) for part in parts for view in part.outputs])
        kernel = self.kernels[op.name]
        for symbol in kernel.sizes:
            if str(symbol) in self.graph.computed:
                self._bind(ComputeSize(symbol, self.graph.computed[str(symbol)]))
        roots = [self._variable(name) for name in kernel.buffers]
        self.instructions.append(Launch(kernel, op, tuple(self.taken.get(root, root) for root in roots)))

    def _memory_for(self, view: View, op: Loops, dying: set[str], shared: set[str]) -> OutputMemory:
        """Return memory for a kernel's output.

        In order of preference: its place in a pool for copies, the memory of an argument that dies here, that of a
        buffer that died at the last node, that of a donated argument, new memory.
        """
        self.layouts[view.buffer] = view.layout
        if view in self.shards:
            by, at = self.shards[view]
            return Shared(view.buffer, view.layout, partial(by.copies.shard, by.index, at))
        self.planned.add(view.buffer)
        for root in sorted((dying & self.planned) - shared):
            if self._can_reuse(root, view, op.body):
                dying.discard(root)
                self.taken[root] = view.buffer
                return TakeOver(view.buffer, root, view.layout)
        spare = self._spare(view)
        if spare is not None:
            return spare
        size = view.layout.storage_bytes()
        if size.is_Integer and size < SMALLEST_REUSED:
            return Allocate(view.buffer, view.layout)
        for root in sorted((dying & self.donated) - shared):
            if self._can_reuse(root, view, op.body):
                self.donated.discard(root)
                return Reuse(view.buffer, root, view.layout)
        return Allocate(view.buffer, view.layout)

    def _memory_not_shared(self, view: View) -> OutputMemory:
        """Return memory for an output that must not share memory with an argument: a spare buffer's, or new."""
        self.planned.add(view.buffer)
        self.layouts[view.buffer] = view.layout
        return self._spare(view) or Allocate(view.buffer, view.layout)

    def _can_reuse(self, root: str, view: View, body: Body) -> bool:
        """Whether `body` may write `view` into the memory of `root`."""
        there = self.layouts[root]
        same = (there.storage_bytes(), there.device) == (view.layout.storage_bytes(), view.layout.device)
        return same and self._may_overwrite(body, root, view.buffer)

    def _spare(self, view: View) -> TakeOver | None:
        spare = self.spare.pop((view.layout.device, view.layout.storage_bytes()), None)
        return None if spare is None else TakeOver(view.buffer, spare, view.layout)

    def _allocate(self, memories: Collection[OutputMemory]) -> None:
        """Append allocations, new memory only after `_free_spare`: both at once would exceed the planned peak."""
        self.instructions += [memory for memory in memories if isinstance(memory, TakeOver)]
        self._free_spare()
        self.instructions += [memory for memory in memories if not isinstance(memory, TakeOver)]

    def _may_overwrite(self, body: Body, read: str, written: str) -> bool:
        """Whether the kernel may store `written` in the memory that it reads as `read`.

        It must store `written` exactly once and must not write the memory of `read` by another store.
        """
        names = {load.buffer for load in body.loads() if self.graph.root(load.buffer) == read}
        stores = [store for store in body.stores if store.buffer == written]
        return (
            bool(names)
            and len(stores) == 1
            and not any(self.graph.root(store.buffer) == read for store in body.stores)
            and overwrites_in_place(body, stores[0], names)
        )

    def _call(self, op: Extern, starts: bool) -> None:
        memories: list[OutputMemory] = []
        if op.out and isinstance(op.result, View):
            memories.append(self._memory_not_shared(op.result))
        self._allocate(memories)
        given = {view.buffer for view in op.mutates} | {leaf.buffer for leaf in named_in(op.arguments)}
        results = [(leaf, path) for leaf, path in _paths(op.result, ()) if leaf.buffer not in given]
        self.instructions.append(Call(op, tuple((leaf.buffer, path) for leaf, path in results), starts))
        for leaf, _ in results:
            if isinstance(leaf, Handle):
                if leaf.defines is not None:
                    self._bind(BindSize(leaf.defines, leaf.buffer))
                continue
            self.layouts[leaf.buffer] = leaf.layout
            self._bind_layout(leaf.buffer, leaf.layout)
            # `out=` was allocated with the traced layout.
            if not (starts or op.out) and self.graph.root(leaf.buffer) in self.relied_on:
                self.instructions.append(ExpectLayout(leaf.buffer, leaf.layout))

    # --- memory

    def _free(self, dying: set[str]) -> None:
        """Free buffers that die here; memory of this program stays spare for the next node's outputs of equal size.

        Holding it any longer would raise the peak above the planned one.
        """
        freed = []
        for root in sorted(dying):
            key = (self.layouts[root].device, self.layouts[root].storage_bytes()) if root in self.planned else None
            if key is not None and key not in self.spare:
                self.spare[key] = root
            elif root in self.layouts or root in self.graph.inputs:
                freed.append(root)
        if freed:
            self.instructions.append(Free(tuple(freed)))

    def _free_spare(self) -> None:
        if self.spare:
            self.instructions.append(Free(tuple(self.spare.values())))
            self.spare = {}


def _shards(schedule: Schedule, copies: Mapping[str, Copied]) -> dict[View, tuple[Copied, int]]:
    """Map kernel outputs that may be written directly into a pool to (collective that reads them, index of tensor)."""
    found: dict[View, tuple[Copied, int]] = {}
    for node in schedule.nodes:
        if node.name in copies:
            by = copies[node.name]
            given = named_in(node.payload.call.args[0])
            views = (leaf for leaf in given if isinstance(leaf, View) and leaf.buffer in by.shards)
            found.update((view, (by, by.shards[view.buffer])) for view in views)
    return found


def _safe_start(call: Extern) -> Extern:
    """Return `call` with its target replaced by a variant that is safe over gloo, if its group uses gloo."""
    if call.target not in SAFE_OVER_GLOO_ON_GPUS:
        return call
    (device_type,) = {view.layout.device.type for view in views_in(call.arguments)}
    if device_type == "cpu":
        return replace(call, target=SAFE_OVER_GLOO.get(call.target, call.target))
    over_gloo = carried_by(call, device_type) == "gloo"
    return replace(call, target=SAFE_OVER_GLOO_ON_GPUS[call.target]) if over_gloo else call


def _paths(tree: Any, path: tuple[int, ...]) -> list[tuple[View | Handle, tuple[int, ...]]]:
    if isinstance(tree, View | Handle):
        return [(tree, path)]
    if isinstance(tree, tuple | list):
        return [found for at, item in enumerate(tree) for found in _paths(item, (*path, at))]
    return []
