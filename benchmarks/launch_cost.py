"""Measure the host time of one kernel launch: a bare `cuLaunchKernel` loop in C, ours (from Python and C), Inductor's.

    python benchmarks/launch_cost.py                 # one GPU

Every line launches a tiny element-wise kernel, in bursts shorter than the driver's queue, so that the host never waits
for the device; *best* and *median* are over many bursts. *bare* is the time of the driver itself, with prepared
arguments. The last lines are whole compiled forwards without gradients, which include the wrapper around the launch.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from overlapc.codegen.triton import TritonGenerator
from overlapc.ir.body import Body, Load, Loop, Store, op

BURST = 200  # launches in a row; the queue holds 1024
ROWS = 50
COUNT = 1024  # elements

_C_LOOP = """
extern "C" int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                              void**, void**);
extern "C" int burst(void* function, unsigned threads, unsigned shared, void* stream, void** arguments, int times) {
  int error = 0;
  for (int i = 0; i < times && !error; ++i)
    error = cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, shared, stream, arguments, 0);
  return error;
}
"""


def main() -> None:
    cache = Path(tempfile.mkdtemp(prefix="launch_cost"))
    x = torch.randn(COUNT, device="cuda")
    out = torch.empty_like(x)
    launcher, arguments = ours(cache, x, out)
    rows: list[tuple[str, Callable[[], Any], int]] = [("ours, through torch", lambda: launcher(*arguments), 1)]
    rows.insert(0, ("bare driver launch, in C", bare(cache, launcher, arguments), BURST))
    if launcher.direct is not None:
        rows.append(("ours, from C", lambda: launcher.direct(*arguments), 1))
    rows.append(("Inductor's launcher", inductors(x), 1))
    rows.append(("ours, whole compiled call", compiled("overlapc", x, cache), 1))
    rows.append(("Inductor, whole compiled call", compiled("inductor", x, cache), 1))
    times = {name: microseconds(call, launches) for name, call, launches in rows}
    floor = times["bare driver launch, in C"]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {COUNT} elements")
    table = [[name, best, median, best - floor[0]] for name, (best, median) in times.items()]
    print(tabulate(table, ["launch", "best us", "median us", "over bare us"], floatfmt=".2f"))


def microseconds(call: Callable[[], Any], launches: int) -> tuple[float, float]:
    """Return the (best, median) host time of one launch in microseconds; `call` makes `launches` of them."""
    seen = []
    for _ in range(ROWS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(BURST // launches):
            call()
        seen.append((time.perf_counter() - began) / BURST * 1e6)
    torch.cuda.synchronize()
    return min(seen), statistics.median(seen)


def ours(cache: Path, x: torch.Tensor, out: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """Return our launcher of `out = exp(x)` and its arguments."""
    import sympy

    p0 = sympy.Symbol("p0", integer=True, nonnegative=True)
    body = Body((Loop(p0, sympy.Integer(COUNT)),), (), (Store("out", p0, op("exp", Load("x", p0, x.dtype)), x.dtype),))
    generator = TritonGenerator()
    source = generator.generate(body, "exp")
    launcher = generator.load([source], cache)[source.name]
    return launcher, [{"x": x, "out": out}[name] for name in source.buffers]


def bare(cache: Path, launcher: Any, arguments: list[torch.Tensor]) -> Callable[[], Any]:
    """Return a call that launches the same compiled kernel BURST times, by a C loop over `cuLaunchKernel`."""
    source, library = cache / "burst.cpp", cache / "burst.so"
    source.write_text(_C_LOOP)
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", library, source, "-l:libcuda.so.1"], check=True)
    function = ctypes.CDLL(str(library)).burst
    ((stage,),) = launcher._loaded.values()
    # Triton 3.6 kernels take two more pointers, to scratch memory that this one does not use.
    values = [ctypes.c_void_p(tensor.data_ptr()) for tensor in arguments] + [ctypes.c_void_p(0)] * 2
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    handle, stream = ctypes.c_void_p(stage.function), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    threads, shared = 32 * stage.binary.warps, stage.binary.shared_bytes

    def burst() -> None:
        error = function(handle, threads, shared, stream, pointers, BURST)
        assert error == 0, f"cuLaunchKernel failed with {error} for {len(values)} arguments"

    return burst


def inductors(x: torch.Tensor) -> Callable[[], Any]:
    """Return the call that Inductor's generated wrapper makes for the same kernel."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    run = CachingAutotuner.run

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((self, args, kwargs))
        return run(self, *args, **kwargs)

    CachingAutotuner.run = spy
    try:
        torch.compile(torch.exp)(x)
    finally:
        CachingAutotuner.run = run
    kernel, args, kwargs = seen[-1]
    return lambda: kernel.run(*args, **kwargs)


def compiled(backend: str, x: torch.Tensor, cache: Path) -> Callable[[], Any]:
    """Return a whole call of a compiled function with one kernel, guards included."""
    torch._dynamo.reset()
    function = torch.compile(torch.exp, backend=backend)
    function(x)
    return lambda: function(x)


if __name__ == "__main__":
    main()
