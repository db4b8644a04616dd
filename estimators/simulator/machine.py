"""The simulated machine: a host that launches, one compute stream, and a queue for each `Comm.queue`.

`timeline.simulate` runs a whole schedule on it, `incremental.Replay` parts of one. timeline.py describes its rules.

**Times are multiples of 2^-10 ns.** Sums and differences of such floats are exact, and products with a contention
factor are rounded to such a multiple. So results depend only on time differences, not on absolute times, and a part of
a step that is simulated again with another start time gives bit for bit the same durations.

An event is the end of a node or of a collective, or the start of a collective; the cost of a simulation is linear in
their number.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from overlapc.estimators.contention import (
    Contender,
    Traffic,
    collective_stretches,
    compute_stretch,
    contender_of,
    traffic_of,
)
from overlapc.estimators.device import DeviceProfile
from overlapc.schedule.model import Kind, Node, Schedule

# Adding and subtracting this rounds a float to a multiple of 2^-10 ns, the value of its last bit, up to 36 minutes.
_ROUNDER = 1.5 * 2.0**42
T = TypeVar("T")
# (slowdown factor of compute, slowdown factors of the running collectives)
Mix = tuple[float, tuple[float, ...]]
_NOTHING = -1  # the load of an idle compute stream


def on_grid(ns: float) -> float:
    """Return the nearest multiple of 2^-10 ns."""
    return (ns + _ROUNDER) - _ROUNDER


class StepKind(IntEnum):
    """The kinds of nodes that the machine distinguishes."""

    NOTHING = 0  # views, no-ops, and waits for nothing
    COMPUTE = 1
    WAIT = 2
    START = 3
    COMM = 4


class NodeCosts(NamedTuple):
    """The properties of a node that a simulation needs."""

    node: Node
    step: int
    ns: float
    load: int  # index into Costs.contenders
    traffic: int  # index into Costs.traffics
    queue: str


class Costs:
    """The properties of a schedule's nodes that a simulation needs; lists are indexed by position.

    Loads and traffic are represented by indices, so that the contention of a combination is computed once and cached.
    """

    def __init__(self, schedule: Schedule, profile: DeviceProfile, known: Costs | None = None) -> None:
        """known: the costs of another order of these nodes, which are reused."""
        self.profile = profile
        self.contenders: list[Contender] = [] if known is None else known.contenders
        self.traffics: list[Traffic] = [] if known is None else known.traffics
        self._contender_ids: dict[Contender, int] = {} if known is None else known._contender_ids
        self._traffic_ids: dict[Traffic, int] = {} if known is None else known._traffic_ids
        self._mixes: dict[tuple[int, ...], dict[int, Mix]] = {} if known is None else known._mixes
        self._beside: dict[tuple[int | None, ...], tuple[tuple[int, ...], tuple[int, ...], dict[int, Mix]]] = {}
        self._of: dict[str, NodeCosts] = {} if known is None else dict(known._of)
        seen = self._of
        found = [
            costs if (costs := seen.get(node.name)) is not None and costs.node is node else self.of_node(node)
            for node in schedule.nodes
        ]
        self.launch_ns = on_grid(profile.launch_ns)
        self.gap_ns = on_grid(profile.kernel_gap_ns)
        self._set_order(found, schedule.started)

    def of_order(self, order: Sequence[int], started: Mapping[int, int], new: Sequence[NodeCosts]) -> Costs:
        """Return the costs of another order: some of these nodes, given by position, and new ones; -1 - i is new[i].

        started: wait -> its start.
        """
        other = copy.copy(self)
        other._beside = {}
        number = {at: index for index, at in enumerate(order)}
        waits_for = {number[wait]: number[start] for wait, start in started.items() if {wait, start} <= number.keys()}
        other._set_order([self.order[at] if at >= 0 else new[-1 - at] for at in order], waits_for)
        return other

    def _set_order(self, order: Sequence[NodeCosts], waits_for: Mapping[int, int]) -> None:
        self.order = order
        self.ns = [costs.ns for costs in order]
        self.load = [costs.load for costs in order]
        self.traffic = [costs.traffic for costs in order]
        self.step = [costs.step for costs in order]
        self.waits_for = waits_for
        for wait in waits_for:
            self.step[wait] = int(StepKind.WAIT)
        names = sorted({costs.queue for costs in order} | {""})
        number = {name: queue for queue, name in enumerate(names)}  # the same in every order
        self.queue = [number[costs.queue] for costs in order]
        self.queues = len(names)

    def is_collective(self, at: int) -> bool:
        """Whether the node at a position runs on a queue."""
        return self.step[at] in (StepKind.START, StepKind.COMM)

    def of_node(self, node: Node) -> NodeCosts:
        """Return the costs of one node, which need not be in the schedule."""
        ns = on_grid(node.estimate.ns) if node.estimate is not None else 0.0
        load = traffic = _NOTHING
        kind = node.kind
        if kind is Kind.KERNEL or kind is Kind.EXTERN:
            step = StepKind.COMPUTE
            load = _number(contender_of(node), self._contender_ids, self.contenders)
        elif kind is Kind.START or kind is Kind.COMM:
            step = StepKind.START if kind is Kind.START else StepKind.COMM
            traffic = _number(traffic_of(node, self.profile), self._traffic_ids, self.traffics)
            ns = on_grid(ns + self.profile.collective_gap_ns) if node.estimate is not None else ns
        else:
            step = StepKind.NOTHING  # also for a wait; `_set_order` sets WAIT if the schedule has its start
        found = self._of[node.name] = NodeCosts(node, int(step), ns, load, traffic, node.queue)
        return found

    def mix(self, load: int, traffics: tuple[int, ...]) -> Mix:
        """Return the slowdown factors of a load and of collectives that run at the same time."""
        mixes = self.mixes(traffics)
        known = mixes.get(load)
        if known is None:
            beside = [self.traffics[each] for each in traffics]
            work = None if load == _NOTHING else self.contenders[load]
            stretches = tuple(collective_stretches(work, beside, self.profile))
            known = mixes[load] = 1.0 if work is None else compute_stretch(work, beside, self.profile), stretches
        return known

    def beside(self, running: tuple[int | None, ...]) -> tuple[tuple[int, ...], tuple[int, ...], dict[int, Mix]]:
        """Return the queues that run a collective, their traffic and its `mixes`, given what runs on each queue."""
        known = self._beside.get(running)
        if known is None:
            active = tuple([queue for queue, at in enumerate(running) if at is not None])
            traffic = tuple([self.traffic[at] for at in running if at is not None])
            known = self._beside[running] = active, traffic, self.mixes(traffic)
        return known

    def mixes(self, traffics: tuple[int, ...]) -> dict[int, Mix]:
        """Return the cache of `mix` for this traffic, by load."""
        found = self._mixes.get(traffics)
        if found is None:
            found = self._mixes[traffics] = {}
        return found


def _number(value: T, numbers: dict[T, int], values: list[T]) -> int:
    """Return the index of a value in `values`; append it if it is new."""
    number = numbers.setdefault(value, len(values))
    if number == len(values):
        values.append(value)
    return number


def costs_of(schedule: Schedule, profile: DeviceProfile) -> Costs:
    """Return the costs of a schedule on a machine, cached with the schedule."""
    base = schedule.like
    like = None if base is None else base.known_fact("costs", of=profile)
    return schedule.fact("costs", lambda: Costs(schedule, profile, like), of=profile)


class Machine:
    """The state of a simulation: `now` is the compute stream's clock, up to which the queues are simulated, too."""

    def __init__(self, costs: Costs, start: list[float], end: list[float]) -> None:
        """start, end: lists by position in the schedule, to which times are written."""
        self.costs = costs
        self.start, self.end = start, end
        self.now = 0.0
        self.host = 0.0
        self.idle = 0.0  # time that the compute stream waits for the host, and gaps between kernels
        self.exposed: dict[int, float] = {}  # collective -> time that the compute stream waits for it
        self.most_ahead = -math.inf  # largest lead of the host's clock over the stream's at a time when it matters
        self.running: list[int | None] = [None] * costs.queues  # the running collective, by queue
        self.left = [0.0] * costs.queues  # its remaining time without contention
        self.issued = [0] * costs.queues
        self.waiting: list[deque[tuple[int, float]]] = [
            deque() for _ in range(costs.queues)
        ]  # (collective, earliest start)
        self.queued = 0  # number of waiting collectives in all queues
        self.in_flight: set[int] = set()  # collectives that wait or run
        self.active: tuple[int, ...] = ()  # queues that run a collective
        self.traffic: tuple[int, ...] = ()  # the traffic of these collectives
        self.mixes: dict[int, Mix] = {}  # `Costs.mixes` for that traffic
        self.held = costs.profile.collectives_wait_for_kernels

    def run(self, nodes: Iterable[int]) -> None:
        """Simulate nodes, given by position in the schedule, in this order."""
        costs, start, end = self.costs, self.start, self.end
        steps, durations, loads, waits_for = costs.step, costs.ns, costs.load, costs.waits_for
        launch_ns, gap_ns, synchronous = costs.launch_ns, costs.gap_ns, costs.profile.synchronous
        compute, nothing, wait, begins = map(int, (StepKind.COMPUTE, StepKind.NOTHING, StepKind.WAIT, StepKind.START))
        for at in nodes:
            step = steps[at]
            if step == compute:
                self.host += launch_ns
                if len(self.active) != 1 or not self._computes_beside_one(at):
                    if gap_ns:
                        self._pass(self.now + gap_ns)
                    ahead = self.host - self.now
                    if ahead > self.most_ahead:
                        self.most_ahead = ahead
                    if ahead > 0:
                        if self.active or self.queued:
                            self._stand_until_host()
                        else:
                            self.idle += ahead
                            self.now = self.host
                    start[at] = self.now
                    if self.active or (self.queued and not self.held):
                        self._compute(durations[at], loads[at])
                    else:
                        self.now += durations[at]
                        if self.queued and durations[at]:
                            self._begin()
                    end[at] = self.now
            elif step == nothing:
                start[at] = end[at] = self.now
            elif step == wait:
                start[at] = self.now
                if waits_for[at] in self.in_flight:
                    self._stand_until_done(waits_for[at])
                end[at] = self.now
            elif step == begins:
                self.host += launch_ns
                self._enqueue(at)
            else:
                self.host += launch_ns
                self._pass(self.now + gap_ns)
                self.most_ahead = max(self.most_ahead, self.host - self.now)
                self._stand_until_host()
                self._enqueue(at)
                self._stand_until_done(at)
            if synchronous and self.now > self.host:
                self.host = self.now

    def finish(self) -> None:
        """Run all collectives to their end, because starts without a wait still end before the step does."""
        for queue, waiting in enumerate(self.waiting):
            last = waiting[-1][0] if waiting else self.running[queue]
            if last is not None:
                self._stand_until_done(last)

    def _enqueue(self, at: int) -> None:
        self.most_ahead = max(self.most_ahead, self.host - self.now)
        queue = self.costs.queue[at]
        self.waiting[queue].append((at, max(self.now, self.host)))
        self.issued[queue] += 1
        self.queued += 1
        self.in_flight.add(at)

    def _computes_beside_one(self, at: int) -> bool:
        """Simulate a kernel, with the idle time before it, beside the only running collective: the most frequent case.

        Return False without changes if that collective ends meanwhile, or if another one may begin.
        """
        costs, now = self.costs, self.now
        (queue,) = self.active
        left_ns = self.left[queue]
        gap_end = now + costs.gap_ns
        # Collectives waiting on this queue cannot begin while one runs on it. Those of another queue begin as soon as
        # the host has issued them, unless they wait for this kernel.
        if self.queued and (self.host > gap_end or not self.held) and self.queued != len(self.waiting[queue]):
            return False
        begin = now
        for until in (gap_end, self.host):
            if until > begin:
                _, (stretch,) = self.mixes.get(_NOTHING) or costs.mix(_NOTHING, self.traffic)
                if (left_ns * stretch + _ROUNDER) - _ROUNDER <= until - begin:
                    return False
                left_ns -= ((until - begin) / stretch + _ROUNDER) - _ROUNDER
                begin = until
        slow, (stretch,) = self.mixes.get(costs.load[at]) or costs.mix(costs.load[at], self.traffic)
        takes_ns = (costs.ns[at] * slow + _ROUNDER) - _ROUNDER  # on_grid inlined, in half the time
        if (left_ns * stretch + _ROUNDER) - _ROUNDER <= takes_ns:
            return False
        self.left[queue] = left_ns - ((takes_ns / stretch + _ROUNDER) - _ROUNDER)
        self.idle += begin - now
        if self.host - gap_end > self.most_ahead:
            self.most_ahead = self.host - gap_end
        self.start[at], self.end[at] = begin, begin + takes_ns
        self.now = begin + takes_ns
        if self.queued and takes_ns:
            self._begin()
        return True

    def _compute(self, left_ns: float, load: int) -> None:
        """Simulate compute of `left_ns` (without contention) beside the collectives in the queues."""
        begins = not self.held
        if begins:
            self._begin()
        while left_ns > 0:
            slow, stretches = self.mixes.get(load) or self.costs.mix(load, self.traffic)
            until = self._next_change(stretches, begins=begins)
            end = self.now + (left_ns if slow == 1.0 else on_grid(left_ns * slow))
            if end <= until:
                left_ns, until = 0.0, end
            else:
                left_ns -= on_grid((until - self.now) / slow)
            self._advance(until, stretches)
            if begins or left_ns <= 0:
                self._begin()

    def _stand_until_host(self) -> None:
        """Leave the compute stream idle until the host has launched the next node."""
        while self.now < self.host:
            self._begin()
            _, stretches = self.mixes.get(_NOTHING) or self.costs.mix(_NOTHING, self.traffic)
            until = min(self.host, self._next_change(stretches, begins=True))
            self.idle += until - self.now
            self._advance(until, stretches)

    def _stand_until_done(self, collective: int) -> None:
        """Block the compute stream until a collective is done; that time is exposed time of the queue's collectives."""
        queue = self.costs.queue[collective]
        while collective in self.in_flight:
            self._begin()
            _, stretches = self.mixes.get(_NOTHING) or self.costs.mix(_NOTHING, self.traffic)
            until = self._next_change(stretches, begins=True)
            head = self.running[queue]
            if head is None:
                self.idle += until - self.now
            elif until > self.now:
                self.exposed[head] = self.exposed.get(head, 0.0) + until - self.now
            self._advance(until, stretches)
            self._begin()

    def _pass(self, until: float) -> None:
        """Leave the compute stream idle up to `until`; no collective begins meanwhile."""
        self.idle += until - self.now
        while self.active and self.now < until:
            _, stretches = self.mixes.get(_NOTHING) or self.costs.mix(_NOTHING, self.traffic)
            self._advance(min(until, self._next_change(stretches, begins=False)), stretches)
        self.now = until

    def _begin(self) -> None:
        """Start the collectives at the heads of idle queues that may begin by now."""
        if not self.queued or (len(self.active) == 1 and self.queued == len(self.waiting[self.active[0]])):
            return  # all waiting collectives are behind the running one
        for queue, waiting in enumerate(self.waiting):
            if waiting and self.running[queue] is None and waiting[0][1] <= self.now:
                at, _ = waiting.popleft()
                self.queued -= 1
                self.running[queue], self.left[queue] = at, self.costs.ns[at]
                self.start[at] = self.now
                self.set_active()

    def set_active(self) -> None:
        """Update `active`, `traffic` and `mixes`; must be called when `running` changes."""
        self.active, self.traffic, self.mixes = self.costs.beside(tuple(self.running))

    def _next_change(self, stretches: tuple[float, ...], *, begins: bool) -> float:
        """Return the time at which the first running collective ends or, if `begins`, another one begins."""
        left, takes_ns = self.left, math.inf
        for queue, stretch in zip(self.active, stretches, strict=True):
            ns = left[queue] * stretch
            if ns < takes_ns:  # half the time of min(), in the hottest loop of the simulation
                takes_ns = ns
        until = self.now + ((takes_ns + _ROUNDER) - _ROUNDER)  # on_grid inlined, in half the time; so below
        if begins and self.queued:
            for queue, waiting in enumerate(self.waiting):
                if waiting and self.running[queue] is None:
                    until = min(until, max(self.now, waiting[0][1]))
        return until

    def _advance(self, until: float, stretches: tuple[float, ...]) -> None:
        """Move the clock to `until`, before which none of the running collectives ends."""
        span = until - self.now
        done = False
        for queue, stretch in zip(self.active, stretches, strict=True):
            # The same sum as in `_next_change`, so that a collective is done then even if long times are inexact.
            if self.now + ((self.left[queue] * stretch + _ROUNDER) - _ROUNDER) <= until:
                at = self.running[queue]
                assert at is not None
                self.end[at], self.running[queue], done = until, None, True
                self.in_flight.remove(at)
            else:
                self.left[queue] -= (span / stretch + _ROUNDER) - _ROUNDER
        self.now = until
        if done:
            self.set_active()
