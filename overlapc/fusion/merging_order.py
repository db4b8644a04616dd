"""A dependence graph over groups of ops that keeps a legal order while groups merge.

Two groups can merge only if no path leads from one to the other through a third group. Every group has a position in
one topological order, so only groups between the two need to be visited, and only they move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence


class MergingOrder:
    """A legal order of groups. A group has the number of its first op; a merged group has the smaller number."""

    def __init__(self, before: Sequence[Iterable[int]]) -> None:
        """before[i]: the ops on which op i depends; ops are in a legal order already."""
        self.before: list[set[int]] = [set(needed) for needed in before]
        self.after: list[set[int]] = [set() for _ in before]
        for group, needed in enumerate(self.before):
            for earlier in needed:
                self.after[earlier].add(group)
        self.position = list(range(len(before)))
        self.slots: list[int | None] = list(range(len(before)))

    def dependents(self, first: int, second: int) -> set[int]:
        """Return the groups between two groups that depend on the first one, without the first one itself."""
        return set(self._reached(first, self.after, self.position[first], self.position[second]))

    def _reached(self, group: int, onward: Sequence[set[int]], start: int, end: int) -> Iterator[int]:
        """Yield the groups between two positions to which a path leads from `group`."""
        found: set[int] = set()
        stack = [group]
        while stack:
            for other in onward[stack.pop()]:
                if other not in found and start < self.position[other] < end:
                    found.add(other)
                    stack.append(other)
                    yield other

    def may_run_early(self, first: int, second: int) -> bool:
        """Whether the second group depends on the first, and its other dependences all come before the first."""
        start = self.position[first]
        return first in self.before[second] and all(
            needed == first or self.position[needed] < start for needed in self.before[second]
        )

    def between(self, first: int, second: int) -> int | None:
        """Return a group that must run between two groups, which then cannot merge; None if there is none.

        Searches from both groups in turn, until one search has found such a group or has no groups left: from a group
        that is read all over the graph, or has a long history, the other search ends much sooner.
        """
        start, end = self.position[first], self.position[second]
        dependents = self._reached(first, self.after, start, end)
        needed = self._reached(second, self.before, start, end)
        for dependent, need in zip(dependents, needed, strict=False):  # as either search alone answers the question
            if dependent in self.before[second]:
                return dependent
            if first in self.before[need]:
                return need
        return None

    def merge(self, first: int, second: int) -> None:
        """Merge two groups, of which `first` is earlier and none must run between, into one with the smaller number.

        It runs at the position of the first one if the second may run early, else just before the groups that depend on
        the first.
        """
        assert self.position[first] < self.position[second]
        dependents = self.dependents(first, second)
        assert dependents.isdisjoint(self.before[second]), "another group must run between them"
        early = self.may_run_early(first, second)
        keep, gone = (first, second) if first < second else (second, first)
        start, end = self.position[first], self.position[second]
        here = [group for group in self.slots[start : end + 1] if group is not None and group not in (first, second)]
        # Groups that depend on the first now come after both, others before; the order within each part stays.
        earlier = [] if early else [group for group in here if group not in dependents]
        later = here if early else [group for group in here if group in dependents]
        arranged: list[int | None] = [*earlier, keep, *later]
        arranged += [None] * (end + 1 - start - len(arranged))
        for at, group in enumerate(arranged, start):
            self.slots[at] = group
            if group is not None:
                self.position[group] = at
        self._join(keep, gone)

    def _join(self, keep: int, gone: int) -> None:
        for neighbours, reverse in ((self.before, self.after), (self.after, self.before)):
            for other in neighbours[gone]:
                reverse[other].discard(gone)
                if other != keep:
                    neighbours[keep].add(other)
                    reverse[other].add(keep)
            neighbours[keep].discard(gone)
            neighbours[gone] = set()

    def order(self) -> list[int]:
        """Return the remaining groups, in a legal order."""
        return [group for group in self.slots if group is not None]


class Reach:
    """The ops, among given ones, on which each group depends (or which depend on it), updated while groups merge.

    Sets are propagated along the edges `onward`: `MergingOrder.after` for ops before a group, `MergingOrder.before` for
    ops after it.
    """

    def __init__(self, ops: Sequence[int], onward: Sequence[Collection[int]], order: Iterable[int]) -> None:
        """ops: the ops to track. order: all groups, each before those to which its set is propagated."""
        self._onward = onward
        self._of = [0] * len(onward)  # bit sets with one bit per op
        for bit, number in enumerate(ops):
            self._of[number] = 1 << bit
        for number in order:
            for other in onward[number]:
                self._of[other] |= self._of[number]

    def differ(self, a: int, b: int) -> tuple[bool, bool]:
        """Whether the first group has an op that the second has not, and vice versa."""
        return bool(self._of[a] & ~self._of[b]), bool(self._of[b] & ~self._of[a])

    def merge(self, kept: int, gone: int) -> None:
        """Update the sets after `gone` was merged into `kept`, including its edges: both sets now propagate to all."""
        both = self._of[kept] | self._of[gone]
        if self._of[kept] == self._of[gone]:
            return
        self._of[kept] = both
        stack = [kept]
        while stack:
            for other in self._onward[stack.pop()]:
                if both & ~self._of[other]:
                    self._of[other] |= both
                    stack.append(other)
