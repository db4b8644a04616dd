"""From C++ source to a callable: the compiler, its errors, and when kernels are compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overlapc.errors import CheckFailed, ToolchainError
from overlapc.runtime import cpp_launch
from overlapc.runtime.counters import counted
from overlapc.runtime.cpp_launch import CppKernel, load_kernels
from overlapc.runtime.toolchain import find_compiler
from tests import ROOT

DOUBLE = """
extern "C" void {name}(float* out0, const float* in0, long n, long threads) {{
  #pragma omp parallel for num_threads(threads)
  for (long i = 0; i < n; ++i) out0[i] = {factor} * in0[i];
}}
"""


def kernel(factor: int = 2, comment: str = "") -> CppKernel:
    name = f"times_{factor}"
    return CppKernel(name, DOUBLE.format(name=name, factor=factor), tensors=2, sizes=1, comment=comment)


def test_kernels_of_a_graph_are_compiled_once_each_and_then_found(tmp_path: Path):
    compiles = counted("kernel_compiles")
    launchers = load_kernels([kernel(2), kernel(3), kernel(2)], tmp_path)
    x, y = torch.arange(5.0), torch.empty(5)
    for factor in (2, 3):
        launchers[f"times_{factor}"](y, x, 5)
        assert torch.equal(y, factor * x)
    assert counted("kernel_compiles") - compiles == 2
    load_kernels([kernel(3), kernel(4)], tmp_path)  # another graph shares one of them
    assert counted("kernel_compiles") - compiles == 3


CHECKED = """
extern "C" int checked(double* out0, const double* in0, const double* in1, long n, long first, long threads) {
  for (long i = 0; i < n; ++i) out0[i] = in0[i] - in1[first + i];
  return in1[0] < 0 ? 2 : in1[0] > 5;
}
"""


@pytest.mark.parametrize("native", [True, False], ids=["C", "ctypes"])
def test_a_launch_passes_tensors_sizes_and_threads(native: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    if not native:
        monkeypatch.setattr(cpp_launch, "host_launcher_type", lambda cache_dir: None)
    threads = 'extern "C" void threads_given(long* out0, long threads) { *out0 = threads; }\n'
    checked = CppKernel("checked", CHECKED, 3, 2, "from layer 7", ("above 5", "below 0"))
    launchers = load_kernels([checked, CppKernel("threads_given", threads, 1, 0)], tmp_path)
    assert ("HostLauncher" in str(type(launchers["checked"]))) == native
    out, x, y = (
        torch.zeros(3, dtype=torch.float64),
        torch.arange(3.0, dtype=torch.float64),
        torch.arange(1.0, 6).double(),
    )
    assert launchers["checked"](out, x, y, 2, 1) is None
    assert out.tolist() == [-2, -2, 0]
    launchers["checked"](out, x, y[1:], 1, -1)  # sizes have signs
    assert out.tolist() == [-1, -2, 0]
    for first, message in ((9, "above 5"), (-9, "below 0")):
        y[0] = first
        with pytest.raises(CheckFailed, match=f"{message}\\n   in kernel checked: from layer 7"):
            launchers["checked"](out, x, y, 1, 0)
    count = torch.zeros((), dtype=torch.int64)
    launchers["threads_given"](count)
    assert count == torch.get_num_threads()


def test_wrong_arguments_of_a_launch_are_an_error_that_names_it(tmp_path: Path):
    launch, x = load_kernels([kernel(2)], tmp_path)["times_2"], torch.zeros(3)
    with pytest.raises(TypeError, match="times_2 takes 2 tensors and 1 sizes, not 2 arguments"):
        launch(x, x)
    with pytest.raises(TypeError, match="takes 2 tensors"):
        launch(x, x, n=3)
    for wrong in ((x, 3, 3), (x, x, x), (x, x, 1 << 80)):
        with pytest.raises((TypeError, OverflowError)):
            launch(*wrong)


def test_missing_kernels_are_compiled_in_one_file_per_core(tmp_path: Path):
    kernels, files = counted("kernel_compiles"), counted("file_compiles")
    launchers = load_kernels([with_a_helper(at) for at in range(9)], tmp_path)
    assert counted("kernel_compiles") - kernels == 9
    assert counted("file_compiles") - files <= len(os.sched_getaffinity(0))
    x, y = torch.arange(5.0), torch.empty(5)
    for at in range(9):  # every kernel calls its own helper
        launchers[f"plus_{at}"](y, x, 5)
        assert torch.equal(y, x + at)


def test_the_library_of_several_kernels_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp_launch.os, "sched_getaffinity", lambda _: range(2))
    load_kernels([with_a_helper(at) for at in range(9)], tmp_path)
    assert sum("launchers" not in library.parts for library in tmp_path.rglob("*.so")) == 2


def test_kernels_whose_file_is_gone_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp_launch.os, "sched_getaffinity", lambda _: range(2))
    load_kernels([with_a_helper(at) for at in range(9)], tmp_path)
    shutil.rmtree(tmp_path / "files")
    x, y = torch.arange(5.0), torch.empty(5)
    load_kernels([with_a_helper(3)], tmp_path)["plus_3"](y, x, 5)
    assert torch.equal(y, x + 3)


def test_a_comment_that_ends_with_a_backslash_does_not_hide_the_next_line(tmp_path: Path):
    one = 'extern "C" void one(long* out0, long threads) { *out0 = ONE; }\n'
    kernel = CppKernel("one", one, 1, 0, "return x + 1, \\\nand so on \\ ", prelude="#define ONE 1\n")
    out = torch.zeros(1, dtype=torch.int64)
    load_kernels([kernel], tmp_path)["one"](out)
    assert out.item() == 1


def test_the_kernel_at_fault_is_named_among_others(tmp_path: Path):
    broken = CppKernel("broken", 'extern "C" void broken(long threads) { wrong(); }\n', 0, 0, "from layer 7")
    with pytest.raises(ToolchainError, match=r"broken\.cpp"):
        load_kernels([broken, *(with_a_helper(at) for at in range(5))], tmp_path)


def with_a_helper(addend: int) -> CppKernel:
    """Return a kernel whose source also defines a function that other kernels define differently."""
    text = f"static float part(float x) {{ return x + {addend}; }}\n"
    text += f'extern "C" void plus_{addend}(float* y, const float* x, long n, long threads) {{\n'
    text += "  for (long i = 0; i < n; ++i) y[i] = part(x[i]);\n}\n"
    return CppKernel(f"plus_{addend}", text, tensors=2, sizes=1)


def test_provenance_is_not_part_of_a_kernel(tmp_path: Path):
    load_kernels([kernel(comment="layer 0")], tmp_path)
    compiles = counted("kernel_compiles")
    load_kernels([kernel(comment="layer 1")], tmp_path)
    assert counted("kernel_compiles") == compiles


RANK = """
import sys
from pathlib import Path
import torch
from overlapc.runtime.counters import counted
from tests.runtime.test_cpp_launch import kernel, load_kernels
launchers = load_kernels([kernel(factor) for factor in (5, 6, 7)], Path(sys.argv[1]))
y = torch.empty(3)
launchers["times_7"](y, torch.ones(3), 3)
print(counted("kernel_compiles"), y.tolist())
"""


def test_ranks_that_start_together_compile_each_kernel_once(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    compiles = 0
    try:
        for rank in ranks:
            stdout, stderr = rank.communicate(timeout=120)
            assert rank.returncode == 0, stderr
            count, values = stdout.split(" ", 1)
            compiles += int(count)
            assert values.strip() == "[7.0, 7.0, 7.0]"
    finally:
        for rank in ranks:
            rank.kill()
    assert compiles == 3


def test_one_openmp_runtime_is_loaded(tmp_path: Path):
    """It must be torch's: a second runtime would have a second pool of threads."""
    load_kernels([kernel(8)], tmp_path)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "gomp" in line}
    assert len(loaded) == 1, loaded


def test_no_compiler_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler found \(tried g\+\+, clang\+\+\); install g\+\+"):
        find_compiler()


def test_cxx_names_the_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="tried no-such-compiler"):
        find_compiler()
    monkeypatch.setenv("CXX", "g++ -DEXTRA")
    assert find_compiler().command[1:] == ("-DEXTRA",)


def test_a_program_that_is_no_compiler_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ToolchainError, match="false does not run as a C"):
        find_compiler()


def test_a_source_that_does_not_compile_is_stored_and_named(tmp_path: Path):
    broken = CppKernel("broken", 'extern "C" void broken(long threads) { wrong(); }\n', 0, 0, "from layer 7")
    with pytest.raises(ToolchainError) as caught:
        load_kernels([broken], tmp_path)
    message = str(caught.value)
    assert "'wrong' was not declared" in message.replace("‘", "'").replace("’", "'")
    assert "command: " in message
    kept = tmp_path / "kernels" / "failed" / "broken.cpp"
    assert str(kept) in message
    assert kept.read_text().startswith("// from layer 7\n")


def test_another_compiler_or_flag_is_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load_kernels([kernel(9)], tmp_path)
    compiles = counted("kernel_compiles")
    monkeypatch.setenv("CXX", "g++ -fno-inline")
    load_kernels([kernel(9)], tmp_path)
    assert counted("kernel_compiles") == compiles + 1
