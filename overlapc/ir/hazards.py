"""Conditions under which a kernel may overwrite memory that it also reads."""

from __future__ import annotations

from collections.abc import Collection

from overlapc.ir.body import Body, Load, Reduce, Store, Value, depends_on, reduction_depth


def scatters(body: Body) -> bool:
    """Whether iterations may write elements in any order, write the same element, or leave elements unwritten."""
    return any(store.is_atomic or store.indirect or store.mask is not None for store in body.stores)


def overwrites_in_place(body: Body, store: Store, read: Collection[str]) -> bool:
    """Whether `store` may write to the memory that `body` reads as the buffers in `read`.

    Each iteration must read its element before it overwrites it, and the old element must not be needed later. So all
    accesses must have the same index and element size, and no pass over the reduction may follow the store.
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
    # The store runs once per row, after all passes: neither reductions nor stores per item may depend on the element.
    varies = depends_on([value for each in body.stores for value in each.operands()], symbols)
    items = [
        each.value
        for each in body.stores
        if symbols & each.index.free_symbols or any(varies[value] for value in each.operands())
    ]
    return not _needed_by([*reduces, *items], loads)


def _needed_by(roots: Collection[Value], loads: Collection[Load]) -> bool:
    """Whether any of `roots` is computed from one of `loads`, also through reductions."""
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
