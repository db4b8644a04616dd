"""Merge the collectives of one module into buckets: one launch over many tensors, without copies.

    a = all_gather(p) @dp unit=m; u = wait(a); x = kernel(u); b = all_gather(q) @dp unit=m; v = wait(b); y = kernel(v)
 -> a, b = all_gather(p, q) @dp unit=m node=a+1; u = wait(a); x = kernel(u); v = wait(b); y = kernel(v)

A bucket saves the latency of every collective but one, and ranks meet once for all of it. It costs waiting (no
result before the last one has arrived, none sent before the last one is computed) and memory. Which is why

- only collectives of one process group, kind and `Comm.unit` share a bucket, all-reduces of one dtype, and no other
  unit's stands between them: what is needed at another time (embedding and head of one root module) stays apart;
- units that nothing covers and that are mostly latency (many ranks, small parameters) are joined with their
  neighbours, if that simulates faster than each on its own;
- gathers start where the first of them did, with the casts and views that the others need in front; reductions where
  the last did, with what reads them behind. A collective that cannot move there begins a bucket of its own;
- a bucket that no compute can cover (the first gathers of a step, the last reductions) is cut into pieces, each
  long enough that latency does not matter: so the first is there sooner, and the last is shorter;
- if whole buckets exceed the memory limit or simulate slower, all are cut into pieces; if those do too, none is made.

Keeps: data dependences, mutations and barriers. Collectives of a group are passed only where
`Context.reorder_collectives` allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.bucket_cost import BucketCost, Sum, comm_of, ns_of
from overlapc.passes.judge import keep_if_better
from overlapc.passes.queues import CARRIED_SHARE
from overlapc.passes.reasons import Reason
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.model import COMPUTE, Comm, Kind, Node, Origin, Schedule

GATHERS = ("all_gather",)
REDUCTIONS = ("reduce_scatter", "all_reduce")
OF_ONE_DTYPE = ("all_reduce",)  # codegen/bucket.py says why
# A piece takes at least this many times the latency of one collective, so that latency is at most a tenth of it.
PIECE_FLOORS = 10.0
# A bucket that takes at most this many latencies would hardly take longer with more in it.
LATENCY_BOUND = 2.0


@register_pass("bucket")
def bucket(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Whole units first, then pieces; see the module."""
    across, report, joined = _merged(schedule, ctx, across=True)
    kept, said = keep_if_better(schedule, across, ctx, report)
    if joined:
        within, report, _ = _merged(schedule, ctx)
        kept, said = _better((kept, said), keep_if_better(schedule, within, ctx, report), ctx)
    if kept is schedule and across is not schedule:
        in_pieces, report, _ = _merged(schedule, ctx, pieces=True)
        kept, said = keep_if_better(schedule, in_pieces, ctx, report)
    if kept is not schedule or not report.merged:
        return kept, said
    undone = PassReport("bucket", counted=True)
    for name, members in report.merged.items():
        for member in members:
            undone.because(member, said.limits[name])
    return schedule, undone


def _better(
    one: tuple[Schedule, PassReport], other: tuple[Schedule, PassReport], ctx: Context
) -> tuple[Schedule, PassReport]:
    steps_ns = [simulate(each, ctx.profile).step_ns for each, _ in (one, other)]
    return one if steps_ns[0] < steps_ns[1] else other


def _merged(
    schedule: Schedule, ctx: Context, *, across: bool = False, pieces: bool = False
) -> tuple[Schedule, PassReport, bool]:
    """All rounds, one for collectives that are alike, each on what the one before left; whether units were joined.

    across: units that nothing covers and that are mostly latency may share a bucket. pieces: every bucket is cut.
    """
    report, joined = PassReport("bucket", counted=True), False
    alike = dict.fromkeys(
        _Alike.of(comm_of(node)) for node in schedule.starts() if node.comm and node.comm.unit and not node.mutates
    )
    for collective in (*GATHERS, *REDUCTIONS):  # an all-reduce may need what a reduce-scatter brings
        for each in alike:
            if each.collective == collective:
                round_ = _Round(schedule, ctx, each, across, pieces, report)
                schedule = round_.run()
                joined |= round_.joined
    return schedule, report, joined


@dataclass(frozen=True, slots=True)
class _Alike:
    """What collectives of one bucket have in common."""

    collective: str
    group: str
    dtype: str  # "" where it does not matter
    size: int

    @classmethod
    def of(cls, comm: Comm) -> _Alike:
        return cls(comm.collective, comm.group, comm.dtype if comm.collective in OF_ONE_DTYPE else "", comm.size)


@dataclass
class _Bucket:
    """Members by position, and what moves with them: in front of a gather, behind a reduction."""

    members: list[int]
    carried: set[int] = field(default_factory=set)


class _Round:
    """Merging collectives that are alike. Nodes are positions."""

    def __init__(
        self, schedule: Schedule, ctx: Context, alike: _Alike, across: bool, pieces: bool, report: PassReport
    ) -> None:
        self.schedule = schedule
        self.nodes = schedule.nodes
        self.ctx = ctx
        self.alike = alike
        self.forward = alike.collective in GATHERS
        self.across = across
        self.pieces = pieces
        self.joined = False  # whether a run holds more than one unit
        self.report = report
        self.deps = dependencies.of(schedule)
        self.busy = [0.0]  # compute before each position, in ns
        for node in self.nodes:
            self.busy.append(self.busy[-1] + (ns_of(node) if node.kind in COMPUTE else 0.0))
        self.ours = [at for at, node in enumerate(self.nodes) if node.kind is Kind.START and self._is_ours(node)]
        self.cost = BucketCost(ctx, self.nodes[self.ours[0]])
        self.waits: dict[int, list[int]] = {}
        for wait, start in schedule.started.items():
            self.waits.setdefault(start, []).append(wait)

    def run(self) -> Schedule:
        """The schedule with this round's buckets, or itself."""
        place = self._up if self.forward else self._down
        runs = self._runs()
        units = [place(run) for run in runs]
        if self.across:
            joined = self._joined(runs, self._covered(units))
            self.joined = len(joined) < len(runs)
            units = [place(run) for run in joined] if self.joined else units
        buckets: list[_Bucket] = []
        for placed, covered in zip(units, self._covered(units), strict=True):
            for each in placed:
                parts = [each.members] if covered and not self.pieces else self._cut(each.members)
                if len(parts) > 1:
                    for at in each.members:
                        self.report.because(self.nodes[at], Reason.PIECES)
                buckets += [found for part in parts for found in place(part)]
        merged = [(each, node) for each in buckets if len(each.members) > 1 and (node := self._node(each.members))]
        if self.ctx.most_moves is not None:
            del merged[self.ctx.most_moves - len(self.report.merged) :]
        return self._rebuilt(merged) if merged else self.schedule

    # Which collectives belong together

    def _runs(self) -> list[list[int]]:
        """Members of one unit between which no other unit's collective like them stands."""
        runs = [(unit, list(run)) for unit, run in groupby(self.ours, key=lambda at: comm_of(self.nodes[at]).unit)]
        return [run for unit, run in runs if unit]

    def _joined(self, runs: list[list[int]], covered: Sequence[bool]) -> list[list[int]]:
        """Runs that nothing covers and that are mostly latency, with the next ones like them until they are not.

        No further: the next bucket is to travel while this one's compute runs.
        """
        number = {at: number for number, at in enumerate(self.ours)}
        joined: list[list[int]] = []
        open_ns = 0.0  # of the last run, while others may join it
        for run, hidden in zip(runs, covered, strict=True):
            run_ns = self._bucket_ns(run)
            bound = not hidden and 0 < run_ns <= LATENCY_BOUND * self.cost.latency_ns
            follows = bool(joined) and number[joined[-1][-1]] + 1 == number[run[0]]
            if bound and follows and 0 < open_ns <= LATENCY_BOUND * self.cost.latency_ns:
                joined[-1] = [*joined[-1], *run]
                open_ns = self._bucket_ns(joined[-1])
            else:
                joined.append(run)
                open_ns = run_ns if bound else 0.0
        return joined

    def _is_ours(self, node: Node) -> bool:
        return node.comm is not None and not node.mutates and _Alike.of(node.comm) == self.alike

    def _covered(self, units: Sequence[list[_Bucket]]) -> list[bool]:
        """Whether compute can hide each unit at all, if everything on the queue starts as soon as it can.

        Gathers count from the front of the schedule, each needed at its first wait; reductions count from its end.
        """
        order = range(len(units)) if self.forward else range(len(units) - 1, -1, -1)
        covered = [True] * len(units)
        stood_ns = queue_ns = 0.0
        for number in order:
            members = [at for each in units[number] for at in each.members]
            longer = self.ctx.overlap_margin * self.ctx.profile.collective_slowdown
            queue_ns += self._bucket_ns(members) * longer
            if self.forward:
                first = min((wait for at in members for wait in self.waits.get(at, ())), default=len(self.nodes))
                reached_ns = self.busy[first]
            else:
                reached_ns = self.busy[-1] - self.busy[max(members)]
            covered[number] = queue_ns <= reached_ns + stood_ns
            stood_ns = max(stood_ns, queue_ns - reached_ns)
        return covered

    def _bucket_ns(self, members: Sequence[int]) -> float:
        return self.cost.ns(Sum.of(self.nodes[at] for at in members))

    def _cut(self, members: list[int]) -> list[list[int]]:
        """Pieces in order, each no shorter than PIECE_FLOORS latencies."""
        least_ns = PIECE_FLOORS * self.cost.latency_ns
        parts: list[list[int]] = []
        total = Sum()
        for at in members:
            if not parts or self.cost.ns(total) >= least_ns:
                parts.append([])
                total = Sum()
            parts[-1].append(at)
            total.add(self.nodes[at])
        if len(parts) > 1 and self.cost.ns(total) < least_ns:
            parts[-2:] = [parts[-2] + parts[-1]]
        return parts

    # Where a bucket can stand

    def _up(self, run: list[int]) -> list[_Bucket]:
        """Gathers move up to the first of them, if what they need is cheap and may come along."""
        buckets: list[_Bucket] = []
        for at in run:
            if buckets:
                current = buckets[-1]
                needs = self._needs(at, current)
                if needs is not None:
                    current.members.append(at)
                    current.carried |= needs
                    continue
            buckets.append(_Bucket([at]))
        return buckets

    def _needs(self, start: int, bucket: _Bucket) -> set[int] | None:
        """What has to come along for `start` to join a bucket of gathers; None when that is too much."""
        if not self.ctx.reorder_collectives and self._passes_others(bucket.members[-1], start):
            return None
        first = bucket.members[0]
        allowed_ns = CARRIED_SHARE * ns_of(self.nodes[start])
        needs: set[int] = set()
        stack = [start]
        while stack:
            for before in self._preds(stack.pop()):
                if before < first or before in bucket.carried or before in needs:
                    continue
                node = self.nodes[before]
                allowed_ns -= ns_of(node)
                if node.kind not in (*COMPUTE, Kind.VIEW, Kind.NOOP) or allowed_ns < 0:
                    self.report.because(self.nodes[start], Reason.DATA, node.name)
                    return None
                needs.add(before)
                stack.append(before)
        return needs

    def _down(self, run: list[int]) -> list[_Bucket]:
        """Reductions move down to the last of them, and what needs the earlier ones with them."""
        buckets: list[_Bucket] = []
        held: set[int] = set()  # members, and what needs them, so far
        behind: set[int] = set()
        for number, at in enumerate(run):
            if number:
                for between in range(run[number - 1] + 1, at):
                    if any(before in held for before in self._preds(between)):
                        held.add(between)
                        behind.add(between)
            joins = bool(buckets) and self._may_sink(behind, buckets[-1].members[-1], at)
            if joins and any(before in held for before in self._preds(at)):
                self.report.because(self.nodes[at], Reason.DATA, self.nodes[buckets[-1].members[0]].name)
                joins = False
            if joins:
                buckets[-1].members.append(at)
                buckets[-1].carried |= behind
            else:
                buckets.append(_Bucket([at]))
                held, behind = set(), set()
            held.add(at)
        return buckets

    def _may_sink(self, behind: Iterable[int], last: int, at: int) -> bool:
        """Whether the order of collectives allows it; barriers are dependences already."""
        if self.ctx.reorder_collectives:
            return True
        return not self._passes_others(last, at) and all(self.nodes[b].kind is not Kind.START for b in behind)

    def _passes_others(self, low: int, high: int) -> bool:
        """Whether another collective of the group stands between two members."""
        return any(node.group == self.alike.group for node in self.nodes[low + 1 : high])

    def _preds(self, at: int) -> Iterator[int]:
        why = self.deps.why
        return (before for before in self.deps.preds[at] if why[before, at] is not Why.COLLECTIVE_ORDER)

    # The merged nodes

    def _node(self, members: Sequence[int]) -> Node | None:
        nodes = [self.nodes[at] for at in members]
        payload = None
        if any(node.payload is not None for node in nodes):
            merge = self.ctx.merge_payloads
            payload = "no code for buckets" if merge is None else merge([node.payload for node in nodes])
            if isinstance(payload, str):
                for node in nodes:
                    self.report.because(node, Reason.NO_BUCKET, payload)
                return None
        dtypes = {comm_of(node).dtype for node in nodes}
        total = Sum.of(nodes)
        first = nodes[0]
        comm = comm_of(first)
        return Node(
            name=f"{first.name}+{len(nodes) - 1}",
            kind=Kind.START,
            op=first.op,
            reads=_joined(node.reads for node in nodes),
            writes=_joined(node.writes for node in nodes),
            after=_joined(node.after for node in nodes),
            comm=replace(comm, bytes=total.bytes, dtype=comm.dtype if len(dtypes) == 1 else "mixed"),
            estimate=self.cost.estimate(total),
            scratch_bytes=sum(node.scratch_bytes for node in nodes),
            origin=Origin(_joined(node.origin.fx for node in nodes), first.origin.source, comm.unit),
            payload=payload,
        )

    def _rebuilt(self, merged: Sequence[tuple[_Bucket, Node]]) -> Schedule:
        """A new schedule: its order is the one that dependences among collectives count from."""
        gone: set[int] = set()
        instead: dict[int, list[Node]] = {}
        renamed: dict[str, str] = {}
        for each, node in merged:
            members = [self.nodes[at] for at in each.members]
            self.report.merged[node.name] = tuple(
                name for member in members for name in self.report.merged.pop(member.name, (member.name,))
            )
            self.report.because(node, Reason.MERGED, comm_of(node).unit)
            for at, member in zip(each.members, members, strict=True):
                renamed[member.name] = node.name
                self.report.reasons.pop(member.name, None)
                self.report.limits.pop(member.name, None)
                gone.add(at)
            gone.update(each.carried)
            carried = [self.nodes[at] for at in sorted(each.carried)]
            self.report.moved(node, abs(each.members[-1] - each.members[0]))
            if self.forward:
                instead[each.members[0]] = [*carried, node]
            else:
                instead[each.members[-1]] = [node, *carried]
        order: list[Node] = []
        for at, node in enumerate(self.nodes):
            order += instead.get(at, ())
            if at not in gone:
                order.append(node)
        nodes = tuple(_after_renamed(node, renamed) for node in order)
        return Schedule(
            self.schedule.name, nodes, self.schedule.buffers, self.schedule.outputs, self.schedule.budget_bytes
        )


def _after_renamed(node: Node, renamed: dict[str, str]) -> Node:
    if not any(name in renamed for name in node.after):
        return node
    return replace(node, after=tuple(dict.fromkeys(renamed.get(name, name) for name in node.after)))


def _joined(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))
