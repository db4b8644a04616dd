"""Reads files that users exchange: limits their size, and converts them to the types that they should hold.

What a file says is quoted, clipped, in a ConfigError; nothing of it gets further unless all of it fits its type.
"""

from __future__ import annotations

import itertools
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from overlapc.errors import ConfigError

_T = TypeVar("_T")
MOST_BYTES = 2**28  # of one file: read as objects it takes several times as much
_PIECE = 2**20
_LONGEST = 200  # characters of what the reader of a form says


def read_text(path: str | PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """What a file holds. ConfigError where it cannot be read, is longer than that or is no UTF-8."""
    try:
        with Path(path).open("rb") as file:  # in pieces: one read of that many bytes would allocate them all
            pieces = itertools.takewhile(len, (file.read(_PIECE) for _ in range(most_bytes // _PIECE + 1)))
            data = b"".join(pieces)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # a name that no file can have
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
    if len(data) > most_bytes:
        raise ConfigError(
            f"{path} is longer than {most_bytes // 2**20} MiB, which nothing that overlapc reads should be"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: byte {error.start}") from None


def from_json(text: str, kind: type[_T], what: str) -> _T:
    """The JSON text as a `kind`. ConfigError, beginning with `what`, for anything else."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ConfigError(f"{what}: {_brief(error)}") from None


def from_data(data: Any, kind: type[_T], what: str) -> _T:
    """Plain objects, such as JSON gives, as a `kind`. ConfigError, beginning with `what`, where they are none."""
    try:
        return msgspec.convert(data, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{what}: {_brief(error)}") from None


def _brief(error: Exception) -> str:
    text = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
