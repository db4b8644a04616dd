"""Which kernels may fuse with a kernel that overwrites memory in place."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.fusion import fuse_ops
from overlapc.fusion.deps import edges, without_dead_ops
from overlapc.ir.hazards import scatters
from overlapc.ir.ops import Loops
from overlapc.lowering import lower
from tests.fusion.small_graphs import change, graph, names, pointwise
from tests.ir.interpret import run_ops
from tests.lowering.against_eager import compiled, same


def reasons(made):
    return {each.reason for each in fuse_ops(made)[1].refused.values()}


def test_the_kernel_that_computes_the_new_content_overwrites_the_buffer():
    made = graph([pointwise("y", "a", "b"), change("c", "a", "y")], ["a__c"])
    ops, _ = fuse_ops(made)
    assert names(ops) == ["c"]
    assert ops[0].mutates[0].buffer == "a__c"


def test_an_update_of_an_input_is_never_dead_but_one_of_an_intermediate_may_be():
    made = graph([pointwise("y", "b"), change("c", "a", "b"), change("d", "y", "b")], [])
    assert names(without_dead_ops(made)) == ["c"]


def test_an_update_comes_after_readers_of_the_old_and_before_readers_of_the_new_content():
    made = graph([pointwise("y", "a"), change("c", "a", "b"), pointwise("z", "a__c")], ["y", "z"])
    found = edges(made.ops, made)
    assert found.before == [set(), {0}, {1}]


@pytest.mark.parametrize("reader", ["y", "c"])
def test_elements_that_others_still_read_are_not_overwritten(reader):
    """y reads a[p0 + 1], itself or inlined into c: a kernel that also stores a[p0] would have a race."""
    shifted = dataclasses.replace(change("y", "y0", "a", shift=1), mutates=(), before=())
    body = dataclasses.replace(shifted.body, stores=(dataclasses.replace(shifted.body.stores[0], buffer="y"),))
    producer = Loops("y", shifted.device, body, pointwise("y", "a", elements=7).outputs)
    following = change("c", "a", "b" if reader == "y" else "y")
    following = dataclasses.replace(following, body=dataclasses.replace(following.body, loops=body.loops))
    made = graph([producer, following], ["y", "a__c"] if reader == "y" else ["a__c"])
    ops, _ = fuse_ops(made)
    assert len(ops) == 2
    inputs = [torch.randn(8) for _ in range(3)]
    expected = run_ops(made.ops, made, [each.clone() for each in inputs])
    torch.testing.assert_close(run_ops(ops, made, inputs), expected)
    if reader == "y":
        assert reasons(made) <= {"a would be overwritten before all iterations have read their part of it"}


def test_two_updates_of_one_buffer_do_not_fuse():
    made = graph([change("c", "a", "b"), dataclasses.replace(change("d", "a", "b"), before=("a__c",))], ["a__d"])
    made.aliases["a__d"] = "a__c"
    ops, report = fuse_ops(made)
    assert names(ops) == ["c", "d"]
    assert {each.reason for each in report.refused.values()} == {"both write to the memory of a"}


def test_a_scatter_does_not_fuse():
    scatter = change("c", "a", "b")
    store = dataclasses.replace(scatter.body.stores[0], mode="add")
    scatter = dataclasses.replace(scatter, body=dataclasses.replace(scatter.body, stores=(store,)))
    made = graph([scatter, pointwise("y", "b")], ["a__c", "y"])
    assert reasons(made) == {"one of them scatters: its iterations write elements that depend on data"}


# --- through torch.compile


def kernels(function, *args):
    counters.clear()
    same(function, *args)
    found = counters["overlapc"]
    return found["kernels"], found["externs"] + found["fallbacks"]


def test_an_update_of_an_input_is_one_kernel_without_a_copy():
    def step(p, g, m):
        m.mul_(0.9).add_(g, alpha=0.1)
        p.sub_(m * 0.01)

    assert kernels(step, *(torch.randn(64, 8) for _ in range(3))) == (1, 0)


aten = torch.ops.aten
PLACES = torch.tensor([5, 0, 3])


def test_a_scatter_into_an_input_writes_only_the_elements_that_it_changes():
    def append(cache, new):
        cache.index_copy_(0, PLACES, new)
        return cache.sum()

    def add(table, new):
        table.index_add_(0, PLACES, new)
        return table * 2

    for step in (append, add):
        assert kernels(step, torch.randn(7, 4), torch.randn(3, 4)) == (2, 0)


def _added(x, v, i):
    return aten.index_put(x, [i], v, True)


@pytest.mark.parametrize(
    ("function", "directly"),
    [
        (lambda x, v, i: (y := _added(x, v, i), aten.copy_(x, y), y * 2)[2], True),
        (lambda x, v, i: (z := x.exp(), y := _added(x, v, i), aten.copy_(x, y), z)[-1], True),
        (lambda x, v, i: (y := _added(x, v, i), z := x.exp(), aten.copy_(x, y), z)[-1], False),
        (lambda x, v, i: (y := _added(x, v, i), z := aten.view(x, [-1]).exp(), aten.copy_(x, y), z)[-1], False),
        (lambda x, v, i: (t := aten.view(x, [-1]), y := _added(x, v, i), z := t.exp(), aten.copy_(x, y), z)[-1], False),
        (lambda x, v, i: (y := _added(x, v, i), aten.copy_(x, y), y)[0], False),
        (lambda x, v, i: (y := _added(x, v, i), aten.copy_(x, y), aten.view(y, [-1]))[2], False),
        (lambda x, v, i: (y := _added(x, aten.slice(x, 0, 1, 4), i), aten.copy_(x, y), v * 1)[-1], False),
        (lambda x, v, i: (y := _added(x, x.exp()[:3], i), aten.copy_(x, y), v * 1)[-1], True),
        (lambda x, v, i: (y := _added(x, v, i), aten.copy_(x, y * 2), y * 3)[-1], False),
    ],
)
def test_a_scatter_into_an_input_leaves_the_old_content_to_its_readers(function, directly):
    def call(x, v, i):
        return (function(x, v, i),)

    inputs = [torch.randn(7, 4), torch.randn(3, 4), PLACES]
    traced = make_fx(call, tracing_mode="fake")(*inputs)
    made = lower(traced, "graph")
    expected_inputs = [each.clone() for each in inputs]
    expected = call(*expected_inputs)
    assert ("x_1" in {made.root(name) for op in made.ops if scatters(op.body) for name in op.before}) == directly
    for ops in (made.ops, fuse_ops(made)[0]):
        given = [each.clone() for each in inputs]
        torch.testing.assert_close(tuple(run_ops(ops, made, given)), expected)
        torch.testing.assert_close(given, expected_inputs)


def test_running_statistics_are_updated_by_the_kernel_that_computes_them():
    def step(x, mean):
        mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x * 2

    assert kernels(step, torch.randn(64, 8), torch.randn(8))[1] == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.copy_(x.flip(0) * 2),
        lambda x: x.copy_(x.t() + 1),
        lambda x: x.copy_(x.t().clone()),
        lambda x: x.sub_(x.sum(0)),
        lambda x: x.sub_(x.sum(1, keepdim=True)).div_(x.std()),
        lambda x: x.softmax(0) + x.add_(x.roll(1, 0)),
        lambda x: (x[0].clone(), x.cumsum(0), x.mul_(x[0].clone())),
        lambda x: x[1:].add_(x[:-1].clone()),
        lambda x: x.t().mul_(x.clone()),
        lambda x: x.index_add_(0, torch.tensor([1, 1]), x[:2] * 2) * x,
        lambda x: x[torch.tensor([2, 0])].add_(x.index_fill_(0, torch.tensor([0]), 1.0)[:2]),
    ],
)
def test_changes_in_place_read_what_eager_reads(function):
    def call(x):
        return function(x), x * 2

    same(call, torch.randn(4, 4))
    same(call, torch.randn(40, 40))


def test_an_input_with_the_negative_bit_is_updated_as_in_eager():
    def call(x):
        x.add_(1)
        return x * 2

    base = torch.randn(4, dtype=torch.complex64)
    values = [torch._neg_view(base.real.clone()) for _ in range(2)]
    assert values[0].is_neg()
    expected = call(values[0])
    torch.testing.assert_close(compiled(call)(values[1]), expected)
    torch.testing.assert_close(values[1], values[0])
