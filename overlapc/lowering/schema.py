"""Properties of ops by their schemas: views, mutated arguments, results that are arguments, side effects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch._higher_order_ops.effects import with_effects
from torch.fx import Node

from overlapc.fx.arguments import declared_arguments, is_written
from overlapc.ir.ops import View, views_in


def is_view(node: Node) -> bool:
    """Whether every result of the node is a view of its first argument, by the op's schema."""
    target = node.target
    if target is torch.ops.aten._unsafe_view.default or target is torch.ops.aten.lift_fresh.default:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    return (
        bool(returns)
        and all(item.alias_info is not None and not item.alias_info.is_write for item in returns)
        and not any(map(is_written, target._schema.arguments))
    )


def users_through_views(node: Node) -> list[Node]:
    """Return every node that reads the memory of `node`, directly or through views, which are not listed themselves."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_view(user):
                stack.append(user)
            else:
                found[user] = None
    return list(found)


def is_effect_token(node: Node) -> bool:
    """Whether the input orders ops with side effects; at run time it may be a tensor or None."""
    return any(user.target is with_effects and user.args[0] is node for user in node.users)


def bound_symbol(node: Node, path: tuple[int, ...]) -> sympy.Symbol | None:
    """Return the symbol that tracing gave to the number which the node returns as result `path`; None if it has none.

    Its value has another expression if tracing has found out what the number equals.
    """
    for symbol, keys in node.meta.get("unbacked_bindings", {}).items():
        if path == tuple(getattr(key, "idx", None) for key in keys):
            return symbol
    return None


def mutated(target: Any, args: Any, kwargs: Mapping[str, Any]) -> list[View]:
    """Return the views that the call overwrites, by its schema."""
    arguments = declared_arguments(target, args, kwargs)
    return [view for declared, given in arguments if is_written(declared) for view in views_in(given)]


def returned_argument(target: Any, position: int, args: Any, kwargs: Mapping[str, Any]) -> View | None:
    """Return the argument that the call returns as result `position` (in-place and out= ops), or None."""
    if not isinstance(target, torch._ops.OpOverload) or position >= len(target._schema.returns):
        return None
    alias = target._schema.returns[position].alias_info
    if alias is None or not alias.is_write:
        return None
    for declared, given in declared_arguments(target, args, kwargs):
        if declared.alias_info is not None and declared.alias_info.before_set == alias.before_set:
            return given if isinstance(given, View) else None
    return None


def has_side_effects(target: Any) -> bool:
    """Whether a call has effects beside its results."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        if "assert" in name or "sym_constrain" in name or not target._schema.returns:
            return True
        return torch.Tag.nondeterministic_seeded in target.tags or name.startswith("_c10d_functional")
    return not getattr(target, "__module__", "").startswith(("_operator", "math"))
