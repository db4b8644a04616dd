"""Train random sharded models with overlapc and with eager FSDP2, and compare them with one that is not sharded.

    torchrun --nproc-per-node 2 benchmarks/random_sharded.py --count 50
    torchrun --nproc-per-node 4 benchmarks/random_sharded.py --count 50 --report found.jsonl
    torchrun --nproc-per-node 2 benchmarks/random_sharded.py --count 50 --device cuda
    torchrun --nproc-per-node 2 benchmarks/random_sharded.py --count 50 --breaks     # with graph breaks in the models
    torchrun --nproc-per-node 2 benchmarks/random_sharded.py --count 50 --in-place   # with results of blocks changed
    torchrun --nproc-per-node 2 benchmarks/random_sharded.py --first 17 --count 1    # one seed again, with tracebacks

A seed draws a model (attention, feed-forward, convolutions, a mixture of experts, low-rank adapters, norms, dropout,
checkpoints, tied and shared weights, odd sizes), which modules FSDP2 shards and how (groups, dimensions,
`reshard_after_forward`, precision, replicas on 4 ranks, tensor parallelism beside it), options of overlapc, and two to
four steps (accumulation, clipping, other batch sizes, evaluation, parameters frozen midway). The same program runs
three times from the same weights: without sharding in float32, with eager FSDP2, and with overlapc.

Compared with the first run are losses, gradients before each optimizer step, and all parameters and buffers at the
end, on every rank. In float32 the difference must be rounding. With mixed precision overlapc's difference may be as
large as twice eager's, with a margin. A seed is `right`, `different`, `fails` (only with overlapc), `eager differs`
(and overlapc is right), `eager fails`, or `undecidable`: with mixed precision, eager differs as much from itself if
each weight is changed by at most the rounding of bfloat16, for instance because another expert is chosen.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_peaks import FeedForward
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import overlapc

VOCABULARY = 29
RANK_TIMEOUT_S = 60
CHANGED_RUNS = 24  # with eager and changed weights, of a program whose numbers differ

# --- models


class Attention(nn.Module):
    """Self-attention; fewer heads for keys and values than for queries, or as many."""

    def __init__(self, dim: int, heads: int, shared_by: int, causal: bool) -> None:
        super().__init__()
        self.causal, self.heads, self.kept = causal, heads, heads // shared_by
        size = dim // heads
        self.query = nn.Linear(dim, heads * size, bias=False)
        self.key_value = nn.Linear(dim, 2 * self.kept * size)
        self.out = nn.Linear(heads * size, dim)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part.unflatten(-1, (self.kept, -1)).transpose(1, 2) for part in self.key_value(x).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.kept < self.heads)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """A convolution of each channel along the sequence, then one across channels."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.along = nn.Conv1d(dim, dim, width, padding=width // 2, groups=dim)
        self.across = nn.Conv1d(dim, dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.across(F.silu(self.along(x.transpose(1, 2)))).transpose(1, 2)


class Experts(nn.Module):
    """Each token's best experts, weighted; every expert computes every token."""

    def __init__(self, dim: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) / dim)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) / dim)
        self.chosen = chosen
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).float().softmax(-1).topk(self.chosen, -1)
        gates = torch.zeros(*x.shape[:-1], len(self.up), device=x.device).scatter(-1, index, weights)
        with torch.no_grad():
            self.load.lerp_(gates.mean((0, 1)), 0.1)
        each = torch.einsum("bsd,edh->ebsh", x, self.up).relu()
        return torch.einsum("ebsh,ehd,bse->bsd", each, self.down, gates.to(x.dtype))


class Adapted(nn.Module):
    """A frozen matrix with a trained low-rank adapter."""

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.a, self.b = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)) * 0.5)


class ChannelNorm(nn.Module):
    """Batch norm over the channels of a sequence; it has buffers, which training changes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    """A module between a norm and dropout, scaled by channel, with a residual connection; may be checkpointed."""

    breaks = False  # whether it breaks the graph inside

    def __init__(self, norm: nn.Module, part: nn.Module, dim: int, dropout: float, scaled: bool, kept: bool) -> None:
        super().__init__()
        self.norm, self.part, self.kept, self.dropout = norm, part, kept, dropout
        self.scale = nn.Parameter(torch.full((dim,), 0.5)) if scaled else None

    def _inner(self, x: Tensor) -> Tensor:
        y = self.part(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
        y = F.dropout(y, self.dropout, self.training)
        return y if self.scale is None else y * self.scale

    def forward(self, x: Tensor, mix: Tensor | None = None) -> Tensor:
        y = self._inner(x) if self.kept else checkpoint(self._inner, x, use_reentrant=False)
        return x + y if mix is None else x + y * mix.to(y.dtype)


class Model(nn.Module):
    """Embedding, positions, blocks in an order that may repeat some, and a head; `unused` never gets a gradient."""

    breaks = False  # whether the graph breaks between blocks, because data decide which of them run
    in_place: tuple[str, ...] = ()  # how the results of blocks are changed, in turns

    def __init__(self, dim: int, blocks: list[Block], order: list[int], tied: bool, inner_loss: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.randn(64, dim) * 0.1)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.unused = nn.Parameter(torch.randn(3, dim))
        self.order, self.inner_loss = order, inner_loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, targets: Tensor, mix: Tensor | None = None) -> Any:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for at in self.order:
            if self.breaks and bool((x == torch.inf).any()):
                break
            x = self.blocks[at](x, mix=mix if at % 2 else None)
            if self.in_place:
                self._change(x, self.in_place[at % len(self.in_place)])
        logits = self.head(self.norm(x.to(self.positions.dtype)))  # a block's output may be float32
        return loss_of(logits, targets) if self.inner_loss else {"logits": logits, "last": x}

    def _change(self, x: Tensor, how: str) -> None:
        """Change `x` in place, as a whole or through a view."""
        if how == "activation":
            F.leaky_relu(x, 0.5, inplace=True)
        elif how == "add":
            x += self.positions[: x.shape[1]]
        elif how == "view":
            x.flatten(0, 1)[1:, ::2].mul_(0.9)
        elif how == "row":
            x[0, 0] = 0.25


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=0)


# --- what a seed draws


@dataclass(frozen=True)
class Micro:
    """One forward and backward."""

    rows: int
    length: int
    mixed: bool  # with the optional tensor argument
    reduces: bool


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    batches: tuple[Micro, ...]
    clips: bool
    evaluates: bool  # before it
    freezes: bool  # one parameter, before it


@dataclass(frozen=True)
class Program:
    """A model, its sharding and its training, drawn from a seed."""

    seed: int
    ranks: int
    dim: int
    settings: dict[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, seed: int, ranks: int, breaks: bool, in_place: bool) -> Program:
        dice = random.Random(f"program {seed}")
        tensor_parallel = ranks == 4 and dice.random() < 0.25
        settings = {
            "tensor parallel": tensor_parallel,
            "replicas": ranks == 4 and not tensor_parallel and dice.random() < 0.3,
            "precision": dice.choice((None, None, "bf16", "bf16, reduced in fp32", "bf16, outputs in fp32")),
            "units": dice.choice(("blocks", "blocks", "pairs", "parts", "some", "root")),
            "by": dice.choice(("adopt_fsdp2", "overlapc.fully_shard")),
            "second dimension": dice.random() < 0.2,
            "optimizer": dice.choice(("sgd", "adamw")),
            "compiled by method": dice.random() < 0.3,
        }
        dim = dice.choice((12, 16, 20, 36))
        rows, length = dice.randint(1, 3), dice.randint(3, 17)
        steps = []
        for _ in range(dice.randint(2, 4)):
            if dice.random() < 0.25:
                rows, length = dice.randint(1, 3), dice.randint(3, 17)
            accumulated = dice.choice((1, 1, 1, 2, 3))
            unreduced = dice.random() < 0.5
            mixed = dice.random() < 0.3
            micros = (Micro(rows, length, mixed, at == accumulated - 1 or not unreduced) for at in range(accumulated))
            steps.append(Step(tuple(micros), dice.random() < 0.3, dice.random() < 0.2, dice.random() < 0.1))
        options: dict[str, Any] = {"fallback_random": True, "warm_start": False}
        for name, values, share in (
            ("transport", ("copy", "nccl"), 0.5),
            ("memory", ("reuse", "pool"), 0.3),
            ("passes", ("none",), 0.1),
            ("reorder_collectives", (False,), 0.1),
            ("trace_once", (False,), 0.2),
            ("native", (False,), 0.1),
            ("wrapper", ("fx",), 0.1),
            ("keep_gathered", (True, False), 0.2),
            ("deterministic", (True,), 0.1),
        ):
            if dice.random() < share:
                options[name] = dice.choice(values)
        if in_place:
            changes = ("", "activation", "add", "view", "row")
            settings["in_place"] = tuple(random.Random(f"in place {seed}").choices(changes, k=3))
        if breaks:
            settings["breaks"] = random.Random(f"breaks {seed}").choice(("in each block", "in some", "between blocks"))
        if options.get("wrapper") == "fx":
            options.pop("memory", None)  # which only the other wrapper has
        return cls(seed, ranks, dim, settings, tuple(steps), options)

    def model(self) -> Model:
        """Return the model, equal on all ranks, before it is sharded."""
        dice, dim = random.Random(f"model {self.seed}"), self.dim
        torch.manual_seed(self.seed)
        norms: tuple[Callable[[], nn.Module], ...] = (
            partial(nn.LayerNorm, dim),
            partial(nn.RMSNorm, dim),
            partial(nn.LayerNorm, dim, elementwise_affine=False),
            partial(ChannelNorm, dim),
        )
        dropout = dice.choice((0.0, 0.0, 0.1))
        alike = dice.random() < 0.4  # equal blocks

        def drawn() -> Block:
            parts: tuple[Callable[[], nn.Module], ...] = (
                lambda: Attention(dim, 4, dice.choice((1, 2)), dice.random() < 0.7),
                lambda: FeedForward(
                    dim, dice.choice((7, 24, 33)) if not self.settings["tensor parallel"] else 24, True
                ),
                lambda: FeedForward(
                    dim, dice.choice((7, 24, 33)) if not self.settings["tensor parallel"] else 24, False
                ),
                lambda: Convolution(dim, 3),
                lambda: Experts(dim, dice.choice((3, 4)), dice.choice((1, 2))),
                lambda: Adapted(dim, dice.choice((1, 3))),
            )
            # batch norm on CPUs takes no parameters in lower precision than its buffers
            kind = dice.choice((0, 1, 0, 1, 2, 3))
            norm = norms[0 if kind == 3 and self.settings["precision"] else kind]()
            part, scaled, kept = dice.choice(parts)(), dice.random() < 0.3, dice.random() < 0.7
            # eager's recomputation in a checkpoint changes buffers once more; compiled graphs change them once
            return Block(
                norm, part, dim, dropout, scaled, kept or any(True for _ in (*norm.buffers(), *part.buffers()))
            )

        number = dice.randint(1, 5)
        first = drawn()
        blocks = [copy.deepcopy(first) if alike else drawn() for _ in range(number)]
        order = list(range(number))
        if dice.random() < 0.15:
            order.append(dice.randrange(number))
        model = Model(dim, blocks, order, dice.random() < 0.3, dice.random() < 0.5)
        breaks = self.settings.get("breaks")
        model.breaks = breaks == "between blocks"
        model.in_place = self.settings.get("in_place", ())
        for at, block in enumerate(blocks):
            block.breaks = breaks == "in each block" or (breaks == "in some" and at % 2 == 1)
        return model

    def sharded(self, model: Model, mesh: DeviceMesh, shard: Any, policy: MixedPrecisionPolicy) -> None:
        """Shard a model with FSDP2's or overlapc's `fully_shard`."""
        dice = random.Random(f"sharding {self.seed}")
        if self.settings["tensor parallel"]:
            plan = {"part.up": ColwiseParallel(), "part.gate": ColwiseParallel(), "part.down": RowwiseParallel()}
            for block in model.blocks:
                if isinstance(block.part, FeedForward):
                    known = {name: how for name, how in plan.items() if name in dict(block.named_modules())}
                    parallelize_module(block, mesh["tp"], known)
            mesh = mesh["dp"]
        ranks = mesh.size(mesh.ndim - 1)

        def placement(param: nn.Parameter) -> Shard | None:
            return Shard(1) if param.ndim == 2 and param.shape[1] % ranks == 0 else None

        how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if self.settings["second dimension"] and not self.settings["tensor parallel"]:
            how["shard_placement_fn"] = placement
        blocks: list[Any] = list(model.blocks)
        units: list[Any] = {
            "blocks": blocks,
            "pairs": [blocks[at : at + 2] for at in range(0, len(blocks), 2)],
            "parts": [module for block in blocks for module in (block.part, block)],
            "some": [block for block in blocks if dice.random() < 0.5],
            "root": [],
        }[self.settings["units"]]
        for unit in [*units, model]:
            reshard = dice.choice(({}, {"reshard_after_forward": True}, {"reshard_after_forward": False}))
            shard(unit, **how, **reshard)


def policy_of(precision: str | None) -> MixedPrecisionPolicy:
    if precision is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        torch.bfloat16,
        torch.float32 if "reduced" in precision else None,
        torch.float32 if "outputs" in precision else None,
    )


# --- training


@dataclass
class Trained:
    """Everything that is compared, by name; on this rank."""

    numbers: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor | None) -> None:
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        self.numbers[name] = torch.empty(0) if whole is None else whole.detach().to("cpu", torch.float64, copy=True)


def trained(program: Program, mesh: DeviceMesh, way: str, changed: int | None = None) -> Trained:
    """Run a program in one of three ways: "plain", without sharding, in float32; "eager" with FSDP2; "overlapc".

    A rank's data depend on its index among the ranks that have different data. changed: seed of changes to all weights
    by at most the rounding of bfloat16.
    """
    torch._dynamo.reset()
    model = program.model()
    if changed is not None:
        generator = torch.Generator().manual_seed(changed)
        with torch.no_grad():
            for param in model.parameters():
                param *= 1 + 2**-9 * (2 * torch.rand(param.shape, generator=generator) - 1)
    model = model.to(mesh.device_type)
    ours = way == "overlapc" and program.settings["by"] == "overlapc.fully_shard"
    if way != "plain":
        policy = policy_of(program.settings["precision"])
        program.sharded(model, mesh, overlapc.fully_shard if ours else fully_shard, policy)
    call: Any = model
    if way == "overlapc":
        if not ours:
            model = overlapc.adopt_fsdp2(model)
        if program.settings["compiled by method"]:
            model.compile(backend="overlapc", options=program.options)
            call = model
        else:
            call = torch.compile(model, backend="overlapc", options=program.options)
    trains = [param for param in model.parameters() if param.requires_grad]
    if program.settings["optimizer"] == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(trains, lr=0.05, momentum=0.9)
    else:  # a large epsilon: else rounding of small gradients decides the signs of updates
        optimizer = torch.optim.AdamW(trains, lr=1e-2, eps=1e-2)
    place = mesh.get_local_rank("dp") if program.settings["tensor parallel"] else dist.get_rank()
    found = Trained()
    for number, step in enumerate(program.steps):
        if step.freezes:
            model.positions.requires_grad_(False)
        if step.evaluates:
            model.eval()
            with torch.no_grad():
                found.add(
                    f"step {number}: loss of evaluation",
                    _loss(call, step.batches[0], number + 100, place, mesh.device_type),
                )
            model.train()
        for at, micro in enumerate(step.batches):
            with _reducing(model, micro.reduces, ours):
                loss = _loss(call, micro, 10 * number + at, place, mesh.device_type)
                (loss / len(step.batches)).backward()
            found.add(f"step {number}.{at}: loss", loss)
        if way == "plain":
            for param in model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad, dist.ReduceOp.SUM)
                    param.grad /= dist.get_world_size()
        if step.clips and not program.settings["tensor parallel"]:  # torch clips parameters of one mesh only
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            found.add(f"step {number}: norm of gradients", norm)
        for name, param in model.named_parameters():
            found.add(f"step {number}: gradient of {name}", param.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.add(f"at the end: {name}", tensor)
    return found


def _loss(call: Any, micro: Micro, number: int, place: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + place)
    tokens = torch.randint(VOCABULARY, (micro.rows, micro.length), generator=generator).to(device)
    targets = torch.randint(VOCABULARY, (micro.rows, micro.length), generator=generator).to(device)
    targets[0, 0] = 1  # at least one counts
    mix = torch.rand(micro.rows, micro.length, 1, generator=generator).to(device) if micro.mixed else None
    torch.manual_seed(number)  # for dropout
    result = call(tokens, targets=targets, mix=mix)
    if isinstance(result, Tensor):
        return result
    return loss_of(result["logits"], targets) + 0.01 * result["last"].float().square().mean()


def _reducing(model: Any, reduces: bool, ours: bool) -> AbstractContextManager[Any]:
    if not ours:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(reduces, recurse=False)
        return nullcontext()
    return nullcontext() if reduces else overlapc.no_sync(model)


# --- judging


def differences(found: Trained, exact: Trained, allowed_rounding: Callable[[str], float]) -> Iterator[str]:
    """Yield what is off by more than rounding.

    allowed_rounding: the norm of the difference that rounding may make in a number, by name.
    """
    for name, right in exact.numbers.items():
        mine = found.numbers[name]
        if mine.shape != right.shape:
            yield f"{name}: shape {tuple(mine.shape)} instead of {tuple(right.shape)}"
        elif not (error := (mine - right).norm().item()) <= (allowed := allowed_rounding(name)):
            yield f"{name}: off by {error:.3g} where {allowed:.3g} is allowed, of {right.norm().item():.3g}"


def judged(program: Program, mesh: DeviceMesh) -> tuple[str, str]:
    """Return the verdict on a program on the first rank where it is not right, and details; all ranks must call it."""
    exact, runs = trained(program, mesh, "plain"), list[Trained]()
    largest = dict.fromkeys(KINDS, 0.0)
    for name, number in exact.numbers.items():
        largest[kind_of(name)] = max(largest[kind_of(name)], number.norm().item())

    def rounding(name: str, *others: Trained) -> float:
        right = exact.numbers[name]
        size = right.norm().item() + 0.1 * largest[kind_of(name)]
        if program.settings["precision"] is None:
            return 1e-5 * size
        theirs = (each.numbers[name] for each in (runs[0], *others))
        off = [(each - right).norm().item() for each in theirs if each.shape == right.shape]
        return 4e-3 * size + 2 * max(off, default=0.0)

    def verdict() -> tuple[str, str]:
        for way in ("eager", "overlapc"):
            try:
                runs.append(trained(program, mesh, way))
            except Exception as error:  # noqa: BLE001 - whatever a program raises is its verdict
                kind = "eager fails" if way == "eager" else "fails"
                return kind, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        if found := list(differences(runs[1], exact, rounding)):
            return "different", "\n".join(found)
        if program.settings["precision"] is None and (found := list(differences(runs[0], exact, rounding))):
            return "eager differs", "\n".join(found)
        return "right", ""

    worst = _worst(verdict())
    if worst[0] == "different" and program.settings["precision"] is not None:
        others = [trained(program, mesh, "eager", changed) for changed in range(CHANGED_RUNS)]
        found = list(differences(runs[1], exact, lambda name: rounding(name, *others)))
        if not any(_on_ranks(bool(found))):
            return "undecidable", worst[1]
    return worst


def _on_ranks(value: Any) -> list[Any]:
    """Return `value` of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _worst(verdict: tuple[str, str]) -> tuple[str, str]:
    """Return the verdict of the first rank where it failed; else of the first where it is not right; else `verdict`."""
    verdicts = _on_ranks(verdict)
    failed = [each for each in verdicts if each[0] in ("fails", "eager fails")]
    return next((each for each in (*failed, *verdicts) if each[0] != "right"), verdict)


KINDS = ("loss", "norm of gradients", "gradient of", "at the end")


def kind_of(name: str) -> str:
    return next(kind for kind in KINDS if kind in name)


def main() -> int:
    """Run one rank; rank 0 prints. Return 1 if overlapc was different or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="number of seeds (default: 50)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--in-place", action="store_true", help="let each model change results of its blocks in place")
    parser.add_argument("--breaks", action="store_true", help="let each model break the graph somewhere")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--report", type=Path, help="append a line of JSON for each seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cudnn.allow_tf32 = False  # convolutions of float32 would round to 10 bits
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=RANK_TIMEOUT_S))
    ranks, counts = dist.get_world_size(), dict[str, int]()
    for seed in range(args.first, args.first + args.count):
        program = Program.of(seed, ranks, args.breaks, args.in_place)
        shape, names = (ranks,), ("dp",)
        if program.settings["replicas"] or program.settings["tensor parallel"]:
            shape, names = (2, 2), ("replicate", "dp") if program.settings["replicas"] else ("dp", "tp")
        worst = judged(program, init_device_mesh(args.device, shape, mesh_dim_names=names))
        counts[worst[0]] = counts.get(worst[0], 0) + 1
        if dist.get_rank() == 0:
            if worst[0] not in ("right", "eager differs"):
                print(f"seed {seed}: {worst[0]}; {program.settings} {program.options}\n{worst[1]}", flush=True)
            if args.report:
                line = {"seed": seed, "ranks": ranks, "kind": worst[0], "message": worst[1][:2000]}
                with args.report.open("a") as file:
                    file.write(json.dumps({**line, **program.settings, "options": program.options}) + "\n")
    if dist.get_rank() == 0:
        print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if counts.keys() & {"different", "fails"} else 0


if __name__ == "__main__":
    sys.exit(main())
