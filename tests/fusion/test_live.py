"""Live memory as fusion counts it: a buffer that a fusion removes does not count, wherever the fused kernel runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overlapc.fusion import fuse_ops
from overlapc.ir.ops import Loops
from tests.fusion.programs import capture
from tests.ir.interpret import run_ops


def shifted(x: Tensor, mix: Tensor) -> list[Tensor]:
    """Return three results of the size of `x`; memory is at its peak when all of them exist."""
    change = F.pad(x, (0, 0, 1, -1)) - x
    return [change, x + change * mix[0], x + change * mix[1]]


def quantized(x: Tensor) -> list[Tensor]:
    blocks = x.view(x.shape[0], -1, 64)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
    return [(blocks / scale).view(x.shape), scale.squeeze(-1)]


def heads_in_another_order(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the gradient of a norm over (heads, tokens), stored as (tokens, heads)."""
    total = (x * weight).sum(-1, keepdim=True)
    return [(x * total).transpose(0, 1).contiguous()]


def test_fusions_that_do_not_raise_live_memory_give_one_kernel() -> None:
    for function, inputs in (
        (shifted, (torch.randn(1024, 1024), torch.randn(2, 1024))),
        (quantized, (torch.randn(1024, 1024),)),
        (heads_in_another_order, (torch.randn(8, 512, 64).bfloat16(), torch.randn(64).bfloat16())),
    ):
        made = capture(function, *inputs)
        ops, report = fuse_ops(made)
        assert sum(isinstance(each, Loops) for each in ops) == 1, report
        torch.testing.assert_close(run_ops(ops, made, list(inputs)), function(*inputs), rtol=2e-2, atol=2e-2)
