"""Decides which kernels may merge, and gives the reason for each pair that may not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from overlapc.fusion.kernel_groups import Group, Groups
from overlapc.fusion.loop_order import in_order_of, scattered_bytes, untiled_bytes
from overlapc.fusion.merge import Refusal, merge, without_stores
from overlapc.fusion.mixed_order import crosses, merge_across, skips
from overlapc.ir.body import Body
from overlapc.ir.hazards import overwrites_in_place, scatters
from overlapc.ir.ops import Loops, Refuse
from overlapc.ir.template import rough_kind

LARGEST_KERNEL = 512  # most values in one kernel: larger ones spill registers and take long to compile
MOST_BUFFERS = 48  # most arguments of one kernel
LITTLE = 64  # sharing less than 1 / LITTLE of a kernel's bytes is not worth a fusion


@dataclass(frozen=True, slots=True)
class LoopChanges:
    """Loop transformations that merges may use in one round."""

    across: bool = False  # whether rows of one kernel may be columns of the other
    reorders: bool = False  # whether the order of loops may change


def verdict(
    groups: Groups, a: Group, b: Group, local: set[str], changes: LoopChanges, refuse: Refuse
) -> Loops | Refusal:
    """Return the merged kernel, or the reason why the two kernels stay separate. local: buffers only inside of it."""
    if (a.dots or b.dots) and a.kernel.body.reduction and b.kernel.body.reduction:
        return Refusal("a matrix product cannot share its kernel with another reduction")
    if len(a.reads | b.reads | a.writes | b.writes) > MOST_BUFFERS:
        return Refusal(f"together they use more than {MOST_BUFFERS} buffers")
    if scatters(a.kernel.body) or scatters(b.kernel.body):
        return Refusal("one of them scatters: its iterations write elements that depend on data")
    if _should_share_launch(groups, a, b):
        return Refusal("they share almost no memory and are of one kind: one launch may run both")
    obstacle = groups.obstacle(a, b)
    if obstacle is not None:
        return obstacle
    merged = merge(a.kernel.body, b.kernel.body)
    if not isinstance(merged, Refusal) and _reads_in_other_orders(groups, a, b, merged):
        merged = Refusal("they access shared buffers in different orders")
    if isinstance(merged, Refusal) and changes.across and crosses(a.kernel.body, b.kernel.body):
        across = merge_across(a.kernel.body, b.kernel.body, groups.graph.hint, groups.bytes_of)
        if isinstance(across, Refusal):
            across = _neither(merged, across)
        merged = across
    if isinstance(merged, Refusal) and changes.reorders and not (a.kernel.body.reduction and b.kernel.body.reduction):
        merged = _reordered(groups, a, b) or merged
    if isinstance(merged, Refusal):
        return merged
    if _loses_tiles(groups, a, b, merged):
        return Refusal("no tile of the merged kernel would be contiguous in the buffers of both")
    if (a.dots or b.dots) and merged.stores_terms():
        return Refusal("it would need single terms of a matrix product")
    if len(merged.values()) > LARGEST_KERNEL:
        return Refusal(f"together they compute more than {LARGEST_KERNEL} values")
    unsafe = _unsafe_change(groups, a, b, merged)
    if unsafe is not None:
        return unsafe
    kernel = one_kernel(a, b, merged, local)
    too_much = groups.outgrows(a, b, kernel, local)
    if too_much is not None:
        return too_much
    reason = refuse(a.kernel.device, merged)
    return kernel if reason is None else Refusal(reason)


def _neither(merged: Refusal, across: Refusal) -> Refusal:
    """Return the refusal of both ways to merge. A function of its own, because `verdict` binds its names again."""
    return Refusal(lambda: f"{merged.reason}; with crossing loops: {across.reason}")


def _should_share_launch(groups: Groups, a: Group, b: Group) -> bool:
    """Whether two kernels are of one kind and share little, so that they should rather share a launch with others."""
    if not a.writes.isdisjoint(b.reads) or rough_kind(a.kernel.body) != rough_kind(b.kernel.body):
        return False
    shared = sum(map(groups.bytes_of, a.reads & b.reads))
    return shared * LITTLE < min(sum(map(groups.bytes_of, group.reads | group.writes)) for group in (a, b))


def _reads_in_other_orders(groups: Groups, a: Group, b: Group, merged: Body) -> bool:
    """Whether the merged kernel strides over memory that one kernel reads by rows and the other by columns, or reads
    all that both read in two orders: if loops of other tensors happen to have sizes that fit together."""
    if not merged.reduction:
        return False
    shared = a.reads & b.reads
    places = [
        Counter(buffer for buffer, _ in {(load.buffer, load.index) for load in body.loads() if load.buffer in shared})
        for body in (a.kernel.body, b.kernel.body, merged)
    ]
    first, second, together = places
    if together.total() <= max(first.total(), second.total()):
        return False
    apart = a.writes.isdisjoint(b.reads) and all(together[name] == first[name] + second[name] for name in shared)
    return apart or skips(merged, a.kernel.body, b.kernel.body, groups.bytes_of)


def _loses_tiles(groups: Groups, a: Group, b: Group, merged: Body) -> bool:
    """Whether the element-wise kernel transposes its input, which tiles over the other kernel's rows cannot do."""
    if not merged.reduction or (a.kernel.body.reduction and b.kernel.body.reduction):
        return False
    apart = sum(untiled_bytes(group.kernel.body, groups.bytes_of) for group in (a, b))
    more = untiled_bytes(merged, groups.bytes_of) - apart
    # Untiled memory is accessed in sectors of which only a small part is used.
    return 2 * more > sum(map(groups.bytes_of, (a.reads | a.writes) & (b.reads | b.writes)))


def _unsafe_change(groups: Groups, a: Group, b: Group, merged: Body) -> Refusal | None:
    """Return why the merged kernel must not change memory in place, or None."""
    for view in (*a.kernel.mutates, *b.kernel.mutates):
        root = groups.graph.root(view.buffer)
        if root in groups.given and merged.checks():
            return Refusal(f"a check may fail, which must leave {root} as it was")
        stores = [store for store in merged.stores if groups.graph.root(store.buffer) == root]
        if len(stores) > 1:
            return Refusal(f"both write to the memory of {root}")
        read = {load.buffer for load in merged.loads() if groups.graph.root(load.buffer) == root}
        if not overwrites_in_place(merged, stores[0], read):
            return Refusal(f"{root} would be overwritten before all iterations have read their part of it")
    return None


def _reordered(groups: Groups, a: Group, b: Group) -> Body | None:
    """Return the merged kernel with loops in the memory order of the largest shared buffer; None if it does not pay."""
    shared = max((a.reads | a.writes) & b.reads or b.writes & a.reads, key=lambda name: (groups.bytes_of(name), name))
    first, second = (in_order_of(group.kernel.body, shared, groups.graph.hint) for group in (a, b))
    if first is None or second is None:
        return None
    merged = merge(first, second)
    if isinstance(merged, Refusal) or _reads_in_other_orders(groups, a, b, merged):
        return None
    before = sum(scattered_bytes(group.kernel.body, groups.bytes_of) for group in (a, b))
    after = scattered_bytes(without_stores(merged, groups.local(a, b)), groups.bytes_of)
    return merged if after - before <= groups.bytes_of(shared) else None


def one_kernel(a: Group, b: Group, body: Body, local: set[str]) -> Loops:
    """Return the op of `body`, the merged kernel of both groups; `local` buffers exist only inside of it."""
    return Loops(
        b.op.name,
        a.kernel.device,
        without_stores(body, local),
        tuple(view for view in a.kernel.outputs + b.kernel.outputs if view.buffer not in local),
        a.kernel.mutates + b.kernel.mutates,
        a.kernel.before + b.kernel.before,
        a.op.origin.joined(b.op.origin),
    )
