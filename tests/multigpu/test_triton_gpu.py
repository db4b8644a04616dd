"""Triton kernels of all operations and loop bodies on a real GPU compared with eager torch, and the host time of a
launch.

All kernels are compiled in one call, in parallel. A failure names the form, the output and the first wrong element, and
includes the source.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import overlapc
from overlapc.codegen.triton import TritonGenerator
from tests.codegen.case import Case
from tests.codegen.product_cases import large_product_cases
from tests.codegen.scan_cases import large_scan_cases, scan_cases
from tests.codegen.terms import noise
from tests.codegen.triton_cases import large, small, swiglu, symbolic
from tests.codegen.triton_forms import tilings_to_measure, variants
from tests.codegen.triton_ops import all_cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPERATIONS = all_cases()
SMALL = [(case, form, tiling) for case in small() + scan_cases() for form, tiling in variants(case.body)]


@pytest.fixture(scope="module")
def large_cases() -> list[Case]:
    """Create the large cases on demand: they take gigabytes, which a run without a GPU should not allocate."""
    return large() + large_scan_cases() + large_product_cases()


def _check(named: list[tuple[str, Case, object]], cache_dir: Path) -> None:
    generator = TritonGenerator()
    sources = [generator.generate(case.body, case.name, tiling=tiling) for _, case, tiling in named]  # type: ignore[arg-type]
    launchers = generator.load(list({source.name: source for source in sources}.values()), cache_dir)
    reports = []
    for (name, case, _), source in zip(named, sources, strict=True):
        problems = case.run(launchers[source.name], source, "cuda")
        torch.cuda.synchronize()  # so that a fault is reported for this kernel, not for a later one
        if problems:
            reports.append("\n".join([f"{name}:", *problems, source.text]))
    assert not reports, f"{len(reports)} of {len(named)} kernels are wrong\n" + "\n\n".join(reports)


def test_operations_equal_eager(tmp_path: Path):
    _check([(case.name, case, None) for case in OPERATIONS], tmp_path)


def test_every_form_of_every_body_equals_eager(tmp_path: Path):
    _check([(f"{case.name}, {form}", case, tiling) for case, form, tiling in SMALL], tmp_path)


def test_training_sizes_equal_eager(large_cases: list[Case], tmp_path: Path):
    _check([(case.name, case, None) for case in large_cases], tmp_path)


def test_tilings_to_measure_equal_eager(tmp_path: Path):
    cases = [*small(), *scan_cases()]
    _check([(f"{case.name}, {each}", case, each) for case in cases for each in tilings_to_measure(case)[1:]], tmp_path)


def test_the_last_zero_gives_a_cumulative_extreme_its_sign():
    """As in eager; `copysign` distinguishes the zeros."""

    def signs(x: torch.Tensor) -> list[torch.Tensor]:
        scanned = [x.cummax(1).values, x.cummin(1).values, x.cummax(0).values, x.cummin(0).values]
        return [torch.copysign(torch.ones_like(x), each) for each in scanned]

    x = torch.tensor([0.0, -0.0, -1.0, 0.0, -0.0, 0.0, -0.0, -2.0, 0.0, -0.0, 3.0, -0.0], device="cuda").repeat(11, 3)
    x = torch.cat([x, -x])
    for found, expected in zip(torch.compile(signs, backend="overlapc")(x), signs(x), strict=True):
        assert torch.equal(found, expected)


def test_subnormal_numbers_are_not_flushed_to_zero():
    """By default, Triton's libdevice functions flush them to zero."""

    def functions(x: torch.Tensor) -> list[torch.Tensor]:
        near = [x.sin(), x.tan(), x.asin(), x.atan(), x.sinh(), x.asinh(), x.atanh(), x.erf(), x.expm1(), x.log1p()]
        return [*near, x.hypot(x), x.hypot(x) > 0, x.abs().log(), x.abs().sqrt(), torch.nextafter(x, -x)]

    x = torch.tensor([1e-40, -1e-40, 3e-45, -3e-45, 1.1e-38], device="cuda").repeat(100)
    for found, expected in zip(torch.compile(functions, backend="overlapc")(x), functions(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=3e-45)


@pytest.mark.parametrize("width", [67, 131, 515])
def test_elements_under_a_mask_of_remainders_are_read(width: int):
    """ptxas miscompiled masks with remainders by losing a constant (`runtime/triton_compile.py`)."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.pad(x, (22, 12))
        return found - found.mean()

    for rows in (3, 17, 40):
        x = torch.randn(rows, width - 34, device="cuda")
        torch.testing.assert_close(torch.compile(padded, backend="overlapc")(x), padded(x))


def test_unaligned_pointers_equal_eager(tmp_path: Path):
    generator = TritonGenerator()
    case = swiglu(1000)
    source = generator.generate(case.body, case.name)
    launcher = generator.load([source], tmp_path)[source.name]
    tensors = {name: torch.randn(1001, device="cuda").bfloat16()[1:] for name in source.buffers}
    expected = torch.nn.functional.silu(tensors["gate"].float()) * tensors["up"].float()
    launcher(*(tensors[buffer] for buffer in source.buffers))
    torch.testing.assert_close(tensors["y"], expected.bfloat16())


def test_one_kernel_serves_many_sizes(tmp_path: Path):
    generator = TritonGenerator()
    launchers: dict[str, object] = {}
    for width in (1, 7, 64, 1000, 100_003):
        case = symbolic(5, width)
        source = generator.generate(case.body, case.name, size_hints={"s0": 1000})
        if source.name not in launchers:
            launchers |= generator.load([source], tmp_path)
        assert not case.run(launchers[source.name], source, "cuda"), width  # type: ignore[arg-type]
    assert len(launchers) == 1


def test_sizes_may_be_numbers_below_zero():
    call = torch.compile(lambda step: torch.arange(512, -512, step, device="cuda"), backend="overlapc", dynamic=True)
    for step in (-1, -16, -5):
        assert torch.equal(call(step), torch.arange(512, -512, step, device="cuda"))


def test_more_elements_than_int32_equal_eager(tmp_path: Path):
    count = 2**31 + 4096
    case = swiglu(16)  # only for its formula; the large tensors are made on the device
    generator = TritonGenerator()
    big = swiglu_body(count)
    source = generator.generate(big, "big_swiglu")
    if torch.cuda.mem_get_info()[0] < 8 * count:
        pytest.skip("needs 16 GiB of free device memory")
    gate = torch.full((count,), 2.0, dtype=torch.bfloat16, device="cuda")
    gate[-1] = 1.0
    y = torch.zeros_like(gate)
    tensors = {"gate": gate, "up": gate, "y": y}
    generator.load([source], tmp_path)[source.name](*(tensors[buffer] for buffer in source.buffers))
    last = case.expected({"gate": gate[-2:], "up": gate[-2:]})["y"].bfloat16()
    torch.testing.assert_close(y[-2:], last)


def swiglu_body(count: int):
    """Return the body of `swiglu` over `count` elements without creating its tensors on the host."""
    import sympy

    from overlapc.ir.body import Body, Loop
    from tests.codegen.terms import p0

    return Body((Loop(p0, sympy.Integer(count)),), (), swiglu(16).body.stores)


def test_launches_follow_the_current_stream_and_cuda_graphs(tmp_path: Path):
    generator = TritonGenerator()
    case = swiglu(4096)
    source = generator.generate(case.body, case.name)
    launcher = generator.load([source], tmp_path)[source.name]
    tensors = {name: tensor.cuda() for name, tensor in case.tensors.items()}
    arguments = [tensors[buffer] for buffer in source.buffers]
    launcher(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher(*arguments)
    tensors["gate"].copy_(noise(4096, seed=9))
    tensors["y"].zero_()
    graph.replay()
    torch.testing.assert_close(tensors["y"], case.expected(tensors)["y"].bfloat16())


def test_a_launch_costs_the_host_a_few_microseconds(tmp_path: Path):
    generator = TritonGenerator()
    case = swiglu(1024)
    source = generator.generate(case.body, case.name)
    launcher = generator.load([source], tmp_path)[source.name]
    tensors = {name: tensor.cuda() for name, tensor in case.tensors.items()}
    arguments = [tensors[buffer] for buffer in source.buffers]
    best_us = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):  # fewer than the launch queue holds, so the host never waits for the device
            launcher(*arguments)
        best_us = min(best_us, (time.perf_counter() - start) / 200 * 1e6)
    print(f"host time of a launch: {best_us:.1f} us")
    assert best_us < 20


OUT_OF_BOUNDS = """
import torch
from overlapc.backend import overlapc

def picked(table, tokens):
    return table[tokens] * 2  # the line at fault

table, tokens = torch.randn(5, 8, device="cuda"), torch.tensor([0, 7], device="cuda")
step = torch.compile(picked, backend=overlapc)
step(table, tokens)
torch.cuda.synchronize()
"""


def test_a_failed_check_names_its_node_and_line(tmp_path: Path):
    """In a separate process, because a device assert makes the CUDA context unusable."""
    script = tmp_path / "script.py"
    script.write_text(OUT_OF_BOUNDS)
    root = Path(overlapc.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode
    assert re.search(
        r"an index is out of bounds for dimension 0 with size 5, in .*index.* \| .*script\.py:6", ended.stderr
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cpu_scalar_tensors_are_constants_of_a_kernel(dtype: torch.dtype):
    x = torch.linspace(-3, 3, 1001, device="cuda").to(dtype)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = x * torch.tensor(0.1) / torch.tensor(3.0)
        kept = scaled.masked_fill(x >= torch.tensor(0.7), torch.tensor(-1.0))
        there = torch.tensor(7, device=x.device)
        return kept + torch.tensor(7.3), x.double() / torch.tensor(3.0, dtype=torch.float64), x - there, x**there

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = torch.compile(function, backend="overlapc", fullgraph=True)(x)
    torch.testing.assert_close(found[:3], function(x)[:3], rtol=0, atol=0)
    torch.testing.assert_close(found[3], function(x)[3])
    assert not [name for name in torch._dynamo.utils.counters["overlapc"] if name.startswith("fallback ")]
