"""Workloads of calibration: matmuls and attention over random numbers, and collectives over preallocated memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from overlapc.estimators.calibration.clock import Clock, Launch, wait_all
from overlapc.estimators.calibration.effort import MIB, AttentionShape

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def random(device: torch.device, *size: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers: what a GPU draws, and so its clock, depends on the numbers."""
    return torch.randn(size, device=device).to(dtype)


def operands(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of a matmul of rows x inner x columns, as `x @ weight.t()` has them."""
    rows, inner, columns = shape
    return random(device, rows, inner, dtype=dtype), random(device, columns, inner, dtype=dtype).t()


def attention_inputs(device: torch.device, case: AttentionShape, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values."""
    shape = (case.batch, case.heads, case.seq, case.width)
    shared = (case.batch, case.kv_heads, case.seq, case.width)
    return [random(device, *size, dtype=dtype) for size in (shape, shared, shared)]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def calls_for(size_bytes: int, clock: Clock) -> int:
    """Collectives in one sample; the same on every rank."""
    if not clock.queued:
        return 3
    return 4 if size_bytes >= 256 * MIB else 10 if size_bytes >= 16 * MIB else 30


def world_on(channels: int) -> dist.ProcessGroup:
    """All ranks over NCCL, on at most so many channels; 0: on the library's choice of them. Every rank must ask."""
    assert dist.group.WORLD is not None
    if not channels:
        return dist.group.WORLD
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = channels
    group = dist.new_group(backend="nccl", pg_options=options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def launcher(
    collective: str, group: dist.ProcessGroup, size_bytes: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    """Puts one collective of `size_bytes` by its own definition in flight, always over the same memory."""
    ranks = group.size()
    whole = torch.zeros(max(1, size_bytes // dtype.itemsize // ranks) * ranks, dtype=dtype, device=device)
    shard = torch.zeros(whole.numel() // ranks, dtype=dtype, device=device)
    if collective == "all_gather":
        return lambda: group._allgather_base(whole, shard)
    if collective == "reduce_scatter":
        return lambda: group._reduce_scatter_base(shard, whole, dist.ReduceScatterOptions())
    if collective == "all_reduce":
        return lambda: group.allreduce([whole])
    if collective == "all_to_all":
        result = torch.empty_like(whole)
        return lambda: group.alltoall_base(result, whole, [], [])
    if collective == "broadcast":
        return lambda: group.broadcast(whole, 0)
    raise ValueError(f"no collective {collective!r}")


def gathers_together(
    group: dist.ProcessGroup, wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], device: torch.device
) -> Launch:
    """Launches a gather of each of `shards`, as a graph's bucket does (on the host: runtime/collective_ops.py)."""

    def apart() -> dist.Work:
        *works, last = [group._allgather_base(whole, shard) for whole, shard in zip(wholes, shards, strict=True)]
        wait_all(works)
        return last

    return apart if device.type == "cpu" else partial(group.allgather_into_tensor_coalesced, list(wholes), list(shards))


def agreed(value: float, device: torch.device) -> float:
    """The greatest of all ranks' values, the same on all: what follows may depend on it."""
    return all_agreed([value], device)[0]


def all_agreed(values: Sequence[float], device: torch.device) -> list[float]:
    """The greatest of all ranks' values, each by itself."""
    greatest = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return greatest.tolist()
