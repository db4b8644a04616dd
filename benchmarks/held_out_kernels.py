"""Kernels from models on which the code generator was not tuned: `benchmarks/kernels.py --list-of held-out`.

Packed, interleaved and transposed forms, other dtypes, with and without bias, odd sizes. `Problem` is that of
kernel_cases.py. A problem stays in this list after a defect that it revealed is fixed, since it chose no block size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases import TRAINED, Inputs, Make, Problem, named_in

HELD_OUT: dict[str, Make] = {}
held_out = named_in(HELD_OUT)


# --- gated activations of one product


@held_out("packed SwiGLU, halves")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(product: Tensor) -> Tensor:
        gate, up = product.chunk(2, -1)
        return F.silu(gate) * up

    return Problem(run, (make.normal(s.tokens, 2 * s.ffn),), (0,), TRAINED)


@held_out("packed SwiGLU, with its product")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    inputs = (make.normal(s.tokens, s.width // 4), make.normal(s.ffn, s.width // 4) * 0.02)
    return Problem(run, inputs, (0, 1), TRAINED, matmul_bound=True)


@held_out("packed GeGLU, interleaved")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(product: Tensor) -> Tensor:
        return F.gelu(product[..., ::2], approximate="tanh") * product[..., 1::2]

    return Problem(run, (make.normal(s.tokens, 2 * s.ffn),), (0,), TRAINED)


@held_out("packed SwiGLU, clamped, interleaved, biased")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(product: Tensor, bias: Tensor) -> Tensor:
        product = product + bias
        gate = product[..., ::2].clamp(max=7.0)
        up = product[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)

    return Problem(run, (make.normal(s.tokens, 2 * s.ffn), make.normal(2 * s.ffn)), (0, 1), TRAINED)


@held_out("packed SwiGLU, odd width, biased, float16")
def _(make: Inputs) -> Problem:
    s = make.scale
    width = s.ffn * 3 // 4 - 5

    def run(product: Tensor, bias: Tensor) -> Tensor:
        gate, up = (product + bias).chunk(2, -1)
        return F.silu(gate) * up

    inputs = (make.normal(s.tokens, 2 * width, dtype=torch.float16), make.normal(2 * width, dtype=torch.float16))
    return Problem(run, inputs, (0, 1), TRAINED)


# --- rotary embeddings


def _half_turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _angles(make: Inputs, width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    angle = torch.rand(1, make.scale.tokens, width, device=make.device) * 6
    return angle.cos().to(dtype), angle.sin().to(dtype)


@held_out("RoPE of heads before tokens")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query = query.view(1, -1, s.heads, s.head).transpose(1, 2)
        key = key.view(1, -1, max(1, s.heads // 4), s.head).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return query * cos + _half_turned(query) * sin, key * cos + _half_turned(key) * sin

    query = make.normal(1, s.tokens, s.heads * s.head)
    key = make.normal(1, s.tokens, max(1, s.heads // 4) * s.head)
    return Problem(run, (query, key, *_angles(make, s.head)), (0, 1), TRAINED)


@held_out("RoPE of complex pairs, float32 inside")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = query.float().view(*query.shape[:-1], -1, 2)
        even, odd = pairs.unbind(-1)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
        return turned.flatten(-2).to(query.dtype)

    query = make.normal(1, s.tokens, s.heads, s.head)
    return Problem(run, (query, *_angles(make, s.head // 2, torch.float32)), (0,), TRAINED)


@held_out("RoPE of a quarter of each head")
def _(make: Inputs) -> Problem:
    s = make.scale
    turned = s.head // 4

    def run(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, rest = query[..., :turned], query[..., turned:]
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        return torch.cat((first * cos + _half_turned(first) * sin, rest), -1)

    query = make.normal(1, s.tokens, s.heads, s.head)
    return Problem(run, (query, *_angles(make, turned)), (0,), TRAINED)


@held_out("q/k norm + RoPE of a joint projection")
def _(make: Inputs) -> Problem:
    s = make.scale
    heads = (s.heads, max(1, s.heads // 4))
    sizes = [heads[0] * s.head, heads[1] * s.head, heads[1] * s.head]

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def run(
        joint: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = joint.split(sizes, -1)
        query = normed(query.view(1, -1, heads[0], s.head), query_weight).transpose(1, 2)
        key = normed(key.view(1, -1, heads[1], s.head), key_weight).transpose(1, 2)
        value = value.view(1, -1, heads[1], s.head).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return query * cos + _half_turned(query) * sin, key * cos + _half_turned(key) * sin, value.contiguous()

    inputs = (make.normal(1, s.tokens, sum(sizes)), make.normal(s.head), make.normal(s.head), *_angles(make, s.head))
    return Problem(run, inputs, (0, 1, 2), TRAINED)


@held_out("rotary table of positions")
def _(make: Inputs) -> Problem:
    s = make.scale
    inverse = 1e4 ** -(torch.arange(0, s.head, 2, device=make.device).float() / s.head)

    def run(positions: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[..., None].float() * inverse
        angle = torch.cat((angle, angle), -1)
        return angle.cos().bfloat16(), angle.sin().bfloat16()

    return Problem(run, (make.positions(8192, 8, s.tokens), inverse))


# --- norms


@held_out("RMSNorm as Hugging Face writes it, odd width")
def _(make: Inputs) -> Problem:
    s = make.scale
    width = s.width * 45 // 64

    def run(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    return Problem(run, (make.normal(s.tokens, width), make.normal(width, dtype=torch.float32)), (0, 1), TRAINED)


@held_out("RMSNorm of Gemma, before and after a residual")
def _(make: Inputs) -> Problem:
    s = make.scale

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + weight.float())).type_as(x)

    def run(x: Tensor, residual: Tensor, after: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + norm(x, after)
        return total, norm(total, before)

    inputs = (*(make.normal(s.tokens, s.width) for _ in range(2)), *(make.normal(s.width) for _ in range(2)))
    return Problem(run, inputs, (0, 1, 2, 3), TRAINED)


@held_out("LayerNorm without bias, float16, odd width")
def _(make: Inputs) -> Problem:
    s = make.scale
    width = s.width * 5 // 16 + 3

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight)

    inputs = (make.normal(2 * s.tokens, width, dtype=torch.float16), make.normal(width, dtype=torch.float16))
    return Problem(run, inputs, (0, 1), TRAINED)


@held_out("adaptive LayerNorm of a diffusion transformer")
def _(make: Inputs) -> Problem:
    s = make.scale
    batch, width = 8, s.width * 9 // 32

    def run(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],)) * (1 + scale[:, None]) + shift[:, None]

    inputs = (make.normal(batch, s.tokens // 4, width), make.normal(batch, width), make.normal(batch, width))
    return Problem(run, inputs, (0, 1, 2), TRAINED)


@held_out("gated residual of a diffusion transformer")
def _(make: Inputs) -> Problem:
    s = make.scale
    batch, width = 8, s.width * 9 // 32

    def run(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        return residual + gate[:, None] * x

    rows = make.normal(batch, s.tokens // 4, width), make.normal(batch, s.tokens // 4, width)
    return Problem(run, (rows[0], make.normal(batch, width), rows[1]), (0, 1, 2), TRAINED)


@held_out("group norm + SiLU, channels last")
def _(make: Inputs) -> Problem:
    side, channels, batch = (64, 320, 16) if make.scale.tokens >= 8192 else (8, 64, 2)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, 32, weight, bias))

    x = make.normal(batch, side, side, channels).permute(0, 3, 1, 2)
    return Problem(run, (x, make.normal(channels), make.normal(channels)), (0, 1, 2), TRAINED)


@held_out("BERT's sum of embeddings + LayerNorm")
def _(make: Inputs) -> Problem:
    s = make.scale
    batch, length, width = 32, s.tokens // 16, s.width // 4

    def run(
        words: Tensor, kinds: Tensor, table: Tensor, places: Tensor, types: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        x = F.embedding(words, table) + F.embedding(kinds, types)
        x = x + F.embedding(torch.arange(words.shape[1], device=words.device), places)
        return F.layer_norm(x, (x.shape[-1],), weight, bias)

    tables = (make.normal(s.vocabulary, width), make.normal(length, width), make.normal(2, width))
    tokens = (make.positions(s.vocabulary, batch, length), make.positions(2, batch, length))
    return Problem(run, (*tokens, *tables, make.normal(width), make.normal(width)))


@held_out("L2 normalization")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)

    return Problem(run, (make.normal(s.tokens, s.heads, s.head),), (0,), TRAINED)


# --- element-wise


@held_out("quick GELU + bias")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, bias: Tensor) -> Tensor:
        x = x + bias
        return x * torch.sigmoid(1.702 * x)

    return Problem(run, (make.normal(s.tokens, s.ffn), make.normal(s.ffn)), (0, 1), TRAINED)


@held_out("squared ReLU, float32")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> Tensor:
        return F.relu(x).square()

    return Problem(run, (make.normal(s.tokens, s.ffn, dtype=torch.float32),), (0,), TRAINED)


@held_out("attention output gated, heads merged")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(attended: Tensor, gate: Tensor) -> Tensor:
        merged = attended.transpose(1, 2).reshape(gate.shape)
        return merged * torch.sigmoid(gate)

    inputs = (make.normal(1, s.heads, s.tokens, s.head), make.normal(1, s.tokens, s.heads * s.head))
    return Problem(run, inputs, (0, 1), TRAINED)


@held_out("token shift")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
        before = F.pad(x, (0, 0, 1, -1))
        return x + (before - x) * mix[0], x + (before - x) * mix[1]

    return Problem(run, (make.normal(4, s.tokens // 4, s.width), make.normal(2, s.width)), (0, 1), TRAINED)


@held_out("patches to tokens + positions")
def _(make: Inputs) -> Problem:
    side, width, batch = (24, 1024, 64) if make.scale.tokens >= 8192 else (4, 32, 2)

    def run(patches: Tensor, bias: Tensor, places: Tensor, token: Tensor) -> Tensor:
        x = (patches + bias[:, None, None]).flatten(2).transpose(1, 2)
        return torch.cat((token.expand(x.shape[0], -1, -1), x), 1) + places

    inputs = (
        make.normal(batch, width, side, side),
        make.normal(width),
        make.normal(1, side * side + 1, width),
        make.normal(1, 1, width),
    )
    return Problem(run, inputs, (0, 1, 2, 3), TRAINED)


# --- rows of scores and logits


@held_out("softmax of scores, capped, windowed")
def _(make: Inputs) -> Problem:
    s = make.scale
    window = s.sequence // 4

    def run(scores: Tensor) -> Tensor:
        at = torch.arange(scores.shape[-1], device=scores.device)
        near = (at <= at[:, None]) & (at > at[:, None] - window)
        capped = 50.0 * torch.tanh(scores.float() / 50.0)
        return capped.masked_fill(~near, -1e9).softmax(-1).to(scores.dtype)

    return Problem(run, (make.normal(s.heads, s.sequence, s.sequence),), (0,), TRAINED)


@held_out("cross-entropy, capped, smoothed, with rows left out")
def _(make: Inputs) -> Problem:
    s = make.scale
    vocabulary = s.vocabulary + 57

    def run(logits: Tensor, targets: Tensor) -> Tensor:
        capped = 30.0 * torch.tanh(logits.float() / 30.0)
        return F.cross_entropy(capped, targets, ignore_index=0, label_smoothing=0.1)

    return Problem(run, (make.normal(s.tokens, vocabulary), make.positions(vocabulary, s.tokens)), (0,), TRAINED)


@held_out("distillation: divergence of two sets of logits")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(student: Tensor, teacher: Tensor) -> Tensor:
        ours, theirs = (each.float() / 2.0 for each in (student, teacher))
        return F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean")

    inputs = (make.normal(s.tokens // 2, s.vocabulary), make.normal(s.tokens // 2, s.vocabulary))
    return Problem(run, inputs, (0,), TRAINED)


@held_out("log-probabilities of chosen tokens")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(logits: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        logps = logits.float().log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1)
        return (logps * kept).sum(-1) / kept.sum(-1)

    rows = 8, s.large_rows // 8 + 1
    kept = torch.ones(rows, device=make.device)
    inputs = (make.normal(*rows, s.large_vocabulary), make.positions(s.large_vocabulary, *rows), kept)
    return Problem(run, inputs, (0,), TRAINED)


@held_out("mean over tokens that are there")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, there: Tensor) -> Tensor:
        weights = there[..., None].to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)

    inputs = (make.normal(16, s.tokens // 8, s.width // 2), make.positions(2, 16, s.tokens // 8))
    return Problem(run, inputs)


# --- experts, low precision, optimizers


@held_out("experts' results weighted and added")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(results: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
        return shared + (results * weights[..., None]).sum(1)

    inputs = (make.normal(s.tokens, 4, s.width // 2), make.normal(s.tokens, 4), make.normal(s.tokens, s.width // 2))
    return Problem(run, inputs, (0, 1, 2), TRAINED)


@held_out("router: sigmoid + bias, load balance")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        _, chosen = (scores + bias).topk(4, -1)
        weights = scores.gather(-1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen

    return Problem(
        run, (make.normal(8 * s.tokens, s.experts, dtype=torch.float32), make.normal(s.experts, dtype=torch.float32))
    )


@held_out("fp8 by blocks of 128")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.float().view(x.shape[0], -1, 128)
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
        return (blocks / scale).to(torch.float8_e4m3fn).view(x.shape), scale.squeeze(-1)

    return Problem(run, (make.normal(s.tokens, s.ffn),))


@held_out("EMA of weights kept in bfloat16")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(averages: list[Tensor], weights: list[Tensor]) -> None:
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight.to(average.dtype), 0.001)

    shapes = [(s.width, s.width // 2), (s.width // 2, s.ffn // 2), (s.width,)] * 3
    averages = [make.normal(*shape, dtype=torch.float32) for shape in shapes]
    return Problem(run, (averages, [make.normal(*shape) for shape in shapes]), mutates=True)


@held_out("Lion")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(weights: list[Tensor], gradients: list[Tensor], means: list[Tensor]) -> None:
        for weight, gradient, mean in zip(weights, gradients, means, strict=True):
            wide = gradient.to(mean.dtype)
            update = (mean * 0.9 + wide * 0.1).sign()
            weight.mul_(1 - 1e-4 * 0.1).sub_(update * 1e-4)
            mean.lerp_(wide, 0.01)

    shapes = [(s.width, s.width // 2), (s.width // 2, s.ffn // 2), (s.width,)] * 3
    weights, means = ([make.normal(*shape, dtype=torch.float32) for shape in shapes] for _ in range(2))
    return Problem(run, (weights, [make.normal(*shape) for shape in shapes], means), mutates=True)
