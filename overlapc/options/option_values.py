"""Readers of option values: each function converts text or a Python value to the option's type.

For invalid values, they raise ConfigError with the value in its message; `Config` adds the option's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from overlapc.errors import ConfigError, shown, unknown_name
from overlapc.units import parse_bytes


def a_bool(text: Any) -> bool:
    """Read `1`, `true`, `yes`, `on` or their opposites."""
    if isinstance(text, bool):
        return text
    word = str(text).strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ConfigError(f"{shown(text)} is neither on nor off; write 1 or 0")
    return word in ("1", "true", "yes", "on")


def number(text: Any, low: float, high: float, what: str = "a number") -> float:
    """Read a number from `low` to `high`."""
    try:
        value = float(text)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{shown(text)} is not {what}") from None
    if not low <= value <= high:  # also true for nan
        raise ConfigError(f"{shown(text)} is not {what} from {low:g} to {high:g}")
    return value


def seconds(text: Any) -> float:
    """Read a positive number of seconds, at most a year: torch's timeouts cannot be much longer."""
    value = number(text, 0, 365 * 86400, "a number of seconds")
    if value < 1e-3:
        raise ConfigError(f"{shown(text)} is not a positive number of seconds")
    return value


def optional_bool(text: Any) -> bool | None:
    """Read a value like `a_bool`; None for None or ""."""
    return None if text is None or text == "" else a_bool(text)


def optional_bytes(text: Any) -> int | None:
    """Read a positive size such as `70GiB`; None for None or ""."""
    if text is None or text == "":
        return None
    if isinstance(text, bool):
        raise ConfigError(f"{text!r} is not a size; write it like '70GiB'")
    size = parse_bytes(text)
    if size <= 0:
        raise ConfigError(f"{shown(text)} is not a positive size")
    return size


def optional_count(text: Any) -> int | None:
    """Read a positive whole number; None for None or ""."""
    return None if text is None or text == "" else count(text, 1)


def count(text: Any, least: int = 0) -> int:
    """Read a whole number of at least `least`."""
    value = number(text, least, 2**31, "a whole number")
    if isinstance(text, bool) or not value.is_integer():
        raise ConfigError(f"{shown(text)} is not a whole number")
    return int(value)


def fraction(text: Any) -> float:
    """Read a number that is not negative."""
    return number(text, 0, 1e6)


def margin(text: Any) -> float:
    """Read a factor of an estimate, at least 1."""
    value = number(text, 0, 1000)
    if value < 1:
        raise ConfigError(f"{shown(text)} is less than 1, the estimate itself")
    return value


def optional_text(text: Any) -> str | None:
    """Read a text; None for None or ""."""
    return None if text is None or text == "" else str(text)


def pass_names(text: Any) -> tuple[str | Callable[..., Any], ...] | None:
    """Read `"a,b"`, `"none"`, a list of names and callables, one callable, or None for the default pipeline."""
    if text is None:
        return None
    if callable(text):
        return (text,)
    if isinstance(text, str):
        return () if text.strip() == "none" else tuple(part.strip() for part in text.split(",") if part.strip())
    if not isinstance(text, Iterable):
        raise ConfigError(f"{shown(text)} is neither a list of names nor of functions")
    return tuple(text)


def one_of(*choices: str) -> Callable[[Any], str]:
    """Return a reader that accepts only the values `choices`."""

    def read(text: Any) -> str:
        if text not in choices:
            raise ConfigError(unknown_name("value", str(text), choices))
        return str(text)

    return read


def words(text: Any) -> frozenset[str]:
    """Read a set of words from `a,b` or from a collection of words."""
    if not text:
        return frozenset()
    if isinstance(text, str):
        return frozenset(part.strip() for part in text.split(",") if part.strip())
    found = list(text) if isinstance(text, Iterable) else [text]
    if not all(isinstance(word, str) for word in found):
        raise ConfigError(f"{shown(text)} is neither a word nor a list of words")
    return frozenset(found)


def subset_of(kind: str, *known: str) -> Callable[[Any], frozenset[str]]:
    """Return a reader of a set of the `known` words, or of "none". kind: what the words name, for errors."""

    def read(text: Any) -> frozenset[str]:
        found = words(text) - {"none"}
        for word in found:
            if word not in known:
                raise ConfigError(unknown_name(kind, word, known))
        return found

    return read


def name_or_file(text: Any) -> str | None:
    """Read a name, or a path as `path` reads it; None for None or ""."""
    return None if text is None or text == "" else str(path(text))


def file_or_function(value: Any) -> str | Callable[..., Any] | None:
    """Read a path as `path` reads it, or a function; None for None or ""."""
    return value if callable(value) else name_or_file(value)


def path(text: Any) -> Path:
    """Read a path; `~` is the user's home folder."""
    try:
        found = Path(text).expanduser()
    except (TypeError, RuntimeError):  # RuntimeError: `~user` for an unknown user
        raise ConfigError(f"{shown(text)} is not a path") from None
    if text == "" or "\0" in str(found):
        raise ConfigError(f"{shown(text)} is not a path")
    return found
