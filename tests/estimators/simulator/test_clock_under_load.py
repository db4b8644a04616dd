"""The GPU clock under a step's own load scales the estimates of library calls."""

import math
from dataclasses import replace

import pytest

from overlapc.estimators.calibration.measure_load import clock_ratio_of, utilization_at
from overlapc.estimators.contention import ComputeKind, contender_of
from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.estimators.measured import Call, MeasuredCalls, Times
from overlapc.estimators.profiles.profile_file import profile_from_json, profile_to_json
from overlapc.estimators.simulator.clock_under_load import settled
from overlapc.estimators.timeline import simulate
from overlapc.schedule.text import parse

THROTTLED = DeviceProfile(
    "gpu",
    throttle={"matmul": ((100, 1.5), (10_000, 1.2)), "attention": ((100, 1.3),)},
    clock_by_utilization=((700, 0.7), (1000, 0.9)),
    collective_load=0.1,
)
BUSY = """m = extern:mm(a, b) flops=100 write=8B in=bfloat16 : 8B 150ns
t = extern:attention(m) flops=100 : 8B 130ns
k = kernel(t) : 8B 100ns"""


def stretched(text):
    """Return the matmul's time in the step `text` relative to its time in a burst, and the timeline."""
    after = settled(simulate(parse(text), THROTTLED))
    return after.schedule.node("m").estimate.ns / 100, after


def test_a_step_without_a_pause_is_near_full_load():
    times, after = stretched(BUSY)
    assert times == pytest.approx(1.5 * 0.9)
    assert [after.span(name)[1] - after.span(name)[0] for name in "mtk"] == [
        pytest.approx(135), pytest.approx(117), 100,
    ]  # fmt: skip
    assert after.schedule.node("m").estimate.source == "given"


def test_a_step_with_long_waits_is_near_the_highest_clock():
    times, after = stretched(BUSY + "\ng = all_gather(k) @dp : 8B 1000ns\nw = wait(g)")
    assert times == pytest.approx(1.5 * 0.7)
    assert after.schedule.node("t").estimate.ns == pytest.approx(100)  # never faster than in a burst
    assert after.exposed_ns == 1000


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5])
def test_the_clock_is_interpolated_by_load_and_collectives_count_partly(part):
    text = BUSY + "\ng = all_gather(k) @dp : 8B 30ns\nw = wait(g)"
    after = settled(simulate(parse(text), replace(THROTTLED, collective_load=part)))
    busy = round(1000 * (380 + 30 * part) / 410) / 1000
    clock_ratio = 0.7 + 0.2 * math.log(busy / 0.7) / math.log(1 / 0.7)
    assert after.schedule.node("m").estimate.ns == pytest.approx(150 * clock_ratio)


def test_compute_slowed_by_a_collective_counts_with_its_own_time_as_load():
    """The stream is never idle, but computes for only a third of the time because the collective slows it."""
    slowed = replace(THROTTLED, slowdowns={"other": Slowdown(matmul=3.0, memory=3.0, attention=3.0)})
    timeline = simulate(
        parse("g = all_gather(x) @dp : 8B 2000ns; " + BUSY.replace("\n", "; ") + "; w = wait(g)"), slowed
    )
    assert timeline.compute_ns == 3 * 380
    assert settled(timeline).schedule.node("m").estimate.ns == pytest.approx(150 * 0.7)


def test_the_clock_ratio_is_fitted_to_the_time_of_a_layer():
    """One call is slower in the layer than in its burst, one as fast, and one does not depend on the clock."""
    bursts = [(100.0, 1.4), (100.0, 1.1), (50.0, 1.0)]
    assert clock_ratio_of(bursts, 250.0) == pytest.approx(1 / 1.4, abs=1e-3)
    assert clock_ratio_of(bursts, 100 * 1.12 + 100 + 50) == pytest.approx(0.8, abs=1e-3)
    assert clock_ratio_of(bursts, 100 * 1.33 + 100 * 1.045 + 50) == pytest.approx(0.95, abs=1e-3)
    assert clock_ratio_of(bursts, 999.0) == pytest.approx(1.0, abs=1e-3)


def test_utilization_is_interpolated_from_the_clock_ratio():
    clock_ratio = [[600.0, 0.7], [800.0, 0.8], [1000.0, 1.0]]
    assert [utilization_at(clock_ratio, value) for value in (0.6, 0.7, 0.75, 0.8, 0.95, 1.0)] == pytest.approx(
        [0.6, 0.6, 0.7, 0.8, 0.95, 1.0]
    )


def test_a_collective_begins_a_gap_after_its_input():
    text = "k = kernel(x) : 8B 100ns; g = all_gather(k) @dp : 8B 30ns; w = wait(g)"
    assert simulate(parse(text), DeviceProfile("gpu", collective_gap_ns=5)).step_ns == 135
    assert simulate(parse(text), DeviceProfile("gpu")).step_ns == 130


@pytest.mark.parametrize("profile", [DeviceProfile("gpu"), replace(THROTTLED, clock_by_utilization=())])
def test_without_known_throttling_nothing_changes(profile):
    timeline = simulate(parse(BUSY), profile)
    assert settled(timeline) is timeline


def test_a_time_measured_in_a_burst_is_estimated_at_full_load(tmp_path):
    import torch

    (node,) = parse("m = extern:mm(a, b) flops=100 write=8B in=bfloat16").nodes
    times = Times(tmp_path, torch.device("cpu"))
    times.put("k", 1000.0)
    calls = MeasuredCalls(
        lambda _: Call("k", torch.device("cpu"), lambda: pytest.fail("measured again")), times, THROTTLED
    )
    assert contender_of(node).kind is ComputeKind.MATMUL
    assert calls.estimate(node).ns == pytest.approx(1500)


def test_a_stored_profile_has_the_throttling():
    again = profile_from_json(profile_to_json(THROTTLED))
    assert again == replace(THROTTLED, origins=again.origins)
