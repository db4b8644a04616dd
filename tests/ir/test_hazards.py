"""When a kernel may store over what it reads: only at the same place, and only what nobody looks at afterwards."""

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
    """Every item of every row."""
    return Store(buffer, WIDTH * p0 + r0, value, f32)


def row(buffer: str, value: Value) -> Store:
    """Once a row, after its passes."""
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
    ids=["elsewhere", "atomically", "some", "anywhere", "in less memory"],
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
    ids=["some", "anywhere", "turned round", "other numbers"],
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
    ids=["in the last pass", "beside an earlier one", "before the last pass", "while others sum it"],
)
def test_items_are_overwritten_by_the_last_pass_only(made: Body, may: bool):
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
        "alone", "once a row too", "items of something else", "items computed of it", "items that are it",
        "items scattered", "a sum of it", "a sum of a sum of it",
    ],
)  # fmt: skip
def test_what_a_row_has_once_is_overwritten_unless_its_items_or_sums_look_at_it(others: tuple[Store, ...], may: bool):
    made = body(row("new", MOVED), *others)
    assert overwrites_in_place(made, made.stores[0], {"m"}) == may


def test_a_kernel_scatters_where_its_iterations_go_by_where_they_write():
    plain = items("new", X)
    assert not scatters(body(plain))
    for change in ({"mode": "add"}, {"mask": SOME}, {"indirect": ((i0, PLACE),)}):
        assert scatters(body(plain, replace(plain, buffer="other", **change)))
