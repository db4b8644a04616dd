"""Every form of kernel and every operation compiles for sm_90, for which Triton needs no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from overlapc.codegen.triton import TritonGenerator
from overlapc.codegen.triton.tiling import Tiling
from overlapc.fusion import fuse_ops
from overlapc.ir.ops import Loops
from overlapc.runtime.triton_compile import REVISION, _change_ptx
from tests.codegen.case import Case
from tests.codegen.cubins import compile_source
from tests.codegen.interpreted import triton_on_cpu
from tests.codegen.norm_cases import group_norm
from tests.codegen.pair_cases import gate_and_up, gradients_and_columns
from tests.codegen.scan_cases import scan_cases
from tests.codegen.triton_cases import small, softmax
from tests.codegen.triton_forms import variants
from tests.codegen.triton_ops import all_cases
from tests.fusion.programs import capture
from tests.programs.by_triton import Remembering

FORMS = [(case, form, tiling) for case in small() + scan_cases() for form, tiling in variants(case.body)]


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_operations_compile(case: Case, tmp_path: Path):
    for compiled in compile_source(TritonGenerator().generate(case.body, case.name), tmp_path):
        assert compiled.asm["cubin"]


def test_threads_of_a_looped_softmax_exchange_nothing_within_the_loop(tmp_path: Path):
    """Every thread accumulates its own maxima and sums of exponentials, which are joined once at the end."""
    body = softmax(8, 20_000).body
    tiling = Tiling("looped", body.loops, 1, 8, r=body.reduction, rblock=4096)
    (compiled,) = compile_source(TritonGenerator().generate(body, "softmax", tiling=tiling), tmp_path)
    first_loop = compiled.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
    assert first_loop.count('"tt.reduce"') == 2
    assert len(re.findall(r'"tt.reduce".*axis = 2', first_loop)) == 2  # over eight neighbours, all in one thread
    assert "ttg.convert_layout" not in first_loop


def test_values_per_channel_are_loaded_once_for_neighbouring_elements(tmp_path: Path):
    """A thread's eight neighbouring elements belong to one channel, so their weight and shift are loaded once."""
    body = group_norm(2048, 8, 4096).body
    tiling = Tiling("persistent", body.loops, 1, 16, r=body.reduction, rblock=32768)
    (compiled,) = compile_source(TritonGenerator().generate(body, "group_norm", tiling=tiling), tmp_path)
    loads = re.findall(r"ld\.global\.b(?:16|32) ", compiled.asm["ptx"])
    assert len(loads) == 2 * 32768 // (16 * 32) / 8


@pytest.mark.parametrize(
    "case", [gate_and_up(512, 4096), gradients_and_columns(8192, 4096)], ids=lambda case: case.name
)
def test_interleaved_elements_are_loaded_and_stored_16_bytes_at_a_time(case: Case, tmp_path: Path):
    compiled = compile_source(TritonGenerator().generate(case.body, case.name), tmp_path)[0]
    accesses = re.findall(r"(?:ld|st)\.global[\w.:]*\.(b16|v2\.b16|v4\.b16)", compiled.asm["ptx"])
    assert not accesses


def test_a_kernel_that_stores_rows_and_also_reads_them_compiles(tmp_path: Path):
    """Triton's pass over layout conversions fails for some kernels that store all rows at the end."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = x.amax(1)
        share = (largest - largest).exp() / 3
        mean = share / 5
        return share, mean, (share + largest * largest).maximum(mean - 1).minimum(mean + 1)

    ops, _ = fuse_ops(capture(function, torch.randn(1, 300)))
    (kernel,) = ops
    assert isinstance(kernel, Loops)
    tiling = Tiling("looped", kernel.body.loops, 1, 1, r=kernel.body.reduction, rblock=64)
    (compiled,) = compile_source(TritonGenerator().generate(kernel.body, "rows", tiling=tiling), tmp_path)
    assert compiled.asm["cubin"]


def test_stores_of_elements_of_different_sizes_compile(tmp_path: Path):
    """Triton's pass over layout conversions fails on some kernels that make all such stores last."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gelu = torch.nn.functional.gelu(x)
        same = torch.copysign(gelu, gelu)
        largest = torch.addcmul(gelu, gelu, weight, value=0.5).max(2)
        return gelu, same, same.float(), same.clamp(-0.81, 0.83), same.sum(2), *largest

    torch._dynamo.reset()
    generator = Remembering()
    with triton_on_cpu(generator):
        torch.compile(function, backend="overlapc", dynamic=True)(torch.randn(2, 6, 6).bfloat16(), torch.randn(6))
    (source,) = generator.sources
    assert compile_source(source, tmp_path)[0].asm["cubin"]


def test_16_bit_integers_are_not_added_in_pairs(tmp_path: Path):
    """ptxas drops a constant of a paired addition: on GPUs, masks of padded rows then excluded elements."""

    def function(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (22, 12))
        return padded - padded.mean()

    (kernel,), _ = fuse_ops(capture(function, torch.randn(40, 33)))
    assert isinstance(kernel, Loops)
    (compiled,) = compile_source(TritonGenerator().generate(kernel.body, "padded"), tmp_path)
    assert "%half5" in compiled.asm["ptx"], "LLVM no longer makes pairs here: this test needs another kernel"
    assert not re.search(r"add\.[su]16x2", compiled.asm["ptx"])


def test_subnormal_numbers_are_not_taken_for_zeros(tmp_path: Path):
    """In eager, the hypotenuse of 1e-40 and 1e-40 is above 0."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.hypot(x).log().expm1() > 0

    (kernel,), _ = fuse_ops(capture(function, torch.randn(40)))
    assert isinstance(kernel, Loops)
    (compiled,) = compile_source(TritonGenerator().generate(kernel.body, "subnormal"), tmp_path)
    assert ".ftz" not in compiled.asm["ptx"]


@pytest.mark.parametrize(("case", "form", "tiling"), FORMS, ids=[f"{case.name}-{form}" for case, form, _ in FORMS])
def test_forms_compile(case: Case, form: str, tiling, tmp_path: Path):
    source = TritonGenerator().generate(case.body, case.name, tiling=tiling)
    compiled = compile_source(source, tmp_path)
    assert len(compiled) == len(source.launch.stages)
    assert all(stage.asm["cubin"] for stage in compiled)


def test_the_hook_that_changes_ptx_says_what_triton_3_7_adds_to_its_cache_key():
    key, digest = _change_ptx() or ("", "")
    assert str(REVISION) in key
    assert str(REVISION) in digest
