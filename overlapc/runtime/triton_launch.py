"""Loads generated Triton kernels and launches them at low cost for the host.

A kernel is compiled once per variant: which pointers are aligned to 16 bytes, which sizes are multiples of 16, and
how wide indices must be. A launch then calls the compiled kernel directly, past Triton's own per-call inspection of
arguments. Without a GPU the same modules run in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from overlapc.errors import ToolchainError
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.counters import count
from overlapc.runtime.native_launcher import launcher_type
from overlapc.runtime.support import empty_cuda
from overlapc.runtime.triton_compile import Specification, compile_now, load_module
from overlapc.runtime.triton_workers import compile_ahead

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


@dataclass(frozen=True, slots=True)
class Stage:
    """One `@triton.jit` function of a kernel; stages run in order on one stream and take the same arguments."""

    function: str
    programs: sympy.Expr  # grid size, from the kernel's size symbols
    num_warps: int
    num_stages: int = 0  # loads in flight in a pipelined loop; 0: Triton's default


@dataclass(frozen=True, slots=True)
class Launch:
    """How to launch a generated kernel."""

    stages: tuple[Stage, ...]
    pointers: tuple[str, ...]  # Triton types of the buffers, in order: "*bf16"
    scratch: tuple[tuple[torch.dtype, sympy.Expr], ...]  # dtype and elements of buffers between stages
    constants: tuple[tuple[str, int], ...]  # block sizes; also the defaults in the source
    index_bounds: tuple[sympy.Expr, ...] | None  # largest indices; beyond int32 the launch passes INDEX=tl.int64
    hints: tuple[int, ...] = ()  # likely values of the sizes, in order: which variant to compile ahead

    def identity(self) -> str:
        """What tells two kernels of equal text apart."""
        stages = [(stage.function, str(stage.programs), stage.num_warps, stage.num_stages) for stage in self.stages]
        return repr((stages, self.pointers, [(str(dtype), str(size)) for dtype, size in self.scratch], self.constants))

    @property
    def scratch_bytes(self) -> sympy.Expr:
        """Memory that a launch allocates for itself."""
        return sympy.Add(*(dtype.itemsize * elements for dtype, elements in self.scratch))


class Source(Protocol):
    """What is needed of a `KernelSource`."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def comment(self) -> str: ...
    @property
    def buffers(self) -> tuple[str, ...]: ...
    @property
    def sizes(self) -> tuple[sympy.Symbol, ...]: ...
    @property
    def launch(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Variant:
    """What a compiled kernel may assume of its arguments; bit i is about pointer or size i."""

    aligned: int  # pointers that are multiples of 16 bytes
    divisible: int  # sizes that are multiples of 16
    wide: bool  # indices need int64


_SCRATCH_POINTER = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64"}
_SCRATCH_POINTER |= {torch.int8: "*i8", torch.int16: "*i16", torch.uint8: "*u8"}
_INT32_LIMIT = 2**31 - 2**20


def load_kernels(sources: Sequence[Source], cache_dir: Path) -> Mapping[str, Callable[..., None]]:
    """A launcher per source name, for the current CUDA device or Triton's interpreter; compiles what is missing.

    A launcher takes one tensor per buffer, then one int per size. ToolchainError names the kernel and the file with
    its source when Triton is missing or refuses it.
    """
    triton = _triton()
    paths = {source.name: write_module(source, cache_dir) for source in sources}
    if triton.knobs.runtime.interpret:
        from overlapc.runtime import triton_interpreter

        return {
            source.name: InterpretedLauncher(source, triton_interpreter.load_module(paths[source.name], source.name))
            for source in sources
        }
    if not torch.cuda.is_available():
        raise ToolchainError(
            "Triton kernels need a CUDA device, and none is visible; TRITON_INTERPRET=1 runs them on CPU tensors"
        )
    from triton.runtime.driver import driver

    device = torch.cuda.current_device()
    with _triton_cache(cache_dir):  # asking for the first time builds Triton's helper library
        target = driver.active.get_current_target()
    launchers = {source.name: CudaLauncher(source, cache_dir, target) for source in sources}
    compile_ahead([each for launcher in launchers.values() for each in launcher.usual()], cache_dir)

    def prepare(launcher: CudaLauncher) -> None:
        torch.cuda.set_device(device)  # a thread starts on device 0
        launcher.prepare(device)

    with _triton_cache(cache_dir), ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(prepare, launchers.values()))
    return launchers


def compile_source(source: Source, cache_dir: Path, capability: int = 90) -> list[Any]:
    """Compiled kernels (`.asm["cubin"]`, `.metadata`) of every stage for an NVIDIA architecture; needs no GPU."""
    _triton()
    from triton.backends.compiler import GPUTarget

    variant = _usual_variant(source)
    target = GPUTarget("cuda", capability, 32)
    return [_compile(source, stage, variant, target, cache_dir) for stage in _launch(source).stages]


def write_module(source: Source, cache_dir: Path) -> Path:
    """The file with a source's text, headed by where it came from."""
    # One line whatever the comment: Triton's own cache hashes the line a function starts at.
    heading = " | ".join(line.strip() for line in source.comment.splitlines() if line.strip())
    text = f"# {heading or source.name}\n{source.text}"
    key = content_key("triton", source.name, source.text)
    return KernelCache(cache_dir).get_or_build(key, ".py", lambda path: _write(path, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _launch(source: Source) -> Launch:
    launch = source.launch
    assert isinstance(launch, Launch)
    return launch


def _triton() -> ModuleType:
    try:
        import triton
    except ImportError as error:
        raise ToolchainError(f"CUDA kernels need Triton ({error}); pip install 'triton>=3.6'") from error
    return triton


@contextmanager
def _triton_cache(cache_dir: Path) -> Iterator[None]:
    """Triton keeps its files under our cache folder meanwhile; its writes are atomic."""
    triton = _triton()
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(Path(cache_dir) / "triton")
        yield


def _usual_variant(source: Source) -> Variant:
    """Aligned pointers and sizes as hinted: what a launch will most likely need."""
    launch = _launch(source)
    hints = launch.hints or (1,) * len(source.sizes)
    bounds = [host_function(bound, source.sizes) for bound in launch.index_bounds or ()]
    return variant_of(0, len(source.buffers) + len(launch.scratch), hints, bounds)


def variant_of(misaligned: int, pointers: int, sizes: Sequence[int], bounds: Sequence[Callable[..., int]]) -> Variant:
    """`misaligned` has bit i set where pointer i is not a multiple of 16 bytes."""
    divisible = sum(1 << at for at, size in enumerate(sizes) if not size & 15)
    wide = any(bound(*sizes) >= _INT32_LIMIT for bound in bounds)
    return Variant(((1 << pointers) - 1) & ~misaligned, divisible, wide)


# What depends on Triton's version


def specification(source: Source, stage: Stage, variant: Variant, target: GPUTarget, cache_dir: Path) -> Specification:
    """What to compile of a source for a variant."""
    launch = _launch(source)
    path = write_module(source, cache_dir)
    names = getattr(load_module(path), stage.function).arg_names
    pointers = [*launch.pointers, *(_SCRATCH_POINTER[dtype] for dtype, _ in launch.scratch)]
    signature = dict(zip(names, [*pointers, *("i64" for _ in source.sizes)], strict=False))
    constants: dict[str, int | str] = dict(launch.constants)
    if launch.index_bounds is not None:
        constants["INDEX"] = "int64" if variant.wide else "int32"
    signature.update(dict.fromkeys(constants, "constexpr"))
    multiples = [at for at in range(len(pointers)) if variant.aligned >> at & 1]
    multiples += [len(pointers) + at for at in range(len(source.sizes)) if variant.divisible >> at & 1]
    return Specification(
        path=str(path),
        function=stage.function,
        signature=signature,
        constants=constants,
        multiples=tuple(multiples),
        options=stage_options(source, stage),
        target=(target.backend, target.arch, target.warp_size),
        cache=str(Path(cache_dir) / "triton"),
    )


def stage_options(source: Source, stage: Stage) -> dict[str, Any]:
    """What Triton is told about a stage beside its arguments."""
    options: dict[str, Any] = {"num_warps": stage.num_warps}
    if stage.num_stages:
        options["num_stages"] = stage.num_stages
    if "tl.device_assert(" in source.text:
        # Triton drops assertions otherwise; with them come checks that integers do not wrap, which ours may.
        options |= {"debug": True, "sanitize_overflow": False}
    return options


def _compile(source: Source, stage: Stage, variant: Variant, target: GPUTarget, cache_dir: Path) -> Any:
    what = specification(source, stage, variant, target, cache_dir)
    with _explained(source, stage.function, what.path):
        compiled = compile_now(what)
    count("triton_kernels_loaded")
    return compiled


@contextmanager
def _explained(source: Source, function: str, path: Path | str) -> Iterator[None]:
    """What Triton or ptxas refuses becomes a ToolchainError that names the kernel and its file."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        yield
    except (CompilationError, OutOfResources, PTXASError) as error:
        raise ToolchainError(
            f"Triton refused {function} of {source.name}: {_root_cause(error)}\n"
            f"  source: {path}\n"
            "hint: native=False runs the graph without generated kernels"
        ) from error


def _root_cause(error: BaseException) -> str:
    """Last line of the innermost error: Triton wraps one around it per call of a helper."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return lines[-1] if lines else type(error).__name__


def _runner(compiled: Any, constants: int) -> Callable[..., None]:
    """`run(programs, stream, *arguments)` for a compiled kernel, loaded onto the current device.

    Triton 3.6: `compiled.run(x, y, z, stream, function, packed metadata, launch metadata, two hooks, *arguments)`, in
    which a constexpr still takes a place that is ignored. Where it needs no scratch memory of its own, that only
    forwards to its extension module's `launch`, which we then call without the detour.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    ignored = (None,) * constants
    plain = not getattr(run, "global_scratch_size", 1) and not getattr(run, "profile_scratch_size", 1)
    if plain and hasattr(run, "launch") and hasattr(run, "launch_pdl"):
        direct, cooperative, dependent = run.launch, run.launch_cooperative_grid, run.launch_pdl

        def launch(programs: int, stream: int, *arguments: int) -> None:
            direct(
                programs, 1, 1, stream, function, cooperative, dependent, None, None, packed, None, None, None,
                *arguments, *ignored,
            )  # fmt: skip

    else:

        def launch(programs: int, stream: int, *arguments: int) -> None:
            run(programs, 1, 1, stream, function, packed, None, None, None, *arguments, *ignored)

    return launch


_WARP = 32  # threads


def _launches_plainly(compiled: Any) -> bool:
    """Whether a loaded kernel needs a grid, a block and its arguments, and nothing else (Triton 3.6)."""
    metadata = compiled.metadata
    special = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    return all(getattr(metadata, name, True) in (0, False) for name in special) and metadata.num_ctas == 1


# Launchers


def host_function(expr: sympy.Expr, sizes: Sequence[sympy.Symbol]) -> Callable[..., int]:
    """`expr` as a Python function of the sizes, in order."""
    if expr.is_Integer:
        number = int(expr)
        return lambda *_: number
    text = f"lambda {', '.join(str(size) for size in sizes)}: {PythonPrinter().doprint(expr)}"
    return eval(text, {"math": __import__("math")})


class CudaLauncher:
    """Launches one kernel on the current device and stream; `launcher(*tensors, *sizes)`.

    `direct` does the same at less cost for the host, where it is not None: for fixed sizes, once prepared.
    """

    def __init__(self, source: Source, cache_dir: Path, target: GPUTarget) -> None:
        launch = _launch(source)
        self._source = source
        self._cache_dir = cache_dir
        self._target = target  # every device of a job is taken to be of one kind
        module = load_module(write_module(source, cache_dir))
        self.functions = [getattr(module, stage.function) for stage in launch.stages]
        self._programs = [host_function(stage.programs, source.sizes) for stage in launch.stages]
        self._scratch = [(dtype, host_function(size, source.sizes)) for dtype, size in launch.scratch]
        self._bounds = [host_function(bound, source.sizes) for bound in launch.index_bounds or ()]
        self._constants = len(launch.constants) + (launch.index_bounds is not None)
        self._buffers = len(source.buffers)
        self._usual = _usual_variant(source)
        self._compiled: dict[tuple[int, Variant], list[Any]] = {}  # a loaded kernel belongs to one device
        self._runs: dict[tuple[int, Variant], list[Callable[..., None]]] = {}
        # Neither sizes nor scratch: for these a launch is a check of alignment and one call a stage.
        self._simple = not source.sizes and not launch.scratch
        self._ready: dict[int, list[tuple[Callable[..., None], int]]] = {}
        self.direct: Callable[..., Any] | None = None

    def usual(self) -> list[Specification]:
        """What `prepare` will compile."""
        stages = _launch(self._source).stages
        return [specification(self._source, stage, self._usual, self._target, self._cache_dir) for stage in stages]

    def prepare(self, device: int) -> None:
        """Compiles the usual variant and loads it onto the current device, whose number is `device`."""
        runs = self._load(device, self._usual)
        if self._simple:
            self._ready[device] = [
                (run, programs()) for run, programs in zip(runs, self._programs, strict=True) if programs() > 0
            ]
        if not self._source.sizes:
            self.direct = self._native(device)

    def _native(self, device: int) -> Callable[..., Any] | None:
        """The usual variant in one call of C, which comes back here for any other; None where that cannot be."""
        make = launcher_type(self._cache_dir)
        kernels = self._compiled[device, self._usual]
        if make is None or not all(_launches_plainly(kernel) for kernel in kernels):
            return None
        return make(
            name=self._source.name,
            stages=tuple(
                (kernel.function, programs(), kernel.metadata.num_warps * _WARP, kernel.metadata.shared)
                for kernel, programs in zip(kernels, self._programs, strict=True)
            ),
            pointers=self._buffers,
            scratch=tuple(((elements(),), (1,), dtype) for dtype, elements in self._scratch),
            empty=empty_cuda,
            data_ptr=torch.Tensor.data_ptr,
            stream_of=torch._C._cuda_getCurrentRawStream,
            device=device,
            otherwise=self,
        )

    def __call__(self, *arguments: Any) -> None:
        device = torch._C._cuda_getDevice()
        stream = torch._C._cuda_getCurrentRawStream(device)
        pointers = [tensor.data_ptr() for tensor in arguments[: self._buffers]]
        ready = self._ready.get(device)
        if ready is not None:
            every = 0
            for pointer in pointers:
                every |= pointer
            if not every & 15:
                for run, programs in ready:
                    run(programs, stream, *pointers)
                return
        self._launch_any(device, stream, pointers, arguments[self._buffers :])

    def _launch_any(self, device: int, stream: int, pointers: list[int], sizes: tuple[int, ...]) -> None:
        """With sizes, scratch memory, pointers that are not aligned, or on a device for the first time."""
        scratch = [
            torch.empty(elements(*sizes), dtype=dtype, device=f"cuda:{device}") for dtype, elements in self._scratch
        ]
        pointers = [*pointers, *(tensor.data_ptr() for tensor in scratch)]
        misaligned = sum(1 << at for at, pointer in enumerate(pointers) if pointer & 15)
        variant = variant_of(misaligned, len(pointers), sizes, self._bounds)
        runs = self._runs.get((device, variant)) or self._load_under_cache(device, variant)
        for run, count_of in zip(runs, self._programs, strict=True):
            programs = count_of(*sizes)
            if programs > 0:
                run(programs, stream, *pointers, *sizes)
        # The allocator gives freed scratch only to later work of the same stream, so it may go out of scope here.

    @property
    def spills(self) -> int:
        """Registers that the loaded kernels keep in memory, for want of room."""
        return sum(getattr(kernel, "n_spills", None) or 0 for kernels in self._compiled.values() for kernel in kernels)

    def _load_under_cache(self, device: int, variant: Variant) -> list[Callable[..., None]]:
        with _triton_cache(self._cache_dir):
            return self._load(device, variant)

    def _load(self, device: int, variant: Variant) -> list[Callable[..., None]]:
        stages = _launch(self._source).stages
        kernels = [_compile(self._source, stage, variant, self._target, self._cache_dir) for stage in stages]
        runs = []
        for stage, compiled in zip(stages, kernels, strict=True):
            # Too much shared memory shows only here.
            with _explained(self._source, stage.function, write_module(self._source, self._cache_dir)):
                runs.append(_runner(compiled, self._constants))
        self._compiled[device, variant] = kernels
        self._runs[device, variant] = runs
        return runs


class InterpretedLauncher:
    """Runs one kernel in Triton's interpreter, on CPU tensors."""

    def __init__(self, source: Source, module: ModuleType) -> None:
        self._source = source
        self._launch = _launch(source)
        self.functions = [getattr(module, stage.function) for stage in self._launch.stages]

    def __call__(self, *arguments: Any) -> None:
        import numpy as np
        import triton.language as tl

        buffers = len(self._source.buffers)
        tensors = [_as_bytes(tensor) for tensor in arguments[:buffers]]
        sizes = arguments[buffers:]
        scratch = [
            torch.empty(host_function(elements, self._source.sizes)(*sizes), dtype=dtype)
            for dtype, elements in self._launch.scratch
        ]
        extra: dict[str, Any] = {}
        if self._launch.index_bounds is not None:
            extra["INDEX"] = tl.int32
        for function, stage in zip(self.functions, self._launch.stages, strict=True):
            programs = host_function(stage.programs, self._source.sizes)(*sizes)
            with np.errstate(all="ignore"):  # masked lanes compute on nothing
                function[(programs,)](*tensors, *scratch, *sizes, **extra)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
