"""The simulator: replays a schedule on its resources. The one source of exposed time.

Resources are the host, which launches in order; one compute stream, which runs in order; and one queue per
process group, which runs its collectives in the order they were started. A collective begins when its
queue is free, the host has issued it, and the compute stream has done everything launched before it (as
NCCL's does, which synchronizes with the stream it is called from); where the profile says so, one that comes while a
kernel runs waits for it too. A wait holds the compute stream until its collective is done. A COMM node runs on its
queue while the compute stream stands still.

While both run they slow each other, as contention.py says. Time that the compute stream stands still at a
wait is *exposed*; it belongs to whichever collective of that queue is running then, so each collective's
exposed time is part of its duration, hidden = duration - exposed is never negative, and

    step = compute (with slowdown) + exposed + launch-bound idle time.

Linear in the nodes: an event is the end of a node or of a collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from overlapc.estimators.bound import lower_bound_ns
from overlapc.estimators.contention import Load, Traffic, collective_stretches, compute_stretch, load_of, traffic_of
from overlapc.estimators.device import IDEAL, DeviceProfile
from overlapc.schedule.model import Kind, Node, Schedule

_COMPUTE = (Kind.KERNEL, Kind.EXTERN)


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """When a collective ran and how much of that the compute stream stood still for it."""

    start_ns: float
    end_ns: float
    exposed_ns: float

    @property
    def hidden_ns(self) -> float:
        """The part of its duration that compute ran beside."""
        return max(0.0, self.end_ns - self.start_ns - self.exposed_ns)


@dataclass(frozen=True)
class Timeline:
    """A replay. `start_ns` and `end_ns` count by position in `schedule.nodes`.

    Of a START they are when its collective ran, not when it was issued (`issued_ns`); of a WAIT when the
    compute stream arrived and when it went on.
    """

    schedule: Schedule
    profile: DeviceProfile
    start_ns: tuple[float, ...]
    end_ns: tuple[float, ...]
    step_ns: float
    collectives: Mapping[str, CollectiveTime]  # every START and COMM, by node name
    launch_idle_ns: float  # the compute stream waiting for the host, and between kernels
    unknown: tuple[str, ...] = field(default=())  # nodes without an estimate, replayed as taking no time

    @property
    def exposed_ns(self) -> float:
        """Exposed time of all collectives together."""
        return sum(each.exposed_ns for each in self.collectives.values())

    @property
    def hidden_ns(self) -> float:
        """Hidden time of all collectives together."""
        return sum(each.hidden_ns for each in self.collectives.values())

    @property
    def compute_ns(self) -> float:
        """Time the compute stream was busy, slowdown by collectives included."""
        return sum(
            end - start
            for node, start, end in zip(self.schedule.nodes, self.start_ns, self.end_ns, strict=True)
            if node.kind in _COMPUTE
        )

    @cached_property
    def lower_bound_ns(self) -> float:
        """No order of these nodes takes less; see bound.py."""
        return lower_bound_ns(self.schedule, self.profile)

    def span(self, name: str) -> tuple[float, float]:
        """(start, end) of a node in ns."""
        at = self.schedule.position(name)
        return self.start_ns[at], self.end_ns[at]


def simulate(schedule: Schedule, profile: DeviceProfile = IDEAL) -> Timeline:
    """Replay `schedule` in its present order. Nodes without an estimate take no time and are listed."""
    return _Replay(schedule, profile).run()


@dataclass(slots=True)
class _Running:
    """A collective in its queue."""

    at: int  # position of its START or COMM
    left_ns: float  # of its duration, undisturbed
    ready_ns: float  # not before this
    traffic: Traffic
    begun: bool = False


class _Replay:
    """The state of a replay: `now` is the compute stream's clock, and queues have been run up to it."""

    def __init__(self, schedule: Schedule, profile: DeviceProfile) -> None:
        self.schedule = schedule
        self.profile = profile
        self.now = 0.0
        self.host = 0.0
        self.launch_idle = 0.0
        count = len(schedule.nodes)
        self.start = [0.0] * count
        self.end = [0.0] * count
        self.done = [False] * count
        self.exposed = [0.0] * count
        self.queues: dict[str, deque[_Running]] = {}
        self.group: list[str] = ["" if node.comm is None else node.comm.group for node in schedule.nodes]

    def run(self) -> Timeline:
        waits_for = self.schedule.started
        launch_ns, synchronous = self.profile.launch_ns, self.profile.synchronous
        unknown = []
        for at, node in enumerate(self.schedule.nodes):
            kind = node.kind
            if node.estimate is None and kind in (Kind.KERNEL, Kind.EXTERN, Kind.START, Kind.COMM):
                unknown.append(node.name)
            if kind in (Kind.VIEW, Kind.NOOP):
                self.start[at] = self.end[at] = self.now
                continue
            if kind is Kind.WAIT:
                self.start[at] = self.now
                if at in waits_for:
                    self._stand_until_done(waits_for[at])
                self.end[at] = self.now
            else:
                self.host += launch_ns
                if kind is Kind.START:
                    self._enqueue(at, node)
                else:
                    self._pass(self.now + self.profile.kernel_gap_ns)
                    self._stand_until_host()
                    self.start[at] = self.now
                    if kind is Kind.COMM:
                        self._enqueue(at, node)
                        self._stand_until_done(at)
                        self.now = max(self.now, self.end[at])
                    else:
                        self._compute(node)
                        self.end[at] = self.now
            if synchronous and self.now > self.host:
                self.host = self.now
        for queue in self.queues.values():  # starts that nobody waits for still end with the step
            while queue:
                self._stand_until_done(queue[-1].at)
        return self._timeline(tuple(unknown))

    def _timeline(self, unknown: tuple[str, ...]) -> Timeline:
        collectives = {
            node.name: CollectiveTime(self.start[at], self.end[at], self.exposed[at])
            for at, node in enumerate(self.schedule.nodes)
            if node.kind in (Kind.START, Kind.COMM)
        }
        return Timeline(
            self.schedule, self.profile, tuple(self.start), tuple(self.end), self.now, collectives,
            self.launch_idle, unknown,
        )  # fmt: skip

    def _enqueue(self, at: int, node: Node) -> None:
        left_ns = node.estimate.ns if node.estimate is not None else 0.0
        queue = self.queues.setdefault(self.group[at], deque())
        ready_ns = max(self.now, self.host)
        queue.append(_Running(at, left_ns, ready_ns, traffic_of(node, self.profile)))

    def _compute(self, node: Node) -> None:
        """Run `node` on the compute stream beside whatever is in the queues."""
        left_ns = node.estimate.ns if node.estimate is not None else 0.0
        load = load_of(node) if self.queues else None
        held = self.profile.collectives_wait_for_kernels
        if not held:
            self._begin()
        while left_ns > 0:
            running, stretches = self._running(load)
            until = self._next_change(running, stretches, begins=not held)
            slow = compute_stretch(load, [each.traffic for each in running], self.profile) if load and running else 1.0
            end = self.now + left_ns * slow
            if end <= until:
                left_ns, until = 0.0, end
            else:
                left_ns -= (until - self.now) / slow
            self._advance(until, running, stretches)
            if not held or left_ns <= 0:
                self._begin()

    def _stand_until_host(self) -> None:
        """The compute stream has nothing to do until the host has launched the next node."""
        while self.now < self.host:
            self._begin()
            running, stretches = self._running()
            until = min(self.host, self._next_change(running, stretches, begins=True))
            self.launch_idle += until - self.now
            self._advance(until, running, stretches)

    def _stand_until_done(self, at: int) -> None:
        """The compute stream stands still until a collective is done; that is its queue's exposed time."""
        queue = self.queues.get(self.group[at])
        while not self.done[at]:
            assert queue, f"{self.schedule.nodes[at].name} was waited for before it was started"
            self._begin()
            (running, stretches), head = self._running(), queue[0]
            until = self._next_change(running, stretches, begins=True)
            if head.begun:
                self.exposed[head.at] += until - self.now
            else:
                self.launch_idle += until - self.now
            self._advance(until, running, stretches)
            self._begin()

    def _pass(self, until: float) -> None:
        """The compute stream has nothing to do up to `until`, and what has not begun does not begin meanwhile."""
        while self.now < until:
            running, stretches = self._running()
            next_ns = min(until, self._next_change(running, stretches, begins=False))
            self.launch_idle += next_ns - self.now
            self._advance(next_ns, running, stretches)

    def _begin(self) -> None:
        """Collectives at the head of their queues that may run by now do so."""
        for queue in self.queues.values():
            if queue and not queue[0].begun and queue[0].ready_ns <= self.now:
                queue[0].begun = True
                self.start[queue[0].at] = self.now

    def _running(self, load: Load | None = None) -> tuple[list[_Running], list[float]]:
        """The collectives that run now, and how many times as long each takes beside the others and `load`."""
        running = [queue[0] for queue in self.queues.values() if queue and queue[0].begun]
        if not running:
            return running, []
        return running, collective_stretches(load, [each.traffic for each in running], self.profile)

    def _next_change(self, running: list[_Running], stretches: list[float], *, begins: bool) -> float:
        """When the first of these ends, or (begins) another collective begins."""
        until = float("inf")
        if running:
            for each, stretch in zip(running, stretches, strict=True):
                until = min(until, self.now + each.left_ns * stretch)
        if begins:
            for queue in self.queues.values():
                if queue and not queue[0].begun:
                    until = min(until, max(self.now, queue[0].ready_ns))
        return until

    def _advance(self, until: float, running: list[_Running], stretches: list[float]) -> None:
        """Move the clock to `until`, before which none of the running collectives ends."""
        if running:
            span = until - self.now
            for each, stretch in zip(running, stretches, strict=True):
                if self.now + each.left_ns * stretch <= until:
                    self._finish(each, until)
                else:
                    each.left_ns -= span / stretch
        self.now = max(self.now, until)

    def _finish(self, head: _Running, now: float) -> None:
        queue = self.queues[self.group[head.at]]
        queue.popleft()
        self.end[head.at] = now
        self.done[head.at] = True
        if queue:
            queue[0].ready_ns = max(now, queue[0].ready_ns)
