"""For each rule of `plan_overlap`, a schedule whose resulting order would differ without that rule."""

import pytest

from overlapc.passes.base import Context
from overlapc.passes.plan_overlap import plan_overlap
from tests.graphs import check_order
from tests.passes.contexts import BEHIND, FREE, LATE, SLOW, TIGHT

ORDERS: dict[str, tuple[Context, str, str]] = {
    "a plan that exceeds memory is made again with a smaller limit": (
        TIGHT,
        """
        a = kernel(x) : 8B; b = view(x); c = kernel(a) : 8B 50us; d = view(a)
        e = reduce_scatter(b) @dp : 8B 50us; f = reduce_scatter(d) @dp : 0B 50us
        """,
        "a c b d e f",
    ),
    "a collective begins when the one that was put before it ends": (
        SLOW,
        """
        a = kernel(x) : 0B 50us; b = reduce_scatter(a) @dp : 0B 5us; c = kernel(x) mutates=x : =x 50us
        d = wait(b); e = reduce_scatter(a) @dp : 0B 100us; f = reduce_scatter(d) @dp : 0B 50us
        g = kernel(x) : 0B 50us
        """,
        "a e b c g d f",
    ),
    "views sink with their wait": (
        FREE,
        "a = reduce_scatter(x) @dp : 0B 50us; b = wait(a); c = view(b); d = view(x)",
        "d a b c",
    ),
    "a collective that was waited for is not a candidate to wait for": (
        TIGHT,
        """
        a = reduce_scatter(x) @dp : 0B 50us; b = reduce_scatter(x) @dp : 8B 50us
        c = reduce_scatter(x) @dp : 0B 100us; d = wait(c); e = kernel(d) : 8B 20us
        g = kernel(d) : 0B 50us; i = wait(a); l = kernel(x) : 1B
        """,
        "c d a b g i e l",
    ),
    "a collective that has not started is not hidden": (
        FREE,
        "a = reduce_scatter(x) @dp : 1B 50us; b = wait(a); f = kernel(x) : 1B 50us",
        "a f b",
    ),
    "every group has its own queue": (
        FREE,
        "b = kernel(x) : 0B 50us; c = reduce_scatter(x) @tp : 0B 50us; d = reduce_scatter(x) @dp : 0B 50us",
        "d c b",
    ),
    "a start without constraints does not stay in its old position": (
        FREE,
        "a = reduce_scatter(x) @dp : 0B 50us; d = view(x)",
        "d a",
    ),
    "waits make room": (
        TIGHT,
        "a = reduce_scatter(x) @dp : 1B 50us; b = wait(a); c = view(x); f = kernel(c) : 1B 50us",
        "c a b f",
    ),
    "a collective without a reader starts at the end": (
        FREE,
        "c = reduce_scatter(x) @dp : 0B 50us",
        "c",
    ),
    "a queue is free when its last collective ends": (
        LATE,
        """
        a = reduce_scatter(x) @dp : 0B 50us; b = reduce_scatter(x) @dp : 0B 50us; c = kernel(x) : 0B 50us
        d = reduce_scatter(c) @dp : 0B 20us; e = reduce_scatter(x) @dp : 0B 20us; h = kernel(x) : 0B 100us
        """,
        "a b c e d h",
    ),
    "waits before their start in the plan learn when it ends": (
        BEHIND,
        """
        a = reduce_scatter(x) @dp : 0B 50us; b = wait(a); c = kernel(x) : 0B 50us
        d = reduce_scatter(b) @dp : 0B 50us; f = kernel(x) : 0B 50us; g = view(c)
        """,
        "a c f b d g",
    ),
    "a wait that was placed is not placed again for memory": (
        TIGHT,
        """
        a = reduce_scatter(x) @dp : 0B 100us; b = reduce_scatter(x) @dp : 8B 50us
        c = reduce_scatter(x) @dp : 1B 100us; d = wait(c); e = kernel(d) : 8B 20us; g = kernel(d) : 0B 5us
        h = kernel(g) : 0B 50us; i = wait(a); k = kernel(d) : 8B 50us; l = kernel(k) : 1B
        m = kernel(x) : 0B 50us
        """,
        "c d g a h k i e l b m",
    ),
    "a wait that has no start yet frees nothing": (
        TIGHT,
        """
        a = kernel(x) : 1B 50us; d = reduce_scatter(a) @dp : 0B 50us; e = wait(d)
        f = reduce_scatter(x) @dp : 0B; g = kernel(x) : 8B 50us
        """,
        "a f d e g",
    ),
    "a start after blocking communication is not free to move": (
        FREE,
        "a = comm:swap(x) @dp : 0B 50us; b = kernel(a) : 0B 50us; d = reduce_scatter(x) @dp : 0B 50us",
        "a b d",
    ),
    "only starts are free to move": (
        FREE,
        "a = comm:swap(x) @dp : 0B 50us; b = view(x)",
        "a b",
    ),
    "a collective of unknown length is never known to be hidden": (
        FREE,
        """
        c = kernel(x) : 0B 50us; d, db = reduce_scatter(x) @dp : 0B, 0B; g = wait(d)
        h, hb = reduce_scatter(g) @dp : 0B, 1B 50us; i = kernel(x) : 0B 50us
        """,
        "c d g h i",
    ),
    "a wait whose collective has just ended is hidden": (
        FREE,
        "b = kernel(x) : 0B 5us; c = reduce_scatter(x) @dp : 1B 5us; d = wait(c); f = kernel(x) : 4B",
        "c b d f",
    ),
    "of several waits the oldest finished one is placed": (
        FREE,
        """
        c, cb = reduce_scatter(x) @dp : 8B, 4B; g = reduce_scatter(x) @dp : 0B 50us; h = wait(cb)
        i = kernel(x) : 0B 50us; j = wait(c); k = wait(g); l = kernel(h) : 4B 50us
        """,
        "g c i h k l j",
    ),
}


@pytest.mark.parametrize("rule", ORDERS)
def test_every_rule_makes_a_difference(rule):
    ctx, before, after = ORDERS[rule]
    check_order(plan_overlap, before, after, ctx)
