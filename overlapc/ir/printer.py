"""Prints loop bodies as text, for dumps, tests and generated comments."""

from __future__ import annotations

import torch

from overlapc.ir.body import Body, Cast, Checked, Constant, Index, Load, Op, Reduce, Scan, Store, Value, depends_on

_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.bool: "bool",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as `f32`, `bf16` or `i64`, or else torch's name."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def print_body(body: Body) -> str:
    """Return a line with the loops, and one for each value and store.

    Stores that run once per iteration of the parallel loops are marked `outer`.

    ::

        for p0 < 512, reduce r0 < 4096
          %0 = load x[4096*p0 + r0]: bf16
          %1 = mul %0, %0: f32
          %2 = reduce sum %1: f32
          outer store y[p0]: f32 = %2
    """
    heads = [f"for {loop.symbol} < {loop.size}" for loop in body.loops]
    heads += [f"reduce {loop.symbol} < {loop.size}" for loop in body.reduction]
    lines = [", ".join(heads) or "once"]
    names: dict[Value, str] = {}
    values = body.values()
    for value in values:
        if isinstance(value, Constant):
            names[value] = f"{value.number!r}"
            continue
        names[value] = f"%{len(lines) - 1}"
        lines.append(f"  {names[value]} = {_value(value, names)}")
    varies = depends_on(values, (loop.symbol for loop in body.reduction))
    for store in body.stores:
        lines.append(f"  {_store(store, names, body, varies)}")
    return "\n".join(lines)


def _value(value: Value, names: dict[Value, str]) -> str:
    kind = dtype_name(value.dtype)
    if isinstance(value, Load):
        text = f"load {value.buffer}[{value.index}]: {dtype_name(value.memory_dtype)}"
        text += "".join(f", {symbol}={names[index]}" for symbol, index in value.indirect)
        return text + (f", if {names[value.mask]}" if value.mask is not None else "")
    if isinstance(value, Index):
        return f"index {value.expr}: {kind}"
    if isinstance(value, Checked):
        return f"checked {names[value.arg]}, {names[value.condition]}: {kind}, {value.message!r}"
    if isinstance(value, Cast):
        return f"cast {names[value.arg]}: {dtype_name(value.to)}"
    if isinstance(value, Reduce):
        return f"reduce {value.kind} {names[value.arg]}: {kind}"
    if isinstance(value, Scan):
        return f"scan {value.kind} {names[value.arg]}: {kind}, at {value.position}"
    assert isinstance(value, Op)
    return f"{value.name} {', '.join(names[arg] for arg in value.args)}: {kind}"


def _store(store: Store, names: dict[Value, str], body: Body, varies: dict[Value, bool]) -> str:
    symbols = {loop.symbol for loop in body.reduction}
    inner = bool(symbols & store.index.free_symbols) or any(varies[value] for value in store.operands())
    text = "" if inner or not body.reduction else "outer "
    text += "store" if store.mode == "set" else f"store {store.mode}"
    text += f" {store.buffer}[{store.index}]: {dtype_name(store.memory_dtype)} = {names[store.value]}"
    text += "".join(f", {symbol}={names[index]}" for symbol, index in store.indirect)
    text += f", rounded to {dtype_name(store.total_dtype)}" if store.total_dtype is not None else ""
    return text + (f", if {names[store.mask]}" if store.mask is not None else "")
