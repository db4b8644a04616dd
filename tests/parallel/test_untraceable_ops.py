"""Operators whose backward torch cannot trace: what contains them runs eagerly, and other functions are compiled."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

import overlapc
from overlapc.backend import overlapc as overlapc_backend
from overlapc.errors import CompileError
from tests.parallel.sharded import shard
from tests.ranks import values_on_ranks

DIM, ROWS = 6, 8


@torch.library.custom_op("overlapc_tests::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply consecutive rows of `x`, of which `ends` says where they end, each by a matrix of its own."""
    starts = [0, *ends.tolist()]
    return torch.cat([x[start:end] @ weight for (start, end), weight in zip(pairwise(starts), weights, strict=True)])


@grouped_mm.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[2])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weights, ends = ctx.saved_tensors
    starts = [0, *ends.tolist()]  # torch cannot trace this
    rows = [slice(start, end) for start, end in pairwise(starts)]
    to_x = torch.cat([grad[each] @ weight.T for each, weight in zip(rows, weights, strict=True)])
    return to_x, torch.stack([x[each].T @ grad[each] for each in rows]), None


grouped_mm.register_autograd(_backward, setup_context=_remember)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, DIM, DIM) / DIM)

    def forward(self, x: Tensor) -> Tensor:
        positive = (x[:, 0] > 0).view(2, -1).sum(1).cumsum(0)
        return grouped_mm(x, self.weights, torch.cat([positive, positive.new_full((1,), ROWS)]))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.norm(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = Dense(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.dense(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return self.head(x).square().mean()


def gradients(call: Any, model: nn.Module) -> list[Tensor]:
    """Return the gradients of two micro-batches, which differ between ranks."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        call(torch.randn(ROWS, DIM, generator=generator)).backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def sharded() -> Any:
    torch.manual_seed(0)
    return shard(Model(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), apply=fsdp2.fully_shard)


def compared() -> tuple[float, list[str], int]:
    """Return the largest difference from FSDP2's gradients, the warnings, and how many graphs were compiled."""
    reference = sharded()
    expected = gradients(reference, reference)
    model = overlapc.adopt_fsdp2(sharded())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(torch.compile(model, backend="overlapc", options={"rank_timeout": 60}), model)
    said = [str(each.message) for each in caught if "cannot trace" in str(each.message)]
    difference = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return difference, said, counters["stats"]["unique_graphs"]


def test_a_sharded_model_trains_and_the_rest_of_it_is_compiled() -> None:
    (difference, said, graphs), (other, silent, _) = values_on_ranks(compared, 2)
    assert max(difference, other) < 1e-6
    assert graphs > 0
    assert not silent  # only the first rank warns
    assert len(said) == 1
    assert "torch cannot trace aten._local_scalar_dense.default, whose result is a number read from a tensor" in said[0]
    assert "test_untraceable_ops.py:" in said[0]
    assert "starts = [0, *ends.tolist()]" in said[0]


torch.library.define("overlapc_tests::without_fake", "(Tensor x) -> Tensor")
torch.library.impl("overlapc_tests::without_fake", "CPU", lambda x: 2 * x)


@torch.library.custom_op("overlapc_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: torch.ops.overlapc_tests.without_fake(grad))


def test_fullgraph_is_an_error_that_names_the_line() -> None:
    pattern = (
        r"(?s)torch cannot trace overlapc_tests.without_fake.default \(.*without_fake\(grad\).*no graph break\nhint: "
    )
    with pytest.raises(CompileError, match=pattern):
        torch.compile(doubled, backend="overlapc", fullgraph=True)(torch.randn(3, requires_grad=True))


def test_with_fullgraph_dynamo_traces_numbers_that_are_read_from_tensors() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(ROWS, DIM)
    block(x).square().sum().backward()
    expected = [param.grad for param in block.parameters()]
    block.zero_grad()
    torch.compile(block, backend="overlapc", fullgraph=True)(x).square().sum().backward()
    for param, grad in zip(block.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_without_dynamo_the_error_is_torchs() -> None:
    gm = torch.fx.symbolic_trace(lambda x: (doubled(x),))
    with pytest.raises(UnsupportedOperatorException):
        overlapc_backend(gm, [torch.randn(3, requires_grad=True)])
