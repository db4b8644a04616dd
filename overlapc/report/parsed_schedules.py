"""The schedules in records, each parsed once although several parts of a report read them."""

from __future__ import annotations

from functools import lru_cache

from overlapc.report.model import GraphRecord
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse


def schedule_of(graph: GraphRecord) -> Schedule:
    """Return the final schedule of a graph."""
    return _parsed(graph.schedule)


_parsed = lru_cache(maxsize=8)(parse)  # a step has two graphs or a few more
