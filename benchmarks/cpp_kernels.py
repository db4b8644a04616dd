"""C++ kernels against eager torch on this machine's CPU.

    python benchmarks/cpp_kernels.py [--threads N]

Prints for each kernel the time of one launch, that of the eager ops it replaces, and their ratio; medians of
interleaved runs, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import sympy
import torch
import torch.nn.functional as F
from tabulate import tabulate

from overlapc.codegen.cpp import CppGenerator
from overlapc.ir.body import Body, Constant, Load, Loop, Reduce, Store, Value, op
from overlapc.ir.indexing import loop_symbol

F32, BF16 = torch.float32, torch.bfloat16
P0, P1, R0 = loop_symbol("p", 0), loop_symbol("p", 1), loop_symbol("r", 0)
I0 = loop_symbol("i", 0)
ROWS, COLUMNS = 2048, 2048


@dataclass(frozen=True)
class Case:
    name: str
    body: Body
    tensors: Mapping[str, torch.Tensor]
    eager: Callable[[], object]


def loop(symbol: sympy.Symbol, size: int) -> Loop:
    return Loop(symbol, sympy.Integer(size))


def number(value: float) -> Constant:
    return Constant(value, F32)


def cases() -> list[Case]:
    n, m = ROWS, COLUMNS
    x, y, g = torch.randn(n, m), torch.randn(n, m), torch.randn(n, m)
    w, out, stat, column = torch.randn(m), torch.empty(n, m), torch.rand(n) + 0.5, torch.empty(m)
    found = []
    flat = (loop(P0, n * m),)

    def pointwise(name: str, value: Value, tensors: dict[str, torch.Tensor], eager: Callable[[], object]) -> None:
        dtype = tensors["out"].dtype
        found.append(Case(name, Body(flat, (), (Store("out", P0, value, dtype),)), tensors, eager))

    a, b = Load("x", P0, F32), Load("y", P0, F32)
    pointwise("residual add", op("add", a, b), {"x": x, "y": y, "out": out}, lambda: x + y)
    swiglu = op("mul", op("mul", a, op("sigmoid", a)), b)
    pointwise("SwiGLU", swiglu, {"x": x, "y": y, "out": out}, lambda: F.silu(x) * y)
    xb, yb = x.to(BF16), y.to(BF16)
    ab, bb = Load("x", P0, BF16), Load("y", P0, BF16)
    pointwise(
        "SwiGLU bf16",
        op("mul", op("mul", ab, op("sigmoid", ab)), bb),
        {"x": xb, "y": yb, "out": out.to(BF16)},
        lambda: F.silu(xb) * yb,
    )
    gelu = op(
        "mul",
        op("mul", a, number(0.5)),
        op("add", op("erf", op("mul", a, number(0.7071067811865476))), number(1.0)),
    )
    pointwise("GELU (erf)", gelu, {"x": x, "out": out}, lambda: F.gelu(x))
    pointwise("cast f32 to bf16", a, {"x": x, "out": out.to(BF16)}, lambda: x.to(BF16))

    def rows(name: str, stores: list[Store], tensors: dict[str, torch.Tensor], eager: Callable[[], object]) -> None:
        found.append(Case(name, Body((loop(P0, n),), (loop(R0, m),), tuple(stores)), tensors, eager))

    at = m * P0 + R0
    for dtype, source in ((F32, x), (BF16, xb)):
        v, scale = Load("x", at, dtype), Load("w", R0, F32)
        mean = op("mul", Reduce("sum", op("mul", v, v), F32), number(1 / m))
        inverse = op("rsqrt", op("add", mean, number(1e-5)))
        rows(
            f"RMSNorm {str(dtype)[6:]}",
            [
                Store("out", at, op("mul", op("mul", v, inverse), scale), dtype),
                Store("stat", P0, inverse, F32),
            ],
            {"x": source, "w": w, "out": out.to(dtype), "stat": stat.clone()},
            lambda source=source, dtype=dtype: F.rms_norm(source, (m,), w.to(dtype), 1e-5),
        )
    v, d, s = Load("x", at, F32), Load("g", at, F32), Load("stat", P0, F32)
    dw = op("mul", d, Load("w", R0, F32))
    dot = Reduce("sum", op("mul", dw, v), F32)
    back = op("mul", s, op("sub", dw, op("mul", v, op("mul", op("mul", s, s), op("mul", dot, number(1 / m))))))
    rows(
        "RMSNorm backward",
        [Store("out", at, back, F32)],
        {"x": x, "g": g, "w": w, "stat": stat, "out": out},
        lambda: stat[:, None] * (g * w - x * (stat * stat * ((g * w * x).sum(1) / m))[:, None]),
    )
    e = op("exp", op("sub", v, Reduce("max", v, F32)))
    rows(
        "softmax",
        [Store("out", at, op("div", e, Reduce("sum", e, F32)), F32)],
        {"x": x, "out": out},
        lambda: x.softmax(1),
    )
    lse = op("add", op("log", Reduce("sum", e, F32)), Reduce("max", v, F32))
    target = torch.randint(0, m, (n,))
    picked = Load("x", m * P0 + I0, F32, None, ((I0, Load("t", P0, torch.int64)),))
    rows(
        "cross entropy",
        [Store("loss", P0, op("sub", lse, picked), F32)],
        {"x": x, "t": target, "loss": torch.empty(n)},
        lambda: F.cross_entropy(x, target, reduction="none"),
    )
    rows("argmax", [Store("p", P0, Reduce("argmax", v, torch.int64), torch.int64)],
         {"x": x, "p": torch.empty(n, dtype=torch.int64)}, lambda: x.argmax(1))  # fmt: skip
    columns = Body(
        (loop(P0, m),),
        (loop(R0, n),),
        (Store("c", P0, Reduce("sum", Load("x", m * R0 + P0, F32), F32), F32),),
    )
    found.append(Case("column sum", columns, {"x": x, "c": column}, lambda: x.sum(0)))
    whole = Body((), (loop(R0, n * m),), (Store("c", sympy.S.Zero, Reduce("sum", Load("x", R0, F32), F32), F32),))
    found.append(Case("full sum", whole, {"x": x, "c": column}, lambda: x.sum()))
    transpose = Body((loop(P0, m), loop(P1, n)), (), (Store("out", n * P0 + P1, Load("x", m * P1 + P0, F32), F32),))
    found.append(Case("transposed copy", transpose, {"x": x, "out": out}, lambda: x.t().contiguous()))
    table, tokens = torch.randn(32000, 512), torch.randint(0, 32000, (4096,))
    gather = Load("table", 512 * I0 + P1, F32, None, ((I0, Load("t", P0, torch.int64)),))
    lookup = Body((loop(P0, 4096), loop(P1, 512)), (), (Store("out", 512 * P0 + P1, gather, F32),))
    found.append(
        Case("embedding", lookup, {"table": table, "t": tokens, "out": out}, lambda: F.embedding(tokens, table))
    )
    add = Store(
        "d",
        512 * I0 + P1,
        Load("g", 512 * P0 + P1, F32),
        F32,
        "add",
        None,
        ((I0, Load("t", P0, torch.int64)),),
    )
    found.append(
        Case(
            "embedding backward",
            Body((loop(P0, 4096), loop(P1, 512)), (), (add,)),
            {"d": table.clone(), "g": g, "t": tokens},
            lambda: table.index_add_(0, tokens, g.view(-1)[: 4096 * 512].view(4096, 512)),
        )
    )
    return found


def median_us(run: Callable[[], object], other: Callable[[], object], rounds: int = 25) -> tuple[float, float]:
    """Median time of each, in microseconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, kept in ((run, times[0]), (other, times[1])):
            start = time.perf_counter()
            call()
            kept.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[0][2:]), statistics.median(times[1][2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="OpenMP threads (default: all)")
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    generator = CppGenerator()
    table = cases()
    sources = [generator.generate(case.body, case.name) for case in table]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        launchers = generator.load(sources, Path(folder))
        print(f"{len(sources)} kernels compiled in {time.perf_counter() - start:.1f} s; {threads} threads")
    lines = []
    for case, source in zip(table, sources, strict=True):
        arguments = [case.tensors[buffer] for buffer in source.buffers]
        ours, eager = median_us(lambda run=launchers[source.name], args=arguments: run(*args), case.eager)
        moved = sum(tensor.nbytes for tensor in arguments)
        lines.append((case.name, ours, eager, eager / ours, moved / ours / 1e3))
    print(tabulate(lines, ["kernel", "ours us", "eager us", "eager/ours", "GB/s"], floatfmt=".1f"))


if __name__ == "__main__":
    main()
