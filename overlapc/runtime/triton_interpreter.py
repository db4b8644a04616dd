"""Run generated Triton kernels in Triton's interpreter, on CPU tensors: slow, but without a GPU.

The interpreter lacks libdevice, rounds bfloat16 wrongly, multiplies bfloat16 by its bit patterns, and runs custom
reductions and scans element by element; functions of torch and NumPy replace these. All other code, including the
functions that the prelude composes from them, is the source that runs on a GPU.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterOptions, TensorHandle

from overlapc.runtime.triton_kernel import ELEMENT, Source, host_function, launch_of

_UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc lgamma "
    "trunc"
).split()
_BINARY = "pow atan2 hypot copysign".split()


def load_module(path: Path, name: str) -> ModuleType:
    """Load a generated module whose kernels run in the interpreter, including device asserts."""
    # Without `debug` asserts are left out. It also checks for integer overflow, which our kernels allow.
    interpreter.interpreter_builder.options = InterpreterOptions(debug=True, sanitize_overflow=False)
    interpreter.interpreter_builder.create_splat = _splat
    with triton.knobs.runtime.scope():
        # Import the compiled form of the prelude first, for later compilations in this process.
        triton.knobs.runtime.interpret = False
        importlib.import_module("overlapc.runtime.triton_prelude")
    module = _execute(path, name)
    module.ops = _prelude()  # type: ignore[attr-defined]
    module.range = _range  # type: ignore[attr-defined]
    return module


def _execute(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True  # read by @triton.jit
        spec.loader.exec_module(module)
    return module


@lru_cache(None)
def _prelude() -> ModuleType:
    module = _execute(Path(__file__).with_name("triton_prelude.py"), "overlapc.runtime._interpreted_prelude")
    stand_ins: dict[str, Callable[..., Any]] = {
        name: _elementwise(_in_double(getattr(torch, name))) for name in _UNARY + _BINARY
    }
    stand_ins["nextafter"] = _elementwise(torch.nextafter)
    stand_ins["rint"] = _elementwise(torch.round)
    # torch's vectorized fmod on CPU is NaN for large quotients.
    stand_ins["fmod"] = _elementwise(lambda a, b: torch.from_numpy(np.asarray(np.fmod(a.numpy(), b.numpy()))))
    module.libdevice = SimpleNamespace(**stand_ins)  # type: ignore[attr-defined]
    replacements: dict[str, Any] = {
        "range": _range,
        "pipelined": lambda *bounds, num_stages: _range(*bounds),
        "to_bf16": _to_bf16,
        "round_bf16": _elementwise(lambda x: x.to(torch.bfloat16).to(torch.float32)),
        "through_bf16": _elementwise(lambda x: x.to(torch.bfloat16).to(torch.float32)),
        "exp2_approximately": _elementwise(_in_double(torch.exp2)),
        "reciprocal_approximately": _elementwise(torch.reciprocal),
        "dot": _dot,
        "fma": _fma,
        "number_in_part": lambda program, first: program - first,
        "lanes_sum": _reduction(lambda data: data.sum(2, dtype=data.dtype)),
        "lanes_max": _reduction(lambda data: data.max(2)),
        "reduce_sum": _reduction(lambda data: data.sum(1, keepdims=True, dtype=data.dtype)),
        "reduce_prod": _reduction(lambda data: data.prod(1, keepdims=True, dtype=data.dtype)),
        "reduce_max": _reduction(lambda data: data.max(1, keepdims=True)),
        "reduce_min": _reduction(lambda data: data.min(1, keepdims=True)),
        "row_sum": _reduction(lambda data: data.sum(1, dtype=data.dtype)),
        "row_max": _reduction(lambda data: data.max(1)),
        "scan_sum": _reduction(lambda data: data.cumsum(1, dtype=data.dtype)),
        "scan_prod": _reduction(lambda data: data.cumprod(1, dtype=data.dtype)),
        "scan_max": _reduction(lambda data: np.maximum.accumulate(data, 1)),
        "scan_min": _reduction(lambda data: np.minimum.accumulate(data, 1)),
    }
    vars(module).update(replacements)
    return module


def _splat(type_: tl.block_type, scalar: TensorHandle) -> TensorHandle:
    """Triton's own takes a comparison of two scalars for a number of their dtype."""
    return TensorHandle(np.full(type_.shape, np.asarray(scalar.data).flat[0]), scalar.dtype.scalar)


def _tensor(data: np.ndarray, dtype: Any, block: bool) -> tl.tensor:
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if block else dtype)


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., tl.tensor]:
    def call(*args: tl.tensor) -> tl.tensor:
        arrays = [torch.from_numpy(np.array(arg.handle.data)) for arg in args]
        block = any(arg.type.is_block() for arg in args)
        return _tensor(function(*arrays).numpy(), args[0].dtype.scalar, block)

    return call


def _in_double(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `function` computed in float64: in float32 its last bit depends on how many elements torch vectorizes."""
    return lambda *args: function(*(arg.double() for arg in args)).to(args[0].dtype)


def _reduction(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[tl.tensor], tl.tensor]:
    return lambda v: _tensor(function(v.handle.data), v.dtype.scalar, True)


def _to_bf16(x: tl.tensor) -> tl.tensor:
    rounded = torch.from_numpy(np.array(x.handle.data)).to(torch.bfloat16)
    return _tensor(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16, x.type.is_block())


def _dot(a: tl.tensor, b: tl.tensor, accumulated: tl.tensor, precision: Any) -> tl.tensor:
    """Replaces Triton's, which multiplies the bit patterns of bfloat16."""
    left, right = (tile.to(tl.float32).handle.data for tile in (a, b))
    return _tensor(np.matmul(left, right) + accumulated.handle.data, tl.float32, True)


def _fma(a: Any, b: Any, c: Any) -> tl.tensor:
    """Replaces Triton's, which rounds the product."""
    tensors = [number for number in (a, b, c) if isinstance(number, tl.tensor)]  # the others are plain numbers
    wide = [np.asarray(number.handle.data if isinstance(number, tl.tensor) else number, "f8") for number in (a, b, c)]
    result = np.asarray(wide[0] * wide[1] + wide[2]).astype(tensors[0].handle.data.dtype)
    return _tensor(result, tensors[0].dtype.scalar, any(number.type.is_block() for number in tensors))


def _range(*bounds: Any) -> range:
    """`range` over the interpreter's scalars, whose `__index__` fails with NumPy 2.4 and later."""
    return builtins.range(
        *(int(at.handle.data.reshape(-1)[0]) if isinstance(at, tl.tensor) else int(at) for at in bounds)
    )


def _not_owning(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same memory that does not keep it allocated: after a launch, the interpreter's arguments
    stay in a reference cycle until Python's garbage collector runs, but the caller frees them at once."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


class InterpretedLauncher:
    """Runs one kernel in Triton's interpreter, on CPU tensors; `launcher(*tensors, *sizes)`."""

    def __init__(self, source: Source, path: Path) -> None:
        self._source = source
        self._launch = launch_of(source)
        module = load_module(path, source.name)
        self.functions = [getattr(module, stage.function) for stage in self._launch.stages]

    def __call__(self, *arguments: Any) -> None:
        buffers = len(self._source.buffers)
        given = zip(arguments[:buffers], self._launch.pointers, strict=True)
        tensors = [_not_owning(tensor.view(ELEMENT[pointer])) for tensor, pointer in given]  # it uses their dtypes
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
            with np.errstate(all="ignore"):  # masked lanes compute on undefined values
                function[(programs,)](*tensors, *scratch, *sizes, **extra)
