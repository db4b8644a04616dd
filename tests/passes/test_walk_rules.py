"""For each rule of `walk.py`, a schedule whose resulting order would differ without that rule."""

import pytest

from overlapc.passes.base import Context
from overlapc.passes.raise_under_memory import raise_under_memory
from overlapc.passes.sink_under_memory import sink_under_memory
from tests.graphs import check_order
from tests.passes.contexts import BEHIND, FREE, KEPT, LATE, TIGHT

# Rule -> (context, schedule, order after raise_under_memory, order after sink_under_memory).
ORDERS: dict[str, tuple[Context, str, str, str]] = {
    "a start cannot begin before what it needs, unless that is cheap": (
        FREE,
        """
        a = reduce_scatter(x) @dp : 0B 50us; b = wait(a); d, db = reduce_scatter(x) @dp : 0B, 0B 50us
        e = wait(db); f = reduce_scatter(b) @tp : 0B 50us; g = kernel(x) : 0B 50us; w0 = wait(f)
        """,
        "a b d e f g w0",
        "a b d f g e w0",
    ),
    "views sink with a wait, but not what needs them": (
        FREE,
        """
        d = reduce_scatter(x) @dp : 0B 50us; e = wait(d); f = view(e); g = reduce_scatter(x) @tp : 0B 50us
        i = reduce_scatter(f) @dp : 0B 50us; k = wait(i); l = kernel(x) : 0B 50us
        """,
        "d e f g i k l",
        "d e f g i l k",
    ),
    "a node that takes no time moves with others that take none": (
        TIGHT,
        """
        a = kernel(x) : 0B 50us; b = kernel(a) : 0B 50us; c = view(a); d = reduce_scatter(x) @dp : 0B 50us
        i = reduce_scatter(a) @dp after=c : 0B
        """,
        "d a c i b",
        "a b c d i",
    ),
    "a start that moves work with it passes no start of its group": (
        BEHIND,
        """
        b = kernel(x) : 0B 5us; c = reduce_scatter(x) @dp : 0B 50us
        e, eb = reduce_scatter(b) @dp : 0B, 0B 50us; f = kernel(x) : 0B 50us
        i = reduce_scatter(x) @tp : 0B; j = wait(e); k = kernel(x) : 0B 50us
        """,
        "c i b e f j k",
        "b c e f i k j",
    ),
    "a collective is due for the first reader of its result": (
        FREE,
        """
        a = reduce_scatter(x) @dp : 0B 50us; c = reduce_scatter(x) @dp : 0B 50us; d = wait(c); e = wait(a)
        f = view(e); g = reduce_scatter(e) @dp : 0B 50us; j = kernel(x) : 0B 50us; k = kernel(f) : 0B 50us
        """,
        "a c d e f g j k",
        "a c e f g j d k",
    ),
    "work of just a quarter of a collective's time may move with it": (
        FREE,
        "b = reduce_scatter(x) @dp : 0B 20us; c = wait(b); d = kernel(c) : 0B 5us; e = kernel(x) : 0B 50us",
        "b c d e",
        "b e c d",
    ),
    "cheap work alone sinks with a wait that another start should pass": (
        BEHIND,
        """
        a = reduce_scatter(x) @dp : 0B 50us; b = wait(a); d = reduce_scatter(x) @dp : 0B 50us; f = wait(d)
        g = kernel(b) : 0B 50us
        """,
        "a b d f g",
        "a b d g f",
    ),
    "only a collective that loses the work that hides it is exposed": (
        LATE,
        """
        b = reduce_scatter(x) @dp : 0B 100us; c = wait(b); e = reduce_scatter(x) @tp : 0B 50us
        g = kernel(x) : 0B 100us; h = kernel(c) mutates=c : =c 20us; w0 = wait(e)
        """,
        "b c e g h w0",
        "b e g w0 c h",
    ),
    "in the mirrored schedule nodes keep their positions": (
        FREE,
        """
        a = reduce_scatter(x) @dp : 0B 50us; b = wait(a); c = reduce_scatter(x) @dp : 0B; e = wait(c)
        f = kernel(x) : 0B 50us
        """,
        "c a b e f",
        "a c f b e",
    ),
    "a collective does not move with another one": (
        FREE,
        """
        a, ab = reduce_scatter(x) @tp : 0B, 0B 50us; b = wait(ab); c = wait(a)
        d = reduce_scatter(b) @dp : 0B 50us
        """,
        "a b d c",
        "a b d c",
    ),
    "a start passes those of other groups": (
        KEPT,
        """
        a = reduce_scatter(x) @tp : 0B 50us; b = wait(a); c = reduce_scatter(x) @dp : 0B 20us
        d = reduce_scatter(b) @tp : 0B 50us; g = reduce_scatter(x) @dp : 0B 50us
        """,
        "a c g b d",
        "a b c d g",
    ),
    "in the mirrored schedule a start hides nothing": (
        FREE,
        """
        a = reduce_scatter(x) @dp : 0B 50us; b = wait(a); c = kernel(b) : 0B 5us
        f = reduce_scatter(x) @dp : 0B 50us
        """,
        "a b f c",
        "a f b c",
    ),
    "a collective that waits in its queue needs the work that hides it later": (
        BEHIND,
        """
        e = reduce_scatter(x) @dp : 0B 5us; f = kernel(x) : 0B 50us; g = reduce_scatter(x) @dp : 0B 5us
        h = kernel(x) : 0B 5us; i = reduce_scatter(h) @tp : 0B 50us; j = kernel(x) : 0B 5us
        """,
        "e g h i f j",
        "e f g h i j",
    ),
    "a collective that is just hidden is not exposed": (
        FREE,
        """
        g = reduce_scatter(x) @dp : 0B 5us; h = kernel(x) : 0B 5us; i = reduce_scatter(h) @tp : 0B 50us
        j = kernel(x) : 0B 5us
        """,
        "h i g j",
        "g h i j",
    ),
}


@pytest.mark.parametrize("rule", ORDERS)
def test_every_rule_makes_a_difference(rule):
    ctx, before, raised, sunk = ORDERS[rule]
    check_order(raise_under_memory, before, raised, ctx)
    check_order(sink_under_memory, before, sunk, ctx)
