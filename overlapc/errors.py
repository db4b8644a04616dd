"""Errors a user can meet. Each says what broke, where, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_LISTED = 60  # names that an error lists


class OverlapcError(RuntimeError):
    """Base of every error that overlapc raises on purpose."""


class ConfigError(OverlapcError, ValueError):
    """An option, environment variable or command line value that cannot be used."""


class CompileError(OverlapcError):
    """A graph that could not be compiled; names the FX node and the user's source line."""


class NoSharedMemory(CompileError):
    """Some rank has no memory that others can reach: raised on all of them, with the same text."""


class ToolchainError(OverlapcError):
    """A compiler (g++, triton) is missing or refused generated code."""


class ScheduleError(OverlapcError):
    """A schedule that breaks a rule (order, completeness, memory, collective order)."""


class RanksDisagree(OverlapcError):
    """Ranks compiled different graphs or orders, or a rank did not show up in time."""


class PeerLost(OverlapcError):
    """A rank that a running collective waits for did not do its part in time."""


class MemoryBudgetError(OverlapcError):
    """No schedule fits the memory budget that the user set. peak_bytes: what one needs, if one was planned."""

    def __init__(self, message: str, peak_bytes: int | None = None) -> None:
        super().__init__(message)
        self.peak_bytes = peak_bytes


class CalibrationError(OverlapcError):
    """Measuring this machine failed or took too long."""


class CheckFailed(OverlapcError, IndexError):
    """A check in a kernel that did not hold: eager's IndexError for an index, its RuntimeError for an assertion."""


def shown(value: object, longest: int = 100) -> str:
    """What a user gave, as an error quotes it: clipped, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a {type(value).__name__} of very many digits"
    return clipped(text, longest)


def clipped(text: str, longest: int = 100) -> str:
    """A text that a user gave, no longer than that and a few words."""
    return text if len(text) <= longest else f"{text[: longest - 20]}...{text[-10:]} ({len(text)} characters)"


def nearest(name: str, known: Iterable[str], count: int = 3) -> Sequence[str]:
    """The names closest to `name`, best first, those that begin with it before others; empty when nothing is close."""
    known = list(known)
    longer = [each for each in known if name and each.startswith(name)]
    alike = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
    return list(dict.fromkeys((*longer, *alike)))[:count]


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """`no pass named 'sink_wait'; nearest: sink_waits`, or all known names when none is near."""
    known = sorted(known)
    near = nearest(name[:200], known)  # comparing takes the product of both lengths
    some = [*known[:_LISTED], f"... ({len(known)})"] if len(known) > _LISTED else known
    offer = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(some)}"
    return f"no {kind} named {shown(name)}; {offer}"
