"""Compile one Triton function for one variant, in this process or in a worker process.

A worker is `python -m overlapc.runtime.triton_compile`: it answers each line of JSON by one line, until its input ends
or it is terminated. It needs only Triton, so this module must not import torch. The answer contains the cubin, which
the launching process stores.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from overlapc.errors import ToolchainError
from overlapc.stack_room import with_stack_room

DIVISIBILITY = 16  # bytes of a pointer, elements of a size
REVISION = 1  # of the changes that `compile_now` makes to Triton's output; part of the cache key

_PACKED_ADD = re.compile(r"^(\s*)add\.([su]16)x2\s+(%\w+), (%\w+), (%\w+);", re.MULTILINE)


@dataclass(frozen=True)
class Specification:
    """What to compile, as plain values."""

    path: str  # of the module
    function: str
    types: tuple[str, ...]  # Triton types of the parameters before the constants, in order
    constants: dict[str, int | str]  # by parameter; INDEX is "int32" or "int64"
    multiples: tuple[int, ...]  # positions of arguments that are multiples of DIVISIBILITY
    options: dict[str, Any]
    target: tuple[str, int, int]  # backend, architecture, warp size

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def identity(self) -> str:
        """Return `text` without the module's path."""
        return dataclasses.replace(self, path="").text()

    @classmethod
    def parse(cls, text: str) -> Specification:
        """Parses a line that `text` made."""
        data = json.loads(text)
        return cls(**data | {name: tuple(data[name]) for name in ("types", "multiples", "target")})


@dataclass(frozen=True)
class Binary:
    """Facts about a cubin that a launch needs."""

    entry: str  # the kernel's name in it
    shared_bytes: int
    warps: int
    hidden: int  # number of pointers after our arguments, to scratch memory that the kernel does not use

    @classmethod
    def of(cls, compiled: Any) -> Binary:
        """Read the facts from Triton's kernel (3.6, 3.7); ToolchainError if it needs more than a plain launch."""
        about = compiled.metadata
        scratch = (about.global_scratch_size, about.profile_scratch_size)
        if any(scratch) or about.num_ctas != 1 or about.launch_cooperative_grid or about.launch_pdl:
            raise ToolchainError(f"{about.name} needs scratch memory, a cluster or a special launch: {about}")
        return cls(about.name, about.shared, about.num_warps, len(scratch))

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Binary:
        """Parses a line that `text` made."""
        return cls(**json.loads(text))


def load_module(path: Path | str) -> ModuleType:
    """Load the module of generated functions at `path`, for compilation and not for the interpreter."""
    import triton

    name = f"overlapc_kernel_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with triton.knobs.runtime.scope():
            # Compiled kernels import this copy of the prelude; the interpreter makes its own.
            triton.knobs.runtime.interpret = False
            importlib.import_module("overlapc.runtime.triton_prelude")
            spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def without_packed_adds(ptx: str) -> str:
    """Return `ptx` with each addition of two packed 16-bit integers written as two additions.

    ptxas 12.8 and 12.9, which Triton 3.6 contains, add 0 in place of a constant if only the upper half of the result is
    read (`VIADD.16x2 R19, R6, 0x0`). LLVM packs values that it knows to be below 2^16, such as `r % 67 - 22` in the
    mask of a slice's gradient, and the loads of some elements were then left out.
    """

    def apart(found: re.Match[str]) -> str:
        indent, dtype, result, first, second = found.groups()
        lines = (
            "{",
            ".reg .b16 %half<6>;",
            f"mov.b32 {{%half0, %half1}}, {first};",
            f"mov.b32 {{%half2, %half3}}, {second};",
            f"add.{dtype} %half4, %half0, %half2;",
            f"add.{dtype} %half5, %half1, %half3;",
            f"mov.b32 {result}, {{%half4, %half5}};",
            "}",
        )
        return "\n".join(indent + line for line in lines)

    return _PACKED_ADD.sub(apart, ptx)


def _change_ptx(
    _backend: Any = None, stages: dict[str, Callable[..., Any]] | None = None, *_: Any
) -> tuple[str, str] | None:
    """Hook that Triton calls with the stages of a compilation: changes the PTX.

    Triton 3.7 also calls it without arguments, for a text and its hash that tell this hook from others in the key of
    Triton's cache.
    """
    if stages is None:
        return f"overlapc {REVISION}", str(REVISION)
    if "ptx" in stages:
        generate = stages["ptx"]
        stages["ptx"] = lambda source, metadata: without_packed_adds(generate(source, metadata))
    return None


def compile_now(what: Specification) -> Any:
    """Compile by Triton and return its compiled kernel. Raises what Triton raises.

    Triton's own cache does not verify its files, so it is an empty temporary folder here; `triton_binary` caches the
    result. Triton 3.6 takes `ASTSource`'s types by parameter name, and attributes by position.
    """
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    function = getattr(load_module(what.path), what.function)
    constants = {
        name: getattr(tl, value) if isinstance(value, str) else value for name, value in what.constants.items()
    }
    attributes = {(at,): [["tt.divisibility", DIVISIBILITY]] for at in what.multiples}
    signature = dict(zip(function.arg_names, what.types, strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(function, signature, constants, attributes)
    knobs = triton.knobs
    with tempfile.TemporaryDirectory(prefix="overlapc-triton-") as folder, knobs.cache.scope(), knobs.runtime.scope():
        knobs.cache.dir = folder
        knobs.runtime.add_stages_inspection_hook = _change_ptx
        return triton_compile(source, target=GPUTarget(*what.target), options=dict(what.options))


def warm_up() -> None:
    """Compile a kernel that does nothing: the first compilation of a process takes as long as ten later ones."""
    prelude = str(Path(__file__).with_name("triton_prelude.py"))
    compile_now(Specification(prelude, "nothing", (), {}, (), {"num_warps": 1}, ("cuda", 90, 32)))


@with_stack_room
def serve() -> None:
    """Compile the specification on each line of stdin and answer with a line, which `answered` parses."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Triton's dumps are not answers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # an exception, so that temporary folders are removed
    warm_up()
    for line in sys.stdin:
        try:
            compiled = compile_now(Specification.parse(line))
            cubin = base64.b64encode(compiled.asm["cubin"]).decode()
            answer = {"binary": Binary.of(compiled).text(), "cubin": cubin}
        except Exception as error:  # noqa: BLE001 - on any error the launching process compiles again and reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"request": line, **answer}), file=answers, flush=True)


def answered(request: str, line: str) -> tuple[Binary, bytes] | None:
    """Parse a worker's answer to the line `request`: (facts about the cubin, the cubin), or None if it failed.

    Raises ValueError for anything but such an answer.
    """
    answer = json.loads(line)
    if not isinstance(answer, dict) or answer.get("request") != request:
        raise ValueError(f"a worker did not answer {request!r}, but wrote {line!r}")
    if "error" in answer:
        return None
    return Binary.parse(answer["binary"]), base64.b64decode(answer["cubin"])


if __name__ == "__main__":
    serve()
