"""Load generated Triton kernels and launch them at low host cost.

A launch calls the driver directly: by one call into C if there is a C compiler (`native_launcher`), otherwise through
the launcher that is built into torch. Without a GPU the same modules run in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from overlapc.errors import ToolchainError
from overlapc.runtime.counters import count
from overlapc.runtime.native_launcher import launcher_type
from overlapc.runtime.support import empty_cuda
from overlapc.runtime.triton_binary import (
    CubinRequest,
    Target,
    compile_ahead,
    compile_in_background,
    refused,
    triton_module,
    wanted,
    write_module,
)
from overlapc.runtime.triton_compile import Binary, load_module
from overlapc.runtime.triton_kernel import Source, Variant, host_function, launch_of, usual_variant, variant_of

Run = Callable[[int, int, Sequence[int]], None]  # programs, stream, arguments

_WARP = 32  # threads per warp


def compile_sources(sources: Sequence[Source], cache_dir: Path) -> None:
    """Start to compile the usual variant of each source for the current device; `load_kernels` then finds it cached."""
    if triton_module().knobs.runtime.interpret or not torch.cuda.is_available():
        return
    target = _target()

    def requests() -> dict[str, CubinRequest]:
        wanted_now = [
            wanted(source, stage, usual_variant(source), target, cache_dir)
            for source in sources
            for stage in launch_of(source).stages
        ]
        return {each.key: each for each in wanted_now}

    compile_in_background(requests, cache_dir)


def _target() -> Target:
    major, minor = torch.cuda.get_device_capability()
    return "cuda", 10 * major + minor, 32


def load_kernels(sources: Sequence[Source], cache_dir: Path) -> Mapping[str, Callable[..., None]]:
    """Return a launcher per source name, for the current CUDA device or Triton's interpreter.

    Compiles kernels that are not cached. A launcher takes one tensor per buffer, then one int per size. Raises
    ToolchainError if Triton is missing, or, with the kernel and the file of its source, if Triton rejects a kernel.
    """
    if triton_module().knobs.runtime.interpret:
        from overlapc.runtime.triton_interpreter import InterpretedLauncher

        return {source.name: InterpretedLauncher(source, write_module(source, cache_dir)) for source in sources}
    if not torch.cuda.is_available():
        raise ToolchainError(
            "Triton kernels need a CUDA device, and none is visible; TRITON_INTERPRET=1 runs them on CPU tensors"
        )
    target = _target()
    launchers = {source.name: CudaLauncher(source, cache_dir, target) for source in sources}
    compile_ahead({each.key: each for launcher in launchers.values() for each in launcher.usual()}, cache_dir)
    for launcher in launchers.values():
        launcher.prepare(torch.cuda.current_device())
    return launchers


@dataclass(frozen=True)
class Loaded:
    """A compiled stage on a device."""

    run: Run
    function: int  # the driver's handle
    binary: Binary
    spills: int  # number of spilled registers


def loaded(item: CubinRequest, binary: Binary, cubin: Path, device: int) -> Loaded:
    """Load a compiled stage onto `device`; raise ToolchainError if the driver rejects it.

    torch 2.11 to 2.13: `_load_kernel` returns the function, its registers and its spills; newer versions return the
    module before these.
    """
    launcher = torch._C._StaticCudaLauncher
    try:
        *_, function, _, spills = launcher._load_kernel(str(cubin), binary.entry, binary.shared_bytes, device)
    except RuntimeError as error:  # too much shared memory is reported only here
        raise refused(item.source, item.stage.function, item.what.path, str(error)) from error
    count("triton_kernels_loaded")
    launch, warps, shared = launcher._launch_kernel, binary.warps, binary.shared_bytes
    # Every argument has 8 bytes; a size may be a number below 0.
    types = "".join("K" if kind.startswith("*") else "l" for kind in item.what.types) + "K" * binary.hidden
    hidden = (0,) * binary.hidden

    def run(programs: int, stream: int, arguments: Sequence[int]) -> None:
        launch(function, programs, 1, 1, warps, shared, types, (*arguments, *hidden), stream)

    return Loaded(run, function, binary, spills)


class CudaLauncher:
    """Launches one kernel on the current device and stream; `launcher(*tensors, *sizes)`.

    `direct` does the same at lower host cost; it is None before `prepare`, and for kernels with symbolic sizes.
    """

    def __init__(self, source: Source, cache_dir: Path, target: Target) -> None:
        launch = launch_of(source)
        self._source = source
        self._cache_dir = cache_dir
        self._target = target  # all devices of a job are assumed to be of one kind
        self._programs = [host_function(stage.programs, source.sizes) for stage in launch.stages]
        self._scratch = [(dtype, host_function(size, source.sizes)) for dtype, size in launch.scratch]
        self._bounds = [host_function(bound, source.sizes) for bound in launch.index_bounds or ()]
        self._buffers = len(source.buffers)
        self._usual = usual_variant(source)
        self._loaded: dict[tuple[int, Variant], list[Loaded]] = {}
        # Without sizes and scratch memory a launch only checks alignment and makes one call per stage.
        self._simple = not source.sizes and not launch.scratch
        self._ready: dict[int, list[tuple[Run, int]]] = {}
        self.direct: Callable[..., Any] | None = None

    @property
    def functions(self) -> list[Any]:
        """The stages' Triton functions, not compiled."""
        module: ModuleType = load_module(write_module(self._source, self._cache_dir))
        return [getattr(module, stage.function) for stage in launch_of(self._source).stages]

    def usual(self) -> list[CubinRequest]:
        """Return the requests for what `prepare` will load: the usual variant of each stage."""
        return self._wanted(self._usual)

    def prepare(self, device: int) -> None:
        """Load the usual variant onto the current device, whose number is `device`; compile stages not yet cached."""
        stages = self._load(device, self._usual)
        if self._simple:
            self._ready[device] = [
                (stage.run, programs())
                for stage, programs in zip(stages, self._programs, strict=True)
                if programs() > 0
            ]
        if not self._source.sizes:
            self.direct = self._native(device, stages)

    def _native(self, device: int, stages: Sequence[Loaded]) -> Callable[..., Any] | None:
        """Return a C launcher of the usual variant, which calls this object for other variants; None without C."""
        make = launcher_type(self._cache_dir)
        if make is None:
            return None
        return make(
            name=self._source.name,
            stages=tuple(
                (stage.function, programs(), stage.binary.warps * _WARP, stage.binary.shared_bytes)
                for stage, programs in zip(stages, self._programs, strict=True)
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
                    run(programs, stream, pointers)
                return
        self._launch_any(device, stream, pointers, arguments[self._buffers :])

    def _launch_any(self, device: int, stream: int, pointers: list[int], sizes: tuple[int, ...]) -> None:
        """Launch with sizes, scratch memory or misaligned pointers, or on a device for the first time."""
        scratch = [
            torch.empty(elements(*sizes), dtype=dtype, device=f"cuda:{device}") for dtype, elements in self._scratch
        ]
        pointers = [*pointers, *(tensor.data_ptr() for tensor in scratch)]
        misaligned = sum(1 << at for at, pointer in enumerate(pointers) if pointer & 15)
        variant = variant_of(misaligned, len(pointers), sizes, self._bounds)
        stages = self._loaded.get((device, variant)) or self._load(device, variant)
        for stage, count_of in zip(stages, self._programs, strict=True):
            programs = count_of(*sizes)
            if programs > 0:
                stage.run(programs, stream, (*pointers, *sizes))
        # Scratch memory may be freed here: the allocator reuses it only for later work on the same stream.

    @property
    def spills(self) -> int:
        """The number of registers that the loaded kernels spill."""
        return sum(stage.spills for stages in self._loaded.values() for stage in stages)

    def _wanted(self, variant: Variant) -> list[CubinRequest]:
        stages = launch_of(self._source).stages
        return [wanted(self._source, stage, variant, self._target, self._cache_dir) for stage in stages]

    def _load(self, device: int, variant: Variant) -> list[Loaded]:
        stages = [loaded(item, *item.obtain(self._cache_dir), device) for item in self._wanted(variant)]
        self._loaded[device, variant] = stages
        return stages
