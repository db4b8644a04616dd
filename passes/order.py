"""The order of a schedule while a search changes it, move by move.

`Order` knows the position of every node, which nodes must move along with it, the peak memory and the step time. A move
permutes the nodes of a window of positions. Its memory and timing can be queried before it is made, at a cost that
depends on the window, not on the schedule (`schedule/memory.py`, `estimators/simulator/incremental.py`).
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
    """Put `nodes`, which stand at the positions from `low` on, into this order there."""

    low: int
    nodes: Sequence[int]


class Order:
    """The order of a schedule's nodes while it changes. Nodes are positions in the given schedule.

    clocks: schedules of the same nodes in the same order, with the times to replay; empty if timings are not needed.
    """

    def __init__(self, schedule: Schedule, ctx: Context, clocks: Sequence[Schedule] = ()) -> None:
        self.schedule = schedule
        self._memory = MemoryTimeline(schedule, check=ctx.check_memory)
        self.replays = [replay_of(clock, ctx.profile, ctx.cache_dir) for clock in clocks]
        self.order, self.position = self._memory.order, self._memory.position
        deps = dependencies.of(schedule)
        self.preds: list[list[int]] = [[] for _ in self.order]
        self.succs: list[list[int]] = [[] for _ in self.order]
        for before, after, why in deps.edges():
            if not (ctx.reorder_collectives and why is Why.COLLECTIVE_ORDER):
                self.preds[after].append(before)
                self.succs[before].append(after)
        self.fixed = [not _is_known(schedule, at) for at in range(len(schedule.nodes))]
        # No replay can tell whether a collective of unknown duration is hidden, so nothing moves past it.
        self.blocking = {at for at in self.order if self.fixed[at] and schedule.nodes[at].kind not in COMPUTE}

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The timings of the present order, one for each clock."""
        return tuple(replay.timing for replay in self.replays)

    @property
    def blocks_replayed(self) -> int:
        """The cost of all timings queried so far: the number of replayed blocks, each of a fixed number of nodes."""
        return sum(replay.blocks_replayed for replay in self.replays)

    # Moves

    def shift(self, node: int, distance: int, most: int) -> Move | None:
        """Return the move of `node` by `distance` positions (negative: earlier), at most to an end of the order, with
        the nodes in between that must move along. None if these exceed `most` or an unknown duration prevents it."""
        at = self.position[node]
        to = max(0, at + distance) if distance < 0 else min(len(self.order) - 1, at + distance)
        if to == at:
            return None
        low, high = min(at, to), max(at, to)
        window = self.order[low : high + 1]
        if not self.blocking.isdisjoint(window):
            return None
        # Nodes that `node` needs are all before it, and nodes that need it are behind it: one walk finds all of them.
        edges = self.preds if distance < 0 else self.succs
        moving: list[int] = []
        staying: list[int] = []
        along = {node}
        for other in reversed(window) if distance < 0 else window:
            if other not in along:
                staying.append(other)
            elif self.fixed[other] or len(moving) == most:
                return None
            else:
                moving.append(other)
                along.update(edges[other])
        nodes = [*reversed(moving), *reversed(staying)] if distance < 0 else staying + moving
        return Move(low, nodes) if staying else None

    def exchange(self, one: int, other: int) -> Move | None:
        """Return the move that swaps two nodes; None if a dependence or a node of unknown duration prevents it."""
        low, high = sorted((self.position[one], self.position[other]))
        first, last = self.order[low], self.order[high]
        window = self.order[low : high + 1]
        if first == last or self.fixed[first] or self.fixed[last] or not self.blocking.isdisjoint(window):
            return None
        if any(low < self.position[after] <= high for after in self.succs[first]):
            return None
        if any(low <= self.position[before] < high for before in self.preds[last]):
            return None
        return Move(low, [last, *window[1:-1], first])

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the present order."""
        return self._memory.peak_bytes

    def peak_with(self, move: Move) -> int:
        """Return the peak memory within the move's window if the move were made."""
        return self._memory.try_window(move.low, move.nodes)

    def pool_bytes_with(self, move: Move) -> int:
        """Return the peak of the bytes in pools within the move's window if the move were made."""
        return self._memory.try_pools(move.low, move.nodes)

    def timings_with(self, move: Move) -> Iterator[Timing]:
        """Yield what `timings` would be if the move were made; each replay runs when its timing is requested."""
        return (replay.try_window(move.low, move.nodes) for replay in self.replays)

    def make(self, move: Move) -> None:
        """Make a move. Nearly free if it is the move that was queried last."""
        self._memory.apply(move.low, move.nodes)
        for replay in self.replays:
            replay.apply(move.low, move.nodes)


def _is_known(schedule: Schedule, at: int) -> bool:
    """Whether the duration of a node, or of the collective that it waits for, is known."""
    node = schedule.nodes[schedule.started.get(at, at)]
    return node.estimate is not None or node.kind not in (*COMPUTE, *COMMUNICATION, Kind.WAIT)
