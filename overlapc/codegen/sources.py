"""Sources of all kernels of a schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from overlapc.codegen import generators
from overlapc.codegen.generators import Alternative, KernelSource
from overlapc.errors import CompileError
from overlapc.ir.ops import Attention, Combo, Kernel, Loops, LoweredGraph, loops_of
from overlapc.schedule.model import Schedule

_LINES = 4  # lines of the user's code in a kernel's comment


def generate_kernels(
    schedule: Schedule, graph: LoweredGraph, tuned: Mapping[str, KernelSource] | None = None
) -> dict[str, KernelSource]:
    """Return the source of every generated kernel, by the name of its op.

    tuned: replacements from autotuning, by the name of the source that each replaces.
    """
    sources = {}
    for node in schedule.nodes:
        op = node.payload
        if not isinstance(op, Kernel):
            continue
        for part in (op,) if isinstance(op, Attention) else loops_of(op):
            reason = _refused(part)
            if reason is not None:
                raise CompileError(
                    f"cannot generate a kernel for {' '.join(part.origin.fx)}: {reason}\n   at {part.origin.source}\n"
                    'hint: options={"native": False} calls the library op of every node; please report this graph'
                )
        source = source_of(op, graph)
        other = (tuned or {}).get(source.name)
        if other is not None:  # keep this op's buffers: the measured kernel may be that of another layer
            source = replace(source, name=other.name, text=other.text, launch=other.launch)
        sources[op.name] = source
    return sources


def _refused(op: Loops | Attention) -> str | None:
    if isinstance(op, Attention):
        return generators.refuse_attention(op)
    return generators.generator_for(op.device.type).refuse(op.body)


def source_of(op: Kernel, graph: LoweredGraph) -> KernelSource:
    """Return the source of the kernel of `op` with the tiling that heuristics choose."""
    comment = "\n".join((f"{' '.join(op.origin.fx)} | {op.origin.source}", *op.origin.lines[1:_LINES]))
    if isinstance(op, Attention):
        return generators.attention_source(op, comment)
    generator = generators.generator_for(op.device.type)
    if isinstance(op, Combo):
        return generator.combine([part.body for part in op.parts], _hint(op), comment)
    return generator.generate(op.body, _hint(op), comment, graph.size_hints)


def alternatives_of(op: Loops | Combo, graph: LoweredGraph, around: Any = None) -> Sequence[Alternative]:
    """Return what `source_of` returns, or the kernel with tiling `around`, followed by the kernel in other tilings."""
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
