"""Whole graphs of a Llama and a BERT block compute the same fused in any order, with few kernels and linearly many
attempts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule

from overlapc.fusion import fuse as fusing
from overlapc.fusion import fuse_ops
from overlapc.ir.ops import Loops
from tests import ROOT
from tests.ir.interpret import run_ops

_path = ROOT / "benchmarks" / "models.py"
_spec = importlib.util.spec_from_file_location("benchmark_models", _path)
assert _spec is not None
assert _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def blocks() -> dict[str, Any]:
    small = {"dim": 64, "batch": 2, "seq": 8}
    return {
        "llama": models.llama_block("cpu", torch.float32, **small),
        "bert": models.bert_block("cpu", torch.float32, **small),
    }


def each_graph(model: Any, visit: Callable[[GraphModule, str], None]) -> None:
    def outside_of_the_compiler(gm: GraphModule, inputs: Any, which: str) -> None:
        with unset_fake_temporarily():
            visit(gm, which)

    models.overlapc_graphs(model, outside_of_the_compiler)


def arguments(gm: GraphModule) -> list[Any]:
    """Return random inputs in the layouts that the graph was traced with."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        traced = node.meta["val"]
        real = torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype)
        found.append(real.copy_(torch.rand(traced.shape, generator=generator)))
    return found


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_block_computes_the_same_fused_in_any_order(name: str) -> None:
    def check(gm: GraphModule, which: str) -> None:
        given = arguments(gm)
        wanted = gm(*given)
        graph = models.lowered(gm, which)
        for seed in (None, 1, 2):
            got = run_ops(fuse_ops(graph, seed=seed)[0], graph, given)
            for one, other in zip(got, wanted, strict=True):
                if other is not None:
                    # Saved tensors are random here, so elements can cancel: compare errors with the largest element.
                    assert (one - other).abs().max() <= 1e-4 * other.abs().max() + 1e-6

    each_graph(blocks()[name], check)


def test_blocks_have_no_more_kernels_than_in_the_comparison_with_inductor() -> None:
    """The counts of `benchmarks/fusion_counts.py` on CPU; Inductor's are 10, 13, 3 and 12."""
    counts: list[int] = []
    for name in ("llama", "bert"):
        model = getattr(models, f"{name}_block")("cpu", torch.float32)
        each_graph(model, lambda gm, which: counts.append(kernels(gm, which)))
    assert all(count <= most for count, most in zip(counts, (6, 7, 3, 10), strict=True)), counts


def kernels(gm: GraphModule, which: str) -> int:
    return sum(isinstance(op, Loops) for op in fuse_ops(models.lowered(gm, which))[0])


def test_the_number_of_attempts_is_linear_in_the_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "NEIGHBOURS", 1)  # with more, all kernels of a few layers would be neighbours
    attempts: dict[int, int] = {}

    def count(gm: GraphModule, which: str) -> None:
        _, report = fuse_ops(models.lowered(gm, which))
        attempts[layers] = attempts.get(layers, 0) + len(report.fused) + len(report.refused)

    for layers in (2, 3, 4):
        each_graph(models.llama(layers), count)
    assert attempts[4] - attempts[3] <= attempts[3] - attempts[2] + 2
