"""The simulated timeline of a schedule: exposed and hidden time, contention, host time, and the lower bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.estimators.device import IDEAL, DeviceProfile, Slowdown
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.estimators.timeline import Gap, simulate
from overlapc.schedule.model import Estimate
from overlapc.schedule.text import parse
from tests.graphs import reordered, schedules

SLOW = DeviceProfile("slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.25)


def test_a_collective_whose_wait_follows_its_start_is_fully_exposed():
    timeline = simulate(parse("a = kernel(x) : 0B 10ns; g = all_gather(p) @dp : 0B 30ns; w = wait(g); b = kernel(w)"))
    assert timeline.step_ns == 40
    assert timeline.span("g") == (10, 40)
    assert timeline.span("w") == (10, 40)
    assert (timeline.collectives["g"].exposed_ns, timeline.collectives["g"].hidden_ns) == (30, 0)


def test_compute_hides_the_collective_that_it_overlaps():
    timeline = simulate(parse("g = all_gather(p) @dp : 0B 30ns; a = kernel(x) : 0B 20ns; w = wait(g)"))
    assert timeline.step_ns == 30
    assert (timeline.collectives["g"].exposed_ns, timeline.collectives["g"].hidden_ns) == (10, 20)


def test_a_kernel_hides_its_duration_of_only_one_collective():
    """Two collectives in flight, one kernel: it hides 20 ns of the first and nothing of the second."""
    timeline = simulate(
        parse("g = all_gather(p) @dp : 0B 30ns; h = all_gather(q) @dp : 0B 30ns; a = kernel(x) : 0B 20ns;"
              "w = wait(h); v = wait(g)")
    )  # fmt: skip
    assert timeline.step_ns == 60
    # While g still runs, the stream is blocked in h's wait: this time counts as exposed time of g.
    assert {name: each.exposed_ns for name, each in timeline.collectives.items()} == {"g": 10, "h": 30}


def test_every_group_has_its_own_queue():
    timeline = simulate(
        parse("g = all_gather(p) @dp : 0B 30ns; h = all_gather(q) @tp : 0B 30ns; w = wait(h); v = wait(g)")
    )
    assert timeline.step_ns == 30
    assert timeline.exposed_ns == 30


def test_a_collective_begins_after_the_compute_launched_before_it():
    timeline = simulate(parse("a = kernel(x) : 0B 10ns; g = all_gather(p) @dp : 0B 5ns; w = wait(g)"))
    assert timeline.span("g") == (10, 15)


def test_the_simulation_of_a_very_long_step_ends():
    """The step takes 22 days; a replay adds multiples of 2^-10 ns exactly up to 2^43 ns (two hours)."""
    days = parse("""
        a = all_gather(p) @dp : 8B 1922056000239us; b = all_gather(q) @tp : 8B 1922056000239us
        k = kernel(x) : 0B 333.3us; w = wait(a); y = kernel(w) : 0B 1us; v = wait(b); z = kernel(v) : 0B 1us
    """)
    profile = DeviceProfile("slow", launch_ns=2117.3798828125, collective_slowdown=1.3)
    assert simulate(days, profile).step_ns >= 1922056000239e3


def test_synchronous_communication_is_exposed():
    timeline = simulate(
        parse("g = all_gather(p) @dp : 0B 30ns; c = comm:send(x) @dp : 0B 7ns; a = kernel(x) : 0B 5ns; w = wait(g)")
    )
    assert timeline.step_ns == 42
    assert (timeline.collectives["g"].exposed_ns, timeline.collectives["c"].exposed_ns) == (30, 7)


def test_a_start_without_a_wait_is_exposed_at_the_end_of_the_step():
    timeline = simulate(parse("g = all_gather(p) @dp : 0B 30ns; a = kernel(x) : 0B 10ns"))
    assert timeline.step_ns == 30
    assert timeline.collectives["g"].exposed_ns == 20


def test_contention_slows_compute_and_collectives():
    """The gather's 30 ns take 37.5 ns beside compute, in which the kernel does 18.75 of its 20 ns."""
    text = "g = all_gather(p) @dp : 0B 30ns; a = {}(x) {} : 0B 20ns; w = wait(g)"
    memory = simulate(parse(text.format("kernel", "")), SLOW)
    assert memory.span("g") == (0, 37.5)
    assert memory.step_ns == pytest.approx(37.5 + 1.25)
    matmul = simulate(parse(text.format("extern", "flops=9")), SLOW)
    assert matmul.span("a") == (0, 30)  # 20 ns at 1.5; the gather then has 6 ns left without contention
    assert matmul.step_ns == pytest.approx(36)
    assert matmul.compute_ns == 30


def test_launches_bound_a_step_of_tiny_kernels():
    profile = DeviceProfile("slow host", launch_ns=10)
    text = "a = kernel(x) : 0B 1ns; b = kernel(a) : 0B 1ns; c = kernel(b) : 0B 1ns"
    timeline = simulate(parse(text), profile)
    assert (timeline.step_ns, timeline.launch_idle_ns) == (31, 28)
    assert timeline.lower_bound_ns == 31


def test_a_synchronous_host_cannot_run_ahead():
    text = "a = kernel(x) : 0B 100ns; b = kernel(a) : 0B 100ns"
    assert simulate(parse(text), DeviceProfile("gpu", launch_ns=10)).step_ns == 210
    assert simulate(parse(text), DeviceProfile("cpu", launch_ns=10, synchronous=True)).step_ns == 220


def test_a_queued_collective_begins_at_the_end_of_the_previous_one_also_if_it_waits_for_kernels():
    profile = DeviceProfile("gpu", collectives_wait_for_kernels=True)
    text = """
        g = all_gather(p) @dp : 0B 30ns; h = all_gather(q) @dp : 0B 30ns; w = wait(g)
        a = kernel(w) : 0B 20ns; b = kernel(a) : 0B 20ns; v = wait(h)
    """
    timeline = simulate(parse(text), profile)
    assert timeline.span("h") == (30, 60)
    assert timeline.step_ns == 70


def test_a_schedule_with_other_estimates_is_simulated_again():
    """Costs are cached between orders of a schedule; a node with another estimate is another node."""
    schedule = parse("a = kernel(x) : 0B 20ns; g = all_gather(p) @dp : 0B 30ns; w = wait(g)")
    moved = schedule.move("g", before="a")
    assert (simulate(schedule).step_ns, simulate(moved).step_ns) == (50, 30)
    slower = moved.with_estimates({"a": Estimate(70.0, "measured"), "g": None})
    timeline = simulate(slower)
    assert (timeline.step_ns, timeline.unknown) == (70, ("g",))
    assert simulate(moved).step_ns == 30


def test_nodes_without_an_estimate_are_listed():
    timeline = simulate(parse("g = all_gather(p) @dp; a = kernel(x); v = view(a); w = wait(g)"))
    assert timeline.unknown == ("g", "a")


def test_the_bound_includes_communication_that_no_order_can_hide():
    """The last scatter follows all compute, and the first gather precedes it."""
    text = """
        g = all_gather(p) @dp : 0B 30ns; w = wait(g); a = kernel(w) : 0B 100ns
        s = reduce_scatter(a) @dp : 0B 40ns; v = wait(s)
    """
    assert simulate(parse(text)).lower_bound_ns == 170
    queue = "\n".join(f"g{n} = all_gather(p) @dp : 0B 50ns; w{n} = wait(g{n})" for n in range(4)) + "\n"
    assert simulate(parse(queue + "y = kernel(w0, w1, w2, w3) : 0B 7ns")).lower_bound_ns == 207


@given(schedules(), st.data())
@settings(max_examples=200)
def test_no_order_beats_the_bound_and_times_add_up_to_the_step(schedule, data):
    moved = data.draw(reordered(schedule))
    host = DeviceProfile("host", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.25, launch_ns=3.0)
    cpu = DeviceProfile("cpu", launch_ns=3.0, synchronous=True)
    waits = DeviceProfile("waits", slowdowns={"other": Slowdown(1.5, 2.0)}, collectives_wait_for_kernels=True)
    for profile in (IDEAL, SLOW, host, cpu, waits, load_profile("h200-nvlink")):
        bound = simulate(schedule, profile).lower_bound_ns
        timeline = simulate(moved, profile)
        assert timeline.lower_bound_ns == pytest.approx(bound)
        assert timeline.step_ns >= bound * (1 - 1e-9)
        spent = timeline.compute_ns + timeline.exposed_ns + timeline.launch_idle_ns
        assert timeline.step_ns == pytest.approx(spent)
        parts = timeline.gap.contention_ns, timeline.gap.exposed_ns, timeline.gap.idle_ns
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(timeline.step_ns - bound, abs=1e-2 * len(schedule.nodes))
        for each in timeline.collectives.values():
            assert -1e-6 <= each.exposed_ns <= each.end_ns - each.start_ns + 1e-6
        for start, end in zip(timeline.start_ns, timeline.end_ns, strict=True):
            assert 0 <= start <= end <= timeline.step_ns + 1e-6


def test_the_gap_to_the_bound_is_split_into_contention_exposed_and_idle_time():
    """The stream is idle for 60 ns: 30 precede any kernel in every order, the other 30 are due to this order."""
    exposed = simulate(parse("""
        g = all_gather(p) @dp : 0B 30ns; w = wait(g); a = kernel(w) : 0B 9ns
        r = reduce_scatter(a) @dp : 0B 30ns; s = wait(r); b = kernel(w) : 0B 40ns
    """)).gap  # fmt: skip
    assert exposed == Gap(contention_ns=0.0, exposed_ns=30.0, idle_ns=0.0)
    slow = simulate(parse("r = all_reduce(p) @dp : 0B 30ns; a = kernel(x) : 0B 90ns; w = wait(r)"), SLOW)
    assert slow.compute_ns > 90
    assert slow.gap.contention_ns == pytest.approx(0.0, abs=0.1), "every order has that contention"
