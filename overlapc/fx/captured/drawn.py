"""Keeps unread draws of eager's random numbers in the graph, because they advance the generator for later draws.

    rand = aten.rand(4)                 ->      rand = aten.rand(4); overlapc.drawn(rand)

torch drops unread random ops while it traces, unless Inductor's own `fallback_random` is set, which overlapc must not
set. `drawn` is registered as an op with side effects, so torch does not remove it; no code is generated for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import decompose
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_leaves

from overlapc.fx.partitioning.rng_state import draws_nothing

_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define("drawn(Tensor number) -> ()")
_library.impl("drawn", lambda number: None, "CompositeExplicitAutograd")
_IN_BACKWARD = "must_be_in_backward"  # a tag that torch's partitioner reads
DRAWN = has_side_effect(torch.ops.overlapc.drawn.default)


def draws(target: Any) -> bool:
    """Whether `target` itself advances a random generator, and is not a composition of other ops that do."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


@lru_cache(None)
def drawn_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return a decomposition of every functional random op of torch: the op itself, and `drawn` on its result."""
    names = (name[6:].split(".") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    found = (getattr(getattr(torch.ops.aten, name), "".join(overload) or "default") for name, *overload in names)
    return {op: partial(_drawn, op) for op in found if draws(op) and not op._schema.is_mutable}


def _drawn(op: Any, *args: Any, **kwargs: Any) -> Any:
    with decompose({}):  # the op itself
        result = op(*args, **kwargs)
    if not draws_nothing(op, args, kwargs):
        DRAWN(next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
    return result


def draw_late(joint: fx.Graph) -> None:
    """Keep draws of backward in backward: torch's partitioner would move those that need no tangent to forward.

    torch tags all nodes of forward; nodes from the backward of a custom autograd function have no tag.
    """
    for node in joint.nodes:
        if node.meta.get("partitioner_tag") != "is_forward" and (node.target is DRAWN or draws(node.target)):
            node.meta["partitioner_tag"] = _IN_BACKWARD


def draw_early(backward: fx.Graph) -> None:
    """Remove copies of forward's draws that torch's partitioner put into `backward`, in place."""
    for node in reversed(backward.nodes):
        if node.target is DRAWN and node.meta.get("partitioner_tag") != _IN_BACKWARD:
            number = node.args[0]
            backward.erase_node(node)
            while isinstance(number, fx.Node) and number.op == "call_function" and not number.users:
                sources = number.all_input_nodes
                backward.erase_node(number)
                number = sources[0] if len(sources) == 1 else None
