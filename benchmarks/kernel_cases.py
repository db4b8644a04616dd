"""The list that benchmarks/kernels.py measures: fused kernels that occur in training.

A problem is a function of inputs; with `gradients` it is differentiated, and its forward, its backward and both
together can be one case each. Sizes are a `Scale`: `gpu` moves far more bytes than an H200's L2 cache holds, `small`
suits two CPU cores, with `tiny` only host time matters. RARE has kernels that training seldom needs; they are neither
in the list nor in any mean over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"


@dataclass(frozen=True)
class Scale:
    """Sizes in elements."""

    tokens: int
    width: int
    ffn: int
    heads: int
    head: int  # elements of an attention head
    sequence: int  # of a score matrix
    vocabulary: int
    large_vocabulary: int
    large_rows: int  # tokens beside the large vocabulary
    layers: int  # layers of an optimizer's parameter list, nine tensors each
    shard: int  # edge of the square parameters that FSDP gathers
    experts: int


SCALES = {
    "gpu": Scale(8192, 4096, 14336, 32, 128, 2048, 32000, 128256, 2048, 4, 4096, 64),
    "small": Scale(512, 512, 1536, 8, 64, 128, 4000, 16000, 64, 1, 256, 16),
    "tiny": Scale(16, 64, 128, 2, 16, 16, 128, 256, 4, 1, 16, 8),
}


@dataclass(frozen=True)
class Problem:
    """One function and its inputs; `least` is the number of bytes that memory must move at least."""

    function: Callable[..., Any]
    inputs: tuple[Any, ...]  # tensors, and lists of them
    gradients: tuple[int, ...] = ()  # inputs to differentiate by
    kinds: tuple[str, ...] = (FORWARD,)
    least: dict[str, int] = field(default_factory=dict)  # bytes by kind, where it is not inputs + outputs
    mutates: bool = False  # whether the results are the mutated inputs
    random: Callable[[Problem, Tensor], str | None] | None = None  # judges a random result, which has no reference
    matmul_bound: bool = False

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self.inputs) if isinstance(leaf, Tensor)]


PROBLEMS: dict[str, Callable[[Inputs], Problem]] = {}
RARE: dict[str, Callable[[Inputs], Problem]] = {}


@dataclass(frozen=True)
class Inputs:
    """Makes random inputs of a scale on a device."""

    scale: Scale
    device: str

    def normal(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device=self.device).to(dtype)

    def positions(self, below: int, *size: int) -> Tensor:
        return torch.randint(below, size, device=self.device)


Make = Callable[[Inputs], Problem]  # makes the problem of one name


def named_in(problems: dict[str, Make]) -> Callable[[str], Callable[[Make], Make]]:
    """Return a decorator with a name, which adds the function below it to `problems`."""

    def named(name: str) -> Callable[[Make], Make]:
        def added(make: Make) -> Make:
            problems[name] = make
            return make

        return added

    return named


problem = named_in(PROBLEMS)
rare = named_in(RARE)


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


TRAINED = (FORWARD, BACKWARD)


# --- norms


@problem("RMSNorm")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)

    return Problem(run, (make.normal(s.tokens, s.width), make.normal(s.width)), (0, 1), (*TRAINED, BOTH))


@problem("RMSNorm by hand")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight

    return Problem(run, (make.normal(s.tokens, s.width), make.normal(s.width)), (0, 1), TRAINED)


@problem("residual + RMSNorm")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total, F.rms_norm(total, (x.shape[-1],), weight, 1e-5)

    inputs = (make.normal(s.tokens, s.width), make.normal(s.tokens, s.width), make.normal(s.width))
    one = inputs[0].nbytes
    # Backward: the sum, two gradients in, one gradient out for both addends.
    return Problem(run, inputs, (0, 1, 2), TRAINED, {BACKWARD: 4 * one})


@problem("LayerNorm")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias)

    inputs = (make.normal(s.tokens, s.width), make.normal(s.width), make.normal(s.width))
    return Problem(run, inputs, (0, 1, 2), (*TRAINED, BOTH))


@problem("group norm NCHW")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.group_norm(x, 32, weight, bias)

    side = 64 if s.tokens >= 8192 else 8
    channels = 256 if s.tokens >= 8192 else 64
    batch = 64 if s.tokens >= 8192 else 4
    return Problem(run, (make.normal(batch, channels, side, side), make.normal(channels), make.normal(channels)))


# --- attention's neighbours


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _query_key(make: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s = make.scale
    query = make.normal(1, s.tokens, s.heads, s.head)
    key = make.normal(1, s.tokens, max(1, s.heads // 4), s.head)
    angle = torch.rand(s.tokens, 1, s.head, device=make.device) * 6
    return query, key, angle.cos().bfloat16(), angle.sin().bfloat16()


@problem("RoPE")
def _(make: Inputs) -> Problem:
    def run(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    inputs = _query_key(make)
    least = 2 * (inputs[0].nbytes + inputs[1].nbytes) + nbytes(inputs[2:])
    return Problem(run, inputs, (0, 1), TRAINED, {BACKWARD: least})


@problem("q/k norm + RoPE")
def _(make: Inputs) -> Problem:
    def run(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor, key_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        query = F.rms_norm(query, (query.shape[-1],), query_weight, 1e-6)
        key = F.rms_norm(key, (key.shape[-1],), key_weight, 1e-6)
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    head = make.scale.head
    inputs = (*_query_key(make), make.normal(head), make.normal(head))
    return Problem(run, inputs, (0, 1, 4, 5), TRAINED)


def _scores(make: Inputs) -> Tensor:
    return make.normal(make.scale.heads, make.scale.sequence, make.scale.sequence)


@problem("softmax")
def _(make: Inputs) -> Problem:
    def run(scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    return Problem(run, (_scores(make),), (0,), TRAINED)


@problem("softmax, causal")
def _(make: Inputs) -> Problem:
    length = make.scale.sequence
    allowed = torch.ones(length, length, dtype=torch.bool, device=make.device).tril()

    def run(scores: Tensor, allowed: Tensor) -> Tensor:
        return (scores.float() * 0.125).masked_fill(~allowed, float("-inf")).softmax(-1).to(scores.dtype)

    return Problem(run, (_scores(make), allowed), (0,), TRAINED)


@problem("softmax, additive mask")
def _(make: Inputs) -> Problem:
    length = make.scale.sequence

    def run(scores: Tensor, mask: Tensor) -> Tensor:
        return (scores * 0.125 + mask).softmax(-1, dtype=torch.float32).to(scores.dtype)

    return Problem(run, (_scores(make), make.normal(length, length)))


# --- activations


@problem("SwiGLU")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    return Problem(run, (make.normal(s.tokens, s.ffn), make.normal(s.tokens, s.ffn)), (0, 1), TRAINED)


@problem("GELU + bias")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias)

    return Problem(run, (make.normal(s.tokens, s.ffn), make.normal(s.ffn)), (0, 1), TRAINED)


@problem("GELU (tanh) + bias")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh")

    return Problem(run, (make.normal(s.tokens, s.ffn), make.normal(s.ffn)), (0, 1), TRAINED)


# --- losses


def _logits(make: Inputs, large: bool) -> tuple[Tensor, Tensor]:
    s = make.scale
    rows, vocabulary = (s.large_rows, s.large_vocabulary) if large else (s.tokens, s.vocabulary)
    return make.normal(rows, vocabulary), make.positions(vocabulary, rows)


def _cross_entropy(make: Inputs, large: bool) -> Problem:
    def run(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)

    inputs = _logits(make, large)
    one = inputs[0].nbytes
    # Both: forward and backward read the logits, backward writes their gradient.
    return Problem(run, inputs, (0,), (FORWARD, BACKWARD, BOTH), {BACKWARD: 2 * one, BOTH: 3 * one})


@problem("cross-entropy 32k")
def _(make: Inputs) -> Problem:
    return _cross_entropy(make, large=False)


@problem("cross-entropy 128k")
def _(make: Inputs) -> Problem:
    return _cross_entropy(make, large=True)


@problem("log-softmax 128k")
def _(make: Inputs) -> Problem:
    def run(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)

    return Problem(run, _logits(make, large=True)[:1], (0,), TRAINED)


@problem("argmax 128k")
def _(make: Inputs) -> Problem:
    def run(logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    return Problem(run, _logits(make, large=True)[:1])


@problem("z-loss (log-sum-exp squared)")
def _(make: Inputs) -> Problem:
    def run(logits: Tensor) -> Tensor:
        return logits.float().logsumexp(-1).pow(2).mean()

    return Problem(run, _logits(make, large=False)[:1])


# --- element-wise


@problem("residual add + cast")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x.float() + residual
        return total, total.to(x.dtype)

    return Problem(run, (make.normal(s.tokens, s.width), make.normal(s.tokens, s.width, dtype=torch.float32)))


def _judge_dropout(drop: float, kept: Tensor, expected: Tensor) -> str | None:
    """Check that about a share `drop` of the elements is 0 and that the others are the scaled input."""
    zero = kept == 0
    share = zero.float().mean().item()
    if abs(share - drop) > 5 * math.sqrt(drop * (1 - drop) / kept.numel()) + 1e-3:
        return f"{share:.3f} of the elements dropped, not {drop}"
    scaled = torch.where(zero, 0, expected.double() / (1 - drop))
    worst = (kept.double() - scaled).abs().max().item()
    return f"kept values off by {worst}" if worst > 0.05 else None


@problem("dropout")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> Tensor:
        return F.dropout(x, 0.1)

    x = make.normal(s.tokens, s.width)
    return Problem(run, (x,), (0,), TRAINED, random=lambda case, result: _judge_dropout(0.1, result, case.inputs[0]))


@problem("dropout + residual")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, residual: Tensor) -> Tensor:
        return F.dropout(x, 0.1) + residual

    inputs = (make.normal(s.tokens, s.width), torch.zeros_like(make.normal(s.tokens, s.width)))
    return Problem(run, inputs, random=lambda case, result: _judge_dropout(0.1, result, case.inputs[0]))


# --- the optimizer's lists


def _parameters(make: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """Return nine tensors per layer: four projections, three of a feed-forward block, two norms."""
    width, ffn = make.scale.width // 2, make.scale.ffn // 4
    shapes = [(width, width)] * 2 + [(width // 4, width)] * 2 + [(ffn, width)] * 2 + [(width, ffn), (width,), (width,)]
    return [make.normal(*shape, dtype=dtype) for _ in range(make.scale.layers) for shape in shapes]


@problem("AdamW, list of tensors")
def _(make: Inputs) -> Problem:
    def run(parameters: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor]) -> None:
        torch._foreach_mul_(parameters, 1 - 1e-3 * 0.1)
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_mul_(squares, 0.95)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.05)
        scale = torch._foreach_sqrt(squares)
        torch._foreach_div_(scale, 0.9)
        torch._foreach_add_(scale, 1e-8)
        torch._foreach_addcdiv_(parameters, means, scale, -1e-3)

    lists = [_parameters(make, torch.float32) for _ in range(4)]
    lists[3] = [each.abs() for each in lists[3]]
    one = nbytes(lists[0])
    return Problem(run, tuple(lists), mutates=True, least={FORWARD: 7 * one})


@problem("gradient clipping")
def _(make: Inputs) -> Problem:
    def run(gradients: list[Tensor]) -> Tensor:
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, torch.clamp(1.0 / (total + 1e-6), max=1.0))
        return total

    gradients = _parameters(make, torch.float32)
    return Problem(run, (gradients,), mutates=True, least={FORWARD: 3 * nbytes(gradients)})


@problem("cast of many gradients")
def _(make: Inputs) -> Problem:
    def run(gradients: list[Tensor]) -> list[Tensor]:
        return [gradient.float() for gradient in gradients]

    return Problem(run, (_parameters(make, torch.bfloat16),))


# --- embedding


@problem("embedding")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(table: Tensor, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, table)

    inputs = (make.normal(s.vocabulary, s.width), make.positions(s.vocabulary, s.tokens))
    gathered = s.tokens * s.width * 2
    least = {FORWARD: 2 * gathered + inputs[1].nbytes, BACKWARD: gathered + inputs[0].nbytes + inputs[1].nbytes}
    return Problem(run, inputs, (0,), TRAINED, least)


# --- layout copies


@problem("transposed copy")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> Tensor:
        return x.t().contiguous()

    return Problem(run, (make.normal(s.tokens, s.ffn),))


@problem("transposed copy + cast")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> Tensor:
        return x.t().float().contiguous()

    return Problem(run, (make.normal(s.tokens, s.width),))


@problem("heads before tokens")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> Tensor:
        return x.view(2, -1, s.heads, s.head).transpose(1, 2).contiguous()

    return Problem(run, (make.normal(2 * s.tokens, s.heads * s.head),))


@problem("cat of three projections")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat((query, key, value), -1)

    small = s.width // 4
    return Problem(run, tuple(make.normal(s.tokens, size) for size in (s.width, small, small)))


@problem("split of a joint projection")
def _(make: Inputs) -> Problem:
    s = make.scale
    sizes = [s.width, s.width // 4, s.width // 4]

    def run(joint: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in joint.split(sizes, -1))

    return Problem(run, (make.normal(s.tokens, sum(sizes)),))


# --- FSDP's copies


WORLD = 4


def _shards(make: Inputs) -> list[tuple[int, int]]:
    """Return (rows of a shard, columns) of a layer's parameters, sharded over WORLD ranks."""
    n = make.scale.shard
    return [(n // WORLD, n), (n // 4 // WORLD, n), (n // 4 // WORLD, n), (n // WORLD, n), (n * 3 // WORLD, n)]


@problem("FSDP copy-in")
def _(make: Inputs) -> Problem:
    def run(shards: list[Tensor]) -> Tensor:
        return torch.cat([shard.to(torch.bfloat16).reshape(-1) for shard in shards])

    return Problem(run, ([make.normal(*shape, dtype=torch.float32) for shape in [*_shards(make), *_shards(make)]],))


@problem("FSDP copy-out")
def _(make: Inputs) -> Problem:
    shapes = _shards(make)
    sizes = [rows * columns for rows, columns in shapes]

    def run(gathered: Tensor) -> list[Tensor]:
        parts = gathered.view(WORLD, -1).split(sizes, 1)
        return [
            part.reshape(WORLD * rows, columns).clone() for part, (rows, columns) in zip(parts, shapes, strict=True)
        ]

    return Problem(run, (make.normal(WORLD * sum(sizes)),))


@problem("FSDP chunk-cat + reduce dtype")
def _(make: Inputs) -> Problem:
    def run(gradients: list[Tensor]) -> Tensor:
        return torch.cat([gradient.view(WORLD, -1).float() for gradient in gradients], 1)

    return Problem(run, ([make.normal(WORLD * rows, columns) for rows, columns in _shards(make)],))


# --- reductions along columns, whole tensors, low precision


@problem("column sum")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> Tensor:
        return x.sum(0, dtype=torch.float32)

    return Problem(run, (make.normal(s.tokens, s.ffn),))


@problem("row amax + column sum")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.abs().amax(1), x.sum(0, dtype=torch.float32)

    return Problem(run, (make.normal(s.tokens, s.ffn),))


def _as_float8(x: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    scale = 448.0 / top.clamp(min=1e-12)
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@problem("fp8 amax + scale, per tensor")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return _as_float8(x, x.abs().amax().float())

    x = make.normal(s.tokens, s.ffn)
    return Problem(run, (x,), least={FORWARD: 2 * x.nbytes + x.numel()})  # x is read twice: no cache is assumed


@problem("fp8 amax + scale, per row")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return _as_float8(x, x.abs().amax(-1, keepdim=True).float())

    return Problem(run, (make.normal(s.tokens, s.ffn),))


@problem("mean squared error")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x.float(), y.float())

    return Problem(run, (make.normal(s.tokens, s.ffn), make.normal(s.tokens, s.ffn)))


# --- mixture of experts


@problem("router: softmax + top-k")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(8 if s.experts > 8 else 2, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    return Problem(run, (make.normal(16 * s.tokens, s.experts, dtype=torch.float32),))


@problem("router: softmax + top-k + scatter")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(logits: Tensor) -> Tensor:
        weights, chosen = logits.softmax(-1).topk(8 if s.experts > 8 else 2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(logits).scatter(1, chosen, weights)

    return Problem(run, (make.normal(16 * s.tokens, s.experts, dtype=torch.float32),))


# --- beside matmuls


@problem("linear + bias + GELU")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    inputs = (make.normal(s.tokens, s.width), make.normal(s.ffn, s.width) * 0.02, make.normal(s.ffn))
    return Problem(run, inputs, matmul_bound=True)


@problem("linear + residual + RMSNorm")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, weight: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + F.linear(x, weight)
        return total, F.rms_norm(total, (total.shape[-1],), scale, 1e-5)

    inputs = (
        make.normal(s.tokens, s.width),
        make.normal(s.width, s.width) * 0.02,
        make.normal(s.tokens, s.width),
        make.normal(s.width),
    )
    return Problem(run, inputs, matmul_bound=True)


# --- rare: scans


@rare("scan of one row")
def _(make: Inputs) -> Problem:
    def run(x: Tensor) -> Tensor:
        return x.cumsum(-1)

    return Problem(run, (make.normal(1, 2048 * make.scale.tokens, dtype=torch.float32),))


@rare("scan of eight rows")
def _(make: Inputs) -> Problem:
    def run(logits: Tensor) -> Tensor:
        return logits.softmax(-1).cumsum(-1)

    return Problem(run, (make.normal(8, make.scale.large_vocabulary, dtype=torch.float32),))


@rare("scan of columns")
def _(make: Inputs) -> Problem:
    def run(x: Tensor) -> Tensor:
        return x.cumsum(0)

    return Problem(run, (make.normal(64 * make.scale.tokens, 16, dtype=torch.float32),))


@rare("largest so far and its place")
def _(make: Inputs) -> Problem:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cummax(x, -1)

    return Problem(run, (make.normal(8, 128 * make.scale.tokens, dtype=torch.float32),))


# --- rare: statistics of long rows


@rare("batch norm NCHW")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, training=True)

    side, channels = (64, 256) if s.tokens >= 8192 else (8, 16)
    return Problem(run, (make.normal(64, channels, side, side), make.normal(channels), make.normal(channels)))


# --- rare: dims in other orders


@rare("dims reversed")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> Tensor:
        return x.permute(2, 1, 0).contiguous()

    return Problem(run, (make.normal(2 * s.head, 2 * s.head, s.width // 8),))


@rare("sum of three layouts")
def _(make: Inputs) -> Problem:
    s = make.scale
    first, second, third = 2 * s.head, s.width // 16, s.width // 8

    def run(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a + b.transpose(1, 2) + c.permute(2, 1, 0)

    sizes = (first, second, third), (first, third, second), (third, second, first)
    return Problem(run, tuple(make.normal(*size) for size in sizes))


# --- rare: rows and images of few elements


@rare("scores within windows of 49")
def _(make: Inputs) -> Problem:
    return Problem(_softmax_in_float32, (make.normal(make.scale.tokens * make.scale.width // 49, 49),))


@rare("scores of 197 patches")
def _(make: Inputs) -> Problem:
    return Problem(_softmax_in_float32, (make.normal(make.scale.tokens * make.scale.width // 197, 197),))


def _softmax_in_float32(scores: Tensor) -> Tensor:
    return scores.float().softmax(-1).to(scores.dtype)


@rare("softmax over 150 channels")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(logits: Tensor) -> Tensor:
        return logits.float().softmax(1).to(logits.dtype)

    return Problem(run, (make.normal(max(1, s.tokens // 256), 150, s.width // 4),))


@rare("eight channels of pixels, made contiguous")
def _(make: Inputs) -> Problem:
    return Problem(_doubled_by_channel, (make.normal(max(1, make.scale.tokens // 8), make.scale.width, 8),))


@rare("channels of images of 49 pixels, made contiguous")
def _(make: Inputs) -> Problem:
    return Problem(_doubled_by_channel, (make.normal(max(1, make.scale.tokens // 64), 49, make.scale.width),))


def _doubled_by_channel(pixels: Tensor) -> Tensor:
    return (pixels * 2).transpose(1, 2).contiguous()


# --- rare: the largest of many


@rare("top-k of a vocabulary")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.topk(50, -1)

    logits = make.normal(max(4, s.large_rows // 32), s.large_vocabulary, dtype=torch.float32)
    return Problem(run, (logits,), least={FORWARD: logits.nbytes})


@rare("top-k of one row")
def _(make: Inputs) -> Problem:
    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.topk(50, -1)

    logits = make.normal(1, make.scale.large_vocabulary, dtype=torch.float32)
    return Problem(run, (logits,), least={FORWARD: logits.nbytes})


@rare("top-k of many rows")
def _(make: Inputs) -> Problem:
    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.topk(8, -1)

    logits = make.normal(make.scale.large_rows, make.scale.vocabulary, dtype=torch.float32)
    return Problem(run, (logits,), least={FORWARD: logits.nbytes})
