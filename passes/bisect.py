"""Stop a pipeline early, to find the pass, and the move of that pass, that breaks a step.

`stop_after="plan_overlap"` runs the passes up to and including that one. `stop_after="plan_overlap:40"` makes only its
first 40 moves: the first 40 nodes stand where it put them, all other nodes follow in their order before the pass. Both
parts of such an order are legal, so the whole order is. Some passes count moves themselves (`PassReport.counted`):
`bucket` counts buckets, `raise_under_memory` and `sink_under_memory` the starts or waits that moved, `share_launches`
merged launches, and `refine` its moves, each of one node and the nodes that move along.
"""

from __future__ import annotations

from overlapc.errors import ConfigError, shown
from overlapc.schedule.model import Schedule
from overlapc.units import parse_count


def parse_stop(text: str) -> tuple[str, int | None]:
    """Return (pass, moves) of `PASS` (moves: None) or `PASS:MOVES`. Raise ConfigError for any other text."""
    name, colon, moves = text.strip().partition(":")
    try:
        count = parse_count(moves) if colon else None
    except ConfigError:
        name = ""
    if not name:
        raise ConfigError(f"stop_after={shown(text)} is neither PASS nor PASS:MOVES, such as plan_overlap:40")
    return name, count


def first_moves(before: Schedule, after: Schedule, moves: int) -> Schedule:
    """Return the first `moves` nodes of `after`, then all other nodes as in `before`; both have the same nodes."""
    head = [node.name for node in after.nodes[:moves]]
    placed = set(head)
    rest = [node.name for node in before.nodes if node.name not in placed]
    return before.replace_order([*head, *rest], reorder_collectives=after.collectives_moved)
