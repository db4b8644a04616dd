"""Schedule builders and checks shared by the tests of schedules and passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import strategies as st

from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context, Pass, PassReport
from overlapc.schedule.collective_kinds import COPY
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Buffer, Comm, Estimate, Kind, Node, Schedule
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify


def order_of(schedule: Schedule) -> list[str]:
    """Return the names of the nodes in order."""
    return [node.name for node in schedule.nodes]


def check_pass(
    pass_fn: Pass,
    before: str,
    after: str,
    reasons: Mapping[str, str] | None = None,
    ctx: Context | None = None,
) -> PassReport:
    """Assert that the pass turns `before` into `after` (schedule texts) and reports these reasons.

    Also asserts the invariants of every pass (`check_invariants`). Returns the pass's report.
    """
    ctx = ctx or Context()
    schedule, expected = parse(before), parse(after)
    moved, report = pass_fn(schedule, ctx)
    assert order_of(moved) == order_of(expected), f"\n{moved}"
    for name, reason in (reasons or {}).items():
        assert report.reasons.get(name) == reason, report.reasons
    check_invariants(schedule, moved, ctx)
    return report


def check_order(pass_fn: Pass, before: str, after: str, ctx: Context) -> None:
    """Assert that the pass reorders the schedule `before` into `after` (node names) and keeps the invariants."""
    schedule = parse(before)
    moved, _ = pass_fn(schedule, ctx)
    check_invariants(schedule, moved, ctx)
    assert " ".join(order_of(moved)) == after


def check_invariants(schedule: Schedule, moved: Schedule, ctx: Context) -> None:
    """Assert the invariants of every pass: a valid schedule, the order of collectives, the memory limit, and a
    simulated step no slower than before."""
    verify(
        moved,
        "test",
        reference=schedule,
        may_reorder_collectives=ctx.reorder_collectives,
        limit_bytes=ctx.limit_bytes(schedule),
    )
    assert simulate(moved, ctx.profile).step_ns <= simulate(schedule, ctx.profile).step_ns * (1 + 1e-9)


def make(name: str, nodes: list[Node], buffers: list[Buffer], outputs: tuple[str, ...] = ()) -> Schedule:
    """Return a schedule of these nodes and buffers."""
    return Schedule(name, tuple(nodes), {buffer.name: buffer for buffer in buffers}, outputs)


def by_copies(schedule: Schedule) -> Schedule:
    """Return the schedule with all collectives by copies."""
    nodes = (node if node.comm is None else replace(node, comm=replace(node.comm, via=COPY)) for node in schedule.nodes)
    return replace(schedule, nodes=tuple(nodes))


@st.composite
def schedules(draw: st.DrawFn, most_nodes: int = 14) -> Schedule:
    """Draw valid schedules: kernels, views, in-place updates, collectives on two groups, barriers, weak edges."""
    buffers: list[Buffer] = []
    nodes: list[Node] = []
    values: list[str] = []  # names that may be read
    in_flight: list[tuple[str, tuple[str, ...]]] = []  # (output of a start, root buffers that its collective reads)
    root: dict[str, str] = {}

    def define(buffer: Buffer) -> None:
        buffers.append(buffer)
        root[buffer.name] = buffer.name if buffer.alias_of is None else root[buffer.alias_of]

    def size() -> int:
        return draw(st.integers(0, 8))

    def pick(count: int) -> tuple[str, ...]:
        return tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=count, unique=True)))

    def time() -> Estimate | None:
        ns = draw(st.one_of(st.none(), st.integers(0, 20)))
        return None if ns is None else Estimate(float(ns), "given")

    for number in range(draw(st.integers(1, 3))):
        define(Buffer(f"p{number}", size(), is_input=True, freeable=draw(st.booleans())))
        values.append(f"p{number}")
    kinds = ["kernel", "kernel", "start", "start", "view", "mutate", "wait", "comm"]
    for number in range(draw(st.integers(1, most_nodes))):
        what = draw(st.sampled_from(kinds))
        name = f"n{number}"
        after = tuple(draw(st.lists(st.sampled_from([n.name for n in nodes]), max_size=1))) if nodes else ()
        if what == "wait" and in_flight:
            started, _ = in_flight.pop(draw(st.integers(0, len(in_flight) - 1)))
            define(Buffer(name, 0, alias_of=started))
            nodes.append(Node(name, Kind.WAIT, "wait", (started,), (name,), after=after))
            values.append(name)
        elif what in ("start", "comm"):
            reads = pick(2)
            kind = Kind.START if what == "start" else Kind.COMM
            coalesced = kind is Kind.START and draw(st.booleans())
            writes = (name, f"{name}b") if coalesced else (name,)
            for written in writes:
                define(Buffer(written, size()))
            group = draw(st.sampled_from(["dp", "tp"]))
            size_bytes = sum(buffer.bytes for buffer in buffers[-len(writes) :])
            safe = kind is Kind.COMM and draw(st.booleans())
            comm = Comm("all_gather", size_bytes, group, 2, safe=safe)
            op = "all_gather" if kind is Kind.START else "sync_gather"
            nodes.append(Node(name, kind, op, reads, writes, after=after, comm=comm, estimate=time()))
            if kind is Kind.START:
                in_flight += [(written, tuple(root[read] for read in reads)) for written in writes]
            else:
                values.append(name)
        elif what == "view":
            reads = pick(1)
            define(Buffer(name, 0, alias_of=reads[0]))
            nodes.append(Node(name, Kind.VIEW, "view", reads, (name,), after=after))
            values.append(name)
        elif what == "mutate":
            busy = {used for _, uses in in_flight for used in uses}
            free = [value for value in values if root[value] not in busy]
            if not free:
                continue
            target = draw(st.sampled_from(free))
            values = [value for value in values if root[value] != root[target]]
            define(Buffer(name, 0, alias_of=target))
            nodes.append(Node(name, Kind.EXTERN, "add_", (target,), (name,), (target,), after=after, estimate=time()))
            values.append(name)
        else:
            reads = pick(3)
            define(Buffer(name, size()))
            nodes.append(
                Node(
                    name, Kind.KERNEL, "kernel", reads, (name,), after=after, estimate=time(),
                    scratch_bytes=draw(st.integers(0, 2)),
                )
            )  # fmt: skip
            values.append(name)
    for number, (started, _) in enumerate(in_flight):
        define(Buffer(f"w{number}", 0, alias_of=started))
        nodes.append(Node(f"w{number}", Kind.WAIT, "wait", (started,), (f"w{number}",)))
        values.append(f"w{number}")
    outputs = tuple(draw(st.lists(st.sampled_from(values), max_size=3, unique=True)))
    return make("random", nodes, buffers, outputs)


@st.composite
def reordered(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """Draw another valid order of `schedule`."""
    from overlapc.schedule import dependencies

    deps = dependencies.of(schedule)
    missing = [len(set(preds)) for preds in deps.preds]
    ready = [at for at, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        at = ready.pop(draw(st.integers(0, len(ready) - 1)))
        order.append(at)
        for after in deps.succs[at]:
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    return schedule.replace_order(schedule.nodes[at].name for at in order)


def peak(schedule: Schedule) -> int:
    """Return the peak memory of a schedule, in bytes."""
    return analyze(schedule).peak_bytes
