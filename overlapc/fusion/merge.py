"""Merges two loop bodies into one over common loops; loads of elements that the first stores become stored values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps

import sympy

from overlapc.ir.body import Body, Load, Loop, Store, Value, op
from overlapc.ir.conversions import as_read, constant
from overlapc.ir.indexing import exact_quotient, is_one, loop_symbol, numel
from overlapc.ir.rewriting import canonical, rewrite, with_loops
from overlapc.ir.template import once_for_all_buffers


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why two kernels stay separate."""

    why: str | Callable[[], str]  # a function where the text takes long: most of them are never printed

    @property
    def reason(self) -> str:
        """The reason as a report prints it."""
        return self.why if isinstance(self.why, str) else self.why()

    def __bool__(self) -> bool:
        return False


def merged_once(merging: Callable[[Body, Body], Body | Refusal]) -> Callable[[Body, Body], Body | Refusal]:
    """Decorate a function of two bodies as `once_for_all_buffers` does; a reason of a refusal is found when asked."""

    @once_for_all_buffers
    def merged(*bodies: Body) -> Body | None:
        found = merging(*bodies)
        return found if isinstance(found, Body) else None

    @wraps(merging)
    def of(first: Body, second: Body) -> Body | Refusal:
        def reason() -> str:
            refused = merging(first, second)
            assert isinstance(refused, Refusal)
            return refused.reason

        return merged(first, second) or Refusal(reason)

    return of


@merged_once
def merge(first: Body, second: Body) -> Body | Refusal:
    """Return one body for `first` followed by `second`, with the stores of both, or a refusal.

    It is legal if both run over the same iterations and every load in `second` of a buffer that `first` stores has the
    index of that store. Loads of other buffers do not matter.
    """
    aligned = align(first, second)
    if isinstance(aligned, Refusal):
        return aligned
    first, second = aligned
    stored: dict[str, list[Store]] = {}
    for store in first.stores:
        stored.setdefault(store.buffer, []).append(store)
    clash: list[str] = []

    def replace(value: Value) -> Value | None:
        if not isinstance(value, Load) or value.buffer not in stored:
            return None
        # Several stores to one buffer write different elements of it.
        same = [store for store in stored[value.buffer] if store.index == value.index]
        store = (same or stored[value.buffer])[0]
        if store.is_total:
            clash.append(f"{value.buffer} is a total, known only after the first kernel")
        elif value.indirect or store.indirect or store.mode != "set" or store.mask is not None:
            clash.append(f"{value.buffer} is read or written through indices from memory")
        elif value.index != store.index:
            clash.append(f"{value.buffer} is written at [{store.index}] but read at [{value.index}]")
        elif value.mask is not None:
            return op("where", value.mask, as_read(store, store.value), constant(0, store.value.dtype))
        else:
            return as_read(store, store.value)
        return None

    second = rewrite(second, second.loops, second.reduction, replace=replace)
    if clash:
        return Refusal(clash[0])
    overwritten = {store.buffer for store in second.stores} & {load.buffer for load in first.loads()}
    if overwritten:
        return Refusal(f"{min(overwritten)} is read by the first and overwritten by the second")
    merged = Body(first.loops, first.reduction, first.stores + second.stores)
    if any(store.is_total for store in merged.stores) and merged.scans():
        return Refusal("one scans its rows, the other totals its columns")
    return merged


def align(first: Body, second: Body) -> tuple[Body, Body] | Refusal:
    """Return both bodies over the same loops, or a refusal."""
    if first.loops == second.loops and first.reduction == second.reduction:
        return first, second
    if first.reduction and second.reduction:
        outer = refine(_sizes(first.loops), _sizes(second.loops))
        inner = _refined_reductions(first.reduction, second.reduction)
        if outer is None or inner is None:
            return Refusal("their reductions run over different ranges")
        return _over(first, outer, inner, 0), _over(second, outer, inner, 1)
    if not first.reduction and not second.reduction:
        outer = refine(_sizes(first.loops), _sizes(second.loops))
        if outer is None:
            return Refusal("their loops run over different ranges")
        nothing = Refined((), ((), ()))
        return _over(first, outer, nothing, 0), _over(second, outer, nothing, 1)
    if second.reduction:
        swapped = align(second, first)
        return swapped if isinstance(swapped, Refusal) else (swapped[1], swapped[0])
    return _align_elementwise(first, second)


def _align_elementwise(reducing: Body, plain: Body) -> tuple[Body, Body] | Refusal:
    """Align `plain`, which has no reduction: it runs once per row (outer) or once per element of the rows (inner)."""
    outer = refine(_sizes(reducing.loops), _sizes(plain.loops))
    if outer is not None:
        inner = _refined_reductions(reducing.reduction, reducing.reduction)
        assert inner is not None
        return _over(reducing, outer, inner, 0), _over(plain, outer, Refined(inner.sizes, (inner.parts[0], ())), 1)
    aligned = with_reduction_at(reducing, plain, len(reducing.loops))
    return aligned or Refusal("the loops of one match neither the rows nor the elements of the other's reduction")


def with_reduction_at(reducing: Body, plain: Body, place: int) -> tuple[Body, Body] | None:
    """Return `reducing` and the element-wise `plain` over common loops; None if there are none.

    place: the number of parallel loops of `reducing` that are outside of its reduction in the nest that is `plain`'s.
    """
    nest = (*reducing.loops[:place], *reducing.reduction, *reducing.loops[place:])
    refined = refine(_sizes(nest), _sizes(plain.loops))
    if refined is None:
        return None
    reduced = {at for part in refined.parts[0][place : place + len(reducing.reduction)] for at in part}
    loops = nest_of("p", [size for at, size in enumerate(refined.sizes) if at not in reduced])
    reduction = nest_of("r", [refined.sizes[at] for at in sorted(reduced)] or [sympy.S.One])
    rows, columns = iter(loops), iter(reduction)
    symbols = [next(columns if at in reduced else rows).symbol for at in range(len(refined.sizes))]
    return (
        with_loops(reducing, refined.replacement(nest, 0, symbols), loops, reduction),
        with_loops(plain, refined.replacement(plain.loops, 1, symbols), loops, reduction),
    )


@dataclass(frozen=True, slots=True)
class Refined:
    """A common refinement of two loop nests: loops of `sizes` that both nests can be written in.

    `parts[k][i]` are the positions in `sizes`, outermost first, that form loop i of nest k.
    """

    sizes: tuple[sympy.Expr, ...]
    parts: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]

    def replacement(
        self, loops: Sequence[Loop], which: int, symbols: Sequence[sympy.Symbol]
    ) -> dict[sympy.Symbol, sympy.Expr]:
        """Map each loop symbol of nest `which` to the flat position over its parts; `symbols` are those of `sizes`."""
        replacement: dict[sympy.Symbol, sympy.Expr] = {}
        for loop, part in zip(loops, self.parts[which], strict=False):
            expr = sympy.S.Zero
            for at in part:
                expr = expr * self.sizes[at] + symbols[at]
            replacement[loop.symbol] = sympy.expand(expr)
        return replacement


def refine(a: Sequence[sympy.Expr], b: Sequence[sympy.Expr]) -> Refined | None:
    """Return the coarsest common refinement of two nests over the same flat range; None if there is none."""
    sizes: list[sympy.Expr] = []
    owners: tuple[list[list[int]], list[list[int]]] = ([[] for _ in a], [[] for _ in b])
    i, j = len(a) - 1, len(b) - 1
    left = a[i] if i >= 0 else sympy.S.One
    right = b[j] if j >= 0 else sympy.S.One
    while True:
        while is_one(left) and i >= 0:
            i -= 1
            left = a[i] if i >= 0 else sympy.S.One
        while is_one(right) and j >= 0:
            j -= 1
            right = b[j] if j >= 0 else sympy.S.One
        if i < 0 and j < 0:
            break
        if i < 0 or j < 0:
            return None
        if left == right:
            piece, left, right = left, sympy.S.One, sympy.S.One
        elif (quotient := exact_quotient(left, right)) is not None:
            piece, left, right = right, quotient, sympy.S.One
        elif (quotient := exact_quotient(right, left)) is not None:
            piece, right, left = left, quotient, sympy.S.One
        else:
            return None
        owners[0][i].append(len(sizes))
        owners[1][j].append(len(sizes))
        sizes.append(piece)
    last = len(sizes) - 1  # sizes were collected from the innermost outwards, so positions are reversed
    parts = tuple(tuple(tuple(last - at for at in reversed(part)) for part in owner) for owner in owners)
    return Refined(tuple(reversed(sizes)), (parts[0], parts[1]))


def _refined_reductions(one: Sequence[Loop], other: Sequence[Loop]) -> Refined | None:
    """Return the coarsest common refinement of two reductions; at least one loop, of size 1, remains."""
    found = refine(_sizes(one), _sizes(other))
    if found is None or found.sizes:
        return found
    return Refined((sympy.S.One,), (tuple(() for _ in one), tuple(() for _ in other)))


def _sizes(loops: Sequence[Loop]) -> tuple[sympy.Expr, ...]:
    return tuple(loop.size for loop in loops)


def nest_of(prefix: str, sizes: Sequence[sympy.Expr]) -> tuple[Loop, ...]:
    """Return loops p0, p1, … (or r0, …) of these sizes."""
    return tuple(Loop(loop_symbol(prefix, at), size) for at, size in enumerate(sizes))


def _over(body: Body, outer: Refined, inner: Refined, which: int) -> Body:
    loops, reduction = nest_of("p", outer.sizes), nest_of("r", inner.sizes)
    replacement = outer.replacement(body.loops, which, [loop.symbol for loop in loops])
    replacement.update(inner.replacement(body.reduction, which, [loop.symbol for loop in reduction]))
    return with_loops(body, replacement, loops, reduction)


def same_space(first: Body, second: Body) -> bool:
    """Whether `align` might succeed: a quick necessary test by element counts."""
    a, b = first.numel(), second.numel()
    if first.reduction and second.reduction:
        return a == b and first.reduction_numel() == second.reduction_numel()
    if not first.reduction and not second.reduction:
        return a == b
    rows, plain, length = (a, b, first.reduction_numel()) if first.reduction else (b, a, second.reduction_numel())
    return plain == rows or plain == numel((rows, length))


def without_stores(body: Body, buffers: set[str]) -> Body:
    """Return `body` without its stores to `buffers`, which are read only in this kernel."""
    kept: tuple[Store, ...] = tuple(store for store in body.stores if store.buffer not in buffers)
    return canonical(Body(body.loops, body.reduction, kept))
