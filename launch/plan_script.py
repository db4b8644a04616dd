"""`overlapc plan train.py`: the step of a user's own script on any number of ranks, in one process without a GPU.

The script runs as rank 0 of the job, on fake tensors and torch's fake process group, up to where its first optimizer
steps; what it compiles until then, with any backend, is planned. CUDA devices stand for the CPU meanwhile, as a machine
without GPUs has none, and values of tensors are not known: what a script reads of them is NaN, or 0 for whole numbers.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh, fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optim
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _device
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from overlapc.backend import plan_only
from overlapc.config import Config
from overlapc.errors import ConfigError
from overlapc.launch.environment import environment
from overlapc.parallel import FSDPModule, adopt_fsdp2
from overlapc.report import record
from overlapc.report.record import Report
from overlapc.runtime.optimizer_memory import LiveBytes
from overlapc.runtime.steps import STEPS

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "tensor", "zeros",
    "zeros_like",
)  # fmt: skip
# How the names of files begin that are torch's or ours.
_NOT_THE_SCRIPT = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")
MOST_RANKS = 2**17  # torch lists the ranks of every group
# What scripts ask of a GPU before they choose a precision: the profiles that come with overlapc are of such ones.
_ANSWERS = {"current_device": 0, "get_device_capability": (9, 0), "is_bf16_supported": True}
_CALL = "__call__"
_NOTHING = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")


class _Event:
    """Stands for torch.cuda.Event: how long things take is not known."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    record = synchronize = wait = __init__

    def query(self) -> bool:
        """Whether the device has got there."""
        return True

    def elapsed_time(self, _end: Any) -> float:
        """Milliseconds."""
        return float("nan")


class _Stepped(BaseException):
    """The first optimizer has stepped: what follows is the same again. No `except Exception` of a script stops it."""


class _FirstUpdate:
    """Ends a script where its first optimizer steps: lets that and all other optimizers that have gradients step, for
    their state and for what is live meanwhile."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}  # graph -> before the first optimizer stepped
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # of the script
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of the script
        self.peak_bytes = 0
        self.not_counted: dict[str, None] = {}  # classes of optimizers whose state is not known, and why
        self.closures: list[str] = []  # class of the first optimizer, if it is given a function that computes the loss
        self._began = False

    def note_module(self, module: nn.Module, *_: object) -> None:
        """The hook of all modules that get a part, but for those that Dynamo traces being made (a slice of a list)."""
        if not torch.compiler.is_compiling():
            self.modules.add(module)

    def before_step(self, first: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The hook of all optimizers."""
        if self._began:
            return
        self._began = True
        closure = next((each for each in (*args[1:], *kwargs.values()) if callable(each)), None)
        if closure is not None:
            self.closures.append(type(first).__name__)
            with torch.enable_grad():  # as `step` calls it
                closure()
        self.calls = {name: calls for name, (calls,) in STEPS.counts.items()}
        others = [each for each in self.optimizers if each is not first]
        with LiveBytes() as live:
            for module in self.modules:
                live.note((*module.parameters(recurse=False), *module.buffers(recurse=False)))
            params = [param for optimizer in (first, *others) for param in _params(optimizer)]
            live.note((*params, *(param.grad for param in params)))
            live.note(value for optimizer in (first, *others) for value in pytree.tree_leaves(dict(optimizer.state)))
            self._step(first, args[1:], kwargs)
            for other in others:
                if any(param.grad is not None for param in _params(other)):
                    self._step(other, (), {})
                else:
                    self.not_counted[f"{type(other).__name__}: no gradients when the first optimizer steps"] = None
        if not self.not_counted:
            self.peak_bytes = live.peak_bytes
        raise _Stepped

    def _step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            optimizer.step(*args, **kwargs)
        except Exception as error:
            message = next(iter(str(error).strip().splitlines()), "")
            self.not_counted[f"{type(optimizer).__name__}: {type(error).__name__}: {message}"] = None
            raise _Stepped from error


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def plan_script(
    path: Path, arguments: Sequence[str], world_size: int, per_host: int, options: Config
) -> tuple[Report, list[str]]:
    """The report of rank 0's first step, and what was assumed of the script beyond its text.

    per_host: ranks of one host, as the script is told. ConfigError for a script that fails, or compiles nothing before
    it steps.
    """
    if dist.is_initialized():
        raise ConfigError("planning needs a process of its own: this one has a process group")
    if not path.is_file():
        raise ConfigError(f"no script {path}")
    torch._dynamo.reset()
    record.clear()
    local = min(per_host, world_size)
    variables = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
    }  # fmt: skip
    zeros: dict[str, None] = {}  # lines whose whole numbers, read from tensors, were taken for 0
    adopted: list[nn.Module] = []
    by_blocks: list[int] = []  # how many blocks of a module of FSDP2 were compiled one by one
    update = _FirstUpdate()
    hooks = (
        register_optimizer_step_pre_hook(update.before_step),
        module_hooks.register_module_module_registration_hook(update.note_module),
        module_hooks.register_module_parameter_registration_hook(update.note_module),
        module_hooks.register_module_buffer_registration_hook(update.note_module),
    )
    try:
        patched = _patched(world_size, local, options, zeros, adopted, by_blocks, update)
        with patched, _as_main(path, arguments), environment(variables):
            _run(path)
            (step,) = record.report_of_process().steps
        calls = update.calls or {graph.name: STEPS.counts[graph.name][0] for graph in step.graphs}
    finally:
        for hook in hooks:
            hook.remove()
        if dist.is_initialized():
            dist.destroy_process_group()
    if not step.graphs:
        raise ConfigError(f"{path} compiles nothing before its first optimizer steps: it needs torch.compile(model)")
    assumptions = ["FSDP2 as after model = overlapc.adopt_fsdp2(model)"] if adopted else []
    if by_blocks:
        assumptions.append(
            f"{sum(by_blocks)} modules that it compiles one by one within a module of FSDP2 as after torch.compile of"
            " that, without which no communication is in a graph"
        )
    if zeros:
        assumptions.append(f"whole numbers that it reads from tensors are 0, as indices are ({', '.join(zeros)})")
    assumptions += [f"one call of the closure that {name}.step is given" for name in update.closures]
    assumptions += [f"without the state of {reason}" for reason in update.not_counted]
    if world_size > 1 and not any(graph.collectives for graph in step.graphs):
        assumptions.append(
            f"no communication between {world_size} ranks, as no compiled graph has any: the script did not shard its"
            " model here (a trainer may do that only where it finds a GPU)"
        )
    step = replace(step, world_size=world_size, calls=calls, update_peak_bytes=update.peak_bytes)
    return Report((step,)), assumptions


def _run(path: Path) -> None:
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            exec(compile(path.read_bytes(), str(path), "exec"), _MAIN.__dict__)
    except _Stepped:
        pass
    except SystemExit as left:
        if left.code:
            raise ConfigError(f"{path} ended with {left.code!r} before its first optimizer stepped") from None
    except Exception as error:
        raise ConfigError(_failed(path, error)) from error


def _failed(path: Path, error: Exception) -> str:
    """The error of a script, at the innermost line outside of torch and overlapc."""
    last = _last_frame(error)
    inner = getattr(error, "inner_exception", error)
    first = next(iter(str(inner).strip().splitlines()), "")
    return (
        f"{path}: {last.filename}:{last.lineno}: {type(inner).__name__}: {first}\n   {last.line}\n"
        "hint: the script runs up to its first optimizer step on tensors that hold no values, without other ranks;"
        " what needs either (evaluation, checkpoints, object collectives) must come after it"
    )


def _last_frame(error: Exception) -> traceback.FrameSummary:
    """The innermost frame of an error that is outside of torch and overlapc, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    return ([frame for frame in frames if not frame.filename.startswith(_NOT_THE_SCRIPT)] or frames)[-1]


_MAIN = ModuleType("__main__")  # of every script: Dynamo remembers which module has a name


@contextlib.contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, folders, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    _MAIN.__dict__.clear()
    _MAIN.__dict__.update(__name__="__main__", __file__=str(path), __builtins__=builtins)
    sys.modules["__main__"] = _MAIN
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, folders, main


@contextlib.contextmanager
def _patched(
    world_size: int,
    per_host: int,
    options: Config,
    zeros: dict[str, None],
    adopted: list[nn.Module],
    by_blocks: list[int],
    update: _FirstUpdate,
) -> Iterator[None]:
    """torch as a machine with `world_size` GPUs looks to a script, as far as scripts ask before their first step."""
    with contextlib.ExitStack() as stack:
        stack.callback(trace_rules.clear_lru_cache)  # Dynamo lists torch's functions when first asked: the patched ones

        def put(owner: Any, name: str, value: Any) -> None:
            before = getattr(owner, name)
            setattr(owner, name, value)
            stack.callback(setattr, owner, name, before)

        def fake_group(*_args: Any, **_kwargs: Any) -> None:
            initialize("fake", store=FakeStore(), rank=0, world_size=world_size)

        def compile_planned(model: Any = None, **given: Any) -> Any:
            if isinstance(model, nn.Module) and _is_of_fsdp2(model):
                adopted.append(adopt_fsdp2(model))
            given.update(backend=functools.partial(plan_only, options=options), mode=None, options=None)
            made = compile_(model, **given)
            if isinstance(made, nn.Module) and not any(isinstance(each, fsdp.FSDPModule) for each in made.modules()):
                setattr(fsdp.FSDPModule, _CALL, first_call_of_fsdp2)  # it may be a block of what is sharded later
                compiled[made] = given
            return made

        def compile_in_place(module: nn.Module, given: dict[str, Any]) -> None:
            setattr(fsdp.FSDPModule, _CALL, first_call_of_fsdp2)
            compiled[module] = given
            if _is_of_fsdp2(module) and not _fsdp2_manages(module):
                adopted.append(adopt_fsdp2(module))
            module._compiled_call_impl = compile_planned(module._call_impl, **given)

        def first_call_of_fsdp2(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Before any module of FSDP2 runs, the outermost of those that were compiled, or hold blocks that were, is
            adopted. Blocks that are compiled one by one are planned as if the whole module were."""
            delattr(fsdp.FSDPModule, _CALL)  # now: Dynamo would trace it
            managed = [each for each in update.modules if _fsdp2_manages(each)]
            inner = {each for outer in managed for each in outer.modules() if each is not outer}
            for outer in managed:
                blocks = [each for each in outer.modules() if each in compiled]
                if outer in inner or not blocks:
                    continue
                for block in blocks:
                    block._compiled_call_impl = None
                adopted.append(adopt_fsdp2(outer))
                if outer not in compiled:
                    by_blocks.append(len(blocks))
                outer._compiled_call_impl = compile_planned(
                    outer._call_impl, **compiled.get(outer, compiled[blocks[0]])
                )
            return module(*args, **kwargs)

        def no_call_of_fsdp2() -> None:
            if _CALL in fsdp.FSDPModule.__dict__:
                delattr(fsdp.FSDPModule, _CALL)

        stack.callback(no_call_of_fsdp2)
        compiled: dict[nn.Module, dict[str, Any]] = {}  # in place -> how

        def optimizer_made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init_optimizer(optimizer, *args, **kwargs)
            update.optimizers.add(optimizer)

        initialize, compile_, init_optimizer = dist.init_process_group, torch.compile, Optimizer.__init__
        put(Optimizer, "__init__", optimizer_made)
        put(optim, "_foreach_supported_types", [*optim._foreach_supported_types, FakeTensor])  # as on a GPU: foreach
        put(optim, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
        put(dist, "init_process_group", fake_group)
        put(torch, "compile", compile_planned)
        put(nn.Module, "compile", lambda module, *_args, **given: compile_in_place(module, given))
        put(device_mesh, "init_device_mesh", _group_first(device_mesh.init_device_mesh, fake_group))
        for owner in (dist, dist.tensor, _fsdp_init):  # the last for fully_shard without a mesh
            put(owner, "init_device_mesh", device_mesh.init_device_mesh)
        put(device_mesh.DeviceMesh, "__init__", _on_real_tensors(_on_cpu(device_mesh.DeviceMesh.__init__)))
        for name in ("__getitem__", "_flatten"):
            put(device_mesh.DeviceMesh, name, _on_real_tensors(getattr(device_mesh.DeviceMesh, name)))
        put(_device.DeviceContext, "__init__", _on_cpu(_device.DeviceContext.__init__))
        put(torch.autocast, "__init__", _autocast_on_cpu(torch.autocast.__init__))
        for name in _FACTORIES:
            put(torch, name, _on_cpu(getattr(torch, name)))
        put(Tensor, "to", _on_cpu(Tensor.to))
        put(Tensor, "cuda", lambda tensor, *_args, **_kwargs: tensor)
        put(nn.Module, "_apply", _converted)
        put(nn.Module, "cuda", lambda module, *_args, **_kwargs: module)
        put(DataLoader, "__iter__", _on_real_tensors(DataLoader.__iter__))  # its workers know of no fake mode
        put(_BaseDataLoaderIter, "__next__", _on_real_tensors(_BaseDataLoaderIter.__next__))
        put(Tensor, "pin_memory", lambda tensor, *_args, **_kwargs: tensor)
        for name in ("item", "__float__", "__int__", "__index__"):
            for kind in (FakeTensor, DTensor):
                put(kind, name, _unknown(getattr(Tensor, name), zeros))
        put(torch.cuda, "Event", _Event)
        for name in _NOTHING:
            put(torch.cuda, name, lambda *_args, **_kwargs: None)
        for name, value in (*_ANSWERS.items(), ("device_count", per_host)):
            put(torch.cuda, name, functools.partial(_answer, value))
        yield


def _is_of_fsdp2(model: nn.Module) -> bool:
    """Whether `model` is sharded by FSDP2 as it stands: compiled so, nothing that it communicates would be planned."""
    return any(map(_fsdp2_manages, model.modules()))


def _fsdp2_manages(module: nn.Module) -> bool:
    return isinstance(module, fsdp.FSDPModule) and not isinstance(module, FSDPModule)


def _converted(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Stands for `Module.to`, `cuda`, `half` ...: replaces the parameters, because fake tensors cannot be swapped."""
    made: dict[int, nn.Parameter] = {}  # of parameters that modules share
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


def _group_first(make: Callable[..., Any], fake_group: Callable[[], None]) -> Callable[..., Any]:
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if not dist.is_initialized():
            fake_group()
        with unset_fake_temporarily():
            return make("cpu", *args, **kwargs)

    return init_device_mesh


def _on_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` outside of the fake mode: a mesh counts its ranks on tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the CPU for every CUDA device among its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})

    return call


def _plain(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _autocast_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """autocast for CUDA devices casts on the CPU, to what it would cast to there."""

    @functools.wraps(init)
    def call(mode: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type.partition(":")[0] == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(mode, device_type, dtype, *args, **kwargs)

    return call


def _answer(value: Any, *_args: Any, **_kwargs: Any) -> Any:
    return value


def _unknown(read: Callable[[Tensor], Any], zeros: dict[str, None]) -> Callable[[Tensor], Any]:
    """Reads a fake tensor as NaN, or as 0 if it is integral (mostly an index of data); `zeros` gets the script's line.

    torch's own error for truth values, by which a script would go another way.
    """

    def value(tensor: Tensor) -> Any:
        if torch.compiler.is_compiling() or tensor.dtype == torch.bool:
            return read(tensor)
        if tensor.is_floating_point():
            return float("nan")
        zeros[_line_of_script()] = None
        return 0

    return value


def _line_of_script() -> str:
    """The innermost line that is neither torch's nor ours, as `file:line`; cheap, as a list of a tensor asks often."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
