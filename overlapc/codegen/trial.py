"""Synthetic arguments to time generated kernels alone, and a check of which kernels can run on them.

Integers are zeros and floats are random. A kernel that loads its indices from memory (an embedding, the logit of a
target) then reads element 0. A kernel whose indices could be out of bounds is refused, because its failed assertion
would make the device unusable for the process. Buffers that a kernel overwrites in place are synthetic, too, so it may
run repeatedly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overlapc.ir.body import Body, Cast, Checked, Constant, Index, Load, Op, Value, topological
from overlapc.ir.hazards import scatters
from overlapc.ir.ops import LoweredGraph

_ALIGNMENT_BYTES = 512  # that of torch's allocator: kernels are compiled for aligned buffers
_MOST_SETS = 64
_DRAWN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FOLDED: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "logical_and": lambda a, b: bool(a and b),
    "logical_or": lambda a, b: bool(a or b),
}


def refuse(body: Body) -> str | None:
    """Return why `body` cannot run on synthetic arguments, or None."""
    if scatters(body):
        return "its stores, and so its time, depend on loaded values"
    at_zero = _folded(body)
    for value in body.values():
        if isinstance(value, Checked) and at_zero.get(value.condition) is not True:
            return f"synthetic values might fail its check: {value.message}"
        indirect = value.indirect if isinstance(value, Load) else ()
        if any(at_zero.get(where) != 0 and _reads(where) for _, where in indirect):
            return "synthetic values might be indices out of bounds"
    return None


def memory_sets(
    buffers: Iterable[str], graph: LoweredGraph, device: torch.device, span_bytes: int
) -> list[list[Tensor]]:
    """Return sets of arguments for successive launches, each with a tensor per name in `buffers`.

    There are as many sets as fill `span_bytes`, at most `_MOST_SETS`. Names that share memory in the graph share it in
    a set. torch.OutOfMemoryError if they do not fit.
    """
    names = list(buffers)
    roots = {root: graph.views[root].layout for root in dict.fromkeys(map(graph.root, names))}
    elements = {root: _padded(graph.hint(layout.storage_numel()), layout.dtype) for root, layout in roots.items()}
    set_bytes = sum(count * roots[root].dtype.itemsize for root, count in elements.items())
    sets = max(1, min(_MOST_SETS, -(-span_bytes // max(1, set_bytes))))
    memory = {root: _filled(sets, count, roots[root].dtype, device) for root, count in elements.items()}
    return [[memory[graph.root(name)][at] for name in names] for at in range(sets)]


def _padded(elements: int, dtype: torch.dtype) -> int:
    unit = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    return -(-max(1, elements) // unit) * unit


def _filled(sets: int, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    memory = torch.zeros(sets, elements, dtype=dtype, device=device)
    if dtype in _DRAWN:
        memory.normal_(generator=torch.Generator(device).manual_seed(0))  # leaves the user's generators unchanged
    return memory


def _reads(value: Value) -> bool:
    return any(isinstance(part, Load) for part in topological([value]))


def _folded(body: Body) -> dict[Value, int | float | bool]:
    """Return the values that are the same number at every position if all integers in memory are 0."""
    found: dict[Value, int | float | bool] = {}
    for value in body.values():
        number = _number(value, found)
        if number is not None:
            found[value] = number
    return found


def _number(value: Value, known: Mapping[Value, int | float | bool]) -> int | float | bool | None:
    if isinstance(value, Load):
        return None if value.memory_dtype.is_floating_point else 0
    if isinstance(value, Constant):
        return value.number
    if isinstance(value, Index):
        return int(value.expr) if value.expr.is_Integer else None
    if isinstance(value, Cast | Checked):
        return known.get(value.arg)
    if isinstance(value, Op) and value.name == "where" and value.args[0] in known:
        return known.get(value.args[1 if known[value.args[0]] else 2])
    if isinstance(value, Op) and value.name in _FOLDED:
        arguments: Sequence[int | float | bool | None] = [known.get(arg) for arg in value.args]
        if None not in arguments:
            return _FOLDED[value.name](*arguments)
    return None
