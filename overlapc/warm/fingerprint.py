"""What a compilation depends on, as one hash: the graph, the options, the software and the state of torch.

Two compilations with one fingerprint would produce the same program. What cannot be told from outside (a user's
function among the options, an operator of a user's library, a Python object in the graph) raises NotCacheable: such a
graph is compiled every time.
"""

from __future__ import annotations

import dataclasses
import functools
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import Node

from overlapc.codegen.kernel import foreign
from overlapc.config import Config
from overlapc.errors import OverlapcError
from overlapc.fx.groups import ranks_of
from overlapc.fx.versions import group_name_of, size_hint
from overlapc.runtime.cache import content_key

# Options that say where things lie or how to talk, not what is generated.
_NOT_IN_KEY = frozenset({"rank_timeout", "rank_check", "dump_dir", "cache_dir", "dump", "debug", "warm_start"})
_PACKAGE = Path(__file__).resolve().parents[1]
_CODE = ("*.py", "*.h", "*.json")


class NotCacheable(OverlapcError):
    """Why a graph has no fingerprint; it is compiled as if there were no cache."""


def environment_key(config: Config) -> str:
    """Hash of everything but the graph: overlapc's own code, options, versions, devices, torch's switches."""
    if foreign():
        raise NotCacheable(f"a kernel generator that is no part of overlapc, for {', '.join(foreign())}")
    return content_key(_code_key(), *_options(config), *_versions(), *_switches())


def graph_key(gm: fx.GraphModule, *context: str) -> str:
    """Hash of a graph of ATen ops with its metadata, and of `context`."""
    return content_key(*context, *_lines(gm))


def user_graph_key(gm: fx.GraphModule, inputs: Sequence[Any], *context: str) -> str:
    """Hash of a graph as Dynamo captured it, on plain tensors of static sizes, and of `context`.

    NotCacheable for what AOTAutograd would decide by looking at more than the graph says.
    """
    taken = [_user_input(value) for value in inputs]
    return content_key(*context, *taken, str(shared_memory(inputs)), *_user_lines(gm))


def shared_memory(inputs: Sequence[Any]) -> list[list[int]]:
    """Which of `inputs` are views of one memory: AOTAutograd takes those together if one of them is changed."""
    found: dict[int, list[int]] = {}
    for at, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            found.setdefault(value.untyped_storage()._cdata, []).append(at)
    return [each for each in found.values() if len(each) > 1]


# --- the environment


@functools.cache
def _code_key() -> str:
    """Hash of overlapc's own files, those of the linked folders (passes, estimators) included."""
    folders = [_PACKAGE, *(each.resolve() for each in _PACKAGE.iterdir() if each.is_symlink())]
    files = sorted(file for folder in folders for pattern in _CODE for file in folder.rglob(pattern))
    return content_key(*(file.read_bytes() for file in files))


def _passes_are_ours(names: Sequence[str]) -> None:
    from overlapc.passes.base import is_ours  # which imports all passes: few runs name any

    for name in names:
        if not is_ours(name):
            raise NotCacheable(f"pass {name} is no part of overlapc")


def _options(config: Config) -> Iterator[str]:
    for knob in dataclasses.fields(config):
        if knob.name in _NOT_IN_KEY:
            continue
        value = getattr(config, knob.name)
        if callable(value) or (isinstance(value, tuple) and any(callable(each) for each in value)):
            raise NotCacheable(f"option {knob.name} holds a function")
        if knob.name == "passes" and value:
            _passes_are_ours(value)
        if isinstance(value, frozenset):
            value = sorted(value)
        yield f"{knob.name}={value!r}"
        if isinstance(value, str | Path) and Path(value).is_file():  # a profile, an earlier run
            yield Path(value).read_text(encoding="utf-8", errors="replace")


@functools.cache
def _versions() -> tuple[str, ...]:
    return (torch.__version__, str(torch.version.cuda), triton_version(), platform.python_version(), *_devices())


def triton_version() -> str:
    """ "" where there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _devices() -> Iterator[str]:
    yield f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            yield f"{properties.name} {properties.major}.{properties.minor} {properties.multi_processor_count}"


def _switches() -> Iterator[str]:
    """State of torch that tracing and decompositions read."""
    yield f"grad={torch.is_grad_enabled()} inference={torch.is_inference_mode_enabled()}"
    yield f"deterministic={torch.are_deterministic_algorithms_enabled()}"
    yield f"dtype={torch.get_default_dtype()} device={torch.get_default_device()}"
    for device in ("cpu", "cuda"):
        yield f"amp {device}={torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    cuda = torch.backends.cuda
    yield f"sdp={cuda.flash_sdp_enabled()} {cuda.mem_efficient_sdp_enabled()} {cuda.math_sdp_enabled()}"
    yield f"cudnn={cuda.cudnn_sdp_enabled()} {torch.backends.cudnn.enabled} {torch.get_float32_matmul_precision()}"
    yield repr(torch._functorch.config.get_hash())


# --- ATen graphs


def _lines(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        yield "|".join(
            (
                node.op,
                node.name,
                _target(node),
                _argument(node.args),
                _argument(node.kwargs),
                _value(node.meta.get("val")),
                str(node.meta.get("custom", "")),
                node.meta.get("stack_trace") or "",
                next(reversed(stack.values()))[0] if stack else "",
                str("unbacked_bindings" in node.meta),
            )
        )
        if node.op == "get_attr":
            yield from _attribute(gm, node)


def _attribute(gm: fx.GraphModule, node: Node) -> Iterator[str]:
    """What the graph carries along: a tensor is taken from the graph itself later, so its form is enough."""
    held: Any = gm
    for part in str(node.target).split("."):
        held = getattr(held, part)
    if isinstance(held, fx.GraphModule):
        yield from _lines(held)
    elif isinstance(held, Tensor):
        yield _value(held)
    else:
        raise NotCacheable(f"{node.name} holds a {type(held).__name__}")


def _target(node: Node) -> str:
    target = node.target
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', getattr(target, '__name__', ''))}"


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_argument, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_argument(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"{_argument(value.start)}:{_argument(value.stop)}:{_argument(value.step)}"
    if isinstance(value, str):
        return f"{value!r}{_ranks(value)}"
    if value is None or isinstance(
        value, bool | int | float | complex | torch.dtype | torch.device | torch.layout | torch.memory_format
    ):
        return repr(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | sympy.Basic):
        return _value(value)
    name = group_name_of(value) if hasattr(getattr(value, "real_obj", value), "group_name") else None
    if name is not None:
        return f"<group {name}{_ranks(name)}>"
    raise NotCacheable(f"an argument is a {type(value).__name__}")


def _ranks(name: str) -> str:
    """Of a process group: another job may give its name to other ranks."""
    from torch.distributed import distributed_c10d

    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return f"@{ranks_of(name)}" if known and name in distributed_c10d._world.pg_names.values() else ""


def _value(value: Any) -> str:
    """A fake tensor's form, sizes as symbols with their hints."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return f"{value.layout} {value.dtype} {value.device} {tuple(value.shape)}"
        form = (*value.shape, -1, *value.stride())
        flags = f"{value.is_conj():d}{value.is_neg():d}{value.requires_grad:d}"
        return f"{value.dtype} {value.device} {flags} {','.join(map(_size, form))}"
    if isinstance(value, list | tuple):
        return f"[{';'.join(map(_value, value))}]"
    if isinstance(value, torch.SymInt):
        return _size(value)
    if value is None or isinstance(value, bool | int | float | str | torch.SymFloat | torch.SymBool | sympy.Basic):
        return str(value)
    return type(value).__name__


def _size(size: int | torch.SymInt) -> str:
    return str(size) if isinstance(size, int) else f"{size}~{size_hint(size)}"


# --- graphs as Dynamo captures them


def _user_input(value: Any) -> str:
    if type(value).__name__ not in ("FakeTensor", "Tensor", "Parameter"):
        raise NotCacheable(f"an input is a {type(value).__name__}")
    if any(not isinstance(size, int) for size in (*value.shape, *value.stride())):
        raise NotCacheable("an input has symbolic sizes")
    return f"{_value(value)} {isinstance(value, torch.nn.Parameter)} {value.is_leaf}"


def _user_lines(gm: fx.GraphModule) -> Iterator[str]:
    if any(True for _ in gm.parameters()) or any(True for _ in gm.buffers()):
        raise NotCacheable("the graph holds tensors of its own")
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function", "call_method", "output"):
            raise NotCacheable(f"{node.name} is a {node.op}")
        if node.op == "call_function":
            _expect_torch(node)
        stack = node.meta.get("nn_module_stack") or {}
        module = next(reversed(stack.values()))[0] if stack else ""
        args = f"{_argument(node.args)}|{_argument(node.kwargs)}"
        custom = str(node.meta.get("custom", ""))
        yield f"{node.op}|{node.name}|{_target(node)}|{args}|{custom}|{node.meta.get('stack_trace') or ''}|{module}"


_KNOWN_NAMESPACES = frozenset({"aten", "prims"})


def _expect_torch(node: Node) -> None:
    """NotCacheable for a call whose meaning lies outside torch: its code is not in the key."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise NotCacheable(f"{node.name} calls {target}")
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else target.name()
        known = name.split("::")[0] in _KNOWN_NAMESPACES
    else:
        home = (getattr(target, "__module__", "") or "").split(".")[0]
        known = home in ("torch", "_operator", "operator", "math", "builtins", "")
        # Methods of C functions (`torch.sin`) have no module; by identity they are torch's.
        if home == "":
            known = _is_torch_function(target)
    if not known:
        raise NotCacheable(f"{node.name} calls {target}, which is not torch's")


def _is_torch_function(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    homes: Iterable[Any] = (
        torch,
        torch._C._nn,
        torch._C._VariableFunctions,
        Tensor,
        torch.fft,
        torch.linalg,
        torch.special,
    )
    return any(getattr(home, name, None) is target for home in homes)
