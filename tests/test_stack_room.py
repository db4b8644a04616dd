"""A function with room on Python's stack does the same, and its calls take as long at every depth of the stack."""

from __future__ import annotations

import time

import pytest

from overlapc.stack_room import has_stack_room, with_stack_room


def added(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def test_the_function_keeps_its_name_arguments_and_errors():
    roomy = with_stack_room(added)
    assert (roomy.__name__, roomy.__doc__) == ("added", "Add two numbers.")
    assert roomy(2, b=3) == 5
    with pytest.raises(TypeError, match="can only concatenate"):
        roomy("2", b=3)  # type: ignore[arg-type]
    assert has_stack_room(roomy)
    assert not has_stack_room(added)
    assert not has_stack_room(len)


def slowest(depth: int) -> float:
    """Return the longest CPU time of a call, in s, at all depths of the stack down to `depth` more frames."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        for number in range(300):
            added(number)
        times.append(time.thread_time() - began)
    return max(min(times) / 300, slowest(depth - 1) if depth else 0.0)


def test_no_call_takes_longer_because_of_where_a_chunk_of_the_stack_ends():
    without, within = slowest(300), with_stack_room(slowest)(300)
    if without < 1e-6:
        pytest.skip("this Python keeps its stack in one piece")
    assert within < without / 3  # mapping and unmapping memory takes over 100 times as long as the call
