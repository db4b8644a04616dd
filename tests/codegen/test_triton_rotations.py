"""Halves that change places are read once; `rope` of triton_cases.py shows in every form that numbers stay the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sympy
import torch

from overlapc.codegen.triton import TritonGenerator
from overlapc.codegen.triton.rotations import joined_halves
from overlapc.ir.body import Body, Cast, Constant, Index, Load, Store, Value, op
from tests.codegen.cubins import compile_source
from tests.codegen.terms import loop, p0, p1
from tests.codegen.triton_cases import rope

BF16, F32 = torch.bfloat16, torch.float32
HALF, WIDTH = 64, 128
LOW, HIGH = (op(name, Index(p1), Constant(HALF, torch.int64)) for name in ("lt", "ge"))
FEW = op("lt", Index(p0), Constant(3, torch.int64))


def read(buffer: str, step: int, mask: Value | None = None, row: int = WIDTH) -> Load:
    return Load(buffer, row * p0 + p1 + step, BF16, mask)


def stored(value: Value, width: int = WIDTH) -> Body:
    return Body((loop(p0, 8), loop(p1, width)), (), (Store("y", width * p0 + p1, value, F32),))


def gradient(buffer: str, step: int, mask: Value) -> Value:
    """What backward multiplies with the sine before it changes halves."""
    return Cast(op("mul", read(buffer, step, mask), read("sin", step, mask)), BF16)


JOINED = {
    "forward": op("where", LOW, op("neg", read("x", HALF, LOW)), read("x", -HALF, HIGH)),
    "backward": op("where", LOW, gradient("x", HALF, LOW), op("neg", gradient("x", -HALF, HIGH))),
    "swapped": op("where", LOW, gradient("x", HALF, LOW), gradient("x", -HALF, HIGH)),
    "a row above": op("where", LOW, read("x", HALF - WIDTH, LOW), read("x", -HALF - WIDTH, HIGH)),
}
APART = {
    "two buffers": op("where", LOW, read("x", HALF, LOW), read("z", -HALF, HIGH)),
    "two operations": op("where", LOW, op("exp", read("x", HALF, LOW)), op("sin", read("x", -HALF, HIGH))),
    "another distance": op("where", LOW, read("x", HALF, LOW), read("x", -HALF + 1, HIGH)),
    "a mask of its own": op("where", LOW, read("x", HALF, FEW), read("x", -HALF, HIGH)),
    "masks the other way round": op("where", LOW, read("x", HALF, HIGH), read("x", -HALF, LOW)),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_both_halves_are_one_read(name: str) -> None:
    before = stored(JOINED[name])
    after = joined_halves(before)
    buffers = {load.buffer for load in before.loads()}
    assert len(after.loads()) == len(buffers) == len(before.loads()) / 2
    assert all(load.mask is None for load in after.loads())
    for position in range(WIDTH):
        half = JOINED[name].args[1 if position < HALF else 2]
        expected = {load.buffer: load.index for load in stored(half).loads()}
        at = {p1: sympy.Integer(position)}
        assert {load.buffer: load.index.subs(at) for load in after.loads()} == {
            buffer: index.subs(at) for buffer, index in expected.items()
        }


@pytest.mark.parametrize("name", APART)
def test_what_differs_stays_apart(name: str) -> None:
    body = stored(APART[name])
    assert joined_halves(body) is body


def test_a_row_of_another_length_has_no_such_halves() -> None:
    body = stored(JOINED["forward"], width=2 * WIDTH)
    assert joined_halves(body) is body


def test_a_rotary_embedding_loads_whole_vectors(tmp_path: Path) -> None:
    (compiled,) = compile_source(TritonGenerator().generate(rope(2048, 32, 128).body, "rope"), tmp_path)
    loads = re.findall(r"ld\.global[\w.:]*", compiled.asm["ptx"])
    assert loads
    assert all(".v4." in load for load in loads)
