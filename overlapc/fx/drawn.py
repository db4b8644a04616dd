"""Draws of eager's numbers that nothing reads stay in the graph: later draws come from the generator they moved on.

    rand = aten.rand(4)                 ->      rand = aten.rand(4); overlapc.drawn(rand)

torch drops unread random ops while it traces, unless Inductor's own `fallback_random` is set, which is not ours to
set. `drawn` has a side effect as far as torch knows, and is lowered to no code.
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

from overlapc.fx.rng_state import draws_nothing

_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define("drawn(Tensor number) -> ()")
_library.impl("drawn", lambda number: None, "CompositeExplicitAutograd")
_LATE = "must_be_in_backward"  # a word of torch's partitioner
DRAWN = has_side_effect(torch.ops.overlapc.drawn.default)


def draws(target: Any) -> bool:
    """Whether `target` is an op that itself moves a generator on, and no composition of others that do."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


@lru_cache(None)
def drawn_decompositions() -> dict[Any, Callable[..., Any]]:
    """Every functional random op of torch -> itself and `drawn` of what it gives."""
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
    """Keep in backward what eager draws there: torch's partitioner would draw it in forward, if no tangent is needed.

    torch tags as forward's all that is; what a custom function's backward does has no tag.
    """
    for node in joint.nodes:
        if node.meta.get("partitioner_tag") != "is_forward" and (node.target is DRAWN or draws(node.target)):
            node.meta["partitioner_tag"] = _LATE


def draw_early(backward: fx.Graph) -> None:
    """Take out of `backward` what only keeps draws that are forward's: torch's partitioner copies them; in place."""
    for node in reversed(backward.nodes):
        if node.target is DRAWN and node.meta.get("partitioner_tag") != _LATE:
            number = node.args[0]
            backward.erase_node(node)
            while isinstance(number, fx.Node) and number.op == "call_function" and not number.users:
                sources = number.all_input_nodes
                backward.erase_node(number)
                number = sources[0] if len(sources) == 1 else None
