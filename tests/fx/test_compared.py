"""A checkpoint saves sums that a comparison depends on, so that the comparison has the same result in backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch.utils.checkpoint import checkpoint

from overlapc.backend import overlapc
from overlapc.fx.decompositions import decompositions
from overlapc.fx.partitioning.partition import partition
from overlapc.fx.partitioning.recompute import backward_nodes


def shares(x: Tensor) -> Tensor:
    wide = x.exp()
    return wide / wide.sum(1, keepdim=True)


def spread(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, 1, keepdim=True)
    return (x - mean) * variance.rsqrt()


def running(x: Tensor) -> Tensor:
    return x.cumsum(1) * x


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("made", [shares, spread, running])
def test_a_checkpoint_recomputes_a_sum_only_if_no_comparison_depends_on_it(
    made: Callable[[Tensor], Tensor], compared: bool
):
    backwards: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        backwards.append(gm)
        return gm

    def run(x: Tensor) -> Tensor:
        y = checkpoint(lambda value: made(value) * value.cos(), x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y.amax(1) if compared else y.exp()

    step = torch.compile(
        run,
        backend=lambda gm, inputs: aot_function(
            gm, lambda forward, _: forward, keep, partition, decompositions(), keep_inference_input_mutations=True
        ),
    )
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    step(x).sum().backward()
    (backward,) = backwards
    op = {shares: torch.ops.aten.sum, spread: torch.ops.aten.var_mean, running: torch.ops.aten.cumsum}[made]
    gradients = backward_nodes(backward.graph)
    again = [
        node
        for node in backward.graph.nodes
        if getattr(node.target, "overloadpacket", None) is op
        and node not in gradients
        and node.args[0].meta["val"].dtype.is_floating_point  # excludes the number of elements that are the largest
    ]
    assert bool(again) is not compared, str(backward.graph)


@pytest.mark.parametrize("made", [shares, spread, running])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_a_maximum_under_a_checkpoint_equal_eager(made: Callable[[Tensor], Tensor], dtype: torch.dtype):
    def run(x: Tensor) -> Tensor:
        y = checkpoint(lambda value: made(value) * value.cos(), x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y.amax(1)

    x = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients = []
    for step in (run, torch.compile(run, backend=overlapc, dynamic=False)):
        leaf = x.clone().requires_grad_()
        step(leaf).float().sum().backward()
        gradients.append(leaf.grad)
    eager, ours = gradients
    assert eager is not None
    assert ours is not None
    torch.testing.assert_close(ours, eager, rtol=3e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-3)
