"""Sources of all kernels of a schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from overlapc.codegen import generators
from overlapc.codegen.generators import AheadGenerator, Alternative, KernelSource
from overlapc.errors import CompileError
from overlapc.ir.body import Body
from overlapc.ir.ops import Attention, Combo, Kernel, Loops, LoweredGraph, loops_of
from overlapc.ir.template import with_numbered_buffers
from overlapc.schedule.model import Schedule

_LINES = 4  # lines of the user's code in a kernel's comment


class Sources:
    """The sources of a graph's kernels, with the tilings that heuristics choose or autotuning measured.

    Of kernels that differ only in their buffers, as those of equal layers do, one is generated.
    """

    def __init__(self, graph: LoweredGraph, tuned: Mapping[str, KernelSource] | None = None) -> None:
        """tuned: replacements from autotuning, by the name of the source that each replaces."""
        self._graph = graph
        self._tuned = tuned or {}
        self._generated: dict[tuple[str, Body, str], KernelSource] = {}

    def of(self, op: Kernel) -> KernelSource:
        """Return the source of the kernel of `op`; CompileError if none can be generated."""
        source = self._by_heuristics(op)
        other = self._tuned.get(source.name)
        if other is None:
            return source
        # Keep this op's buffers: the measured kernel may be that of another layer.
        return replace(other, buffers=source.buffers, sizes=source.sizes, comment=source.comment)

    def scratch_bytes(self, op: object) -> int:
        """Return the bytes that the launcher of a generated kernel allocates for each launch, at the traced sizes: only
        reductions that are split among programs need any, for their partial results."""
        if not isinstance(op, Loops | Combo) or op.device.type == "cpu":
            return 0
        reduces = any(part.body.reduction for part in loops_of(op))
        return self._graph.hint(self.of(op).scratch_bytes) if reduces else 0

    def _by_heuristics(self, op: Kernel) -> KernelSource:
        comment = "\n".join((f"{' '.join(op.origin.fx)} | {op.origin.source}", *op.origin.lines[1:_LINES]))
        if isinstance(op, Loops) and not op.body.checks():  # messages of checks name the op
            body, buffers = with_numbered_buffers(op.body)
            key = op.device.type, body, _hint(op)
            if key not in self._generated:
                self._generated[key] = self._generate(replace(op, body=body), comment)
            source = self._generated[key]
            original = {f"b{at}": buffer for at, buffer in enumerate(buffers)}
            return replace(source, buffers=tuple(original[name] for name in source.buffers), comment=comment)
        return self._generate(op, comment)

    def _generate(self, op: Kernel, comment: str) -> KernelSource:
        for part in (op,) if isinstance(op, Attention) else loops_of(op):
            reason = _refused(part)
            if reason is not None:
                raise CompileError(
                    f"cannot generate a kernel for {' '.join(part.origin.fx)}: {reason}\n   at {part.origin.source}\n"
                    'hint: options={"native": False} calls the library op of every node; please report this graph'
                )
        if isinstance(op, Attention):
            return generators.attention_source(op, comment)
        generator = generators.generator_for(op.device.type)
        if isinstance(op, Combo):
            return generator.combine([part.body for part in op.parts], _hint(op), comment)
        return generator.generate(op.body, _hint(op), comment, self._graph.size_hints)


def generate_kernels(schedule: Schedule, sources: Sources) -> dict[str, KernelSource]:
    """Return the source of every generated kernel, by the name of its op."""
    return {node.payload.name: sources.of(node.payload) for node in schedule.nodes if isinstance(node.payload, Kernel)}


def with_scratch(schedule: Schedule, sources: Sources) -> Schedule:
    """Return `schedule` with what launchers of generated kernels allocate in `Node.scratch_bytes`."""
    sizes = [sources.scratch_bytes(node.payload) for node in schedule.nodes]
    if not any(sizes):
        return schedule
    nodes = zip(schedule.nodes, sizes, strict=True)
    return replace(schedule, nodes=tuple(replace(node, scratch_bytes=size) if size else node for node, size in nodes))


def compile_ahead(schedule: Schedule, made: Sources, cache_dir: Path) -> None:
    """Start to compile the kernels of a schedule while passes order it, where their generators can.

    Passes change few kernels: those that they merge into one launch.
    """
    found: dict[str, dict[str, KernelSource]] = {}
    for op in (node.payload for node in schedule.nodes):
        if isinstance(op, Kernel) and isinstance(generators.generator_for(op.device.type), AheadGenerator):
            source = made.of(op)
            found.setdefault(op.device.type, {}).setdefault(source.name, source)
    for device_type, sources in found.items():
        generator = generators.generator_for(device_type)
        assert isinstance(generator, AheadGenerator)
        generator.compile_ahead(list(sources.values()), cache_dir)


def _refused(op: Loops | Attention) -> str | None:
    if isinstance(op, Attention):
        return generators.refuse_attention(op)
    return generators.generator_for(op.device.type).refuse(op.body)


def alternatives_of(op: Loops | Combo, graph: LoweredGraph, around: Any = None) -> Sequence[Alternative]:
    """Return what `Sources.of` returns, or the kernel with tiling `around`, followed by the kernel in other tilings."""
    bodies = [part.body for part in loops_of(op)]
    return generators.generator_for(op.device.type).alternatives(bodies, _hint(op), graph.size_hints, around)


def _hint(op: Loops | Combo) -> str:
    """Return the distinct ops of a kernel as a readable part of its name: `mul_rsqrt_sum`."""
    names = dict.fromkeys(re.sub(r"_?\d+$", "", name).strip("_") for name in op.origin.fx)
    return "_".join(list(names)[:6])


def kernels_of(sources: Mapping[str, KernelSource], schedule: Schedule) -> list[tuple[str, KernelSource]]:
    """Return (device type, source) of every kernel once, in the order of first launches."""
    found: dict[str, tuple[str, KernelSource]] = {}
    for node in schedule.nodes:
        if isinstance(node.payload, Kernel):
            source = sources[node.payload.name]
            found.setdefault(source.name, (node.payload.device.type, source))
    return list(found.values())
