"""Merges pieces of a loop that read the same memory into one loop.

    for p0 < 32: y[p0] = f(x[p0], x[p0 + 32]);   for 32 <= p0 < 64: y[p0] = g(x[p0], x[p0 - 32])
 -> for p0 < 32: a = x[p0]; b = x[p0 + 32]; y[p0] = f(a, b); y[p0 + 32] = g(b, a)

The halves of a rotary embedding are such pieces: values computed from an element before the rotation (a norm,
roundings) are then computed once instead of twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch

from overlapc.codegen.cpp.pieces import LoopPiece
from overlapc.ir.body import Constant, Load, Loop, Op, Value
from overlapc.ir.rewriting import rebuild


@dataclass(frozen=True, slots=True)
class Moved:
    """One piece, computed in the iterations of the first piece."""

    shift: int  # first iteration of the piece
    facts: Mapping[Value, bool]
    values: Mapping[Value, Value]  # value of the piece -> the value `shift` iterations later, with `facts` applied


def side_by_side(parts: Sequence[LoopPiece], needed: Sequence[Sequence[Value]], loop: Loop) -> list[Moved] | None:
    """Merge the pieces of `loop`; None if their lengths differ or no two pieces share a read.

    needed: the values that each piece computes, operands first.
    """
    if len(parts) < 2 or not loop.size.is_Integer or int(loop.size) % len(parts):
        return None
    length = int(loop.size) // len(parts)
    shifts = [0 if part.begin is None else part.begin for part in parts]
    if shifts != [at * length for at in range(len(parts))]:
        return None
    moved = [
        Moved(int(shift), part.facts, _moved(values, part.facts, loop.symbol, int(shift)))
        for part, values, shift in zip(parts, needed, shifts, strict=True)
    ]
    seen: set[Value] = set()
    shared = False
    for piece in moved:
        reads = {
            new for new in piece.values.values() if isinstance(new, Load) and loop.symbol in new.index.free_symbols
        }
        shared = shared or not seen.isdisjoint(reads)
        seen |= reads
    return moved if shared else None


def _moved(
    values: Sequence[Value], facts: Mapping[Value, bool], symbol: sympy.Symbol, shift: int
) -> dict[Value, Value]:
    """Map `values` to those `shift` iterations later, with `facts` applied; operands outside of `values` stay."""
    later = {symbol: symbol + shift}
    new: dict[Value, Value] = {}
    for value in values:
        if value in facts:
            new[value] = Constant(facts[value], torch.bool)
            continue
        if isinstance(value, Op) and value.name == "where" and value.args[0] in facts:
            chosen = value.args[1 if facts[value.args[0]] else 2]
            new[value] = new.get(chosen, chosen)
            continue
        if isinstance(value, Load) and value.mask is not None and value.mask in facts:
            if not facts[value.mask]:
                new[value] = Constant(0, value.dtype)
                continue
            indirect = tuple((name, new.get(index, index)) for name, index in value.indirect)
            new[value] = Load(value.buffer, value.index.xreplace(later), value.memory_dtype, None, indirect)
            continue
        operands = tuple(new.get(operand, operand) for operand in value.operands())
        new[value] = rebuild(value, operands, lambda expr: expr.xreplace(later))
    return new
