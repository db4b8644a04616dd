"""Merge the collectives of one module into buckets: one launch over many tensors, without copies.

    a = all_gather(p) @dp unit=m; u = wait(a); x = kernel(u); b = all_gather(q) @dp unit=m; v = wait(b); y = kernel(v)
 -> a, b = all_gather(p, q) @dp unit=m node=a+1; u = wait(a); x = kernel(u); v = wait(b); y = kernel(v)

A bucket saves the latency of every collective but one, and ranks meet once for all of it. It costs waiting (no
result before the last one has arrived, none sent before the last one is computed) and memory. Which is why

- only collectives of one process group, kind, dtype and `Comm.unit` share a bucket, and no other unit's stands
  between them: what is needed at another time (the embedding and the head of one root module) stays apart;
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

from overlapc.passes.base import Context, PassReport, keep_if_better, register_pass
from overlapc.passes.queues import CARRIED_SHARE, COMPUTE
from overlapc.passes.reasons import Reason
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.model import Comm, Estimate, Kind, Node, Origin, Schedule

GATHERS = ("all_gather",)
REDUCTIONS = ("reduce_scatter", "all_reduce")
# A piece takes at least this many times the latency of one collective, so that latency is at most a tenth of it.
PIECE_FLOORS = 10.0


@register_pass("bucket")
def bucket(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Whole units first, then pieces; see the module."""
    report = PassReport("bucket")
    for everything_in_pieces in (False, True):
        merged, report = _merged(schedule, ctx, everything_in_pieces)
        kept, said = keep_if_better(schedule, merged, ctx, report)
        if kept is not schedule or merged is schedule:
            return kept, said
    undone = PassReport("bucket")
    for name, members in report.merged.items():
        for member in members:
            undone.because(member, said.limits[name])
    return schedule, undone


def _merged(schedule: Schedule, ctx: Context, pieces: bool) -> tuple[Schedule, PassReport]:
    """All rounds: one for collectives that are alike, each on what the one before left."""
    report = PassReport("bucket")
    alike = dict.fromkeys(
        _Alike.of(node.comm) for node in schedule.starts() if node.comm is not None and node.comm.unit
    )
    for collective in (*GATHERS, *REDUCTIONS):  # an all-reduce may need what a reduce-scatter brings
        for each in alike:
            if each.collective == collective:
                schedule = _Round(schedule, ctx, each, pieces, report).run()
    return schedule, report


@dataclass(frozen=True, slots=True)
class _Alike:
    """What collectives of one bucket have in common.

    One dtype: gloo's coalesced gather of several dtypes gives wrong numbers (torch 2.13), its all-reduce refuses.
    """

    collective: str
    group: str
    dtype: str
    size: int

    @classmethod
    def of(cls, comm: Comm) -> _Alike:
        return cls(comm.collective, comm.group, comm.dtype, comm.size)


@dataclass
class _Bucket:
    """Members by position, and what moves with them: in front of a gather, behind a reduction."""

    members: list[int]
    carried: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Sum:
    """What the estimate of a bucket is made of; members are added one by one."""

    first: Node | None = None
    count: int = 0
    bytes: int = 0
    apart_ns: float = 0.0  # one after the other
    longest_ns: float = 0.0
    known: bool = True

    def add(self, node: Node) -> None:
        self.first = self.first or node
        self.count += 1
        self.bytes += _comm(node).bytes
        self.apart_ns += _ns(node)
        self.longest_ns = max(self.longest_ns, _ns(node))
        self.known &= node.estimate is not None


class _Round:
    """Merging collectives that are alike. Nodes are positions."""

    def __init__(self, schedule: Schedule, ctx: Context, alike: _Alike, pieces: bool, report: PassReport) -> None:
        self.schedule = schedule
        self.nodes = schedule.nodes
        self.ctx = ctx
        self.alike = alike
        self.forward = alike.collective in GATHERS
        self.pieces = pieces
        self.report = report
        self.deps = dependencies.of(schedule)
        self.busy = [0.0]  # compute before each position, in ns
        for node in self.nodes:
            self.busy.append(self.busy[-1] + (_ns(node) if node.kind in COMPUTE else 0.0))
        self.waits: dict[int, list[int]] = {}
        for wait, start in schedule.started.items():
            self.waits.setdefault(start, []).append(wait)

    def run(self) -> Schedule:
        """The schedule with this round's buckets, or itself."""
        place = self._up if self.forward else self._down
        units = [place(run) for run in self._runs()]
        buckets: list[_Bucket] = []
        for placed, covered in zip(units, self._covered(units), strict=True):
            for each in placed:
                parts = [each.members] if covered and not self.pieces else self._cut(each.members)
                if len(parts) > 1:
                    for at in each.members:
                        self.report.because(self.nodes[at], Reason.PIECES)
                buckets += [each] if len(parts) == 1 else [found for part in parts for found in place(part)]
        merged = [(each, node) for each in buckets if len(each.members) > 1 and (node := self._node(each.members))]
        if self.ctx.most_buckets is not None:
            del merged[max(0, self.ctx.most_buckets - len(self.report.merged)) :]
        return self._rebuilt(merged) if merged else self.schedule

    # Which collectives belong together

    def _runs(self) -> Iterator[list[int]]:
        """Members of one unit between which no other unit's collective like them stands."""
        positions = [at for at, node in enumerate(self.nodes) if node.kind is Kind.START and self._is_ours(node)]
        for unit, run in groupby(positions, key=lambda at: _comm(self.nodes[at]).unit):
            if unit:
                yield list(run)

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
        total = _Sum()
        for at in members:
            total.add(self.nodes[at])
        return self._sum_ns(total)

    def _sum_ns(self, total: _Sum) -> float:
        estimate = self._estimate(total)
        return 0.0 if estimate is None else estimate.ns

    def _cut(self, members: list[int]) -> list[list[int]]:
        """Pieces in order, each no shorter than PIECE_FLOORS latencies."""
        least_ns = PIECE_FLOORS * self.ctx.profile.collective_latency_ns
        parts: list[list[int]] = []
        total = _Sum()
        for at in members:
            if not parts or self._sum_ns(total) >= least_ns:
                parts.append([])
                total = _Sum()
            parts[-1].append(at)
            total.add(self.nodes[at])
        if len(parts) > 1 and self._sum_ns(total) < least_ns:
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
        allowed_ns = CARRIED_SHARE * _ns(self.nodes[start])
        needs: set[int] = set()
        stack = [start]
        while stack:
            for before in self._preds(stack.pop()):
                if before < first or before in bucket.carried or before in needs:
                    continue
                node = self.nodes[before]
                cost_ns = _ns(node) if node.kind in COMPUTE else 0.0
                allowed_ns -= cost_ns
                if node.kind not in (*COMPUTE, Kind.VIEW, Kind.NOOP) or (cost_ns > 0 and allowed_ns < 0):
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
        return any(
            node.kind in (Kind.START, Kind.COMM) and node.comm is not None and node.comm.group == self.alike.group
            for node in self.nodes[low + 1 : high]
        )

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
        names = {node.name for node in nodes}
        total = _Sum()
        for node in nodes:
            total.add(node)
        first = nodes[0]
        comm = _comm(first)
        return Node(
            name=f"{first.name}+{len(nodes) - 1}",
            kind=Kind.START,
            op=first.op,
            reads=_joined(node.reads for node in nodes),
            writes=_joined(node.writes for node in nodes),
            after=tuple(name for name in _joined(node.after for node in nodes) if name not in names),
            comm=replace(comm, bytes=total.bytes),
            estimate=self._estimate(total),
            scratch_bytes=sum(node.scratch_bytes for node in nodes),
            origin=Origin(_joined(node.origin.fx for node in nodes), first.origin.source, comm.unit),
            payload=payload,
        )

    def _estimate(self, total: _Sum) -> Estimate | None:
        """One launch over all bytes: by whoever estimates, else the sum of the members less latencies saved."""
        first = total.first
        if first is None or first.estimate is None or not total.known:
            return None
        if total.count == 1:
            return first.estimate
        whole = replace(first, estimate=None, comm=replace(_comm(first), bytes=total.bytes))
        found = None if self.ctx.estimate is None else self.ctx.estimate(whole)
        if found is not None:
            return Estimate(min(found.ns, total.apart_ns), found.source)
        saved_ns = (total.count - 1) * self.ctx.profile.collective_latency_ns
        return Estimate(max(total.longest_ns, total.apart_ns - saved_ns), first.estimate.source)

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
            self.report.because(node, Reason.MERGED, _comm(node).unit)
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
    after = tuple(dict.fromkeys(renamed.get(name, name) for name in node.after))
    return replace(node, after=tuple(name for name in after if name != node.name))


def _ns(node: Node) -> float:
    return 0.0 if node.estimate is None else node.estimate.ns


def _comm(node: Node) -> Comm:
    assert node.comm is not None
    return node.comm


def _joined(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))
