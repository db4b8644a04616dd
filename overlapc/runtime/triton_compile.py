"""One Triton function compiled for one variant: here, or in a worker process.

A worker is `python -m overlapc.runtime.triton_compile`: a line of JSON in, a line out, until its input ends. It needs
Triton only, so this module must not import torch. What a worker compiles lands in Triton's cache under our folder,
where the launching process finds it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

DIVISIBILITY = 16  # bytes of a pointer, elements of a size


@dataclass(frozen=True)
class Specification:
    """What to compile, in plain values. Triton 3.6: `ASTSource` by parameter names, attributes by position."""

    path: str  # of the module
    function: str
    signature: dict[str, str]  # parameter -> Triton type, "constexpr" for constants
    constants: dict[str, int | str]  # INDEX is "int32" or "int64"
    multiples: tuple[int, ...]  # positions of arguments that are multiples of DIVISIBILITY
    options: dict[str, Any]
    target: tuple[str, int, int]  # backend, architecture, warp size
    cache: str  # Triton's cache folder

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Specification:
        """What `text` gave."""
        data = json.loads(text)
        return cls(**{**data, "multiples": tuple(data["multiples"]), "target": tuple(data["target"])})


def load_module(path: Path | str) -> ModuleType:
    """The module of generated functions at `path`, for compilation and not for the interpreter."""
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


def compile_now(what: Specification) -> Any:
    """Triton's compiled kernel, from its cache if it is there. Raises what Triton raises."""
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
    source = ASTSource(function, dict(what.signature), constants, attributes)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = what.cache
        return triton_compile(source, target=GPUTarget(*what.target), options=dict(what.options))


def serve() -> None:
    """Compiles what comes in, a line each, and answers `ok`, or the error: the parent meets it again itself."""
    for line in sys.stdin:
        try:
            compile_now(Specification.parse(line))
            answer = "ok"
        except Exception as error:  # noqa: BLE001 - whatever it is, the launching process compiles again and reports it
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
