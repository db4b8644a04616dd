"""Forward and backward of one layer in FSDP2's own ops, as FSDP2 runs them and as captured graphs contain them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # registers the ops
from torch import Tensor

_c10d = torch.ops._c10d_functional


def gather(shards: list[Tensor], group: str, ranks: int, rank: int) -> list[Tensor]:
    """Copy the shards in, gather them, and copy the flat parameters out."""
    sizes = [shard.numel() for shard in shards]
    flat = torch.empty(sum(sizes) * ranks)
    mine, _ = torch.ops.fsdp.all_gather_copy_in([shard.view(-1) for shard in shards], flat, sizes, sum(sizes), rank)
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(mine, ranks, group))
    outs = [torch.empty(ranks * size) for size in sizes]
    torch.ops.fsdp.split_with_sizes_copy(gathered.view(ranks, -1), sizes, dim=1, out=[o.view(ranks, -1) for o in outs])
    return outs


def fill(param: Tensor, flat: Tensor) -> None:
    param.untyped_storage().resize_(param.numel() * param.element_size())
    torch.ops.fsdp.copy_(param, flat.view(-1)[: param.numel()].view(param.shape))


def empty(param: Tensor) -> None:
    param.untyped_storage().resize_(0)


def forward(x: Tensor, shards: list[Tensor], params: list[Tensor], group: str, ranks: int, rank: int) -> Tensor:
    """Apply `relu(x @ a) @ b` twice, as a reused layer; a and b are gathered into parameters, freed after each use."""
    for _ in range(2):
        for param, flat in zip(params, gather(shards, group, ranks, rank), strict=True):
            fill(param, flat)
        x = torch.relu(x @ params[0]) @ params[1]
        for param in params:
            empty(param)
    return x


def reduce(grads: list[Tensor], rows: list[int], group: str, replicas: str, ranks: int) -> list[Tensor]:
    """Reduce gradients in float32 over `group`, then `replicas`, and divide them; return this rank's `rows` of each."""
    padded = [-(-grad.shape[0] // ranks) * ranks * grad[0].numel() for grad in grads]
    flat = torch.empty(sum(padded))
    torch.ops.fsdp.chunk_cat(grads, 0, ranks, out=flat.view(ranks, -1))
    reduced = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(flat, "sum", ranks, group))
    reduced = _c10d.wait_tensor(_c10d.all_reduce(reduced, "sum", replicas)) / ranks
    parts, offset = [], 0
    for grad, count, size in zip(grads, rows, padded, strict=True):
        parts.append(torch.as_strided(reduced, (count, grad.shape[1]), (grad.shape[1], 1), offset))
        offset += size // ranks
    return parts


def case(device: str = "cpu") -> dict[str, float]:
    """Run forward and `reduce` eagerly and compiled on real ranks; return the largest differences and counters."""
    torch.manual_seed(0)
    group, ranks, rank = dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank()  # type: ignore[union-attr]
    full = [torch.randn(4, 6), torch.randn(6, 4)]
    shards = [param.chunk(ranks)[rank].contiguous() for param in full]
    x = torch.randn(3, 4) + rank
    want = x
    for _ in range(2):
        want = torch.relu(want @ full[0]) @ full[1]
    params = [torch.empty_like(param) for param in full]
    for param in params:
        empty(param)
    with torch.no_grad():
        step = torch.compile(forward, backend="overlapc", fullgraph=True)
        got = step(x, shards, params, group, ranks, rank)
        grads = [(torch.randn(5, 6) + rank).bfloat16(), (torch.randn(4, 4) + rank).bfloat16()]
        rows = [part.shape[0] for part in (grads[0].chunk(ranks)[rank], grads[1].chunk(ranks)[rank])]
        replicas = dist.new_group([rank]) if ranks == 1 else dist.group.WORLD
        reduced = reduce(grads, rows, group, replicas.group_name, ranks)
        compiled = torch.compile(reduce, backend="overlapc", fullgraph=True)
        again = compiled(grads, rows, group, replicas.group_name, ranks)
    counters = torch._dynamo.utils.counters["overlapc"]
    return {
        "forward": float((got - want).abs().max()),
        "reduced": max(float((a - b).abs().max()) for a, b in zip(again, reduced, strict=True)),
        "left in storage": float(sum(param.untyped_storage().size() for param in params)),
        "collectives": float(counters["collectives"]),
        "fallbacks": float(counters["fallbacks"]),
    }
