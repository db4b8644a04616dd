"""Merge kernels of one kind that the same node needs into one launch: the casts in front of a bucket's gather.

    c = kernel(p); d = kernel(q); a, b = all_gather(c, d) @dp node=a+1
 -> c, d = kernel(p, q) node=c+1; a, b = all_gather(c, d) @dp node=a+1

A launch costs host time and a gap on the device, which is more than a small kernel takes. Fusion cannot merge them:
before bucketing, each cast stands in front of a gather of its own, which would wait for the other casts. Here none
waits longer: the first node that reads any of them reads all of them, or none is read, as with sums of gradients.

Keeps: data dependences, and the order of collectives. Runs after all orders are chosen: ranks with different shards
have different kernels, and their orders must not depend on that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.judge import keep_if_better
from overlapc.passes.merging import merged_node, with_merged
from overlapc.schedule import dependencies
from overlapc.schedule.model import Estimate, Kind, Node, Schedule, Work


@register_pass("share_launches")
def share_launches(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Merge kernels; each launch stands where the last of its kernels did."""
    report = PassReport("share_launches", counted=True)
    inserted: dict[int, tuple[Node]] = {}
    removed: set[int] = set()
    renamed: dict[str, str] = {}
    for members in _alike(schedule, ctx):
        for launch, parts in _launches([schedule.nodes[at] for at in members], ctx):
            if ctx.most_moves is not None and len(inserted) >= ctx.most_moves:
                break
            positions = [schedule.position(part.name) for part in parts]
            inserted[positions[-1]] = (launch,)
            removed.update(positions)
            renamed.update((part.name, launch.name) for part in parts)
            report.merged[launch.name] = tuple(part.name for part in parts)
            report.moved(launch, positions[-1] - positions[0])
    if not inserted:
        return schedule, report
    limit = ctx.limit_bytes(schedule)
    final = replace(ctx, budget_bytes=limit if ctx.final_bytes is None else min(limit, ctx.final_bytes))
    return keep_if_better(schedule, with_merged(schedule, inserted, removed, renamed), final, report)


def _alike(schedule: Schedule, ctx: Context) -> Iterator[list[int]]:
    """Yield positions of adjacent kernels of one kind that have the same first reader, or no reader at all."""
    if ctx.kernel_kind is None:
        return
    succs = dependencies.of(schedule).succs
    for is_kernel, run in groupby(range(len(schedule.nodes)), lambda at: schedule.nodes[at].kind is Kind.KERNEL):
        readers: dict[str, list[int]] = {}
        for at in run if is_kernel else ():
            reader = schedule.first_reader(schedule.nodes[at])
            readers.setdefault("" if reader is None else reader.name, []).append(at)
        for positions in readers.values():
            kinds: dict[Hashable, list[int]] = {}
            for at in positions if len(positions) > 1 else ():
                kind = ctx.kernel_kind(schedule.nodes[at].payload)
                # No node in between reads the kernel's result, but one may overwrite its input.
                if kind is not None and all(after > positions[-1] for after in succs[at]):
                    kinds.setdefault(kind, []).append(at)
            yield from (members for members in kinds.values() if len(members) > 1)


def _launches(members: Sequence[Node], ctx: Context) -> Iterator[tuple[Node, Sequence[Node]]]:
    """Yield launches with their members: one of all `members`, or of each half if they cannot be merged."""
    if len(members) < 2:
        return
    assert ctx.merge_payloads is not None, "a Context with kernel_kind must have merge_payloads, too"
    payload = ctx.merge_payloads([member.payload for member in members])
    if isinstance(payload, str):
        yield from _launches(members[: len(members) // 2], ctx)
        yield from _launches(members[len(members) // 2 :], ctx)
    else:
        yield _launch(members, payload, ctx), members


def _launch(members: Sequence[Node], payload: object, ctx: Context) -> Node:
    """Return a node with the work of all members, estimated at most at the sum of their times."""
    works = [member.work for member in members if member.work is not None]
    node = replace(merged_node(members, payload), work=_sum(works) if len(works) == len(members) else None)
    return replace(node, estimate=_estimate(node, [member.estimate for member in members], ctx))


def _sum(works: Sequence[Work]) -> Work:
    return replace(
        works[0],
        flops=sum(work.flops for work in works),
        read_bytes=sum(work.read_bytes for work in works),
        write_bytes=sum(work.write_bytes for work in works),
    )


def _estimate(node: Node, parts: Sequence[Estimate | None], ctx: Context) -> Estimate | None:
    """Return the estimate of a launch: the estimator's, or the sum of its parts if that is less; None if unknown."""
    estimated = None if ctx.estimate is None else ctx.estimate(node)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return estimated
    apart = Estimate(sum(part.ns for part in known), known[0].source)
    return apart if estimated is None or apart.ns < estimated.ns else estimated
