"""What each rule of `polish` is there for, as the order that comes out: without it another one does."""

import pytest

from overlapc.passes.base import Context
from overlapc.passes.polish import polish
from tests.graphs import check_order
from tests.passes.contexts import BEHIND, FREE, KEPT, LATE, SLOW

ORDERS: dict[str, tuple[Context, str, str]] = {
    "starts are moved for their own collective only": (
        FREE,
        "a = reduce_scatter(x) @tp : 0B 50us; b = wait(a); c = reduce_scatter(x) @dp : 0B 50us",
        "a b c",
    ),
    "waits go past so many compute nodes, not past anything": (
        FREE,
        "a = reduce_scatter(x) @tp : 0B 50us; b = wait(a); c = reduce_scatter(x) @dp : 0B 50us; d = wait(c)",
        "a b c d",
    ),
    "collectives do not come along": (
        FREE,
        """
        b = kernel(x) : 0B 50us; d = reduce_scatter(x) @dp : 0B 50us; e = reduce_scatter(x) @dp : 0B 50us
        f = reduce_scatter(b) @dp : 0B 5us; w0 = wait(d)
        """,
        "d b e f w0",
    ),
    "what helps late collectives may not make the step longer": (
        SLOW,
        """
        a = kernel(x) : 0B 20us; b = reduce_scatter(x) @tp : 0B 20us; c = kernel(x) : 0B 5us; d = kernel(c) : 0B 5us
        e = kernel(c) : 0B 5us; w0 = wait(b)
        """,
        "a b c d e w0",
    ),
    "nor may what hides more": (
        SLOW,
        """
        a = kernel(x) : 0B 5us; b = reduce_scatter(a) @dp : 0B 50us; c = reduce_scatter(x) @dp : 0B 5us
        d = kernel(a) : 0B 50us; e = kernel(x) : 0B 5us; w0 = wait(b); w1 = wait(c)
        """,
        "a b d c e w0 w1",
    ),
    "a hidden collective begins later, beside less of the compute that it slows": (
        SLOW,
        "a = reduce_scatter(x) @dp : 0B 5us; b = kernel(x) : 0B 5us; c = kernel(b) : 0B 5us; w0 = wait(a)",
        "b a c w0",
    ),
    "or earlier": (
        SLOW,
        """
        a = kernel(x) : 0B 5us; b = kernel(a) : 0B 5us; c = reduce_scatter(a) @dp : 0B 20us; d = kernel(a) : 0B 5us
        e = kernel(x) : 0B 20us; w0 = wait(c)
        """,
        "a c b d e w0",
    ),
    "of steps about as short the one that hides more": (
        SLOW,
        """
        a = reduce_scatter(x) @dp : 0B 20us; b = wait(a); c = kernel(x) : 0B 5us; d = kernel(x) : 0B 20us
        e = kernel(x) : 0B 100us
        """,
        "c a d e b",
    ),
    "three before an exposed one on its queue are moved too": (
        SLOW,
        """
        b = reduce_scatter(x) @dp : 0B 100us; c = kernel(x) : 0B 50us; d = reduce_scatter(x) @dp : 0B 50us
        f = wait(d); i = reduce_scatter(x) @dp : 0B 50us; k = reduce_scatter(x) @dp : 0B 100us
        w1 = wait(k)
        """,
        "d i k b c f w1",
    ),
    "what waits for itself is not one of them": (
        BEHIND,
        """
        a = reduce_scatter(x) @dp : 0B 20us; b = reduce_scatter(x) @tp : 0B 50us; f = wait(b)
        g = reduce_scatter(x) @dp : 0B 50us; j = reduce_scatter(x) @dp : 0B 50us
        l = comm:swap(f) @dp : 0B 50us; m = reduce_scatter(x) @dp : 0B 50us; w2 = wait(m)
        """,
        "g a b f j l m w2",
    ),
    "compute that takes no time is not moved by itself": (
        SLOW,
        "a = reduce_scatter(x) @dp : 0B 50us; c = wait(a); l = kernel(x) : 0B",
        "a c l",
    ),
    "what a node needs is moved or keeps it, views of views too": (
        FREE,
        "a = reduce_scatter(x) @dp : 0B 50us; b = wait(a); c = view(b); e = kernel(c) : 0B 50us",
        "a b c e",
    ),
    "without leave collectives of a group keep their order": (
        KEPT,
        """
        a = kernel(x) : 0B 50us; b = reduce_scatter(x) @dp : 0B 50us; c = reduce_scatter(x) @dp : 0B 50us
        d = wait(c); f = kernel(a) : 0B 50us
        """,
        "b c a f d",
    ),
    "just a quarter of a node's time may come along": (
        BEHIND,
        """
        a = kernel(x) : 0B 20us; b = kernel(a) mutates=a : =a 5us; c = reduce_scatter(x) @dp : 0B
        d = wait(c); f = reduce_scatter(x) @dp : 0B 50us; g = wait(f)
        """,
        "c d f a b g",
    ),
    "those before it on the queue go one past the other": (
        LATE,
        """
        a = kernel(x) : 0B 50us; d = reduce_scatter(x) @dp : 0B 50us; e = reduce_scatter(x) @dp : 0B 20us
        f, fb = reduce_scatter(a) @dp : 0B, 8B 50us; w2 = wait(f)
        """,
        "d e a f w2",
    ),
}


@pytest.mark.parametrize("rule", ORDERS)
def test_every_rule_makes_a_difference(rule):
    ctx, before, after = ORDERS[rule]
    check_order(polish, before, after, ctx)
