"""Random numbers as a function of a seed and a position: Philox 4x32-10 (Salmon et al., SC 2011).

Word k of a stream is word k % 4 of the block with counter k // 4. A stream's seed is two int64: the first is the key,
the second the upper half of the counter. Generated kernels compute the same words (`prelude.h`, `triton_prelude.py`);
these functions compute them with torch's ops, for graphs that run op by op and as a reference for tests of kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # increments of the key in each round
_MASK = 0xFFFFFFFF
# Bits of a uniform number by dtype: numbers are multiples of 2^-bits, the spacing that the dtype has just below 1.
UNIFORM_BITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def draw(count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Draw the seeds of `count` streams from the device's generator; they are views of one tensor, 16 bytes each."""
    drawn = torch.empty(2 * count, dtype=torch.int64, device=device).random_()
    return (drawn,) if count == 1 else drawn.view(count, 2).unbind()


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and lower 32 bits of a product of two numbers below 2^32, in int64 without overflow."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def words(seed: Tensor, position: Tensor) -> Tensor:
    """Return the words of `seed` (int64, two elements) at `position` (int64): from 0 to 2^32 - 1, as int64."""
    key = [seed[0] & _MASK, (seed[0] >> 32) & _MASK]
    block = position >> 2
    c0, c1 = block & _MASK, (block >> 32) & _MASK
    c2, c3 = (seed[1] & _MASK).expand_as(block), ((seed[1] >> 32) & _MASK).expand_as(block)
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0
        key = [(key[at] + WEYL[at]) & _MASK for at in range(2)]
    return torch.stack((c0, c1, c2, c3), -1).gather(-1, (position & 3)[..., None])[..., 0]


def uniform(seed: Tensor, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return the random numbers of [0, 1) at positions `start` … `start + count - 1` of the stream."""
    at = torch.arange(start, start + count, device=seed.device)
    if dtype == torch.float64:
        whole = (words(seed, 2 * at) << 21) | (words(seed, 2 * at + 1) >> 11)
        return whole.double() * 2.0**-53
    bits = UNIFORM_BITS[dtype]
    return ((words(seed, at) >> (32 - bits)).float() * 2.0**-bits).to(dtype)


def normal(seed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the first `count` numbers of a standard normal distribution, by the Box-Muller transform."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = uniform(seed, 2 * count, wide).view(count, 2)
    radius = (-2.0 * (1.0 - pairs[:, 0]).log()).sqrt()
    return (radius * (2 * math.pi * pairs[:, 1]).cos()).to(dtype)


def integers(seed: Tensor, count: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Return the first `count` integers from `low` to `high - 1`; the smallest are likelier by (high - low) / 2^63.

    From 2^63 integers on, the smallest, as many as there are fewer integers than 2^64, are twice as likely as the rest.
    """
    at = torch.arange(count, device=seed.device)
    first, second = words(seed, 2 * at), words(seed, 2 * at + 1)
    span = high - low
    if span < 2**63:
        return (low + ((first << 31) ^ second) % span).to(dtype)
    whole, wrapped = (first << 32) | second, span - 2**64  # an unsigned number of 64 bits, and the span as int64
    below = torch.where((whole >= 0) | (whole < wrapped), whole, whole - wrapped)
    return (low + below).to(dtype)
