"""Makes torch look to a script as on a machine with GPUs, on a machine that has none, for `overlapc plan train.py`.

CUDA devices are replaced by the CPU, process groups by torch's fake one. Values of tensors are unknown: a script reads
NaN from them, or 0 for integers. Only random integers that are drawn on the CPU, such as indices of data, have values.

Libraries may hold on to the functions that replace torch's when they are imported, and they are imported once for all
plans of a process. So these functions are the same in every plan, and read `MACHINE`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optim
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _device
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint_like", "randn", "randn_like", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_DRAWN = ("randint", "randperm")
_MOST_DRAWN = 2**20  # size up to which a random tensor of integers has values
# The properties of a GPU that scripts read, for example to choose a precision. overlapc ships profiles of such GPUs.
_H200 = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30, major=9, minor=0, multi_processor_count=132)
_ANSWERS = {
    "current_device": 0, "get_device_capability": (9, 0), "is_bf16_supported": True, "is_initialized": True,
    "get_device_properties": _H200, "get_device_name": _H200.name, "mem_get_info": (_H200.total_memory,) * 2,
    "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0,
}  # fmt: skip
_NO_OPS = (
    "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated", "manual_seed",
    "manual_seed_all", "init", "set_per_process_memory_fraction",
)  # fmt: skip
_IGNORED_WARNINGS = (".*CUDA is not available.*", ".*no accelerator is found.*", ".*on cpu device mesh.*")  # of torch
# Prefixes of file names that belong to torch or to overlapc.
NOT_THE_SCRIPT = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")


@dataclass
class Machine:
    """The machine that the running script sees, and what the script read from tensors."""

    world_size: int = 1
    per_host: int = 1
    # Lines of the script that read integers from tensors with unknown values, and got 0.
    zeros: dict[str, None] = field(default_factory=dict)


MACHINE = Machine()


class Patches(contextlib.ExitStack):
    """Sets attributes, and restores them at the end."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute. If other code has wrapped or replaced it, now or since an earlier plan, that is kept."""
        before = getattr(owner, name)
        if inspect.unwrap(before) is value:
            return

        def put_back() -> None:
            if getattr(owner, name) is value:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self.callback(put_back)


@contextlib.contextmanager
def gpus(world_size: int, per_host: int) -> Iterator[Machine]:
    """Make torch look like on a machine with `per_host` GPUs, in a job of `world_size` ranks, as far as scripts use it
    before their first step."""
    _device._device_constructors()  # caches what `with torch.device(...)` affects, so it must see torch unpatched
    with Patches() as patches:
        # Dynamo caches a list of torch's functions, with the patched ones.
        patches.callback(trace_rules.clear_lru_cache)
        MACHINE.world_size, MACHINE.per_host = world_size, per_host
        MACHINE.zeros.clear()
        patches.enter_context(warnings.catch_warnings())
        for message in _IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        put = patches.put
        put(optim, "_foreach_supported_types", [*optim._foreach_supported_types, FakeTensor])  # foreach, as on a GPU
        put(optim, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
        put(dist, "init_process_group", fake_group)
        for owner in (device_mesh, dist, dist.tensor, _fsdp_init):  # `_fsdp_init`: fully_shard without a mesh
            put(owner, "init_device_mesh", _init_device_mesh)
        put(device_mesh.DeviceMesh, "__init__", _on_real_tensors(_on_cpu(device_mesh.DeviceMesh.__init__)))
        for name in ("__getitem__", "_flatten"):
            put(device_mesh.DeviceMesh, name, _on_real_tensors(getattr(device_mesh.DeviceMesh, name)))
        put(_device.DeviceContext, "__init__", _on_cpu(_device.DeviceContext.__init__))
        put(torch.autocast, "__init__", _autocast_on_cpu(torch.autocast.__init__))
        for name in _FACTORIES:
            put(torch, name, _on_cpu(getattr(torch, name)))
        for name in _DRAWN:
            put(torch, name, _drawn(getattr(torch, name)))
        # It draws until all values are in range, which needs values.
        put(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_args, **_kwargs: tensor)
        # SyncBatchNorm refuses CPUs, and communicates within autograd.
        put(nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward)
        put(Tensor, "to", _on_cpu(Tensor.to))
        put(Tensor, "cuda", lambda tensor, *_args, **_kwargs: tensor)
        put(nn.Module, "_apply", _converted)
        put(nn.Module, "cuda", lambda module, *_args, **_kwargs: module)
        put(DataLoader, "__iter__", _on_real_tensors(DataLoader.__iter__))  # its workers are not in the fake mode
        put(_BaseDataLoaderIter, "__next__", _on_real_tensors(_BaseDataLoaderIter.__next__))
        put(Tensor, "pin_memory", lambda tensor, *_args, **_kwargs: tensor)
        for name in ("item", "__float__", "__int__", "__index__"):
            for kind in (FakeTensor, DTensor):
                put(kind, name, _unknown(getattr(Tensor, name)))
        put(torch.cuda, "Event", _Event)
        for name in _NO_OPS:
            put(torch.cuda, name, lambda *_args, **_kwargs: None)
        for name, value in _ANSWERS.items():
            put(torch.cuda, name, functools.partial(_answer, value))
        put(torch.cuda, "device_count", _device_count)
        put(torch.cuda, "is_available", _is_available)
        put(torch.cuda, "memory_stats", lambda *_args, **_kwargs: defaultdict(int))
        put(torch.cuda, "Stream", _Stream)
        put(torch.cuda, "stream", contextlib.nullcontext)
        for name in ("current_stream", "default_stream"):
            put(torch.cuda, name, _Stream)
        put(Tensor, "record_stream", lambda *_args: None)
        yield MACHINE


_init_process_group, _make_mesh = dist.init_process_group, device_mesh.init_device_mesh


def fake_group(*_args: Any, **_kwargs: Any) -> None:
    """Replaces torch.distributed.init_process_group."""
    _init_process_group("fake", store=FakeStore(), rank=0, world_size=MACHINE.world_size)


def _init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
    if not dist.is_initialized():
        fake_group()
    with unset_fake_temporarily():
        return _make_mesh("cpu", *args, **kwargs)


def _device_count() -> int:
    return MACHINE.per_host


def _is_available() -> bool:
    """Return True to the script and its libraries, but False to torch, which would otherwise initialize a GPU."""
    return not sys._getframe(1).f_code.co_filename.startswith(NOT_THE_SCRIPT)


class _Stream:
    """Replaces torch.cuda.Stream: nothing runs on it."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    synchronize = wait_event = wait_stream = __init__

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        return event or _Event()

    def query(self) -> bool:
        """Whether the device has finished all work of the stream."""
        return True


class _Event:
    """Replaces torch.cuda.Event: times are unknown."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    record = synchronize = wait = __init__

    def query(self) -> bool:
        """Whether the device has reached the event."""
        return True

    def elapsed_time(self, _end: Any) -> float:
        """Return the unknown number of milliseconds, NaN."""
        return float("nan")


def _converted(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replaces `Module._apply`, the core of `to`, `cuda`, `half` ...: assigns new parameters, because fake tensors
    cannot be swapped in place."""
    made: dict[int, nn.Parameter] = {}  # id of a parameter -> the new one, for parameters that modules share
    for each in module.modules() if recurse else [module]:
        for name, parameter in each._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    value = convert(parameter)
                if value is not parameter and id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
                each._parameters[name] = made.get(id(parameter), parameter)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = convert(buffer)
    return module


def _on_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` run outside of the fake mode: a mesh, for example, stores its ranks in tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with every CUDA device among its arguments replaced by the CPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})

    return call


def _plain(value: Any) -> Any:
    if _is_cuda(value):
        return torch.device("cpu") if isinstance(value, torch.device) else "cpu"
    return value


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _drawn(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `draw`, which on the CPU also draws real values: scripts use them as indices of batches in their data."""

    @functools.wraps(draw)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        made = draw(*args, **{name: _plain(value) for name, value in kwargs.items()})
        if isinstance(made, FakeTensor) and not _is_cuda(kwargs.get("device")) and made.numel() <= _MOST_DRAWN:
            with unset_fake_temporarily():
                made.constant = draw(*args, **kwargs)
        return made

    return call


def _autocast_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` of autocast that casts on the CPU instead of CUDA, to the dtype of CUDA's autocast."""

    @functools.wraps(init)
    def call(mode: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type.partition(":")[0] == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(mode, device_type, dtype, *args, **kwargs)

    return call


def _answer(value: Any, *_args: Any, **_kwargs: Any) -> Any:
    return value


def _unknown(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return `read` that gives NaN for a fake tensor with an unknown value, or 0 if it is integral (mostly an index).

    A truth value is still torch's own error, because the script would branch on it.
    """

    def value(tensor: Tensor) -> Any:
        known = getattr(tensor, "constant", None) is not None
        if known or torch.compiler.is_compiling() or tensor.dtype == torch.bool:
            return read(tensor)
        if tensor.is_floating_point():
            return float("nan")
        MACHINE.zeros[_line_of_script()] = None
        return 0

    return value


def _line_of_script() -> str:
    """Return the innermost line that is neither torch's nor ours, as `file:line`. It must be fast: converting a tensor
    to a list calls it for each element."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_SCRIPT):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
