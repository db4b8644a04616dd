"""For each rule of `fill_collectives`, a schedule whose resulting order would differ without that rule."""

import pytest

from overlapc.estimators.device import DeviceProfile
from overlapc.passes.base import Context
from overlapc.passes.fill_collectives import fill_collectives
from tests.graphs import check_order

SOME, ROOMY, TIGHT = Context(), Context(peak_increase=100.0), Context(peak_increase=0.0)
LATE = Context(peak_increase=100.0, overlap_margin=1.5)
BEHIND = Context(peak_increase=100.0, profile=DeviceProfile("held", collectives_wait_for_kernels=True))
# Rule -> (context, schedule, resulting order).
ORDERS: dict[str, tuple[Context, str, str]] = {
    "the wait for a finished collective costs nothing and comes at once": (
        BEHIND,
        """
        a = reduce_scatter(x) @tp : 0B 50us; b = wait(a); d, db = reduce_scatter(x) @dp : 0B, 0B 50us
        g = comm:swap(x) @dp : 0B; h = kernel(g) : 0B 50us; w0 = wait(db)
        """,
        "a d b g w0 h",
    ),
    "collectives are not compute that fills time": (
        BEHIND,
        """
        a = reduce_scatter(x) @tp : 0B 50us; b = wait(a); c = reduce_scatter(x) @dp : 0B 50us
        d = reduce_scatter(b) @tp : 0B 50us; g = reduce_scatter(x) @dp : 0B 50us
        """,
        "a c g b d",
    ),
    "nodes that lead to a collective sooner than the wait come first": (
        BEHIND,
        """
        a = reduce_scatter(x) @dp : 0B 50us; b = wait(a); d = comm:swap(x) @tp safe=yes : 0B
        f = kernel(x) : 0B 50us
        """,
        "a d f b",
    ),
    "views alone fill nothing": (
        BEHIND,
        "b = reduce_scatter(x) @dp : 0B 50us; c = view(x); d = wait(b)",
        "b c d",
    ),
    "where a collective already runs the kernel that is needed soonest comes first": (
        BEHIND,
        """
        a = kernel(x) : 0B 50us; b = kernel(x) : 0B 100us; c = kernel(x) : 0B 50us
        d = reduce_scatter(x) @dp : 0B 50us; w0 = wait(d)
        """,
        "d a b w0 c",
    ),
    "the first node may be the shortest": (
        BEHIND,
        """
        a = kernel(x) : 0B 50us; b = kernel(a) mutates=a : =a 50us; c = reduce_scatter(x) @dp : 0B
        d = wait(c); e = kernel(d) : 0B 50us; f = reduce_scatter(e) @dp : 0B 50us
        """,
        "a b c d e f",
    ),
    "memory is freed after its last use": (
        SOME,
        """
        a = reduce_scatter(x) @dp : 8B; b = wait(a); c = kernel(b) : 0B 50us
        f = kernel(x) mutates=x : =x 50us; h = reduce_scatter(f) @dp : 8B 50us; i = wait(h)
        k = kernel(c) : 0B 50us
        """,
        "a b f c h k i",
    ),
    "freed memory is available to other nodes": (
        TIGHT,
        """
        a = kernel(x) : 1B 50us; d = comm:swap(x) @dp : 4B 50us; e = kernel(x) : 0B 50us
        f = reduce_scatter(x) @dp : 8B 50us; g = view(a)
        """,
        "d f a e g",
    ),
    "an order of the same cost is not changed": (
        ROOMY,
        "a = reduce_scatter(x) @dp : 0B 50us; b = wait(a); d = view(x)",
        "a b d",
    ),
    "a node that ran does not run again": (
        BEHIND,
        """
        b = reduce_scatter(x) @dp : 0B 5us; c = kernel(p) mutates=p : =p 50us; d = wait(b)
        f = reduce_scatter(d) @dp : 0B 50us; g = kernel(x) : 0B 20us
        """,
        "b g c d f",
    ),
    "the shortest kernel that takes time comes first": (
        BEHIND,
        """
        a = reduce_scatter(x) @dp : 0B 50us; b = view(x); c = kernel(x) : 0B 50us; d = kernel(x) : 0B 5us
        e = wait(a)
        """,
        "a d b c e",
    ),
    "a node that needs memory does not make room for itself": (
        TIGHT,
        "b = kernel(x) : 8B 50us; f = kernel(b) : 0B 50us; h = reduce_scatter(x) @dp : 8B 50us",
        "b f h",
    ),
    "a node that ran does not make room": (
        TIGHT,
        """
        b = reduce_scatter(x) @dp : 0B 50us; c = kernel(x) : 8B 20us; d = wait(b); e = kernel(c) : 0B 50us
        i = kernel(c) mutates=c : =c 50us; l = reduce_scatter(x) @dp : 8B 50us
        """,
        "b c d e i l",
    ),
    "only the last use frees memory": (
        TIGHT,
        """
        a = kernel(p) : 4B 50us; b = kernel(p) mutates=p : =p 50us; c = kernel(a) : 0B 50us
        d = kernel(a) : 0B 50us; g = reduce_scatter(b) @dp : 0B 50us; j = reduce_scatter(x) @dp : 8B 50us
        """,
        "a b c d g j",
    ),
    "the order is also judged with late collectives": (
        LATE,
        """
        a = kernel(x) : 0B 50us; b = kernel(a) : 0B 50us; c = reduce_scatter(x) @dp : 0B 50us
        w0 = wait(c)
        """,
        "c a b w0",
    ),
}


@pytest.mark.parametrize("rule", ORDERS)
def test_every_rule_makes_a_difference(rule):
    ctx, before, after = ORDERS[rule]
    check_order(fill_collectives, before, after, ctx)
