"""Converts fused ops to a `Schedule`: every op becomes a node, and every buffer has its bytes at the traced sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from overlapc.fusion.deps import has_effect, mutated, output_buffers, reads_of
from overlapc.fusion.scratch import scratch_bytes
from overlapc.fusion.work import work_of
from overlapc.ir.ops import Attention, Combo, Extern, IROp, Loops, LoweredGraph, Start, Wait, buffers_written, loops_of
from overlapc.schedule.model import COMPUTE, Buffer, Kind, Node, Origin, Schedule

CUDA_BLOCK = 512  # bytes; torch's caching allocator allocates, and counts, multiples of this


def to_schedule(
    ops: list[IROp],
    graph: LoweredGraph,
    freeable: Collection[str] = (),
    budget_bytes: int | None = None,
    kernel_of: Mapping[str, str] | None = None,
) -> Schedule:
    """Return a schedule of `ops` in their order; each node's payload is its op.

    freeable: inputs whose memory the graph may free after their last use (saved activations).
    kernel_of: the fused op that contains each lowered op.
    """
    order = _requested_order(ops, graph, kernel_of or {})
    buffers: dict[str, Buffer] = {}
    for name in (*graph.inputs, *graph.constants):
        buffers[name] = Buffer(name, _bytes(name, graph), is_input=True, freeable=name in freeable)
    for op in ops:
        for name in buffers_written(op):
            alias = graph.aliases.get(name)
            buffers[name] = Buffer(name, 0 if alias else _bytes(name, graph), alias_of=alias)
    # Names are listed in order of creation, so that equal layers print alike (sorted, `mm_9` and `mm_10` would not).
    position = {name: at for at, name in enumerate(buffers)}
    nodes = []
    last_effect: tuple[str, ...] = ()  # ops with side effects, such as random numbers, keep the program's order
    for op in ops:
        after = dict.fromkeys((*order.get(op.name, ()), *(last_effect if has_effect(op) else ())))
        nodes.append(_node(op, graph, tuple(after), position))
        if has_effect(op):
            last_effect = (op.name,)
    outputs = tuple(sorted(output_buffers(graph) & buffers.keys(), key=position.__getitem__))
    return Schedule(graph.name, tuple(nodes), buffers, outputs, budget_bytes)


def _requested_order(
    ops: Sequence[IROp], graph: LoweredGraph, kernel_of: Mapping[str, str]
) -> dict[str, dict[str, None]]:
    """Return the order that the graph requests (op -> earlier ops), by the names of ops that remain after fusion."""
    left = {op.name for op in ops}
    found: dict[str, dict[str, None]] = {}
    for later, earlier in graph.order.items():
        to = kernel_of.get(later, later)
        names = {kernel_of.get(name, name): None for name in earlier}
        if to in left:
            found.setdefault(to, {}).update({name: None for name in names if name in left and name != to})
    return found


def _bytes(name: str, graph: LoweredGraph) -> int:
    view = graph.views.get(name)
    if view is None:
        return 0
    size = graph.hint(view.layout.storage_bytes())
    return -(-size // CUDA_BLOCK) * CUDA_BLOCK if view.layout.device.type == "cuda" else size


def _node(op: IROp, graph: LoweredGraph, after: tuple[str, ...], position: Mapping[str, int]) -> Node:
    kind, name, comm = _kind(op)
    return Node(
        name=op.name,
        kind=kind,
        op=name,
        reads=tuple(sorted(reads_of(op, graph), key=position.__getitem__)),
        writes=tuple(buffers_written(op)),
        mutates=tuple(graph.aliases[view.buffer] for view in mutated(op)),
        after=after,
        work=work_of(op, graph) if kind in COMPUTE else None,
        scratch_bytes=scratch_bytes(op, graph) if isinstance(op, Extern) else 0,
        comm=comm,
        origin=Origin(op.origin.fx, op.origin.source, op.origin.module),
        payload=op,
    )


def _kind(op: IROp) -> tuple[Kind, str, Any]:
    if isinstance(op, Loops | Combo):
        return Kind.KERNEL, "product" if any(part.body.dots() for part in loops_of(op)) else "kernel", None
    if isinstance(op, Attention):
        return Kind.KERNEL, "flex_attention_backward" if op.is_backward else "flex_attention", None
    if isinstance(op, Wait):
        return Kind.WAIT, "wait", None
    if isinstance(op, Start):
        return Kind.START, op.comm.collective, op.comm
    if op.comm is not None:
        return Kind.COMM, op.comm.collective, op.comm
    return Kind.EXTERN, op_name(op.target), None


def op_name(target: Any) -> str:
    """Return the short name of an op: `mm`, `_softmax`, `mylib.attention`."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))
