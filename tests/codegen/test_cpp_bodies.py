"""Bodies as fusion produces them, in C++: numbers equal eager's for any number of threads and alignment."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F

from overlapc.codegen.cpp import CppGenerator
from overlapc.codegen.cpp_load import prelude
from overlapc.codegen.generators import generator_for
from overlapc.errors import CheckFailed
from overlapc.ir.body import Body, Load, Store, Value
from overlapc.ir.rewriting import rewrite_values
from overlapc.runtime.toolchain import find_compiler
from tests.codegen.cpp_bodies import (
    BF16,
    BODIES,
    F32,
    I64,
    no_loops,
    rms_norm,
    swiglu,
)
from tests.codegen.cpp_kernels import Kernels
from tests.codegen.terms import loop, p0, r0


def close(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 2e-6, atol: float = 2e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "dtype"),
    [("rms_norm", 33, 500, F32), ("rms_norm_bf16", 64, 4096, BF16)]
    + [("rms_norm_symbolic", *size, F32) for size in [(1, 1), (7, 17), (17, 1000), (2, 5000), (0, 4)]],
)
def test_rms_norm_equals_eager(kernels: Kernels, name: str, rows: int, columns: int, dtype: torch.dtype):
    x, w = torch.randn(rows, columns).to(dtype), torch.randn(columns)
    y, scale = torch.empty_like(x), torch.empty(rows)
    kernels.run(name, {"x": x, "w": w, "y": y, "scale": scale}, s0=rows, s1=columns)
    expected = torch.rsqrt(x.double().pow(2).mean(1) + 1e-5)
    close(scale, expected.float())
    error = 2e-6 if dtype == F32 else 8e-3
    close(y.double(), (x.double() * expected[:, None] * w).to(dtype).double(), error, error)


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("softmax", 40, 1000), ("softmax_one_row", 1, 100_000)]
    + [("softmax_symbolic", *size) for size in [(1, 1), (3, 17), (5, 5000)]],
)
def test_softmax_of_rows_equals_eager(kernels: Kernels, name: str, rows: int, columns: int):
    x = torch.randn(rows, columns) * 5
    x[0, 0] = 1e30 if columns > 17 else 1.0
    y, top = torch.empty_like(x), torch.empty(rows)
    kernels.run(name, {"x": x, "y": y, "top": top}, s0=rows, s1=columns)
    close(y, x.double().softmax(1).float(), atol=1e-9)
    assert torch.equal(top, x.amax(1))


def test_only_the_row_with_a_nan_becomes_nan(kernels: Kernels):
    x = torch.randn(40, 1000)
    x[3, 500] = torch.nan
    y, top = torch.empty_like(x), torch.empty(40)
    kernels.run("softmax", {"x": x, "y": y, "top": top})
    assert y[3].isnan().all()
    assert not y[4].isnan().any()


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("softmax_down", 70, 300)] + [("softmax_down_symbolic", *size) for size in [(1, 1), (17, 3), (1000, 200)]],
)
def test_softmax_of_columns_equals_eager(kernels: Kernels, name: str, rows: int, columns: int):
    x = torch.randn(rows, columns) * 5
    y, top = torch.empty_like(x), torch.empty(columns)
    kernels.run(name, {"x": x, "y": y, "top": top}, s0=rows, s1=columns)
    close(y, x.double().softmax(0).float(), atol=1e-9)
    assert torch.equal(top, x.amax(0))


def test_column_sums_of_two_values_equal_eager(kernels: Kernels):
    g, x, mean, rstd = torch.randn(1000, 300), torch.randn(1000, 300), torch.randn(1000), torch.rand(1000)
    tensors = {"g": g, "x": x, "mean": mean, "rstd": rstd, "dw": torch.empty(300), "db": torch.empty(300)}
    kernels.run("weights", tensors)
    normalized = (x.double() - mean[:, None]) * rstd[:, None]
    close(tensors["dw"], (g * normalized).sum(0).float(), atol=2e-5)
    close(tensors["db"], g.double().sum(0).float(), atol=2e-5)


def test_three_nested_reductions_over_two_loops_equal_eager(kernels: Kernels):
    x = torch.randn(9, 60)
    tensors = {"x": x, "largest": torch.empty(9), "variance": torch.empty(9)}
    kernels.run("three_passes", tensors)
    variance, mean = torch.var_mean(x.double(), 1, correction=0)
    close(tensors["variance"], variance.float())
    close(tensors["largest"], ((x - mean[:, None]) / variance.sqrt()[:, None]).amax(1).float())


def test_a_reduction_over_the_outer_and_inner_dim_equals_eager(kernels: Kernels):
    x = torch.randn(6, 20, 10)
    tensors = {"x": x, "s": torch.empty(20), "at": torch.empty(20, dtype=I64)}
    kernels.run("permuted", tensors)
    close(tensors["s"], x.double().sum((0, 2)).float(), atol=1e-5)
    assert torch.equal(tensors["at"], x.permute(1, 0, 2).reshape(20, 60).argmax(1))


def test_positions_are_counted_in_the_order_of_the_body(kernels: Kernels):
    x = torch.zeros(40, 50)
    x[30, 2] = x[3, 40] = 1.0  # a tie: (2, 30) comes first in the body's order, (3, 40) in memory
    at = torch.empty(1, dtype=I64)
    kernels.run("reordered_argmax", {"x": x, "at": at})
    assert at.item() == 2 * 40 + 30


@pytest.mark.parametrize("size", [0, 1, 7, 17, 1000, 100_003])
def test_swiglu_rounds_between_its_operations(kernels: Kernels, size: int):
    a, b = torch.randn(2, size).to(BF16)
    y = torch.empty(size, dtype=BF16)
    kernels.run("swiglu", {"a": a, "b": b, "y": y}, s0=size)
    close(y.float(), (F.silu(a) * b).float(), 8e-3, 1e-6)


def test_a_rotary_embedding_with_masked_halves_equals_eager(kernels: Kernels):
    x, sin, cos, y = torch.randn(35, 64), torch.randn(7, 64), torch.randn(7, 64), torch.empty(35, 64)
    kernels.run("rotary", {"x": x, "sin": sin, "cos": cos, "y": y})
    rotated = torch.cat([-x[:, 32:], x[:, :32]], 1)
    close(y, rotated * sin.repeat(5, 1) + x * cos.repeat(5, 1))


@pytest.mark.parametrize(("name", "rows", "columns"), [("transposed", 300, 200), ("transposed_small", 5, 3)])
def test_a_transpose_equals_eager(kernels: Kernels, name: str, rows: int, columns: int):
    x, y = torch.randn(rows, columns), torch.empty(columns, rows)
    kernels.run(name, {"x": x, "y": y})
    assert torch.equal(y, x.t())


def test_permuted_dims_with_a_broadcast_equal_eager(kernels: Kernels):
    x, b, y = torch.randn(2, 5, 3, 8), torch.randn(8), torch.empty(2, 3, 5, 8)
    kernels.run("heads_first", {"x": x, "b": b, "y": y})
    assert torch.equal(y, x.transpose(1, 2) + b)


def test_divisions_in_an_index_equal_eager(kernels: Kernels):
    x, y = torch.randn(10, 4), torch.empty(130)
    kernels.run("flattened", {"x": x, "y": y})
    at = torch.arange(130)
    assert torch.equal(y, x[at // 13, at // 3 % 4])


def test_masked_loads_out_of_bounds_and_negative_floor_division_equal_eager(kernels: Kernels):
    x, y, half = torch.randn(8), torch.empty(11), torch.empty(11, dtype=I64)
    kernels.run("shifted", {"x": x, "y": y, "half": half})
    assert torch.equal(y, torch.cat([torch.zeros(3), x]))
    assert torch.equal(half, torch.arange(11).sub(5).div(2, rounding_mode="floor"))


def test_an_embedding_equals_eager(kernels: Kernels):
    table, t = torch.randn(90, 48).to(BF16), torch.randint(0, 90, (77,))
    y = torch.empty(77, 48, dtype=BF16)
    kernels.run("embedding", {"table": table, "t": t, "y": y}, s0=77)
    assert torch.equal(y, table[t])


@pytest.mark.parametrize(("name", "columns", "dtype"), [("scatter_add", 200, F32), ("scatter_add_bf16", 8, BF16)])
def test_scatter_add_equals_the_sequential_sum(kernels: Kernels, name: str, columns: int, dtype: torch.dtype):
    t = torch.randint(0, 5, (400,), dtype=torch.int32)
    g = torch.randn(400, columns).to(dtype)
    d = torch.zeros(5, columns, dtype=dtype)
    expected = d.clone()
    for row, token in enumerate(t.tolist()):
        expected[token] += g[row]
    kernels.run(name, {"g": g, "t": t, "d": d}, s0=400)
    assert torch.equal(d, expected)


def test_a_masked_histogram_equals_eager(kernels: Kernels):
    t, d = torch.randint(0, 6, (100_000,)), torch.zeros(6, dtype=I64)
    kernels.run("histogram", {"t": t, "d": d}, s0=100_000)
    expected = torch.bincount(t, minlength=6)
    expected[2] = 0
    assert torch.equal(d, expected)


def test_cross_entropy_equals_eager(kernels: Kernels):
    x, t, loss = torch.randn(50, 3000) * 3, torch.randint(0, 3000, (50,)), torch.empty(50)
    kernels.run("cross_entropy", {"x": x, "t": t, "loss": loss})
    close(loss, F.cross_entropy(x.double(), t, reduction="none").float())


@pytest.mark.parametrize("size", [1, 17, 100_003])
def test_buffers_that_are_read_and_written_equal_eager(kernels: Kernels, size: int):
    p, m, g = torch.randn(size), torch.randn(size), torch.randn(size).to(BF16)
    expected_m = m * 0.9 + g
    expected_p = p - expected_m * 0.1
    kernels.run("in_place", {"p": p, "m": m, "g": g}, s0=size)
    assert torch.equal(m, expected_m)
    assert torch.equal(p, expected_p)


def test_an_output_may_have_the_memory_of_an_input(kernels: Kernels):
    x, w, scale = torch.randn(33, 500), torch.randn(500), torch.empty(33)
    y = torch.empty_like(x)
    kernels.run("rms_norm", {"x": x, "w": w, "y": y, "scale": scale})
    kernels.run("rms_norm", {"x": x, "w": w, "y": x, "scale": scale})
    assert torch.equal(x, y)


def test_a_body_without_loops_runs_once(kernels: Kernels):
    x, y = torch.tensor(2.5), torch.empty(())
    kernels.run("no_loops", {"x": x, "y": y})
    assert y.item() == 3.5


def test_a_strided_slice_equals_eager(kernels: Kernels):
    x, y = torch.randn(10, 30), torch.empty(10, 15)
    kernels.run("strided", {"x": x, "y": y})
    assert torch.equal(y, x[:, ::2])


def test_memory_can_be_read_as_another_dtype(kernels: Kernels):
    x, y, bits = torch.randn(100), torch.empty(100), torch.empty(100, dtype=torch.int32)
    kernels.run("view", {"x": x, "y": y, "bits": bits})
    assert torch.equal(y, x)
    assert torch.equal(bits, x.view(torch.int32))


def test_selects_choose_as_where_does_and_keep_the_sign_of_zero(kernels: Kernels):
    x = torch.randn(10_000).to(BF16)
    x[:6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.0])
    y = torch.empty_like(x)
    kernels.run("elu", {"x": x, "y": y})
    torch.testing.assert_close(y, F.elu(x), rtol=0, atol=0, equal_nan=True)
    assert y[:2].signbit().tolist() == [False, True]


def test_gradients_of_a_clipped_ratio(kernels: Kernels):
    x, old = torch.randn(16, 512) * 0.3, torch.randn(16, 512) * 0.3
    advantage, gradient = torch.randn(16), torch.rand(16)
    x[:, :64] = old[:, :64]  # ratios of 1, where both sides are equal
    y = torch.empty(16, 512)
    kernels.run("clipped_ratio", {"x": x, "old": old, "a": advantage, "g": gradient, "y": y})
    leaf = x.clone().requires_grad_()
    ratio = (leaf - old).exp()
    a = advantage[:, None]
    torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).backward(gradient[:, None].expand(16, 512))
    close(y, leaf.grad)


def test_a_row_of_padding_adds_nothing(kernels: Kernels):
    g, m = torch.randn(100, 512).to(BF16), torch.rand(512).to(BF16)
    y = torch.empty(100, 512, dtype=BF16)
    kernels.run("token_shift_gradient", {"g": g, "m": m, "y": y})
    shifted = F.pad(g[1:], (0, 0, 0, 1))
    close(y, (g.float() * m.float() + (shifted * m).float()).to(BF16))


def test_lookups_in_a_loop_of_their_own_are_checked(kernels: Kernels):
    x, bias, y = torch.randn(40, 300).to(BF16), torch.randn(32).to(BF16), torch.empty(40, 300)
    t = torch.randint(0, 32, (40, 300))
    kernels.run("biased_scores", {"x": x, "bias": bias, "t": t, "y": y})
    close(y, (x.float() + bias.float()[t]).exp())
    t[-1, -1] = 32
    with pytest.raises(CheckFailed, match="no such bucket"):
        kernels.run("biased_scores", {"x": x, "bias": bias, "t": t, "y": y})


def test_sums_of_long_rows_are_as_exact_as_pairwise_ones(kernels: Kernels):
    x = torch.rand(200_000) + 0.5
    y, norm = torch.empty_like(x), torch.empty(1)
    kernels.run("norm_of_all", {"x": x, "y": y, "norm": norm})
    exact = x.double().norm()
    assert abs(norm.item() - exact) / exact < 1.2e-7
    close(y, (x / exact).float())


@pytest.mark.parametrize(
    "name", ["norm_of_all", "few_wide_columns", "softmax", "softmax_down", "swiglu", "scatter_add"]
)
def test_results_do_not_depend_on_the_number_of_threads(kernels: Kernels, name: str):
    torch.manual_seed(0)
    inputs = {
        "norm_of_all": {"x": torch.randn(200_000)},
        "few_wide_columns": {"x": torch.randn(30_000, 20)},
        "softmax": {"x": torch.randn(40, 1000)},
        "softmax_down": {"x": torch.randn(70, 300)},
        "swiglu": {"a": torch.randn(100_003).to(BF16), "b": torch.randn(100_003).to(BF16)},
        "scatter_add": {"g": torch.randn(400, 200), "t": torch.randint(0, 5, (400,), dtype=torch.int32)},
    }[name]
    shapes = {
        "y": next(iter(inputs.values())).shape,
        "d": (5, 200),
        "top": (1000,),
        "norm": (1,),
        "s": (20,),
        "m": (20,),
    }
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs = {
                store.buffer: torch.zeros(shapes[store.buffer], dtype=store.memory_dtype)
                for store in BODIES[name].stores
            }
            kernels.run(name, {**inputs, **outputs}, s0=len(next(iter(inputs.values()))))
            results.append(outputs)
    finally:
        torch.set_num_threads(before)
    assert "omp parallel" in kernels.sources[name].text
    for other in results[1:]:
        for buffer, tensor in other.items():
            assert torch.equal(tensor, results[0][buffer]), buffer


def test_results_do_not_depend_on_alignment(kernels: Kernels):
    memory = torch.randn(4 + 1003).to(BF16)
    results = []
    for offset in range(4):
        a = torch.empty(1003 + offset, dtype=BF16)[offset:].copy_(memory[:1003])
        y = torch.empty(1003 + offset, dtype=BF16)[offset:]
        kernels.run("swiglu", {"a": a, "b": a, "y": y}, s0=1003)
        results.append(y.clone())
    assert all(torch.equal(results[0], y) for y in results)


def test_equal_bodies_with_different_buffers_are_one_kernel():
    generator = CppGenerator()
    body = rms_norm(33, 500)
    renamed = Body(
        body.loops,
        body.reduction,
        (
            Store("out", 500 * p0 + r0, rename(body.stores[0].value), F32),
            Store("stats", p0, rename(body.stores[1].value), F32),
        ),
    )
    first, second = (
        generator.generate(body, "norm", "layer 0"),
        generator.generate(renamed, "norm", "layer 1"),
    )
    assert (first.name, first.text) == (second.name, second.text)
    assert first.buffers == ("y", "scale", "x", "w")
    assert second.buffers == ("out", "stats", "x_1", "w_1")


def rename(value: Value) -> Value:
    return rewrite_values(
        [value],
        replace=lambda new: Load(new.buffer + "_1", new.index, new.memory_dtype) if isinstance(new, Load) else None,
    )[value]


def test_a_hint_becomes_part_of_an_identifier():
    name = CppGenerator().generate(no_loops(), "fused mul/add <lambda>").name
    assert name.startswith("fused_mul_add_lambda_")
    assert name.isidentifier()


def test_bodies_that_cannot_be_generated_are_refused_with_a_reason():
    complex_load = Body((loop(p0, 4),), (), (Store("y", p0, Load("x", p0, torch.complex64), torch.complex64),))
    assert CppGenerator().refuse(complex_load) == "no torch.complex64 on cpu"
    wild = Load("x", sympy.floor(p0 / 2), F32)
    assert "floor" in (CppGenerator().refuse(Body((loop(p0, 4),), (), (Store("y", p0, wild, F32),))) or "")
    assert CppGenerator().refuse(swiglu()) is None


def test_the_generator_is_registered_for_cpu():
    assert isinstance(generator_for("cpu"), CppGenerator)


@pytest.mark.parametrize(
    "name",
    ["rms_norm_bf16", "softmax", "weights", "swiglu", "in_place", "cross_entropy", "elu", "clipped_ratio",
     "token_shift_gradient", "biased_scores"],
)  # fmt: skip
def test_the_compiler_vectorizes_every_loop_that_computes(kernels: Kernels, name: str, tmp_path: Path):
    compiler = find_compiler()
    if "Free Software Foundation" not in compiler.identity:
        pytest.skip("reads g++'s report")
    lines = (prelude() + kernels.sources[name].text).splitlines()
    source = tmp_path / "kernel.cpp"
    source.write_text("\n".join(lines) + "\n")
    command = [
        *compiler.command,
        *compiler.flags,
        "-fopt-info-vec",
        "-o",
        str(tmp_path / "kernel.so"),
        str(source),
    ]
    report = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    vectorized = {int(match[1]) for match in re.finditer(r":(\d+):\d+: optimized: loop vectorized", report)}
    simd = [at for at, line in enumerate(lines, 1) if "#pragma omp simd" in line]
    assert simd
    for at in simd:
        indent = len(lines[at - 1]) - len(lines[at - 1].lstrip())
        end = next(number for number in range(at + 1, len(lines)) if lines[number].startswith(" " * indent + "}")) + 1
        text = "\n".join(lines[at - 1 : end])
        if "const float" in text:  # a loop that only copies may become a memcpy
            assert vectorized & set(range(at, end + 1)), text


def test_kernels_do_not_include_headers_that_are_slow_to_parse(tmp_path: Path):
    """Including math.h alone took a quarter of the time to compile a small kernel."""
    compiler = find_compiler()
    source = tmp_path / "prelude.cpp"
    source.write_text(prelude())
    command = [*compiler.command, *compiler.flags, "-M", str(source)]
    read = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "stdint.h" in read
    assert not re.findall(r"\S*/(?:math|stdlib)\.h", read)
