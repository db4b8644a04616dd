"""Lowers ops over lists of tensors for each tensor separately, so that each can fuse with its neighbours."""

from __future__ import annotations

from typing import Any

import torch

from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.table import Impossible, Rule, lowering_of, lowers

aten = torch.ops.aten

UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor lgamma log log10 log1p log2 neg reciprocal round rsqrt "
    "sigmoid sign sin sinh sqrt tan tanh trunc"
).split()
# name -> {overload of the list op: overload of the single op}
_ARITHMETIC = {"List": "Tensor", "Scalar": "Scalar", "ScalarList": "Scalar", "Tensor": "Tensor"}
_CLAMP = {"List": "Tensor", "Scalar": "default", "ScalarList": "default"}
_EXTREME = {"List": "default"}
_FUSED = {"Scalar": "default", "ScalarList": "default"}
BINARY = {
    "add": _ARITHMETIC,
    "sub": _ARITHMETIC,
    "mul": _ARITHMETIC,
    "div": _ARITHMETIC,
    "clamp_min": _CLAMP,
    "clamp_max": _CLAMP,
    "maximum": _EXTREME,
    "minimum": _EXTREME,
    "pow": {
        "List": "Tensor_Tensor",
        "Scalar": "Tensor_Scalar",
        "ScalarList": "Tensor_Scalar",
        "ScalarAndTensor": "Scalar",
    },
    "lerp": {"List": "Tensor", "Scalar": "Scalar"},
    "addcmul": _FUSED,
    "addcdiv": _FUSED,
    "copy": {"default": "default"},
}


def for_each_tensor(context: Lowering, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[View]:
    """Apply `rule` to the first elements of all lists, to the second ones, …; other arguments go to every call."""
    results = []
    for item in range(len(context.value_of())):

        def pick(arg: Any, item: int = item) -> Any:
            return arg[item] if isinstance(arg, list | tuple) else arg

        with context.for_item(item):
            results.append(rule(context, *map(pick, args), **{name: pick(arg) for name, arg in kwargs.items()}))
    return results


def _register(name: str, overload: str, single: str) -> None:
    target = getattr(getattr(aten, f"_foreach_{name}", None), overload, None)
    if target is None:  # not in this version of torch
        return

    @lowers(target)
    def lowered(context: Lowering, *args: Any, **kwargs: Any) -> list[View]:
        rule = lowering_of(getattr(getattr(aten, name), single))
        if rule is None or "scalars" in kwargs:
            raise Impossible("scalars by name")
        return for_each_tensor(context, rule, args, kwargs)


for _name in UNARY:
    _register(_name, "default", "default")
for _name, _overloads in BINARY.items():
    for _overload, _single in _overloads.items():
        _register(_name, _overload, _single)
