"""What is read off the kernels of a GPU, on kernels made up."""

import pytest

from overlapc.estimators.calibration.profiled_contention import Span, contention_in, held_multiprocessors

MARK = ("spin_kernel", 10_000)


def spans(*kernels, nccl=()):
    """Kernels one behind the other as (name, ns), and collectives as (start, end)."""
    found, now = [], 0
    for name, ns in kernels:
        found.append(Span(name, now, now + ns))
        now += ns
    return sorted([*found, *(Span("ncclDevKernel", *each) for each in nccl)], key=lambda span: span.start_ns)


def test_only_kernels_with_company_throughout_count():
    alone = [MARK, ("mm", 100), ("mm", 104)]
    beside = [MARK, ("mm", 120), ("mm", 150), ("mm", 154), ("mm", 110)]  # from 20204: the collective from the second on
    after = [MARK, ("mm", 102), ("fill", 5)]
    found = contention_in(["mm"], spans(*alone, *beside, *after, nccl=[(20_324, 20_630)]), collective_ns=200)["mm"]
    assert found.alone_ns == 102  # the median of what ran without: fills do not count
    assert found.compute == pytest.approx(152 / 102)
    assert found.collective == pytest.approx(306 / 200)
    assert (found.mhz_before, found.mhz) == (pytest.approx(2000), pytest.approx(2000))


def test_several_calls_have_phases_of_their_own():
    one = [MARK, ("a", 10), MARK, ("a", 20), MARK, ("a", 10)]
    other = [MARK, ("b", 30), MARK, ("b", 30), MARK, ("b", 30)]
    found = contention_in(["a", "b"], spans(("load", 500), *one, *other, nccl=[(20_510, 20_530)]), collective_ns=20)
    assert (found["a"].compute, found["a"].collective) == (2.0, 1.0)
    assert (found["b"].compute, found["b"].collective) == (None, None)  # it never was overlapped


def test_a_collective_that_waits_for_a_rank_is_no_company():
    """It holds multiprocessors but moves nothing: seen on four H200s, it left adds as fast as alone."""
    phases = [MARK, ("add", 10), MARK, ("add", 11), ("add", 13), MARK, ("add", 10)]
    waiting = contention_in(["add"], spans(*phases, nccl=[(20_000, 20_200)]), collective_ns=20)["add"]
    assert (waiting.compute, waiting.collective) == (None, None)
    moving = contention_in(["add"], spans(*phases, nccl=[(20_000, 20_021), (20_021, 20_041)]), collective_ns=20)["add"]
    assert moving.compute == pytest.approx(1.2)


def test_waves_tell_how_many_multiprocessors_a_collective_holds():
    """One wave becomes two with any held; eight waves of 132 become ten with 27 held."""
    assert held_multiprocessors([(132, 2.0), (1056, 11 / 8)], 132) in range(27, 36)
    assert held_multiprocessors([(132, 1.0), (1056, 1.0)], 132) == 0
