"""Structures of arguments and results."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import sympy
import torch
from torch.utils import _pytree as pytree

from overlapc.ir.ops import Handle, Layout, View, tree_leaves

Pair = namedtuple("Pair", "first second")


def test_leaves_are_those_of_torchs_pytrees_in_their_order():
    layout = Layout(torch.device("cpu"), torch.float32, (sympy.Integer(2),), (sympy.Integer(1),))
    view, handle = View("x", layout), Handle("seed")
    for tree in (
        view,
        None,
        3,
        (),
        {"b": view, "a": [handle, None, 2.5, True, "sum"]},
        Pair(view, (handle, 1)),
        OrderedDict(b=1, a=view),
        [torch.Size([2, 3]), slice(1, 2), torch.float32, sympy.Symbol("s0"), torch.device("cpu")],
        ((view, {"x": ()}), [[]], handle),
    ):
        assert tree_leaves(tree) == pytree.tree_leaves(tree)
