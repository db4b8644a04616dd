"""Lowers `torch._assert_async` to a check in a kernel, which can fuse with the kernel that computes the condition."""

from __future__ import annotations

import sympy
import torch

from overlapc.ir.body import Checked, Constant, Value, op
from overlapc.ir.ops import Layout, View
from overlapc.lowering.context import Lowering
from overlapc.lowering.table import Impossible, aten, lowers


@lowers(aten._assert_async.msg)
def assert_async(context: Lowering, condition: View, message: str) -> None:
    """Check `condition` in a kernel, which also stores it, because every kernel stores something."""
    if any(size != 1 for size in condition.size):
        raise Impossible("a condition of several numbers")

    def checked(element: Value) -> Value:
        holds = element if element.dtype == torch.bool else op("ne", element, Constant(0, element.dtype))
        return Checked(holds, holds, message)

    context.pointwise(checked, condition, layout=Layout(condition.layout.device, torch.bool, (), (), sympy.S.Zero))
