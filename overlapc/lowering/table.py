"""ATen op -> lowering function. One file a family of ops; each registers with `lowers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overlapc.errors import OverlapcError
from overlapc.fx.random import ops as our_ops

aten = torch.ops.aten


class Impossible(OverlapcError):
    """Raised by a lowering function for a case it does not cover; the op then runs as an extern call."""


Rule = Callable[..., Any]
_rules: dict[Any, Rule] = {}
_by_name: dict[str, Rule] = {}

# Library kernels we call on purpose: not fallbacks.
LIBRARY_CALLS: set[Any] = {
    our_ops.seed.default,
    our_ops.seeds.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten.convolution.default,
    aten.convolution_backward.default,
}

# Calls with an `out=` form: their result lands in memory that we plan.
OUT_VARIANTS: set[Any] = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}


def lowers(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a function as the lowering of these ops. It gets the context and the op's own arguments, tensors as
    views and sizes as sympy expressions, and returns views in the op's own structure, or raises Impossible."""

    def register(rule: Rule) -> Rule:
        for target in targets:
            assert target not in _rules, f"{target} is lowered twice"
            _rules[target] = rule
        return rule

    return register


def lowers_by_name(name: str) -> Callable[[Rule], Rule]:
    """The same for an op that torch defines only once some part of it is imported, as `prims.fma.default`."""

    def register(rule: Rule) -> Rule:
        assert name not in _by_name, f"{name} is lowered twice"
        _by_name[name] = rule
        return rule

    return register


def lowering_of(target: Any) -> Rule | None:
    """The rule of an op; None where it has none and is called."""
    return _rules.get(target) or _by_name.get(str(target))


def lowered_ops() -> list[str]:
    """Names of all ops that have a lowering, sorted."""
    return sorted([*(str(target) for target in _rules), *_by_name])
