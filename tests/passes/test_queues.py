"""`Queues`: the order of collectives on a queue when starts are swapped, and delays behind running kernels."""

from itertools import pairwise

import pytest

from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.timeline import simulate
from overlapc.passes.queues import Queues
from overlapc.schedule.text import parse

FOUR = "; ".join(f"c{at} = all_gather(p) @dp : 0B 9us" for at in range(4))


def queue(queues: Queues) -> list[int]:
    """Return the collectives in order, and assert that `next` and `previous` agree."""
    (first,) = {0, 1, 2, 3} - set(queues.previous)
    order = [first]
    while order[-1] in queues.next:
        order.append(queues.next[order[-1]])
    assert queues.previous == {after: before for before, after in pairwise(order)}
    return order


@pytest.mark.parametrize(("first", "after"), [(0, [1, 0, 2, 3]), (1, [0, 2, 1, 3]), (2, [0, 1, 3, 2])])
def test_a_collective_goes_ahead_of_the_one_before_it(first, after):
    schedule = parse(FOUR)
    queues = Queues.of(schedule, simulate(schedule))
    assert queue(queues) == [0, 1, 2, 3]
    queues.swap(first, first + 1)
    assert queue(queues) == after
    queues.swap(first + 1, first)
    assert queue(queues) == [0, 1, 2, 3]


def test_collectives_begin_after_the_running_kernel():
    """The expected delay is an average over time, nine tenths of which the long kernel takes."""
    held = DeviceProfile("held", collectives_wait_for_kernels=True)
    for text, delay_ns in ((FOUR, 0.0), (FOUR + "; a = kernel(x) : 0B 1us; b = kernel(x) : 0B 9us", 8200.0)):
        schedule = parse(text)
        assert Queues.of(schedule, simulate(schedule, held)).collective_ns[0] == 9000.0 + delay_ns
    assert Queues.of(schedule, simulate(schedule)).collective_ns[0] == 9000.0
