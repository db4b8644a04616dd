"""`control_deps`: wrapped ops are inlined into the graph, and the order that they require is kept."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.config import Config
from overlapc.estimators.user_times import EarlierRun
from overlapc.fx.comm.canonical import canonicalize
from overlapc.fx.comm.collectives import find_collectives
from overlapc.fx.control import done, inline_control_deps, order_of
from overlapc.planning.dumps import Dumps
from overlapc.planning.plan_graph import plan_graph
from overlapc.schedule.model import Node

c10d = torch.ops._c10d_functional


class ControlDeps(HigherOrderOperator):
    """A stand-in for torch's op, which is recognized by its name because overlapc does not import its module."""

    def __init__(self) -> None:
        super().__init__("control_deps")

    def __call__(self, *args: object) -> object:
        raise AssertionError("must not run")


CONTROL_DEPS = ControlDeps()


def traced(function: Callable[..., object], *shapes: tuple[int, ...]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes))


def named(gm: fx.GraphModule, op: str) -> fx.Node:
    (found,) = (node for node in gm.graph.nodes if op in str(node.target))
    return found


def wrap(gm: fx.GraphModule, node: fx.Node, *earlier: fx.Node) -> None:
    """Wrap `node` as torch does so that it runs after `earlier`, with its inputs as arguments of a subgraph."""
    inner = fx.Graph()
    args = {given: inner.placeholder(given.name) for given in node.all_input_nodes}
    inner.output(inner.node_copy(node, args.__getitem__))
    name = f"subgraph_{node.name}"
    setattr(gm, name, fx.GraphModule(gm, inner))
    with gm.graph.inserting_before(node):
        holder = gm.graph.get_attr(name)
        wrapped = gm.graph.call_function(CONTROL_DEPS, (earlier, holder, *args))
    wrapped.meta = dict(node.meta)
    node.replace_all_uses_with(wrapped)
    gm.graph.erase_node(node)


def schedule_nodes(gm: fx.GraphModule) -> dict[str, Node]:
    config = Config.of({"passes": ()})
    nothing = EarlierRun({})
    planned = plan_graph(gm, config=config, name="forward_0", dumps=Dumps(config, "forward_0"), inner_estimates=nothing)
    assert planned is not None
    return {node.name: node for node in planned.result.schedule.nodes}


def test_a_wrapped_op_is_inlined_with_the_nodes_that_it_follows():
    gm = traced(lambda x, y: (x.sin(), y.cos()), (4,), (3,))
    wrap(gm, named(gm, "cos"), named(gm, "sin"))
    assert inline_control_deps(gm) == 1
    mark = order_of(named(gm, "cos"))
    assert mark is not None
    assert (mark.target, mark.args) == (done, (named(gm, "sin"),))
    x, y = torch.rand(4), torch.rand(3)
    torch.testing.assert_close(gm(x, y), (x.sin(), y.cos()))


def test_results_that_a_subgraph_passes_through_become_its_arguments():
    gm = traced(lambda x, y: (x.sin(), y.cos() + 1), (4,), (3,))
    sin, cos = named(gm, "sin"), named(gm, "cos")
    inner = fx.Graph()
    arg, through = inner.placeholder("y"), inner.placeholder("sin")
    inner.output((inner.call_function(torch.ops.aten.cos.default, (arg,)), through))
    gm.pair = fx.GraphModule(gm, inner)
    with gm.graph.inserting_before(cos):
        both = gm.graph.call_function(CONTROL_DEPS, ((sin,), gm.graph.get_attr("pair"), cos.args[0], sin))
        first, second = (gm.graph.call_function(operator.getitem, (both, at)) for at in range(2))
    cos.replace_all_uses_with(first)
    gm.graph.erase_node(cos)
    gm.graph.output_node().replace_input_with(sin, second)
    inline_control_deps(gm)
    assert gm.graph.output_node().args[0][0] is sin
    x, y = torch.rand(4), torch.rand(3)
    torch.testing.assert_close(gm(x, y), (x.sin(), y.cos() + 1))


def test_the_schedule_keeps_the_order_and_names_fused_kernels():
    # sin and exp fuse because exp reads sin; the product must come after both, although it reads neither.
    gm = traced(lambda x, y: (x.sin().exp(), y @ y), (4, 4), (3, 3))
    wrap(gm, named(gm, "mm"), named(gm, "sin"))
    nodes = schedule_nodes(gm)
    assert nodes["mm_1"].after == ("exp",)
    assert "exp" in nodes
    assert "sin" not in nodes


def test_an_op_that_is_not_read_adds_no_order():
    gm = traced(lambda x, y: (x.sin(), y @ y)[1:], (4, 4), (3, 3))
    wrap(gm, named(gm, "mm"), named(gm, "sin"))
    (product,) = schedule_nodes(gm).values()
    assert product.after == ()


def test_an_op_after_a_launch_does_not_wait_for_its_result(world):
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        flying = c10d.all_gather_into_tensor(x, 4, world)
        return y @ y, c10d.wait_tensor(flying) + 1

    gm = traced(function, (8, 4), (3, 3))
    wrap(gm, named(gm, "mm"), named(gm, "all_gather"))
    inline_control_deps(gm)
    canonicalize(gm)
    (gather,) = find_collectives(gm.graph)
    assert len(gather.waits) == 1
    nodes = schedule_nodes(gm)
    product = nodes[named(gm, "mm").name]
    assert product.after == (gather.start.name,)
    order = list(nodes)
    assert order.index(gather.start.name) < order.index(product.name) < order.index(gather.waits[0].name)
