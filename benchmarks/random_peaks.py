"""Compare planned peak memory with measured live memory, for random sharded models under random memory budgets.

    python benchmarks/random_peaks.py                                              # CPU
    torchrun --nproc-per-node 2 benchmarks/random_peaks.py --count 50              # CPU ranks, everything by copies
    torchrun --nproc-per-node 2 benchmarks/random_peaks.py --device cuda --count 50

Each model has some blocks (attention, gated and plain feed-forward, norms, checkpointing) of random sizes,
`fully_shard` on every block, on pairs of blocks or on the whole model only, with or without `reshard_after_forward`,
float32 or bfloat16 compute, and `memory` "reuse" or "pool". It trains two steps without a budget, then two with a
budget of 0.6 to 1.1 times the peak that was planned without one. Planned memory is the report's peak of forward and
backward. Measured memory is the peak of the bytes requested from torch's allocator during the second step, without
gradients of the first one: parameters, the batch, everything that the step requests, and the shared memory for copies.
(The allocator may hand out a block that is up to 1 MiB larger, which is much for these models.)

On a CPU the allocator's events come from torch's profiler. gloo would allocate memory for a reduce-scatter from the
same allocator, so collectives there are those of torch's fake process group of 4 ranks or, under torchrun, copies
between ranks. oneDNN does so within a product in bfloat16; on a CPU, memory that a library call frees itself is not
counted.

A model is right if measured memory is at most the planned memory, and planned memory at most the budget. The output has
planned over measured memory, as median and extremes; refused are budgets for which overlapc finds no schedule.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import overlapc
from overlapc.errors import MemoryBudgetError
from overlapc.report import record
from overlapc.report.held_memory import peaks

_REQUESTED = "requested_bytes.all"  # of `torch.cuda.memory_stats`: without the allocator's rounding
_ROOT_GRADIENT = 4  # bytes of the loss's own gradient, which autograd allocates


class Attention(nn.Module):
    """Causal self-attention with two heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two matrices, or three with a gate."""

    def __init__(self, dim: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    """A module behind a norm, with a residual connection; checkpointed: recomputed in backward."""

    def __init__(self, part: nn.Module, dim: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.part, self.checkpointed = nn.LayerNorm(dim), part, checkpointed

    def _inner(self, x: Tensor) -> Tensor:
        return self.part(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)


class Model(nn.Module):
    """An embedding, blocks and a head; returns the mean cross-entropy."""

    def __init__(self, vocab: int, dim: int, blocks: list[Block]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


@dataclass(frozen=True)
class Drawn:
    """The settings and the model that are drawn from one seed."""

    seed: int
    half: bool
    reshard: bool | None
    together: int  # blocks in one unit of `fully_shard`; 0: the whole model is one unit
    memory: str
    budget: float  # as a fraction of the planned peak without a budget

    @classmethod
    def of(cls, seed: int) -> Drawn:
        """Draw the settings of `seed`."""
        dice = random.Random(f"settings {seed}")
        return cls(
            seed,
            dice.random() < 0.5,
            dice.choice((True, False, None)),
            dice.choice((1, 1, 2, 0)),
            dice.choice(("reuse", "pool")),
            dice.uniform(0.6, 1.1),
        )

    def model(self, mesh: DeviceMesh, scale: int) -> tuple[nn.Module, Tensor]:
        """Return the sharded model and this rank's batch; sizes grow with `scale`."""
        dice = random.Random(f"model {self.seed}")
        torch.manual_seed(self.seed)
        dim = 16 * dice.randint(1, 4) * scale
        blocks = []
        with torch.device(mesh.device_type):
            for _ in range(dice.randint(1, 5)):
                kind = dice.choice(("attention", "gated", "plain"))
                hidden = 8 * dice.randint(1, 16) * scale
                part = Attention(dim) if kind == "attention" else FeedForward(dim, hidden, kind == "gated")
                blocks.append(Block(part, dim, dice.random() < 0.3))
            model = Model(32 * dice.randint(1, 8), dim, blocks)
            rows, length = dice.randint(1, 4), 8 * dice.randint(1, 8)
            tokens = torch.randint(32, (rows, length * scale))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.half else MixedPrecisionPolicy()
        how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if self.reshard is not None:
            how["reshard_after_forward"] = self.reshard
        if self.together:
            for at in range(0, len(blocks), self.together):
                overlapc.fully_shard(list(blocks[at : at + self.together]), **how)
        overlapc.fully_shard(model, **how)
        return model, tokens


def live_bytes(step: Any, model: nn.Module, tokens: Tensor) -> int:
    """Return the peak of requested bytes during a step: parameters, the batch and everything that the step requests."""
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local(model)}
    before = sum(held.values()) + tokens.untyped_storage().nbytes()
    model.zero_grad(set_to_none=True)
    if tokens.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_stats()[f"{_REQUESTED}.current"] - before
        step(tokens).backward()
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()[f"{_REQUESTED}.peak"]) - others
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(tokens).backward()
    events = profile.profiler.kineto_results.events()
    calls = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name().startswith("aten::")
    )
    more = highest = at = 0
    ends = -1  # end of the current outermost ATen call; memory that the call itself frees is not counted
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        if event.start_ns() > ends:
            highest = max(highest, more)
        while at < len(calls) and calls[at][0] <= event.start_ns():
            ends = max(ends, calls[at][1])
            at += 1
        more += event.nbytes()
        if event.start_ns() > ends:
            highest = max(highest, more)
    return before + max(highest, more)


def local(model: nn.Module) -> list[Tensor]:
    """Return this rank's shards of the parameters, and the buffers."""
    found = [*model.parameters(), *model.buffers()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach() for tensor in found]


@dataclass(frozen=True)
class Found:
    """Planned and measured bytes of one model."""

    planned: int  # peak of the step: while one graph runs, memory held by the other counts, too
    of_graphs: int  # the larger of the graphs' own peaks, which a budget bounds
    measured: int


def tried(drawn: Drawn, mesh: DeviceMesh, scale: int, budget: int | None) -> Found | None:
    """Compile and measure a model; None if no schedule fits the budget."""
    torch._dynamo.reset()
    record.clear()
    gc.collect()  # the memory that ranks shared for the last model's copies is freed with its compiled steps
    model, tokens = drawn.model(mesh, scale)
    options: dict[str, Any] = {"memory": drawn.memory, "warm_start": False}
    if dist.get_backend() == "gloo":
        options["transport"] = "copy"
    if budget is not None:
        options["memory_budget"] = budget
    step = torch.compile(model, backend="overlapc", fullgraph=True, options=options)
    refused = torch.zeros(1, device=tokens.device)
    try:
        step(tokens).backward()
    except Exception as error:
        if not isinstance(getattr(error, "inner_exception", error), MemoryBudgetError):
            raise
        refused += 1
    dist.all_reduce(refused, dist.ReduceOp.MAX)
    if refused.item():
        return None
    measured = live_bytes(step, model, tokens)
    graphs = record.report_of_process().steps[0].graphs
    shared = max(graph.pool_bytes for graph in graphs)
    return Found(max(peaks(graphs).values()), max(graph.peak_bytes for graph in graphs), measured + shared)


def main() -> int:
    """Run one rank; rank 0 prints. Return 1 if a model took more than planned, or was planned above its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="number of models (default: 50)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for variable in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):  # the names in torch 2.13 and 2.11
        os.environ[variable] = "0"  # torch's flight recorder would keep earlier models' compiled steps and their memory
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    elif "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    scale = 8 if args.device == "cuda" else 1  # overlapc rounds every buffer up to 512 bytes on GPUs
    ratios: dict[str, list[float]] = {"no budget": [], "a budget": []}
    refused, wrong = 0, []
    for seed in range(args.first, args.first + args.count):
        drawn = Drawn.of(seed)
        found = tried(drawn, mesh, scale, None)
        assert found is not None
        largest = torch.tensor(found.of_graphs, device=args.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        budget = int(largest.item() * drawn.budget)
        for kind, limit in (("no budget", None), ("a budget", budget)):
            if limit is not None:
                found = tried(drawn, mesh, scale, limit)
            if found is None:
                refused += 1
                continue
            ratios[kind].append(found.planned / found.measured)
            if found.measured > found.planned + _ROOT_GRADIENT or (limit is not None and found.of_graphs > limit):
                wrong.append(f"{drawn}, {kind} {limit}: {found}")
    if dist.get_rank() == 0:
        for text in wrong:
            print(text)
        for kind, found_ratios in ratios.items():
            if found_ratios:
                low, middle, high = min(found_ratios), statistics.median(found_ratios), max(found_ratios)
                print(
                    f"{kind}: {len(found_ratios)} models, planned over measured {middle:.4f} ({low:.4f} to {high:.4f})"
                )
        print(f"{refused} budgets refused; {len(wrong)} models wrong", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
