"""Errors that users see. Each message says what broke, where, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_LISTED = 60  # how many known names an error lists


class OverlapcError(RuntimeError):
    """Base class of all errors that overlapc raises deliberately."""


class ConfigError(OverlapcError, ValueError):
    """An option, environment variable or command line value that cannot be used."""


class CompileError(OverlapcError):
    """A graph that could not be compiled; names the FX node and the user's source line."""


class NoSharedMemory(CompileError):
    """A rank has no memory that other ranks can access; raised on all ranks with the same text."""


class ToolchainError(OverlapcError):
    """A compiler (g++, triton) is missing or rejected generated code."""


class ScheduleError(OverlapcError):
    """A schedule that breaks a rule (order, completeness, memory, collective order)."""


class RanksDisagree(OverlapcError):
    """Ranks compiled different graphs or orders, or a rank did not respond in time while compiling."""


class PeerLost(OverlapcError):
    """A running collective waits for a rank that did not do its part in time."""


class MemoryBudgetError(OverlapcError):
    """No schedule fits the user's memory budget. peak_bytes: the peak of the best schedule, if one was planned."""

    def __init__(self, message: str, peak_bytes: int | None = None) -> None:
        super().__init__(message)
        self.peak_bytes = peak_bytes


class CalibrationError(OverlapcError):
    """Measuring this machine failed or took too long."""


class CheckFailed(OverlapcError, IndexError):
    """A check in a kernel failed. It is both errors that eager raises: IndexError for an index, RuntimeError for an
    assertion."""


def shown(value: object, longest: int = 100) -> str:
    """Return the repr of a value that a user gave, clipped to about `longest` characters, to quote it in an error."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a {type(value).__name__} of very many digits"
    return clipped(text, longest)


def clipped(text: str, longest: int = 100) -> str:
    """Return the text itself if it has at most `longest` characters, else its beginning, its end and its length."""
    return text if len(text) <= longest else f"{text[: longest - 20]}...{text[-10:]} ({len(text)} characters)"


def nearest(name: str, known: Iterable[str], count: int = 3) -> Sequence[str]:
    """Return up to `count` known names: first those that begin with `name`, then similar ones, the closest first."""
    known = list(known)
    longer = [candidate for candidate in known if name and candidate.startswith(name)]
    similar = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
    return list(dict.fromkeys((*longer, *similar)))[:count]


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return `no pass named 'sink_wait'; nearest: sink_waits`, or list the known names if none is similar."""
    known = sorted(known)
    near = nearest(name[:200], known)  # the time of a comparison grows with the product of both lengths
    listed = [*known[:_LISTED], f"... ({len(known)})"] if len(known) > _LISTED else known
    suggestion = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(listed)}"
    return f"no {kind} named {shown(name)}; {suggestion}"
