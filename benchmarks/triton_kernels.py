"""Generated Triton kernels as they occur in training: share of the device's measured copy bandwidth.

    python benchmarks/triton_kernels.py            # table on stdout; needs a CUDA device
    python benchmarks/triton_kernels.py --filter softmax --repeat 50

A share is the least bytes a kernel must move (each input and output once) over its time, relative to a device copy
measured in the same run. Launches are replayed from a CUDA graph, so that the host's time does not count; inputs are
far larger than the cache. `worst error` compares with eager at the benchmark's own sizes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the bodies are shared with the tests

from overlapc.codegen.triton import TritonGenerator
from tests.codegen import triton_cases as cases

TOKENS, WIDTH, FFN, VOCABULARY = 8192, 4096, 14336, 32000


def workloads() -> dict[str, Callable[[], cases.Case]]:
    """Cases by name, made when their turn comes: together they would not fit a small host."""
    return {
        "RMSNorm forward": lambda: cases.rms_norm(TOKENS, WIDTH),
        "RMSNorm backward (dx)": lambda: cases.rms_norm_backward(TOKENS, WIDTH),
        "LayerNorm forward fp32": lambda: cases.layer_norm(TOKENS, WIDTH),
        "softmax 2048": lambda: cases.softmax(32768, 2048),
        "softmax 16384": lambda: cases.softmax(4096, 16384),
        "softmax 50k (online)": lambda: cases.softmax(2048, 50304),
        "softmax 128k × 64 rows (split)": lambda: cases.softmax(64, 2**20),
        "cross-entropy 32k": lambda: cases.cross_entropy(TOKENS, VOCABULARY),
        "cross-entropy 128k": lambda: cases.cross_entropy(2048, 128256),
        "SwiGLU": lambda: cases.swiglu(TOKENS * FFN),
        "RoPE": lambda: cases.rope(TOKENS, 32, 128),
        "embedding": lambda: cases.embedding(4 * TOKENS, VOCABULARY, WIDTH),
        "column sum": lambda: cases.column_sum(2 * TOKENS, WIDTH),
        "column sum, wide": lambda: cases.column_sum(TOKENS, FFN),
        "transpose + bias": lambda: cases.transpose(WIDTH, TOKENS),
        "norm, then scale": lambda: cases.norm_and_scale(2**27),
        "channel sum NCHW": lambda: cases.two_reduction_loops(64, 128, 16384),
    }


def least_bytes(case: cases.Case) -> int:
    """Each buffer once for reading and once for writing; of gathered tables only what is read."""
    loads = {load.buffer for load in case.body.loads()}
    gathered = {load.buffer for load in case.body.loads() if load.indirect}
    plain = {load.buffer for load in case.body.loads() if not load.indirect}
    stores = {store.buffer for store in case.body.stores}
    total = sum(case.tensors[name].nbytes for name in stores)
    for name in loads:
        if name in gathered - plain:
            total += min(case.tensors[name].nbytes, max(case.tensors[store].nbytes for store in stores))
        else:
            total += case.tensors[name].nbytes
    return total


def time_of(launch: Callable[[], None], repeat: int) -> float:
    """Median seconds of one launch, replayed in a graph of ten."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            launch()
    graph.replay()
    samples = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 10 / 1e3)
    return sorted(samples)[len(samples) // 2]


def copy_bandwidth(repeat: int) -> float:
    """Bytes a second, reads and writes counted, of a device-to-device copy of 1 GiB."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    samples = []
    for _ in range(repeat):  # not in a graph: a captured copy takes another, slower way than a launched one
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            target.copy_(source)
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 10 / 1e3)
    return 2 * source.nbytes / sorted(samples)[len(samples) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="", help="only kernels whose name contains this")
    parser.add_argument("--repeat", type=int, default=20, help="timed replays of ten launches each (default: 20)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    bandwidth = copy_bandwidth(arguments.repeat)
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    rows, shares = [], []
    generator = TritonGenerator()
    with TemporaryDirectory() as folder:
        for name, make in workloads().items():
            if arguments.filter not in name:
                continue
            case = make()
            source = generator.generate(case.body, case.name)
            launcher = generator.load([source], Path(folder))[source.name]
            problems = case.run(launcher, source, "cuda")
            tensors = {key: tensor.cuda() for key, tensor in case.tensors.items()}
            ordered = [tensors[buffer] for buffer in source.buffers]
            sizes = [case.sizes[str(symbol)] for symbol in source.sizes]
            seconds = time_of(partial(launcher, *ordered, *sizes), arguments.repeat)
            share = least_bytes(case) / seconds / bandwidth
            shares.append(share)
            form = source.text.splitlines()[0].removeprefix("# ")
            rows.append([name, f"{seconds * 1e6:.1f}", f"{share:.0%}", form, problems or "ok"])
    print(tabulate(rows, headers=["kernel", "us", "of copy", "form", "against eager"]))
    if shares:
        print(f"geometric mean {math.exp(sum(map(math.log, shares)) / len(shares)):.0%} of copy bandwidth")


if __name__ == "__main__":
    main()
