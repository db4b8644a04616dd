"""The calibration of GPUs, run over gloo on CPUs: every number is measured, and ranks stay in step."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from overlapc.errors import CalibrationError, ConfigError
from overlapc.estimators.calibration.clock import CpuClock, collective_ns, compute_ns, launch_ns
from overlapc.estimators.calibration.effort import AttentionShape, Effort
from overlapc.estimators.calibration.measure_contention import mean_of, slowdown_of
from overlapc.estimators.calibration.measure_machine import Measurement
from overlapc.estimators.calibration.quick_profile import cpu_derived, median_of, profile_document, with_copies
from overlapc.estimators.profiles.profile_file import profile_from_json, profile_to_json
from overlapc.schedule.collective_kinds import NAMES
from tests.ranks import values_on_ranks

TINY = Effort(
    matmuls={"fp32": [(8, 8, 8), (16, 16, 16), (8, 16, 32)], "bf16": [(8, 8, 8)]},
    attention={"fp32": [AttentionShape(1, 2, 1, 8, 4), AttentionShape(1, 2, 1, 16, 4)]},
    copy_bytes=4096,
    collectives=NAMES,
    collective_bytes=[256, 4096],
    collective_dtypes=("fp32",),
    beside_bytes=65536,
    beside_matmul=(32, 32, 32),
    layer=[64, 100, 7],
    load_s=0.0005,
    burst_matmuls=[(8, 8, 8), (16, 16, 16)],
    layer_matmuls=[(16, 16, 16), (8, 16, 32)],
    pause_fractions=[0.0, 20.0],
    pause_collective_bytes=4096,
)


def measure_tiny():
    measurement = Measurement(torch.device("cpu"), TINY)
    measurement.compute()
    measurement.communication()
    measurement.contention()
    return measurement.result()


def test_four_ranks_measure_everything_for_themselves_and_for_pairs():
    results = values_on_ranks(measure_tiny, 4, timeout_s=120)
    document = profile_document("here", "measured: now", results, cpu_derived)
    profile = profile_from_json(json.loads(json.dumps(document)))
    assert {(t.collective, t.ranks) for t in profile.tables} == {(c, n) for c in NAMES for n in (2, 4)}
    assert all(ns > 0 for table in profile.tables for _, ns in table.points)
    assert set(profile.curves) == {"matmul.fp32", "attention.fp32", "attention_backward.fp32"}
    assert [flops for flops, _ in profile.curves["matmul.fp32"]] == [
        1024,
        8192,
    ]  # two shapes of equal FLOPs give one point
    assert profile.slowdowns["other"].matmul >= 1
    assert profile.slowdowns["other"].own_matmul == profile.collective_slowdown >= 1
    assert profile.collective_floor_ns > 0
    assert [flops for flops, _ in profile.throttle["matmul"]] == [1024, 8192]
    assert profile.throttled("matmul", 1024) >= 1
    (paused, _), (busy, _) = profile.clock_by_utilization  # in thousandths
    assert 0 <= paused < 500 < busy <= 1000
    assert all(0 < clock_ratio <= 1 for _, clock_ratio in profile.clock_by_utilization)
    assert 0 <= profile.collective_load <= 1
    assert profile.host_link.bytes_per_s > 0
    assert profile.flops_per_s["vector"] == profile.flops_per_s["fp32"] / 4
    assert profile.origins["flops_per_s.vector"].startswith("derived")
    assert profile_from_json(profile_to_json(profile)) == profile


def test_calls_that_no_collective_overlapped_are_left_out():
    """Here long matmuls and attention: curves have the other points, and the longest one counts for longer calls."""
    one_wave, four, fourteen = shapes = [(4096, 8, 1024), (4096, 8, 4096), (4096, 8, 14336)]
    effort = replace(TINY, beside_matmuls=shapes, beside_moved=[8, 64])
    gather = {
        f"matmul {one_wave}": (2.0, 1.2), f"gradient {one_wave}": (2.2, 1.3),
        f"matmul {four}": (1.5, 1.25), f"gradient {fourteen}": (1.3, 1.3), "memory 8": (1.5, 2.5),
    }  # fmt: skip
    found = slowdown_of(effort, 132, gather)
    assert found["matmuls"] == [[1, pytest.approx(2.1)], [4, 1.5], [14, 1.3]]
    assert (found["matmul"], found["own_matmul"]) == (1.3, pytest.approx(1.275))
    assert (found["memory"], found["memories"], found["own_memory"]) == (1.5, [[8, 1.5]], 2.5)
    assert "attention" not in found
    scatter = {f"matmul {four}": (1.7, 1.35), "memory 8": (1.1, 1.5), "attention": (1.2, 1.1)}
    other = slowdown_of(effort, 132, mean_of([gather, scatter]))  # only calls that both collectives overlapped
    assert (other["matmuls"], other["memory"]) == ([[4, pytest.approx(1.6)]], pytest.approx(1.3))
    with pytest.raises(CalibrationError, match="out of step"):
        slowdown_of(effort, 132, {"memory 8": (1.5, 2.5)})


def test_medians_keep_values_that_are_not_numbers():
    ranks = [{"a": [1.0, "x"], "n": 3}, {"a": [5.0, "x"], "n": 3}, {"a": [2.0, "x"], "n": 3}]
    assert median_of(ranks) == {"a": [2.0, "x"], "n": 3}
    assert median_of(ranks, max) == {"a": [5.0, "x"], "n": 3}
    with pytest.raises(ValueError, match="argument"):
        median_of([[1.0], [1.0, 2.0]])


def test_the_profile_has_the_clock_of_the_slowest_device():
    ranks = [
        {"quantities": {"clock_by_utilization": [[700.0 + at, 0.7], [1000.0, ratio]], "kernel_floor_ns": 1.0 + at},
         "tables": [], "curves": {}, "facts": {}}
        for at, ratio in enumerate((0.9, 0.96, 0.92))
    ]  # fmt: skip
    quantities = profile_document("x", "o", ranks, lambda _: {})["quantities"]
    assert quantities["clock_by_utilization"]["value"] == [[702.0, 0.7], [1000.0, 0.96]]
    assert quantities["kernel_floor_ns"]["value"] == 2.0


def copied(ranks, ns_per_byte):
    """Return a rank's measurement of gathers by copies: 1000 ns, and `ns_per_byte` for what a rank sends."""
    sent = (ranks - 1) / ranks
    points = [[size, 1000.0 + sent * size * ns_per_byte] for size in (4, 4096, 65536)]
    table = {"collective": "all_gather via copy", "ranks": ranks, "dtype": "", "points": points}
    return {"quantities": {}, "tables": [table], "curves": {}, "facts": {}}


def test_copies_between_more_ranks_are_added_to_a_profile_and_replace_those_between_as_many():
    nothing = {"quantities": {}, "tables": [], "curves": {}, "facts": {}}
    document = profile_document("x", "first", [nothing], lambda _: {})
    for ranks, ns_per_byte in ((2, 1.0), (4, 4.0), (4, 2.0)):
        document = with_copies(document, f"{ns_per_byte}", [copied(ranks, ns_per_byte)] * ranks)
    assert [(table["ranks"], table["origin"]) for table in document["tables"]] == [(2, "1.0"), (4, "2.0")]
    link = profile_from_json(document).copy_link
    assert (link.bytes_per_s, link.step_ns) == (pytest.approx(0.5e9), pytest.approx(1000))  # of the slower table


def test_a_call_is_timed_between_other_calls_and_a_launch_by_itself():
    clock = CpuClock()
    small, large = (torch.rand(size, size) for size in (8, 256))
    assert compute_ns(clock, lambda: large @ large) > compute_ns(clock, lambda: small @ small) > 0
    order = []
    compute_ns(clock, lambda: order.append("call"), rounds=2, ahead=lambda: order.append("ahead"))
    assert [order[at + 1] for at, each in enumerate(order) if each == "ahead"] == ["call", "call"]
    calls = []
    launch_ns(clock, lambda: calls.append(1), launches=50, rounds=2)
    assert len(calls) == 1 + 2 * 2  # a sample of 100 launches is two calls of 50


class Scripted(CpuClock):
    """A clock that returns given times of samples."""

    def __init__(self, queued, *spans_ns):
        self.queued, self.spans_ns = queued, list(spans_ns)

    def between_ns(self, earlier, later):
        return self.spans_ns.pop(0)


@pytest.mark.parametrize(("queued", "counts"), [(True, 57.0), (False, 58.0)])
def test_the_time_of_a_queued_collective_excludes_stalls_of_the_host(queued, counts):
    """Seen on H200s: a table had 213 us between 15 and 205 us, where other runs had 57 us."""
    launched = []

    def launch():
        launched.append(1)
        return SimpleNamespace(wait=lambda: None)

    assert collective_ns(Scripted(queued, 2130.0, 580.0, 570.0), launch, 10) == counts
    assert len(launched) == (1 + 10 if queued else 1) + 3 * 11


def test_a_profile_with_an_unknown_quantity_is_refused():
    nonsense = {"quantities": {"host_linc": 1.0}, "tables": [], "curves": {}, "facts": {}}
    with pytest.raises(ConfigError, match="no quantity named 'host_linc'; nearest: host_link"):
        profile_document("x", "o", [nonsense], lambda _: {})
