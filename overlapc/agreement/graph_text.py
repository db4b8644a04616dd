"""An FX graph as text that is equal on two ranks exactly if they compile the same computation.

    v0 = placeholder : bf16 2d
    v1 = _c10d_functional.all_gather_into_tensor.default(v0, 4, <dp of 4>) : bf16 2d
    v2 = _c10d_functional.wait_tensor.default(v1) : bf16 2d
    v3 = aten.view.default(v2, [#, #]) : bf16 2d

Omitted, because ranks may differ in them: names, sizes (uneven shards, other batches), numbers in the arithmetic (the
offset of a vocabulary shard), device indices and the names of process groups. Included: operators, data flow, dims,
flags, dtypes, number of dims.

Most collectives need tensors of the same size from all ranks of their process group; ranks of another group of the same
mesh axis, another replica for instance, may have other sizes. So these sizes are a text of their own for each group:

    _c10d_functional.all_gather_into_tensor.default(?, 4, <dp of 4>) : bf16 2d [128, 64] -> [512, 64]

These lines name no other node and those of one parameter are together, because ranks whose graphs differ may still have
the same collectives.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
_SIZES = ("offset", "size", "step")  # arguments of type int, of `diagonal` and `unfold`, that are no dims
_SIZE = "#"  # replaces a number in which ranks may differ


@dataclass(frozen=True, slots=True)
class _Signature:
    """How nodes with one target are printed."""

    name: str
    positional: tuple[tuple[str, bool], ...] = ()  # (argument, whether its numbers are printed)
    keeps: Mapping[str, bool] | None = None  # the same by name, including keyword-only arguments
    keeps_numbers: bool = False  # the same for arguments that the schema does not name
    defaults: frozenset[tuple[str, str]] = frozenset()  # (argument, text) that the graph of another rank may omit
    equal_sizes: bool = False  # a collective that needs equal sizes on all ranks of its group


class Groups(Protocol):
    """What is known about process groups, by the names that they have in the graph, which differ between ranks."""

    def __getitem__(self, group: str, /) -> str:
        """Return a name that is equal on all ranks, such as "dp of 4"."""

    def ranks(self, group: str) -> tuple[int, ...]:
        """Return the global ranks of the group."""


@dataclass(frozen=True)
class GraphText:
    """What ranks compare of a graph."""

    lines: list[str]  # of all ranks that compile it
    sizes: dict[tuple[int, ...], list[str]] = field(default_factory=dict)  # by ranks of a group, which compare these
    operators: list[str] = field(default_factory=list)  # the calls in any order, without data flow
    inputs: list[str] = field(default_factory=list)  # for which sizes torch has specialized the graph


class _Unnamed(dict[fx.Node, str]):
    """Names by which graphs are equal that compute a number where others have it as a constant."""

    def __missing__(self, node: fx.Node) -> str:
        return _SIZE if _is_number(node) else "?"


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def text_of(graph: fx.Graph, groups: Groups, param_of: Callable[[fx.Node], str] = lambda node: "") -> GraphText:
    """Return one line for each node; the lines of a subgraph are indented below the node that refers to it.

    param_of: returns the sharded parameter that a collective serves; "" for none.
    """
    text = GraphText([])
    names: dict[fx.Node, str] = {}
    unnamed_nodes = _Unnamed()
    sized: list[tuple[str, tuple[int, ...], str]] = []  # parameter, ranks, line
    for index, node in enumerate(graph.nodes):
        names[node] = f"v{index}"
        text.lines.append(_line(node, names, groups))
        if node.op == "placeholder":
            text.inputs.append(_specialized(node.meta.get("val")))
            continue
        if node.op == "output" or _is_number(node):
            continue
        unnamed = _line(node, unnamed_nodes, groups).removeprefix("? = ")
        text.operators.append(unnamed)
        group = _group_of_equal_sizes(node)
        if group is not None:
            param = param_of(node)
            sized.append((param, groups.ranks(group), f"{unnamed}{_moved(node)} {param}".rstrip()))
        if node.op == "get_attr" and graph.owning_module is not None:
            inner = getattr(graph.owning_module, node.target, None)
            if isinstance(inner, fx.GraphModule):
                within = text_of(inner.graph, groups, param_of)
                text.lines.extend("  " + line for line in within.lines)
                text.operators.extend("  " + line for line in within.operators)
                sized.extend(("", ranks, "  " + line) for ranks, lines in within.sizes.items() for line in lines)
    text.operators.sort()
    for _, ranks, line in sorted(sized, key=lambda entry: entry[0]):
        text.sizes.setdefault(ranks, []).append(line)
    return text


def _specialized(value: Any) -> str:
    """Return the sizes of an input as torch's traces depend on them: `1 # s` for a size of 1, a fixed and a symbolic
    one."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return " ".join("s" if not isinstance(size, int) else str(size) if size <= 1 else _SIZE for size in value.shape)


def _group_of_equal_sizes(node: fx.Node) -> str | None:
    """Return the process group of a collective that needs equal sizes on its ranks."""
    if node.op != "call_function":
        return None
    signature = _signature(node.target)
    if not signature.equal_sizes:
        return None
    named = zip((name for name, _ in signature.positional), node.args, strict=False)
    group = {**dict(named), **node.kwargs}.get("group_name")
    return group if isinstance(group, str) else None


def _moved(node: fx.Node) -> str:
    """Return the sizes of what a collective gets and returns: ` [128, 64] -> [512, 64]`."""
    sources = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    before = [source.meta.get("val") for source in sources if isinstance(source, fx.Node)]
    return f" {_sizes(before)} -> {_sizes(node.meta.get('val'))}"


def _line(node: fx.Node, names: Mapping[fx.Node, str], groups: Groups) -> str:
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
        parts.append((name, _argument(name, value, keep, names, groups)))
    while parts and parts[-1] in signature.defaults:
        parts.pop()
    for name in sorted(node.kwargs):
        keep = (signature.keeps or {}).get(name, signature.keeps_numbers)
        part = name, _argument(name, node.kwargs[name], keep, names, groups)
        if part not in signature.defaults:
            parts.append((name, f"{name}={part[1]}"))
    return f"{names[node]} = {signature.name}({', '.join(text for _, text in parts)}){_type(node.meta.get('val'))}"


def _takes_a_part(node: fx.Node) -> bool:
    """Whether `node` selects one of a list of equal tensors (split, chunk); tensor parallelism selects by rank."""
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
    keeps = [(argument.name, _keeps_numbers(argument)) for argument in target._schema.arguments]
    positional = tuple(pair for pair, arg in zip(keeps, target._schema.arguments, strict=True) if not arg.kwarg_only)
    collective = "c10d" in target.namespace and target._opname.startswith(_EQUAL_SIZES)
    defaults = frozenset((arg.name, _SIZE) for arg in target._schema.arguments if arg.has_default_value())
    return _Signature(str(target), positional, dict(keeps), defaults=defaults, equal_sizes=collective)


def _keeps_numbers(argument: Any) -> bool:
    """Whether numbers in an argument of a schema are printed: dims, counts and flags are int; sizes are SymInt, with
    few exceptions, and operands Scalar, float or Tensor."""
    kind = argument.real_type
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return kind.kind() == "IntType" and argument.name not in _SIZES


def _argument(name: str, value: Any, keep: bool, names: Mapping[fx.Node, str], groups: Groups) -> str:
    if name == "group_name" and isinstance(value, str):
        return f"<{groups[value]}>"
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
    return type(value).__name__  # the text of another object may contain an address


def _type(value: Any) -> str:
    """Return the type of a value as ` : bf16 2d`, several joined by commas; "" if unknown."""
    if isinstance(value, torch.Tensor):
        return f" : {_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))} {value.dim()}d"
    if isinstance(value, (list, tuple)):
        return " : " + ", ".join(_type(item).removeprefix(" : ") or "-" for item in value)
    return f" : {type(value).__name__}" if value is not None else ""


def _sizes(value: Any) -> str:
    """Return the sizes as `[512, 64]`; a symbolic size is `s`, because its name may differ between ranks."""
    if isinstance(value, torch.Tensor):
        return f"[{', '.join(str(size) if isinstance(size, int) else 's' for size in value.shape)}]"
    if isinstance(value, Sequence):
        return " ".join(_sizes(item) for item in value)
    return "-"
