"""`model.compile()` before the model is sharded or adopted, as some trainers do: gradients and dtypes are FSDP2's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import overlapc
from overlapc.errors import ConfigError
from tests.parallel.sharded import DIM, Block
from tests.ranks import values_on_ranks
from tests.worlds import fake_world

MICRO = 2
OPTIONS = {"rank_timeout": 60}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gradients(compile_in: str) -> list[Tensor]:
    """Return the gradients of micro-batches, of which only the last one reduces.

    compile_in: "model" or "layers", which are compiled before the model is adopted; "" for FSDP2 in eager mode.
    """
    torch.manual_seed(0)
    model: Any = Model()
    if compile_in == "layers":  # as torchtitan does
        for layer in model.layers:
            layer.compile(backend="overlapc", options=OPTIONS)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fsdp2.fully_shard(layer, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    if compile_in == "model":
        model.compile(backend="overlapc", fullgraph=True, options=OPTIONS)
    if compile_in:
        overlapc.adopt_fsdp2(model)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for number in range(MICRO):
        model.set_requires_gradient_sync(number == MICRO - 1)
        result = model(torch.randn(4, DIM, generator=generator))
        assert result.dtype == torch.float64
        result.square().mean().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def largest_differences() -> list[float]:
    expected = gradients("")
    return [
        max(float((a - b).abs().max()) for a, b in zip(gradients(compile_in), expected, strict=True))
        for compile_in in ("model", "layers")
    ]


def test_gradients_of_micro_batches_are_those_of_fsdp2() -> None:
    assert max(max(differences) for differences in values_on_ranks(largest_differences, 2)) < 1e-6


def test_a_call_compiled_by_other_means_is_refused() -> None:
    """It would go on calling what the module's class was before."""
    with fake_world(2):
        model = Model()
        model._compiled_call_impl = model._call_impl
        with pytest.raises(ConfigError, match=r"Model\.compile\(\) was called before .*\nhint: call compile\(\) after"):
            overlapc.fully_shard(model, init_device_mesh("cpu", (2,)))
