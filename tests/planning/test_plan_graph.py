"""Which inputs of backward the compiled graph may free."""

from types import SimpleNamespace

import pytest
from torch import fx
from torch._guards import TracingContext, tracing

from overlapc.planning.plan_graph import _freeable


@pytest.fixture
def backward():
    graph = fx.Graph()
    for name in ("primals_1", "saved", "permute_2", "tangents_1"):
        graph.placeholder(name)
    graph.output(())
    return fx.GraphModule({}, graph)


def test_a_saved_view_of_a_parameter_is_not_ours_to_free(backward):
    context = TracingContext(None)
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=[1])  # the inputs that AOTAutograd lets backward free
    with tracing(context):
        assert _freeable(backward, "backward_0") == {"saved"}


def test_where_torch_says_nothing_all_that_was_saved_is_ours(backward):
    assert _freeable(backward, "backward_0") == {"saved", "permute_2"}
    assert _freeable(backward, "forward_0") == set()
