"""Valid values of options: each function converts text or a Python value to the option's type.

All raise ConfigError, saying what they were given, for what they cannot use; `Config` adds the option's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from overlapc.errors import ConfigError, shown, unknown_name
from overlapc.units import parse_bytes


def a_bool(text: Any) -> bool:
    """`1`, `true`, `yes`, `on` and their opposites."""
    if isinstance(text, bool):
        return text
    word = str(text).strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ConfigError(f"{shown(text)} is neither on nor off; write 1 or 0")
    return word in ("1", "true", "yes", "on")


def number(text: Any, low: float, high: float, what: str = "a number") -> float:
    """A number from `low` to `high`."""
    try:
        value = float(text)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{shown(text)} is not {what}") from None
    if not low <= value <= high:  # nor is nan
        raise ConfigError(f"{shown(text)} is not {what} from {low:g} to {high:g}")
    return value


def seconds(text: Any) -> float:
    """A positive number of seconds, a year at most: torch's timeouts cannot be much longer."""
    value = number(text, 0, 365 * 86400, "a number of seconds")
    if value < 1e-3:
        raise ConfigError(f"{shown(text)} is not a positive number of seconds")
    return value


def optional_bool(text: Any) -> bool | None:
    """None for nothing given."""
    return None if text is None or text == "" else a_bool(text)


def optional_bytes(text: Any) -> int | None:
    """A positive size such as `70GiB`; None for nothing given."""
    if text is None or text == "":
        return None
    if isinstance(text, bool):
        raise ConfigError(f"{text!r} is not a size; write it like '70GiB'")
    size = parse_bytes(text)
    if size <= 0:
        raise ConfigError(f"{shown(text)} is not a positive size")
    return size


def optional_count(text: Any) -> int | None:
    """A positive whole number; None for nothing given."""
    return None if text is None or text == "" else count(text, 1)


def count(text: Any, least: int = 0) -> int:
    """A whole number."""
    value = number(text, least, 2**31, "a whole number")
    if isinstance(text, bool) or not value.is_integer():
        raise ConfigError(f"{shown(text)} is not a whole number")
    return int(value)


def fraction(text: Any) -> float:
    """A number that is not negative."""
    return number(text, 0, 1e6)


def margin(text: Any) -> float:
    """How many times an estimate."""
    value = number(text, 0, 1000)
    if value < 1:
        raise ConfigError(f"{shown(text)} is less than 1, the estimate itself")
    return value


def optional_text(text: Any) -> str | None:
    """None for nothing given."""
    return None if text is None or text == "" else str(text)


def pass_names(text: Any) -> tuple[str | Callable[..., Any], ...] | None:
    """`"a,b"`, `"none"`, a list of names and callables, one callable, or None for the default pipeline."""
    if text is None:
        return None
    if callable(text):
        return (text,)
    if isinstance(text, str):
        return () if text.strip() == "none" else tuple(part.strip() for part in text.split(",") if part.strip())
    if not isinstance(text, Iterable):
        raise ConfigError(f"{shown(text)} is neither names nor functions")
    return tuple(text)


def one_of(*choices: str) -> Callable[[Any], str]:
    """A reader of exactly one of `choices`."""

    def read(text: Any) -> str:
        if text not in choices:
            raise ConfigError(unknown_name("value", str(text), choices))
        return str(text)

    return read


def words(text: Any) -> frozenset[str]:
    """`a,b`, or words that are a collection already."""
    if not text:
        return frozenset()
    if isinstance(text, str):
        return frozenset(part.strip() for part in text.split(",") if part.strip())
    return frozenset(text)


def subset_of(kind: str, *known: str) -> Callable[[Any], frozenset[str]]:
    """A reader of some of these words, each of which names a `kind`, or of "none"."""

    def read(text: Any) -> frozenset[str]:
        found = words(text) - {"none"}
        for word in found:
            if word not in known:
                raise ConfigError(unknown_name(kind, word, known))
        return found

    return read


def file_or_function(value: Any) -> str | Callable[..., Any] | None:
    """The name of a file, or a function; None for nothing given."""
    if value is None or value == "":
        return None
    return value if callable(value) else str(value)


def path(text: Any) -> Path:
    """A path, `~` being the home of the user."""
    try:
        found = Path(text).expanduser()
    except (TypeError, RuntimeError):  # of a user that there is not
        raise ConfigError(f"{shown(text)} is not a path") from None
    if text == "" or "\0" in str(found):
        raise ConfigError(f"{shown(text)} is not a path")
    return found
