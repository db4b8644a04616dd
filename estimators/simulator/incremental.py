"""Incremental simulation of moves: simulates again only the part of a step that a move changes.

A `Replay` stores the state of the machine before every block of an order: the collectives in flight, and the lead of
the host's clock over the stream's. A changed window is simulated from the start of its first block. After the window,
as soon as the state before a block equals that of the current order, everything from there on is only shifted in time.
Times are multiples of a power of two (machine.py), so this is exact: `try_window` returns bit for bit what `simulate`
computes for the whole order.

While the host's clock is behind the stream's, the distance does not matter, so it is not part of that state. Blocks in
which the host's clock was ahead, or would be because the stream is now earlier, are simulated again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from overlapc.estimators.device import IDEAL, DeviceProfile
from overlapc.estimators.simulator.machine import Machine, costs_of
from overlapc.schedule.model import Schedule

BLOCK = 24  # nodes; with short blocks simulation stops sooner, with long ones fewer states are stored


class Timing(NamedTuple):
    """The totals of a `Timeline`."""

    step_ns: float
    exposed_ns: float
    launch_idle_ns: float

    @property
    def compute_ns(self) -> float:
        """Time that the compute stream is busy, including the slowdown by collectives."""
        return self.step_ns - self.exposed_ns - self.launch_idle_ns


class _State(NamedTuple):
    """The state of a machine between two nodes, by queue; times are relative to the stream's clock."""

    issued: tuple[int, ...]  # number of collectives issued so far
    begun: tuple[int, ...]  # number of them that have begun
    left_ns: tuple[float, ...]  # remaining time of the running collective; -1: none runs
    late_ns: tuple[
        tuple[float, ...], ...
    ]  # for the last collectives issued: time until the host has issued them, if it is in the future


class _Block(NamedTuple):
    """The simulation of a block of consecutive nodes."""

    state: _State  # before the first node
    took_ns: float
    idle_ns: float
    exposed_ns: float
    exposed: dict[int, float]  # exposed ns by collective


@dataclass(slots=True)
class _Trial:
    """Another order of a window, with the changed blocks and the host's lead before and in them, by block number."""

    low: int
    nodes: tuple[int, ...]
    blocks: dict[int, _Block] = field(default_factory=dict)
    ahead_ns: dict[int, tuple[float, float]] = field(default_factory=dict)


class Moves(ABC):
    """The timing of an order that can be changed.

    Nodes are positions in the original `schedule.nodes`. Windows are those of `MemoryTimeline`, so that a move is
    tried on both with the same arguments. Whether an order is legal is not checked here.
    """

    timing: Timing  # of the present order
    blocks_replayed: int  # number of blocks simulated so far, a measure of the cost

    def __init__(self, count: int) -> None:
        self.order: list[int] = list(range(count))

    @abstractmethod
    def try_window(self, low: int, nodes: Sequence[int]) -> Timing:
        """Return the timing if the nodes at positions low.. were in the order `nodes`."""

    @abstractmethod
    def apply(self, low: int, nodes: Sequence[int]) -> None:
        """Put the nodes at positions low.. into the order `nodes`. If it was tried last, nothing is simulated again."""

    def try_move(self, low: int, high: int, to: int) -> Timing:
        """Return the timing if the nodes at positions low..high-1 began at position `to` (counted without them)."""
        return self.try_window(*self._window(low, high, to))

    def move(self, low: int, high: int, to: int) -> None:
        """Move the nodes at positions low..high-1 so that they begin at `to` (counted without them)."""
        self.apply(*self._window(low, high, to))

    def _window(self, low: int, high: int, to: int) -> tuple[int, list[int]]:
        block = self.order[low:high]
        if to < low:
            return to, block + self.order[to:low]
        return low, self.order[high : high + to - low] + block

    def _put(self, low: int, nodes: Sequence[int]) -> None:
        self.order[low : low + len(nodes)] = nodes


class Replay(Moves):
    """`Moves` in Python; `native.NativeReplay` is the same in C."""

    def __init__(self, schedule: Schedule, profile: DeviceProfile = IDEAL, *, block: int = BLOCK) -> None:
        """block: number of nodes between two stored states."""
        super().__init__(len(schedule.nodes))
        self._block = block
        count = len(schedule.nodes)
        self._costs = costs_of(schedule, profile)
        self._synchronous = profile.synchronous
        self._times = [0.0] * count  # machines write start and end times here; they are not used
        self._issued: list[list[int]] = [[] for _ in range(self._costs.queues)]  # every queue's collectives in order
        self._slot: dict[int, int] = {}  # collective -> its index in that list
        for at in self.order:
            if self._costs.is_collective(at):
                queue = self._issued[self._costs.queue[at]]
                self._slot[at] = len(queue)
                queue.append(at)
        self.blocks_replayed = 0
        self._trial: _Trial | None = None
        self._blocks: list[_Block] = []
        # The lead of the host's clock over the stream's before each block, and the largest lead in the block at a time
        # when it matters. Negative if the host is behind. They are not stored in blocks because a shift of the step in
        # time changes all of them.
        self._ahead_ns: list[float] = []
        self._most_ahead_ns: list[float] = []
        self.exposed: dict[int, float] = {}  # collective -> its exposed ns, without fully hidden collectives
        machine = Machine(self._costs, self._times, self._times)
        whole = _Trial(0, ())
        for number in range(max(1, math.ceil(count / self._block))):
            self._run_block(machine, number, whole, last=(number + 1) * self._block >= count)
            self._blocks.append(whole.blocks[number])
            for collective, ns in whole.blocks[number].exposed.items():
                self.exposed[collective] = self.exposed.get(collective, 0.0) + ns
        self._ahead_ns = [ahead for ahead, _ in whole.ahead_ns.values()]
        self._most_ahead_ns = [most for _, most in whole.ahead_ns.values()]
        self.timing = Timing(
            sum(block.took_ns for block in self._blocks),
            sum(block.exposed_ns for block in self._blocks),
            sum(block.idle_ns for block in self._blocks),
        )

    def try_window(self, low: int, nodes: Sequence[int]) -> Timing:
        """See `Moves.try_window`."""
        changes = self._try(low, nodes).blocks.items()
        pairs = [(new, self._blocks[number]) for number, new in changes]
        return Timing(
            self.timing.step_ns + sum(new.took_ns - old.took_ns for new, old in pairs),
            self.timing.exposed_ns + sum(new.exposed_ns - old.exposed_ns for new, old in pairs),
            self.timing.launch_idle_ns + sum(new.idle_ns - old.idle_ns for new, old in pairs),
        )

    def apply(self, low: int, nodes: Sequence[int]) -> None:
        """See `Moves.apply`."""
        trial, self.timing = self._try(low, nodes), self.try_window(low, nodes)
        self._trial = None
        self._put(low, nodes)
        self._reissue([node for node in nodes if node in self._slot])
        shift_ns, shifted_to = 0.0, 0
        for number, new in trial.blocks.items():
            self._shift(shifted_to, number, shift_ns)
            old, self._blocks[number] = self._blocks[number], new
            self._ahead_ns[number], self._most_ahead_ns[number] = trial.ahead_ns[number]
            self._count_exposed(old, new)
            shift_ns, shifted_to = shift_ns + new.took_ns - old.took_ns, number + 1
        self._shift(shifted_to, len(self._blocks), shift_ns)

    # Replaying

    def _try(self, low: int, nodes: Sequence[int]) -> _Trial:
        if self._trial is not None and self._trial.low == low and self._trial.nodes == tuple(nodes):
            return self._trial
        trial = self._trial = _Trial(low, tuple(nodes))
        count, number, shift_ns = len(self._blocks), low // self._block, 0.0
        machine = self._resumed(number, 0.0)
        while number < count and nodes:
            self._run_block(machine, number, trial, last=number == count - 1)
            shift_ns += trial.blocks[number].took_ns - self._blocks[number].took_ns
            number += 1
            if number < count and number * self._block >= low + len(nodes) and self._is_as_before(machine, number):
                following = self._host_matters(number, shift_ns)
                if following != number:
                    number = following
                    if number < count:
                        machine = self._resumed(number, shift_ns)
        return trial

    def _run_block(self, machine: Machine, number: int, trial: _Trial, *, last: bool) -> None:
        """Simulate a block in the order of a trial, and store the result in the trial."""
        self.blocks_replayed += 1
        state, began_ns, ahead_ns = _state(machine), machine.now, machine.host - machine.now
        machine.idle, machine.exposed, machine.most_ahead = 0.0, {}, -math.inf
        machine.run(self._nodes(number, trial))
        if last:
            machine.finish()
        trial.ahead_ns[number] = ahead_ns, machine.most_ahead
        trial.blocks[number] = _Block(
            state, machine.now - began_ns, machine.idle, sum(machine.exposed.values()), machine.exposed
        )

    def _nodes(self, number: int, trial: _Trial) -> Iterator[int] | Sequence[int]:
        """Return the nodes of a block, in the order of a trial."""
        begin, end = number * self._block, (number + 1) * self._block
        low, high = trial.low, trial.low + len(trial.nodes)
        if high <= begin or end <= low:
            return self.order[begin:end]
        window = trial.nodes[max(0, begin - low) : max(0, end - low)]
        return [*self.order[begin : max(begin, low)], *window, *self.order[min(end, high) : end]]

    def _resumed(self, number: int, shift_ns: float) -> Machine:
        """Return a machine in the state before a block that begins `shift_ns` later than in the present order."""
        machine, state = Machine(self._costs, self._times, self._times), self._blocks[number].state
        machine.host = self._ahead_ns[number] - (0.0 if self._synchronous else shift_ns)
        for queue, collectives in enumerate(self._issued):
            begun, issued, left_ns = state.begun[queue], state.issued[queue], state.left_ns[queue]
            if left_ns >= 0:
                machine.running[queue], machine.left[queue] = collectives[begun - 1], left_ns
                machine.in_flight.add(collectives[begun - 1])
            if issued > begun:
                late_ns = state.late_ns[queue]
                not_before = [0.0] * (issued - begun - len(late_ns)) + list(late_ns)
                machine.waiting[queue].extend(zip(collectives[begun:issued], not_before, strict=True))
                machine.in_flight.update(collectives[begun:issued])
                machine.queued += issued - begun
        machine.issued = list(state.issued)
        machine.set_active()
        return machine

    def _is_as_before(self, machine: Machine, number: int) -> bool:
        """Whether a machine's state before a block is that of the present order, ignoring a host that is behind."""
        if self._synchronous and machine.host - machine.now != self._ahead_ns[number]:
            return False
        state = _state(machine)
        if state != self._blocks[number].state:
            return False
        for queue, collectives in enumerate(self._issued):
            begun, issued = state.begun[queue], state.issued[queue]
            if state.left_ns[queue] >= 0 and machine.running[queue] != collectives[begun - 1]:
                return False
            if issued > begun and [at for at, _ in machine.waiting[queue]] != collectives[begun:issued]:
                return False
        return True

    def _host_matters(self, number: int, shift_ns: float) -> int:
        """Return the first block from `number` on in which the host was ahead, or is if it begins `shift_ns` later."""
        if self._synchronous or not shift_ns:  # the host's lead was compared with the state, or is unchanged
            return len(self._blocks)
        enough_ns = min(0.0, shift_ns)
        if max(self._most_ahead_ns[number:]) <= enough_ns:
            return len(self._blocks)
        return next(at for at in range(number, len(self._blocks)) if self._most_ahead_ns[at] > enough_ns)

    # Keeping

    def _reissue(self, collectives: Sequence[int]) -> None:
        """Store the new order of the collectives in a window."""
        free: dict[int, int] = {}  # queue -> the first index of the window's collectives
        for at in collectives:
            queue = self._costs.queue[at]
            free[queue] = min(free.get(queue, self._slot[at]), self._slot[at])
        for at in collectives:
            queue = self._costs.queue[at]
            self._slot[at] = free[queue]
            self._issued[queue][free[queue]] = at
            free[queue] += 1

    def _shift(self, low: int, high: int, later_ns: float) -> None:
        """Shift blocks low..high-1 by `later_ns`, which reduces the lead of a host whose times do not shift."""
        if later_ns and not self._synchronous and low < high:
            self._ahead_ns[low:high] = [ns - later_ns for ns in self._ahead_ns[low:high]]
            self._most_ahead_ns[low:high] = [ns - later_ns for ns in self._most_ahead_ns[low:high]]

    def _count_exposed(self, old: _Block, new: _Block) -> None:
        for block, sign in ((old, -1), (new, 1)):
            for collective, ns in block.exposed.items():
                total_ns = self.exposed.get(collective, 0.0) + sign * ns
                if total_ns:
                    self.exposed[collective] = total_ns
                else:
                    self.exposed.pop(collective, None)


def _state(machine: Machine) -> _State:
    now, issued = machine.now, tuple(machine.issued)
    left_ns = tuple([-1.0 if at is None else ns for at, ns in zip(machine.running, machine.left, strict=True)])
    if not machine.queued:
        return _State(issued, issued, left_ns, ((),) * len(issued))
    begun = tuple([count - len(waiting) for count, waiting in zip(issued, machine.waiting, strict=True)])
    late_ns = tuple(
        [
            tuple([ns - now for _, ns in waiting if ns > now]) if waiting and waiting[-1][1] > now else ()
            for waiting in machine.waiting
        ]
    )
    return _State(issued, begun, left_ns, late_ns)
