"""Hash the input of a compilation: a graph of ATen ops, or the graph that Dynamo captured.

Two compilations with the same fingerprint in the same environment (`warm.environment`) produce the same program. A
graph that contains something without a fingerprint (an operator of a user's library, a Python object) raises
NotCacheable and is compiled every time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.node import Node

from overlapc.errors import OverlapcError
from overlapc.fx.comm.group_names import ranks_of
from overlapc.fx.comm.labels import ParamLabel, annotation_text, numbered, numbers_in
from overlapc.fx.precision import is_coarse
from overlapc.fx.versions.sharding import group_name_of, resolve_group
from overlapc.fx.versions.tensors import size_hint
from overlapc.fx.written_numbers import written_number
from overlapc.runtime.cache import content_key


class NotCacheable(OverlapcError):
    """A graph cannot be cached, with the reason; it is compiled as if there were no cache."""


def graph_key(gm: fx.GraphModule, *context: str) -> str:
    """Return the hash of a graph of ATen ops with its metadata, and of `context`."""
    return content_key(*context, *_lines(gm))


def user_graph_key(
    gm: fx.GraphModule, inputs: Sequence[Any], *context: str, params: Mapping[str, tuple[Any, ParamLabel]] | None = None
) -> str:
    """Return the hash of `context` and a graph that Dynamo captured, on plain tensors and DTensors of static sizes.

    params: descriptions of the sharded parameters by the strings that name them in the graph, which contain a number
    that depends on the process. Raises NotCacheable if AOTAutograd's result depends on more than the graph.
    """
    taken = [_user_input(value) for value in inputs]
    return content_key(*context, *taken, str(shared_memory(inputs)), *_user_lines(gm, params or {}))


def shared_memory(inputs: Sequence[Any]) -> list[list[int]]:
    """Return the groups of `inputs` (positions) that share memory: AOTAutograd joins a group if one input changes."""
    found: dict[int, list[int]] = {}
    for at, given in enumerate(inputs):
        value = getattr(given, "_local_tensor", given)  # a DTensor's local part
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            found.setdefault(value.untyped_storage()._cdata, []).append(at)
    return [each for each in found.values() if len(each) > 1]


# --- ATen graphs


def _lines(gm: fx.GraphModule) -> Iterator[str]:
    numbers = numbers_in(gm.graph)
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
                annotation_text(node, numbers),
                str(is_coarse(node)),
                node.meta.get("stack_trace") or "",
                next(reversed(stack.values()))[0] if stack else "",
                str("unbacked_bindings" in node.meta),
            )
        )
        if node.op == "get_attr":
            yield from _attribute(gm, node)


def _attribute(gm: fx.GraphModule, node: Node) -> Iterator[str]:
    """Yield the fingerprint of an attribute. For a tensor its form suffices: the values are read from the graph later.

    The exception is a tensor of one number, which kernels may contain as a constant.
    """
    held: Any = gm
    for part in str(node.target).split("."):
        held = getattr(held, part)
    if isinstance(held, fx.GraphModule):
        yield from _lines(held)
    elif isinstance(held, Tensor):
        yield _value(held)
        yield repr(written_number(held))
    else:
        raise NotCacheable(f"{node.name} holds a {type(held).__name__}")


def _target(node: Node) -> str:
    target = node.target
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", "")
    qualified = getattr(target, "__qualname__", name)  # of functions made by one function only their __name__ differs
    return f"{getattr(target, '__module__', '')}.{qualified}{'' if qualified.endswith(name) else f' {name}'}"


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):  # which differ as an index
        parts = ",".join(map(_argument, value))
        return f"({parts})" if isinstance(value, tuple) else f"[{parts}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_argument(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"{_argument(value.start)}:{_argument(value.stop)}:{_argument(value.step)}"
    if isinstance(value, str):
        return f"{value!r}{_ranks(value)}"
    if (
        value is None
        or value is ...
        or isinstance(
            value, bool | int | float | complex | torch.dtype | torch.device | torch.layout | torch.memory_format
        )
    ):
        return repr(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | sympy.Basic):
        return _value(value)
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("overlapc."):
        fields = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        return f"{type(value).__name__}({','.join(f'{name}={_argument(item)}' for name, item in fields)})"
    if _is_of_dtensors(value, "Placement"):
        return repr(value)
    if type(value).__name__ == "DeviceMesh":
        return _mesh(value)
    name = group_name_of(value) if hasattr(getattr(value, "real_obj", value), "group_name") else None
    if name is not None:
        return f"<group {name}{_ranks(name)}>"
    raise NotCacheable(f"an argument is a {type(value).__name__}")


def _ranks(name: str) -> str:
    """Return the ranks and backends of a process group: in another job the group of this name may have others."""
    from torch.distributed import distributed_c10d

    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not known or name not in distributed_c10d._world.pg_names.values():
        return ""
    return f"@{ranks_of(name)} {dist.get_backend_config(resolve_group(name))}"


def _value(value: Any) -> str:
    """Return a fake tensor's dtype, device, flags, sizes and strides (symbols with their hints) and storage offset.

    `as_strided` and its gradient depend on the storage offset.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return f"{value.layout} {value.dtype} {value.device} {tuple(value.shape)}"
        form = (*value.shape, -1, *value.stride(), -1, value.storage_offset())
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
    if _is_of_dtensors(value, "DTensor"):
        return _dtensor(value)
    if type(value).__name__ not in ("FakeTensor", "Tensor", "Parameter"):
        raise NotCacheable(f"an input is a {type(value).__name__}")
    if any(not isinstance(size, int) for size in (*value.shape, *value.stride())):
        raise NotCacheable("an input has symbolic sizes")
    return f"{_value(value)} {isinstance(value, torch.nn.Parameter)} {value.is_leaf}"


def _is_of_dtensors(value: Any, name: str) -> bool:
    """Whether a value is of the DTensor class called `name`, without importing DTensor."""
    kinds = type(value).__mro__[:-1]
    ours = type(value).__module__.startswith("torch.distributed.tensor")
    return ours and any(kind.__name__ == name for kind in kinds)


def _dtensor(value: Any) -> str:
    spec, local = value._spec, value._local_tensor
    sizes = (*value.shape, *value.stride())
    if any(not isinstance(size, int) for size in sizes):
        raise NotCacheable("a DTensor among the inputs has symbolic sizes")
    for placement in spec.placements:
        if not _is_of_dtensors(placement, "Placement"):
            raise NotCacheable(f"an input is placed by a {type(placement).__name__}")
    whole = f"{sizes} {value.dtype} {spec.placements} {getattr(spec, 'shard_order', None)} {_mesh(spec.mesh)}"
    flags = f"{value.requires_grad:d}{isinstance(value, torch.nn.Parameter):d}{value.is_leaf:d}"
    return f"DTensor {whole} {flags} of {_user_input(local)}"


def _mesh(mesh: Any) -> str:
    """Return a mesh's axes, their groups with ranks, and this rank, on which constants in the graph depend."""
    axes = [f"{mesh.size(dim)} {_argument(mesh.get_group(dim).group_name)}" for dim in range(mesh.ndim)]
    return f"mesh {mesh.device_type} {mesh.mesh_dim_names} {axes} rank {dist.get_rank()} of {dist.get_world_size()}"


def _user_lines(gm: fx.GraphModule, params: Mapping[str, tuple[Any, ParamLabel]]) -> Iterator[str]:
    if any(True for _ in gm.parameters()) or any(True for _ in gm.buffers()):
        raise NotCacheable("the graph has parameters or buffers of its own")

    used: dict[str, tuple[Any, ParamLabel]] = {}

    def noted(leaf: Any) -> Any:
        if isinstance(leaf, str) and leaf in params:
            used[leaf] = params[leaf]
        return leaf

    for node in gm.graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), noted)
    of_number = numbered(label.number for _, label in used.values())

    def described(leaf: Any) -> Any:
        if not (isinstance(leaf, str) and leaf in used):
            return leaf
        signature, label = used[leaf]
        return signature, dataclasses.replace(label, number=of_number[label.number])

    numbers = numbers_in(gm.graph)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function", "call_method", "output"):
            raise NotCacheable(f"{node.name} is a {node.op}")
        if node.op == "call_function":
            _expect_known(node)
        stack = node.meta.get("nn_module_stack") or {}
        module = next(reversed(stack.values()))[0] if stack else ""
        args = "|".join(_argument(fx.node.map_aggregate(each, described)) for each in (node.args, node.kwargs))
        custom = annotation_text(node, numbers)
        yield f"{node.op}|{node.name}|{_target(node)}|{args}|{custom}|{node.meta.get('stack_trace') or ''}|{module}"


_KNOWN_NAMESPACES = frozenset({"aten", "prims"})


def _expect_known(node: Node) -> None:
    """Raise NotCacheable for a call of code outside of torch and overlapc, which the key does not cover."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise NotCacheable(f"{node.name} calls {target}")
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else target.name()
        known = name.split("::")[0] in _KNOWN_NAMESPACES
    else:
        module = getattr(target, "__module__", "") or ""
        if module.startswith("torch._dynamo") and getattr(target, "__closure__", None):
            raise NotCacheable(f"{node.name} calls a closure that Dynamo made")
        home = module.split(".")[0]
        known = home in ("torch", "overlapc", "_operator", "operator", "math", "builtins", "")
        # C functions of torch (`torch.sin`) have no module; they are recognized by identity.
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
