"""An FX graph as text that is equal on two ranks exactly if they compile the same computation.

    v0 = placeholder : bf16 2d
    v1 = _c10d_functional.all_gather_into_tensor.default(v0, 4, <dp of 4>) : bf16 2d [128, 64] -> [512, 64]
    v2 = _c10d_functional.wait_tensor.default(v1) : bf16 2d
    v3 = aten.view.default(v2, [#, #]) : bf16 2d

Left out, because it may differ between ranks: names, sizes (uneven shards) except those that a collective
needs equal, numbers that enter the arithmetic (the offset of a vocabulary shard), device indices and the
names of process groups. Kept: operators, which result goes where, dims, flags, dtypes, number of dims.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overlapc.schedule.collective_kinds import KINDS

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "b8",
}
_EQUAL_SIZES = tuple(kind.op for kind in KINDS.values() if kind.equal_sizes)
_SIZE = "#"  # stands for a number that ranks may differ in


@dataclass(frozen=True, slots=True)
class _Signature:
    """The properties that all nodes with the same target share."""

    name: str
    positional: tuple[tuple[str, bool], ...] = ()  # (argument, whether its numbers are kept)
    keeps: Mapping[str, bool] | None = None  # the same by name, keyword-only arguments too
    keeps_numbers: bool = False  # of arguments that the schema does not name
    equal_sizes: bool = False


def canonical_lines(graph: fx.Graph, label: Callable[[str], str]) -> list[str]:
    """One line per node, subgraphs indented below the node that names them.

    label: the name of a process group (as in the graph, different on every rank) -> a name for it that is
    equal on all ranks, such as "dp of 4".
    """
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for index, node in enumerate(graph.nodes):
        names[node] = f"v{index}"
        lines.append(_line(node, names, label))
        if node.op == "get_attr" and graph.owning_module is not None:
            inner = getattr(graph.owning_module, node.target, None)
            if isinstance(inner, fx.GraphModule):
                lines.extend("  " + line for line in canonical_lines(inner.graph, label))
    return lines


def _line(node: fx.Node, names: Mapping[fx.Node, str], label: Callable[[str], str]) -> str:
    if node.op in ("placeholder", "get_attr"):
        return f"{names[node]} = {node.op}{_type(node.meta.get('val'))}"
    if node.op == "output":
        return f"output({_render(node.args, names, keep=False)})"
    signature = _signature(node.target)
    parts = []
    for index, value in enumerate(node.args):
        name, keep = signature.positional[index] if index < len(signature.positional) else ("", signature.keeps_numbers)
        if index and _takes_a_part(node):
            keep = False
        parts.append(_argument(name, value, keep, names, label))
    for name in sorted(node.kwargs):
        keep = (signature.keeps or {}).get(name, signature.keeps_numbers)
        parts.append(f"{name}={_argument(name, node.kwargs[name], keep, names, label)}")
    line = f"{names[node]} = {signature.name}({', '.join(parts)}){_type(node.meta.get('val'))}"
    if signature.equal_sizes and node.args:
        sources = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        before = [source.meta.get("val") for source in sources if isinstance(source, fx.Node)]
        line += f" {_sizes(before)} -> {_sizes(node.meta.get('val'))}"
    return line


def _takes_a_part(node: fx.Node) -> bool:
    """Whether `node` picks one of a list of equal tensors (split, chunk): tensor parallelism picks by rank."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    source = node.args[0].target
    if not isinstance(source, torch._ops.OpOverload):
        return False
    returns = source._schema.returns
    return len(returns) == 1 and returns[0].real_type.kind() == "ListType"


@functools.cache
def _signature(target: Any) -> _Signature:
    if not isinstance(target, torch._ops.OpOverload):
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        return _Signature(name, keeps_numbers=target is operator.getitem)
    keeps = [(argument.name, _keeps_numbers(argument.real_type)) for argument in target._schema.arguments]
    positional = tuple(pair for pair, arg in zip(keeps, target._schema.arguments, strict=True) if not arg.kwarg_only)
    collective = "c10d" in target.namespace and target._opname.startswith(_EQUAL_SIZES)
    return _Signature(str(target), positional, dict(keeps), equal_sizes=collective)


def _keeps_numbers(kind: Any) -> bool:
    """Dims, counts and flags are typed int and float in schemas; sizes are SymInt, operands Scalar or Tensor."""
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return kind.kind() in ("IntType", "FloatType")


def _argument(name: str, value: Any, keep: bool, names: Mapping[fx.Node, str], label: Callable[[str], str]) -> str:
    if name == "group_name" and isinstance(value, str):
        return f"<{label(value)}>"
    return _render(value, names, keep)


def _render(value: Any, names: Mapping[fx.Node, str], keep: bool) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_render(item, names, keep) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{key}: {_render(item, names, keep)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, slice):
        return f"{_render(value.start, names, keep)}:{_render(value.stop, names, keep)}"
    if isinstance(value, torch.device):
        return value.type
    if value is None or isinstance(value, (bool, str, torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, (int, float)):
        return repr(value) if keep else _SIZE
    if isinstance(value, (complex, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _SIZE
    return type(value).__name__  # an object whose text may hold an address


def _type(value: Any) -> str:
    """` : bf16 2d`, several joined by commas; empty when unknown."""
    if isinstance(value, torch.Tensor):
        return f" : {_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))} {value.dim()}d"
    if isinstance(value, (list, tuple)):
        return " : " + ", ".join(_type(item).removeprefix(" : ") or "-" for item in value)
    return f" : {type(value).__name__}" if value is not None else ""


def _sizes(value: Any) -> str:
    """`[512, 64]`; a symbolic size is `s`, since its name may differ between ranks."""
    if isinstance(value, torch.Tensor):
        return f"[{', '.join(str(size) if isinstance(size, int) else 's' for size in value.shape)}]"
    if isinstance(value, Sequence):
        return " ".join(_sizes(item) for item in value)
    return "-"
