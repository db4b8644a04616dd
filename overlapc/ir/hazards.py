"""When a kernel may write over memory that it also reads."""

from __future__ import annotations

from collections.abc import Collection

from overlapc.ir.body import Body, Load, Reduce, Store, Value, depends_on, reduction_depth


def scatters(body: Body) -> bool:
    """Whether iterations may write elements in any order, several to the same one, or leave some unwritten."""
    return any(store.is_atomic or store.indirect or store.mask is not None for store in body.stores)


def overwrites_in_place(body: Body, store: Store, read: Collection[str]) -> bool:
    """Whether `store` may go to the very memory that `body` reads as the buffers of `read`.

    Each iteration must have read its element before it stores it, and nothing may need the old one later: the same
    index everywhere, elements of one size, and no pass over the reduction after the store.
    """
    loads = [load for load in body.loads() if load.buffer in read]
    if not loads:
        return True
    if store.mode != "set" or store.mask is not None or store.indirect:
        return False
    if any(
        load.index != store.index
        or load.indirect
        or load.mask is not None
        or load.memory_dtype.itemsize != store.memory_dtype.itemsize
        for load in loads
    ):
        return False
    reduces = [value for value in body.values() if isinstance(value, Reduce)]
    if not reduces:
        return True
    # With reductions there are several passes; only the last one may overwrite what earlier ones read.
    symbols = {loop.symbol for loop in body.reduction}
    if symbols & store.index.free_symbols:
        depth = reduction_depth([each.value for each in body.stores])
        return depth[store.value] == max(depth.values())
    # Once a row, after its passes: none of them may have looked at the element, nor may the store of each of its items.
    varies = depends_on([value for each in body.stores for value in each.operands()], symbols)
    items = [
        each.value
        for each in body.stores
        if symbols & each.index.free_symbols or any(varies[value] for value in each.operands())
    ]
    return not _needed_by([*reduces, *items], loads)


def _needed_by(roots: Collection[Value], loads: Collection[Load]) -> bool:
    """Whether any of `roots` is computed from one of `loads`, through reductions too."""
    wanted, stack, seen = set(loads), list(roots), set(roots)
    while stack:
        value = stack.pop()
        if value in wanted:
            return True
        fresh = [operand for operand in value.operands() if operand not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return False


__all__ = ["overwrites_in_place", "scatters"]
