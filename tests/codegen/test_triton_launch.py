"""The Triton generator without a GPU: identity of sources, refusals, modules on disk, errors, and launches."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import sympy
import torch
import triton

from overlapc.codegen.generators import generator_for
from overlapc.codegen.triton import TritonGenerator
from overlapc.codegen.triton.tiling import choose
from overlapc.errors import ToolchainError
from overlapc.ir.body import Body, Cast, Constant, Load, Store, op
from overlapc.runtime import triton_launch
from overlapc.runtime.native_launcher import launcher_type
from overlapc.runtime.triton_binary import explained, write_module
from overlapc.runtime.triton_compile import Binary
from overlapc.runtime.triton_kernel import Variant, host_function, variant_of
from tests.codegen import triton_cases as cases
from tests.codegen.cubins import compile_source
from tests.codegen.terms import loop, p0, r0, s0
from tests.runtime.recording_driver import Driver

GENERATOR = TritonGenerator()


def pointwise(x: str, y: str, count: int = 1000, dtype: torch.dtype = torch.bfloat16) -> Body:
    load = Load(x, p0, dtype)
    return Body((loop(p0, count),), (), (Store(y, p0, op("exp", load), dtype),))


def test_importing_registers_the_generator_for_cuda():
    assert isinstance(generator_for("cuda"), TritonGenerator)


def test_equal_kernels_of_different_layers_are_one_source():
    one = GENERATOR.generate(pointwise("a", "b"), "exp", comment="layers.0")
    other = GENERATOR.generate(pointwise("c", "d"), "exp", comment="layers.1")
    assert one.name == other.name
    assert one.text == other.text
    assert (one.buffers, other.buffers) == (("a", "b"), ("c", "d"))


def test_kernels_that_differ_in_dtype_only_have_different_names():
    names = {
        GENERATOR.generate(pointwise("a", "b", dtype=dtype), "exp").name
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    }
    assert len(names) == 4


def test_the_module_on_disk_names_its_source(tmp_path: Path):
    source = GENERATOR.generate(pointwise("a", "b"), "exp", comment="layers.0.mlp\ntrain.py:12: y = x.exp()")
    text = write_module(source, tmp_path).read_text()
    assert text.splitlines()[0] == "# layers.0.mlp | train.py:12: y = x.exp()"
    assert text.endswith(source.text)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (pointwise("a", "b", dtype=torch.complex64), "no torch.complex64"),
        (
            Body(
                (loop(p0, 4),),
                (),
                (Store("y", p0, Cast(Load("x", p0, torch.float32), torch.float8_e4m3fnuz), torch.float32),),
            ),
            "no torch.float8_e4m3fnuz",
        ),
        (
            Body((loop(p0, 4),), (), (Store("y", p0, Load("x", p0, torch.int8), torch.int8, "add"),)),
            "no atomic add to torch.int8",
        ),
        (
            Body(
                (loop(p0, 4),),
                (),
                (Store("x", p0, Load("x", p0, torch.int32), torch.float32),),
            ),
            "x is read as torch.int32 and as torch.float32",
        ),
        (
            Body((loop(p0, 4),), (), (Store("y", p0, op("exp", Load("x", p0, torch.int64)), torch.int64),)),
            "exp of torch.int64",
        ),
        (
            Body((loop(p0, 4),), (), (Store("y", sympy.Abs(p0 - 2), Constant(1.0, torch.float32), torch.float32),)),
            "has no Triton form",
        ),
    ],
    ids=["complex", "float8", "atomic-int8", "two-dtypes", "exp-of-int", "index"],
)
def test_unsupported_bodies_are_refused_with_a_reason(body: Body, reason: str):
    assert reason in (GENERATOR.refuse(body) or "")


def test_loading_without_a_gpu_says_what_to_do(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ToolchainError, match="TRITON_INTERPRET=1"):
        GENERATOR.load([GENERATOR.generate(pointwise("a", "b"), "exp")], tmp_path)


def test_an_error_of_triton_names_the_kernel_and_its_file(tmp_path: Path):
    source = GENERATOR.generate(pointwise("a", "b"), "exp")
    broken = dataclasses.replace(source, text=source.text.replace("ops.libdevice.exp(", "tl.load("))
    with pytest.raises(ToolchainError, match=r"exp_[0-9a-f]+: .*ptr type(.|\n)*\.py"):
        compile_source(broken, tmp_path)


def test_a_failed_pass_of_triton_names_the_kernel_and_its_file():
    source = TritonGenerator().generate(cases.softmax(8, 64).body, "softmax")
    with (
        pytest.raises(ToolchainError, match=r"softmax_[0-9a-f]+: PassManager::run failed(.|\n)*a\.py"),
        explained(source, "softmax", "a.py"),
    ):
        raise RuntimeError("PassManager::run failed")  # Triton's whole error message


def test_indices_are_wide_only_where_sizes_need_it():
    def index_dtype(count: int | sympy.Expr) -> str:
        body = Body((loop(p0, count),), (), pointwise("a", "b").stores)
        text = GENERATOR.generate(body, "exp").text
        return "INDEX" if "INDEX" in text else "int64" if "int64" in text else "int32"

    assert index_dtype(2**20) == "int32"
    assert index_dtype(2**31) == "int64"
    assert index_dtype(s0) == "INDEX"


def test_wide_indices_and_bfloat16_atomics_compile(tmp_path: Path):
    norm = cases.norm_and_scale(100).body
    long_norm = Body((), (loop(r0, 2**31 + 5),), norm.stores)
    for body in (pointwise("a", "b", 2**31 + 5), long_norm, cases.embedding_backward(9, 5, 10, torch.bfloat16).body):
        assert GENERATOR.refuse(body) is None
        assert all(stage.asm["cubin"] for stage in compile_source(GENERATOR.generate(body, "kernel"), tmp_path))


def test_the_grid_follows_the_size_of_each_launch():
    launch = GENERATOR.generate(Body((loop(p0, 3 * s0),), (), pointwise("a", "b").stores), "exp").launch
    block = dict(launch.constants)["XBLOCK"]
    programs = host_function(launch.stages[0].programs, (s0,))
    assert [programs(size) for size in (0, 1, block, 1000)] == [0, 1, 3, -(-3000 // block)]


@pytest.mark.parametrize(
    ("body", "form"),
    [
        (cases.swiglu(4096).body, "flat"),
        (cases.embedding(64, 100, 2048).body, "rows"),
        (cases.transpose(64, 128).body, "tiled"),
        (cases.rms_norm(4, 4096).body, "persistent"),
        (cases.column_sum(4096, 512).body, "split"),
        (cases.norm_and_scale(2**20).body, "split"),
    ],
    ids=["swiglu", "embedding", "transpose", "rms_norm", "column_sum", "norm_and_scale"],
)
def test_forms_are_chosen_by_strides_and_sizes(body: Body, form: str):
    assert choose(body, {}).form == form


def test_variants_differ_by_alignment_divisibility_and_index_width():
    bound = host_function(4096 * s0, (s0,))
    assert variant_of(0b10, 3, (32,), [bound]) == Variant(aligned=0b101, divisible=1, wide=False)
    assert variant_of(0, 2, (2**20 + 1,), [bound]) == Variant(aligned=0b11, divisible=0, wide=True)


def test_the_interpreter_and_the_compiler_can_be_used_alternately(tmp_path: Path):
    case = cases.softmax(7, 50)
    source = GENERATOR.generate(case.body, case.name)
    for _ in range(2):
        assert compile_source(source, tmp_path)[0].asm["cubin"]
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            assert not case.run(GENERATOR.load([source], tmp_path)[source.name], source, "cpu")


def test_assertions_are_compiled_in_without_checks_for_integer_overflow(tmp_path: Path):
    total = op("add", Load("x", p0, torch.int32), Load("z", p0, torch.int32))
    body = Body((loop(p0, 1000),), (), (Store("y", p0, total, torch.int32),))
    plain = GENERATOR.generate(body, "add")
    checked = dataclasses.replace(
        plain,
        name="add_checked",
        text=plain.text.replace("    v2 = ", "    tl.device_assert(v0 >= 0, 'x is negative', mask=xmask)\n    v2 = "),
    )
    asserts = [compile_source(source, tmp_path)[0].asm["ptx"].count("__assertfail") for source in (plain, checked)]
    assert asserts[0] == 0
    assert asserts[1] > 0
    assert "overflow" not in compile_source(checked, tmp_path)[0].asm["ttir"]


def test_a_prepared_kernel_is_launched_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel is compiled for sm_90 and launched through a driver that records its arguments."""
    driver = Driver(tmp_path)
    monkeypatch.setattr(triton_launch, "launcher_type", functools.partial(launcher_type, driver=str(driver.path)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 40 + device, raising=False)
    source = GENERATOR.generate(pointwise("a", "b", count=5000), "exp")
    (kernel,) = compile_source(source, tmp_path)
    # 77: the handle that the driver would return for the loaded kernel.
    stages = [triton_launch.Loaded(lambda *_: None, 77, Binary.of(kernel), spills=0)]
    launcher = triton_launch.CudaLauncher(source, tmp_path, ("cuda", 90, 32))
    direct = launcher._native(2, stages)
    assert direct is not None
    assert direct.otherwise is launcher
    x, y = torch.zeros(5000, dtype=torch.bfloat16), torch.zeros(5000, dtype=torch.bfloat16)
    direct(x, y)
    (stage,), block = source.launch.stages, dict(source.launch.constants)["XBLOCK"]
    grid, threads = -(-5000 // block), 32 * stage.num_warps
    (launch,) = driver.launches()
    assert launch[:5] == [77, 42, grid, threads, kernel.metadata.shared]
