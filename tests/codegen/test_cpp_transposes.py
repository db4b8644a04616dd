"""Blocks of memory are transposed in registers: every element size, and sizes that blocks do not divide."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from overlapc.codegen.cpp_load import prelude
from overlapc.ir.body import Body, Load, Store, op
from overlapc.runtime.toolchain import find_compiler
from tests.codegen.cpp_kernels import Kernels
from tests.codegen.terms import loop, p0, p1, p2, s0, s1

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
SIZES = ((64, 32), (70, 45), (129, 200), (16, 17), (256, 300))


def transposed(rows, columns, dtype: torch.dtype, batch: int = 2) -> Body:
    """Return a body for x with its last two dims swapped, plus a row that needs no transpose."""
    x = Load("x", rows * columns * p0 + columns * p2 + p1, dtype)
    value = op("add", x, Load("row", p2, dtype))
    return Body(
        (loop(p0, batch), loop(p1, columns), loop(p2, rows)),
        (),
        (Store("y", rows * columns * p0 + rows * p1 + p2, value, dtype),),
    )


CASES = {f"{str(dtype)[6:]}_{rows}_{columns}": (dtype, rows, columns) for dtype in DTYPES for rows, columns in SIZES}


BODIES = {name: transposed(rows, columns, dtype) for name, (dtype, rows, columns) in CASES.items()}
BODIES["symbolic"] = transposed(s0, s1, torch.float32)


def numbers(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size).to(dtype) if dtype.is_floating_point else torch.randint(0, 100, size, dtype=dtype)


@pytest.mark.parametrize("name", CASES)
def test_transposes_equal_eager(kernels: Kernels, name: str):
    dtype, rows, columns = CASES[name]
    assert "transpose_tile" in kernels.sources[name].text
    x, row, y = (
        numbers(2, rows, columns, dtype=dtype),
        numbers(rows, dtype=dtype),
        torch.empty(2, columns, rows).to(dtype),
    )
    kernels.run(name, {"x": x, "row": row, "y": y})
    assert torch.equal(y, x.transpose(1, 2) + row)


def test_transposes_of_symbolic_size_equal_eager(kernels: Kernels):
    for rows, columns in ((3, 5), (100, 33), (64, 64)):
        x, row, y = torch.randn(2, rows, columns), torch.randn(rows), torch.empty(2, columns, rows)
        kernels.run("symbolic", {"x": x, "row": row, "y": y}, s0=rows, s1=columns)
        assert torch.equal(y, x.transpose(1, 2) + row)


CHECK = """
#include <stdio.h>
template <class T> int wrong(int64_t rows, int64_t columns) {
  T from[80 * 40], tile[32 * 64];
  for (int at = 0; at < 3200; ++at) from[at] = T(at);
  transpose_tile<32, 64>(tile, from, 40, rows, columns);
  int found = 0;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) found += tile[64 * i + j] != from[i + 40 * j];
  return found;
}
int main() {
  int found = 0;
  for (int64_t rows : {1, 16, 31, 32})
    for (int64_t columns : {1, 16, 33, 64})
      found += wrong<uint8_t>(rows, columns) + wrong<uint16_t>(rows, columns) + wrong<float>(rows, columns) +
               wrong<double>(rows, columns);
  printf("%d", found);
}
"""


@pytest.mark.parametrize("flags", [["-march=x86-64"], ["-O0"], ["-march=native"], ["-march=native", "-mno-avx512f"]])
def test_transposes_are_right_with_any_vector_instructions(flags: list[str], tmp_path: Path):
    compiler = find_compiler()
    if platform.machine() != "x86_64":
        pytest.skip("flags of another CPU")
    source, program = tmp_path / "check.cpp", tmp_path / "check"
    source.write_text(prelude() + "#include <initializer_list>\n" + CHECK)
    subprocess.run([*compiler.command, "-std=c++17", "-O2", *flags, "-w", "-o", program, source, "-lm"], check=True)
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "0"
