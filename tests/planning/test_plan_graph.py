"""Which inputs of backward the compiled graph may free, and which collectives are removed before a graph is planned."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.config import Config
from overlapc.estimators.user_times import EarlierRun
from overlapc.fx.comm.collectives import find_collectives
from overlapc.planning.dumps import Dumps
from overlapc.planning.graph_planner import freeable_inputs
from overlapc.planning.plan_graph import as_sent, plan_graph
from tests.worlds import fake_world

c10d = torch.ops._c10d_functional


@pytest.fixture
def backward():
    graph = fx.Graph()
    for name in ("primals_1", "saved", "permute_2", "tangents_1"):
        graph.placeholder(name)
    graph.output(())
    return fx.GraphModule({}, graph)


def test_a_saved_view_of_a_parameter_may_not_be_freed(backward):
    context = TracingContext(None)
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=[1])  # the inputs that AOTAutograd lets backward free
    with tracing(context):
        assert freeable_inputs(backward, "backward_0") == {"saved"}


def test_without_metadata_all_saved_tensors_may_be_freed(backward):
    assert freeable_inputs(backward, "backward_0") == {"saved", "permute_2"}
    assert freeable_inputs(backward, "forward_0") == set()


def reduced(x: Tensor, group: str, read: bool) -> Tensor:
    """Return `x`, reduced over ranks unless the result is not `read`."""
    result = c10d.wait_tensor(c10d.all_reduce(x, "sum", group))
    return result if read else x + 1


@pytest.mark.parametrize("rank_check", [True, False])
def test_a_collective_that_nothing_reads_is_removed_only_if_ranks_compare_their_graphs(rank_check):
    config, name = Config.of({"rank_check": rank_check}), "inference_0"
    with fake_world(4) as group:
        gm = make_fx(lambda x: (reduced(x, group, read=False),), tracing_mode="fake")(torch.ones(8))
        plan_graph(gm, config=config, name=name, dumps=Dumps(config, name), inner_estimates=EarlierRun({}))
        assert len(find_collectives(gm.graph)) == (0 if rank_check else 1)


def test_a_collective_that_is_read_is_not_taken_for_one_that_an_earlier_graph_removed():
    with fake_world(4) as group:
        graphs = [make_fx(partial(reduced, group=group, read=read))(torch.ones(8)).graph for read in (True, False)]
        first, second = (as_sent(*find_collectives(graph), by_copies=False) for graph in graphs)
        assert first != second
