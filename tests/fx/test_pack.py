"""Small tensors of a module are packed into one flat tensor if copies cost less than more tensors in a collective."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

from overlapc.fx.comm.canonical import canonicalize
from overlapc.fx.comm.collectives import find_collectives
from overlapc.fx.comm.pack import CopyCosts, pack
from overlapc.parallel import fully_shard
from tests.parallel.tiny import Recorder, Tiny, batch, ops

pytestmark = pytest.mark.usefixtures("world", "fresh_dynamo")

# Each further tensor costs 5 us and a kernel 2 us: copies are cheaper below 300 bytes of a shard (of four).
COSTS = CopyCosts(tensor_ns=5000, kernel_ns=2000, byte_ns=1.0)


def step_of(model: nn.Module, **how: object) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the canonical forward and backward of the model sharded over four ranks."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh, **how)
    fully_shard(model, mesh, **how)
    recorder = Recorder()
    torch.compile(model, backend=recorder, fullgraph=True)(*batch(2)).backward()
    for module in (recorder.forward[0], recorder.backward[0]):
        canonicalize(module)
    return recorder.forward[0], recorder.backward[0]


def moved(module: fx.GraphModule, kind: str, unit: str) -> list[int]:
    """Return the bytes of a module's collectives of one kind, in order."""
    found = find_collectives(module.graph)
    return [each.comm.bytes for each in found if each.comm.collective == kind and each.comm.unit == unit]


def test_small_gathers_of_a_module_become_one_at_the_position_of_the_first():
    forward, _ = step_of(Tiny(layers=1, hidden=64, dim=16), param_dtype=torch.bfloat16)
    sizes = {"norm": 2 * 16, "up bias": 2 * 64, "matrix": 2 * 16 * 64}
    before = moved(forward, "all_gather", "layers.0")
    assert sorted(before) == sorted([sizes["norm"]] * 2 + [sizes["up bias"]] + [sizes["matrix"]] * 2)
    assert pack(forward, COSTS) == 3  # the norm's two and a bias; packing only the last norm's two saves no time
    assert moved(forward, "all_gather", "layers.0") == [2 * sizes["norm"] + sizes["up bias"], *[sizes["matrix"]] * 2]
    assert find_collectives(forward.graph)[1].label.param == "layers.0.norm.weight+2"
    assert pack(forward, COSTS) == 0


def test_small_gradients_are_reduced_as_one_tensor_and_divided_separately():
    _, backward = step_of(Tiny(layers=1, hidden=64, dim=16))
    before = ops(backward).count("div")
    assert pack(backward, COSTS)
    assert moved(backward, "reduce_scatter", "layers.0") == [4 * 16 * 64, 4 * 16 * 64, 4 * (16 + 16 + 64)]
    assert ops(backward).count("div") == before
    backward.graph.lint()


def test_tensors_with_replicas_padding_and_casts_are_packed():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList()
            self.a, self.b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, 2))

        def forward(self, x: Tensor, _: Tensor) -> Tensor:
            return (x.float().sum() * self.a).sum() + self.b.sum()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "dp"))
    model, recorder = fully_shard(Odd(), mesh, reduce_dtype=torch.bfloat16), Recorder()
    torch.compile(model, backend=recorder, fullgraph=True)(*batch(2)).backward()
    for module in (recorder.forward[0], recorder.backward[0]):
        canonicalize(module)
        assert pack(module, replace(COSTS, tensor_ns=10_000)) == 2
        module.graph.lint()
    assert ops(recorder.backward[0]).count("reduce_scatter_tensor") == 1
    assert ops(recorder.backward[0]).count("all_reduce") == 2


@pytest.mark.parametrize(
    "costs",
    [
        CopyCosts(0, 2000, 0.5),  # not measured
        CopyCosts(5000, 2000, 100),  # copies are slow
        CopyCosts(2500, 2000, 0.5),  # the saved tensors cost less than the copies
    ],
    ids=["unknown", "slow copies", "little to save"],
)
def test_graphs_are_unchanged_if_packing_saves_no_time(costs):
    for module in step_of(Tiny(layers=1)):
        before = str(module.graph)
        assert pack(module, costs) == 0
        assert str(module.graph) == before


def test_a_tensor_that_cannot_be_viewed_as_one_dim_is_not_packed():
    _, backward = step_of(Tiny(layers=1, hidden=64, dim=16))
    for start in backward.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.reduce_scatter_tensor.default
    ):
        value = start.args[0].meta["val"]
        start.args[0].meta["val"] = torch.as_strided(value, value.shape, [2 * each for each in value.stride()])
    assert not pack(backward, COSTS)
