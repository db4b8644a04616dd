"""Stages of a kernel with reductions: the values and stores that each pass over the reduction loops computes."""

from __future__ import annotations

from functools import cached_property

from overlapc.ir.body import Body, Constant, Index, Load, Op, Reduce, Store, Value, depends_on, reduction_depth


class Stages:
    """Values and stores of a body by stage; those of stage n depend on n nested reductions."""

    def __init__(self, body: Body) -> None:
        reduced = {loop.symbol for loop in body.reduction}
        self._values = body.values()
        self.varies = depends_on(self._values, reduced)  # whether a value varies with a reduction loop
        self.stage = reduction_depth(self._values)
        self.last = max(self.stage.values(), default=0)
        self.inner_stores: list[Store] = []  # run in every iteration of the reduction loops; outer stores once per row
        self.outer_stores: list[Store] = []
        for store in body.stores:
            inner = reduced & store.index.free_symbols or any(self.varies[value] for value in store.operands())
            (self.inner_stores if inner else self.outer_stores).append(store)

    def stage_of(self, store: Store) -> int:
        """Return the number of nested reductions that a store depends on."""
        return max(self.stage[value] for value in store.operands())

    def reductions(self, stage: int) -> list[Reduce]:
        """Return the reductions that the pass after `stage` computes: their inputs depend on `stage` reductions."""
        return [value for value in self._values if isinstance(value, Reduce) and self.stage[value] == stage + 1]

    def fixed(self, stage: int) -> list[Value]:
        """Return the values of `stage`, without reductions, that are constant in the reduction loops."""
        return [
            value
            for value in self._values
            if not self.varies[value] and self.stage[value] == stage and not isinstance(value, Reduce)
        ]

    def early_stores(self, stage: int) -> list[Store]:
        """Return the inner stores of `stage`, which the next pass can make; none if no reduction is left to compute."""
        return [store for store in self.inner_stores if self.stage_of(store) == stage < self.last]

    @cached_property
    def late_stores(self) -> list[Store]:
        """Inner stores that depend on the last reductions; only these may overwrite memory that the passes read."""
        return [store for store in self.inner_stores if self.stage_of(store) == self.last]

    def crosses(self, value: Value) -> bool:
        """Whether a loop after the one that computes `value` needs it, and it is neither cheap nor just a load."""
        if isinstance(value, Load) and not value.operands():
            return False
        return value in self._used_later and value not in self._of_positions

    @cached_property
    def _of_positions(self) -> set[Value]:
        """Values computed from positions and constants only: they are cheap and often constant in a piece of a loop."""
        found: set[Value] = set()
        for value in self._values:
            if isinstance(value, Constant | Index | Op) and found.issuperset(value.operands()):
                found.add(value)
        return found

    @cached_property
    def _used_later(self) -> set[Value]:
        """Values that are read in another loop than the one that computes them."""
        later: set[Value] = set()
        for user in self._values:
            for operand in user.operands():
                crosses = self.varies[user] or isinstance(user, Reduce) or self.stage[user] > self.stage[operand]
                if crosses and not self.varies[operand]:
                    later.add(operand)
        for store in self.inner_stores:
            later.update(value for value in store.operands() if not self.varies[value])
        return later
