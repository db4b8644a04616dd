"""Bodies as training makes them, with inputs and what eager torch says: for the interpreter and for a GPU alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import sympy
import torch
import torch.nn.functional as F
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from overlapc.codegen.kernel import KernelSource
from overlapc.codegen.triton import products, tiling
from overlapc.codegen.triton.candidates import alternatives
from overlapc.codegen.triton.tiling import Tiling, power_of_two
from overlapc.ir.body import Body, Cast, Constant, Index, Load, Loop, Reduce, Store, Value, op
from overlapc.ir.indexing import loop_symbol
from overlapc.lowering.topk import largest_of

p0, p1, p2 = (loop_symbol("p", at) for at in range(3))
r0, r1 = (loop_symbol("r", at) for at in range(2))
i0 = loop_symbol("i", 0)
s0 = sympy.Symbol("s0", integer=True, positive=True)

f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
i64, i32, u8, i8, boolean = torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A body, tensors for all its buffers (outputs hold what was there before), and what outputs must become."""

    name: str
    body: Body
    tensors: Tensors
    expected: Callable[[Tensors], Tensors]
    sizes: Mapping[str, int] = field(default_factory=dict)
    tolerance: float = 2e-5  # relative to the largest expected magnitude, plus rounding of the output's dtype

    def run(self, launcher: Callable[..., None], source: KernelSource, device: str) -> list[str]:
        """Launches on copies of the tensors; one line per output that is off."""
        guarded = {name: Guarded(tensor, device) for name, tensor in self.tensors.items()}
        expected = self.expected({name: tensor.to(device) for name, tensor in self.tensors.items()})
        sizes = [self.sizes[str(symbol)] for symbol in source.sizes]
        launcher(*(guarded[buffer].tensor for buffer in source.buffers), *sizes)
        problems = {name: self.problem(name, guarded[name].tensor, want, guarded) for name, want in expected.items()}
        found = [f"{name}: {problem}" for name, problem in problems.items() if problem]
        return found + [f"{name}: written past its end" for name, guard in guarded.items() if not guard.whole()]

    def problem(self, name: str, got: torch.Tensor, want: torch.Tensor, inputs: Mapping[str, Guarded]) -> str:
        """What is wrong with an output, or nothing."""
        return difference(got, want, self.tolerance)


class Guarded:
    """A copy of a tensor with memory behind it that spoils what reads it and shows what writes it."""

    def __init__(self, tensor: torch.Tensor, device: str) -> None:
        marker = math.nan if tensor.dtype.is_floating_point else 1 if tensor.dtype is boolean else 77
        memory = torch.full((tensor.numel() + 4096,), marker, dtype=tensor.dtype, device=device)
        self.tensor = memory[: tensor.numel()].view(tensor.shape)
        self.tensor.copy_(tensor)
        self._behind = memory[tensor.numel() :]
        self._before = self._behind.clone()

    def whole(self) -> bool:
        """Whether nothing was written past the tensor's end."""
        bits = self._behind.view(torch.uint8)
        return torch.equal(bits, self._before.view(torch.uint8))


def difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    """What is wrong with `got`, or nothing."""
    want = want.to(got.dtype).reshape(got.shape)
    if not got.dtype.is_floating_point:
        wrong = got != want
        detail = ""
    else:
        # One step of the dtype: equal up to rounding, two results may lie on both sides of a tie.
        eps = {bf16: 2**-7, f16: 2**-10}.get(got.dtype, 0.0)
        left, right = got.double(), want.double()
        finite = right[right.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        near = (left - right).abs() <= tolerance * scale + eps * right.abs()
        wrong = ~(near | (left == right) | (left.isnan() & right.isnan()))
        detail = f", largest error {float((left - right).abs().nan_to_num().max()):.3g} at scale {scale:.3g}"
    if not wrong.any():
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()} differ; at {at} got {got[at].item()}, want {want[at].item()}{detail}"


def loop(symbol: sympy.Symbol, size: int | sympy.Expr) -> Loop:
    return Loop(symbol, sympy.sympify(size))


def number(value: float, dtype: torch.dtype = f32) -> Constant:
    return Constant(value, dtype)


def noise(*shape: int, dtype: torch.dtype = f32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def total(value: Value) -> Reduce:
    return Reduce("sum", value, value.dtype)


def variants(body: Body) -> list[tuple[str, Tiling | None]]:
    """The heuristic tiling and every form that fits the body, with small odd tiles."""
    forms: list[tuple[str, Tiling | None]] = [("chosen", None)]
    if not body.reduction:
        if len(body.loops) >= 2:
            *rest, y, x = body.loops
            forms.append(("tiled", Tiling("tiled", (x,), 16, 2, y=(y,), yblock=8, grid=tuple(rest))))
            forms.append(("rows", Tiling("rows", (x,), 16, 1, grid=(*rest, y))))
        if len(body.loops) >= 3:
            *rest, z = rest
            layers = {"z": (z,), "zblock": 4, "grid": tuple(rest)}
            forms.append(("cubes", Tiling("tiled", (x,), 16, 2, y=(y,), yblock=8, **layers)))
        return [*forms, ("flat", Tiling("flat", body.loops, 64, 2))]
    shared = {"x": body.loops, "r": body.reduction, "num_warps": 2}
    if any(store.is_total for store in body.stores):
        rblock = power_of_two(int(body.reduction_numel()))
        forms.append(("totals", Tiling("totals", xblock=2, rblock=rblock, splits=3, **shared)))
        return [*forms, ("pipelined", Tiling("totals", xblock=2, rblock=rblock, splits=3, num_stages=2, **shared))]
    forms.append(("looped", Tiling("looped", xblock=2, rblock=16, **shared)))
    if any(isinstance(value, Reduce) and value.kind == "max" for value in body.values()):
        forms.append(("lanes", Tiling("looped", xblock=2, rblock=256, num_stages=2, **shared)))
    forms.append(("split", Tiling("split", xblock=2, rblock=8, splits=4, **shared)))
    return forms


def tilings_to_measure(case: Case) -> list[Tiling]:
    """The heuristic tiling and those that `autotune` measures beside it."""
    chosen = (products.choose if case.body.dots() else tiling.choose)(case.body, {})
    return alternatives(case.body, {}, chosen)


def rms_norm(rows: int, width: int, dtype: torch.dtype = bf16) -> Case:
    x, w = Load("x", width * p0 + r0, dtype), Load("w", r0, dtype)
    scale = op("rsqrt", op("add", op("mul", total(op("mul", x, x)), number(1 / width)), number(1e-5)))
    stores = (
        Store("y", width * p0 + r0, op("mul", op("mul", x, scale), w), dtype),
        Store("scale", p0, scale, f32),
    )

    def expected(t: Tensors) -> Tensors:
        s = torch.rsqrt(t["x"].float().pow(2).mean(1, keepdim=True) + 1e-5)
        return {"y": t["x"].float() * s * t["w"].float(), "scale": s}

    tensors = {
        "x": noise(rows, width, dtype=dtype),
        "w": noise(width, dtype=dtype),
        "y": torch.zeros(rows, width, dtype=dtype),
        "scale": torch.zeros(rows),
    }
    return Case("rms_norm", Body((loop(p0, rows),), (loop(r0, width),), stores), tensors, expected)


def rms_norm_backward(rows: int, width: int, dtype: torch.dtype = bf16) -> Case:
    x, w, dy = (
        Load(name, index, dtype) for name, index in (("x", width * p0 + r0), ("w", r0), ("dy", width * p0 + r0))
    )
    scale = Load("scale", p0, f32)
    wdy = op("mul", w, dy)
    dot = op("mul", total(op("mul", wdy, x)), number(1 / width))
    cube = op("mul", scale, op("mul", scale, scale))
    dx = op("sub", op("mul", wdy, scale), op("mul", x, op("mul", cube, dot)))

    def expected(t: Tensors) -> Tensors:
        x_, g = t["x"].float(), t["dy"].float() * t["w"].float()
        s = t["scale"][:, None]
        return {"dx": g * s - x_ * s**3 * (g * x_).mean(1, keepdim=True)}

    tensors = {
        "x": noise(rows, width, dtype=dtype),
        "w": noise(width, dtype=dtype),
        "dy": noise(rows, width, dtype=dtype, seed=1),
        "scale": noise(rows).abs(),
        "dx": torch.zeros(rows, width, dtype=dtype),
    }
    body = Body((loop(p0, rows),), (loop(r0, width),), (Store("dx", width * p0 + r0, dx, dtype),))
    return Case("rms_norm_backward", body, tensors, expected)


def norm_gradients(batch: int, rows: int, width: int, dtype: torch.dtype = bf16) -> Case:
    """Gradients of a scaled input, by rows of two loops, and of its weight and bias: totals of the columns."""
    at = rows * width * p0 + width * p1 + r0
    x, g, w = Load("x", at, dtype), Load("g", at, dtype), Load("w", r0, dtype)
    mean = op("mul", total(op("mul", op("mul", g, w), x)), number(1 / width))
    stores = (
        Store("dx", at, op("sub", op("mul", g, w), op("mul", x, mean)), dtype),
        Store("dw", r0, op("mul", g, op("mul", x, mean)), dtype, "sum"),
        Store("db", r0, g, f32, "sum"),
        Store("prod", r0, op("where", op("lt", x, number(0.0)), number(-1.0), number(1.0)), f32, "prod"),
    )

    def expected(t: Tensors) -> Tensors:
        x, g, w = (t[name].double() for name in ("x", "g", "w"))
        mean = (g * w * x).mean(-1, keepdim=True)
        prod = torch.where(x < 0, -1, 1).prod(0).prod(0)
        return {"dx": g * w - x * mean, "dw": (g * x * mean).sum((0, 1)), "db": g.sum((0, 1)), "prod": prod}

    size = (batch, rows, width)
    tensors = {"x": noise(*size, dtype=dtype), "g": noise(*size, dtype=dtype, seed=1), "w": noise(width, dtype=dtype)}
    tensors |= {"dx": torch.empty(size, dtype=dtype), "dw": torch.empty(width, dtype=dtype)}
    tensors |= {"db": torch.empty(width), "prod": torch.empty(width)}
    body = Body((loop(p0, batch), loop(p1, rows)), (loop(r0, width),), stores)
    return Case(f"norm_gradients_{width}", body, tensors, expected)


def elements_and_columns(rows: int, width: int) -> Case:
    """An element-wise result stored on the way to its column sums."""
    at = width * r0 + p0
    value = op("exp", Load("x", at, f32))
    body = Body(
        (loop(p0, width),), (loop(r0, rows),), (Store("y", at, value, bf16), Store("db", p0, total(value), f32))
    )
    tensors = {"x": noise(rows, width), "y": torch.empty(rows, width, dtype=bf16), "db": torch.empty(width)}
    return Case("elements_and_columns", body, tensors, lambda t: {"y": t["x"].exp(), "db": t["x"].exp().sum(0)})


def layer_norm(rows: int, width: int) -> Case:
    x = Load("x", width * p0 + r0, f32)
    mean = op("mul", total(x), number(1 / width))
    centred = op("sub", x, mean)
    variance = op("mul", total(op("mul", centred, centred)), number(1 / width))
    scale = op("rsqrt", op("add", variance, number(1e-5)))
    y = op("add", op("mul", op("mul", centred, scale), Load("w", r0, f32)), Load("b", r0, f32))
    stores = (Store("y", width * p0 + r0, y, f32), Store("mean", p0, mean, f32), Store("scale", p0, scale, f32))

    def expected(t: Tensors) -> Tensors:
        x_ = t["x"].double()
        s = torch.rsqrt(x_.var(1, correction=0, keepdim=True) + 1e-5)
        m = x_.mean(1, keepdim=True)
        return {"y": (x_ - m) * s * t["w"] + t["b"], "mean": m, "scale": s}

    tensors = {
        "x": noise(rows, width) + 3,
        "w": noise(width),
        "b": noise(width, seed=2),
        "y": torch.zeros(rows, width),
        "mean": torch.zeros(rows),
        "scale": torch.zeros(rows),
    }
    return Case("layer_norm", Body((loop(p0, rows),), (loop(r0, width),), stores), tensors, expected)


def softmax(rows: int, width: int, dtype: torch.dtype = bf16) -> Case:
    x = Load("x", width * p0 + r0, dtype)
    exp = op("exp", op("sub", x, Reduce("max", x, f32)))
    body = Body(
        (loop(p0, rows),), (loop(r0, width),), (Store("y", width * p0 + r0, op("div", exp, total(exp)), dtype),)
    )
    inputs = noise(rows, width, dtype=dtype) * 4
    inputs[0, : 2 * width // 3] = -math.inf  # most of a row masked, all of one, a row with +inf, one with NaN
    inputs[1] = -math.inf
    inputs[2, width // 2] = math.inf
    inputs[3, 1] = math.nan
    tensors = {"x": inputs, "y": torch.zeros(rows, width, dtype=dtype)}
    return Case("softmax", body, tensors, lambda t: {"y": t["x"].float().softmax(1)})


def cross_entropy(rows: int, width: int) -> Case:
    """Loss of each row, its maximum and log-sum-exp; the target's logit is gathered."""
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
    """Rotary embedding by halves: masked loads of the partner half, as `cat` lowers to."""
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
    """`cat` of one element and a tensor: one address under a mask that varies."""
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
    """Rows added where their token says: several hit one row."""
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
    # Every addition in bfloat16 rounds; their order is up to the device.
    return Case(
        f"embedding_backward_{str(dtype)[6:]}", body, tensors, expected, tolerance=2e-5 if dtype is f32 else 0.02
    )


def column_sum(rows: int, width: int, dtype: torch.dtype = bf16) -> Case:
    body = Body((loop(p0, width),), (loop(r0, rows),), (Store("y", p0, total(Load("x", width * r0 + p0, dtype)), f32),))
    tensors = {"x": noise(rows, width, dtype=dtype), "y": torch.zeros(width)}
    return Case("column_sum", body, tensors, lambda t: {"y": t["x"].double().sum(0)})


def norm_and_scale(count: int) -> Case:
    """Everything divided by its norm: a full reduction that an inner store needs."""
    x = Load("x", r0, f32)
    norm = op("sqrt", total(op("mul", x, x)))
    stores = (Store("y", r0, op("div", x, norm), f32), Store("norm", sympy.S.Zero, norm, f32))
    tensors = {"x": noise(count), "y": torch.zeros(count), "norm": torch.zeros(1)}

    def expected(t: Tensors) -> Tensors:
        return {"y": t["x"].double() / t["x"].double().norm(), "norm": t["x"].double().norm()}

    return Case("norm_and_scale", Body((), (loop(r0, count),), stores), tensors, expected)


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
    return Case("transpose", body, tensors, lambda t: {"y": t["x"].transpose(1, 2).float() + t["bias"]})


def three_ways(batch: int, rows: int, columns: int, dtype: torch.dtype = f32) -> Case:
    """Three tensors of one shape, each contiguous along another dim."""
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
    """The number of columns is known at launch only."""
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


def divided(count: int) -> Case:
    """FloorDiv and ModularIndexing in an index, and a position that becomes negative."""
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
    """An output over an input at the same index, through a reduction."""
    x = Load("x", width * p0 + r0, f32)
    body = Body(
        (loop(p0, rows),), (loop(r0, width),), (Store("x", width * p0 + r0, op("sub", x, Reduce("min", x, f32)), f32),)
    )
    return Case("in_place", body, {"x": noise(rows, width)}, lambda t: {"x": t["x"] - t["x"].amin(1, keepdim=True)})


def reductions(rows: int, width: int, dtype: torch.dtype) -> Case:
    """Every reduction at once, over special values and ties."""
    x = Load("x", width * p0 + r0, dtype)
    kinds = ["max", "min", "argmax", "argmin", "any", "all"] + ([] if dtype is boolean else ["sum", "prod"])
    stores, tensors = [], {"x": reduction_input(rows, width, dtype)}
    for kind in kinds:
        arg: Value = x
        result = x.dtype
        if kind.startswith("arg"):
            result = i64
        elif kind in ("any", "all"):
            arg, result = Cast(x, boolean), boolean
        elif kind in ("sum", "prod") and not dtype.is_floating_point:
            arg, result = Cast(x, i64), i64
        memory = result if result in (i64, boolean) else dtype
        stores.append(Store(kind, p0, Reduce(kind, arg, result), memory))
        tensors[kind] = torch.zeros(rows, dtype=memory)

    def expected(t: Tensors) -> Tensors:
        x_ = t["x"].float() if t["x"].dtype in (bf16, f16) else t["x"]
        found = {"max": x_.amax(1), "min": x_.amin(1), "any": x_.bool().any(1), "all": x_.bool().all(1)}
        narrow = x_.to(torch.int32) if x_.dtype is boolean else x_
        found |= {"argmax": first(narrow, largest=True), "argmin": first(narrow, largest=False)}
        if dtype is not boolean:
            found |= {"sum": x_.sum(1), "prod": x_.prod(1)}
        return found

    body = Body((loop(p0, rows),), (loop(r0, width),), tuple(stores))
    return Case(f"reductions_{str(dtype)[6:]}", body, tensors, expected)


def largest(rows: int, width: int, count: int) -> Case:
    """The largest elements of each row and their places, over special values."""
    stores: list[Store] = []
    for at, (value, place) in enumerate(largest_of(Load("x", width * p0 + r0, f32), Index(r0), width, count)):
        stores += [Store("y", count * p0 + at, value, f32), Store("at", count * p0 + at, place, i64)]
    tensors = {"x": torch.randperm(rows * width).reshape(rows, width).float() - rows * width // 2}
    tensors["x"][0, :2] = torch.tensor([-math.inf, math.inf])
    tensors["x"][1, 3] = math.nan
    tensors |= {"y": torch.zeros(rows, count), "at": torch.zeros(rows, count, dtype=i64)}

    def expected(t: Tensors) -> Tensors:
        found = t["x"].topk(count)
        return {"y": found.values, "at": found.indices}

    body = Body((loop(p0, rows),), (loop(r0, width),), tuple(stores))
    return Case(f"largest_{count}_of_{width}", body, tensors, expected, tolerance=0)


def through_float8(count: int, to: torch.dtype, back: bool = True) -> Case:
    """Rounded to float8, what lies beyond its numbers included; and, with `back`, read as a number again.

    The interpreter's conversions from float8 know no infinity, and those to e4m3 do not round.
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


def first(x: torch.Tensor, largest: bool) -> torch.Tensor:
    """Position of the first NaN, else of the first extreme value (torch leaves ties open)."""
    best = x.amax(1, keepdim=True) if largest else x.amin(1, keepdim=True)
    hit = (x == best) | (x.isnan() if x.is_floating_point() else False)
    return hit.to(torch.int32).argmax(1)


def reduction_input(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is boolean:
        x = torch.arange(rows * width).reshape(rows, width) % 3 == 0
        x[0], x[1] = True, False
        return x
    if not dtype.is_floating_point:
        x = (torch.arange(rows * width).reshape(rows, width) * 7 % 5 + 1).to(dtype)
        x[0, 2], x[1] = 0, 3
        return x
    x = 1 + noise(rows, width, dtype=f32).mul(0.1)
    x[0, 4], x[0, 6] = math.nan, math.nan
    x[1, 3], x[1, 5] = math.inf, math.inf
    x[2, 3], x[2, 4] = -math.inf, -math.inf
    x[3] = -math.inf
    return x.to(dtype)


def two_reduction_loops(channels: int, batch: int, pixels: int) -> Case:
    """Per-channel sum of NCHW: reduction loops around and inside the parallel one."""
    x = Load("x", channels * pixels * r0 + pixels * p0 + r1, f32)
    body = Body((loop(p0, channels),), (loop(r0, batch), loop(r1, pixels)), (Store("y", p0, total(x), f32),))
    tensors = {"x": noise(batch, channels, pixels), "y": torch.zeros(channels)}
    return Case("two_reduction_loops", body, tensors, lambda t: {"y": t["x"].double().sum((0, 2))})


def group_norm(rows: int, channels: int, pixels: int) -> Case:
    """Rows of two loops, the scaling and shift of which change with the outer one only."""
    at = channels * pixels * p0 + pixels * r0 + r1
    x = Load("x", at, bf16)
    mean = op("mul", total(x), number(1 / (channels * pixels)))
    y = op("add", op("mul", op("sub", x, mean), Load("w", r0, bf16)), Load("b", r0, f32))
    tensors = {
        "x": noise(rows, channels, pixels, dtype=bf16),
        "w": noise(channels, dtype=bf16),
        "b": noise(channels, seed=1),
        "y": torch.zeros(rows, channels, pixels),
    }

    def expected(t: Tensors) -> Tensors:
        x_ = t["x"].float()
        return {"y": (x_ - x_.mean((1, 2), keepdim=True)) * t["w"].float()[:, None] + t["b"][:, None]}

    body = Body((loop(p0, rows),), (loop(r0, channels), loop(r1, pixels)), (Store("y", at, y, f32),))
    return Case("group_norm", body, tensors, expected)


def empty_rows(rows: int) -> Case:
    """A reduction over nothing is its neutral element."""
    x = Load("x", r0, f32)
    stores = (Store("sum", p0, total(x), f32), Store("max", p0, Reduce("max", x, f32), f32))
    tensors = {"x": torch.zeros(0), "sum": torch.ones(rows), "max": torch.ones(rows)}
    body = Body((loop(p0, rows),), (loop(r0, 0),), stores)

    def expected(t: Tensors) -> Tensors:
        return {"sum": torch.zeros_like(t["sum"]), "max": torch.full_like(t["max"], -math.inf)}

    return Case("empty_rows", body, tensors, expected)


def nothing() -> Case:
    """No iterations: nothing is launched and nothing is written."""
    body = Body((loop(p0, 0),), (), (Store("y", sympy.S.Zero, number(1.0), f32),))
    return Case("nothing", body, {"y": torch.zeros(1)}, lambda t: {"y": t["y"]})


def small() -> list[Case]:
    """Sizes for the interpreter: tails everywhere."""
    return [
        rms_norm(5, 40),
        rms_norm_backward(5, 40),
        norm_gradients(2, 5, 20),
        norm_gradients(2, 70, 64, f32),
        elements_and_columns(50, 20),
        layer_norm(5, 33),
        group_norm(5, 3, 104),
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
        three_ways(18, 20, 17),
        symbolic(3, 37),
        symbolic_pointwise(3, 37),
        divided(50),
        in_place(3, 37),
        two_reduction_loops(3, 4, 10),
        empty_rows(3),
        nothing(),
        largest(5, 21, 3),
        through_float8(200, torch.float8_e5m2, back=False),
        *(reductions(5, 21, dtype) for dtype in (f32, f64, bf16, f16, i64, i32, i8, u8, boolean)),
    ]


def large() -> list[Case]:
    """Sizes for a GPU, where every heuristic form is chosen by somebody."""
    return [
        rms_norm(2048, 4096),
        rms_norm_backward(2048, 4096),
        norm_gradients(4, 2048, 4096),
        norm_gradients(4, 2048, 1000, f32),
        norm_gradients(2, 20000, 128),
        elements_and_columns(8192, 4096),
        layer_norm(1000, 5000),
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
        divided(1_000_000),
        in_place(100, 40000),
        largest(3000, 64, 8),
        through_float8(100_000, torch.float8_e4m3fn),
        through_float8(100_000, torch.float8_e5m2),
        two_reduction_loops(64, 32, 1000),
        *(reductions(50, 3000, dtype) for dtype in (f32, f64, i64, i32)),
    ]
