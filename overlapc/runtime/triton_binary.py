"""The disk cache of compiled variants of generated Triton kernels.

An entry is a cubin and a line of facts about it; the launching process loads it without importing Triton
(`triton_launch`). The key has the same parts as that of Triton's own cache: the text of the kernel and of the prelude,
types, constants, options, target, Triton's version and the environment variables that change what it generates.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from overlapc.errors import OverlapcError, ToolchainError
from overlapc.runtime import triton_workers
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.triton_compile import REVISION, Binary, Specification, compile_now
from overlapc.runtime.triton_kernel import ELEMENT, Source, Stage, Variant, launch_of

Target = tuple[str, int, int]  # backend, architecture, threads per warp

_POINTER = {dtype: pointer for pointer, dtype in ELEMENT.items()}


def triton_module() -> ModuleType:
    """Import and return Triton; raise ToolchainError if it is not installed."""
    try:
        import triton
    except ImportError as error:
        raise ToolchainError(f"CUDA kernels need Triton ({error}); pip install 'triton>=3.6'") from error
    return triton


@dataclass(frozen=True)
class CubinRequest:
    """A request for the cubin of one stage of a kernel in one variant."""

    source: Source
    stage: Stage
    what: Specification
    key: str

    def find(self, cache_dir: Path) -> tuple[Binary, Path] | None:
        """Return (launch facts, path of the cubin) from the cache; None if it has no complete entry."""
        cubin = _entries(cache_dir).find(self.key, ".cubin")
        text = _entries(cache_dir).read(self.key, ".json")
        return None if cubin is None or text is None else (Binary.parse(text.decode()), cubin)

    def keep(self, binary: Binary, cubin: bytes, cache_dir: Path) -> tuple[Binary, Path]:
        """Write the entry to the cache and return what `find` does."""
        path = _entries(cache_dir).put(self.key, ".cubin", cubin)
        _entries(cache_dir).put(self.key, ".json", binary.text())
        return binary, path

    def specification(self, cache_dir: Path) -> Specification:
        """Write the source's module and return what to compile, with the path used (see `KernelCache`)."""
        return replace(self.what, path=str(write_module(self.source, cache_dir)))

    def obtain(self, cache_dir: Path) -> tuple[Binary, Path]:
        """Return the entry, compiled in this process if it is missing; ToolchainError if Triton rejects the kernel."""
        found = self.find(cache_dir)
        if found is not None:
            return found
        what = self.specification(cache_dir)
        with explained(self.source, self.stage.function, what.path):
            compiled = compile_now(what)
        return self.keep(Binary.of(compiled), compiled.asm["cubin"], cache_dir)


def wanted(source: Source, stage: Stage, variant: Variant, target: Target, cache_dir: Path) -> CubinRequest:
    """Return the request for a stage of a source in a variant. Writes no files and does not compile."""
    launch = launch_of(source)
    pointers = [*launch.pointers, *(_POINTER[dtype] for dtype, _ in launch.scratch)]
    constants: dict[str, int | str] = dict(launch.constants)
    if launch.index_bounds is not None:
        constants["INDEX"] = "int64" if variant.wide else "int32"
    multiples = [at for at in range(len(pointers)) if variant.aligned >> at & 1]
    multiples += [len(pointers) + at for at in range(len(source.sizes)) if variant.divisible >> at & 1]
    what = Specification(
        path=str(_modules(cache_dir).path(_module_key(source), ".py")),
        function=stage.function,
        types=(*pointers, *("i64" for _ in source.sizes)),
        constants=constants,
        multiples=tuple(multiples),
        options=stage_options(source, stage),
        target=target,
    )
    return CubinRequest(source, stage, what, content_key(_toolchain(), source.text, what.identity()))


def stage_options(source: Source, stage: Stage) -> dict[str, Any]:
    """Return Triton's compile options for a stage."""
    # No fusion: LLVM and ptxas would contract a product and a sum into one rounding where they are adjacent, which
    # differs between kernels. Code that needs a single rounding asks for it (`ops.fma`, libdevice's functions).
    # Nor do libdevice's functions take subnormal numbers for 0, which Triton makes them do: eager's do not.
    options: dict[str, Any] = {"num_warps": stage.num_warps, "enable_fp_fusion": False, "enable_reflect_ftz": False}
    if stage.num_stages:
        options["num_stages"] = stage.num_stages
    if "tl.device_assert(" in source.text:
        # Without `debug` Triton drops assertions. It also checks for integer overflow, which our kernels allow.
        options |= {"debug": True, "sanitize_overflow": False}
    return options


_in_background: list[threading.Thread] = []


def compile_in_background(requests: Callable[[], Mapping[str, CubinRequest]], cache_dir: Path) -> None:
    """Call `compile_ahead` in another thread; the next `compile_ahead` waits for it."""

    def run() -> None:
        with suppress(OverlapcError, OSError):  # what is missing is compiled again, which reports the error
            _compile_missing(requests(), cache_dir)

    thread = threading.Thread(target=run, name="overlapc-compile-ahead")
    _in_background.append(thread)
    thread.start()


def compile_ahead(each: Mapping[str, CubinRequest], cache_dir: Path) -> None:
    """Compile the requests (by key) that are not cached, in workers; `CubinRequest.obtain` later reports failures."""
    while _in_background:
        _in_background.pop().join()
    _compile_missing(each, cache_dir)


def _compile_missing(each: Mapping[str, CubinRequest], cache_dir: Path) -> None:
    missing = [item for item in each.values() if item.find(cache_dir) is None]
    if not triton_workers.worth_it(len(missing)):
        return
    answers = triton_workers.compile_all([item.specification(cache_dir) for item in missing])
    for item, answer in zip(missing, answers, strict=True):
        if answer is not None:
            item.keep(*answer, cache_dir)


def write_module(source: Source, cache_dir: Path) -> Path:
    """Write a source's text to a file, headed by its origin, and return the path."""
    # The heading is one line whatever the comment: Triton's own cache hashes the line that a function starts at.
    heading = " | ".join(line.strip() for line in source.comment.splitlines() if line.strip())
    text = f"# {heading or source.name}\n{source.text}"
    return _modules(cache_dir).put(_module_key(source), ".py", text)


@contextmanager
def explained(source: Source, function: str, path: Path | str) -> Iterator[None]:
    """Convert errors of Triton and ptxas inside the block to a ToolchainError that names the kernel and its file."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        yield
    except (CompilationError, OutOfResources, PTXASError, RuntimeError) as error:  # passes of Triton raise RuntimeError
        raise refused(source, function, path, _root_cause(error)) from error


def refused(source: Source, function: str, path: Path | str, reason: str) -> ToolchainError:
    """Return the error for a kernel that cannot be compiled or loaded."""
    return ToolchainError(
        f"Triton refused {function} of {source.name}: {reason}\n"
        f"  source: {path}\n"
        "hint: native=False runs the graph without generated kernels"
    )


def _root_cause(error: BaseException) -> str:
    """Return the last line of the innermost error: Triton wraps an error once per call of a helper."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return lines[-1] if lines else type(error).__name__


@cache
def _toolchain() -> str:
    """Return a hash of what turns a source into a cubin: Triton, our changes to it, its settings, the prelude."""
    triton = triton_module()
    from triton._C.libtriton import get_cache_invalidating_env_vars

    prelude = Path(__file__).with_name("triton_prelude.py").read_text(encoding="utf-8")
    settings = sorted({"ptxas": os.environ.get("TRITON_PTXAS_PATH", ""), **get_cache_invalidating_env_vars()}.items())
    return content_key(triton.__version__, str(REVISION), prelude, repr(settings))


def _module_key(source: Source) -> str:
    return content_key("triton", source.name, source.text)


@cache
def _modules(root: Path) -> KernelCache:
    return KernelCache(root)


@cache
def _entries(root: Path) -> KernelCache:
    return KernelCache(root, "triton_kernels")
