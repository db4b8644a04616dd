"""The iterations after a loop's whole vectors run as one vector, which touches no memory beyond the loop's."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from overlapc.ir.body import Body, Index, Load, Reduce, Store, op
from tests.codegen.cpp_kernels import Kernels
from tests.codegen.terms import bf16, f32, i64, loop, p0, p1, r0, total

LENGTHS = (1, 15, 16, 17, 25, 31, 77, 93)
ROWS = 21
_NO_ACCESS = 0  # PROT_NONE of mprotect(2)


def softmax(length: int) -> Body:
    at = length * p0 + r0
    x = Load("x", at, bf16)
    top = Reduce("max", x, f32)
    power = op("exp", op("sub", x, top))
    stores = (Store("y", at, op("div", power, total(power)), bf16), Store("top", p0, top, f32))
    return Body((loop(p0, ROWS),), (loop(r0, length),), stores)


def powers(length: int) -> Body:
    """Rows with gaps between their results, so that the loops are not joined into one."""
    value = op("exp", op("mul", Load("x", length * p0 + p1, f32), Load("w", p1, f32)))
    return Body((loop(p0, ROWS), loop(p1, length)), (), (Store("y", 128 * p0 + p1, value, f32),))


def columns(length: int) -> Body:
    at = length * r0 + p0
    x = Load("x", at, f32)
    power = op("exp", op("sub", x, Reduce("max", x, f32)))
    store = Store("y", at, op("div", power, total(power)), f32)
    return Body((loop(p0, length),), (loop(r0, ROWS),), (store,))


def quotients(length: int) -> Body:
    """Whole numbers divided by others that are loaded: a rest that loads zeros would stop the process."""
    value = op("trunc_div", Index(p1 + 100, i64), Load("x", length * p0 + p1, i64))
    return Body((loop(p0, ROWS), loop(p1, length)), (), (Store("y", 128 * p0 + p1, value, i64),))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    makers = (softmax, powers, columns, quotients)
    bodies = {f"{make.__name__}_{length}": make(length) for make in makers for length in LENGTHS}
    return Kernels(bodies, tmp_path_factory.mktemp("rests"))


def at_the_end(source: torch.Tensor) -> torch.Tensor:
    """Return a copy behind whose last element any access to memory stops the process."""
    size = -(-source.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, _NO_ACCESS) == 0
    copy = torch.frombuffer(memory, dtype=source.dtype, count=source.numel(), offset=size - source.nbytes)
    return copy.view(source.shape).copy_(source)


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_any_length_equal_eager(kernels: Kernels, length: int) -> None:
    x = at_the_end(torch.randn(ROWS, length, dtype=bf16) * 5)
    y, top = at_the_end(torch.zeros(ROWS, length, dtype=bf16)), at_the_end(torch.zeros(ROWS))
    kernels.run(f"softmax_{length}", {"x": x, "y": y, "top": top})
    torch.testing.assert_close(y, x.float().softmax(1).to(bf16))
    assert torch.equal(top, x.float().amax(1))


@pytest.mark.parametrize("length", LENGTHS)
def test_what_lies_behind_a_row_stays_as_it_is(kernels: Kernels, length: int) -> None:
    x, w = at_the_end(torch.randn(ROWS, length)), at_the_end(torch.randn(length))
    y = torch.full((ROWS, 128), 7.0)
    kernels.run(f"powers_{length}", {"x": x, "w": w, "y": y})
    torch.testing.assert_close(y[:, :length], torch.exp(x * w))
    assert bool((y[:, length:] == 7).all())


@pytest.mark.parametrize("length", LENGTHS)
def test_columns_of_any_number_equal_eager(kernels: Kernels, length: int) -> None:
    x = at_the_end(torch.randn(ROWS, length))
    y = at_the_end(torch.zeros(ROWS, length))
    kernels.run(f"columns_{length}", {"x": x, "y": y})
    torch.testing.assert_close(y, x.softmax(0))


@pytest.mark.parametrize("length", LENGTHS)
def test_no_iteration_that_does_not_exist_divides_by_zero(kernels: Kernels, length: int) -> None:
    x, y = at_the_end(torch.randint(1, 9, (ROWS, length))), torch.zeros(ROWS, 128, dtype=i64)
    kernels.run(f"quotients_{length}", {"x": x, "y": y})
    assert torch.equal(y[:, :length], (torch.arange(length) + 100).div(x, rounding_mode="trunc"))


def test_elements_have_the_same_bits_in_a_vector_and_in_the_rest(kernels: Kernels) -> None:
    x, w = torch.randn(ROWS, 1).expand(ROWS, 77).contiguous(), torch.ones(77)
    y = torch.zeros(ROWS, 128)
    kernels.run("powers_77", {"x": x, "w": w, "y": y})
    assert torch.equal(y[:, :77], y[:, :1].expand(ROWS, 77))


def test_only_long_rests_without_divisions_are_vectors_with_masks(kernels: Kernels) -> None:
    vectors = {name for name, source in kernels.sources.items() if "whole_vectors" in source.text}
    assert vectors == {
        f"{name}_{length}" for name in ("softmax", "powers", "columns") for length in (15, 25, 31, 77, 93)
    }
