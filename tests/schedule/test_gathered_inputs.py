"""Which nodes remain in a schedule that receives gathered tensors as inputs."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.schedule.gathered_inputs import left_without
from overlapc.schedule.model import Kind, Schedule
from tests.graphs import schedules


def read_from_the_end(schedule: Schedule, launches: Collection[str]) -> list[int]:
    """Return the nodes that remain, by definition: nodes whose results are read, and nodes that must run anyway."""
    gone = {at for pair in schedule.started.items() if schedule.nodes[pair[1]].name in launches for at in pair}
    read = set(schedule.outputs)
    left = []
    for at in reversed(range(len(schedule.nodes))):
        node = schedule.nodes[at]
        may_go = node.kind in (Kind.KERNEL, Kind.VIEW) and not node.mutates
        if at not in gone and not (may_go and read.isdisjoint(node.writes)):
            left.append(at)
            read.update(node.reads)
    return left[::-1]


@given(schedules(most_nodes=40), st.sets(st.integers(0, 39)))
@settings(max_examples=200)
def test_nodes_remain_if_they_are_read_or_must_run(schedule, numbers):
    starts = [start.name for start in schedule.starts()]
    launches = {name for at, name in enumerate(starts) if at in numbers}
    assert left_without(schedule, launches) == read_from_the_end(schedule, launches)
    assert left_without(schedule, ()) == read_from_the_end(schedule, ())
