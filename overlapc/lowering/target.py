"""What lowering asks about the kernels that can be generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from overlapc.ir.ops import Refuse, RefuseAttention, attention_refused, nothing_refused


@dataclass(frozen=True)
class Target:
    """The kernels that a graph is lowered for, by default all but matrix products and attention.

    generates: whether kernels can be generated for a device.
    refuse, refuse_attention: why the device's generator cannot generate a kernel, or None; a refused op is called.
    native_product: whether a matrix product (`product.Product`) becomes a generated kernel.
    rounds: round results of low precision for readers in the same kernel, too, as eager does.
    """

    generates: Callable[[torch.device], bool] = lambda device: True
    refuse: Refuse = nothing_refused
    refuse_attention: RefuseAttention = attention_refused
    native_product: Callable[[Any], bool] = lambda product: False
    rounds: bool = True


ANY_KERNEL = Target()
