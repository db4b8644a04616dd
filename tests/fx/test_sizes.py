"""Graphs in which torch traced a data-dependent size as a number run op by op."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from overlapc.compilation.stages import compile_graph
from overlapc.config import Config
from overlapc.fx.sizes import guessed_size
from overlapc.runtime.counters import counted

aten = torch.ops.aten


def picked(size: int) -> fx.GraphModule:
    """Return the graph of `x[:, unique(index)].sum()` traced for `size` distinct indices, as torch 2.11 traces it."""
    graph = fx.Graph()
    with FakeTensorMode():
        x, index = graph.placeholder("x"), graph.placeholder("index")
        x.meta["val"], index.meta["val"] = torch.empty(5, 5), torch.empty(5, dtype=torch.int64)
        both = graph.call_function(aten._unique.default, (index, False))
        both.meta["val"] = (torch.empty(size, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        found = graph.call_function(operator.getitem, (both, 0))
        found.meta["val"] = both.meta["val"][0]
        columns = graph.call_function(aten.index_select.default, (x, 1, found))
        columns.meta["val"] = torch.empty(5, size)
        total = graph.call_function(aten.sum.default, (columns,))
        total.meta["val"] = torch.empty(())
        graph.output((total,))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_graph_with_a_guessed_size_runs_op_by_op_with_a_warning():
    torch._dynamo.utils.counters.clear()
    gm = picked(1)
    assert guessed_size(gm.graph).target is aten._unique.default
    with pytest.warns(UserWarning, match="_unique.* gives a size that depends on data"):
        call = compile_graph(gm, [], config=Config.of({}), name="forward_0")
    x, index = torch.randn(5, 5), torch.tensor([2, 1, 4, 2, 2])
    torch.testing.assert_close(call([x, index])[0], x[:, index.unique()].sum())
    assert counted("graphs_run_op_by_op") == 1


def test_sizes_that_follow_from_inputs_are_not_guessed():
    graph = fx.Graph()
    with FakeTensorMode():
        x, index = graph.placeholder("x"), graph.placeholder("index")
        x.meta["val"], index.meta["val"] = torch.empty(5, 5), torch.empty(3, dtype=torch.int64)
        rows = graph.call_function(aten.index.Tensor, (x, [index]))
        rows.meta["val"] = torch.empty(3, 5)
        repeated = graph.call_function(aten.repeat_interleave.Tensor, (index,), {"output_size": 7})
        repeated.meta["val"] = torch.empty(7, dtype=torch.int64)
        graph.output((rows, repeated))
    assert guessed_size(graph) is None


def test_an_unbacked_size_that_was_later_specialized_is_guessed():
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        graph = fx.Graph()
        index = graph.placeholder("index")
        index.meta["val"] = torch.empty(5, dtype=torch.int64)
        found = graph.call_function(aten._unique.default, (index,))
        count = shapes.create_unbacked_symint()
        found.meta["val"] = (torch.empty(count, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        graph.output((found,))
        assert guessed_size(graph) is None
        torch._check(count == 1)
        assert guessed_size(graph) is found
