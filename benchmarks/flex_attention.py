"""Time flex attention by our kernel and Inductor's, and causal attention by torch's flash kernel; ms per direction.

    python benchmarks/flex_attention.py                        # one CUDA device; a table on stdout
    python benchmarks/flex_attention.py --tiles                # our kernels of the causal case in other tiles
    python benchmarks/flex_attention.py --shape 1,2,256,64 --systems overlapc  # a small one

Systems alternate; times are medians over rounds of calls back to back. `of Inductor` is a system's time over
Inductor's. Sizes are batch, heads, sequence length and head width, in bfloat16; "grouped" has a quarter as many key
heads.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch._dynamo
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overlapc.codegen.generators import KernelSource, register
from overlapc.codegen.triton import TritonGenerator, attention
from overlapc.codegen.triton.attention import Tile
from overlapc.errors import ToolchainError
from overlapc.ir.ops import Attention

CASES = ("causal", "window", "documents", "softcap", "alibi", "grouped")
ROUNDS, REPEATS = 7, 5


def functions(case: str, length: int, heads: int) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
    """Return (score_mod, mask_mod) of a case."""
    documents = torch.arange(length, device="cuda") // (length // 5)
    slopes = torch.exp2(-8 * (torch.arange(heads, device="cuda") + 1) / heads)
    causal = lambda b, h, q, k: q >= k  # noqa: E731
    if case == "window":
        return None, lambda b, h, q, k: (q >= k) & (q - k < length // 4)
    if case == "documents":
        return None, lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])
    if case == "softcap":
        return lambda score, b, h, q, k: 30 * torch.tanh(score / 30), causal
    if case == "alibi":
        return lambda score, b, h, q, k: score + slopes[h] * (k - q), causal
    return None, causal


def elapsed_ms(call: Callable[[], Any]) -> float:
    """Return the device time of one call among REPEATS calls back to back, with launches hidden."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    begin.record()
    for _ in range(REPEATS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS


@contextlib.contextmanager
def alone(lock: str) -> Iterator[None]:
    """Inside the block, no other process with the same lock file takes times; "" disables locking."""
    if not lock:
        yield
        return
    with Path(lock).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measured(
    case: str, shape: tuple[int, int, int, int], systems: list[str], lock: str = ""
) -> dict[str, tuple[float, float]]:
    """Return (forward, backward) in ms by system."""
    batch, heads, length, width = shape
    kv_heads = max(1, heads // 4) if case == "grouped" else heads
    sizes = [(batch, each, length, width) for each in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    gradient = torch.randn_like(inputs[0])
    score, mask = functions(case, length, heads)
    blocks = create_block_mask(mask, None, None, length, length, device="cuda")

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=kv_heads != heads)
        assert isinstance(result, Tensor)
        return result

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != heads)

    calls: dict[str, Callable[..., Tensor]] = {}
    for system in systems:
        torch._dynamo.reset()
        calls[system] = flash if system == "flash, causal" else torch.compile(flex, backend=system, fullgraph=True)
    backward = {}
    for system, call in calls.items():
        backward[system] = partial(torch.autograd.grad, call(*inputs), inputs, gradient, retain_graph=True)
        backward[system]()
    times: dict[str, tuple[list[float], list[float]]] = {system: ([], []) for system in calls}
    with alone(lock):
        for _ in range(ROUNDS):
            for system, call in calls.items():
                times[system][0].append(elapsed_ms(partial(call, *inputs)))
                times[system][1].append(elapsed_ms(backward[system]))
    return {system: (statistics.median(one), statistics.median(other)) for system, (one, other) in times.items()}


FORWARD = [Tile(*each) for each in (
    (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3),
    (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (128, 32, 8, 4), (64, 32, 4, 4),
)]  # fmt: skip
BACKWARD = [(each, Tile(each.keys, each.queries, each.warps, each.stages)) for each in (Tile(*each) for each in (
    (64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 3), (32, 128, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3),
    (128, 128, 8, 2), (64, 64, 8, 3), (32, 64, 4, 3), (32, 128, 4, 3),
))]  # fmt: skip


def sweep(shape: tuple[int, int, int, int], lock: str) -> list[tuple[str, str, float]]:
    """Return (kernel, tile, ms) of the causal kernels in other tiles, fastest first."""
    forward, backward = causal_ops(shape)
    tried = {}
    for part, op, tile in (
        *(("forward", forward, each) for each in FORWARD),
        *(("keys", backward, each) for each, _ in BACKWARD),
        *(("queries", backward, each) for _, each in BACKWARD),
    ):
        source = attention.source(op, f"try_{part}", "", {**attention.choose(op), part: tile})
        tried[source.name] = (part, op, tile, source)
    given = ("query", "key", "value", "grad_out")
    memory: dict[str, Any] = {role: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for role in given}
    _, mask = functions("causal", shape[2], shape[1])
    blocks = create_block_mask(mask, None, None, shape[2], shape[2], device="cuda").as_tuple()[2:10]
    lists = dict(zip(attention.list_arguments(backward), blocks, strict=True))
    memory.update(lists)
    found = []
    with TemporaryDirectory() as folder:
        sources = [each[3] for each in tried.values()]
        with contextlib.suppress(ToolchainError):  # one may fail; the others are compiled nevertheless
            TritonGenerator().load(sources, Path(folder))
        for part, op, tile, source in tried.values():
            try:
                launcher = TritonGenerator().load([source], Path(folder))[source.name]
            except ToolchainError:
                found.append((part, str(tile), math.inf))
                continue
            for role, view in op.results.items():
                size = tuple(map(int, view.size))
                memory.setdefault(role, torch.empty(size, device="cuda", dtype=view.dtype))
            roles = (*op.tensors, *attention.list_arguments(op), *op.results)
            call = partial(launcher, *(memory[role] for role in roles))
            call()
            with alone(lock):
                found.append((part, str(tile), min(elapsed_ms(call) for _ in range(3))))
    return sorted(found, key=lambda each: (each[0], each[2]))


def causal_ops(shape: tuple[int, int, int, int]) -> list[Attention]:
    """Return the forward and backward ops of causal attention that the generator gets."""
    met: list[Attention] = []

    class Watched(TritonGenerator):
        def attention(self, op: Attention, comment: str = "") -> KernelSource:
            met.append(op)
            return super().attention(op, comment)

    register(Watched())
    try:
        measured("causal", shape, ["overlapc"])
    finally:
        register(TritonGenerator())
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4,32,4096,128")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--systems", default="overlapc/inductor/flash, causal")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--lock", default="", help="lock file held while timing, so that processes take turns")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: tests/codegen/test_flex_attention.py runs these kernels without one")
    batch, heads, length, width = map(int, arguments.shape.split(","))
    shape = (batch, heads, length, width)
    if arguments.tiles:
        print(tabulate(sweep(shape, arguments.lock), headers=["function", "tile", "ms"], floatfmt=".3f"))
        return
    rows = []
    for case in arguments.cases.split(","):
        times = measured(case, shape, arguments.systems.split("/"), arguments.lock)
        beside = times.get("inductor")
        for system, (forward, backward) in times.items():
            ratio = (forward + backward) / sum(beside) if beside else None
            rows.append((case, system, forward, backward, forward + backward, ratio))
    head = ["attention", "system", "forward ms", "backward ms", "both ms", "of Inductor"]
    print(tabulate(rows, headers=head, floatfmt=".3f"))


if __name__ == "__main__":
    main()
