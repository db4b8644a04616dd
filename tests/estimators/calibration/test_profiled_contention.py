"""Contention as measured from profiled kernels of a GPU, here from invented spans."""

import pytest

from overlapc.estimators.calibration.profiled_contention import Span, contention_in, held_multiprocessors

MARK = ("spin_kernel", 10_000)


def spans(*kernels, nccl=()):
    """Return spans of kernels that run one after the other, given as (name, ns), and of collectives (start, end)."""
    found, now = [], 0
    for name, ns in kernels:
        found.append(Span(name, now, now + ns))
        now += ns
    return sorted([*found, *(Span("ncclDevKernel", *each) for each in nccl)], key=lambda span: span.start_ns)


def test_only_kernels_overlapped_for_their_whole_duration_count():
    alone = [MARK, ("mm", 100), ("mm", 104)]
    beside = [
        MARK,
        ("mm", 120),
        ("mm", 150),
        ("mm", 154),
        ("mm", 110),
    ]  # from 20204 ns; the collective covers the second and third
    after = [MARK, ("mm", 102), ("fill", 5)]
    found = contention_in(["mm"], spans(*alone, *beside, *after, nccl=[(20_324, 20_630)]), collective_ns=200)["mm"]
    assert found.alone_ns == 102  # the median of matmuls that no collective overlaps; the fill does not count
    assert found.compute == pytest.approx(152 / 102)
    assert found.collective == pytest.approx(306 / 200)
    assert (found.mhz_before, found.mhz) == (pytest.approx(2000), pytest.approx(2000))


def test_every_call_has_its_own_phases():
    one = [MARK, ("a", 10), MARK, ("a", 20), MARK, ("a", 10)]
    other = [MARK, ("b", 30), MARK, ("b", 30), MARK, ("b", 30)]
    found = contention_in(["a", "b"], spans(("load", 500), *one, *other, nccl=[(20_510, 20_530)]), collective_ns=20)
    assert (found["a"].compute, found["a"].collective) == (2.0, 1.0)
    assert (found["b"].compute, found["b"].collective) == (None, None)  # never overlapped


def test_a_collective_that_waits_for_a_rank_does_not_count_as_overlap():
    """It holds multiprocessors but moves no data; on four H200s it did not slow additions."""
    phases = [MARK, ("add", 10), MARK, ("add", 11), ("add", 13), MARK, ("add", 10)]
    waiting = contention_in(["add"], spans(*phases, nccl=[(20_000, 20_200)]), collective_ns=20)["add"]
    assert (waiting.compute, waiting.collective) == (None, None)
    moving = contention_in(["add"], spans(*phases, nccl=[(20_000, 20_021), (20_021, 20_041)]), collective_ns=20)["add"]
    assert moving.compute == pytest.approx(1.2)


def test_held_multiprocessors_follow_from_slowdowns_by_waves():
    """One wave becomes two with any multiprocessor held; eight waves of 132 become ten with 27 held."""
    assert held_multiprocessors([(132, 2.0), (1056, 11 / 8)], 132) in range(27, 36)
    assert held_multiprocessors([(132, 1.0), (1056, 1.0)], 132) == 0
