"""Merging groups keeps a legal order and never makes a cycle, compared with a plain search for cycles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.fusion.merging_order import MergingOrder


@st.composite
def graphs_and_merges(draw: st.DrawFn) -> tuple[list[set[int]], list[tuple[int, int]]]:
    count = draw(st.integers(2, 12))
    before = [set(draw(st.lists(st.integers(0, at - 1), max_size=3))) if at else set() for at in range(count)]
    merges = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=12))
    return before, merges


def has_cycle(before: list[set[int]], group_of: list[int]) -> bool:
    """Whether the groups have a cyclic dependence, found by removing groups without dependences repeatedly."""
    left = {group: {group_of[n] for m in members for n in before[m]} - {group} for group, members in _by(group_of)}
    while left:
        free = [group for group, needed in left.items() if not needed & left.keys()]
        if not free:
            return True
        for group in free:
            del left[group]
    return False


def _by(group_of: list[int]) -> list[tuple[int, list[int]]]:
    return [(group, [m for m, g in enumerate(group_of) if g == group]) for group in sorted(set(group_of))]


@settings(max_examples=300)
@given(graphs_and_merges())
def test_merges_are_refused_exactly_when_they_would_close_a_cycle(
    case: tuple[list[set[int]], list[tuple[int, int]]],
) -> None:
    before, merges = case
    order = MergingOrder(before)
    group_of = list(range(len(before)))
    for a, b in merges:
        first, second = sorted((group_of[a], group_of[b]), key=order.position.__getitem__)
        if first == second:
            continue
        kept, gone = min(first, second), max(first, second)
        merged = [kept if group == gone else group for group in group_of]
        cycle = has_cycle(before, merged)
        between = order.between(first, second)
        assert (between is not None) == cycle
        if between is None:
            order.merge(first, second)
            group_of = merged
        else:
            assert between in group_of
            assert between not in (first, second)
    final = order.order()
    assert sorted(final) == sorted(set(group_of))
    place = {group: at for at, group in enumerate(final)}
    for member, needed in enumerate(before):
        for each in needed:
            assert group_of[each] == group_of[member] or place[group_of[each]] < place[group_of[member]]


def test_groups_that_a_merge_does_not_move_keep_their_order() -> None:
    order = MergingOrder([set(), set(), set(), {0}, {2}])
    order.merge(0, 4)
    assert order.order() == [1, 2, 0, 3]


def test_the_group_in_between_is_named() -> None:
    order = MergingOrder([set(), {0}, {1}])
    assert order.between(0, 2) == 1
    assert order.between(0, 1) is None
    assert order.order() == [0, 1, 2]


class Counted(list[int]):
    """Counts how often an element is read."""

    reads = 0

    def __getitem__(self, at: int) -> int:  # type: ignore[override]
        self.reads += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("read_by_all", [True, False])
def test_two_groups_far_apart_are_decided_without_a_look_at_all_between_them(read_by_all: bool) -> None:
    also = {0} if read_by_all else set()
    order = MergingOrder([set(), set(), *({at - 1} | also for at in range(2, 999)), {0, 998}])
    order.position = Counted(order.position)
    assert (order.between(0, 999) is not None) == read_by_all
    assert order.position.reads < 20


def test_a_reader_that_depends_only_on_its_producer_merges_at_the_producers_position() -> None:
    # 0 -> 1 -> 2; 3 depends on 0 only, 4 on 0 and 2.
    order = MergingOrder([set(), {0}, {1}, {0}, {0, 2}])
    assert order.may_run_early(0, 3)
    assert not order.may_run_early(0, 4)
    assert not order.may_run_early(1, 3)
    order.merge(0, 3)
    assert order.order() == [0, 1, 2, 4]
