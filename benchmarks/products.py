"""Time our matrix products beside the library's, in a Llama-8B layer's shapes: alone and with a fused epilogue.

    python benchmarks/products.py                 # one CUDA device; a table on stdout
    python benchmarks/products.py --tokens 1024

Both sides alternate and are timed with launches hidden, after other work. The epilogue is
`silu(x @ w.T + bias) + residual`, with `x @ w.T + bias` stored, too: the library's call and a generated kernel against
one kernel of ours. `best tile` is rows x columns x length, warps and stages.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the bodies are shared with the tests

from overlapc.codegen.triton import TritonGenerator, products
from overlapc.estimators.calibration.clock import clock_for, compute_ns
from overlapc.ir.body import Body, Load, Store, op
from tests.codegen import product_cases as cases
from tests.codegen.case import Case
from tests.codegen.terms import bf16, f32, p0, p1

WIDTH, FFN, KV = 4096, 14336, 1024


def shapes(tokens: int) -> list[tuple[str, int, int, int, bool]]:
    """Return (name, rows, columns, length, whether the right factor is stored transposed, as weights in forward)."""
    return [
        ("q, o", tokens, WIDTH, WIDTH, True),
        ("k, v", tokens, KV, WIDTH, True),
        ("gate, up", tokens, FFN, WIDTH, True),
        ("down", tokens, WIDTH, FFN, True),
        ("gradient of input, up", tokens, WIDTH, FFN, False),
        ("gradient of weight, up", FFN, WIDTH, tokens, False),
        ("router", tokens, 64, WIDTH, True),
        ("adapter of rank 16", tokens, 16, WIDTH, True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: tests/codegen/test_products.py runs these kernels without one")
    rows = []
    for name, m, n, k, transposed in shapes(arguments.tokens):
        case = cases.plain(name.replace(",", ""), m, n, k, bf16, transposed)
        a, b = case.tensors["a"].cuda(), case.tensors["b"].cuda()
        right = b.T if transposed else b
        out = torch.empty(m, n, dtype=bf16, device="cuda")
        library = partial(torch.mm, a, right, out=out)
        rows.append(_row(name, case, {"a": a, "b": b, "y": out}, [library], 2 * m * n * k))
    for name, m, n, k, _ in shapes(arguments.tokens)[:3]:
        case = cases.linear_silu(m, n, k)
        tensors = {key: tensor.cuda() for key, tensor in case.tensors.items()}
        with TemporaryDirectory() as folder:
            rows.append(_row(f"{name} with epilogue", case, tensors, _apart(case, tensors, n, folder), 2 * m * n * k))
    head = ["product", "library us", "ours us", "ours / library", "library TFLOP/s", "ours TFLOP/s", "best tile"]
    print(tabulate(rows, head, floatfmt=".2f"))


def _row(
    name: str, case: Case, tensors: dict[str, torch.Tensor], library: list[Callable[[], object]], flops: int
) -> list[object]:
    """Return the table row of one product: medians of three, the library and our best tile alternating."""
    clock = clock_for(torch.device("cuda"))
    generator = TritonGenerator()
    times: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        runs = {}
        for tiling in products.candidates(case.body, {}):
            source = generator.generate(case.body, case.name, tiling=tiling)
            launcher = generator.load([source], Path(folder))[source.name]
            given = [tensors[buffer] for buffer in source.buffers]
            tile = f"{tiling.yblock}x{tiling.xblock}x{tiling.rblock} {tiling.num_warps} {tiling.num_stages}"
            runs[tile] = partial(launcher, *given)
            times[tile] = compute_ns(clock, runs[tile], rounds=1)
        best = min(times, key=times.__getitem__)

        def apart() -> None:
            for call in library:
                call()

        theirs, ours = [], []
        for _ in range(3):
            theirs.append(compute_ns(clock, apart, rounds=1))
            ours.append(compute_ns(clock, runs[best], rounds=1))
    theirs_ns, ours_ns = statistics.median(theirs), statistics.median(ours)
    rates = [flops / ns / 1e3 for ns in (theirs_ns, ours_ns)]
    return [name, theirs_ns / 1e3, ours_ns / 1e3, ours_ns / theirs_ns, *rates, best]


def _apart(case: Case, tensors: dict[str, torch.Tensor], columns: int, folder: str) -> list[Callable[[], object]]:
    """Return the calls without fusion: the library's product with bias, then a generated kernel for the epilogue."""
    total = Load("h16", columns * p0 + p1, bf16)
    value = op("add", op("mul", total, op("sigmoid", total)), Load("residual", columns * p0 + p1, bf16))
    stores = (Store("h", columns * p0 + p1, total, f32), Store("y", columns * p0 + p1, value, bf16))
    generator = TritonGenerator()
    source = generator.generate(Body(case.body.loops, (), stores), "epilogue")
    launcher = generator.load([source], Path(folder))[source.name]
    made = {**tensors, "h16": torch.empty_like(tensors["y"])}
    given = [made[buffer] for buffer in source.buffers]
    weight = tensors["b"].T
    return [
        lambda: torch.addmm(tensors["bias"], tensors["a"], weight, out=made["h16"]),
        lambda: launcher(*given),
    ]


if __name__ == "__main__":
    main()
