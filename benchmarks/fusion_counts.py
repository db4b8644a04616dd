"""Count generated kernels and the bytes they move, beside Inductor's, for a Llama block and a BERT block.

    python benchmarks/fusion_counts.py                 # fp32 on CPU, Inductor as it fuses for C++
    python benchmarks/fusion_counts.py --device cuda --dtype bfloat16

Each compiler uses its own decompositions, partitioner and fusion; no code is generated. Bytes are counted from each
compiler's own index expressions: every element of an outside buffer that a kernel reads or writes counts once. Inductor
splits a long reduction into two kernels during lowering, overlapc during code generation; neither split is counted.
`--list` prints our kernels.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import bert_block, inductor_graphs, inductor_scheduled, llama_block, lowered, overlapc_graphs
from tabulate import tabulate
from torch.fx import GraphModule

from overlapc.fusion import fuse_ops
from overlapc.fusion.work import work_of
from overlapc.ir.ops import Combo, Loops, loops_of

Count = tuple[int, int, int]  # generated kernels, their bytes, library calls


def count_ours(gm: GraphModule, inputs: Sequence[Any], show: bool) -> Count:
    """Count kernels and bytes of one graph after overlapc's fusion."""
    graph = lowered(gm, "graph")
    ops, report = fuse_ops(graph)
    kernels = [op for op in ops if isinstance(op, Loops | Combo)]
    works = [work_of(op, graph) for op in kernels]
    if show:
        for op, work in zip(kernels, works, strict=True):
            print(f"\n{op.name}: {work.read_bytes + work.write_bytes} bytes, {' '.join(op.origin.fx)}")
            for part in loops_of(op):
                print(part.body)
        print(report)
    return len(kernels), sum(work.read_bytes + work.write_bytes for work in works), len(ops) - len(kernels)


def count_inductor(gm: GraphModule, inputs: Sequence[Any], show: bool) -> Count:
    """Count kernels and bytes of one graph after Inductor's fusion."""
    from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode
    from torch._inductor.virtualized import V

    with torch._inductor.config.patch(split_reductions=False):
        graph = inductor_scheduled(gm, inputs)
    with V.set_graph_handler(graph):
        kernels = [node for node in graph.scheduler.nodes if isinstance(node, FusedSchedulerNode | SchedulerNode)]
        moved = [node.get_read_write_buffers_sizes() for node in kernels]
    if show:
        for node, size in zip(kernels, moved, strict=True):
            parts = " ".join(
                part.node.get_origin_node().name for part in node.get_nodes() if part.node.get_origin_node()
            )
            print(f"inductor {node.get_name()}: {size} bytes, {parts}")
    return len(kernels), sum(moved), len(graph.scheduler.nodes) - len(kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--list", action="store_true", help="print every kernel")
    parser.add_argument("--model", default="llama,bert")
    args = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "/tmp/overlapc_benchmark_inductor")
    rows = []
    for name, make in (("llama", llama_block), ("bert", bert_block)):
        if name not in args.model.split(","):
            continue
        counts: dict[tuple[str, str], Count] = {}
        for system, capture, count in (
            ("overlapc", overlapc_graphs, count_ours),
            ("inductor", inductor_graphs, count_inductor),
        ):
            capture(make(args.device, getattr(torch, args.dtype)), _into(counts, system, count, args.list))
        for which in ("forward", "backward"):
            ours, theirs = counts["overlapc", which], counts["inductor", which]
            rows.append([f"{name} block {which}", *_pairs(ours, theirs)])
    headers = ["graph", "kernels", "Inductor's", "MB moved", "Inductor's", "other calls", "Inductor's"]
    print(tabulate(rows, headers=headers, floatfmt=".2f"))


def _into(
    counts: dict[tuple[str, str], Count],
    system: str,
    count: Callable[[GraphModule, Sequence[Any], bool], Count],
    show: bool,
) -> Callable[[GraphModule, Sequence[Any], str], None]:
    def visit(gm: GraphModule, inputs: Sequence[Any], which: str) -> None:
        if show:
            print(f"\n=== {system} {which}")
        counts[system, which] = count(gm, inputs, show)

    return visit


def _pairs(ours: Count, theirs: Count) -> list[float]:
    return [ours[0], theirs[0], ours[1] / 1e6, theirs[1] / 1e6, ours[2], theirs[2]]


if __name__ == "__main__":
    main()
