"""Workloads of calibration: matmuls and attention of random numbers, and collectives on preallocated memory."""

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
    """Return normally distributed numbers; a GPU's power, and so its clock, depends on the values."""
    return torch.randn(size, device=device).to(dtype)


def operands(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the operands of a matmul rows x inner x columns, with the strides of `x @ weight.t()`."""
    rows, inner, columns = shape
    return random(device, rows, inner, dtype=dtype), random(device, columns, inner, dtype=dtype).t()


def attention_inputs(device: torch.device, case: AttentionShape, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys and values."""
    shape = (case.batch, case.heads, case.seq, case.width)
    shared = (case.batch, case.kv_heads, case.seq, case.width)
    return [random(device, *size, dtype=dtype) for size in (shape, shared, shared)]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def calls_for(size_bytes: int, clock: Clock) -> int:
    """Return the number of collectives in one sample, the same on every rank."""
    if not clock.queued:
        return 3
    return 4 if size_bytes >= 256 * MIB else 10 if size_bytes >= 16 * MIB else 30


def world_on(channels: int) -> dist.ProcessGroup:
    """Return an NCCL group of all ranks with at most `channels` channels (0: NCCL's choice). Collective call."""
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
    """Return a function that launches one collective of `size_bytes` (see `Comm.bytes`), always on the same memory."""
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
    """Return a function that all-gathers each of `shards` as a bucket does (for CPUs as runtime/collective_ops.py)."""

    def apart() -> dist.Work:
        *works, last = [group._allgather_base(whole, shard) for whole, shard in zip(wholes, shards, strict=True)]
        wait_all(works)
        return last

    return apart if device.type == "cpu" else partial(group.allgather_into_tensor_coalesced, list(wholes), list(shards))


def agreed(value: float, device: torch.device) -> float:
    """Return the maximum of `value` over all ranks, so that all ranks can base the same decision on it."""
    return all_agreed([value], device)[0]


def all_agreed(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the maximum over all ranks of each value."""
    greatest = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return greatest.tolist()
