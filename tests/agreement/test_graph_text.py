"""The text of a graph that ranks compare leaves out what may differ between ranks, and nothing else."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives  # registers _c10d_functional
from torch import fx
from torch._subclasses import FakeTensorMode

from overlapc.agreement.graph_text import GraphText, text_of

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
RANKS = {"7": (0, 1, 2, 3), "9": (4, 5, 6, 7), "11": (0, 4, 8, 12)}


class Groups(dict):
    """Names of process groups, by the names in the graph, and their ranks."""

    def ranks(self, group: str) -> tuple[int, ...]:
        return RANKS[group]


GROUPS = Groups({"7": "dp of 4", "9": "dp of 4", "11": "tp of 4"})


def a_graph(
    rows: int = 3,
    gathered: int = 32,
    offset: int = 0,
    group: str = "7",
    dim: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    op: torch._ops.OpOverload = aten.relu.default,
    name: str = "weight",
    part: int = 0,
) -> fx.Graph:
    """Return a graph with an all-gather, a wait, a view, a subtraction, a sum, a split and a part of it."""
    graph = fx.Graph()
    with FakeTensorMode():

        def call(target: Callable, *args: object, **kwargs: object) -> fx.Node:
            node = graph.call_function(target, args, kwargs)
            values = torch.fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
            return node

        weight, x = graph.placeholder(name), graph.placeholder("x")
        weight.meta["val"] = torch.empty(gathered // 4, 6, dtype=dtype)
        x.meta["val"] = torch.empty(rows, 6, dtype=dtype)
        start = call(c10d.all_gather_into_tensor.default, weight, 4, group)
        call(c10d.wait_tensor.default, start)
        seen = call(aten.view.default, x, [rows * 6, 1])
        shifted = call(aten.sub.Tensor, seen, offset)
        total = call(aten.sum.dim_IntList, call(op, shifted), [dim], dtype=torch.float32)
        parts = call(aten.split.Tensor, total, 2)
        graph.output((call(operator.getitem, parts, part), None))
    return graph


def the_text(**what: object) -> GraphText:
    return text_of(a_graph(**what), GROUPS)  # type: ignore[arg-type]


def lines_of(**what: object) -> list[str]:
    return the_text(**what).lines


def test_the_text_has_one_line_per_node() -> None:
    assert lines_of() == [
        "v0 = placeholder : bf16 2d",
        "v1 = placeholder : bf16 2d",
        "v2 = _c10d_functional.all_gather_into_tensor.default(v0, 4, <dp of 4>) : bf16 2d",
        "v3 = _c10d_functional.wait_tensor.default(v2) : bf16 2d",
        "v4 = aten.view.default(v1, [#, #]) : bf16 2d",
        "v5 = aten.sub.Tensor(v4, #) : bf16 2d",
        "v6 = aten.relu.default(v5) : bf16 2d",
        "v7 = aten.sum.dim_IntList(v6, [1], dtype=torch.float32) : f32 1d",
        "v8 = aten.split.Tensor(v7, #) : " + ", ".join(["f32 1d"] * 9),
        "v9 = getitem(v8, #) : f32 1d",
        "output([[v9, None]])",
    ]


@pytest.mark.parametrize("what", [{"offset": 16_000}, {"group": "9"}, {"name": "other"}, {"part": 1}, {"gathered": 64}])
def test_ranks_may_differ_in_offsets_groups_names_sizes_and_parts_of_a_split(what: dict) -> None:
    assert lines_of(**what) == lines_of()


@pytest.mark.parametrize(
    ("op", "ours", "theirs"),
    [
        (aten.diagonal.default, (), (1,)),
        (aten.diagonal.default, (1,), (2,)),
        (aten.unfold.default, (1, 2, 1), (1, 3, 2)),
        (aten.native_dropout.default, (0.1, True), (0.2, True)),
    ],
)
def test_ranks_may_differ_in_operands_that_the_schema_declares_as_int_or_float(
    op: torch._ops.OpOverload, ours: tuple, theirs: tuple
) -> None:
    texts = []
    for operands in (ours, theirs):
        graph = fx.Graph()
        graph.output(graph.call_function(op, (graph.placeholder("x"), *operands)))
        texts.append(text_of(graph, GROUPS).lines)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ({"group": "11"}, 2),
        ({"dtype": torch.float16}, 0),
        ({"op": aten.neg.default}, 6),
        ({"dim": 0}, 7),
    ],
)
def test_a_difference_shows_on_the_line_of_its_node(what: dict, line: int) -> None:
    pairs = list(zip(lines_of(), lines_of(**what), strict=False))
    assert next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs) == line


def test_sizes_of_collectives_are_compared_within_their_group() -> None:
    line = "_c10d_functional.all_gather_into_tensor.default(?, 4, <dp of 4>) : bf16 2d"
    assert the_text().sizes == {RANKS["7"]: [f"{line} [8, 6] -> [32, 6]"]}
    assert the_text(group="9", gathered=64).sizes == {RANKS["9"]: [f"{line} [16, 6] -> [64, 6]"]}


def test_shards_of_different_sizes_have_equal_text() -> None:
    graph = fx.Graph()
    other = fx.Graph()
    for each, rows in ((graph, 5), (other, 4)):
        x = each.placeholder("x")
        x.meta["val"] = torch.empty(rows, 6, device="meta")
        narrow = each.call_function(aten.slice.Tensor, (x, 0, 0, rows - 1))
        narrow.meta["val"] = torch.empty(rows - 1, 6, device="meta")
        each.output((narrow,))
    lines = text_of(graph, GROUPS).lines
    assert lines == text_of(other, GROUPS).lines
    assert lines[1] == "v1 = aten.slice.Tensor(v0, 0) : f32 2d"


def test_device_indices_are_left_out_and_subgraphs_are_included() -> None:
    def graph(device: int, inner_op: Callable) -> fx.Graph:
        inner = fx.Graph()
        inner.output(inner.call_function(inner_op, (inner.placeholder("y"),)))
        outer = fx.Graph()
        branch = outer.get_attr("branch")
        made = outer.call_function(aten.zeros.default, ([4],), {"device": torch.device("cuda", device)})
        outer.output((branch, made))
        # GraphModule copies the given graph, and only the copy refers to its module.
        return fx.GraphModule({"branch": fx.GraphModule({}, inner)}, outer).graph

    ours = text_of(graph(0, aten.relu.default), GROUPS).lines
    assert ours == text_of(graph(1, aten.relu.default), GROUPS).lines
    assert "  v1 = aten.relu.default(v0)" in ours
    assert ours != text_of(graph(0, aten.neg.default), GROUPS).lines
    assert any("device=cuda)" in line for line in ours)


def test_the_text_of_twenty_thousand_nodes_takes_less_than_a_second() -> None:
    graph = fx.Graph()
    last = graph.placeholder("x")
    last.meta["val"] = torch.empty(4, 4, device="meta")
    for _ in range(20_000):
        value = last.meta["val"]
        last = graph.call_function(aten.add.Tensor, (last, last), {"alpha": 2})
        last.meta["val"] = value
    graph.output(last)
    began = time.process_time()
    lines = text_of(graph, GROUPS).lines
    assert time.process_time() - began < 1.0
    assert lines[20_000] == "v20000 = aten.add.Tensor(v19999, v19999) : f32 2d"
