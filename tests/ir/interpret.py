"""An interpreter of loop bodies and lowered graphs: torch ops over all iterations at once, without code generation.

Buffers are flat tensors in a dict. A value is a tensor over (parallel loops..., reduction loops...), so a test of a
rewrite takes milliseconds: run the body before and after, compare the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils._sympy.functions import FloorDiv

from overlapc.ir.body import Body, Cast, Checked, Constant, Index, Load, Op, Reduce, Scan, Store, Value
from overlapc.ir.indexing import ModularIndexing
from overlapc.ir.ops import Combo, Handle, IROp, Loops, LoweredGraph, Start, View, Wait, loops_of, tree_map

Env = Mapping[sympy.Symbol, Any]  # numbers or int64 tensors


def evaluate(expr: Any, env: Env) -> Any:
    """Return the value of an index expression for the numbers (or tensors of numbers) in `env`, in exact integers."""
    expr = sympy.sympify(expr)
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return env[expr]
    parts = [evaluate(part, env) for part in expr.args]
    if isinstance(expr, sympy.Add):
        return sum(parts)
    if isinstance(expr, sympy.Mul):
        product = parts[0]
        for part in parts[1:]:
            product = product * part
        return product
    if isinstance(expr, FloorDiv):
        return _floor_div(parts[0], parts[1])
    if isinstance(expr, ModularIndexing):
        divided = _floor_div(parts[0], parts[1])
        return divided - _floor_div(divided, parts[2]) * parts[2]
    if isinstance(expr, sympy.Pow):
        return parts[0] ** parts[1]
    assert isinstance(expr, sympy.Max), f"no meaning for {type(expr).__name__} in {expr}"
    return max(parts)


def _floor_div(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.div(a, b, rounding_mode="floor")
    return a // b


_SAME = (
    "neg abs sign signbit reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan "
    "sinh cosh tanh asinh acosh atanh erf erfc lgamma sigmoid relu floor ceil trunc round isnan isinf "
    "logical_not bitwise_not mul div remainder fmod pow atan2 hypot copysign nextafter maximum minimum "
    "eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor where add sub"
).split()
_BITS = {
    torch.float32: torch.int32, torch.int32: torch.float32, torch.float64: torch.int64, torch.int64: torch.float64,
}  # fmt: skip
MEANING: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in _SAME},
    "floor_div": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "bitcast": lambda x: x.view(_BITS[x.dtype]),
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
}


def run_body(body: Body, buffers: Mapping[str, Tensor], sizes: Env | None = None) -> None:
    """Run all iterations, which read and overwrite the flat tensors in `buffers`."""
    loops = (*body.loops, *body.reduction)
    extents = [evaluate(loop.size, sizes or {}) for loop in loops]
    space = torch.Size(extents)
    env: dict[sympy.Symbol, Any] = dict(sizes or {})
    for at, loop in enumerate(loops):
        shape = [1] * len(loops)
        shape[at] = extents[at]
        env[loop.symbol] = torch.arange(extents[at]).reshape(shape)
    rows = len(body.loops)
    values: dict[Value, Tensor] = {}
    for value in body.values():
        values[value] = _value(value, values, env, space, rows, buffers)
    for store in body.stores:
        if store.is_total:
            _total(store, values[store.value], env, space, buffers)
        else:
            _store(store, values, env, space, rows, buffers)


def _value(
    value: Value, values: dict[Value, Tensor], env: Env, space: torch.Size, rows: int, buffers: Mapping[str, Tensor]
) -> Tensor:
    if isinstance(value, Constant):
        return torch.tensor(value.number, dtype=value.dtype).expand(space)
    if isinstance(value, Index):
        return _over(evaluate(value.expr, env), space).to(value.dtype)
    if isinstance(value, Cast):
        return values[value.arg].to(value.to).to(value.dtype)
    if isinstance(value, Checked):
        assert bool(values[value.condition].all()), value.message
        return values[value.arg]
    if isinstance(value, Reduce):
        return _reduce(value, values[value.arg], space, rows)
    if isinstance(value, Scan):
        return _scan(value, values[value.arg], space, rows)
    if isinstance(value, Load):
        return _load(value, values, env, space, buffers)
    assert isinstance(value, Op)
    result = MEANING[value.name](*(values[arg] for arg in value.args))
    assert result.dtype == value.dtype, f"{value.name} yields {result.dtype}, the body says {value.dtype}"
    return result


def _load(
    load: Load, values: dict[Value, Tensor], env: Env, space: torch.Size, buffers: Mapping[str, Tensor]
) -> Tensor:
    index = _over(evaluate(load.index, {**env, **{symbol: values[at] for symbol, at in load.indirect}}), space)
    flat = buffers[load.buffer]
    assert flat.dtype == load.memory_dtype, f"{load.buffer} holds {flat.dtype}, loaded as {load.memory_dtype}"
    if load.mask is not None:
        index = torch.where(values[load.mask], index, 0)
    if not index.numel():
        return torch.empty(space, dtype=load.dtype)
    assert int(index.min()) >= 0, f"{load.buffer} is read before its start"
    assert int(index.max()) < flat.numel() or load.mask is not None, f"{load.buffer} is read behind its end"
    if not flat.numel():
        return torch.zeros(space, dtype=load.dtype)
    found = flat[index].to(load.dtype)
    return found if load.mask is None else torch.where(values[load.mask], found, torch.zeros((), dtype=load.dtype))


def _scan(scan: Scan, arg: Tensor, space: torch.Size, rows: int) -> Tensor:
    row = arg.expand(space).reshape(*space[:rows], -1)
    if scan.kind in ("sum", "prod", "logsumexp"):
        function = {"sum": torch.cumsum, "prod": torch.cumprod, "logsumexp": torch.logcumsumexp}[scan.kind]
        found = function(row, -1)
    else:
        extremes = row.cummax(-1) if scan.kind.endswith("max") else row.cummin(-1)
        found = extremes.indices if scan.kind.startswith("arg") else extremes.values
    return found.reshape(space).to(scan.dtype)


def _reduce(reduce: Reduce, arg: Tensor, space: torch.Size, rows: int) -> Tensor:
    flat = arg.expand(space).reshape(*space[:rows], -1)
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda x: x.sum(-1, dtype=reduce.dtype),
        "prod": lambda x: x.prod(-1, dtype=reduce.dtype),
        "max": lambda x: x.amax(-1),
        "min": lambda x: x.amin(-1),
        "any": lambda x: x.any(-1),
        "all": lambda x: x.all(-1),
        "argmax": lambda x: x.argmax(-1),
        "argmin": lambda x: x.argmin(-1),
    }
    result = kinds[reduce.kind](flat)
    return result.reshape([*space[:rows], *[1] * (len(space) - rows)]).expand(space)


def _store(
    store: Store, values: dict[Value, Tensor], env: Env, space: torch.Size, rows: int, buffers: Mapping[str, Tensor]
) -> None:
    index = _over(evaluate(store.index, {**env, **{symbol: values[at] for symbol, at in store.indirect}}), space)
    value = values[store.value].expand(space).to(store.memory_dtype)
    flat = buffers[store.buffer]
    chosen = torch.ones(space, dtype=torch.bool) if store.mask is None else values[store.mask].expand(space)
    index, value = index[chosen], value[chosen]
    if store.mode == "add":
        flat.index_add_(0, index, value)
        return
    if store.mode in ("max", "min"):
        flat.scatter_reduce_(0, index, value, f"a{store.mode}")
        return
    flat[index] = value
    again = flat[index]  # iterations that write the same element must write the same value
    same = (again == value) | ((again != again) & (value != value))
    assert bool(same.all()), f"iterations write different values to one element of {store.buffer}"


def _total(store: Store, value: Tensor, env: Env, space: torch.Size, buffers: Mapping[str, Tensor]) -> None:
    index = _over(evaluate(store.index, env), space)
    flat = buffers[store.buffer]
    total = torch.full(flat.shape, {"sum": 0, "prod": 1}[store.mode], dtype=value.dtype)
    total.scatter_reduce_(0, index.reshape(-1), value.expand(space).reshape(-1), store.mode)
    rounded = total[index] if store.total_dtype is None else total[index].to(store.total_dtype)
    flat[index] = rounded.to(store.memory_dtype)


def _over(index: Any, space: torch.Size) -> Tensor:
    return (index if isinstance(index, Tensor) else torch.tensor(index)).expand(space)


def run_ops(
    ops: Sequence[IROp], graph: LoweredGraph, inputs: Sequence[Any], wrong_before: float = float("nan")
) -> list[Any]:
    """Return the graph's outputs for `inputs` when its ops run in this order.

    Memory that no op has written yet is NaN (or a large number), so a missing dependence shows.
    """
    memory: dict[str, Any] = {}  # root buffer -> flat tensor, or the object of a handle
    sizes: dict[sympy.Symbol, int] = {}

    def learn(expr: Any, number: int) -> None:
        if isinstance(expr, sympy.Expr) and expr.is_Symbol:
            sizes.setdefault(expr, number)

    def define(name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            memory[name] = value
            return
        layout = graph.views[name].layout
        for expr, number in zip((*layout.size, *layout.stride), (*value.shape, *value.stride()), strict=True):
            learn(expr, number)
        span = 1 + sum((extent - 1) * step for extent, step in zip(value.shape, value.stride(), strict=True))
        memory[name] = value.as_strided((span if value.numel() else 0,), (1,))

    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, Handle):
            return memory[leaf.buffer]
        if isinstance(leaf, View):
            layout = leaf.layout
            size, stride = ([evaluate(each, sizes) for each in exprs] for exprs in (layout.size, layout.stride))
            return memory[graph.root(leaf.buffer)].as_strided(size, stride, evaluate(layout.offset, sizes))
        return evaluate(leaf, sizes) if isinstance(leaf, sympy.Expr) else leaf

    for name, value in zip(graph.inputs, inputs, strict=True):
        if name in graph.scalars:
            learn(graph.scalars[name], value)
        define(name, value)
    for name, value in graph.constants.items():
        define(name, value)
    for op in ops:
        if isinstance(op, Wait):
            continue
        for part in loops_of(op):
            for view in part.outputs:
                count = evaluate(view.layout.storage_numel(), sizes)
                memory[view.buffer] = _unwritten(count, view.dtype, wrong_before)
            names = {load.buffer for load in part.body.loads()} | {store.buffer for store in part.body.stores}
            run_body(part.body, {name: memory[graph.root(name)] for name in names}, sizes)
        if isinstance(op, Loops | Combo):
            continue
        call = op.call if isinstance(op, Start) else op
        result = call.target(*tree_map(tensor, call.args), **tree_map(tensor, dict(call.kwargs)))
        own = {each.buffer for each in call.outputs}
        for leaf, value in _pairs(call.result, result):
            if leaf.buffer in own:
                if isinstance(leaf, Handle) and leaf.expr is not None:
                    learn(leaf.expr, value)
                define(leaf.buffer, value)
    return [tree_map(tensor, output) for output in graph.outputs]


def _unwritten(count: int, dtype: torch.dtype, number: float) -> Tensor:
    if dtype.is_floating_point:
        return torch.full((count,), number, dtype=dtype)
    return torch.full((count,), 1, dtype=dtype) if dtype == torch.bool else torch.full((count,), 77, dtype=dtype)


def _pairs(mirror: Any, result: Any) -> list[tuple[View | Handle, Any]]:
    if isinstance(mirror, View | Handle):
        return [(mirror, result)]
    if isinstance(mirror, tuple | list):
        return [pair for one, other in zip(mirror, result, strict=True) for pair in _pairs(one, other)]
    return []


__all__ = ["evaluate", "run_body", "run_ops"]
