"""Modules with equal parameters share a graph: two models, and layers between graph breaks. Gradients equal FSDP2's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

import overlapc
from tests.parallel.sharded import shard
from tests.parallel.tiny import VOCAB, Tiny
from tests.ranks import values_on_ranks

RANKS, LAYERS, DIM, STEPS = 2, 10, 6, 3


class Block(nn.Module):
    """Breaks the graph inside, as a layer does that looks at its activations."""

    def __init__(self, breaks: bool, hidden: int) -> None:
        super().__init__()
        self.breaks = breaks
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, hidden), nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(h)


class Model(nn.Module):
    """breaks: "inside" of each layer, "between" the layers, as LayerDrop does, or "" for none."""

    def __init__(self, breaks: str) -> None:
        super().__init__()
        self.between = breaks == "between"
        sizes = [9 if at == 3 else 10 for at in range(LAYERS)]  # one layer has other shapes, and uneven shards
        self.layers = nn.ModuleList(Block(breaks == "inside", size) for size in sizes)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.between and torch.rand([]) < 0:
                continue
            x = layer(x)
        return self.head(x).square().mean()


def sharded(breaks: str) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Model(breaks)
    for at, layer in enumerate(model.layers):
        # Three layers keep their parameters for backward, and one of these sums gradients in another dtype.
        policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float64 if at == 7 else None)
        fsdp2.fully_shard(layer, mesh=mesh, reshard_after_forward=at < 5 or at > 7, mp_policy=policy)
    return fsdp2.fully_shard(model, mesh=mesh)


def trained(model: Any) -> tuple[list[float], list[Tensor]]:
    """Return the losses of some steps, the second of which accumulates two micro-batches, and all gradients."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, grads = [], []
    for step in range(STEPS):
        for last in (False, True) if step == 1 else (True,):
            model.set_requires_gradient_sync(last)
            loss = model(torch.randn(4, DIM, generator=generator))
            loss.backward()
            losses.append(float(loss.detach()))
        grads += [param.grad.full_tensor() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads


def compared(breaks: str) -> dict[str, Any]:
    torch._dynamo.reset()
    want, want_grads = trained(sharded(breaks))
    ours = overlapc.adopt_fsdp2(sharded(breaks))
    for module in [ours] if breaks else ours.layers:
        module.compile(backend="overlapc", options={"rank_timeout": 60})
    got, grads = trained(ours)
    return {
        "losses": max(abs(a - b) for a, b in zip(got, want, strict=True)),
        "grads": max(float((a - b).abs().max()) for a, b in zip(grads, want_grads, strict=True)),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


# At most: a graph for each half of a layer ("inside") of each of five kinds of layers. A whole layer has three: without
# reduction, with it, and where it also reduces the gradients of an earlier micro-batch.
@pytest.mark.parametrize(("breaks", "graphs"), [("inside", 2 * 5), ("between", 5 * 3), ("", 5 * 3)])
def test_equal_layers_share_a_graph_and_others_do_not(breaks: str, graphs: int):
    for found in values_on_ranks(compared, RANKS, breaks):
        assert found["losses"] < 1e-6
        assert found["grads"] < 1e-6
        assert found["graphs"] <= graphs + 2  # what is before and after all layers


def tiny(seed: int) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    torch.manual_seed(seed)
    return shard(Tiny(), mesh, apply=fsdp2.fully_shard)


def trained_together(first: Any, second: Any) -> list[Tensor]:
    """Return losses and gradients of two models, of which one runs forward before the other's backward."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    found = []
    for backward_in_order in (True, False):
        batches = [torch.randint(VOCAB, (2, 5), generator=generator) for _ in range(4)]
        losses = [first(*batches[:2]), second(*batches[2:]), first(*batches[1:3])]
        for loss in losses if backward_in_order else reversed(losses):
            loss.backward()
        params = [*first.parameters(), *second.parameters()]
        found += [*losses, *(param.grad.full_tensor() for param in params if param.grad is not None)]
        for param in params:
            param.grad = None
    return found


def compared_together(cases: tuple[dict[str, Any], ...]) -> list[tuple[float, int]]:
    """Return, for options of each case, the largest difference from eager FSDP2 and the number of graphs."""
    want = trained_together(tiny(0), tiny(1))
    found = []
    for options in cases:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        how = {"backend": "overlapc", "options": {"rank_timeout": 60, **options}}
        got = trained_together(*(torch.compile(overlapc.adopt_fsdp2(tiny(seed)), **how) for seed in (0, 1)))
        worst = max(float((a - b).detach().abs().max()) for a, b in zip(got, want, strict=True))
        found.append((worst, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


OPTIONS = ({}, {"memory_budget": "1GiB", "keep_gathered": True}, {"transport": "copy", "memory": "pool"})


@pytest.fixture(scope="module")
def together() -> list[list[tuple[float, int]]]:
    return values_on_ranks(compared_together, RANKS, OPTIONS, timeout_s=240)


@pytest.mark.parametrize("at", range(len(OPTIONS)), ids=[str(options) for options in OPTIONS])
def test_two_models_share_a_graph(together: list[list[tuple[float, int]]], at: int):
    for found in together:
        worst, graphs = found[at]
        assert worst < 1e-6
        assert graphs == 1
