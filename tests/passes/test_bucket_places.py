from dataclasses import replace

import pytest

from tests.graphs import order_of
from tests.passes.buckets import BACKWARD, FLOOR, LAYER, bucketed


def test_a_gather_of_a_computed_input_begins_its_own_bucket():
    moved, reasons = bucketed(LAYER.replace("d = kernel(q) : 0B 1us", "d = kernel(y) : 0B 500us"))
    assert "b" in order_of(moved)
    assert reasons["b"] == "data dependence on d"


@pytest.mark.parametrize(
    ("casts", "joins"),
    [
        ("c = kernel(q) : 0B 20us; d = view(c); e = view(c)", True),  # the kernel that both views need counts once
        ("f = kernel(q) : 0B 20us; c = kernel(f) : 0B 10us; d = view(c); e = view(c)", False),
    ],
)
def test_compute_of_up_to_a_quarter_of_a_gathers_time_may_move_with_it(casts, joins):
    text = f"""
        a = all_gather(p) @dp unit=m : 8B 100us; k = kernel(x) : 0B 900us
        {casts}; b, bb = all_gather(d, e) @dp unit=m : 8B, 8B 100us; u = wait(a); v = wait(b); w = wait(bb)
        y = kernel(u, v, w, k) : 0B 500us
    """
    assert [node.name for node in bucketed(text)[0].starts()] == (["a+1"] if joins else ["a", "b"])


def test_a_gathers_time_beside_compute_counts():
    """The cast of a shard takes over a third of its gather by copies on two H100s, alone."""
    text = """
        a = all_gather(p) @dp unit=m : 8B 100us; k = kernel(x) : 0B 900us
        c = kernel(q) : 0B 35us; b = all_gather(c) @dp unit=m : 8B 100us; u = wait(a); v = wait(b)
        y = kernel(u, v, k) : 0B 500us
    """
    slowed = replace(FLOOR, collective_slowdown=1.44)
    assert [node.name for node in bucketed(text, profile=slowed)[0].starts()] == ["a+1"]
    assert [node.name for node in bucketed(text, overlap_margin=1.5)[0].starts()] == ["a+1"]
    assert [node.name for node in bucketed(text)[0].starts()] == ["a", "b"]


def test_compute_that_already_moved_costs_the_next_member_nothing():
    text = """
        a = all_gather(p) @dp unit=m : 8B 100us; k = kernel(x) : 0B 900us
        c = kernel(q) : 0B 20us; b = all_gather(c) @dp unit=m : 8B 100us
        d = kernel(c) : 0B 20us; e = all_gather(d) @dp unit=m : 8B 100us; u = wait(a); v = wait(b); w = wait(e)
        y = kernel(u, v, w, k) : 0B 500us
    """
    assert order_of(bucketed(text)[0])[:3] == ["c", "d", "a+2"]


@pytest.mark.parametrize(
    ("made", "joins"),
    [
        ("c = kernel(q) : 0B 500us; {}", True),  # already before the bucket
        ("{} t = all_gather(q) @tp : 8B 1us; c = wait(t)", False),
        ("{} c = comm:swap(q) @tp safe=yes : 8B", False),
    ],
    ids=["before", "gathered", "swapped"],
)
def test_only_compute_that_is_not_before_the_bucket_moves_with_it(made, joins):
    text = f"""
        {made.format("a = all_gather(p) @dp unit=m : 8B 100us; k = kernel(x) : 0B 900us;")}
        b = all_gather(c) @dp unit=m : 8B 100us; u = wait(a); v = wait(b); y = kernel(u, v, k) : 0B 500us
    """
    assert ("a+1" in order_of(bucketed(text)[0])) == joins


def test_a_reduction_that_needs_another_is_not_merged_with_it():
    moved, reasons = bucketed("""
        g = kernel(x) : 4B 5us; r = reduce_scatter(g) @dp(2) unit=m : 2B 30us; s = wait(r)
        h = kernel(s) : 4B 5us; t = reduce_scatter(h) @dp(2) unit=m : 2B 30us; w = wait(t); last = kernel(x) : 0B 900us
    """)
    assert {"r", "t"} <= set(order_of(moved))
    assert reasons["t"] == "data dependence on r"


def test_a_barrier_keeps_both_sides_apart():
    moved, _ = bucketed(LAYER.replace("d = kernel(q)", "k = comm:send(x) @pp; d = kernel(q)"))
    assert {"a", "b"} <= set(order_of(moved))


def test_collectives_pass_others_of_their_group_only_with_reorder_collectives():
    assert [node.name for node in bucketed(BACKWARD)[0].starts()] == ["a+1", "r+1"]
    moved, _ = bucketed(BACKWARD, reorder_collectives=False)
    assert [node.name for node in moved.starts()] == ["a", "r", "b", "t"]


SIDE_BY_SIDE = """
    warm = kernel(x) : 0B 900us; a = {0}(p) @dp unit=m : 8B 30us; other = all_reduce(q) @{1} : 0B 5us
    b = {0}(p) @dp unit=m : 8B 30us; last = kernel(warm) : 0B 900us; u = wait(a); v = wait(b); w = wait(other)
"""


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_without_reorder_collectives_other_groups_do_not_prevent_a_bucket(collective):
    other_group, same_group = SIDE_BY_SIDE.format(collective, "tp"), SIDE_BY_SIDE.format(collective, "dp")
    assert "a+1" in order_of(bucketed(other_group, reorder_collectives=False)[0])
    assert "a" in order_of(bucketed(same_group, reorder_collectives=False)[0])
    assert "a+1" in order_of(bucketed(same_group)[0])


def test_without_reorder_collectives_no_start_moves_behind_another_reduction():
    """Moving `r` later would also move `c`, which reduces its result, past `q` on the queue of `c` and `q`."""
    text = """
        g = kernel(x) : 4B 5us; r = reduce_scatter(g) @dp unit=m : 2B 30us; s = wait(r)
        c = all_reduce(s) @replicate : 2B 30us; q = all_reduce(p) @replicate : 2B 30us
        h = kernel(x) : 4B 5us; t = reduce_scatter(h) @dp unit=m : 2B 30us
        w = wait(t); u = wait(c); v = wait(q); last = kernel(x) : 0B 900us; return u, v, w
    """
    moved, _ = bucketed(text)
    assert [node.name for node in moved.starts()] == ["q", "r+1", "c"]
    kept, _ = bucketed(text, reorder_collectives=False)
    assert [node.name for node in kept.starts()] == ["r", "c", "q", "t"]
