"""Bodies as fusion produces them, with nested reductions, strides, masks, indirect and in-place access, in any size."""

from __future__ import annotations

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from overlapc.ir.body import Body, Cast, Checked, Constant, Index, Load, Reduce, Store, op
from overlapc.ir.indexing import ModularIndexing
from tests.codegen.terms import i0, loop, number, p0, p1, p2, r0, r1, s0, s1, total

F32, F64, BF16, I64, BOOL = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool
ZERO = sympy.S.Zero


def rms_norm(rows, columns, dtype: torch.dtype = F32) -> Body:
    x, w = Load("x", columns * p0 + r0, dtype), Load("w", r0, F32)
    count = Cast(Index(sympy.sympify(columns)), F32)
    scale = op("rsqrt", op("add", op("div", total(op("mul", x, x)), count), number(1e-5)))
    stores = (
        Store("y", columns * p0 + r0, op("mul", op("mul", x, scale), w), dtype),
        Store("scale", p0, scale, F32),
    )
    return Body((loop(p0, rows),), (loop(r0, columns),), stores)


def softmax(rows, columns, down: bool = False) -> Body:
    """Return a softmax of every row, or of every column if `down`."""
    index = columns * r0 + p0 if down else columns * p0 + r0
    x = Load("x", index, F32)
    top = Reduce("max", x, F32)
    e = op("exp", op("sub", x, top))
    stores = (Store("y", index, op("div", e, total(e)), F32), Store("top", p0, top, F32))
    loops = (columns, rows) if down else (rows, columns)
    return Body((loop(p0, loops[0]),), (loop(r0, loops[1]),), stores)


def layer_norm_backward_of_weights(rows, columns) -> Body:
    """Column sums of g and of g * normalized x, where the statistics vary with the rows."""
    g, x = Load("g", columns * r0 + p0, F32), Load("x", columns * r0 + p0, F32)
    normalized = op("mul", op("sub", x, Load("mean", r0, F32)), Load("rstd", r0, F32))
    stores = (Store("dw", p0, total(op("mul", g, normalized)), F32), Store("db", p0, total(g), F32))
    return Body((loop(p0, columns),), (loop(r0, rows),), stores)


def variance_in_three_passes() -> Body:
    """The mean, the variance about it, and the largest normalized value: three nested reductions over two loops."""
    x = Load("x", 60 * p0 + 10 * r0 + r1, F32)
    mean = op("mul", total(x), number(1 / 60))
    centred = op("sub", x, mean)
    variance = op("mul", total(op("mul", centred, centred)), number(1 / 60))
    normalized = op("div", centred, op("sqrt", variance))
    stores = (Store("largest", p0, Reduce("max", normalized, F32), F32), Store("variance", p0, variance, F32))
    return Body((loop(p0, 9),), (loop(r0, 6), loop(r1, 10)), stores)


def permuted_reduction() -> Body:
    """Sum over dims 0 and 2 of a (6, 20, 10) tensor, and the position of its maximum in that order."""
    x = Load("x", 200 * r0 + 10 * p0 + r1, F32)
    stores = (
        Store("s", p0, total(x), F32),
        Store("at", p0, Reduce("argmax", x, I64), I64),
    )
    return Body((loop(p0, 20),), (loop(r0, 6), loop(r1, 10)), stores)


def reordered_argmax() -> Body:
    """argmax in another order of dims than memory's: loops are exchanged, but positions keep the body's order."""
    x = Load("x", 50 * r1 + r0, F32)
    return Body((), (loop(r0, 50), loop(r1, 40)), (Store("at", ZERO, Reduce("argmax", x, I64), I64),))


def swiglu() -> Body:
    a, b = Load("a", p0, BF16), Load("b", p0, BF16)
    gated = Cast(op("mul", a, op("sigmoid", a)), BF16)
    return Body((loop(p0, s0),), (), (Store("y", p0, op("mul", gated, b), BF16),))


def elu() -> Body:
    x = Load("x", p0, BF16)
    y = op("where", op("gt", x, Constant(0.0, F32)), x, op("expm1", x))
    return Body((loop(p0, 10_000),), (), (Store("y", p0, y, BF16),))


def clipped_ratio() -> Body:
    """The gradient of min(r * a, clamp(r, 0.8, 1.2) * a) with r = exp(x - old): several selects by equal operands."""
    row = 512 * p0 + p1
    x, old, advantage, gradient = (Load(name, at, F32) for name, at in (("x", row), ("old", row), ("a", p0), ("g", p0)))
    low, high, zero = (Constant(bound, F32) for bound in (0.8, 1.2, 0.0))
    ratio = op("exp", op("sub", x, old))
    plain = op("mul", ratio, advantage)
    clipped = op("mul", op("minimum", op("maximum", ratio, low), high), advantage)
    given = op("where", op("eq", plain, clipped), op("div", gradient, Constant(2.0, F32)), gradient)
    inside = op("logical_and", op("ge", ratio, low), op("le", ratio, high))
    direct = op("mul", op("where", op("gt", plain, clipped), zero, given), advantage)
    through = op("mul", op("where", op("lt", plain, clipped), zero, given), advantage)
    both = op("mul", op("add", direct, op("where", inside, through, zero)), ratio)
    return Body((loop(p0, 16), loop(p1, 512)), (), (Store("y", row, both, F32),))


def token_shift_gradient() -> Body:
    """y[p0] = g[p0] * m + (g[p0 + 1] * m, or 0 in the last row): a mask and a select that are constant in a row."""
    at = 512 * p0 + p1
    inside = op("lt", Index(p0), Constant(99, I64))
    mix = Load("m", p1, BF16)
    shifted = op("mul", Load("g", at + 512, BF16, inside), mix)
    here = op("mul", Load("g", at, BF16), mix)
    y = op("add", here, op("where", inside, Cast(shifted, BF16), Constant(0.0, F32)))
    return Body((loop(p0, 100), loop(p1, 512)), (), (Store("y", at, y, BF16),))


def rotary() -> Body:
    """cat of two halves with masked loads, as in RoPE: y = cat(-x[32:], x[:32]) * sin + x * cos."""
    at = 64 * p0 + p1
    lower = op("lt", Index(p1), Constant(32, I64))
    rotated = op(
        "where",
        lower,
        op("neg", Load("x", at + 32, F32, lower)),
        Load("x", at - 32, F32, op("logical_not", lower)),
    )
    position = ModularIndexing(p0, sympy.S.One, sympy.Integer(7))
    sin, cos = Load("sin", 64 * position + p1, F32), Load("cos", 64 * position + p1, F32)
    value = op("add", op("mul", rotated, sin), op("mul", Load("x", at, F32), cos))
    return Body((loop(p0, 35), loop(p1, 64)), (), (Store("y", at, value, F32),))


def transposed(rows: int, columns: int) -> Body:
    x = Load("x", columns * p1 + p0, F32)
    return Body((loop(p0, columns), loop(p1, rows)), (), (Store("y", rows * p0 + p1, x, F32),))


def heads_first() -> Body:
    """(batch, sequence, head, dim) to (batch, head, sequence, dim), plus a bias that is broadcast."""
    x = Load("x", 5 * 3 * 8 * p0 + 3 * 8 * p2 + 8 * p1 + r0, F32)
    y = Store("y", 3 * 5 * 8 * p0 + 5 * 8 * p1 + 8 * p2 + r0, op("add", x, Load("b", r0, F32)), F32)
    return Body((loop(p0, 2), loop(p1, 3), loop(p2, 5), loop(r0, 8)), (), (y,))


def flattened() -> Body:
    """Floor division and remainder in an index: y[i] = x[i // 13, (i // 3) % 4]."""
    x = Load("x", 4 * FloorDiv(p0, 13) + ModularIndexing(p0, sympy.Integer(3), sympy.Integer(4)), F32)
    return Body((loop(p0, 130),), (), (Store("y", p0, x, F32),))


def shifted() -> Body:
    """An index that is negative where the mask is false, and floor division of a negative number."""
    inside = op("ge", Index(p0), Constant(3, I64))
    halved = Index(FloorDiv(p0 - 5, 2))
    stores = (Store("y", p0, Load("x", p0 - 3, F32, inside), F32), Store("half", p0, halved, I64))
    return Body((loop(p0, 11),), (), stores)


def embedding() -> Body:
    token = Load("t", p0, I64)
    row = Load("table", 48 * i0 + p1, BF16, None, ((i0, token),))
    return Body((loop(p0, s0), loop(p1, 48)), (), (Store("y", 48 * p0 + p1, row, BF16),))


def biased_scores(rows: int) -> Body:
    """exp(x + a bias that is looked up by a checked index), as a relative position's; indices 0 to 31 are valid."""
    at = 300 * p0 + p1
    bucket = Load("t", at, I64)
    inside = op("logical_and", op("ge", bucket, Constant(0, I64)), op("lt", bucket, Constant(32, I64)))
    index = Checked(bucket, inside, "no such bucket")
    y = op("exp", op("add", Load("x", at, BF16), Load("bias", i0, BF16, None, ((i0, index),))))
    return Body((loop(p0, rows), loop(p1, 300)), (), (Store("y", at, y, F32),))


def scatter_add(columns: int, dtype: torch.dtype) -> Body:
    g = Load("g", columns * p0 + p1, dtype)
    store = Store("d", columns * i0 + p1, g, dtype, "add", None, ((i0, Load("t", p0, torch.int32)),))
    return Body((loop(p0, s0), loop(p1, columns)), (), (store,))


def histogram() -> Body:
    """Masked counts: every iteration may write the same element, so iterations must not run in parallel."""
    bucket = Load("t", p0, I64)
    keep = op("ne", bucket, Constant(2, I64))
    store = Store("d", i0, Constant(1, I64), I64, "add", keep, ((i0, bucket),))
    return Body((loop(p0, s0),), (), (store,))


def cross_entropy(rows, columns) -> Body:
    x = Load("x", columns * p0 + r0, F32)
    top = Reduce("max", x, F32)
    log_sum = op("add", op("log", total(op("exp", op("sub", x, top)))), top)
    chosen = Load("x", columns * p0 + i0, F32, None, ((i0, Load("t", p0, I64)),))
    return Body((loop(p0, rows),), (loop(r0, columns),), (Store("loss", p0, op("sub", log_sum, chosen), F32),))


def in_place_update() -> Body:
    """SGD with momentum: two buffers are read and written at the same index."""
    p, m, g = Load("p", p0, F32), Load("m", p0, F32), Load("g", p0, BF16)
    momentum = op("add", op("mul", m, number(0.9)), g)
    stores = (
        Store("m", p0, momentum, F32),
        Store("p", p0, op("sub", p, op("mul", momentum, number(0.1))), F32),
    )
    return Body((loop(p0, s0),), (), stores)


def no_loops() -> Body:
    return Body((), (), (Store("y", ZERO, op("add", Load("x", ZERO, F32), number(1.0)), F32),))


def strided_slice() -> Body:
    """y = x[:, ::2] of a (10, 30) matrix."""
    return Body((loop(p0, 10), loop(p1, 15)), (), (Store("y", 15 * p0 + p1, Load("x", 30 * p0 + 2 * p1, F32), F32),))


def norm_of_all() -> Body:
    """Division by the norm: every element uses a reduction over all elements."""
    x = Load("x", r0, F32)
    norm = op("sqrt", total(op("mul", x, x)))
    stores = (Store("y", r0, op("div", x, norm), F32), Store("norm", ZERO, norm, F32))
    return Body((), (loop(r0, 200_000),), stores)


def few_wide_columns() -> Body:
    """20 columns of 30,000 rows: the passes over rows run on several threads."""
    x = Load("x", 20 * r0 + p0, F32)
    return Body(
        (loop(p0, 20),),
        (loop(r0, 30_000),),
        (Store("s", p0, total(x), F32), Store("m", p0, Reduce("max", x, F32), F32)),
    )


def view_of_another_dtype() -> Body:
    """The same memory as int32 and as float32."""
    stores = (
        Store("bits", p0, Load("x", p0, torch.int32), torch.int32),
        Store("y", p0, Load("x", p0, F32), F32),
    )
    return Body((loop(p0, 100),), (), stores)


BODIES = {
    "rms_norm": rms_norm(33, 500),
    "rms_norm_bf16": rms_norm(64, 4096, BF16),
    "rms_norm_symbolic": rms_norm(s0, s1),
    "softmax": softmax(40, 1000),
    "softmax_symbolic": softmax(s0, s1),
    "softmax_down": softmax(70, 300, down=True),
    "softmax_down_symbolic": softmax(s0, s1, down=True),
    "softmax_one_row": softmax(1, 100_000),
    "weights": layer_norm_backward_of_weights(1000, 300),
    "three_passes": variance_in_three_passes(),
    "permuted": permuted_reduction(),
    "reordered_argmax": reordered_argmax(),
    "swiglu": swiglu(),
    "elu": elu(),
    "clipped_ratio": clipped_ratio(),
    "token_shift_gradient": token_shift_gradient(),
    "rotary": rotary(),
    "transposed": transposed(300, 200),
    "transposed_small": transposed(5, 3),
    "heads_first": heads_first(),
    "flattened": flattened(),
    "shifted": shifted(),
    "embedding": embedding(),
    "biased_scores": biased_scores(40),
    "scatter_add": scatter_add(200, F32),
    "scatter_add_bf16": scatter_add(8, BF16),
    "histogram": histogram(),
    "cross_entropy": cross_entropy(50, 3000),
    "in_place": in_place_update(),
    "no_loops": no_loops(),
    "strided": strided_slice(),
    "norm_of_all": norm_of_all(),
    "few_wide_columns": few_wide_columns(),
    "view": view_of_another_dtype(),
}
