"""Tensors in what modules get and return, found where FSDP2 finds them: in containers and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_CONTAINERS = (dict, list, tuple)  # Dynamo does not trace `dict | list`


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return `tree` with `change(tensor)` in place of each tensor in Python's containers and in dataclasses.

    A dataclass without a changed tensor, and any other object, stays the same object: a cache, for instance, may be
    changed by the block that gets it, although it is registered as a tree.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        # Not `is_dataclass`: torch 2.11 breaks the graph if that asks the class of None, or of an object made in it.
        if getattr(leaf, "__dataclass_fields__", None) is None or isinstance(leaf, type):
            return leaf
        others = {}
        for field in dataclasses.fields(leaf):
            old = getattr(leaf, field.name)
            new = map_tensors(change, old)
            if any(one is not two for one, two in zip(_leaves(old), _leaves(new), strict=True)):
                others[field.name] = new
        return dataclasses.replace(leaf, **others) if others else leaf

    return pytree.tree_map(changed, tree, is_leaf=_is_leaf)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors that `map_tensors` finds, and those in subclasses of containers, in no particular order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for part in tree.values() for tensor in tensors_in(part)]
    if isinstance(tree, (list, tuple)):
        return [tensor for part in tree for tensor in tensors_in(part)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [tensor for field in dataclasses.fields(tree) for tensor in tensors_in(getattr(tree, field.name))]
    return []


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, _CONTAINERS)
