"""Random loop bodies, and buffers for them."""

from __future__ import annotations

import sympy
import torch
from hypothesis import strategies as st
from torch import Tensor

from overlapc.ir.body import Body, Load, Loop, Reduce, Store, Value, op
from overlapc.ir.indexing import loop_symbol

P = [loop_symbol("p", at) for at in range(4)]
R = [loop_symbol("r", at) for at in range(3)]


def loops_of(prefix: str, sizes: tuple[int, ...]) -> tuple[Loop, ...]:
    """Return loops p0, p1, … (or r0, …) of these sizes."""
    return tuple(Loop(loop_symbol(prefix, at), sympy.Integer(size)) for at, size in enumerate(sizes))


def flat(loops: tuple[Loop, ...]) -> sympy.Expr:
    """Return the row-major number of an iteration, outermost loop first."""
    index: sympy.Expr = sympy.S.Zero
    for loop in loops:
        index = index * loop.size + loop.symbol
    return sympy.expand(index)


def x(buffer: str, index: object, dtype: torch.dtype = torch.float32) -> Load:
    """Return a load, of float32 by default."""
    return Load(buffer, sympy.sympify(index), dtype)


def put(buffer: str, index: object, value: Value) -> Store:
    """Return a store of float32."""
    return Store(buffer, sympy.sympify(index), value, torch.float32)


@st.composite
def indices(draw: st.DrawFn, loops: tuple[Loop, ...]) -> sympy.Expr:
    """Draw the index of a load: flat, permuted or broadcast over `loops`."""
    order = draw(st.permutations(range(len(loops))))
    used = [loops[at] for at in order if draw(st.integers(0, 4))]
    return flat(tuple(used))


@st.composite
def bodies(
    draw: st.DrawFn, out: str = "y", sizes: tuple[int, ...] | None = None, inputs: tuple[str, ...] = ("a", "b")
) -> Body:
    """Draw an element-wise or reducing body over small loops.

    It has one store; a reduction may have a second one, inside its reduction loops.
    """
    if sizes is None:
        sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    parallel = loops_of("p", sizes)
    inner = loops_of("r", tuple(draw(st.lists(st.integers(1, 4), max_size=2))))
    every = (*parallel, *inner)
    values: list[Value] = [x(name, draw(indices(every))) for name in inputs]
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(("add", "mul", "sub", "maximum")))
        values.append(op(name, draw(st.sampled_from(values)), draw(st.sampled_from(values))))
    if not inner:
        return Body(parallel, (), (put(out, flat(parallel), values[-1]),))
    total = Reduce(draw(st.sampled_from(("sum", "max"))), values[-1], torch.float32)
    stores = [put(out, flat(parallel), total)]
    if draw(st.booleans()):
        stores.append(put(f"{out}_all", flat(every), op("sub", draw(st.sampled_from(values)), total)))
    return Body(parallel, inner, tuple(stores))


def buffers_for(*each: Body, fill: float = -1000.0, elements: int = 4**5) -> dict[str, Tensor]:
    """Return memory for all buffers of the bodies: `fill` in buffers that they store, random integers in the others.

    Sums of integers are exact in any order.
    """
    memory: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for body in each:
        for store in body.stores:
            memory[store.buffer] = torch.full((elements,), fill)
    for body in each:
        for load in body.loads():
            if load.buffer not in memory:
                memory[load.buffer] = torch.randint(-2, 3, (elements,), generator=generator).float()
    return memory
