"""Combines kernels of one kind into one launch: an optimizer's step, the norms of all gradients, their casts.

They share a launch, not memory traffic, so this comes last, and happens only if it has no disadvantage: the kernels are
independent, no library call or communication runs between them (a gradient's cast, and with it its reduction, would
wait for the next gradient), and peak memory does not grow. After bucketing, `passes/share_launches.py` uses the same
criteria (`kind_of`, `one_launch`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import torch

from overlapc.fusion.kernel_groups import Group, Groups
from overlapc.fusion.merge import Refusal
from overlapc.fusion.report import FusionReport
from overlapc.ir.body import Body
from overlapc.ir.hazards import scatters
from overlapc.ir.ops import (
    Attention,
    Combo,
    Extern,
    IROp,
    Kernel,
    Loops,
    LoweredGraph,
    Start,
    Wait,
    buffers_read,
    buffers_written,
    loops_of,
)
from overlapc.ir.template import SIZE, rough_kind, template_of
from overlapc.lowering.table import LIBRARY_CALLS

MOST_POINTERS = 240  # most buffers of one launch: a CUDA kernel has 4 KiB for its arguments
_TOO_MANY = f"together they use more than {MOST_POINTERS} buffers"
MOST_OPEN = 8  # launches of one kind that a kernel tries to join: keeps the number of attempts linear

Kind = tuple[torch.device, Body]


def kind_of(op: Kernel) -> Kind | None:
    """Return a key that is equal for kernels that one launch can run; None for a kernel that cannot share a launch."""
    if isinstance(op, Attention):
        return None
    body = loops_of(op)[0].body
    if not _may_combine(body):
        return None
    template = template_of(body).body
    if set(template.size_symbols()) - {SIZE}:
        return None  # the number of programs of each part must be static
    return op.device, template


def one_launch(ops: Sequence[Loops | Combo]) -> Combo | str:
    """Return one launch of independent kernels of one kind, or the reason why there is none."""
    buffers = {name for op in ops for name in (*buffers_read(op), *buffers_written(op))}
    if len(buffers) > MOST_POINTERS:
        return _TOO_MANY
    origin = ops[0].origin
    for op in ops[1:]:
        origin = origin.joined(op.origin)
    return Combo(f"{ops[0].name}+{len(ops) - 1}", tuple(part for op in ops for part in loops_of(op)), origin)


def combine(
    ops: Sequence[IROp],
    graph: LoweredGraph,
    report: FusionReport,
    freeable: Collection[str] = (),
    alone: Collection[str] = (),
) -> list[IROp]:
    """Return `ops` with kernels combined into launches, each into the first launch of its kind that can take it.

    freeable: inputs that only the graph holds. alone: nodes whose kernels share no launch. The launches are added to
    `report`.
    """
    alone = frozenset(alone)
    groups = Groups(ops, graph, freeable)
    stretch = _stretches(groups)
    rough = Counter((stretch[group.number], _rough_kind(group.op)) for group in groups)
    launches: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
    for number in groups.order.order():
        op = groups[number].op
        if not isinstance(op, Loops) or rough[stretch[number], _rough_kind(op)] < 2:
            continue
        if not alone.isdisjoint(op.origin.fx):
            continue
        kind = kind_of(op)
        if kind is None:
            continue
        open_ones = launches[stretch[number], kind]
        for at, launch in enumerate(open_ones[:MOST_OPEN]):
            if _try_combine(groups, report, launch, number):
                open_ones[at] = min(launch, number)
                break
        else:
            open_ones.append(number)
    launch_of = {name: group.op.name for group in groups for name in group.members}
    report.kernel_of = {name: launch_of.get(kernel, kernel) for name, kernel in report.kernel_of.items()}
    return groups.ops()


def _try_combine(groups: Groups, report: FusionReport, one: int, other: int) -> bool:
    """Combine two groups of kernels of one kind into one launch, or record the refusal; whether they were combined."""
    a, b = map(groups.__getitem__, groups.in_order(one, other))
    refusal = _combined(groups, a, b)
    if refusal is None:
        report.combined.append((a.op.name, b.op.name))
    else:
        report.refused.setdefault((a.op.name, b.op.name), Refusal(f"not one launch: {refusal.reason}"))
    return refusal is None


def _combined(groups: Groups, a: Group, b: Group) -> Refusal | None:
    """Replace two launches by one, or return the reason why not; `a` is the earlier one."""
    if len(a.reads | b.reads | a.writes | b.writes) > MOST_POINTERS:
        return Refusal(_TOO_MANY)
    if a.number in groups.order.before[b.number]:
        return Refusal("one depends on the other")
    obstacle = groups.obstacle(a, b)
    if obstacle is not None:
        return obstacle
    launch = Combo(b.op.name, loops_of(a.op) + loops_of(b.op), a.op.origin.joined(b.op.origin))
    too_much = groups.outgrows(a, b, launch, set())
    if too_much is not None:
        return too_much
    place = groups.make_room(a, b)
    groups.replace(a, b, launch, set(), place)
    return None


def _stretches(groups: Groups) -> dict[int, int]:
    """Map each group to the number of library calls and communication nodes before it."""
    found: dict[int, int] = {}
    passed = 0
    for number in groups.order.order():
        passed += _divides(groups[number].op)
        found[number] = passed
    return found


def _divides(op: IROp) -> bool:
    if isinstance(op, Extern):
        return op.comm is not None or op.target in LIBRARY_CALLS
    return isinstance(op, Start | Wait | Attention)


def _rough_kind(op: IROp) -> tuple[int, ...]:
    return rough_kind(op.body) if isinstance(op, Loops) else ()


def _may_combine(body: Body) -> bool:
    """Whether a kernel may share a launch.

    Not with totals, which need a second launch; scatters, whose iterations have no fixed places to write; checks, whose
    message names their kernel; or matrix products.
    """
    if body.checks() or body.dots() or scatters(body):
        return False
    return not any(store.is_total for store in body.stores)
