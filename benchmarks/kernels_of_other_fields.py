"""Kernels outside dense language models: `benchmarks/kernels.py --list-of other-fields`.

From convolutional networks, audio, graphs, diffusion, reinforcement learning, recommenders, recurrent and sparse
models, quantization and optimizers, as their authors write them. The code generator was not tuned on them. `Problem` is
that of kernel_cases.py; sizes follow a scale's tokens and width, so that each moves more than a GPU's L2 cache holds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases import TRAINED, Inputs, Make, Problem, named_in

OTHER_FIELDS: dict[str, Make] = {}
other_field = named_in(OTHER_FIELDS)


def _images(make: Inputs, channels: int, edge: int, channels_last: bool = False) -> Tensor:
    """Return images of `edge` x `edge` pixels: as many as hold tokens x width elements, two at least."""
    s = make.scale
    count = max(2, s.tokens * s.width // (channels * edge * edge))
    images = make.normal(count, channels, edge, edge)
    return images.to(memory_format=torch.channels_last) if channels_last else images


# --- convolutional networks


@other_field("batch norm + ReLU + residual, channels last")
def _(make: Inputs) -> Problem:
    images = _images(make, 64, 28, channels_last=True)

    def run(x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x, None, None, weight, bias, training=True) + shortcut)

    ones = (make.normal(64, dtype=torch.float32), make.normal(64, dtype=torch.float32))
    return Problem(run, (images, *ones, images.clone()), (0, 1, 2, 3), TRAINED)


@other_field("squeeze and excitation")
def _(make: Inputs) -> Problem:
    images = _images(make, 96, 28)

    def run(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        pooled = x.mean((2, 3))
        return x * torch.sigmoid(F.relu(pooled @ down) @ up)[:, :, None, None]

    return Problem(run, (images, make.normal(96, 24) * 0.1, make.normal(24, 96) * 0.1), (0, 1, 2), TRAINED)


@other_field("ConvNeXt: norm of channels, layer scale, residual")
def _(make: Inputs) -> Problem:
    images = _images(make, 192, 14)

    def run(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shortcut: Tensor) -> Tensor:
        last = F.layer_norm(x.permute(0, 2, 3, 1), (192,), weight, bias, 1e-6)
        return shortcut + (scale * last).permute(0, 3, 1, 2)

    scales = (make.normal(192), make.normal(192), make.normal(192))
    return Problem(run, (images, *scales, images.clone()), (0, 1, 2, 3, 4), TRAINED)


@other_field("upsampled, concatenated, SiLU")
def _(make: Inputs) -> Problem:
    images = _images(make, 64, 32)

    def run(low: Tensor, skip: Tensor) -> Tensor:
        return F.silu(torch.cat((F.interpolate(low, scale_factor=2.0, mode="nearest"), skip), 1))

    return Problem(run, (images[:, :, ::2, ::2].contiguous(), images), (0, 1), TRAINED)


@other_field("global response norm, channels last")
def _(make: Inputs) -> Problem:
    images = _images(make, 128, 14).permute(0, 2, 3, 1).contiguous()

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        norm = x.float().pow(2).sum((1, 2), keepdim=True).sqrt()
        share = (norm / (norm.mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return weight * (x * share) + bias + x

    return Problem(run, (images, make.normal(128), make.normal(128)), (0, 1, 2), TRAINED)


@other_field("hard swish of a batch norm in evaluation")
def _(make: Inputs) -> Problem:
    images = _images(make, 40, 28)

    def run(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.hardswish(F.batch_norm(x, mean, variance, weight, bias, training=False))

    four = [make.normal(40, dtype=torch.float32) for _ in range(4)]
    return Problem(run, (images, four[0], four[1].abs() + 0.1, *four[2:]))


@other_field("pixel shuffle + bias + clamp")
def _(make: Inputs) -> Problem:
    images = _images(make, 48, 32)

    def run(x: Tensor, bias: Tensor) -> Tensor:
        return (F.pixel_shuffle(x + bias[:, None, None], 4) * 0.5 + 0.5).clamp(0, 1)

    return Problem(run, (images, make.normal(48)), (0, 1), TRAINED)


@other_field("windows of attention, shifted")
def _(make: Inputs) -> Problem:
    images = _images(make, 96, 56).permute(0, 2, 3, 1).contiguous()

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normed = F.layer_norm(x, (96,), weight, bias)
        moved = torch.roll(normed, (-3, -3), (1, 2))
        count, height, width, channels = moved.shape
        windows = moved.view(count, height // 7, 7, width // 7, 7, channels)
        return windows.permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, channels)

    return Problem(run, (images, make.normal(96), make.normal(96)), (0, 1, 2), TRAINED)


# --- diffusion and video


@other_field("embedding of time steps, scale and shift of a group norm")
def _(make: Inputs) -> Problem:
    images = _images(make, 128, 32)

    def run(x: Tensor, weight: Tensor, bias: Tensor, embedded: Tensor) -> Tensor:
        scale, shift = embedded[:, :, None, None].chunk(2, 1)
        return F.silu(F.group_norm(x, 32, weight, bias) * (1 + scale) + shift)

    embedded = make.normal(images.shape[0], 256)
    return Problem(run, (images, make.normal(128), make.normal(128), embedded), (0, 1, 2, 3), TRAINED)


@other_field("velocity loss weighted by signal to noise")
def _(make: Inputs) -> Problem:
    images = _images(make, 4, 64)

    def run(predicted: Tensor, clean: Tensor, noise: Tensor, alphas: Tensor, steps: Tensor) -> Tensor:
        alpha = alphas[steps][:, None, None, None]
        velocity = alpha.sqrt() * noise.float() - (1 - alpha).sqrt() * clean.float()
        ratio = alphas[steps] / (1 - alphas[steps])
        weight = ratio.clamp(max=5) / (ratio + 1)
        return ((predicted.float() - velocity).pow(2).mean((1, 2, 3)) * weight).mean()

    alphas = torch.linspace(0.99, 0.01, 1000, device=make.device)
    inputs = (images, images.clone(), make.normal(*images.shape), alphas, make.positions(1000, images.shape[0]))
    return Problem(run, inputs, (0,), TRAINED)


@other_field("rotary positions in two dimensions")
def _(make: Inputs) -> Problem:
    s = make.scale
    query = make.normal(s.tokens // 256 or 1, s.heads, 256, s.head)

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = x.float().unflatten(-1, (-1, 2))
        real, imaginary = pairs.unbind(-1)
        turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)
        return turned.flatten(-2).to(x.dtype)

    angles = torch.rand(256, s.head // 2, device=make.device) * 6
    return Problem(run, (query, angles.cos(), angles.sin()), (0,), TRAINED)


# --- audio and recurrent models


@other_field("log mel, normalized by utterance")
def _(make: Inputs) -> Problem:
    s = make.scale
    power = make.normal(s.tokens // 32 or 1, 80, 3001, dtype=torch.float32).abs()

    def run(x: Tensor) -> Tensor:
        logs = torch.clamp(x, min=1e-10).log10()
        logs = torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8.0)
        return (logs + 4.0) / 4.0

    return Problem(run, (power,))


@other_field("gated linear unit of channels, odd length")
def _(make: Inputs) -> Problem:
    s = make.scale
    frames = make.normal(max(2, s.tokens // 128), 2 * 512, 749)

    def run(x: Tensor, bias: Tensor) -> Tensor:
        return F.glu(x + bias[:, None], 1)

    return Problem(run, (frames, make.normal(1024)), (0, 1), TRAINED)


@other_field("snake activation")
def _(make: Inputs) -> Problem:
    s = make.scale
    frames = make.normal(max(2, s.tokens // 64), 256, 1500)

    def run(x: Tensor, alpha: Tensor) -> Tensor:
        scale = alpha.exp()[:, None]
        return x + (x * scale).sin().pow(2) / (scale + 1e-9)

    return Problem(run, (frames, make.normal(256, dtype=torch.float32)), (0, 1), TRAINED)


@other_field("weight norm of a convolution")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(direction: Tensor, length: Tensor) -> Tensor:
        return direction * (length / direction.norm(dim=(1, 2), keepdim=True))

    direction = make.normal(s.width, s.width, 5, dtype=torch.float32)
    return Problem(run, (direction, make.normal(s.width, 1, 1, dtype=torch.float32)), (0, 1), TRAINED)


@other_field("token shift and decay of RWKV")
def _(make: Inputs) -> Problem:
    s = make.scale
    tokens = make.normal(max(2, s.tokens // 1024), 1024, s.width)

    def run(x: Tensor, mix: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        before = F.pad(x, (0, 0, 1, -1))
        mixed = x + (before - x) * mix
        return mixed, torch.exp(-torch.exp(decay + mixed.float())).to(x.dtype)

    return Problem(
        run, (tokens, torch.rand(s.width, device=make.device).bfloat16(), make.normal(s.width)), (0,), TRAINED
    )


@other_field("Mamba: softplus of steps, gated norm")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(y: Tensor, z: Tensor, weight: Tensor, steps: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        gated = y.float() * F.silu(z.float())
        grouped = gated.unflatten(-1, (8, -1))
        normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (weight * normed.flatten(-2)).to(y.dtype), F.softplus(steps.float() + bias).clamp(1e-3, 0.1)

    inputs = (
        make.normal(s.tokens, s.width),
        make.normal(s.tokens, 2 * s.width)[:, s.width :],
        make.normal(s.width, dtype=torch.float32),
        make.normal(s.tokens, 64),
        make.normal(64, dtype=torch.float32),
    )
    return Problem(run, inputs, (0, 1, 2, 3, 4), TRAINED)


@other_field("gates of an LSTM")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        enter, forget, new, leave = gates.chunk(4, -1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
        return torch.sigmoid(leave) * torch.tanh(cell), cell

    return Problem(run, (make.normal(s.tokens, 4 * s.width), make.normal(s.tokens, s.width)), (0, 1), TRAINED)


@other_field("linear attention: features and normalizer")
def _(make: Inputs) -> Problem:
    s = make.scale
    shape = (max(2, s.tokens // 1024), s.heads, 1024, s.head)

    def run(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query, key = F.elu(query) + 1, F.elu(key) + 1
        total = (query * key.sum(2, keepdim=True)).sum(-1, keepdim=True)
        return query / (total + 1e-6), key

    return Problem(run, (make.normal(*shape), make.normal(*shape)), (0, 1), TRAINED)


# --- attention scores written out


def _scores(make: Inputs) -> Tensor:
    s = make.scale
    rows = min(1024, 8 * s.sequence)
    return make.normal(max(1, s.tokens // 1024), s.heads // 2, rows, rows)


@other_field("softmax with ALiBi and a causal mask")
def _(make: Inputs) -> Problem:
    def run(scores: Tensor, slopes: Tensor) -> Tensor:
        places = torch.arange(scores.shape[-1], device=scores.device)
        apart = places[None, :] - places[:, None]
        biased = scores.float() * 0.125 + slopes[:, None, None] * apart
        return biased.masked_fill(apart > 0, float("-inf")).softmax(-1).to(scores.dtype)

    scores = _scores(make)
    return Problem(run, (scores, torch.rand(scores.shape[1], device=make.device)), (0,), TRAINED)


@other_field("softmax with a sink and capped scores")
def _(make: Inputs) -> Problem:
    def run(scores: Tensor, sinks: Tensor) -> Tensor:
        capped = 50.0 * torch.tanh(scores / 50.0)
        sink = sinks[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
        return torch.cat((capped, sink), -1).float().softmax(-1)[..., :-1].to(scores.dtype)

    scores = _scores(make)
    return Problem(run, (scores, make.normal(scores.shape[1])), (0, 1), TRAINED)


@other_field("softmax with T5's relative bias")
def _(make: Inputs) -> Problem:
    scores = _scores(make)

    def run(scores: Tensor, table: Tensor, buckets: Tensor) -> Tensor:
        bias = table[buckets].permute(2, 0, 1).unsqueeze(0)
        return (scores + bias).float().softmax(-1).type_as(scores)

    inputs = (scores, make.normal(32, scores.shape[1]), make.positions(32, *scores.shape[2:]))
    return Problem(run, inputs, (0,), TRAINED)


@other_field("contrastive loss along rows and columns")
def _(make: Inputs) -> Problem:
    rows = make.scale.tokens // 2

    def run(logits: Tensor, scale: Tensor) -> Tensor:
        logits = logits.float() * scale.exp()
        places = torch.arange(rows, device=logits.device)
        return (F.cross_entropy(logits, places) + F.cross_entropy(logits.t(), places)) / 2

    return Problem(run, (make.normal(rows, rows), torch.zeros((), device=make.device)), (0, 1), TRAINED)


# --- losses and reinforcement learning


@other_field("cross-entropy with smoothed labels")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, label_smoothing=0.1)

    return Problem(
        run, (make.normal(s.tokens // 2, s.vocabulary), make.positions(s.vocabulary, s.tokens // 2)), (0,), TRAINED
    )


@other_field("focal loss")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(logits: Tensor, targets: Tensor) -> Tensor:
        share = torch.sigmoid(logits.float())
        loss = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
        right = share * targets + (1 - share) * (1 - targets)
        weight = 0.25 * targets + 0.75 * (1 - targets)
        return (weight * loss * (1 - right) ** 2).sum() / logits.shape[0]

    targets = make.positions(2, s.tokens, s.width).float()
    return Problem(run, (make.normal(s.tokens, s.width), targets), (0,), TRAINED)


@other_field("Dice loss of segments")
def _(make: Inputs) -> Problem:
    s = make.scale
    shape = (max(2, s.tokens // 512), 8, 65536 if s.tokens > 1000 else 1024)

    def run(logits: Tensor, masks: Tensor) -> Tensor:
        shares = logits.float().sigmoid()
        both = 2 * (shares * masks).sum(-1)
        return (1 - (both + 1) / (shares.sum(-1) + masks.sum(-1) + 1)).mean()

    return Problem(run, (make.normal(*shape), make.positions(2, *shape).float()), (0,), TRAINED)


@other_field("clipped policy loss with KL penalty")
def _(make: Inputs) -> Problem:
    s = make.scale
    shape = (1024, s.tokens) if s.tokens > 1000 else (16, s.tokens)

    def run(new: Tensor, old: Tensor, reference: Tensor, gains: Tensor, there: Tensor) -> Tensor:
        ratio = torch.exp(new - old)
        clipped = torch.clamp(ratio, 0.8, 1.2)
        gained = torch.minimum(ratio * gains[:, None], clipped * gains[:, None])
        apart = reference - new
        penalty = torch.exp(apart) - apart - 1
        return (((0.04 * penalty - gained) * there).sum(1) / there.sum(1)).mean()

    logs = [-make.normal(*shape, dtype=torch.float32).abs() for _ in range(3)]
    there = (make.positions(5, *shape) > 0).float()
    return Problem(run, (*logs, make.normal(shape[0], dtype=torch.float32), there), (0,), TRAINED)


@other_field("log-probabilities of chosen tokens and entropy")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logs = F.log_softmax(logits.float() / 0.7, -1)
        entropy = -(logs.exp() * logs).sum(-1)
        return logs.gather(-1, tokens[:, None]).squeeze(-1), entropy

    return Problem(
        run, (make.normal(s.tokens // 2, s.vocabulary), make.positions(s.vocabulary, s.tokens // 2)), (0,), TRAINED
    )


# --- graphs, recommenders, mixtures and sparse models


@other_field("messages of a graph, mean by target")
def _(make: Inputs) -> Problem:
    s = make.scale
    nodes, edges, width = s.tokens * 2, s.tokens * 16, 128

    def run(x: Tensor, weight: Tensor, source: Tensor, target: Tensor) -> Tensor:
        messages = F.relu(x[source] * weight[:, None])
        total = torch.zeros_like(x).index_add(0, target, messages)
        count = weight.new_zeros(nodes).index_add(0, target, torch.ones_like(weight))
        return total / count.clamp(min=1)[:, None]

    inputs = (
        make.normal(nodes, width, dtype=torch.float32),
        make.normal(edges, dtype=torch.float32),
        make.positions(nodes, edges),
        make.positions(nodes, edges),
    )
    return Problem(run, inputs, (0,), TRAINED)


@other_field("sum of an embedding bag")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(table: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return (F.embedding(chosen, table) * weights[..., None]).sum(1)

    chosen = make.positions(s.large_vocabulary, s.tokens, 20)
    weights = torch.rand(s.tokens, 20, device=make.device).bfloat16()
    return Problem(run, (make.normal(s.large_vocabulary, 128), chosen, weights), (0,), TRAINED)


@other_field("second-order interactions of features")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor) -> Tensor:
        return 0.5 * (x.sum(1).pow(2) - x.pow(2).sum(1)).sum(-1, keepdim=True)

    return Problem(run, (make.normal(s.tokens * 4, 39, 64, dtype=torch.float32),), (0,), TRAINED)


@other_field("places of tokens in their experts")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(chosen: Tensor) -> tuple[Tensor, Tensor]:
        one = F.one_hot(chosen, s.experts).to(torch.int32)
        places = (one.cumsum(0) - 1) * one
        return places.sum(-1), one.sum(0)

    return Problem(run, (make.positions(s.experts, s.tokens * 8),))


@other_field("load-balancing loss of routers")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(logits: Tensor, chosen: Tensor) -> Tensor:
        shares = logits.float().softmax(-1)
        picked = F.one_hot(chosen, s.experts).float().amax(1)
        return s.experts * (picked.mean(0) * shares.mean(0)).sum()

    return Problem(
        run, (make.normal(s.tokens * 8, s.experts), make.positions(s.experts, s.tokens * 8, 2)), (0,), TRAINED
    )


@other_field("sparse autoencoder: ReLU above a threshold, counts")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        on = x > thresholds
        features = x * on
        return features, features.float().abs().sum(-1).mean(), on.float().mean(0)

    return Problem(run, (make.normal(s.tokens, s.ffn), torch.rand(s.ffn, device=make.device).bfloat16()), (0,), TRAINED)


@other_field("clamped interleaved SwiGLU of gpt-oss")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(product: Tensor, bias: Tensor) -> Tensor:
        product = product + bias
        gate, up = product[..., ::2], product[..., 1::2]
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

    return Problem(run, (make.normal(s.tokens, 2 * s.width), make.normal(2 * s.width)), (0, 1), TRAINED)


# --- quantization


@other_field("int4 weights unpacked by groups")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        low, high = packed & 15, packed >> 4
        values = torch.stack((low, high), -1).flatten(-2).unflatten(-1, (-1, 128))
        return ((values.to(torch.bfloat16) - zeros[..., None]) * scales[..., None]).flatten(-2)

    groups = s.ffn // 128
    packed = torch.randint(256, (s.width, s.ffn // 2), device=make.device, dtype=torch.uint8)
    return Problem(run, (packed, make.normal(s.width, groups), make.positions(16, s.width, groups).bfloat16()))


@other_field("fake quantization by channel")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-5) / 127
        rounded = torch.round(weight / scale).clamp(-128, 127) * scale
        return weight + (rounded - weight).detach()

    return Problem(run, (make.normal(s.ffn, s.width, dtype=torch.float32),), (0,), TRAINED)


@other_field("int8 by token, with a smoothed norm")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(x: Tensor, weight: Tensor, smooth: Tensor) -> tuple[Tensor, Tensor]:
        normed = F.rms_norm(x, (s.width,), weight) / smooth
        scale = normed.abs().amax(-1, keepdim=True).float() / 127
        return torch.round(normed.float() / scale).to(torch.int8), scale

    smooth = torch.rand(s.width, device=make.device).bfloat16() + 0.5
    return Problem(run, (make.normal(s.tokens, s.width), make.normal(s.width), smooth))


# --- optimizers


@other_field("Adafactor: means of rows and columns")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(gradient: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        square = gradient.to(rows.dtype).pow(2) + 1e-30
        rows = rows.lerp(square.mean(-1), 0.01)
        columns = columns.lerp(square.mean(-2), 0.01)
        factor = (rows / rows.mean()).rsqrt()[:, None] * columns.rsqrt()
        update = gradient * factor
        return update / (update.pow(2).mean().sqrt().clamp(min=1.0)), rows, columns

    inputs = (
        make.normal(s.ffn, s.width),
        torch.rand(s.ffn, device=make.device) + 0.1,
        torch.rand(s.width, device=make.device) + 0.1,
    )
    return Problem(run, inputs)


@other_field("LAMB: update and trust ratio")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = mean.lerp(gradient, 0.1)
        square = square * 0.999 + gradient * gradient * 0.001
        update = mean / (square.sqrt() + 1e-6) + 0.01 * weight
        ratio = weight.norm() / update.norm().clamp(min=1e-6)
        return weight - 1e-3 * ratio.clamp(max=10.0) * update, mean, square

    tensors = [make.normal(s.ffn // 2, s.width, dtype=torch.float32) for _ in range(4)]
    return Problem(run, (*tensors[:3], tensors[3].abs()))


@other_field("NorMuon: normalized rows of an update")
def _(make: Inputs) -> Problem:
    s = make.scale

    def run(update: Tensor, second: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        second = second.lerp(update.to(second.dtype).pow(2).mean(-1), 0.05)
        scaled = update * second.clamp(min=1e-10).rsqrt()[:, None].to(update.dtype)
        scaled = scaled * (update.float().norm() / scaled.float().norm().clamp(min=1e-10)).to(update.dtype)
        return weight * 0.999 - 0.02 * scaled, second

    inputs = (
        make.normal(s.ffn, s.width),
        torch.rand(s.ffn, device=make.device),
        make.normal(s.ffn, s.width, dtype=torch.float32),
    )
    return Problem(run, inputs)
