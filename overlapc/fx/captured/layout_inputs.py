"""Inputs that only tell how other inputs lie in memory: compiled graphs do without them.

Dynamo passes symbolic strides and storage offsets as inputs whether or not the graph reads them. For a batch
`data[rank]` there is such an input on all ranks but rank 0, whose batch begins at 0, and ranks must compile equal
graphs.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapc.fx.versions.graphs import copied_capture


def without_layout_inputs(gm: GraphModule) -> tuple[GraphModule, list[int]]:
    """Return Dynamo's graph without the inputs that are unread strides or storage offsets of tensors, and the positions
    of the other inputs. Tracing reads such a number from its tensor if it is needed.

    `gm` itself is unchanged: Dynamo passes the inputs that `gm` has.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in inputs]
    unread = {at: str(values[at]) for at, node in enumerate(inputs) if _is_unread_number(node)}
    tensors = [value for value in values if isinstance(value, Tensor)] if unread else []
    memories = Counter(map(_memory, filter(_is_plain, tensors)))
    alone = {id(each): each for each in tensors if _is_plain(each) and memories[_memory(each)] == 1}
    layouts = {str(number) for each in alone.values() for number in (*each.stride(), each.storage_offset())}
    sizes = {str(size) for each in alone.values() for size in (*each.shape, *free_symbols(tuple(each.shape)))}
    # AOTAutograd makes inputs in one memory from a common tensor, and wrapper tensors from their parts.
    sizes.update(str(symbol) for each in tensors if id(each) not in alone for symbol in free_symbols(each))
    dropped = {at for at, number in unread.items() if number in layouts - sizes}
    if dropped:
        gm = copied_capture(gm)
        for at, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            if at in dropped:
                gm.graph.erase_node(node)
        gm.recompile()
    return gm, [at for at in range(len(inputs)) if at not in dropped]


def _is_unread_number(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymInt) and not node.users


def _is_plain(value: Tensor) -> bool:
    return value.layout == torch.strided and not is_traceable_wrapper_subclass(value)


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
