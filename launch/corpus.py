"""Text that every machine has, to train on: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from overlapc.errors import ConfigError


@functools.cache
def read(limit_bytes: int = 4 * 2**20) -> bytes:
    """Return the first `limit_bytes` of the standard library's top-level modules, sorted by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    left = limit_bytes
    for path in sorted(folder.glob("*.py")):
        if left <= 0:
            break
        text = path.read_bytes()[:left]
        parts.append(text)
        left -= len(text)
    if not parts:
        raise ConfigError(f"no Python sources in {folder} to train on; install the standard library's .py files")
    return b"".join(parts)


def batches(steps: int, batch: int, seq: int, part: int, parts: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` pairs (tokens, next tokens), int64 `[batch, seq]`, for `part` of `parts` data-parallel ranks.

    Every rank draws the positions of the whole global batch, so that no two ranks train on the same rows
    and a single process with `parts=1` and `batch * parts` rows sees the same data.
    """
    text = torch.frombuffer(bytearray(read()), dtype=torch.uint8)
    if len(text) <= seq + 1:
        raise ConfigError(f"--seq {seq} is longer than the text ({len(text)} bytes)")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - seq - 1, (parts * batch,), generator=generator)
        rows = torch.stack(
            [text[start : start + seq + 1] for start in starts[part * batch : (part + 1) * batch].tolist()]
        )
        yield rows[:, :-1].long(), rows[:, 1:].long()
