"""Reads and writes files that users and processes exchange.

Reading limits their size and converts their contents to the expected types. Contents that do not fit their type raise a
ConfigError that quotes them, clipped; only contents that fit as a whole are returned. Files are written as a whole or
not at all.
"""

from __future__ import annotations

import gzip
import itertools
import os
import zlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from overlapc.errors import ConfigError

_T = TypeVar("_T")
MOST_BYTES = 2**28  # size limit of a file: its contents as Python objects take several times as much memory
_PIECE = 2**20
_LONGEST = 200  # characters of an error message of msgspec that are quoted


def read_text(path: str | PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file, decompressed if it is named `*.gz`. ConfigError if it cannot be read, is longer than
    `most_bytes` or is not UTF-8."""
    try:
        with gzip.open(path) if str(path).endswith(".gz") else Path(path).open("rb") as file:
            # In pieces, because a single read would allocate `most_bytes` at once.
            pieces = itertools.takewhile(len, (file.read(_PIECE) for _ in range(most_bytes // _PIECE + 1)))
            data = b"".join(pieces)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:  # an invalid file name, such as one with a null byte
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
    if len(data) > most_bytes:
        raise ConfigError(f"{path} is longer than {most_bytes // 2**20} MiB, the limit for files that overlapc reads")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: byte {error.start}") from None


def write_file(path: str | PathLike[str], content: str | bytes) -> None:
    """Write a file and the folders above it. ConfigError if it cannot be written.

    Atomic: whoever reads the file sees its old or its new content, even if this process is killed while it writes.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content if isinstance(content, bytes) else content.encode())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from None


def check_suffix(path: Path, what: str, suffixes: Sequence[str]) -> None:
    """Raise ConfigError unless the file name has one of the suffixes. what: the content, such as "a report"."""
    if path.suffix not in suffixes:
        *others, last = suffixes
        listed = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"{path.name}: {what} can only be saved as {listed}")


def from_json(text: str, kind: type[_T], what: str) -> _T:
    """Parse JSON text as a `kind`. Raise ConfigError, beginning with `what`, if it is not one."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ConfigError(f"{what}: {_brief(error)}") from None


def from_data(data: Any, kind: type[_T], what: str) -> _T:
    """Convert plain objects, such as parsed JSON, to a `kind`. ConfigError, beginning with `what`, if they are none."""
    try:
        return msgspec.convert(data, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{what}: {_brief(error)}") from None


def _brief(error: Exception) -> str:
    text = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
