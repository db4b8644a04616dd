"""Inlines element-wise kernels into their readers if that increases memory traffic only little or not at all.

    t[p0] = x[p0] + 1;  y[p0] = t[p0] * 2        ->   y[p0] = (x[p0] + 1) * 2

This works through any view between the two: the reader's index into `t` is converted to the position at which `t`'s
kernel would have stored the element.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import sympy

from overlapc.fusion.deps import callers_memory, mutated, output_buffers
from overlapc.fusion.loop_order import split_at_divisions
from overlapc.fusion.simplify import simplified
from overlapc.fusion.unroll import unrolled
from overlapc.ir.body import Body, Checked, Index, Load, Loop, Op, Store, Value, as_number, depends_on, op
from overlapc.ir.conversions import as_read, constant
from overlapc.ir.hazards import overwrites_in_place, scatters
from overlapc.ir.indexing import Ranges, bounds, is_dense, numel, position_in, simplify, substitute
from overlapc.ir.ops import IROp, Loops, LoweredGraph, Refuse, buffers_read, nothing_refused
from overlapc.ir.rewriting import canonical, rewrite, rewrite_values
from overlapc.ir.settle import with_known_positions
from overlapc.ir.template import once_for_all_buffers

LARGEST_BODY = 256  # most values of a kernel after inlining; keeps source readable and registers bounded
FEW = 64  # a reader of at most one element in this many reads few elements
MOST_RECOMPUTED = 16  # most values of a producer that several readers may each recompute
# Bytes of additional traffic that removing a kernel may cost: a launch takes a GPU as long as a few MiB of traffic, and
# a CPU as long as this.
LAUNCH_BYTES = 64 << 10
# Operations cheap enough to recompute per iteration instead of loading their result from memory.
CHEAP = frozenset(
    "neg abs add sub mul fma maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor logical_not where "
    "bitwise_and bitwise_or bitwise_xor bitwise_not".split()
)


# Approximate instructions of other operations; operations that are not listed are never recomputed.
COSTS = {
    "div": 8, "reciprocal": 8, "sqrt": 8, "rsqrt": 8, "exp": 10, "exp2": 8, "sigmoid": 16, "log": 16, "relu": 1,
    "tanh": 24, "floor": 1, "ceil": 1, "sign": 2, "isnan": 1, "isinf": 1, "logical_not": 1, "bitcast": 0,
}  # fmt: skip
# Instructions that may be recomputed to save a byte of memory traffic. An H200 runs 7 in the time of a byte, a CPU core
# with vectors about 5; the limit is lower because the readers may still fuse, and then nothing is saved.
INSTRUCTIONS_PER_BYTE = 2


def inline(ops: Sequence[IROp], graph: LoweredGraph, refuse: Refuse = nothing_refused) -> list[IROp]:
    """Return `ops` with element-wise kernels inlined into their readers; kernels that are no longer read are dropped.

    refuse: why the device's generator cannot generate a kernel, or None; refused kernels are not created.
    """
    now: list[IROp | None] = list(ops)
    kept = output_buffers(graph) | set(graph.aliases.values())
    users: defaultdict[str, set[int]] = defaultdict(set)
    ordered = {name for later, earlier in graph.order.items() for name in (later, *earlier)}
    overwritten: defaultdict[str, list[int]] = defaultdict(list)  # root -> positions of ops that overwrite it
    from_kernels = {view.buffer for op_ in ops if isinstance(op_, Loops) for view in op_.outputs}
    given = callers_memory(graph)
    for position, op_ in enumerate(ops):
        for name in buffers_read(op_):
            users[name].add(position)
        for view in mutated(op_):
            overwritten[graph.root(view.buffer)].append(position)
    # A second pass handles readers of few elements, after their other producers have been inlined.
    for position, few in ((position, few) for few in (False, True) for position in range(len(now))):
        producer = now[position]
        if not isinstance(producer, Loops):
            continue
        if not few:
            # Unrolled only now, after its producers have been inlined: as a loop it reads them at one index, unrolled
            # at several.
            body = simplified(unrolled(producer.body))
            if body is not producer.body:
                now[position] = producer = dataclasses.replace(producer, body=body)
        if len(producer.outputs) != 1 or producer.name in ordered:
            continue
        buffer = producer.outputs[0].buffer
        readers = {at: now[at] for at in sorted(users[buffer])}
        consumers = [op_ for op_ in readers.values() if isinstance(op_, Loops) and op_.device == producer.device]
        if buffer in kept or not readers or len(consumers) < len(readers):
            continue
        sources = buffers_read(producer)
        if not is_elementwise(producer.body):
            continue
        into = dict(zip(readers, consumers, strict=True))
        shared = {name for name in sources if name in from_kernels or users[name] - {position, *readers}}
        if few or not _pays(producer, consumers, shared, graph):
            into = {at: consumer for at, consumer in into.items() if _reads_little(producer, consumer, graph)}
        if not into or any(_any_between(overwritten[graph.root(name)], position, max(into)) for name in sources):
            continue  # a source is overwritten before a reader runs
        inlined = {at: _inlined_safely(producer, consumer, graph, given) for at, consumer in into.items()}
        if any(body is None or refuse(producer.device, body) is not None for body in inlined.values()):
            continue
        for at, made in inlined.items():
            assert made is not None
            now[at] = dataclasses.replace(into[at], body=made, origin=producer.origin.joined(into[at].origin))
        users[buffer] -= into.keys()
        for name in sources:
            users[name].update(into)
        if not users[buffer]:
            now[position] = None
            for name in sources:
                users[name].discard(position)
    return [op_ for op_ in now if op_ is not None]


def _inlined_safely(producer: Loops, consumer: Loops, graph: LoweredGraph, given: Collection[str]) -> Body | None:
    """Call `inline_into`; return None also if the consumer would overwrite memory that its other iterations read.

    given: memory that a failed check must leave as it was, except where the consumer has checks of its own: that is an
    `index_put_` into an argument, which eager leaves half done, too.
    """
    adds_checks = producer.body.checks() and not consumer.body.checks()
    if adds_checks and any(graph.root(view.buffer) in given for view in consumer.mutates):
        return None
    body = inline_into(producer, consumer)
    if body is None:
        return None
    for view in consumer.mutates:
        root = graph.root(view.buffer)
        read = {load.buffer for load in body.loads() if graph.root(load.buffer) == root}
        if not all(overwrites_in_place(body, store, read) for store in body.stores if store.buffer == view.buffer):
            return None
    return body


def _any_between(positions: Sequence[int], start: int, end: int) -> bool:
    """Whether one of the sorted `positions` is strictly between `start` and `end`."""
    return bisect_right(positions, start) < bisect_left(positions, end)


def is_elementwise(body: Body) -> bool:
    """Whether a body just stores one element per position."""
    return len(body.stores) == 1 and not scatters(body) and not body.reduction


def _pays(producer: Loops, consumers: list[Loops], shared: Collection[str], graph: LoweredGraph) -> bool:
    """Whether the consumers should recompute the elements that `producer` stores.

    shared: sources of `producer` that other kernels read or write.
    """
    body = producer.body
    buffer = producer.outputs[0].buffer
    values = body.values()
    loads = body.loads()
    if not loads:
        return len(values) <= MOST_RECOMPUTED  # computed from positions and constants only
    if body.checks() and not all(_covers(consumer.body, body, buffer) for consumer in consumers):
        return False  # eager also checks elements that are not read
    # Values that are the same in every iteration are computed once: before the loops, or once per program.
    varies = depends_on(values, {loop.symbol for loop in body.loops})
    cheap = all(value.name in CHEAP for value in values if isinstance(value, Op) and varies[value])
    iterations = graph.hint(body.numel())
    for consumer in consumers:
        if len(values) + len(consumer.body.values()) > LARGEST_BODY:
            return False
        if consumer.body.dots() and any(load.indirect for load in loads):
            return False  # tiles of a matrix product are loaded in advance, which needs addresses known in advance
        indices = {load.index for load in consumer.body.loads() if load.buffer == buffer}
        if len(indices) > 2 or (len(indices) == 2 and len(values) > MOST_RECOMPUTED):
            return False
        amplified = graph.hint(consumer.body.numel() * consumer.body.reduction_numel()) > iterations
        if amplified and not cheap:
            return False
    if len(consumers) == 1:
        if not amplified:
            return True
        # The producer could fuse with kernels that share its sources; a consumer with more iterations cannot.
        loads = [load for load in loads if load.buffer in shared]
    elif len(values) > MOST_RECOMPUTED:
        return False
    itemsize = producer.outputs[0].dtype.itemsize
    sources = {load.buffer: load for load in loads}.values()
    runs = [
        min(iterations, graph.hint(consumer.body.numel() * consumer.body.reduction_numel())) for consumer in consumers
    ]
    read_bytes = sum(
        min(graph.hint(graph.views[load.buffer].layout.storage_bytes()), run * load.memory_dtype.itemsize)
        for load in sources
        for run in runs
    )
    # The result is no longer written once and read by each consumer; instead each consumer reads the sources.
    saved_bytes = (iterations + sum(runs)) * itemsize - read_bytes
    again = max(0, sum(runs) - iterations)  # additional evaluations of the values
    if not cheap and again * _cost(values, varies) > INSTRUCTIONS_PER_BYTE * saved_bytes:
        return False
    return saved_bytes >= -LAUNCH_BYTES


def _reads_little(producer: Loops, consumer: Loops, graph: LoweredGraph) -> bool:
    """Whether `consumer` reads so few elements that it can recompute them, as a selection of one per row does.

    The other readers may then fuse with the producer, so that its elements are never written to memory.
    """
    iterations = graph.hint(numel((consumer.body.numel(), consumer.body.reduction_numel())))
    values = producer.body.values()
    return (
        len(values) <= MOST_RECOMPUTED
        and not producer.body.checks()
        and FEW * iterations <= graph.hint(producer.body.numel())
    )


def _cost(values: Sequence[Value], varies: Mapping[Value, bool]) -> float:
    """Return the instructions of one more iteration; infinite if an operation is never recomputed."""
    names = [value.name for value in values if isinstance(value, Op) and varies[value]]
    return sum(1 if name in CHEAP else COSTS.get(name, math.inf) for name in names)


def _covers(consumer: Body, producer: Body, buffer: str) -> bool:
    """Whether it is proven that the consumer reads every element of the producer's buffer, which is dense."""
    loops = (*consumer.loops, *consumer.reduction)
    for load in consumer.loads():
        strides = _strides(load.index, loops) if load.buffer == buffer and load.mask is None else None
        if strides is None:
            continue
        sizes = [loop.size for loop, stride in zip(loops, strides, strict=True) if stride != 0]
        if numel(sizes) == producer.numel() and is_dense(sizes, [stride for stride in strides if stride != 0]):
            return True
    return False


def loop_strides(body: Body) -> tuple[sympy.Expr, ...] | None:
    """Return the stride of the only store's index along each loop; None unless the index is linear without offset."""
    return _strides(body.stores[0].index, body.loops)


@lru_cache(20_000)
def _strides(index: sympy.Expr, loops: tuple[Loop, ...]) -> tuple[sympy.Expr, ...] | None:
    rest = index
    strides = []
    for loop in loops:
        step = index.coeff(loop.symbol)
        strides.append(step)
        rest = rest - step * loop.symbol
    return tuple(strides) if sympy.expand(rest) == 0 else None


def inline_into(producer: Loops, consumer: Loops) -> Body | None:
    """Return the consumer's body with loads of the producer's buffer replaced; None if an index cannot be converted."""
    return _inlined(producer.body, consumer.body)


@once_for_all_buffers
def _inlined(producer: Body, consumer: Body) -> Body | None:
    store = producer.stores[0]
    strides = loop_strides(producer)
    if strides is None:
        return None
    ranges = consumer.ranges()
    impossible = False

    def replace(value: Value) -> Value | None:
        nonlocal impossible
        if not isinstance(value, Load) or value.buffer != store.buffer:
            return None
        found = value_at(producer, store, strides, value, ranges)
        impossible = impossible or found is None
        return found

    body = rewrite(consumer, consumer.loops, consumer.reduction, replace=replace)
    return None if impossible else canonical(split_at_divisions(with_known_positions(body)))


def value_at(body: Body, store: Store, strides: Sequence[sympy.Expr], load: Load, ranges: Ranges) -> Value | None:
    """Return the value that `body` would have stored where `load` reads; None if its position cannot be expressed."""
    if load.mask is not None:
        ranges = ranges_under(load.mask, ranges)
    picked = {symbol for symbol, _ in load.indirect}
    if picked:
        known = _loaded_ranges(load)
        if known is None or any(isinstance(part, Load) and part.indirect for part in body.values()):
            return None
        ranges = (*ranges, *known)
    sizes = [loop.size for loop in body.loops]
    position = position_in(load.index, sizes, strides, ranges)
    replacement = {loop.symbol: at for loop, at in zip(body.loops, position, strict=True)}

    def guarded(value: Value) -> Value | None:
        if not isinstance(value, Load):
            return None
        mask = value.mask
        if load.mask is not None:
            mask = load.mask if mask is None else op("logical_and", load.mask, mask)
        indirect = value.indirect if picked.isdisjoint(value.index.free_symbols) else load.indirect
        return dataclasses.replace(value, mask=mask, indirect=indirect)

    new = rewrite_values([store.value], lambda expr: simplify(substitute(expr, replacement), ranges), guarded)
    value = as_read(store, new[store.value])
    if any(isinstance(part, Index) and not picked.isdisjoint(part.expr.free_symbols) for part in new.values()):
        return None  # an Index cannot contain a position that is loaded from memory
    if load.mask is None or isinstance(value, Load):
        return value
    return op("where", load.mask, value, constant(0, value.dtype))


def _loaded_ranges(load: Load) -> Ranges | None:
    """Return the ranges of the symbols that `load` binds to loaded values by their checks; None if one is unchecked."""
    found = []
    for symbol, value in load.indirect:
        condition = value.condition if isinstance(value, Checked) else None
        if not isinstance(condition, Op) or condition.name != "logical_and":
            return None
        low, high = condition.args
        if not isinstance(low, Op) or not isinstance(high, Op) or (low.name, high.name) != ("ge", "lt"):
            return None
        end = high.args[1]
        if as_number(low.args[1]) != 0 or not isinstance(end, Index) or low.args[0] is not high.args[0]:
            return None
        found.append((symbol, sympy.S.Zero, end.expr - 1))
    return tuple(found)


def ranges_under(mask: Value, ranges: Ranges) -> Ranges:
    """Narrow `ranges` by the conditions of `mask` on positions: with p1 < 64, 64*p0 + p1 < 64 implies p0 = 0."""
    pending = [mask]
    while pending:
        condition = pending.pop()
        if not isinstance(condition, Op):
            continue
        if condition.name == "logical_and":
            pending.extend(condition.args)
        elif condition.name in ("lt", "ge") and all(isinstance(arg, Index) for arg in condition.args):
            left, right = (arg.expr for arg in condition.args if isinstance(arg, Index))
            ranges = _where_not_negative(right - left - 1 if condition.name == "lt" else left - right, ranges)
    return ranges


def _where_not_negative(expr: sympy.Expr, ranges: Ranges) -> Ranges:
    """Narrow each symbol's range to values for which a linear `expr` can be nonnegative."""
    expr = sympy.expand(expr)
    narrowed = []
    for symbol, low, high in ranges:
        step = expr.coeff(symbol)
        rest = bounds(sympy.expand(expr - step * symbol), ranges) if step.is_Integer and step != 0 else None
        if rest is not None and rest[1].is_Integer:
            if step > 0:
                low = sympy.Max(low, -(rest[1] // step))
            else:
                high = sympy.Min(high, rest[1] // -step)
        narrowed.append((symbol, low, high))
    return tuple(narrowed)
