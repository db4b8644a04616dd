"""Results of sharded blocks that the model changes in place, in a step that also reduces gradients of earlier ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

import overlapc
from tests.parallel.sharded import DIM, Block, shard
from tests.ranks import values_on_ranks

MICRO = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for at, block in enumerate(self.layers):
            x = block(x)
            if at == 0:
                x += 0.5
            elif at == 1:
                x.view(-1)[::2].mul_(0.9)
        return self.head(x).square().mean()


def sharded() -> Any:
    torch.manual_seed(0)
    return shard(Model(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), apply=fsdp2.fully_shard)


def gradients(call: Any, model: nn.Module) -> list[Tensor]:
    """Return the gradients of micro-batches; reduction is set on each module, as Lightning Fabric does."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for number in range(MICRO):
        for module in model.modules():
            if isinstance(module, fsdp2.FSDPModule):
                module.set_requires_gradient_sync(number == MICRO - 1, recurse=False)
        call(torch.randn(4, DIM, generator=generator)).backward()
        assert all((param.grad is None) == (number < MICRO - 1) for param in model.parameters())
    return [param.grad.full_tensor() for param in model.parameters()]


def largest_difference() -> float:
    reference = sharded()
    expected = gradients(reference, reference)
    model = overlapc.adopt_fsdp2(sharded())
    found = gradients(torch.compile(model, backend="overlapc", fullgraph=True, options={"rank_timeout": 60}), model)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def test_gradients_are_those_of_fsdp2() -> None:
    assert max(values_on_ranks(largest_difference, 2)) < 1e-6
