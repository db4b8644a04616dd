"""Collectives of FSDP written with DTensors get the labels that `fully_shard` writes; other collectives get none."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

from overlapc.fx.comm.canonical import canonicalize
from overlapc.fx.comm.collectives import find_collectives
from overlapc.fx.comm.inferred_labels import infer_labels
from overlapc.fx.comm.labels import label_of
from overlapc.fx.comm.pack import CopyCosts, pack
from overlapc.fx.source import block_of, module_path
from tests.parallel.tiny import Recorder, Tiny, batch, fsdp_with_dtensors, tensor_parallel

pytestmark = pytest.mark.usefixtures("world", "fresh_dynamo")


def step_of(model: nn.Module, length: int = 5) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the canonical forward and backward graphs."""
    recorder = Recorder()
    torch.compile(model, backend=recorder, fullgraph=True)(*batch(4, length)).backward()
    for module in (recorder.forward[0], recorder.backward[0]):
        canonicalize(module)
    return recorder.forward[0], recorder.backward[0]


def sharded_step() -> tuple[fx.GraphModule, fx.GraphModule]:
    model = Tiny()
    fsdp_with_dtensors(model, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    return step_of(model)


def units(module: fx.GraphModule) -> list[str]:
    return [each.comm.unit for each in find_collectives(module.graph)]


def test_collectives_of_parameters_are_labelled_with_their_block():
    forward, backward = sharded_step()
    assert units(forward) == [""] * 14
    assert infer_labels(forward.graph) == infer_labels(backward.graph) == 14
    blocks = ["embed", *["layers.0"] * 5, *["layers.1"] * 5, "norm", "norm", "head"]
    assert units(forward) == blocks
    assert sorted(units(backward)) == sorted(blocks)
    assert infer_labels(forward.graph) == 0


def test_small_parameters_are_packed_once_they_have_labels():
    forward, backward = sharded_step()
    costs = CopyCosts(tensor_ns=1e6, kernel_ns=1.0, byte_ns=1.0)
    assert pack(forward, costs) == pack(backward, costs) == 0
    for module in (forward, backward):
        infer_labels(module.graph)
        assert pack(module, costs) == 12  # all of each layer, and the last norm's two
        module.graph.lint()


def test_collectives_of_activations_get_no_label():
    model = Tiny()
    tensor_parallel(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
    forward, backward = step_of(model, length=8)
    assert len(units(forward)) + len(units(backward)) == 13
    assert infer_labels(forward.graph) == infer_labels(backward.graph) == 0


def test_a_collective_with_compute_on_both_sides_gets_no_label():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    ops = torch.ops._c10d_functional
    doubled = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    gathered = graph.call_function(ops.all_gather_into_tensor.default, (doubled, 4, "0"))
    waited = graph.call_function(ops.wait_tensor.default, (gathered,))
    reduced = graph.call_function(ops.reduce_scatter_tensor.default, (y, "sum", 4, "0"))
    done = graph.call_function(ops.wait_tensor.default, (reduced,))
    graph.output((waited, graph.call_function(torch.ops.aten.mul.Tensor, (done, waited))))
    assert infer_labels(graph) == 0
    assert not any(label_of(node) for node in graph.nodes)


def test_parameters_without_a_module_share_one_group():
    graph = fx.Graph()
    x = graph.placeholder("x")
    ops = torch.ops._c10d_functional
    gathered = graph.call_function(ops.all_gather_into_tensor.default, (x, 4, "0"))
    named = graph.call_function(ops.all_gather_into_tensor.default, (x, 2, "0"))
    named.meta["custom"] = {"module_fqn": "layers.3.attention.wq"}
    graph.output(tuple(graph.call_function(ops.wait_tensor.default, (each,)) for each in (gathered, named)))
    assert infer_labels(graph) == 2
    assert [label_of(each).group for each in (gathered, named)] == ["parameters", "layers.3"]  # type: ignore[union-attr]
    assert module_path(named) == "layers.3.attention.wq"  # unchanged


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("layers.0.attention.wq", "layers.0"),
        ("model.layers.11.mlp", "model.layers.11"),
        ("layers.2.experts.7.w1", "layers.2"),
        ("lm_head", "lm_head"),
        ("patch_embed.proj", "patch_embed.proj"),
        ("", ""),
    ],
)
def test_a_block_is_the_outermost_member_of_a_list(module: str, block: str):
    assert block_of(module) == block
