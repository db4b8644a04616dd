"""Bodies of training, with inputs and eager torch's results; for the interpreter and for a GPU."""

from __future__ import annotations

import math

import sympy
import torch
import torch.nn.functional as F
from torch.utils._sympy.functions import FloorDiv

from overlapc.ir.body import Body, Cast, Constant, Index, Load, Reduce, Store, op
from overlapc.ir.indexing import ModularIndexing
from tests.codegen.case import Case, Tensors
from tests.codegen.norm_cases import group_norm, layer_norm, moments, norm_gradients, rms_norm, rms_norm_backward
from tests.codegen.pair_cases import gate_and_up, gradients_and_columns, length_of_pairs
from tests.codegen.reduction_cases import empty_rows, largest, norm_and_scale, reductions, two_reduction_loops
from tests.codegen.terms import (
    bf16,
    boolean,
    f16,
    f32,
    f64,
    i0,
    i8,
    i32,
    i64,
    loop,
    noise,
    number,
    p0,
    p1,
    p2,
    r0,
    s0,
    total,
    u8,
)


def elements_and_columns(rows: int, width: int) -> Case:
    """Return an element-wise result and its column sums."""
    at = width * r0 + p0
    value = op("exp", Load("x", at, f32))
    body = Body(
        (loop(p0, width),), (loop(r0, rows),), (Store("y", at, value, bf16), Store("db", p0, total(value), f32))
    )
    tensors = {"x": noise(rows, width), "y": torch.empty(rows, width, dtype=bf16), "db": torch.empty(width)}
    return Case("elements_and_columns", body, tensors, lambda t: {"y": t["x"].exp(), "db": t["x"].exp().sum(0)})


def softmax(rows: int, width: int, dtype: torch.dtype = bf16) -> Case:
    x = Load("x", width * p0 + r0, dtype)
    exp = op("exp", op("sub", x, Reduce("max", x, f32)))
    body = Body(
        (loop(p0, rows),), (loop(r0, width),), (Store("y", width * p0 + r0, op("div", exp, total(exp)), dtype),)
    )
    inputs = noise(rows, width, dtype=dtype) * 4
    inputs[0, : 2 * width // 3] = -math.inf  # rows: mostly masked, fully masked, with +inf, with NaN
    inputs[1] = -math.inf
    inputs[2, width // 2] = math.inf
    inputs[3, 1] = math.nan
    tensors = {"x": inputs, "y": torch.zeros(rows, width, dtype=dtype)}
    return Case("softmax", body, tensors, lambda t: {"y": t["x"].float().softmax(1)})


def cross_entropy(rows: int, width: int) -> Case:
    """Return the loss and the log-sum-exp of every row; the target's logit is gathered."""
    x = Load("x", width * p0 + r0, bf16)
    peak = Reduce("max", x, f32)
    log_total = op("log", total(op("exp", op("sub", x, peak))))
    target = Load("target", p0, i64)
    picked = Load("x", width * p0 + i0, bf16, indirect=((i0, target),))
    loss = op("sub", op("add", log_total, peak), picked)
    stores = (Store("loss", p0, loss, f32), Store("lse", p0, op("add", log_total, peak), f32))

    def expected(t: Tensors) -> Tensors:
        logits = t["x"].float()
        return {
            "loss": F.cross_entropy(logits, t["target"], reduction="none"),
            "lse": torch.logsumexp(logits, 1),
        }

    tensors = {
        "x": noise(rows, width, dtype=bf16) * 3,
        "target": torch.arange(rows) * 5 % width,
        "loss": torch.zeros(rows),
        "lse": torch.zeros(rows),
    }
    return Case("cross_entropy", Body((loop(p0, rows),), (loop(r0, width),), stores), tensors, expected)


def swiglu(count: int, dtype: torch.dtype = bf16) -> Case:
    gate, up = Load("gate", p0, dtype), Load("up", p0, dtype)
    y = op("mul", op("mul", gate, op("sigmoid", gate)), up)
    tensors = {"gate": noise(count, dtype=dtype), "up": noise(count, dtype=dtype, seed=3)}
    tensors["y"] = torch.zeros(count, dtype=dtype)
    body = Body((loop(p0, count),), (), (Store("y", p0, y, dtype),))
    return Case("swiglu", body, tensors, lambda t: {"y": F.silu(t["gate"].float()) * t["up"].float()})


def rope(tokens: int, heads: int, width: int, dtype: torch.dtype = bf16) -> Case:
    """Return a rotary embedding by halves, with masked loads of the other half, to which `cat` lowers."""
    half = width // 2
    at = heads * width * p0 + width * p1 + p2
    position = Index(p2)
    low = op("lt", position, Constant(half, i64))
    high = op("ge", position, Constant(half, i64))
    x = Load("x", at, dtype)
    partner = op("where", low, op("neg", Load("x", at + half, dtype, mask=low)), Load("x", at - half, dtype, mask=high))
    cos, sin = Load("cos", width * p0 + p2, f32), Load("sin", width * p0 + p2, f32)
    y = op("add", op("mul", x, cos), op("mul", partner, sin))

    def expected(t: Tensors) -> Tensors:
        x_ = t["x"].float()
        turned = torch.cat([-x_[..., half:], x_[..., :half]], -1)
        return {"y": x_ * t["cos"][:, None] + turned * t["sin"][:, None]}

    tensors = {
        "x": noise(tokens, heads, width, dtype=dtype),
        "cos": noise(tokens, width),
        "sin": noise(tokens, width, seed=4),
        "y": torch.zeros(tokens, heads, width, dtype=dtype),
    }
    body = Body((loop(p0, tokens), loop(p1, heads), loop(p2, width)), (), (Store("y", at, y, dtype),))
    return Case("rope", body, tensors, expected)


def joined_to_one(rest: int) -> Case:
    """Return `cat` of one element and a tensor: a load of one address with a mask that varies."""
    first = op("lt", Index(p0), Constant(1, i64))
    second = op("ge", Index(p0), Constant(1, i64))
    value = op("where", first, Load("x", sympy.S.Zero, f32, mask=first), Load("z", p0 - 1, f32, mask=second))
    body = Body((loop(p0, rest + 1),), (), (Store("y", p0, value, f32),))
    tensors = {"x": noise(1), "z": noise(rest, seed=3), "y": torch.zeros(rest + 1)}
    return Case("joined_to_one", body, tensors, lambda t: {"y": torch.cat([t["x"], t["z"]])})


def embedding(tokens: int, vocabulary: int, width: int) -> Case:
    token = Load("tokens", p0, i64)
    row = Load("table", width * i0 + p1, bf16, indirect=((i0, token),))
    body = Body((loop(p0, tokens), loop(p1, width)), (), (Store("y", width * p0 + p1, row, bf16),))
    tensors = {
        "tokens": torch.arange(tokens) * 3 % vocabulary,
        "table": noise(vocabulary, width, dtype=bf16),
        "y": torch.zeros(tokens, width, dtype=bf16),
    }
    return Case("embedding", body, tensors, lambda t: {"y": F.embedding(t["tokens"], t["table"])})


def embedding_backward(tokens: int, vocabulary: int, width: int, dtype: torch.dtype = f32) -> Case:
    """Return the gradient of an embedding, which adds several rows to the row of one token."""
    token = Load("tokens", p0, i64)
    store = Store("grad", width * i0 + p1, Load("dy", width * p0 + p1, dtype), dtype, "add", indirect=((i0, token),))
    tensors = {
        "tokens": torch.arange(tokens) * 3 % vocabulary,
        "dy": noise(tokens, width, dtype=dtype),
        "grad": torch.ones(vocabulary, width, dtype=dtype),
    }

    def expected(t: Tensors) -> Tensors:
        return {"grad": t["grad"].float().index_add(0, t["tokens"], t["dy"].float())}

    body = Body((loop(p0, tokens), loop(p1, width)), (), (store,))
    # Every addition in bfloat16 rounds, in an order that the device chooses.
    return Case(
        f"embedding_backward_{str(dtype)[6:]}", body, tensors, expected, tolerance=2e-5 if dtype is f32 else 0.02
    )


def column_sum(rows: int, width: int, dtype: torch.dtype = bf16) -> Case:
    body = Body((loop(p0, width),), (loop(r0, rows),), (Store("y", p0, total(Load("x", width * r0 + p0, dtype)), f32),))
    tensors = {"x": noise(rows, width, dtype=dtype), "y": torch.zeros(width)}
    return Case("column_sum", body, tensors, lambda t: {"y": t["x"].double().sum(0)})


def transpose(rows: int, columns: int, batch: int = 2) -> Case:
    at = columns * rows * p0 + columns * p1 + p2
    turned = columns * rows * p0 + rows * p2 + p1
    y = op("add", Load("x", turned, bf16), Load("bias", p2, f32))
    body = Body((loop(p0, batch), loop(p1, rows), loop(p2, columns)), (), (Store("y", at, y, bf16),))
    tensors = {
        "x": noise(batch, columns, rows, dtype=bf16),
        "bias": noise(columns),
        "y": torch.zeros(batch, rows, columns, dtype=bf16),
    }
    return Case(
        f"transpose {rows} {columns}", body, tensors, lambda t: {"y": t["x"].transpose(1, 2).float() + t["bias"]}
    )


def three_ways(batch: int, rows: int, columns: int, dtype: torch.dtype = f32) -> Case:
    """Return an expression of three tensors of one shape, each contiguous along another dim."""
    at = (p0 * rows + p1) * columns + p2
    a = Load("a", at, dtype)
    b = Load("b", (p0 * columns + p2) * rows + p1, dtype)
    c = Load("c", (p2 * rows + p1) * batch + p0, dtype)
    loops = (loop(p0, batch), loop(p1, rows), loop(p2, columns))
    body = Body(loops, (), (Store("y", at, op("add", op("mul", a, b), c), dtype),))
    tensors = {
        "a": noise(batch, rows, columns, dtype=dtype),
        "b": noise(batch, columns, rows, dtype=dtype),
        "c": noise(columns, rows, batch, dtype=dtype),
        "y": torch.zeros(batch, rows, columns, dtype=dtype),
    }

    def expected(t: Tensors) -> Tensors:
        return {"y": t["a"].float() * t["b"].transpose(1, 2).float() + t["c"].permute(2, 1, 0).float()}

    return Case("three_ways", body, tensors, expected)


def symbolic(rows: int, width: int) -> Case:
    """Return a reduction with a symbolic number of columns."""
    x = Load("x", s0 * p0 + r0, f32)
    centred = op("sub", x, Reduce("max", x, f32))
    stores = (Store("y", s0 * p0 + r0, centred, f32), Store("total", p0, total(op("exp", centred)), f32))
    tensors = {"x": noise(rows, width), "y": torch.zeros(rows, width), "total": torch.zeros(rows)}

    def expected(t: Tensors) -> Tensors:
        y = t["x"] - t["x"].amax(1, keepdim=True)
        return {"y": y, "total": y.double().exp().sum(1)}

    body = Body((loop(p0, rows),), (loop(r0, s0),), stores)
    return Case("symbolic", body, tensors, expected, {"s0": width})


def symbolic_pointwise(rows: int, width: int) -> Case:
    y = op("add", Load("x", s0 * p0 + p1, f32), Load("row", p1, f32))
    body = Body((loop(p0, rows), loop(p1, s0)), (), (Store("y", s0 * p0 + p1, y, f32),))
    tensors = {"x": noise(rows, width), "row": noise(width), "y": torch.zeros(rows, width)}
    return Case("symbolic_pointwise", body, tensors, lambda t: {"y": t["x"] + t["row"]}, {"s0": width})


def factors_of_batches(batch: int, length: int, width: int) -> Case:
    """Return sums of columns in every batch, with factors of its rows and one of the batch: constant in a tile."""
    at = length * width * p0 + width * r0 + p1
    product = op("mul", Load("x", at, bf16), Load("weight", length * p0 + r0, f32))
    y = op("mul", total(product), Load("scale", p0, f32))
    body = Body((loop(p0, s0), loop(p1, width)), (loop(r0, length),), (Store("y", width * p0 + p1, y, f32),))
    x = noise(batch, length, width, dtype=bf16)
    tensors = {"x": x, "weight": noise(batch, length), "scale": noise(batch), "y": torch.zeros(batch, width)}

    def expected(t: Tensors) -> Tensors:
        return {"y": torch.einsum("brw,br,b->bw", t["x"].double(), t["weight"].double(), t["scale"].double())}

    return Case("factors_of_batches", body, tensors, expected, {"s0": batch})


def heads_and_totals(tokens: int, heads: int, width: int) -> Case:
    """Return heads with factors of their token, which tiles of several heads read once, and totals over all heads."""
    at = heads * width * p0 + width * p1 + r0
    turned = op("mul", Load("x", at, f32), Load("cos", width * p0 + r0, f32))
    stores = (
        Store("y", at, op("sub", turned, total(turned)), f32),
        Store("dw", r0, turned, f32, "sum"),
    )
    body = Body((loop(p0, tokens), loop(p1, heads)), (loop(r0, width),), stores)
    tensors = {"x": noise(tokens, heads, width), "cos": noise(tokens, width, seed=1)}
    tensors |= {"y": torch.empty(tokens, heads, width), "dw": torch.empty(width)}

    def expected(t: Tensors) -> Tensors:
        turned = t["x"].double() * t["cos"].double()[:, None]
        return {"y": turned - turned.sum(-1, keepdim=True), "dw": turned.sum((0, 1))}

    return Case("heads_and_totals", body, tensors, expected)


def divided(count: int) -> Case:
    """Return a body with FloorDiv and ModularIndexing in an index, and a floor division of negative numbers."""
    index = 7 * FloorDiv(p0, 7) + ModularIndexing(p0 + 3, 1, 7)
    shifted = Index(FloorDiv(p0 - 5, 3))
    stores = (Store("y", p0, Load("x", index, f32), f32), Store("z", p0, shifted, i64))
    count -= count % 7
    tensors = {"x": noise(count), "y": torch.zeros(count), "z": torch.zeros(count, dtype=i64)}

    def expected(t: Tensors) -> Tensors:
        at = torch.arange(count, device=t["x"].device)
        return {
            "y": t["x"][7 * (at // 7) + (at + 3) % 7],
            "z": torch.div(at - 5, 3, rounding_mode="floor"),
        }

    return Case("divided", Body((loop(p0, count),), (), stores), tensors, expected)


def in_place(rows: int, width: int) -> Case:
    """Return a body that overwrites its input at the same index with a value that depends on a reduction."""
    x = Load("x", width * p0 + r0, f32)
    body = Body(
        (loop(p0, rows),), (loop(r0, width),), (Store("x", width * p0 + r0, op("sub", x, Reduce("min", x, f32)), f32),)
    )
    return Case("in_place", body, {"x": noise(rows, width)}, lambda t: {"x": t["x"] - t["x"].amin(1, keepdim=True)})


def through_float8(count: int, to: torch.dtype, back: bool = True) -> Case:
    """Return a conversion to float8, also of numbers beyond its range, and with `back` a conversion from it.

    Triton's interpreter does not support infinity in conversions from float8, and does not round in those to e4m3.
    """
    edge = [0.0, -0.0, 2.0**-9, 2.0**-10, 448.0, -449.0, 464.0, 465.0, 1e6, math.inf, -math.inf, math.nan]
    edge += [2.0**-16, 2.0**-17, -1.5 * 2.0**-17, 57344.0, 61439.0, -61440.0, 65536.0]
    x = torch.cat([torch.tensor(edge), torch.randn(count) * torch.logspace(-6, 5, count)])
    load = Load("x", p0, f32)
    stores = [Store("stored", p0, load, to)] + [Store("y", p0, Cast(load, to), f32)] * back
    tensors = {"x": x, "stored": torch.zeros(len(x)).to(to)} | ({"y": torch.zeros(len(x))} if back else {})

    def expected(t: Tensors) -> Tensors:
        rounded = t["x"].to(to)
        return {"stored": rounded} | ({"y": rounded.float()} if back else {})

    return Case(f"through_{str(to)[6:]}", Body((loop(p0, len(x)),), (), tuple(stores)), tensors, expected, tolerance=0)


def nothing() -> Case:
    """Return a body without iterations, which launches nothing and stores nothing."""
    body = Body((loop(p0, 0),), (), (Store("y", sympy.S.Zero, number(1.0), f32),))
    return Case("nothing", body, {"y": torch.zeros(1)}, lambda t: {"y": t["y"]})


def small() -> list[Case]:
    """Return cases in sizes for the interpreter, which no tile divides."""
    return [
        rms_norm(5, 40),
        rms_norm_backward(5, 40),
        norm_gradients(2, 5, 20),
        norm_gradients(2, 70, 64, f32),
        elements_and_columns(50, 20),
        layer_norm(5, 33),
        group_norm(5, 3, 104),
        moments(3, 5, 21),
        softmax(7, 50),
        cross_entropy(5, 70),
        swiglu(100),
        rope(3, 2, 8),
        joined_to_one(40),
        embedding(6, 20, 24),
        embedding_backward(9, 5, 10),
        column_sum(50, 20),
        norm_and_scale(100),
        transpose(17, 33),
        transpose(3, 400),  # channels, pixels
        transpose(5, 49, 4),
        three_ways(18, 20, 17),
        symbolic(3, 37),
        symbolic_pointwise(3, 37),
        factors_of_batches(3, 21, 64),
        heads_and_totals(5, 4, 16),
        divided(50),
        in_place(3, 37),
        gate_and_up(3, 37),
        gradients_and_columns(19, 37),
        length_of_pairs(3, 37),
        two_reduction_loops(3, 4, 10),
        empty_rows(3),
        nothing(),
        largest(5, 21, 3),
        through_float8(200, torch.float8_e5m2, back=False),
        *(reductions(5, 21, dtype) for dtype in (f32, f64, bf16, f16, i64, i32, i8, u8, boolean)),
    ]


def large() -> list[Case]:
    """Return cases in sizes for a GPU, for which heuristics choose every form at least once."""
    return [
        rms_norm(2048, 4096),
        rms_norm_backward(2048, 4096),
        norm_gradients(4, 2048, 4096),
        norm_gradients(4, 2048, 1000, f32),
        norm_gradients(2, 20000, 128),
        elements_and_columns(8192, 4096),
        gate_and_up(2048, 1000),
        gradients_and_columns(8192, 1000),
        layer_norm(1000, 5000),
        moments(64, 32, 4096),
        moments(300, 8, 1000, bf16),
        softmax(1024, 2048),
        softmax(300, 50000),
        softmax(8, 128000),
        cross_entropy(2048, 32000),
        cross_entropy(40, 128000),
        swiglu(4096 * 1433),
        rope(2048, 32, 128),
        embedding(4096, 32000, 2048),
        embedding_backward(4096, 1000, 512),
        embedding_backward(500, 1000, 512, bf16),
        column_sum(8192, 4096),
        column_sum(100, 70),
        norm_and_scale(10_000_000),
        transpose(1000, 2000),
        three_ways(100, 200, 150),
        three_ways(64, 300, 100, bf16),
        symbolic(1000, 3000),
        symbolic(2, 1_000_000),
        symbolic_pointwise(1000, 3000),
        factors_of_batches(16, 512, 2048),
        heads_and_totals(4096, 32, 128),
        divided(1_000_000),
        in_place(100, 40000),
        largest(3000, 64, 8),
        through_float8(100_000, torch.float8_e4m3fn),
        through_float8(100_000, torch.float8_e5m2),
        two_reduction_loops(64, 32, 1000),
        *(reductions(50, 3000, dtype) for dtype in (f32, f64, i64, i32)),
    ]
