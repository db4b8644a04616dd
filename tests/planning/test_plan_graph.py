"""Which inputs of backward the compiled graph may free."""

from types import SimpleNamespace

import pytest
from torch import fx
from torch._guards import TracingContext, tracing

from overlapc.planning.graph_planner import freeable_inputs


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
