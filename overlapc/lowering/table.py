"""The table of lowering rules by ATen op. Each family of ops has a file, whose rules are registered by `lowers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overlapc.errors import OverlapcError
from overlapc.fx.comm.claim import CLAIM
from overlapc.fx.comm.taken_out import TAKEN_OUT
from overlapc.fx.random import ops as our_ops

aten = torch.ops.aten


class Impossible(OverlapcError):
    """Raised by a lowering rule for a case that it does not cover; the op is then called."""


Rule = Callable[..., Any]
_rules: dict[Any, Rule] = {}
_by_name: dict[str, Rule] = {}

# Ops that are called deliberately, because their library kernels are the best choice: not counted as fallbacks.
LIBRARY_CALLS: set[Any] = {
    CLAIM,
    TAKEN_OUT,
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

# Ops with an `out=` form, which write their result into memory that the program allocates.
OUT_VARIANTS: set[Any] = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}


def lowers(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a function as the lowering rule of these ops.

    The rule gets the context and the op's arguments, with tensors as views and sizes as sympy expressions. It returns
    views in the structure of the op's results, or raises Impossible.
    """

    def register(rule: Rule) -> Rule:
        for target in targets:
            assert target not in _rules, f"{target} is lowered twice"
            _rules[target] = rule
        return rule

    return register


def lowers_by_name(name: str) -> Callable[[Rule], Rule]:
    """Register a rule by the op's name, for ops that torch defines only on some import, such as `prims.fma.default`."""

    def register(rule: Rule) -> Rule:
        assert name not in _by_name, f"{name} is lowered twice"
        _by_name[name] = rule
        return rule

    return register


def lowering_of(target: Any) -> Rule | None:
    """Return the rule of an op; None if it has none, so that the op is called."""
    return _rules.get(target) or _by_name.get(str(target))


def lowered_ops() -> list[str]:
    """Return the sorted names of all ops that have a lowering rule."""
    return sorted([*(str(target) for target in _rules), *_by_name])
