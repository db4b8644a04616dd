"""Inductor on the same in-graph FSDP as ours, with each of its own methods to overlap communication.

    inductor          collectives stay where the graph has them
    inductor-raise    its scheduler passes raise, sink, raise on buckets of one block (its best method on H200s)
    inductor-sink     the same buckets with its passes sink, raise
    inductor-overlap  its overlap scheduling of the ATen graph, which makes buckets of its own; it needs a GPU
    inductor-manual   its bucketing by module: the next block's gathers and the last block's scatters beside a block

All of them use `overlapc.fx.partitioning.partition`, so that their forward and backward have the same nodes as ours: a
group that reshards is gathered again in backward, and a parameter's gradient is reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.fx_passes.bucketing import (
    is_all_gather_into_tensor,
    is_reduce_scatter_tensor,
    merge_all_gather,
    merge_reduce_scatter,
)
from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.utils import flop_counter

from overlapc.fx.comm.labels import label_of
from overlapc.fx.partitioning.partition import partition

SYSTEMS = ("inductor", "inductor-raise", "inductor-sink", "inductor-overlap", "inductor-manual")
RAISE, SINK = "reorder_communication_preserving_peak_memory", "sink_waits_iterative"
SCHEDULER_PASSES = {"inductor-raise": [RAISE, SINK, RAISE], "inductor-sink": [SINK, RAISE]}
OUTERMOST = "outermost"  # name of the group with the empty path, where a path may not be empty


def compiled_by_inductor(system: str, model: nn.Module) -> Callable[..., Any]:
    """Return `model` compiled by Inductor as `system`, one of SYSTEMS."""
    count_grouped_query_flops()
    return torch.compile(model, fullgraph=True, options=options_of(system))


def options_of(system: str) -> dict[str, Any]:
    """Return Inductor's options for `system`, one of SYSTEMS."""
    options: dict[str, Any] = {"custom_partitioner_fn": _Partition()}
    if system in SCHEDULER_PASSES:
        options |= {
            "reorder_for_compute_comm_overlap": True,
            "reorder_for_compute_comm_overlap_passes": SCHEDULER_PASSES[system],
            "post_grad_custom_post_pass": _BucketBlocks(),
        }
    elif system == "inductor-overlap":
        options |= {
            "aten_distributed_optimizations.enable_overlap_scheduling": True,
            "aten_distributed_optimizations.collective_bucketing": True,
        }
    elif system == "inductor-manual":
        options |= {"post_grad_custom_post_pass": _ManualOverlap()}
    elif system != "inductor":
        raise ValueError(f"{system} is none of {', '.join(SYSTEMS)}")
    return options


def count_grouped_query_flops() -> None:
    """Let torch's FLOP formulas of attention accept fewer key heads than query heads; those of torch 2.11 raise.

    The kernels read a shared key head once for each query head, so the work is that of one key head per query head.
    """
    for name, query_at in (("sdpa_flop_count", 0), ("sdpa_backward_flop_count", 1)):
        count = getattr(flop_counter, name)
        if not hasattr(count, "counts_groups"):
            setattr(flop_counter, name, _with_groups(count, query_at))


def _with_groups(count: Callable[..., int], query_at: int) -> Callable[..., int]:
    def counted(*shapes: Any) -> int:
        heads = shapes[query_at][1]
        return count(*((batch, heads, *rest) for batch, _, *rest in shapes))

    counted.counts_groups = True  # type: ignore[attr-defined]
    return counted


def blocks(nodes: Iterable[fx.Node]) -> dict[str, list[fx.Node]]:
    """Group the nodes that serve a sharded parameter by the module that `fully_shard` was called on."""
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        label = label_of(node)
        if label is not None:
            found.setdefault(label.group or OUTERMOST, []).append(node)
    return found


class _Uncached:
    """A pass whose results Inductor must not cache, because its cache key cannot cover what the pass depends on."""

    def uuid(self) -> None:
        return None


class _Partition(_Uncached, CustomPartitionerFn):
    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        return partition(gm, joint_inputs, **options)


class _BucketBlocks(_Uncached, CustomGraphPass):
    """Merge each block's gathers, and its scatters, into one bucket by Inductor's own functions."""

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        for is_one, merge in (
            (is_all_gather_into_tensor, merge_all_gather),
            (is_reduce_scatter_tensor, merge_reduce_scatter),
        ):
            buckets = blocks(node for node in graph.nodes if is_one(node))
            merge(gm, [bucket for bucket in buckets.values() if len(bucket) > 1], "default")
        stable_topological_sort(graph)
        graph.lint()


class _ManualOverlap(_Uncached, CustomGraphPass):
    """Run Inductor's manual bucketing on the blocks that our labels name."""

    def __call__(self, graph: fx.Graph) -> None:
        plan: list[list[str] | str] = list(blocks(graph.nodes))
        manual_overlap_bucketing(graph.owning_module, plan, insert_overlap_deps=True, module_stack_fn=_module_stack)


def _module_stack(node: fx.Node) -> list[tuple[str, type[Any]]]:
    label = label_of(node)
    return [] if label is None else [(label.group or OUTERMOST, nn.Module)]
