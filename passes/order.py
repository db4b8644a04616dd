"""An order that changes: the one primitive with which passes move nodes.

It knows where every node stands, what has to come along when a node moves, what is live and how long the step takes. A
move puts the nodes of a stretch into another order; its memory and its timing are asked for before it is made, and cost
the stretch, not the schedule (`schedule/memory.py`, `estimators/simulator/incremental.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from overlapc.estimators.simulator.incremental import Timing
from overlapc.estimators.simulator.native import replay_of
from overlapc.passes.base import Context
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.memory import MemoryTimeline
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind, Schedule


@dataclass(frozen=True, slots=True)
class Move:
    """`nodes`, which stand at positions `low` and following, in this order there."""

    low: int
    nodes: Sequence[int]


class Order:
    """The order of a schedule's nodes while it changes. Nodes are positions in the schedule as it was given.

    clocks: schedules of the same nodes in the same order, with the times to replay by; none where no time is asked for.
    """

    def __init__(self, schedule: Schedule, ctx: Context, clocks: Sequence[Schedule] = ()) -> None:
        self.schedule = schedule
        self._memory = MemoryTimeline(schedule, check=ctx.check_memory)
        self._replays = [replay_of(clock, ctx.profile, ctx.cache_dir) for clock in clocks]
        self.order, self.position = self._memory.order, self._memory.position
        deps = dependencies.of(schedule)
        self._preds: list[list[int]] = [[] for _ in self.order]
        self._succs: list[list[int]] = [[] for _ in self.order]
        for before, after, why in deps.edges():
            if not (ctx.reorder_collectives and why is Why.COLLECTIVE_ORDER):
                self._preds[after].append(before)
                self._succs[before].append(after)
        self._fixed = [not _is_known(schedule, at) for at in range(len(schedule.nodes))]
        # Whether a collective of unknown duration has time enough no replay can say: nothing moves past it.
        self._blocking = {at for at in self.order if self._fixed[at] and schedule.nodes[at].kind not in COMPUTE}

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Of the present order, one a clock."""
        return tuple(replay.timing for replay in self._replays)

    @property
    def blocks_replayed(self) -> int:
        """What asking for timings has cost so far, in blocks of nodes of a fixed length."""
        return sum(replay.blocks_replayed for replay in self._replays)

    # Moves

    def shift(self, node: int, distance: int, most: int) -> Move | None:
        """`node` moved by so many positions (negative: earlier) or to the end, together with all that stands between
        and that it needs, or that needs it. None if that is more than `most` nodes, or one of unknown duration."""
        at = self.position[node]
        to = max(0, at + distance) if distance < 0 else min(len(self.order) - 1, at + distance)
        if to == at:
            return None
        low, high = min(at, to), max(at, to)
        along = self._along(node, low, high, self._preds if distance < 0 else self._succs, most)
        if along is None:
            return None
        window = self.order[low : high + 1]
        if not self._blocking.isdisjoint(window):
            return None
        moving = [other for other in window if other in along]
        staying = [other for other in window if other not in along]
        return Move(low, moving + staying if distance < 0 else staying + moving) if staying else None

    def exchange(self, one: int, other: int) -> Move | None:
        """Two nodes in each other's place. None if a dependence, or a node of unknown duration, stands against that."""
        low, high = sorted((self.position[one], self.position[other]))
        first, last = self.order[low], self.order[high]
        window = self.order[low : high + 1]
        if first == last or self._fixed[first] or self._fixed[last] or not self._blocking.isdisjoint(window):
            return None
        if any(low < self.position[after] <= high for after in self._succs[first]):
            return None
        if any(low <= self.position[before] < high for before in self._preds[last]):
            return None
        return Move(low, [last, *window[1:-1], first])

    def _along(self, node: int, low: int, high: int, edges: Sequence[Sequence[int]], most: int) -> set[int] | None:
        along, stack = {node}, [node]
        while stack:
            one = stack.pop()
            if self._fixed[one] or len(along) > most:
                return None
            for other in edges[one]:
                if other not in along and low <= self.position[other] <= high:
                    along.add(other)
                    stack.append(other)
        return along

    @property
    def peak_bytes(self) -> int:
        """The peak of the present order."""
        return self._memory.peak_bytes

    def peak_with(self, move: Move) -> int:
        """The peak in bytes within the stretch, were the move made."""
        return self._memory.try_window(move.low, move.nodes)

    def pool_bytes_with(self, move: Move) -> int:
        """The most that lies in pools at once within the stretch, were the move made."""
        return self._memory.try_pools(move.low, move.nodes)

    def timings_with(self, move: Move) -> Iterator[Timing]:
        """What `timings` would be, were the move made; each is a replay when it is asked for."""
        return (replay.try_window(move.low, move.nodes) for replay in self._replays)

    def make(self, move: Move) -> None:
        """Make a move. Costs next to nothing if it was asked about last."""
        self._memory.apply(move.low, move.nodes)
        for replay in self._replays:
            replay.apply(move.low, move.nodes)


def _is_known(schedule: Schedule, at: int) -> bool:
    """Whether it is known how long a node takes, or the collective that it waits for."""
    node = schedule.nodes[schedule.started.get(at, at)]
    return node.estimate is not None or node.kind not in (*COMPUTE, *COMMUNICATION, Kind.WAIT)
