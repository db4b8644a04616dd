"""Reductions of many shapes: `benchmarks/kernels.py --list-of reductions`.

Which block sizes are fast depends on how long rows are, whether memory is contiguous along or across them, and how much
an element costs. The lists of models have few of these shapes; the rules of codegen/triton/tiling.py were checked
with these after they had been found with those.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases import TRAINED, Inputs, Make, Problem, named_in

REDUCTIONS: dict[str, Make] = {}
reduction = named_in(REDUCTIONS)


def _rows(make: Inputs, length: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a matrix of rows of `length`, with about tokens x width elements."""
    return make.normal(max(2, make.scale.tokens * make.scale.width // length), length, dtype=dtype)


def _planes(make: Inputs, channels: int) -> Tensor:
    """Return images with contiguous planes of up to 4096 pixels, about tokens x width elements in all."""
    pixels = min(4096, 4 * make.scale.width)
    return make.normal(max(2, make.scale.tokens * make.scale.width // (channels * pixels)), channels, pixels)


# --- rows


@reduction("softmax of 77 text positions")
def _(make: Inputs) -> Problem:
    return Problem(lambda x: x.float().softmax(-1).to(x.dtype), (_rows(make, 77),), (0,), TRAINED)


@reduction("softmax of 257 patches, float32")
def _(make: Inputs) -> Problem:
    return Problem(lambda x: x.softmax(-1), (_rows(make, 257, torch.float32),), (0,), TRAINED)


@reduction("RMSNorm of heads of 96")
def _(make: Inputs) -> Problem:
    return Problem(lambda x, w: F.rms_norm(x, (96,), w), (_rows(make, 96), make.normal(96)), (0, 1), TRAINED)


@reduction("RMSNorm of heads of 256, scaled by position")
def _(make: Inputs) -> Problem:
    def run(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, (256,), weight) * scale

    x = _rows(make, 256)
    return Problem(run, (x, make.normal(256), make.normal(x.shape[0], 1)), (0, 1), TRAINED)


@reduction("LayerNorm + GELU of 768")
def _(make: Inputs) -> Problem:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x, (768,), weight, bias))

    return Problem(run, (_rows(make, 768), make.normal(768), make.normal(768)), (0, 1, 2), TRAINED)


@reduction("residual + LayerNorm of 1000")
def _(make: Inputs) -> Problem:
    def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total, F.layer_norm(total, (1000,), weight)

    x = _rows(make, 1000)
    return Problem(run, (x, x.clone(), make.normal(1000)), (0, 1, 2), TRAINED)


@reduction("cross-entropy of 1000 classes, smoothed")
def _(make: Inputs) -> Problem:
    x = _rows(make, 1000)
    labels = make.positions(1000, x.shape[0])
    return Problem(lambda x, y: F.cross_entropy(x.float(), y, label_smoothing=0.1), (x, labels), (0,), TRAINED)


@reduction("gated RMSNorm of groups of 320")
def _(make: Inputs) -> Problem:
    def run(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x * F.silu(gate), (320,), weight)

    x = _rows(make, 320)
    return Problem(run, (x, x.clone(), make.normal(320)), (0, 1, 2), TRAINED)


@reduction("norms of rows of 600")
def _(make: Inputs) -> Problem:
    return Problem(lambda x: torch.linalg.vector_norm(x.float(), dim=-1), (_rows(make, 600),), (0,), TRAINED)


@reduction("cosine similarity of rows of 512")
def _(make: Inputs) -> Problem:
    x = _rows(make, 512)
    return Problem(lambda x, y: F.cosine_similarity(x.float(), y.float(), dim=-1), (x, x.flip(0)), (0, 1), TRAINED)


@reduction("int8 by blocks of 64")
def _(make: Inputs) -> Problem:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale

    return Problem(run, (_rows(make, 64),))


# --- columns


@reduction("sum of 8 micro-batches' gradients, float32")
def _(make: Inputs) -> Problem:
    return Problem(lambda x: x.sum(0), (_rows(make, make.scale.tokens * make.scale.width // 8, torch.float32),))


@reduction("mean of 32 models' weights")
def _(make: Inputs) -> Problem:
    return Problem(lambda x: x.float().mean(0), (_rows(make, make.scale.tokens * make.scale.width // 32),))


@reduction("sum of 128 rows of images")
def _(make: Inputs) -> Problem:
    return Problem(lambda x: x.sum(0), (_rows(make, make.scale.tokens * make.scale.width // 128),))


@reduction("best of 21 classes by pixel")
def _(make: Inputs) -> Problem:
    return Problem(lambda x: x.argmax(1), (_planes(make, 21),))


@reduction("cross-entropy of 21 classes by pixel")
def _(make: Inputs) -> Problem:
    x = _planes(make, 21)
    labels = make.positions(21, x.shape[0], x.shape[2])
    return Problem(lambda x, y: F.cross_entropy(x.float(), y), (x, labels), (0,), TRAINED)


@reduction("softmax over 64 channels")
def _(make: Inputs) -> Problem:
    return Problem(lambda x: x.float().softmax(1).to(x.dtype), (_planes(make, 64),), (0,), TRAINED)


@reduction("LayerNorm over 256 channels")
def _(make: Inputs) -> Problem:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean = x.float().mean(1, keepdim=True)
        spread = (x.float() - mean).pow(2).mean(1, keepdim=True)
        return (weight[:, None] * (x - mean) * torch.rsqrt(spread + 1e-6) + bias[:, None]).to(x.dtype)

    return Problem(run, (_planes(make, 256), make.normal(256), make.normal(256)), (0, 1, 2), TRAINED)


@reduction("largest over windows of time, 12 steps")
def _(make: Inputs) -> Problem:
    x = _rows(make, make.scale.width)
    return Problem(lambda x: x.view(-1, 12, x.shape[1]).amax(1), (x[: x.shape[0] // 12 * 12].contiguous(),))


@reduction("bias gradient of interleaved pairs")
def _(make: Inputs) -> Problem:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        real, imaginary = x[..., 0] * y[..., 0], x[..., 1] * y[..., 1]
        return real.float().sum(0), torch.stack((real, imaginary), -1)

    x = make.normal(make.scale.tokens, make.scale.width // 2, 2)
    return Problem(run, (x, x.flip(0)))


# --- all elements


@reduction("binary cross-entropy of logits")
def _(make: Inputs) -> Problem:
    x = _rows(make, make.scale.width)
    y = (x.flip(0) > 0).float()
    return Problem(lambda x, y: F.binary_cross_entropy_with_logits(x.float(), y), (x, y), (0,), TRAINED)


@reduction("Gaussian likelihood, mean and variance predicted")
def _(make: Inputs) -> Problem:
    def run(mean: Tensor, log_variance: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (log_variance + (x - mean) ** 2 * torch.exp(-log_variance)).mean()

    x = _rows(make, make.scale.width, torch.float32)
    return Problem(run, (x, x.flip(0), x.flip(1)), (0, 1), TRAINED)


@reduction("divergence of a latent from a normal distribution")
def _(make: Inputs) -> Problem:
    def run(mean: Tensor, log_variance: Tensor) -> Tensor:
        return -0.5 * (1 + log_variance - mean.float() ** 2 - log_variance.float().exp()).mean()

    x = _rows(make, make.scale.width)
    return Problem(run, (x, x.flip(0)), (0, 1), TRAINED)


@reduction("smooth L1 loss")
def _(make: Inputs) -> Problem:
    x = _rows(make, make.scale.width)
    return Problem(lambda x, y: F.smooth_l1_loss(x.float(), y.float()), (x, x.flip(0)), (0,), TRAINED)


@reduction("log-cosh loss")
def _(make: Inputs) -> Problem:
    def run(x: Tensor, y: Tensor) -> Tensor:
        error = x.float() - y.float()
        return (error + F.softplus(-2 * error) - 0.6931471805599453).mean()

    x = _rows(make, make.scale.width)
    return Problem(run, (x, x.flip(0)), (0,), TRAINED)


@reduction("norm of a gradient and count of its large elements")
def _(make: Inputs) -> Problem:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.float().square().sum().sqrt(), (x.abs() > 3).sum()

    return Problem(run, (_rows(make, make.scale.width),))


# --- scans


@reduction("cumulative sum of rows of 2000")
def _(make: Inputs) -> Problem:
    return Problem(lambda x: x.cumsum(-1), (_rows(make, 2000, torch.float32),))


@reduction("cumulative product of 64 discounts")
def _(make: Inputs) -> Problem:
    return Problem(lambda x: torch.sigmoid(x.float()).cumprod(-1), (_rows(make, 64),))
