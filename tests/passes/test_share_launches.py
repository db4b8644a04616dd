"""Which kernels `share_launches` merges into one launch, and which it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.share_launches import share_launches
from overlapc.schedule.model import Estimate, Kind, Schedule, Work
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify
from tests.graphs import order_of, peak, schedules

GAPS = DeviceProfile("gaps", kernel_gap_ns=3e3)
CASTS = """
    w = kernel(x) : 0B 9us; c = kernel(p) : 4B 1us; d = kernel(q) : 4B 2us; e = kernel(r) : 4B 2us
    a = all_gather(c, d, e) @dp(2) : 8B 30us; u = wait(a); y = kernel(u) : 0B 5us
"""


def coded(text: str, kinds: str = "") -> Schedule:
    """Return the schedule `text` in which each kernel has the payload (kind, name).

    kinds: kinds of kernels by name (`c:1 d:2`); the kind of all other kernels is "cast".
    """
    kind_of = dict(each.split(":") for each in kinds.split())
    schedule = parse(text)
    return replace(
        schedule,
        nodes=tuple(
            replace(node, payload=(kind_of.get(node.name, "cast"), node.name)) if node.kind is Kind.KERNEL else node
            for node in schedule.nodes
        ),
    )


def together(payloads: Sequence[Any]) -> Any:
    return (payloads[0][0], *(name for _, *names in payloads for name in names))


def shared(schedule: Schedule, merge: Callable[[Sequence[Any]], Any] = together, **options: Any) -> Schedule:
    ctx = Context(
        profile=GAPS, merge_payloads=merge, kernel_kind=lambda payload: payload[0] or None, budget_bytes=1000, **options
    )
    moved, report = share_launches(schedule, ctx)
    verify(moved, "test", reference=schedule, merged=report.merged, limit_bytes=1000)
    assert simulate(moved, GAPS).step_ns <= simulate(schedule, GAPS).step_ns
    return moved


def test_the_casts_in_front_of_a_bucket_are_one_launch() -> None:
    moved = shared(coded(CASTS))
    assert order_of(moved) == ["w", "c+2", "a", "u", "y"]
    launch = moved.node("c+2")
    assert (launch.reads, launch.writes) == (("p", "q", "r"), ("c", "d", "e"))
    assert launch.payload == ("cast", "c", "d", "e")
    assert launch.estimate == Estimate(5e3, "given")
    saved_ns = simulate(coded(CASTS), GAPS).step_ns - simulate(moved, GAPS).step_ns
    assert saved_ns == 2 * GAPS.kernel_gap_ns


def test_work_is_summed_and_estimated_again() -> None:
    text = CASTS.replace("kernel(p)", "kernel(p) read=8B write=4B").replace("kernel(q)", "kernel(q) read=6B write=3B")
    schedule = coded(text.replace("kernel(r)", "kernel(r) read=2B write=1B"))
    launch = shared(schedule, estimate=lambda node: Estimate(node.work.read_bytes * 100.0, "asked")).node("c+2")
    assert launch.work == Work(read_bytes=16, write_bytes=8)
    assert launch.estimate == Estimate(1600.0, "asked")
    # The estimate is capped: a launch takes no longer than its parts one after the other.
    assert shared(schedule, estimate=lambda node: Estimate(1e6, "asked")).node("c+2").estimate == Estimate(5e3, "given")


def test_kernels_of_different_collectives_do_not_share_a_launch() -> None:
    schedule = coded("""
        c = kernel(p) : 4B 1us; d = kernel(q) : 4B 1us; a = all_gather(c) @dp(2) : 8B 30us
        b = all_gather(d) @dp(2) : 8B 30us; u = wait(a); v = wait(b); y = kernel(u, v) : 0B 5us
    """)
    assert shared(schedule) is schedule


def test_kernels_with_others_between_them_do_not_share_a_launch() -> None:
    schedule = coded(CASTS.replace("d = kernel", "m = extern:mm(x) : 0B 9us; d = kernel"))
    assert order_of(shared(schedule)) == ["w", "c", "m", "d+1", "a", "u", "y"]


def test_kernels_of_other_kinds_do_not_share_a_launch() -> None:
    assert order_of(shared(coded(CASTS, "d:other"))) == ["w", "d", "c+1", "a", "u", "y"]
    alone = coded(CASTS, "c:1 d:2 e:3")
    assert shared(alone) is alone


def test_kernels_without_a_kind_do_not_share_a_launch() -> None:
    schedule = coded(CASTS, "c: d: e:")
    assert shared(schedule) is schedule


def test_a_kernel_does_not_pass_a_node_that_overwrites_its_input() -> None:
    schedule = coded("""
        c = kernel(p) : 4B 1us; n = kernel(p) mutates=p : =p 1us; d = kernel(q) : 4B 1us
        a = all_gather(c, d) @dp(2) : 8B 30us; u = wait(a); y = kernel(u, n) : 0B 5us
    """)
    assert shared(schedule) is schedule


def test_a_group_that_is_too_large_for_one_launch_is_halved() -> None:
    names = "cdefg"
    schedule = coded(
        "; ".join(f"{name} = kernel(p) : 4B 1us" for name in names)
        + "; a = all_gather(c, d, e, f, g) @dp(2) : 8B 30us; u = wait(a); y = kernel(u) : 0B 5us"
    )
    moved = shared(schedule, lambda payloads: "too many" if len(payloads) > 2 else together(payloads))
    assert order_of(moved) == ["c+1", "e", "f+1", "a", "u", "y"]


def test_the_number_of_launches_can_be_limited() -> None:
    text = """
        c = kernel(p) : 4B 1us; d = kernel(p) : 4B 1us; a = all_gather(c, d) @dp(2) : 8B 30us; u = wait(a)
        e = kernel(p) : 4B 1us; f = kernel(p) : 4B 1us; b = all_gather(e, f) @dp(2) : 8B 30us; v = wait(b)
    """
    assert order_of(shared(coded(text))) == ["c+1", "a", "u", "e+1", "b", "v"]
    assert order_of(shared(coded(text), most_moves=1)) == ["c+1", "a", "u", "e", "f", "b", "v"]


def test_a_launch_that_needs_too_much_memory_is_not_made() -> None:
    # Each cast frees its input: run one after the other, only one result is alive in addition to the inputs.
    text = """
        p = extern:make(x) : 400B 1us; q = extern:make(x) : 400B 1us; c = kernel(p) : 200B 1us; d = kernel(q) : 200B 1us
        a = all_gather(c, d) @dp(2) : 0B 30us; u = wait(a)
    """
    schedule = coded(text)
    assert peak(schedule) == 1000
    assert shared(schedule) is schedule
    assert order_of(shared(coded(text.replace("400B", "300B")))) == ["p", "q", "c+1", "a", "u"]


def test_without_kernel_kinds_no_launch_is_shared() -> None:
    schedule = parse(CASTS)
    assert share_launches(schedule, Context(profile=GAPS))[0] is schedule


@settings(max_examples=100)
@given(schedules(), st.integers(0, 2))
def test_random_schedules_stay_valid_and_within_memory(schedule: Schedule, kinds: int) -> None:
    nodes = tuple(
        replace(node, payload=(str(at % (kinds + 1)), node.name)) if node.kind is Kind.KERNEL else node
        for at, node in enumerate(schedule.nodes)
    )
    shared_peak = peak(schedule)
    ctx = Context(
        profile=GAPS, merge_payloads=together, kernel_kind=lambda payload: payload[0], budget_bytes=shared_peak
    )
    moved, report = share_launches(replace(schedule, nodes=nodes), ctx)
    verify(moved, "test", reference=schedule, merged=report.merged, limit_bytes=shared_peak)
