"""Builders of small graphs of ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from overlapc.ir.body import Body, Store, op
from overlapc.ir.ops import Extern, Handle, IROp, Layout, Loops, LoweredGraph, Start, View, Wait, buffers_written
from overlapc.schedule.model import Comm
from tests.ir.bodies import loops_of, put, x

CPU = torch.device("cpu")
ELEMENTS = 8


def view(name: str, *size: Any, dtype: torch.dtype = torch.float32) -> View:
    """Return a contiguous view of a whole buffer, of 8 elements unless sizes are given."""
    extents = [sympy.sympify(extent) for extent in size] or [sympy.Integer(ELEMENTS)]
    stride, step = [], sympy.S.One
    for extent in reversed(extents):
        stride.append(step)
        step = step * extent
    return View(name, Layout(CPU, dtype, tuple(extents), tuple(reversed(stride))))


def kernel(name: str, body: Body, *outputs: View, device: torch.device = CPU) -> Loops:
    """Return a generated kernel; its default outputs are the buffers that it stores, with 8 elements each."""
    return Loops(name, device, body, outputs or tuple(view(store.buffer) for store in body.stores))


def pointwise(out: str, *reads: str, elements: int = ELEMENTS) -> Loops:
    """Return a kernel that computes `out[p0]` from element p0 of every buffer in `reads`."""
    from overlapc.ir.body import Value

    loops = loops_of("p", (elements,))
    value: Value = x(reads[0], loops[0].symbol)
    for name in reads[1:]:
        value = op("add", value, x(name, loops[0].symbol))
    value = op("exp", value)  # expensive, so that fusion does not compute it again in several readers
    return kernel(out, Body(loops, (), (put(out, loops[0].symbol, value),)), view(out, elements))


def extern(out: str, *reads: str, target: Any = torch.ops.aten.sin.default, **options: Any) -> Extern:
    """Return a library call."""
    return Extern(out, target, tuple(view(name) for name in reads), {}, view(out), **options)


def overwrite(name: str, root: str, *reads: str) -> Extern:
    """Return a call that overwrites `root`, whose new content is named `<root>__<name>`."""
    new = view(f"{root}__{name}")
    return Extern(
        name,
        torch.ops.aten.add_.Tensor,
        tuple(view(each) for each in (root, *reads)),
        {},
        view(root),
        mutates=(new,),
        pure=False,
    )


def change(name: str, root: str, *reads: str, shift: int = 0) -> Loops:
    """Return a kernel that overwrites element p0 of `root` with the sum over `reads` of their elements `p0 + shift`.

    The first of them goes through `exp`.
    """
    loops = loops_of("p", (ELEMENTS - shift,))
    value = op("exp", x(reads[0], loops[0].symbol + shift))
    for each in reads[1:]:
        value = op("add", value, x(each, loops[0].symbol + shift))
    new = view(f"{root}__{name}")
    return Loops(name, CPU, Body(loops, (), (put(new.buffer, loops[0].symbol, value),)), (), (new,), (root,))


def comm(group: str = "dp") -> Comm:
    """Return the description of an all-gather of 64 bytes on two ranks."""
    return Comm("all_gather", 64, group, 2)


def start(name: str, *reads: str, group: str = "dp") -> Start:
    """Return the start of an all-gather of the buffers."""
    return Start(name, extern(name, *reads, pure=False), comm(group))


def wait(name: str, source: str) -> Wait:
    """Return the wait for the result of a start."""
    return Wait(name, view(source), view(name))


def barrier(name: str, *reads: str) -> Extern:
    """Return blocking communication, which is a barrier for other communication."""
    return extern(name, *reads, pure=False, comm=comm())


def graph(
    ops: Sequence[IROp],
    outputs: Sequence[Any],
    inputs: Sequence[str] = ("a", "b", "c"),
    sources: Mapping[str, str] | None = None,
    views: Sequence[View] = (),
) -> LoweredGraph:
    """Return a lowered graph of the ops; an output is the name of a buffer or a leaf."""
    found = {name: view(name) for name in inputs}
    aliases: dict[str, str] = {}
    for each_op in ops:
        call = each_op.call if isinstance(each_op, Start) else each_op
        found.update((each.buffer, each) for each in each_op.outputs if isinstance(each, View))
        if isinstance(each_op, Wait):
            aliases[each_op.name] = each_op.source.buffer
        elif isinstance(call, Extern | Loops):
            for each in call.mutates:
                aliases[each.buffer] = each.buffer.split("__")[0]
                found[each.buffer] = each
    found.update((each.buffer, each) for each in views)
    leaves = tuple(found[name] if isinstance(name, str) else name for name in outputs)
    return LoweredGraph("graph", tuple(inputs), found, {}, {}, aliases, dict(sources or {}), list(ops), leaves, {})


def names(ops: Sequence[IROp]) -> list[str]:
    """Return the names of the ops in order."""
    return [op.name for op in ops]


__all__ = [
    "CPU", "ELEMENTS", "Handle", "Store", "barrier", "buffers_written", "change", "comm", "extern", "graph", "kernel",
    "names", "overwrite", "pointwise", "start", "view", "wait",
]  # fmt: skip
