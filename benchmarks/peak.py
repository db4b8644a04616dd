"""Measure which allocations are live at a run's peak of CUDA memory, by the source line that made them."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from overlapc.units import human_bytes

_ENTRIES = 500_000
_SHOWN = 25


def at_peak(run: Callable[[], object]) -> str:
    """Call `run` and return as text its peak of allocated bytes and the largest blocks live then, with source lines.

    Blocks allocated before `run` are reported as one sum, because the recorder did not see their allocation.
    """
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=_ENTRIES)
    try:
        run()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    peak_bytes, live = live_at_peak(events)
    by_line: Counter[tuple[int, str]] = Counter((event["size"], _line(event)) for event in live)
    lines = [f"{human_bytes(before_bytes)} before, {human_bytes(peak_bytes)} more at the peak, of it"]
    for (size, line), count in sorted(by_line.items(), key=lambda each: -each[0][0] * each[1])[:_SHOWN]:
        lines.append(f"  {count:3} x {human_bytes(size):>9}  {line}")
    return "\n".join(lines)


def live_at_peak(events: Iterable[Mapping[str, Any]]) -> tuple[int, Sequence[Mapping[str, Any]]]:
    """Return (bytes above the beginning, live allocations) at the highest point of an allocator's history."""
    held = highest = 0
    live: dict[int, Mapping[str, Any]] = {}
    at_highest: list[Mapping[str, Any]] = []
    for event in events:
        if event["action"] == "alloc":
            held += event["size"]
            live[event["addr"]] = event
        elif event["action"] == "free_requested":
            held -= event["size"]
            live.pop(event["addr"], None)
        if held > highest:
            highest, at_highest = held, list(live.values())
    return highest, at_highest


def _line(event: Mapping[str, Any]) -> str:
    """Return the innermost Python source line outside torch that made this allocation, as text."""
    frames = event.get("frames") or []
    frame = next((each for each in frames if "/torch/" not in each["filename"]), frames[0] if frames else None)
    if frame is None:
        return "unknown"
    text = linecache.getline(frame["filename"], frame["line"]).strip()
    name = frame["filename"].rsplit("/", 1)[-1]
    return f"{name}:{frame['line']} {text[:100]}"
