"""Matrix products: each program computes a tile [y, x] of sums by a loop over r, which multiplies [y, r] by [r, x].

    accumulated = tl.full([YBLOCK, XBLOCK], 0.0, tl.float32)
    for r_start in range(0, 4096, RBLOCK):
        ...
        accumulated = ops.dot(a0, b0, accumulated, "ieee")

Loops with which only one factor varies form that factor's axis; loops with which both vary (the batch) are constant in
a program. A factor may be any expression: a load, or a load that is cast or scaled (the prologue). The index of a
broadcast factor just does not contain the loop. Computations on the sums (the epilogue: bias, activation, casts,
several stores) are written over [y, x] as in any element-wise kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import sympy
import torch

from overlapc.codegen.triton.axes import Scope
from overlapc.codegen.triton.expressions import converted
from overlapc.codegen.triton.shape import KernelShape
from overlapc.codegen.triton.tiling import MULTIPROCESSORS, Tiling, hint_of, power_of_two
from overlapc.codegen.triton.values import ValueWriter
from overlapc.ir.body import Body, Cast, Load, Loop, Op, Reduce, Value, depends_on
from overlapc.ir.indexing import numel

_SMALLEST = 16  # tl.dot takes no smaller tile in any dim
_GROUP = 8  # rows of tiles whose programs run together, so that they share the other factor's tiles in L2
_LOW_PRECISION = (torch.float16, torch.bfloat16)
# Rows, columns and length of a tile, warps, stages. A thread holds rows * columns / (32 * warps) sums in registers,
# and 228 KiB of shared memory hold `stages` tiles of both factors.
_NARROW = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4),
           (64, 64, 64, 4, 4))  # fmt: skip
_WIDE = ((64, 64, 32, 4, 3), (128, 64, 16, 4, 3), (32, 64, 32, 4, 3))
_Tile: TypeAlias = tuple[int, int, int, int, int]
_preferred: dict[tuple[int, int, int, int, bool], _Tile] = {}  # fastest measured tile, by `_sizes`


def refuse(body: Body) -> str | None:
    """Return why no kernel can be generated for a body with matrix products, or None."""
    if len([value for value in body.values() if isinstance(value, Reduce)]) > 1:
        return "a matrix product beside another reduction"
    (dot,) = body.dots()
    if not isinstance(dot.arg, Op) or dot.arg.name != "mul" or dot.dtype is not torch.float32:
        return "a matrix product that is not a float32 sum of products"
    if axes(body) is None:
        return "a matrix product whose factors vary with the same loops"
    if body.stores_terms():
        return "a matrix product whose terms are stored"
    return None


def axes(body: Body) -> tuple[tuple[Loop, ...], tuple[Loop, ...], tuple[Loop, ...]] | None:
    """Return the loops of y, of x, and those constant in a program; None if a factor has no loop of its own."""
    left, right = _factors(body)
    found: dict[str, list[Loop]] = {"y": [], "x": [], "fixed": []}
    for loop in body.loops:
        in_left, in_right = (depends_on([factor], {loop.symbol})[factor] for factor in (left, right))
        found["fixed" if in_left == in_right else "y" if in_left else "x"].append(loop)
    y, x, fixed = (tuple(loops) for loops in found.values())
    return (y, x, fixed) if y and x else None


def choose(body: Body, hints: Mapping[sympy.Symbol, int]) -> Tiling:
    """Return the tiling that was measured to be fastest for products of these sizes, else the most promising one."""
    tile = _preferred.get(_sizes(body, hints))
    return candidates(body, hints)[0] if tile is None else _tiling(body, hints, tile)


def prefer(body: Body, hints: Mapping[sympy.Symbol, int], tiling: Tiling) -> None:
    """Make `choose` return tiles of this shape for products of these sizes."""
    _preferred[_sizes(body, hints)] = _tile(tiling)


def candidates(body: Body, hints: Mapping[sympy.Symbol, int]) -> list[Tiling]:
    """Return tilings worth measuring, the most promising first."""
    shapes: tuple[_Tile, ...] = _NARROW if _is_narrow(body) else _WIDE
    _, rows, columns, _, _ = _sizes(body, hints)
    if rows * columns < 128 * 256 * MULTIPROCESSORS:  # large tiles would leave multiprocessors without work
        shapes = shapes[1:] + shapes[:1]
    return list(dict.fromkeys(_tiling(body, hints, shape) for shape in shapes))


def tile_name(tiling: Tiling) -> str:
    """Return a tiling as text: `128x256x64, 8 warps, 3 stages` (rows, columns and length)."""
    rows, columns, length, warps, stages = _tile(tiling)
    return f"{rows}x{columns}x{length}, {warps} warps, {stages} stages"


def _tile(tiling: Tiling) -> _Tile:
    return tiling.yblock, tiling.xblock, tiling.rblock, tiling.num_warps, tiling.num_stages


def _sizes(body: Body, hints: Mapping[sympy.Symbol, int]) -> tuple[int, int, int, int, bool]:
    """Return the number of products, their rows, columns and length, and whether factors have low precision."""
    found = axes(body)
    assert found is not None
    y, x, grid = found
    parts = (grid, y, x, body.reduction)
    batch, rows, columns, length = (hint_of(numel(loop.size for loop in loops), hints) for loops in parts)
    return batch, rows, columns, length, _is_narrow(body)


def _tiling(body: Body, hints: Mapping[sympy.Symbol, int], tile: _Tile) -> Tiling:
    """Return a tiling with tiles of this shape, shrunk to the sizes."""
    found = axes(body)
    assert found is not None
    y, x, grid = found
    _, rows, columns, length, _ = _sizes(body, hints)
    yblock, xblock, rblock, warps, stages = tile
    return Tiling(
        "dot",
        x,
        _fit(xblock, columns),
        warps,
        r=body.reduction,
        rblock=_fit(rblock, length),
        y=y,
        yblock=_fit(yblock, rows),
        grid=grid,
        num_stages=stages,
    )


def lines(kernel: KernelShape) -> list[str]:
    """Return the lines of the kernel's only function."""
    (dot,) = kernel.body.dots()
    out = ValueWriter(kernel.seen_over(("y", "x")))
    _program_axes(out)
    out.top("accumulated = tl.full([YBLOCK, XBLOCK], 0.0, tl.float32)")
    out.top(f"for r_start in range(0, {kernel.size_text(kernel.numel['r'])}, RBLOCK):")
    loop = out.top.inner()
    left, right = _factors(kernel.body)
    a = _FactorWriter(kernel.seen_over(("y", "r")), "a", out, loop).tile_of(left)
    b = _FactorWriter(kernel.seen_over(("r", "x"), suffix="t"), "b", out, loop).tile_of(right)
    loop(f'accumulated = ops.dot({a}, {b}, accumulated, "{float32_precision()}")')
    out.names[dot] = "accumulated"
    out.value_axes[dot] = frozenset({"y", "x"})
    out.write(out.top, out.names, kernel.body.stores, ("y", "x"))
    return out.lines


class _FactorWriter(ValueWriter):
    """Writes one factor's tile inside of the loop over r; elements out of bounds are 0."""

    def __init__(self, kernel: KernelShape, prefix: str, out: ValueWriter, loop: Scope) -> None:
        super().__init__(kernel)
        self.prefix = prefix
        self.loop = loop
        self.zero_outside = True
        self.symbols = dict(out.symbols)
        self.masks = {axis: mask for axis, mask in out.masks.items() if axis in kernel.tile_axes}
        self.axis_index("r", f"r_start + {kernel.widened('tl.arange(0, RBLOCK)')}", loop)

    def fresh(self) -> str:
        self.count += 1
        return f"{self.prefix}{self.count - 1}"

    def tile_of(self, factor: Value) -> str:
        """Compute the factor in the dtype of the multiplication; return its name."""
        value, dtype = (factor.arg, factor.to) if isinstance(factor, Cast) else (factor, factor.dtype)
        if isinstance(value, Load) and value.memory_dtype is dtype:
            self.compute(self.loop, self.names, value.operands())
            text = self.raw(value, self.names)  # tensor cores multiply the memory dtype
            self.value_axes[value] = self.axes_of(value)
        else:
            self.compute(self.loop, self.names, [value])
            text = converted(self.names[value], value.dtype, dtype)
            masks = self.mask_argument(self.kernel.tile_axes).removeprefix(", ")
            if masks:
                text = f"tl.where({masks}, {text}, 0.0)"
        if self.value_axes[value] != set(self.kernel.tile_axes):
            text = f"tl.broadcast_to({text}, {self.kernel.shape(self.kernel.tile_axes)})"
        name = self.fresh()
        self.loop(f"{name} = {text}")
        return name


def _program_axes(out: ValueWriter) -> None:
    """Write which tile this program computes: groups of rows of tiles, column by column within a group."""
    kernel, emit = out.kernel, out.top
    out.sizes_as_indices()
    emit(f"program = {kernel.widened('tl.program_id(0)')}")
    for axis in ("y", "x"):
        block = f"{axis.upper()}BLOCK"
        emit(f"{axis}tiles = ({kernel.size_text(kernel.numel[axis])} + {block} - 1) // {block}")
    if kernel.tiling.grid:
        emit("batch = program // (ytiles * xtiles)")
        emit("program = program % (ytiles * xtiles)")
        out.fixed_loops("batch")
    emit(f"first = program // ({_GROUP} * xtiles) * {_GROUP}")
    emit(f"rows = tl.minimum(ytiles - first, {_GROUP})")
    emit(f"within = program % ({_GROUP} * xtiles)")
    out.axis("y", "first + within % rows", emit)
    out.axis("x", "within // rows", emit)


def _factors(body: Body) -> tuple[Value, Value]:
    (dot,) = body.dots()
    assert isinstance(dot.arg, Op)
    left, right = dot.arg.args
    return left, right


def _is_narrow(body: Body) -> bool:
    """Whether both factors are multiplied in low precision."""
    return all(isinstance(factor, Cast) and factor.to in _LOW_PRECISION for factor in _factors(body))


def float32_precision() -> str:
    """Return Triton's precision for float32 products, by torch's setting for its own products on GPUs."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _fit(block: int, size: int) -> int:
    return max(_SMALLEST, min(block, power_of_two(size)))
