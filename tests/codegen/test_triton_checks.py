"""Checks in Triton kernels: a device assert that fails only for indices out of bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch

from overlapc.codegen.triton import TritonGenerator
from overlapc.ir.body import Body, Checked, Constant, Load, Loop, Reduce, Store, op
from overlapc.ir.indexing import loop_symbol
from tests.codegen.cubins import compile_source

P, R, AT = (loop_symbol(prefix, 0) for prefix in "pri")


def picks(count: int) -> Body:
    """Return the body of `y[p] = table[index[p]]` for a table of 5."""
    where = Load("index", P, torch.int64)
    inside = op("logical_and", op("ge", where, Constant(0, torch.int64)), op("lt", where, Constant(5, torch.int64)))
    checked = Checked(where, inside, "an index is out of bounds")
    value = Load("table", AT, torch.float32, inside, ((AT, checked),))
    return Body((Loop(P, sympy.Integer(count)),), (), (Store("y", P, value, torch.float32),))


def launch(body: Body, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    generator = TritonGenerator()
    source = generator.generate(body, "kernel")
    generator.load([source], folder)[source.name](*(tensors[name] for name in source.buffers))


def test_only_indices_out_of_bounds_fail_the_check(interpreter, tmp_path):
    table, y = torch.randn(5), torch.zeros(7)  # 7: the last tile reaches past the end, where nothing is checked
    index = torch.tensor([0, 4, 3, 2, 1, 0, 4])
    launch(picks(7), {"table": table, "index": index, "y": y}, tmp_path)
    torch.testing.assert_close(y, table[index])
    for bad in (5, -1):
        index[3] = bad
        with pytest.raises(Exception, match="an index is out of bounds"):
            launch(picks(7), {"table": table, "index": index, "y": y}, tmp_path)


def test_the_operands_of_all_checks_are_loaded_before_the_first_check():
    """A check synchronizes threads, so that loads between checks would wait for one index after the other."""
    (first,), (second,) = picks(8).stores, picks(8).stores
    assert isinstance(second.value, Load)
    at, checked = second.value.indirect[0]
    assert isinstance(checked, Checked)
    where = Load("other", P, torch.int64)
    inside = op("lt", where, Constant(5, torch.int64))
    other = Load("names", AT, torch.float32, inside, ((at, Checked(where, inside, "no such name")),))
    text = (
        TritonGenerator()
        .generate(
            Body((Loop(P, sympy.Integer(8)),), (), (Store("y", P, op("add", first.value, other), torch.float32),)), "k"
        )
        .text
    )
    before, *after = text.split("tl.device_assert(")
    assert (before.count("tl.load("), len(after)) == (2, 2)


def test_a_sum_of_a_constant_counts_the_elements_of_a_row(interpreter, tmp_path):
    body = Body(
        (Loop(P, sympy.Integer(3)),),
        (Loop(R, sympy.Integer(5)),),
        (
            Store("count", P, Reduce("sum", Constant(1, torch.int64), torch.int64), torch.int64),
            Store("total", P, Reduce("sum", Load("x", 3 * R + P, torch.float32), torch.float32), torch.float32),
        ),
    )
    x, count, total = torch.randn(5, 3), torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    launch(body, {"x": x, "count": count, "total": total}, tmp_path)
    torch.testing.assert_close(total, x.sum(0))
    torch.testing.assert_close(count, torch.full((3,), 5))


def test_a_failed_check_names_its_nodes_and_their_source_line(interpreter, tmp_path):
    comment = "embedding add_1 | /home/me/model.py:12: return self.table(tokens) + 1  # ±\n"
    generator = TritonGenerator()
    source = generator.generate(picks(7), "kernel", comment)
    launch = generator.load([source], tmp_path)[source.name]
    tensors = {"table": torch.randn(5), "index": torch.full((7,), 9), "y": torch.zeros(7)}
    with pytest.raises(
        Exception, match=r"an index is out of bounds, in embedding add_1 \| /home/me/model.py:12: return"
    ):
        launch(*(tensors[name] for name in source.buffers))
    plain = Body((Loop(P, sympy.Integer(7)),), (), (Store("y", P, Load("x", P, torch.float32), torch.float32),))
    assert generator.generate(plain, "kernel", comment).text == generator.generate(plain, "kernel").text


def test_the_compiled_kernel_has_the_message_of_its_check(tmp_path):
    source = TritonGenerator().generate(picks(7), "kernel", "embedding | model.py:12")
    (compiled,) = compile_source(source, tmp_path)
    assert b"an index is out of bounds, in embedding | model.py:12" in compiled.asm["cubin"]


def test_the_compiled_kernel_has_the_assert(tmp_path):
    (compiled,) = compile_source(TritonGenerator().generate(picks(7), "kernel"), tmp_path)
    assert "__assertfail" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
