"""Clean-up of graphs with FSDP2's own ops: resized storage of parameters, and flat buckets."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from overlapc.errors import CompileError
from overlapc.fx.comm.canonical import canonicalize
from overlapc.fx.comm.fsdp2 import clean_up
from overlapc.fx.comm.labels import label_of
from tests.fx import fsdp2_ops
from tests.fx.fsdp2_ops import empty, fill, gather, reduce
from tests.parallel.tiny import Recorder, ops
from tests.ranks import values_on_ranks

pytestmark = pytest.mark.usefixtures("world", "fresh_dynamo")

FLAT = {"all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "copy_", "resize_storage_bytes_", "cat"}
RANKS = 4


def graph_of(function: Any, *args: Any) -> fx.GraphModule:
    """Return the forward graph that AOTAutograd traces of the function."""
    recorder = Recorder()
    with torch.no_grad():
        torch.compile(function, backend=recorder, fullgraph=True)(*args)
    (module,) = recorder.forward
    return module


def without_storage(*shape: int) -> Tensor:
    param = torch.empty(shape)
    empty(param)
    return param


def group() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


def layer() -> fx.GraphModule:
    shards = [torch.randn(1, 6), torch.randn(1, 4)]
    params = [without_storage(4, 6), without_storage(4, 4)]
    return graph_of(two_layers, torch.randn(3, 4), shards, params, group())


def two_layers(x: Tensor, shards: list[Tensor], params: list[Tensor], name: str) -> Tensor:
    """Apply the same layer twice, gathered each time."""
    for _ in range(2):
        for param, flat in zip(params, gather(shards, name, RANKS, 0), strict=True):
            fill(param, flat)
        x = (x @ params[0])[:, :4] @ params[1]
        for param in params:
            empty(param)
    return x


def test_a_layer_reads_gathered_tensors_without_copies_or_resized_storage():
    module = layer()
    assert FLAT & set(ops(module)), "nothing was captured"
    assert clean_up(module)
    canonicalize(module)
    assert not FLAT & set(ops(module))
    assert all(not node.users for node in module.graph.find_nodes(op="placeholder") if node.meta["val"].shape == (4, 6))
    starts = [node for node in module.graph.nodes if "all_gather" in str(node.target)]
    assert [node.args[0].target for node in starts] == [
        torch.ops.aten.view.default
    ] * 2  # one gather per shard, shared by both uses of the layer
    assert len({label_of(node).group for node in starts}) == 1, "one unit for the bucket pass"
    assert clean_up(module) == 0


def test_gradients_are_reduced_without_copies_and_uneven_ones_are_padded():
    module = graph_of(reduce, [torch.randn(8, 6), torch.randn(5, 4)], [2, 2], group(), group(), RANKS)
    assert clean_up(module)
    canonicalize(module)
    names = ops(module)
    assert names.count("reduce_scatter_tensor") == names.count("all_reduce") == names.count("div") == 2
    assert names.count("constant_pad_nd") == names.count("slice") == 1
    assert not FLAT & set(names)
    scatter = next(node for node in module.graph.nodes if "reduce_scatter" in str(node.target))
    assert scatter.args[0].op == "placeholder"


@pytest.mark.parametrize(
    "read",
    [lambda flat: flat.sum(), lambda flat: torch.as_strided(flat, (2, 4), (4, 1), 0)],
    ids=["whole", "across two gradients"],
)
def test_a_flat_reduction_is_not_divided_if_more_than_single_gradients_are_read(read):
    def reduced_once(grads: list[Tensor], name: str) -> tuple[Tensor, Tensor]:
        flat = torch.empty(32)
        torch.ops.fsdp.chunk_cat(grads, 0, RANKS, out=flat.view(RANKS, -1))
        reduced = fsdp2_ops._c10d.wait_tensor(fsdp2_ops._c10d.reduce_scatter_tensor(flat, "sum", RANKS, name))
        return torch.as_strided(reduced, (1, 4), (4, 1), 0), read(reduced)

    module = graph_of(reduced_once, [torch.randn(4, 4), torch.randn(4, 4)], group())
    clean_up(module)
    canonicalize(module)
    assert ops(module).count("reduce_scatter_tensor") == 1
    assert "chunk_cat" not in ops(module)
    assert ops(module).count("cat") == 1


def test_a_reduction_outside_of_a_bucket_is_unchanged():
    def both(grads: list[Tensor], other: Tensor, name: str) -> tuple[Tensor, ...]:
        alone = fsdp2_ops._c10d.wait_tensor(fsdp2_ops._c10d.reduce_scatter_tensor(other, "sum", RANKS, name))
        return *reduce(grads, [1, 1], name, name, RANKS), alone

    module = graph_of(both, [torch.randn(4, 6), torch.randn(4, 4)], torch.randn(8, 3), group())
    assert clean_up(module) == 1
    scattered = [node.args[0] for node in module.graph.nodes if "reduce_scatter" in str(node.target)]
    assert len(scattered) == 3
    assert sum(each.op == "placeholder" and each.meta["val"].shape == (8, 3) for each in scattered) == 1


def test_split_copies_along_another_dim_equal_eager():
    def rows(x: Tensor) -> list[Tensor]:
        outs = [torch.empty(count, 3) for count in (1, 3)]
        torch.ops.fsdp.split_with_sizes_copy(x, [1, 3], dim=0, out=outs)
        return outs

    x = torch.randn(4, 3)
    with torch.no_grad():
        got = torch.compile(rows, backend="overlapc", fullgraph=True)(x)
    torch.testing.assert_close(got, list(x.split([1, 3])))


def test_a_gather_that_is_read_as_a_whole_is_split_by_generated_copies():
    def whole(shards: list[Tensor], name: str) -> tuple[Tensor, Tensor]:
        sizes = [shard.numel() for shard in shards]
        mine, _ = torch.ops.fsdp.all_gather_copy_in(shards, torch.empty(RANKS * sum(sizes)), sizes, sum(sizes), 0)
        flat = fsdp2_ops._c10d.wait_tensor(fsdp2_ops._c10d.all_gather_into_tensor(mine, RANKS, name))
        outs = [torch.empty(RANKS * size) for size in sizes]
        torch.ops.fsdp.split_with_sizes_copy(
            flat.view(RANKS, -1), sizes, dim=1, out=[out.view(RANKS, -1) for out in outs]
        )
        return outs[1], flat.sum()

    module = graph_of(whole, [torch.randn(6), torch.randn(8)], group())
    clean_up(module)
    canonicalize(module)
    names = ops(module)
    assert names.count("all_gather_into_tensor") == names.count("cat") == names.count("split_with_sizes") == 1
    assert "all_gather_copy_in" not in names


def use(x: Tensor, param: Tensor, value: Tensor) -> Tensor:
    fill(param, value)
    y = x @ param
    empty(param)
    return y


def resized_too_small(x: Tensor, param: Tensor, value: Tensor) -> Tensor:
    param.untyped_storage().resize_(2 * param.numel() * param.element_size())
    torch.ops.fsdp.copy_(param, value)
    y = x @ param
    empty(param)
    return y


def never_emptied(x: Tensor, param: Tensor, value: Tensor) -> Tensor:
    fill(param, value)
    return x @ param


def filled_twice(x: Tensor, param: Tensor, value: Tensor) -> Tensor:
    fill(param, value)
    y = x @ param
    torch.ops.fsdp.copy_(param, value * 2)
    y = y + x @ param
    empty(param)
    return y


def filled_with_other_numbers(x: Tensor, param: Tensor, value: Tensor) -> Tensor:
    return use(x, param, value.double() * (1 + 1e-9))


def filled_from_the_side(x: Tensor, param: Tensor, value: Tensor) -> Tensor:
    param.untyped_storage().resize_(param.numel() * param.element_size())
    torch.ops.fsdp.copy_(param, value.t().contiguous().t())
    y = x @ param + torch.as_strided(param, (6,), (1,))  # the first six elements in memory
    empty(param)
    return y


ODD = {
    filled_with_other_numbers: "of another shape, stride or dtype",
    filled_from_the_side: "of another shape, stride or dtype",
    resized_too_small: "in an unexpected place",
    never_emptied: "not resized to 0 bytes",
    filled_twice: "fills it a second time",
}


@pytest.mark.parametrize("function", ODD, ids=lambda function: function.__name__)
def test_unexpected_resizes_stay_with_a_warning_and_equal_eager(function):
    x, value = torch.randn(3, 4), torch.randn(4, 6)
    want_param, got_param = without_storage(4, 6), without_storage(4, 6)
    with torch.no_grad():
        want = function(x, want_param, value)
        with pytest.warns(UserWarning, match=ODD[function]):
            got = torch.compile(function, backend="overlapc", fullgraph=True)(x, got_param, value)
    torch.testing.assert_close(got, want)
    assert got_param.untyped_storage().size() == want_param.untyped_storage().size()
    if want_param.untyped_storage().size():
        assert torch.equal(got_param, want_param)


def test_storage_as_fsdp2_manages_it_needs_no_warning():
    x, value, param = torch.randn(3, 4), torch.randn(4, 6), without_storage(4, 6)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = torch.compile(use, backend="overlapc", fullgraph=True)(x, param, value)
    torch.testing.assert_close(got, x @ value)
    assert param.untyped_storage().size() == 0


def test_a_write_into_an_unsharded_parameter_is_an_error_that_says_where():
    module = graph_of(use, torch.randn(3, 4), without_storage(4, 6), torch.randn(4, 6))
    product = next(node for node in module.graph.nodes if node.target is torch.ops.aten.mm.default)
    param = product.args[1]
    with module.graph.inserting_after(product):
        write = module.graph.call_function(torch.ops.aten.mul_.Tensor, (param, 2))
    write.meta = dict(product.meta)
    with pytest.raises(CompileError, match=rf"writes into {param.name}, an unsharded parameter(.|\n)*hint: change the"):
        clean_up(module)


def test_forward_and_backward_equal_fsdp2s_ops_on_real_ranks():
    for seen in values_on_ranks(fsdp2_ops.case, 2):
        assert seen["forward"] <= 1e-5
        assert seen["reduced"] <= 1e-5
        assert seen["left in storage"] == 0
        assert seen["collectives"] < 6, "no bucket was made"
        assert seen["fallbacks"] == 0
