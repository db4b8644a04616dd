"""A pipeline that stops early, to find the pass, and the move in it, that breaks a step.

`stop_after="plan_overlap"` runs the passes up to that one. `stop_after="plan_overlap:40"` also takes its first 40
moves only: the first 40 nodes stand where the pass put them, all others follow in the order they had before. Both parts
of such an order are legal, so all of it is. Some passes count for themselves (`PassReport.counted`): moves are then the
buckets that `bucket` made, the starts or waits that `raise_under_memory` or `sink_under_memory` moved, and the moves of
`refine`, of a node and what comes along.
"""

from __future__ import annotations

from overlapc.errors import ConfigError, shown
from overlapc.schedule.model import Schedule
from overlapc.units import parse_count


def parse_stop(text: str) -> tuple[str, int | None]:
    """(pass, moves) of `PASS` or `PASS:MOVES`. ConfigError for anything else."""
    name, colon, moves = text.strip().partition(":")
    try:
        count = parse_count(moves) if colon else None
    except ConfigError:
        name = ""
    if not name:
        raise ConfigError(f"stop_after={shown(text)} is neither PASS nor PASS:MOVES, such as plan_overlap:40")
    return name, count


def first_moves(before: Schedule, after: Schedule, moves: int) -> Schedule:
    """The first `moves` nodes of `after`, then the others as in `before`; both hold the same nodes."""
    head = [node.name for node in after.nodes[:moves]]
    placed = set(head)
    rest = [node.name for node in before.nodes if node.name not in placed]
    return before.replace_order([*head, *rest], reorder_collectives=after.collectives_moved)
