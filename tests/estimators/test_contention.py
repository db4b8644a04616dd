"""How much collectives slow compute and each other while they overlap."""

import pytest

from overlapc.estimators.contention import (
    ComputeKind,
    Contender,
    collective_stretches,
    compute_stretch,
    contender_of,
    traffic_of,
)
from overlapc.estimators.device import DeviceProfile, Link, Slowdown
from overlapc.estimators.profiles.profile_file import load_profile, profile_from_json, profile_to_json
from overlapc.estimators.timeline import simulate
from overlapc.schedule.text import parse

H200 = load_profile("h200-nvlink")
GATHER = "g = all_gather(p) @dp(4) dtype=bfloat16 : 400MiB 1000us"
WAITING = DeviceProfile("gpu", slowdowns={"other": Slowdown(1.5, 2.0)}, collectives_wait_for_kernels=True)


def traffic(text=GATHER, profile=H200):
    return traffic_of(parse(text).nodes[0], profile)


def matmul(rows, columns):
    text = f"m = extern:mm(a, b) flops=9 write={rows * columns * 2}B in=bfloat16"
    return contender_of(parse(text).nodes[0])


def moved(size):
    return contender_of(parse(f"k = kernel(a) read={size}B : 0B").nodes[0])


@pytest.mark.parametrize(
    ("rows", "columns", "measured"),
    [(4096, 1024, 1.98), (4096, 4096, 1.51), (4096, 14336, 1.44)],  # benchmarks/contention.py on 4 H200s, 729a013
)
def test_matmuls_take_more_waves_beside_a_collective_as_measured(rows, columns, measured):
    assert compute_stretch(matmul(rows, columns), [traffic()], H200) == pytest.approx(measured, abs=0.13)


def test_a_matmul_that_needs_few_multiprocessors_is_not_slowed():
    assert compute_stretch(matmul(512, 1024), [traffic()], H200) == 1.0


def test_without_a_number_of_multiprocessors_a_matmul_is_slowed_by_the_factor():
    profile = DeviceProfile("d", slowdowns={"other": Slowdown(1.3, 1.1)})
    assert compute_stretch(matmul(4096, 4096), [traffic(profile=profile)], profile) == 1.3
    assert compute_stretch(Contender(ComputeKind.ATTENTION), [traffic(profile=profile)], profile) == 1.1


POINTS = DeviceProfile(
    "d",
    multiprocessors=132,
    slowdowns={
        "other": Slowdown(
            1.3, 1.1, multiprocessors=33.0, matmuls=((1, 2.0), (4, 1.5)), memories=((1000, 1.5), (100_000, 1.1))
        )
    },
)


@pytest.mark.parametrize(
    ("rows", "columns", "times"),
    [(4096, 1024, 2.0), (4096, 2048, 1.75), (4096, 4096, 1.5), (8192, 14336, 1.5), (512, 1024, 1.0), (2048, 1024, 2.0)],
)
def test_matmuls_are_slowed_as_measured_for_their_number_of_waves(rows, columns, times):
    """Slowdowns are interpolated by the logarithm of the waves; small tiles fill the device where large ones do not."""
    assert compute_stretch(matmul(rows, columns), [traffic(profile=POINTS)], POINTS) == pytest.approx(times)


def test_small_kernels_are_slowed_more():
    found = [compute_stretch(moved(size), [traffic(profile=POINTS)], POINTS) for size in (10, 10_000, 10**9)]
    assert found == [1.5, pytest.approx(1.3), 1.1]
    assert profile_from_json(profile_to_json(POINTS)).slowdowns == POINTS.slowdowns


def test_two_collectives_take_multiprocessors_from_a_matmul_each():
    one = traffic(profile=POINTS)
    assert compute_stretch(matmul(4096, 4096), [one, one], POINTS) == pytest.approx(2.0)


def test_collectives_on_fewer_channels_slow_matmuls_less():
    slow = [
        compute_stretch(matmul(8192, 14336), [traffic(GATHER.replace(" dtype", f" channels={n} dtype"))], H200)
        for n in (0, 16, 8)
    ]
    assert slow[0] > slow[1] > slow[2] > 1


def test_groups_share_only_the_links_that_both_cross():
    profile = DeviceProfile("d", host_link=Link(1e9, 0.0), network_link=Link(1e9, 0.0), ranks_per_host=4)

    def step_ns(second, dp="0-3"):
        return simulate(
            parse(f"g = all_gather(p) @dp(4) ranks={dp} : 1000B 750ns; h = all_gather(q) {second} : 1000B 750ns;"
                  "w = wait(g); v = wait(h)"),
            profile,
        ).step_ns  # fmt: skip

    assert step_ns("@dp(4) ranks=0-3") == 1500  # one queue runs them one after the other
    assert step_ns("@tp(4) ranks=0-3") == pytest.approx(1500)  # side by side at half the speed
    assert step_ns("@far(4) ranks=0,4,8,12") == 750  # over the network
    assert step_ns("@far(4) ranks=0,4,8,12", dp="0,4,8,12") == pytest.approx(1500)


def test_small_messages_do_not_fill_a_link():
    """Half of the time of a small message is latency, so that two of them fit on a link."""
    profile = DeviceProfile("d", host_link=Link(1e9, 0.0), ranks_per_host=4)
    both = [traffic(f"g = all_gather(p) @dp(4) : {size}B 2000ns", profile) for size in (1000, 1000)]
    assert collective_stretches(None, both, profile) == [1.0, 1.0]
    both = [traffic(f"g = all_gather(p) @dp(4) : {size}B 2000ns", profile) for size in (1000, 3000)]
    assert collective_stretches(None, both, profile) == [1.5, 1.5]


def test_a_collective_launched_with_a_kernel_begins_when_the_kernel_ends():
    timeline = simulate(
        parse("g = all_gather(p) @dp : 0B 30ns; a = kernel(x) : 0B 20ns; b = kernel(a) : 0B 20ns; w = wait(g)"), WAITING
    )
    assert timeline.span("a") == (0, 20)  # alone
    assert timeline.span("g")[0] == 20
    assert timeline.span("b") == (20, 55)  # overlapped until 50, at half the speed
    assert timeline.step_ns == 55


def test_a_collective_queued_after_another_begins_between_kernels():
    text = "g = all_gather(p) @dp : 0B 5ns; h = all_gather(q) @dp : 0B 5ns; a = kernel(x) : 0B 20ns"
    timeline = simulate(parse(text + "; b = kernel(a) : 0B 20ns; w = wait(h)"), WAITING)
    assert [timeline.span(name)[0] for name in "gh"] == [20, 42.5]  # g ends during b, and h begins after b
    assert simulate(parse(text + "; w = wait(h)"), WAITING).span("h") == (25, 30)


def test_the_gap_between_kernels_is_idle_time():
    timeline = simulate(parse("a = kernel(x) : 0B 20ns; b = kernel(a) : 0B 20ns"), DeviceProfile("d", kernel_gap_ns=3))
    assert (timeline.step_ns, timeline.launch_idle_ns, timeline.compute_ns) == (46, 6, 40)
