"""Sizes that depend on data: whether two are equal, and which were traced as constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from overlapc.fx.versions.tensors import sized_by_data

aten = torch.ops.aten


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two traced shapes are proven to be equal; `==` of them would add a guard."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(statically_known_true(size == like) for size, like in pairs)


def guessed_size(graph: fx.Graph) -> fx.Node | None:
    """Return the first node whose result has a size that depends on data, but was traced as a constant; None if none.

    torch 2.11 traces the `_unique` in the backward of `index_fill` this way (tests/fx/test_sizes.py). Nodes after it
    cannot be compiled for the traced sizes.
    """
    return next((node for node in graph.nodes if _depends_on_data(node) and _is_static(node.meta.get("val"))), None)


def _depends_on_data(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not sized_by_data(target):
        return False
    if target is aten.index.Tensor:  # only a mask makes the size depend on data
        return any(_is_mask(index) for index in node.args[1])  # type: ignore[union-attr]
    if target is aten.repeat_interleave.Tensor:
        return node.kwargs.get("output_size") is None
    return True


def _is_mask(index: Any) -> bool:
    return isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)


def _is_static(value: Any) -> bool:
    """Whether the first result, the one whose size depends on data, was traced with constant sizes only."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return all(_is_number(size) for size in tensors[0].shape) if tensors else False


def _is_number(size: int | torch.SymInt) -> bool:
    """Whether `size` is a constant, or a symbol that tracing has since fixed to one (torch 2.11 on CUDA)."""
    return isinstance(size, int) or bool(size.node.expr.is_number)
