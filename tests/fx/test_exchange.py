"""Reductions as an exchange and a sum: the dtype that is sent, the dtype of the sum, and what is refused."""

from collections import Counter

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.fx.comm.communication import is_asynchronous
from overlapc.fx.comm.exchange import (
    EXCHANGE,
    SUM_OF_PARTS,
    RankInGroup,
    exchange_reductions,
    gather_by_hosts,
    refusal,
    travelling_bytes,
)
from overlapc.fx.node_writer import fake_result
from overlapc.runtime.counters import counted
from tests.worlds import fake_world

_c10d = torch.ops._c10d_functional
RANKS = 4


def reduced(given: Tensor, group: str, how: str = "avg") -> Tensor:
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(given, how, RANKS, group))


def exchanged(function, *inputs: Tensor, rank: int = 1) -> tuple[fx.GraphModule, fx.Node]:
    """Return the rewritten graph of `rank` and its exchange."""
    with fake_world(RANKS) as group:
        gm = make_fx(lambda *given: function(*given, group), tracing_mode="fake")(*inputs)
        assert exchange_reductions(gm, lambda start: RankInGroup(rank, RANKS)) == 1
        (start,) = gm.graph.find_nodes(op="call_function", target=EXCHANGE)
    return gm, start


def ops(gm: fx.GraphModule) -> Counter[str]:
    return Counter(node.target._opname for node in gm.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    "before",
    [
        lambda x: x.to(torch.float32),
        lambda x: torch.constant_pad_nd(x.to(torch.float32), [0, 0, 0, 0]),
        lambda x: x.to(torch.float32).unflatten(1, (RANKS, -1)).movedim(1, 0).flatten(0, 1).contiguous(),
        lambda x: torch.cat([x.to(torch.float32).view(RANKS, -1), x.to(torch.float32).view(RANKS, -1)], 1).view(-1),
        lambda x: x.t().to(torch.float32).contiguous(),
    ],
)
def test_a_gradient_cast_to_float32_is_sent_in_bfloat16(before):
    x = torch.randn(8, 12, dtype=torch.bfloat16)
    gm, start = exchanged(lambda x, group: reduced(before(x), group), x)
    sent = start.args[0].meta["val"]
    assert (sent.dtype, sent.is_contiguous()) == (torch.bfloat16, True)
    assert gm.graph.output_node().args[0].meta["val"].dtype == torch.float32
    found = ops(gm)
    assert (found["sum_of_parts"], found["div"]) == (1, 1)
    assert found["convert_element_type"] == found["_to_copy"] == 0, "the cast before the reduction is gone"


@pytest.mark.parametrize(
    ("function", "travels"),
    [
        (lambda x, group: reduced(x, group), torch.float32),
        (
            lambda x, group: reduced(torch.constant_pad_nd(x.bfloat16().float(), [0, 0, 0, 4], 1.0), group),
            torch.float32,
        ),
        (lambda x, group: reduced(x.bfloat16().float() / 2, group), torch.float32),
        (lambda x, group: reduced(torch.cat([x.bfloat16().float(), x]), group), torch.float32),
        (lambda x, group: reduced(x.bfloat16(), group), torch.bfloat16),
        (lambda x, group: reduced(x.double(), group), torch.float64),
    ],
)
def test_numbers_that_a_cast_would_change_are_sent_in_their_dtype(function, travels):
    gm, start = exchanged(function, torch.randn(8, 12))
    assert start.args[0].meta["val"].dtype == travels
    (total,) = gm.graph.find_nodes(op="call_function", target=SUM_OF_PARTS)
    assert total.meta["val"].dtype == (torch.float64 if travels == torch.float64 else torch.float32)


def test_all_ranks_get_the_same_graph_except_for_their_numbers():
    graphs = []
    for rank in range(RANKS):
        gm, _ = exchanged(lambda x, group: reduced(x.float(), group), torch.randn(8, 12).bfloat16(), rank=rank)
        graphs.append([(node.name, [arg.name for arg in node.all_input_nodes]) for node in gm.graph.nodes])
    assert all(graph == graphs[0] for graph in graphs)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("rank", range(3))
def test_the_generated_sum_of_parts_adds_in_the_order_of_ranks(rank):
    parts = torch.randn(3, 40, 3).bfloat16()
    own, others = parts[rank], torch.cat([parts[:rank], parts[rank + 1 :]])
    before = counted("fallbacks")
    compiled = torch.compile(lambda *given: SUM_OF_PARTS(*given, rank, torch.float32), backend="overlapc")
    expected = parts[0].float() + parts[1].float() + parts[2].float()
    assert torch.equal(compiled(own, others), expected)
    assert torch.equal(SUM_OF_PARTS(own, others, rank, torch.float32), expected)
    assert counted("fallbacks") == before


def test_only_an_average_is_divided():
    gm, _ = exchanged(lambda x, group: reduced(x, group, "sum"), torch.randn(8, 2))
    assert ops(gm)["div"] == 0


@pytest.mark.parametrize(
    ("function", "x", "reason"),
    [
        (lambda x, group: reduced(x, group, "max"), torch.randn(8), "its reduction is 'max'"),
        (lambda x, group: reduced(x, group), torch.arange(8), "its dtype is torch.int64"),
        (lambda x, group: _c10d.reduce_scatter_tensor(x, "sum", RANKS, group), torch.randn(8), "another graph"),
    ],
)
def test_reductions_that_cannot_be_exchanged_stay_with_a_reason(function, x, reason):
    with fake_world(RANKS) as group:
        gm = make_fx(lambda x: function(x, group), tracing_mode="fake")(x)
        (start,) = gm.graph.find_nodes(op="call_function", target=_c10d.reduce_scatter_tensor.default)
        assert reason in (refusal(start) or "")
        assert exchange_reductions(gm, lambda start: RankInGroup(1, RANKS)) == 0


@pytest.mark.parametrize("shape", [(8, 12), (5, 3), (7,)])
def test_an_all_reduce_is_an_exchange_a_sum_and_a_gather(shape):
    def summed(x: Tensor, group: str) -> Tensor:
        return _c10d.wait_tensor(_c10d.all_reduce(x.to(torch.float32), "sum", group))

    x = torch.randn(shape, dtype=torch.bfloat16)
    gm, start = exchanged(summed, x)
    assert travelling_bytes(start) == start.args[0].meta["val"].nbytes == -(-x.numel() // RANKS) * RANKS * 2
    (gather,) = gm.graph.find_nodes(op="call_function", target=_c10d.all_gather_into_tensor.default)
    assert gather.args[0].meta["val"].dtype == torch.float32
    result = gm.graph.output_node().args[0].meta["val"]
    assert (result.shape, result.dtype) == (x.shape, torch.float32)
    assert ops(gm)["sum_of_parts"] == 1


HOSTS = RankInGroup(1, RANKS // 2, hosts=2, within="", across="")


def over_hosts(function, x: Tensor) -> fx.GraphModule:
    """Return the graph of `function` with its collective of four ranks on two hosts divided by hosts."""
    with fake_world(RANKS) as group:
        place = HOSTS._replace(within=group, across=group)
        gm = make_fx(lambda x: function(x, group), tracing_mode="fake")(x)
        if exchange_reductions(gm, lambda start: place) == 0:
            (gather,) = gm.graph.find_nodes(op="call_function", target=_c10d.all_gather_into_tensor.default)
            gather_by_hosts(gather, place)
    gm.graph.lint()
    return gm


def collectives(gm: fx.GraphModule) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return op, shape and dtype of the tensors that are sent, in order."""
    return [
        (node.target._opname, tuple(node.args[0].meta["val"].shape), node.args[0].meta["val"].dtype)
        for node in gm.graph.nodes
        if is_asynchronous(node)
    ]


def test_a_group_over_hosts_reduces_within_hosts_first_and_gathers_across_hosts_first():
    x = torch.randn(12, 3, dtype=torch.bfloat16)
    gm = over_hosts(lambda x, group: reduced(x.float(), group), x)
    bf16, fp32 = torch.bfloat16, torch.float32
    assert collectives(gm) == [("exchange", (12, 3), bf16), ("reduce_scatter_tensor", (6, 3), fp32)]
    (division,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)
    assert division.args[1] == RANKS
    assert gm.graph.output_node().args[0].meta["val"].shape == (3, 3)
    gm = over_hosts(lambda x, group: _c10d.wait_tensor(_c10d.all_gather_into_tensor(x, RANKS, group)), x)
    assert collectives(gm) == [("all_gather_into_tensor", (12, 3), bf16), ("gather_blocks", (24, 3), bf16)]
    assert gm.graph.output_node().args[0].meta["val"].shape == (48, 3)
    gm = over_hosts(lambda x, group: _c10d.wait_tensor(_c10d.all_reduce(x.float(), "sum", group)), x)
    assert collectives(gm) == [
        ("exchange", (36,), bf16), ("all_reduce", (18,), fp32), ("all_gather_into_tensor", (18,), fp32)
    ]  # fmt: skip


def test_a_reduction_with_a_result_that_is_not_contiguous_stays_a_library_call():
    with fake_world(RANKS) as group:
        gm = make_fx(lambda x: _c10d.wait_tensor(_c10d.all_reduce(x.t(), "sum", group)), tracing_mode="fake")(
            torch.ones(3, 4)
        )
        (start,) = gm.graph.find_nodes(op="call_function", target=_c10d.all_reduce.default)
        assert refusal(start) == "its result is not contiguous"


def test_the_rewrite_of_a_reduction_like_an_earlier_one_has_the_metadata_that_its_ops_return():
    def function(x: Tensor, y: Tensor, group: str) -> tuple[Tensor, ...]:
        return tuple(reduced(each.t().to(torch.float32).contiguous(), group) for each in (x, y))

    with fake_world(RANKS) as group:
        x = torch.randn(8, 12, dtype=torch.bfloat16)
        gm = make_fx(lambda *given: function(*given, group), tracing_mode="fake")(x, x.clone())
        assert exchange_reductions(gm, lambda start: RankInGroup(1, RANKS)) == 2
        calls = gm.graph.find_nodes(op="call_function", target=EXCHANGE)
        assert (
            calls[0].args[0].meta["val"].untyped_storage()._cdata
            != calls[1].args[0].meta["val"].untyped_storage()._cdata
        )
        for node in gm.graph.nodes:
            if node.op == "call_function":
                found, expected = node.meta["val"], fake_result(node)
                assert form_of(found, node) == form_of(expected, node), node.format_node()


def form_of(value: Tensor, node: fx.Node) -> tuple[object, ...]:
    """Return dtype and layout of a result, and which arguments it shares memory with."""
    memory = value.untyped_storage()._cdata
    shared = [memory == arg.meta["val"].untyped_storage()._cdata for arg in node.all_input_nodes]
    return value.dtype, value.device, value.shape, value.stride(), value.storage_offset(), shared
