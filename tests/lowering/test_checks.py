"""Generated code raises an error for an index out of bounds instead of reading other memory, and evaluates asserts."""

from __future__ import annotations

import re

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.codegen.cpp import CppGenerator
from overlapc.fusion import fuse_ops
from overlapc.ir.body import Body, Checked, Constant, Index, Load, Loop, Store, op
from overlapc.ir.indexing import loop_symbol
from overlapc.ir.ops import Layout, Loops, LoweredGraph, View
from overlapc.lowering import lower
from tests.lowering.against_eager import compiled, same

TABLE = torch.randn(5, 3)


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (lambda x, i: F.embedding(i, x), [1, 4], [1, 5]),
        (lambda x, i: F.embedding(i, x), [0, 0], [1, -1]),
        (lambda x, i: torch.gather(x, 0, i[None]), [1, 4], [1, 7]),
        (lambda x, i: x[i], [1, -5], [1, -6]),
        (lambda x, i: x[i] * 2 + 1, [1, 4], [5, 0]),
        (lambda x, i: x[:, i].sum(0), [2, -3], [0, 3]),
        (lambda x, i: x[i, i - 2], [2, 4], [2, 5]),
        (lambda x, i: torch.index_select(x, 0, i), [1, 4], [1, 9]),
        (lambda x, i: x[i][:1] * 2, [1, 4], [1, 9]),  # the bad element is not among those that are used
        (lambda x, i: F.cross_entropy(x[:2], i), [0, 2], [0, 3]),
        (lambda x, i: torch.scatter(x[:2], 1, i[:, None], 1.0), [0, 2], [0, 3]),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_index_out_of_bounds_is_an_error(function, good, bad, dynamic):
    call = compiled(function, dynamic)
    torch.testing.assert_close(call(TABLE, torch.tensor(good)), function(TABLE, torch.tensor(good)))
    with pytest.raises(IndexError, match=r"an index is out of bounds for dimension \d with size"):
        call(TABLE, torch.tensor(bad))
    torch.testing.assert_close(call(TABLE, torch.tensor(good)), function(TABLE, torch.tensor(good)))


@pytest.mark.parametrize("bad", [5, -1])
def test_rows_picked_by_indices_are_normalized_and_checked(bad):
    """The index is checked once per row, and row 0 is read instead of a row out of bounds."""
    call = compiled(lambda x, i: F.rms_norm(F.embedding(i, x), (3,)))
    index = torch.arange(40) % 5
    torch.testing.assert_close(call(TABLE, index), F.rms_norm(TABLE[index], (3,)))
    index[-1] = bad
    with pytest.raises(IndexError, match="an index is out of bounds for dimension 0 with size 5"):
        call(TABLE, index)


@pytest.mark.parametrize("rows", [5, 0])
def test_a_checked_element_is_read_unconditionally_unless_the_tensor_is_empty(rows):
    p, i = loop_symbol("p", 0), loop_symbol("i", 0)
    where = Load("index", p, torch.int64)
    bounds = op("ge", where, Constant(0, torch.int64)), op("lt", where, Index(sympy.Integer(rows)))
    inside = op("logical_and", *bounds)
    picked = Load("table", i, torch.float32, inside, ((i, Checked(where, inside, "out of bounds")),))
    body = Body((Loop(p, sympy.Integer(7)),), (), (Store("y", p, picked, torch.float32),))
    (line,) = (line for line in CppGenerator().generate(body, "picks").text.splitlines() if "float v" in line)
    assert ("?" in line) == (rows == 0)


def test_nothing_is_read_from_an_empty_table():
    call = compiled(lambda x, i: F.rms_norm(x[i], (3,)))
    with pytest.raises(IndexError, match="an index is out of bounds for dimension 0 with size 0"):
        call(torch.zeros(0, 3), torch.zeros(40, dtype=torch.int64))


def test_the_error_names_the_kernel_and_the_line():
    call = compiled(lambda x, i: x[i] + 1)
    with pytest.raises(IndexError, match=r"in kernel index_add_\w+: .*test_checks\.py:\d+"):
        call(TABLE, torch.tensor([9]))


MESSAGE = 'numbers must be positive,\n not \\ or "else" {} %s \\'


def asserted(x):
    torch._assert_async((x > 0).all(), MESSAGE)
    return x * 2


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_assert_is_part_of_a_kernel_and_says_its_message(dynamic):
    same(asserted, torch.rand(5, 3) + 0.1, dynamic=dynamic)
    torch._dynamo.utils.counters.clear()
    call = compiled(asserted, dynamic)
    with pytest.raises(RuntimeError, match=re.escape(MESSAGE)) as raised:
        call(-torch.ones(5, 3))
    assert re.search(r"in kernel \w+: .*_assert_async.*test_checks\.py:\d+", str(raised.value), re.DOTALL)
    assert not torch._dynamo.utils.counters["overlapc"]["fallbacks"]
    torch.testing.assert_close(call(torch.ones(5, 3)), torch.full((5, 3), 2.0))


def test_an_assert_of_one_element_checks_its_value():
    call = compiled(lambda x: (torch._assert_async(x[:1], "zero"), x + 1))
    call(torch.tensor([0.5, 0.0]))
    with pytest.raises(RuntimeError, match="zero"):
        call(torch.tensor([0.0, 1.0]))


def test_targets_that_are_ignored_are_not_out_of_bounds():
    same(F.cross_entropy, TABLE, torch.tensor([0, 1, -100, 2, -100]))


def test_an_index_is_checked_on_all_threads():
    rows = torch.randn(50, 64)
    indices = torch.zeros(20_000, dtype=torch.int64)
    call = compiled(lambda x, i: x[i] * 2)
    call(rows, indices)
    for at in (0, 9_999, 19_999):
        indices[at] = 50
        with pytest.raises(IndexError):
            call(rows, indices)
        indices[at] = 0


DIVISIONS = (
    lambda x, y: x // y,
    lambda x, y: x % y,
    torch.fmod,
    lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    lambda x, y: F.pad(x // y, (1, 1)) + 1,  # the padding is not divided
    lambda x, y: (x.short() % y).sum(),
)


@pytest.mark.parametrize("function", DIVISIONS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("scalar", [False, True], ids=["tensor", "number"])
def test_an_integer_divided_by_zero_is_an_error(function, scalar, dynamic):
    call = compiled(function, dynamic)
    x = torch.arange(-20, 20)
    for divisor in (3, -7, 0, 3):
        y = divisor if scalar else torch.where(x == 4, divisor, 5)
        if divisor:
            torch.testing.assert_close(call(x, y), function(x, y))
            continue
        for one in (function, call):
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                one(x, y)


def test_divisions_by_sizes_and_written_numbers_have_no_check():
    def function(x):
        return x // 3, x % x.shape[0], x.fmod(-4), x.int() // 7

    traced = make_fx(function, tracing_mode="symbolic")(torch.arange(6))
    kernels = lower(traced, "g").ops
    assert all(isinstance(kernel, Loops) and not kernel.body.checks() for kernel in kernels), kernels
    same(function, torch.arange(6), dynamic=True)


P = loop_symbol("p", 0)
FOUR = Loop(P, sympy.Integer(4))
LOADED = Load("x", P, torch.int64)
SMALL = op("lt", LOADED, Constant(3, torch.int64))


def stores(value):
    return Body((FOUR,), (), (Store("y", P, value, torch.int64),))


def added(x, table, index):
    x.add_(table[index])


def added_and_doubled(x, table, index):
    return x.add_(table[index]) * 2


def added_and_returned(x, table, index):
    rows = table[index]
    x.add_(rows)
    return rows


def averaged(x, table, index):
    x.mul_(0.9).add_(table[index].mean(), alpha=0.1)
    return x * 2


def partly_set(x, table, index):
    rows = table[index] * 2
    x[1:3] = rows[:2]
    return rows


@pytest.mark.parametrize("function", [added, added_and_doubled, added_and_returned, averaged, partly_set])
def test_a_failed_check_leaves_arguments_as_they_were(function):
    """A caller that catches the error, to skip a batch, goes on with its parameters and statistics."""
    call = compiled(function)
    table, good, bad = torch.arange(1.0, 6.0), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 9])
    same(function, torch.ones(4), table, good)
    x = torch.ones(4)
    with pytest.raises(IndexError):
        call(x, table, bad)
    assert torch.equal(x, torch.ones(4))


def test_a_kernel_with_a_check_is_never_dead():
    layout = Layout(torch.device("cpu"), torch.int64, (FOUR.size,), (sympy.S.One,))
    views = {name: View(name, layout) for name in "xy"}

    def live(value):
        kernel = Loops("y", layout.device, stores(value), (views["y"],))
        return fuse_ops(LoweredGraph("g", ("x",), views, {}, {}, {}, {}, [kernel], (), {}))[0]

    assert live(LOADED) == []
    assert len(live(Checked(LOADED, SMALL, "too large"))) == 1


def test_checks_print_and_count_in_the_equality_of_values():
    checked = Checked(LOADED, SMALL, "too large")
    assert checked is Checked(LOADED, SMALL, "too large")
    assert checked is not Checked(LOADED, SMALL, "other")
    assert stores(checked).checks() == ["too large"]
    assert "checked %0, %1: i64, 'too large'" in str(stores(checked))
