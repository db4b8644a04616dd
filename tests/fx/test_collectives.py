"""`canonicalize` pairs every collective of an ATen graph with its waits; `find_collectives` describes them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.fx.comm.canonical import canonicalize, drop_unread
from overlapc.fx.comm.collectives import find_collectives
from overlapc.fx.comm.communication import group_of, is_asynchronous, is_collective, is_wait

c10d = torch.ops._c10d_functional
wait = c10d.wait_tensor
SHAPE = (8, 4)


def trace(function: Callable[..., object], count: int = 1) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*(torch.ones(SHAPE) for _ in range(count)))


def names(module: fx.GraphModule) -> list[str]:
    return [
        "getitem" if node.target is operator.getitem else node.target._opname
        for node in module.graph.nodes
        if node.op == "call_function"
    ]


def test_a_canonical_graph_is_unchanged(world):
    module = trace(lambda x: wait(c10d.all_gather_into_tensor(x, 4, world)) + 1)
    assert canonicalize(module) == 0


def test_aliases_that_are_not_returned_are_removed():
    alias = torch.ops.aten.alias.default
    module = trace(lambda x: (alias(alias(x.sin())).cos(), alias(x)))
    assert canonicalize(module) == 2
    assert names(module) == ["sin", "cos", "alias"]


def test_redundant_waits_are_removed(world):
    def twice(x: Tensor) -> Tensor:
        y = c10d.all_reduce(x, "sum", world)
        return wait(y) + wait(wait(y))

    module = trace(twice)
    canonicalize(module)
    assert names(module) == ["all_reduce", "wait_tensor", "add"]


def test_every_reader_reads_through_the_wait(world):
    def raw(x: Tensor) -> Tensor:
        y = c10d.all_reduce(x, "sum", world)
        z = y * 2
        return wait(y.view(4, 8)) + z.view(4, 8)

    module = trace(raw)
    canonicalize(module)
    assert names(module) == ["all_reduce", "wait_tensor", "mul", "view", "view", "add"]
    (start,) = (node for node in module.graph.nodes if is_asynchronous(node))
    assert all(is_wait(user) for user in start.users)


def test_a_wait_for_a_computed_tensor_is_removed_but_one_for_an_input_stays(world):
    module = trace(lambda x: wait(wait(x) + 1) * wait(x))
    canonicalize(module)
    assert names(module) == ["wait_tensor", "add", "mul"]


def test_a_wait_for_a_view_of_an_input_stays_and_one_for_a_view_of_a_launch_moves_to_the_launch(world):
    module = trace(lambda x: wait(x.t().split(2)[0]) + 1)
    canonicalize(module)
    assert names(module)[-2:] == ["wait_tensor", "add"]

    module = trace(lambda x: wait(c10d.all_reduce(x, "sum", world).t().split(2)[0]) + 1)
    canonicalize(module)
    assert names(module)[:3] == ["all_reduce", "wait_tensor", "t"]
    assert names(module).count("wait_tensor") == 1


def test_coalesced_collectives_have_one_wait_per_output(world):
    def several(x: Tensor, y: Tensor) -> Tensor:
        a, b = c10d.all_gather_into_tensor_coalesced([x, y], 4, world)
        return wait(a) + wait(b) + wait(a)

    module = trace(several, 2)
    canonicalize(module)
    (collective,) = find_collectives(module.graph)
    assert names(module).count("wait_tensor") == 2
    assert [each.args[0].args[1] for each in collective.waits] == [0, 1]
    assert collective.comm.bytes == 2 * 4 * 8 * 4 * 4


def test_equal_gathers_and_their_casts_are_merged(world):
    def twice(x: Tensor) -> Tensor:
        a, b = (wait(c10d.all_gather_into_tensor(x.to(torch.bfloat16), 4, world)) for _ in range(2))
        return a + b

    module = trace(twice)
    canonicalize(module)
    assert names(module) == ["_to_copy", "all_gather_into_tensor", "wait_tensor", "add"]


def test_gathers_of_different_values_are_not_merged(world):
    def both(x: Tensor) -> Tensor:
        a = wait(c10d.all_gather_into_tensor(x.to(torch.bfloat16), 4, world))
        return a + wait(c10d.all_gather_into_tensor(x.to(torch.float16), 4, world))

    module = trace(both)
    canonicalize(module)
    assert names(module).count("all_gather_into_tensor") == 2


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(-1)], ids=["itself", "viewed"])
def test_equal_gathers_that_are_returned_are_not_merged(world, view):
    def gathered(x: Tensor) -> Tensor:
        return wait(c10d.all_gather_into_tensor(x, 4, world))

    module = trace(lambda x: (view(gathered(x)), gathered(x), gathered(x).sin() + gathered(x)))
    canonicalize(module)
    assert names(module).count("all_gather_into_tensor") == names(module).count("wait_tensor") == 3


def test_equal_coalesced_gathers_are_not_merged_if_a_part_is_returned(world):
    def gathered(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first, second = c10d.all_gather_into_tensor_coalesced([x, y], 4, world)
        return wait(first), wait(second).sin()

    module = trace(lambda x, y: (gathered(x, y), gathered(x, y)), 2)
    canonicalize(module)
    assert names(module).count("wait_tensor") == 4


def test_equal_copies_before_gathers_are_not_merged_if_they_are_returned(world):
    def copied(x: Tensor) -> tuple[Tensor, Tensor]:
        copy = x.clone()
        return copy, wait(c10d.all_gather_into_tensor(copy, 4, world)).sin()

    module = trace(lambda x: (*copied(x), *copied(x)))
    canonicalize(module)
    assert names(module).count("clone") == 2


def test_an_unread_collective_is_removed_only_on_request(world):
    def unread(x: Tensor) -> Tensor:
        wait(c10d.all_gather_into_tensor(x, 4, world))
        return x + 1

    module = trace(unread)
    assert canonicalize(module) == 0
    assert drop_unread(module) == 2
    assert names(module) == ["add"]


def test_a_launch_that_the_program_never_waits_for_gets_a_wait(world):
    module = trace(lambda x: (c10d.all_gather_into_tensor(x, 4, world), x + 1)[1])
    canonicalize(module)
    assert names(module) == ["all_gather_into_tensor", "wait_tensor", "add"]


def test_an_in_place_collective_is_read_through_its_wait(world):
    def in_place(x: Tensor) -> Tensor:
        y = x + 1
        wait(c10d.all_reduce_(y, "sum", world))
        return y * 2

    module = trace(in_place)
    assert canonicalize(module) == 1
    assert names(module) == ["add", "all_reduce_", "wait_tensor", "mul"]
    assert [node.name for node in module.graph.find_nodes(op="call_function", target=wait.default)[0].users] == ["mul"]


def test_autograd_collectives_become_plain_ones(world):
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops._c10d_functional_autograd.all_gather_into_tensor.default, (x, 4, world))
    graph.output(graph.call_function(wait.default, (y,)))
    module = fx.GraphModule({}, graph)
    assert canonicalize(module) == 1
    assert names(module) == ["all_gather_into_tensor", "wait_tensor"]


@pytest.mark.parametrize(
    ("launch", "kind", "elements"),
    [
        (lambda x, g: c10d.all_gather_into_tensor(x, 4, g), "all_gather", 4 * 32),
        (lambda x, g: c10d.reduce_scatter_tensor(x, "sum", 4, g), "reduce_scatter", 32),
        (lambda x, g: c10d.all_reduce(x, "avg", g), "all_reduce", 32),
        (lambda x, g: c10d.all_to_all_single(x, [2, 2, 2, 2], [2, 2, 2, 2], g), "all_to_all", 32),
        (lambda x, g: c10d.broadcast(x, 0, g), "broadcast", 32),
    ],
)
def test_a_collective_has_its_kind_bytes_dtype_and_group(world, launch, kind, elements):
    module = trace(lambda x: wait(launch(x, world)))
    canonicalize(module)
    (collective,) = find_collectives(module.graph)
    comm = collective.comm
    assert (comm.collective, comm.bytes, comm.dtype) == (kind, 4 * elements, "float32")
    assert (comm.group, comm.size, comm.ranks) == ("world", 4, (0, 1, 2, 3))
    assert not collective.synchronous


def barriers(world: str, *launches: tuple) -> list:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(SHAPE, device="meta")
    nodes = [graph.call_function(op, (x, *args)) for op, *args in launches]
    for node in nodes:
        node.meta["val"] = torch.empty((2, 16), device="meta")
    graph.output(tuple(nodes))
    module = fx.GraphModule({}, graph)
    assert canonicalize(module) == 0
    found = find_collectives(graph)
    assert all(each.synchronous for each in found)
    return [(each.comm.collective, each.comm.bytes, each.comm.group) for each in found]


def test_blocking_collectives_are_synchronous(world):
    assert barriers(
        world, (torch.ops._dtensor.shard_dim_alltoall.default, 0, 1, world), (c10d.all_reduce_.default, "sum", world)
    ) == [("all_to_all", 128, "world"), ("all_reduce", 128, "world")]


def test_unknown_communication_is_synchronous(world):
    assert barriers(world, (torch.ops.c10d.monitored_barrier_.default, None, [], 0, False)) == [
        ("unknown", 128, "unknown")
    ]


@pytest.mark.skipif(not hasattr(c10d, "isend"), reason="torch 2.11 has no functional point-to-point ops")
def test_point_to_point_is_synchronous(world):
    assert barriers(world, (c10d.isend.default, 1, 0, world)) == [("unknown", 128, "world")]


def test_groups_have_unique_names_by_mesh_axis_or_number(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep"))
    groups = [mesh.get_group("dp"), mesh.get_group("tp"), other.get_group("tp"), torch.distributed.new_group([0, 3])]

    def all_of_them(x: Tensor) -> Tensor:
        for group in groups:
            x = wait(c10d.all_reduce(x, "sum", group.group_name))
        return wait(c10d.all_reduce(x, "sum", world))

    found = find_collectives(trace(all_of_them).graph)
    assert [each.comm.group for each in found] == ["dp", "tp", "tp.2", "group", "world"]
    assert [each.comm.ranks for each in found[:2]] == [(0, 2), (0, 1)]


def test_waits_and_compute_are_not_collectives(world):
    module = trace(lambda x: wait(c10d.all_reduce(x, "sum", world)) + 1)
    reduce, waiting, add = (node for node in module.graph.nodes if node.op == "call_function")
    assert [is_collective(node) for node in (reduce, waiting, add)] == [True, False, False]
    assert group_of(reduce) == world
    assert group_of(add) is None


def test_a_conditional_whose_branch_communicates_is_unknown_communication(world):
    def branch(x: Tensor) -> Tensor:
        return wait(c10d.all_reduce(x, "sum", world)).clone()

    cond = torch.ops.higher_order.cond
    module = make_fx(lambda p, x: cond(p, branch, torch.sin, (x,)))(torch.tensor(True), torch.ones(SHAPE))
    canonicalize(module)
    (found,) = find_collectives(module.graph)
    assert (found.comm.collective, found.comm.group, found.comm.ranks) == ("unknown", "unknown", (0, 1, 2, 3))
    assert found.synchronous


@pytest.fixture(scope="module")
def exchange():
    """A custom op that counts as communication because it takes the name of a process group."""
    library = torch.library.Library("overlapc_test", "DEF")
    library.define("exchange(Tensor x, str group_name) -> Tensor")
    library.impl("exchange", lambda x, group_name: x.clone(), "CompositeExplicitAutograd")
    yield torch.ops.overlapc_test.exchange.default
    library._destroy()


def test_custom_communication_is_a_barrier_unless_the_user_vouches_for_it(world, exchange):
    module = trace(lambda x: exchange(x, world) + 1)
    (found,) = find_collectives(module.graph)
    assert found.synchronous
    assert found.comm.collective == "unknown"
    assert not found.comm.safe
    (found,) = find_collectives(module.graph, frozenset({"overlapc_test::exchange"}))
    assert found.comm.safe


def test_a_collective_that_contains_its_wait_is_no_barrier_and_one_in_place_is(world):
    def both(x: Tensor) -> Tensor:
        return c10d.all_reduce_(torch.ops._dtensor.shard_dim_alltoall.default(x, 0, 1, world), "sum", world)

    assert [each.comm.safe for each in find_collectives(trace(both).graph)] == [True, False]
