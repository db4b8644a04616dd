"""Which versions of torch overlapc was tested with; `overlapc run` asks before anything of the compiler is imported."""

from __future__ import annotations

import re

import torch

from overlapc.errors import ConfigError

_FIRST = (2, 11)  # oldest version tested
_BEYOND = (2, 14)  # first version not tested


def check_torch_version(version: str | None = None) -> tuple[int, int]:
    """Return (major, minor) of torch; raise ConfigError if overlapc was not tested with that version."""
    text = torch.__version__ if version is None else version
    match = re.match(r"(\d+)\.(\d+)", text)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or not _FIRST <= found < _BEYOND:
        low, high = ".".join(map(str, _FIRST)), ".".join(map(str, _BEYOND))
        raise ConfigError(f"torch {text} is not supported: overlapc needs torch>={low},<{high}")
    return found
