"""Measure the seconds that each phase of compilation takes, without the phases nested in it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class _Running(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.since = 0.0


_seconds: defaultdict[str, float] = defaultdict(float)
_running = _Running()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time of the block as phase `name`, except the time of phases nested in it."""
    _switch()
    _running.names.append(name)
    try:
        yield
    finally:
        _switch()
        _running.names.pop()


def _switch() -> None:
    now = time.perf_counter()
    if _running.names:
        _seconds[_running.names[-1]] += now - _running.since
    _running.since = now


def seconds_by_phase() -> Mapping[str, float]:
    """Return the seconds of each phase in this process, since its start or the last `clear`."""
    return dict(_seconds)


def clear() -> None:
    """Set all phases to zero."""
    _seconds.clear()
