"""A kernel may overwrite a buffer that it reads only at the same index, and only elements that it reads no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from overlapc.ir.body import Body, Load, Store, Value, op
from overlapc.ir.hazards import overwrites_in_place, scatters
from tests.codegen.terms import f32, i0, i64, loop, number, p0, r0, total

WIDTH = 8
X = Load("x", WIDTH * p0 + r0, f32)
OF_ROW = Load("m", p0, f32)


def items(buffer: str, value: Value) -> Store:
    """Return a store of every element of every row."""
    return Store(buffer, WIDTH * p0 + r0, value, f32)


def row(buffer: str, value: Value) -> Store:
    """Return a store of one value per row, after the passes over the row."""
    return Store(buffer, p0, value, f32)


def body(*stores: Store) -> Body:
    return Body((loop(p0, 4),), (loop(r0, WIDTH),), stores)


CENTRED = op("sub", X, total(X))
SCALED = op("mul", CENTRED, total(op("mul", CENTRED, CENTRED)))
MOVED = op("add", op("mul", OF_ROW, number(0.9)), total(X))
COUNTED = Store("h", i0, OF_ROW, f32, "add", indirect=((i0, Load("at", r0, i64)),))


PLACE = Load("at", WIDTH * p0 + r0, i64)
SOME = op("gt", X, number(0.0))


@pytest.mark.parametrize(
    "change",
    [
        {"index": WIDTH * p0 + r0 + 1},
        {"mode": "add"},
        {"mask": SOME},
        {"index": i0, "indirect": ((i0, PLACE),)},
        {"memory_dtype": torch.bfloat16},
    ],
    ids=["another index", "atomic", "masked", "indirect", "narrower dtype"],
)
def test_only_plain_stores_overwrite_what_is_read(change: dict[str, Any]):
    store = replace(items("new", op("neg", X)), **change)
    assert not overwrites_in_place(body(store), store, {"x"})
    assert overwrites_in_place(body(store), store, {"not read"})


@pytest.mark.parametrize(
    "load",
    [
        Load("y", WIDTH * p0 + r0, f32, mask=SOME),
        Load("y", i0, f32, indirect=((i0, PLACE),)),
        Load("y", WIDTH * r0 + p0, f32),
        Load("y", WIDTH * p0 + r0, torch.float64),
    ],
    ids=["masked", "indirect", "transposed", "another dtype"],
)
def test_only_plain_loads_are_overwritten(load: Load):
    store = items("new", op("add", X, load))
    assert overwrites_in_place(body(store), store, {"x"})
    assert not overwrites_in_place(body(store), store, {"x", "y"})


@pytest.mark.parametrize(
    ("made", "may"),
    [
        (body(items("new", SCALED)), True),
        (body(items("new", SCALED), items("c", CENTRED)), True),
        (body(items("new", CENTRED), items("c", SCALED)), False),
        (body(items("new", op("add", X, number(1.0))), row("s", total(X))), False),
    ],
    ids=["in the last pass", "with a store in an earlier pass", "before the last pass", "while a sum reads it"],
)
def test_elements_are_overwritten_only_in_the_last_pass(made: Body, may: bool):
    assert overwrites_in_place(made, made.stores[0], {"x"}) == may


@pytest.mark.parametrize(
    ("others", "may"),
    [
        ((), True),
        ((row("s", op("neg", OF_ROW)),), True),
        ((items("y", X),), True),
        ((items("y", op("sub", X, OF_ROW)),), False),
        ((items("y", OF_ROW),), False),
        ((COUNTED,), False),
        ((row("s", total(op("mul", X, OF_ROW))),), False),
        ((row("s", total(op("mul", X, total(op("mul", X, op("neg", OF_ROW)))))),), False),
    ],
    ids=[
        "no other store", "per row", "elements without it", "elements computed from it", "elements equal to it",
        "elements scattered", "a sum of it", "a sum of a sum of it",
    ],
)  # fmt: skip
def test_a_value_per_row_is_overwritten_unless_elements_or_sums_read_it(others: tuple[Store, ...], may: bool):
    made = body(row("new", MOVED), *others)
    assert overwrites_in_place(made, made.stores[0], {"m"}) == may


def test_atomic_masked_and_indirect_stores_make_a_kernel_scatter():
    plain = items("new", X)
    assert not scatters(body(plain))
    for change in ({"mode": "add"}, {"mask": SOME}, {"indirect": ((i0, PLACE),)}):
        assert scatters(body(plain, replace(plain, buffer="other", **change)))
