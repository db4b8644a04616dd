"""Saves for backward the sizes that the shapes of its arguments are made of.

torch's partitioner saves a size if it is an argument of the joint graph. Of an input that is the base of another one
AOTAutograd makes new symbols, which no argument holds; a value of size `s1*s2` that is computed from it then reaches
backward without `s1` and `s2`.

    forward: y = view(x, [s1*s2]); return (..., y)                         backward: y
 -> forward: y = view(x, [s1*s2]); return (..., y, size(x, 0), size(x, 1))  backward: s1, s2, y
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch.fx.experimental.symbolic_shapes import free_symbols

from overlapc.fx.node_writer import NodeWriter

aten = torch.ops.aten


def save_sizes(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> None:
    """Hand over from `forward` to `backward` the symbols of the latter's arguments that none of these tells."""
    arguments = backward.graph.find_nodes(op="placeholder")
    told = {symbol for node in arguments for symbol, _ in _told_by(node.meta.get("val"))}
    tensors = [node for node in arguments if isinstance(node.meta.get("val"), Tensor)]
    needed = {symbol for node in tensors for symbol in free_symbols(node.meta["val"])}
    if needed <= told:
        return
    output = forward.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    descriptions = list(output.meta.get("desc", ()))  # torch drops them if forward saves generator states
    write = NodeWriter(output, output)
    for node in forward.graph.find_nodes(op="placeholder"):
        for symbol, read in _told_by(node.meta.get("val")):
            if symbol not in needed - told or read is None:
                continue
            told.add(symbol)
            size = write.call(read[0], node, read[1])
            results.append(size)
            if descriptions:
                descriptions.append(SavedForBackwardsAOTOutput(len(results) - 1 - forward_outputs))
            with backward.graph.inserting_before(tensors[0]):  # sizes come before tensors
                backward.graph.placeholder(size.name).meta["val"] = size.meta["val"]
    output.args = (tuple(results),)
    if descriptions:
        output.meta["desc"] = descriptions
    forward.recompile()
    backward.recompile()


def _told_by(value: Any) -> Iterator[tuple[sympy.Symbol, tuple[Any, int] | None]]:
    """Yield the symbols that an argument tells, each with the op and the dimension that read it from a tensor."""
    if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
        yield value.node.expr, None
    if isinstance(value, Tensor):
        for read, numbers in ((aten.sym_size.int, value.shape), (aten.sym_stride.int, value.stride())):
            for dim, number in enumerate(numbers):
                if isinstance(number, torch.SymInt) and number.node.expr.is_Symbol:
                    yield number.node.expr, (read, dim)
