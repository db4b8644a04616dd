"""Reorders loops so that two kernels visit the buffers that they share in the same order.

    y[4*p0 + p1] = exp(x[4*p0 + p1]);  z[3*p0 + p1] = y[p0 + 4*p1]      over (3, 4) and (4, 3)
 -> the second over (3, 4) as well: z[p0 + 3*p1] = y[4*p0 + p1], and now they can merge

This is tried last, when nothing else fuses, so that it prevents no other fusion. The bytes that become strided must not
exceed the memory traffic that is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import sympy
from torch.utils._sympy.functions import FloorDiv

from overlapc.ir.body import Body, Load, Loop, Store
from overlapc.ir.indexing import ModularIndexing, exact_quotient, free_symbols, loop_symbol
from overlapc.ir.rewriting import canonical, with_loops

Bytes = Callable[[str], int]  # bytes of a buffer at the traced sizes


def in_order_of(body: Body, buffer: str, hint: Callable[[sympy.Expr], int]) -> Body | None:
    """Return `body` with its parallel loops in the memory order of its accesses to `buffer`, outermost first.

    None if there is no single order: accesses at several indices, or through indices loaded from memory.
    hint: evaluates strides at the traced sizes.
    """
    body = split_at_divisions(body)
    accesses = [access for access in _accesses(body) if access.buffer == buffer]
    if not accesses or any(access.indirect for access in accesses):
        return None
    (index, *others) = {access.index for access in accesses}
    if others:
        return None
    strides = {loop: step(index, loop) for loop in body.loops}
    if any(stride is None for stride in strides.values()):
        return None
    loops = sorted(body.loops, key=lambda loop: -hint(strides[loop] or sympy.S.Zero))
    return canonical(Body(tuple(loops), body.reduction, body.stores))


def split_at_divisions(body: Body) -> Body:
    """Split each loop that indices divide (`x[p0 // 6]`, `x[p0 % 6]`) into several, so that every index is linear."""
    nests: list[tuple[Loop, ...]] = []
    replacement: dict[sympy.Symbol, sympy.Expr] = {}
    indices = frozenset(expr for value in body.values() for expr in value.indices())
    indices |= {store.index for store in body.stores}
    for prefix, nest in (("p", body.loops), ("r", body.reduction)):
        loops: list[Loop] = []
        for loop in nest:
            position: sympy.Expr = sympy.S.Zero
            for size in _parts(loop, indices):
                loops.append(Loop(loop_symbol(prefix, len(loops)), size))
                position = position * size + loops[-1].symbol
            replacement[loop.symbol] = sympy.expand(position)
        nests.append(tuple(loops))
    loops_, reduction = nests
    if len(loops_) == len(body.loops) and len(reduction) == len(body.reduction):
        return body
    return with_loops(body, replacement, loops_, reduction)


@lru_cache(20_000)
def _parts(loop: Loop, indices: frozenset[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """Return sizes, outermost first, whose product is the loop's, split wherever an index divides by a constant."""
    borders: set[int] = set()
    for division in (found for expr in indices for found in expr.atoms(FloorDiv, ModularIndexing)):
        base, divisor, *modulus = division.args
        if base == loop.symbol and all(number.is_Integer for number in (divisor, *modulus)):
            borders |= {int(divisor), *(int(divisor) * int(number) for number in modulus)}
    parts: list[sympy.Expr] = []
    inner = 1
    for border in sorted(borders - {1}):
        if border % inner or exact_quotient(loop.size, sympy.Integer(border)) is None:
            return (loop.size,)
        parts.insert(0, sympy.Integer(border // inner))
        inner = border
    rest = exact_quotient(loop.size, sympy.Integer(inner))
    return tuple(parts) if rest == 1 else (rest or loop.size, *parts)


def step(index: sympy.Expr, loop: Loop) -> sympy.Expr | None:
    """Return by how much `index` grows from one iteration of `loop` to the next; None if that varies."""
    return _step(index, loop.symbol) if loop.symbol in free_symbols((index,)) else sympy.S.Zero


@lru_cache(200_000)  # the layers of a model have the same indices
def _step(index: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr | None:
    stride = index.coeff(symbol)
    rest = sympy.expand(index - stride * symbol)
    return None if symbol in free_symbols((rest, stride)) else stride


def scattered_bytes(body: Body, bytes_of: Bytes, along: Loop | None = None) -> int:
    """Return the bytes of buffers that are neither contiguous nor constant along the loop `along`.

    along: by default the innermost loop.
    """
    loops = (along,) if along is not None else (*body.loops, *body.reduction)[-1:]
    found: dict[str, int] = {}
    for access in _accesses(body):
        if any(step(access.index, loop) not in (0, 1) for loop in loops):
            found[access.buffer] = bytes_of(access.buffer)
    return sum(found.values())


def untiled_bytes(body: Body, bytes_of: Bytes) -> int:
    """Return the bytes of buffers that are contiguous along neither axis of a tile, for the best choice of its axes.

    The axes are two loops of an element-wise kernel, or a parallel and a reduction loop. Stride 2 counts as contiguous,
    too, because two accesses may alternate (codegen/triton/pairs.py).
    """
    steps: dict[str, set[sympy.Symbol]] = {}
    for access in _accesses(body):
        whole = {loop.symbol for loop in (*body.loops, *body.reduction) if step(access.index, loop) != 0}
        near = {loop.symbol for loop in (*body.loops, *body.reduction) if step(access.index, loop) in (1, 2)}
        if whole:
            steps[access.buffer] = steps.get(access.buffer, near) & near
    rows, others = body.loops, body.reduction or body.loops
    axes = [{one.symbol, other.symbol} for one in rows or others for other in others]
    lost = [sum(bytes_of(name) for name, near in steps.items() if axis.isdisjoint(near)) for axis in axes]
    return min(lost, default=0)


def _accesses(body: Body) -> list[Load | Store]:
    return [*body.loads(), *body.stores]
