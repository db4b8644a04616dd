"""The graphs of models under `fully_shard`: gathers, reductions, padding and casts, on torch's fake process group."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import fsdp as fsdp2
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from overlapc.errors import ConfigError
from overlapc.fx.comm.collectives import find_collectives
from overlapc.fx.comm.labels import label_of
from overlapc.parallel import FSDPModule, MixedPrecisionPolicy, adopt_fsdp2, fully_shard
from overlapc.parallel.gather import unshard, unshard_local
from overlapc.parallel.nested import map_tensors
from overlapc.parallel.unreduced import managed
from tests.parallel.sharded import mesh_1d, shard
from tests.parallel.tiny import Recorder, Tiny, batch, ops

pytestmark = pytest.mark.usefixtures("world", "fresh_dynamo")


def compiled(model: nn.Module, vocab: int = 24) -> Recorder:
    recorder = Recorder()
    step = torch.compile(model, backend=recorder, fullgraph=True)
    step(*batch(2, vocab=vocab)).backward()
    assert len(recorder.forward) == len(recorder.backward) == 1
    return recorder


def gathers(graph_module) -> list[str]:
    return [
        label_of(node).param
        for node in graph_module.graph.nodes
        if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default
    ]


LAYER = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
BLOCKS = [f"layers.{index}.{name}" for index in range(2) for name in LAYER]
ROOT = ["embed.weight", "norm.weight", "norm.bias", "head.weight"]
# Biases are not needed to compute gradients, so they are never gathered in backward.
USED_IN_BACKWARD = [
    f"layers.{index}.{name}" for index in range(2) for name in ("norm.weight", "up.weight", "down.weight")
]


@pytest.mark.parametrize("ac", ["", "inside", "around"])
def test_gathers_again_in_backward_where_a_group_reshards(ac):
    recorder = compiled(shard(Tiny(ac=ac)))
    assert sorted(gathers(recorder.forward[0])) == sorted(BLOCKS + ROOT)
    again = gathers(recorder.backward[0])
    assert len(again) == len(set(again)), "a parameter is gathered twice in backward"
    assert set(USED_IN_BACKWARD) <= set(again)
    assert all(name.startswith("layers.") for name in again), "the root keeps its parameters, like FSDP2"
    # activation checkpointing recomputes silu(up(x)), for which it needs up.bias
    assert ("layers.0.up.bias" in again) == bool(ac)


@pytest.mark.parametrize("ac", ["", "inside", "around"])
def test_gathers_only_in_forward_where_no_group_reshards(ac):
    recorder = compiled(shard(Tiny(ac=ac), reshard_after_forward=False))
    assert sorted(gathers(recorder.forward[0])) == sorted(BLOCKS + ROOT)
    assert gathers(recorder.backward[0]) == []


def test_a_root_alone_keeps_its_parameters_unless_told_otherwise():
    assert gathers(compiled(fully_shard(Tiny(), mesh_1d())).backward[0]) == []
    torch._dynamo.reset()
    told = compiled(fully_shard(Tiny(), mesh_1d(), reshard_after_forward=True))
    assert "head.weight" in gathers(told.backward[0])


def test_forward_never_saves_a_gathered_parameter_that_is_resharded():
    forward = compiled(shard(Tiny(), reshard_after_forward=True, param_dtype=torch.bfloat16)).forward[0]
    saved = set(forward.graph.output_node().all_input_nodes)
    gathered = {node for node in forward.graph.nodes if node.op == "call_function" and label_of(node) is not None}
    while gathered:
        assert not gathered & saved
        gathered = {
            user
            for node in gathered
            for user in node.users
            if getattr(user.target, "is_view", False) and len(user.all_input_nodes) == 1
        }


def test_on_one_rank_a_cast_is_saved_only_where_nothing_reshards():
    """On one rank nothing is gathered, but FSDP2 still frees the cast parameters of groups that reshard."""
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("others", "dp"))["dp"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    saved = []
    for reshard in (True, False):
        torch._dynamo.reset()
        model = fully_shard(Tiny(), alone, mp_policy=policy, reshard_after_forward=reshard)
        forward = compiled(model).forward[0]
        assert not gathers(forward)
        outputs = forward.graph.output_node().all_input_nodes
        saved.append([label_of(node).param for node in outputs if label_of(node) and node.op == "call_function"])
    assert saved[0] == []
    assert "layers.0.up.weight" in saved[1]


def test_repeated_gathers_are_right_before_their_first_use():
    backward = compiled(shard(Tiny(layers=4))).backward[0]
    order = [label_of(node).group for node in backward.graph.nodes if "all_gather" in str(node.target)]
    assert [group for i, group in enumerate(order) if i == 0 or order[i - 1] != group] == [
        f"layers.{index}" for index in (3, 2, 1, 0)
    ]
    position = {node: index for index, node in enumerate(backward.graph.nodes)}
    scatter_of_last = min(
        position[node]
        for node in backward.graph.nodes
        if "reduce_scatter" in str(node.target) and label_of(node).group == "layers.3"
    )
    gather_of_first = min(
        position[node]
        for node in backward.graph.nodes
        if "all_gather" in str(node.target) and label_of(node).group == "layers.0"
    )
    assert scatter_of_last < gather_of_first


def test_even_shards_move_without_copies():
    recorder = compiled(shard(Tiny()))
    for module in (recorder.forward[0], recorder.backward[0]):
        copies = {"cat", "split", "split_with_sizes", "constant_pad_nd", "clone", "copy_", "slice"}
        assert not copies & set(ops(module))
    for node in recorder.forward[0].graph.nodes:
        if "all_gather" in str(node.target):
            assert node.args[0].op == "placeholder"


def test_every_collective_is_labelled_and_sized():
    recorder = compiled(shard(Tiny(), param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    gather = {each.label.param: each for each in find_collectives(recorder.forward[0].graph)}
    up = gather["layers.1.up.weight"]
    assert (up.comm.collective, up.comm.bytes, up.comm.group, up.comm.size) == ("all_gather", 8 * 16 * 2, "dp", 4)
    assert (up.comm.dtype, up.comm.ranks, up.label.group) == ("bfloat16", (0, 1, 2, 3), "layers.1")
    assert len(up.waits) == 1
    scatter = {
        each.label.param: each
        for each in find_collectives(recorder.backward[0].graph)
        if each.comm.collective == "reduce_scatter"
    }
    assert sorted(scatter) == sorted(BLOCKS + ROOT)
    assert scatter["layers.1.up.weight"].comm.bytes == 8 * 16 * 4
    assert scatter["layers.1.up.weight"].comm.dtype == "float32"


def test_a_tied_parameter_is_gathered_and_reduced_once():
    model = shard(Tiny(tied=True, vocab=22), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # with pads, casts
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    recorder = compiled(model, vocab=22)
    assert gathers(recorder.forward[0]).count("embed.weight") == 1
    assert ops(recorder.backward[0]).count("reduce_scatter_tensor") == len(BLOCKS) + 3


def test_a_parameter_tied_across_groups_stays_tied():
    mesh, model = mesh_1d(), Tiny(tied=True)
    fully_shard(model.embed, mesh)
    fully_shard(model, mesh)
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    assert gathers(compiled(model).forward[0]).count("embed.weight") == 1


def test_uneven_shards_pad_alike_on_all_ranks():
    model = shard(Tiny(vocab=22))  # 22 rows on 4 ranks: 6, 6, 6, 4
    assert model.embed.weight.shape == (22, 8)
    assert model.embed.weight.to_local().shape == (6, 8)
    recorder = compiled(model, vocab=22)
    assert ops(recorder.forward[0]).count("constant_pad_nd") == 2  # embed and head
    assert model.embed.weight.grad.shape == (22, 8)


def test_all_ranks_compute_tensors_of_the_same_size_from_uneven_shards():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    backward = compiled(shard(Tiny(vocab=22), mp_policy=policy), vocab=22).backward[0]
    slices = backward.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    rows = [node.meta["val"] for node in slices if node.meta["val"].shape == (6, 8)]  # of this rank; the last has 4
    assert rows
    assert all(value.dtype == torch.float32 for value in rows), "the cast comes first"


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_dynamo_gets_the_metadata_of_a_gather_without_tracing_it(param_dtype: torch.dtype | None):
    model = shard(Tiny(vocab=22), mp_policy=MixedPrecisionPolicy(param_dtype))  # some shards are uneven
    keys = [
        (module._parameters[name], key)
        for module in model.modules()
        for name, key in module.__dict__.get("_overlapc_keys", {}).items()
    ]
    mode = FakeTensorMode()
    for param, key in keys:
        with mode:
            looked_at = unshard(mode.from_tensor(param), key)
        gathered = unshard(param, key)
        for ask in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.element_size):
            assert ask(looked_at) == ask(gathered)
        assert (looked_at.dtype, looked_at.requires_grad, looked_at.is_leaf) == (
            gathered.dtype, gathered.requires_grad, gathered.is_leaf
        )  # fmt: skip
    local = keys[0][0].to_local()
    traced = make_fx(partial(unshard_local, key=keys[0][1]), tracing_mode="fake")(
        local
    )  # make_fx must see all ops of the gather
    assert "all_gather_into_tensor" in ops(traced)


def test_reshard_to_fewer_ranks_gathers_over_them_in_backward_only():
    recorder = compiled(shard(Tiny(), reshard_after_forward=2))
    forward = find_collectives(recorder.forward[0].graph)
    backward = [c for c in find_collectives(recorder.backward[0].graph) if c.comm.collective == "all_gather"]
    assert {(c.comm.group, c.comm.size) for c in forward} == {("dp", 4)}
    assert {(c.comm.group, c.comm.size, c.comm.ranks) for c in backward} == {("dp_post", 2, (0, 1))}
    assert set(USED_IN_BACKWARD) <= {c.label.param for c in backward}


def test_groups_of_an_earlier_process_group_are_not_used_again():
    earlier = shard(Tiny(), reshard_after_forward=2)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    for _ in range(4):  # so that a name of an earlier group is one of these
        dist.new_group([1, 2])
    axis, _ = managed(shard(Tiny(), reshard_after_forward=2).head)["weight"].group.post
    assert dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(axis.group)) == [0, 1]
    del earlier  # its mesh lived until here


def test_hsdp_reduces_the_scattered_gradient_over_the_replicas():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(Tiny(), mesh)
    assert model.head.weight.placements == (Replicate(), Shard(0))
    reductions = find_collectives(compiled(model).backward[0].graph)
    head = [c for c in reductions if c.label.param == "head.weight"]
    assert [(c.comm.collective, c.comm.group, c.comm.bytes) for c in head] == [
        ("reduce_scatter", "shard", 24 * 8 * 4),
        ("all_reduce", "replicate", 24 * 8 * 4 // 2),
    ]


def test_state_dict_keeps_names_and_holds_shards():
    plain = Tiny()
    state = shard(copy.deepcopy(plain)).state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert value.placements == (Shard(0),)
        assert torch.equal(value.to_local(), plain.state_dict()[name].chunk(4)[1])


def test_parameters_are_sharded_outside_of_forward_and_can_be_initialized_there():
    with torch.device("meta"):
        model = Tiny()
    shard(model).to_empty(device="cpu")
    assert isinstance(model.layers[0].up, nn.Linear)
    assert isinstance(model.layers[0], FSDPModule)
    assert model.layers[0].up.weight.to_local().shape == (4, 8)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
    assert model.layers[1].up._parameters["weight"].to_local().eq(0.5).all()


@pytest.mark.parametrize("adopted", [False, True])
def test_a_list_of_modules_is_one_group(adopted: bool):
    model = Tiny()
    apply = fsdp2.fully_shard if adopted else fully_shard
    given = [model.norm, model.head]
    assert apply(given, mesh=mesh_1d()) is given
    apply(model, mesh=mesh_1d())
    if adopted:
        adopt_fsdp2(model)
    (forward,) = compiled(model).forward
    labels = {collective.label.param: collective.label for collective in find_collectives(forward.graph)}
    assert {"norm.weight", "norm.bias", "head.weight"} == {
        name for name, label in labels.items() if label.group == "norm,head"
    }
    assert labels["head.weight"].reshard  # because its group is not the outermost module
    assert not labels["embed.weight"].reshard


def test_modules_of_a_list_that_lie_within_others_are_not_groups():
    model = Tiny()
    fully_shard([model.layers[0].norm, model.layers[0]], mesh_1d())
    assert not isinstance(model.layers[0].norm, FSDPModule)
    assert isinstance(model.layers[0], FSDPModule)


def test_ignored_parameters_are_not_sharded():
    model = Tiny()
    kept = model.head.weight
    fully_shard(model, mesh_1d(), ignored_params={kept})
    assert model.head.weight is kept
    assert "head.weight" not in gathers(compiled(model).forward[0])


def test_frozen_parameters_are_gathered_but_not_reduced():
    model = Tiny()
    model.head.weight.requires_grad_(False)
    recorder = compiled(shard(model))
    assert "head.weight" in gathers(recorder.forward[0])
    assert model.head.weight.grad is None
    assert ops(recorder.backward[0]).count("reduce_scatter_tensor") == len(BLOCKS) + 3


def test_steps_with_an_optimizer_compile_once():
    model, recorder = shard(Tiny()), Recorder()
    step = torch.compile(model, backend=recorder, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        step(*batch(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(recorder.forward) == len(recorder.backward) == 1


@pytest.mark.parametrize("compile_it", [False, True])
def test_floating_inputs_are_cast_to_the_parameters_dtype(compile_it):
    def output_of(**policy):
        linear = fully_shard(
            nn.Linear(4, 4), mesh_1d(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy)
        )
        run = torch.compile(linear, backend="aot_eager", fullgraph=True) if compile_it else linear
        return run(torch.ones(4, 4))

    assert output_of().dtype == torch.bfloat16
    assert output_of(output_dtype=torch.float32).dtype == torch.float32
    with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError), match=r"same dtype|Float"):
        output_of(cast_forward_inputs=False)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    parts: list[torch.Tensor]
    notes: dict[str, int]


class OfBatches(nn.Linear):
    def forward(self, batch: Batch) -> Batch:  # type: ignore[override]
        return Batch(super().forward(batch.x), [super(OfBatches, self).forward(each) for each in batch.parts], {})


@pytest.mark.parametrize("compile_it", [False, True])
def test_tensors_in_dataclasses_are_cast_and_reduce_earlier_gradients(compile_it):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(OfBatches(4, 4), mesh_1d(), mp_policy=policy)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        result = run(Batch(torch.ones(4, 4), [torch.ones(4, 4)], {"length": 4}))
        (result.x.sum() + result.parts[0].sum()).backward()
        assert (model.weight.grad is not None) is last
    assert result.x.dtype == result.parts[0].dtype == torch.float32


def test_a_dataclass_that_needs_no_cast_stays_the_same_object():
    batch = Batch(torch.ones(4), [torch.ones(4)], {"length": 4})
    assert map_tensors(lambda tensor: tensor.to(torch.float32), {"batch": batch})["batch"] is batch


def test_casts_of_arguments_break_no_graph():
    @dataclasses.dataclass
    class Result:
        hidden: torch.Tensor
        cache: object

    class Cache:
        pass

    def call(x: torch.Tensor, flag: bool) -> torch.Tensor:
        cache = Cache()  # torch 2.11 does not trace questions about the class of an object that is made in the graph
        given = ((x, None, 3, flag, "name", torch.float32), {"mask": None, "cache": cache, "result": Result(x, cache)})
        args, kwargs = map_tensors(lambda tensor: tensor.half(), given)
        assert kwargs["cache"] is cache
        return args[0] + kwargs["result"].hidden

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3), True), torch.full((3,), 2.0, dtype=torch.float16))


@pytest.mark.parametrize("compile_it", [False, True])
@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.bfloat16])
def test_parameters_may_change_their_dtype_after_sharding(change, compile_it):
    model = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh_1d()))
    change(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
    model[0].set_requires_gradient_sync(False)
    result = run(torch.ones(4, 4, dtype=model[0].weight.dtype))
    result.sum().backward()
    model[0].set_requires_gradient_sync(True)
    run(torch.ones(4, 4, dtype=model[0].weight.dtype)).sum().backward()
    assert result.dtype == model[0].weight.dtype == model[0].weight.grad.dtype != torch.float32


def test_parameters_in_lists_and_of_other_modules_are_gathered():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
            self.inner = nn.Linear(8, 8)

        def forward(self, x, _):
            x = x.float().sum() + torch.ones(4, 8)
            return (x * self.scales[0] @ self.inner.weight * self.scales[1]).sum()

    forward = compiled(fully_shard(Odd(), mesh_1d())).forward[0]
    assert sorted(gathers(forward)) == ["inner.weight", "scales.0", "scales.1"]


class Broken(nn.Module):
    """Scales by a parameter in code that runs eagerly: disabled by the user (`by_user`), or after a graph break inside
    a checkpoint."""

    def __init__(self, by_user: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.by_user = by_user
        self.seen: list[torch.Size] = []

    def forward(self, x):
        return self.scaled(x) if self.by_user else checkpoint(self.broken, x, use_reentrant=False)

    @torch.compiler.disable
    def scaled(self, x):
        self.seen.append(self.weight.shape)
        return x * self.weight

    def broken(self, x):
        torch._dynamo.graph_break()
        return self.scaled(x)


@pytest.mark.parametrize("by_user", [True, False])
def test_eager_code_within_a_compiled_forward_reads_gathered_parameters(by_user: bool):
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), Broken(by_user)), mesh_1d())
    torch.compile(model, backend="eager")(torch.ones(2, 8)).sum().backward()
    weight = model[1].weight
    assert set(model[1].seen) == {torch.Size([8])}
    assert isinstance(weight, DTensor)
    assert weight.grad.to_local().shape == weight.to_local().shape == (2,)


class InLoop(nn.Module):
    """Decides in a loop by a tensor, as LayerDrop does; Dynamo then runs all of `forward` eagerly."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x):
        for name in ("weight", "bias"):
            if torch.ones([]) < 0:
                continue
            x = x * getattr(self, name)
        return x


def test_eager_code_reads_parameters_without_a_graph_for_each():
    model = fully_shard(InLoop(), mesh_1d())
    recorder = Recorder()
    torch.compile(model, backend=recorder)(torch.ones(2, 8)).sum().backward()
    assert not any(gathers(graph) for graph in recorder.forward)
    assert model.bias.grad.to_local().shape == (2,)


def test_a_tensor_and_its_view_may_both_be_used_after_a_graph_break():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.linear(x)
            flat = hidden.view(-1)
            torch._dynamo.graph_break()
            return hidden.sum() + flat.sin().sum()

    model = fully_shard(Broken(), mesh_1d())
    torch.compile(model, backend="overlapc", options={"rank_check": False})(torch.ones(2, 3, 8)).backward()
    assert model.linear.weight.grad.shape == (8, 8)


def test_dynamic_batches_compile_once_and_sizes_are_known_by_their_hint():
    class Gathered(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(all_reduce(x, "sum", mesh.get_group())).sum()

    mesh, recorder = mesh_1d(), Recorder()
    step = torch.compile(fully_shard(Gathered(), mesh), backend=recorder, fullgraph=True, dynamic=True)
    for rows in (6, 10):
        step(torch.ones(rows, 8)).backward()
    (forward,) = recorder.forward
    assert {c.comm.collective: c.comm.bytes for c in find_collectives(forward.graph) if c.label is None} == {
        "all_reduce": 6 * 8 * 4
    }


def test_a_copied_module_is_sharded_like_the_original():
    model = copy.deepcopy(shard(Tiny()))
    assert sorted(gathers(compiled(model).forward[0])) == sorted(BLOCKS + ROOT)


def test_a_module_with_its_own_parameters_is_adopted():
    model = Tiny()
    for module in (model.embed, model.head, model):
        fsdp2.fully_shard(module, mesh=mesh_1d())
    (forward,) = compiled(adopt_fsdp2(model)).forward
    assert sorted(gathers(forward)) == sorted(BLOCKS + ROOT)


def test_a_mesh_with_one_shard_replicates():
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    recorder = compiled(shard(Tiny(), mesh))
    assert gathers(recorder.forward[0]) == gathers(recorder.backward[0]) == []
    reductions = [op for op in ops(recorder.backward[0]) if op in ("all_reduce", "reduce_scatter_tensor")]
    assert reductions == ["all_reduce"] * len(list(Tiny().parameters()))


@pytest.mark.parametrize("earlier", [False, True])
def test_a_dtensor_result_is_on_the_users_mesh(earlier: bool):
    """If an equal mesh was created earlier, torch 2.13 uses it for the output, and only the tangents refer to it."""
    for _ in range(1 + earlier):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh["tp"], {"0": embed, "1": head})
        fully_shard(model, mesh["dp"])
        if earlier:
            model(torch.ones(2, 4, dtype=torch.int64))
    out = torch.compile(model, backend="overlapc", fullgraph=True)(torch.ones(2, 4, dtype=torch.int64))
    assert isinstance(out, DTensor)
    assert (out.device_mesh, out.placements) == (mesh["tp"], (Shard(2),))
    out.to_local().sum().backward()
    assert model[1].weight.grad is not None


def test_three_axes_are_placed_like_fsdp2_places_them():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    placed = []
    for apply in (fully_shard, fsdp2.fully_shard):
        model = Tiny(layers=1)
        parallelize_module(model.layers[0], mesh["tp"], plan)
        apply(model, mesh=mesh["replicate", "shard"])
        placed.append({name: (p.placements, p.device_mesh.shape) for name, p in model.named_parameters()})
    assert placed[0] == placed[1]
    assert placed[0]["layers.0.up.weight"][1] == (2, 1, 2)


def test_selective_checkpointing_is_honoured():
    def keep_matmuls(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    class Two(nn.Module):
        def __init__(self, policy):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.policy = policy

        def inner(self, x):
            return torch.sin(self.b(torch.cos(self.a(x))))

        def forward(self, x, _):
            how = {"context_fn": partial(create_selective_checkpoint_contexts, self.policy)} if self.policy else {}
            return checkpoint(self.inner, x.float().sum() + torch.ones(4, 8), use_reentrant=False, **how).sum()

    everything = compiled(fully_shard(Two(None), mesh_1d(), reshard_after_forward=True)).backward[0]
    torch._dynamo.reset()
    selected = compiled(fully_shard(Two(keep_matmuls), mesh_1d(), reshard_after_forward=True)).backward[0]
    # b's input gradient and two weight gradients; a full checkpoint recomputes both forward matmuls
    assert ops(everything).count("mm") == 3 + 2
    assert ops(selected).count("mm") == 3
    assert gathers(selected) == ["b.weight"]


def test_reading_a_parameter_in_two_checkpoints_gathers_and_reduces_it_once():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)

        def forward(self, x, _):
            x = x.float().sum() + torch.ones(4, 8)
            for _ in range(2):
                x = checkpoint(lambda h: torch.cos(h @ self.a.weight), x, use_reentrant=False)
            return x.sum()

    recorder = compiled(fully_shard(Shared(), mesh_1d(), reshard_after_forward=True))
    assert gathers(recorder.forward[0]) == ["a.weight"]
    assert gathers(recorder.backward[0]) == ["a.weight"]
    assert ops(recorder.backward[0]).count("reduce_scatter_tensor") == 1


@pytest.mark.skipif(not hasattr(common, "ShardPlacementResult"), reason="torch before 2.13 has no ShardPlacementResult")
def test_a_placement_function_may_return_torchs_placement_result():
    mesh = mesh_1d()

    def on(mesh: DeviceMesh) -> Any:
        info = common.FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
        return lambda param: common.ShardPlacementResult(placement=Shard(1), mesh_info=info)

    sharded = fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh, shard_placement_fn=on(mesh))
    assert sharded._parameters["weight"].placements == (Shard(1),)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    with pytest.raises(ConfigError, match=r"shard_placement_fn places a parameter on .*, not on mesh="):
        fully_shard(nn.Linear(8, 8), mesh=mesh, shard_placement_fn=on(other))
