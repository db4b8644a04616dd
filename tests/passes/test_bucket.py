from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.errors import ScheduleError
from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context, run_pipeline
from overlapc.passes.bucket import bucket
from overlapc.schedule.model import Estimate, Schedule
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify
from tests.graphs import order_of, peak, schedules

FLOOR = DeviceProfile("floor", collective_floor_ns=10e3)
ROOMY = Context(profile=FLOOR, reorder_collectives=True, budget_bytes=1000)


def bucketed(text: str, **context: object) -> tuple[Schedule, dict[str, str]]:
    schedule = parse(text)
    ctx = replace(ROOMY, **context)
    moved, report = bucket(schedule, ctx)
    verify(
        moved, "test", reference=schedule, merged=report.merged, limit_bytes=ctx.limit_bytes(schedule),
        may_reorder_collectives=ctx.reorder_collectives,
    )  # fmt: skip
    assert simulate(moved, ctx.profile).step_ns <= simulate(schedule, ctx.profile).step_ns * (1 + 1e-9)
    return moved, report.reasons


LAYER = """
    warm = kernel(x) : 0B 900us
    c = kernel(p) : 0B 1us; a = all_gather(c) @dp(2) dtype=bf16 unit=m : 8B 30us; u = wait(a)
    y = kernel(u, warm) : 0B 5us
    d = kernel(q) : 0B 1us; b = all_gather(d) @dp(2) dtype=bf16 unit=m : 8B 30us; v = wait(b)
    z = kernel(v, y) : 0B 5us
"""


def test_gathers_of_a_module_start_as_one_where_the_first_did():
    moved, reasons = bucketed(LAYER)
    assert order_of(moved) == ["warm", "c", "d", "a+1", "u", "y", "v", "z"]
    node = moved.node("a+1")
    assert (node.reads, node.writes) == (("c", "d"), ("a", "b"))
    assert (node.comm.bytes, node.comm.unit, node.estimate.ns) == (16, "m", 50e3)  # one latency saved
    assert reasons == {"a+1": "bucket of m"}


def test_reductions_of_a_module_start_as_one_where_the_last_did():
    moved, _ = bucketed("""
        g = kernel(x) : 4B 5us; r = reduce_scatter(g) @dp(2) unit=m : 2B 30us; s = wait(r); o = kernel(s) : 2B 1us
        h = kernel(x) : 4B 5us; t = reduce_scatter(h) @dp(2) unit=m : 2B 30us; w = wait(t); last = kernel(h) : 0B 900us
        return o, w
    """)
    assert order_of(moved) == ["g", "h", "r+1", "s", "o", "w", "last"]


@pytest.mark.parametrize("other", ["@tp(2) dtype=bf16 unit=m", "@dp(2) dtype=bf16 unit=n", "@dp(2) dtype=bf16"])
def test_another_group_or_module_stays_apart(other):
    text = LAYER.replace("all_gather(d) @dp(2) dtype=bf16 unit=m", f"all_gather(d) {other}")
    moved, _ = bucketed(text)
    assert "b" in order_of(moved)


def test_dtypes_join_but_for_those_of_all_reduces():
    moved, _ = bucketed(LAYER.replace("all_gather(d) @dp(2) dtype=bf16", "all_gather(d) @dp(2) dtype=fp32"))
    assert moved.node("a+1").comm.dtype == "mixed"
    text = """
        x = kernel(p) : 4B 5us; r = {0}(x) @dp(2) dtype=bf16 unit=m : 2B 30us
        y = kernel(p) : 4B 5us; t = {0}(y) @dp(2) dtype={1} unit=m : 2B 30us
        s = wait(r); w = wait(t); return s, w
    """
    scatters = bucketed(text.format("reduce_scatter", "fp32"))[0].starts()
    assert [(node.name, node.comm.dtype) for node in scatters] == [("r+1", "mixed")]
    assert [node.name for node in bucketed(text.format("all_reduce", "bf16"))[0].starts()] == ["r+1"]
    assert [node.name for node in bucketed(text.format("all_reduce", "fp32"))[0].starts()] == ["r", "t"]


def units(each_us: float, count: int = 4) -> str:
    """`count` modules of one gather each, and one kernel each."""
    gathers = [f"a{at} = all_gather(p{at}) @dp unit=m{at} : 8B {each_us}us" for at in range(count)]
    uses = [f"w{at} = wait(a{at}); k{at} = kernel(w{at}) : 0B 5us" for at in range(count)]
    return ";".join(gathers + uses)


def test_modules_that_are_nothing_but_latency_share_a_bucket():
    latency, _ = bucketed(units(11))
    assert [node.name for node in latency.starts()] == ["a0+3"]
    some, _ = bucketed(units(16))
    assert [node.name for node in some.starts()] == ["a0+1", "a2+1"], "two travel beside the compute of two"
    enough, _ = bucketed(units(60))
    assert [node.name for node in enough.starts()] == ["a0", "a1", "a2", "a3"]


def test_latency_is_that_of_the_group():
    """1,024 ranks take a thousand steps: 60 us are nothing but latency there, and pieces would be no sooner."""

    def slow_start(node):
        return Estimate(55e3 + node.comm.bytes * 1e3, "asked")

    moved, _ = bucketed(units(60), estimate=slow_start)
    assert [node.name for node in moved.starts()] == ["a0+3"]
    one_module = units(60).replace("m1", "m0").replace("m2", "m0").replace("m3", "m0")
    assert len(bucketed(one_module)[0].starts()) == 2
    assert len(bucketed(one_module, estimate=slow_start)[0].starts()) == 1


def test_modules_are_joined_only_where_that_is_faster():
    """The second module's parameter is made by compute that the first one's would have to wait for."""
    text = """
        a = all_gather(p) @dp unit=m : 8B 15us; u = wait(a); y = kernel(u) : 0B 500us
        c = kernel(y) : 8B 1us; b = all_gather(c) @dp unit=n : 8B 15us; v = wait(b); z = kernel(v) : 0B 5us
    """
    moved, _ = bucketed(text)
    assert [node.name for node in moved.starts()] == ["a", "b"]


def test_what_another_module_stands_between_stays_apart():
    """The embedding and the head belong to one module, and are needed at the two ends of a step."""
    text = """
        a = all_gather(p) @dp unit=root : 8B 30us; u = wait(a); y = kernel(u) : 0B 500us
        b = all_gather(q) @dp unit=l0 : 8B 30us; v = wait(b); z = kernel(v, y) : 0B 500us
        c = all_gather(r) @dp unit=root : 8B 30us; w = wait(c); o = kernel(z, w) : 0B 500us
    """
    moved, reasons = bucketed(text)
    assert order_of(moved) == order_of(parse(text))
    assert reasons == {}


def test_modules_are_not_joined_past_a_collective_of_no_module():
    """All are nothing but latency; the one in the middle belongs to nobody."""
    moved, _ = bucketed(units(11, 3).replace(" unit=m1", ""))
    assert [node.name for node in moved.starts()] == ["a0", "a1", "a2"]


def test_what_writes_in_place_is_not_merged():
    text = """
        a = all_gather(p) @dp unit=m : 8B 30us; b = all_gather(q) @dp unit=m mutates=o : =o 30us
        u = wait(a); v = wait(b); y = kernel(u, v) : 0B 500us
    """
    assert [node.name for node in bucketed(text)[0].starts()] == ["a", "b"]
    plain = text.replace("mutates=o : =o", ": 8B")
    assert [node.name for node in bucketed(plain)[0].starts()] == ["a+1"]


def test_a_gather_of_what_compute_made_begins_its_own_bucket():
    moved, reasons = bucketed(LAYER.replace("d = kernel(q) : 0B 1us", "d = kernel(y) : 0B 500us"))
    assert "b" in order_of(moved)
    assert reasons["b"] == "data dependence on d"


def test_a_reduction_that_needs_another_is_not_merged_with_it():
    moved, reasons = bucketed("""
        g = kernel(x) : 4B 5us; r = reduce_scatter(g) @dp(2) unit=m : 2B 30us; s = wait(r)
        h = kernel(s) : 4B 5us; t = reduce_scatter(h) @dp(2) unit=m : 2B 30us; w = wait(t); last = kernel(x) : 0B 900us
    """)
    assert {"r", "t"} <= set(order_of(moved))
    assert reasons["t"] == "data dependence on r"


def test_a_barrier_keeps_both_sides_apart():
    moved, _ = bucketed(LAYER.replace("d = kernel(q)", "k = comm:send(x) @pp; d = kernel(q)"))
    assert {"a", "b"} <= set(order_of(moved))


def test_what_nothing_covers_is_cut_into_pieces():
    gathers = [f"a{at} = all_gather(p{at}) @dp unit=m : 8B 60us" for at in range(4)]
    uses = [f"w{at} = wait(a{at}); k{at} = kernel(w{at}) : 0B 5us" for at in range(4)]
    covered, _ = bucketed("warm = kernel(x) : 0B 900us;" + ";".join(gathers + uses))
    first, reasons = bucketed(";".join(gathers + uses))
    assert [node.name for node in covered.starts()] == ["a0+3"]
    # 60 + 60 - 10 us is more than ten latencies.
    assert [node.name for node in first.starts()] == ["a0+1", "a2+1"]
    assert set(reasons.values()) == {"bucket of m"}


def test_what_is_left_over_is_no_piece_of_its_own():
    gathers = [f"a{at} = all_gather(p{at}) @dp unit=m : 8B 60us" for at in range(5)]
    uses = [f"w{at} = wait(a{at}); k{at} = kernel(w{at}) : 0B 5us" for at in range(5)]
    moved, _ = bucketed(";".join(gathers + uses))
    assert [node.name for node in moved.starts()] == ["a0+1", "a2+2"]


def test_memory_cuts_buckets_into_pieces_and_then_refuses_them():
    def layer(at: int) -> str:
        return f"""
            a{at} = all_gather(p{at}) @dp unit=m : 8B 60us; w{at} = wait(a{at}); k{at} = kernel(w{at}, x) : 0B 99us
        """

    text = "warm = kernel(x) : 0B 900us\n" + "\n".join(layer(at) for at in range(4))
    free = peak(parse(text))
    assert len(bucketed(text, budget_bytes=free + 24)[0].starts()) == 1
    assert len(bucketed(text, budget_bytes=free + 8)[0].starts()) == 2
    moved, reasons = bucketed(text, budget_bytes=free)
    assert len(moved.starts()) == 4
    assert reasons == {f"a{at}": "peak memory" for at in range(4)}


def test_a_step_that_would_be_slower_is_left_alone():
    """Alone, the first is there when it is needed; together with the second it would not be."""
    text = """
        a = all_gather(p) @dp unit=m : 8B 5us; long = kernel(x) : 0B 50us; u = wait(a); y = kernel(u, long) : 0B 90us
        b = all_gather(q) @tp unit=m : 8B 10us; c = all_gather(q) @dp unit=m : 8B 90us
        k = kernel(y) : 0B 90us; v = wait(c); z = kernel(v, k) : 0B 1us; w = wait(b)
    """
    moved, reasons = bucketed(text, profile=DeviceProfile("quick", collective_floor_ns=1e3))
    assert order_of(moved) == order_of(parse(text))
    assert reasons == {"a": "simulates slower", "c": "simulates slower"}


BACKWARD = """
    a = all_gather(p) @dp unit=m : 8B 30us; u = wait(a); g = kernel(u) : 8B 50us
    r = reduce_scatter(g) @dp unit=m : 4B 30us; s = wait(r)
    b = all_gather(q) @dp unit=m : 8B 30us; v = wait(b); h = kernel(v) : 8B 50us
    t = reduce_scatter(h) @dp unit=m : 4B 30us; w = wait(t); last = kernel(h) : 0B 900us; return s, w
"""


def test_collectives_pass_others_of_their_group_only_where_that_is_allowed():
    assert [node.name for node in bucketed(BACKWARD)[0].starts()] == ["a+1", "r+1"]
    moved, _ = bucketed(BACKWARD, reorder_collectives=False)
    assert [node.name for node in moved.starts()] == ["a", "r", "b", "t"]


def test_payloads_are_merged_by_who_made_them():
    schedule = parse(LAYER)
    schedule = replace(
        schedule, nodes=tuple(replace(node, payload=node.name) if node.comm else node for node in schedule.nodes)
    )
    moved, _ = bucket(schedule, replace(ROOMY, merge_payloads=lambda payloads: ("both", *payloads)))
    assert moved.node("a+1").payload == ("both", "a", "b")
    for merge, why in ((lambda payloads: "dtypes differ", "dtypes differ"), (None, "no code for buckets")):
        kept, report = bucket(schedule, replace(ROOMY, merge_payloads=merge))
        assert kept is schedule
        assert report.reasons == dict.fromkeys("ab", f"cannot be merged: {why}")


def test_who_estimates_is_asked_about_buckets():
    moved, _ = bucketed(LAYER, estimate=lambda node: Estimate(node.comm.bytes * 1e3, "asked"))
    assert moved.node("a+1").estimate == Estimate(16e3, "asked")


def test_reports_count_a_bucket_as_its_members():
    result = run_pipeline(parse(LAYER), replace(ROOMY, passes=("bucket",)))
    (record,) = result.collectives
    assert (record.name, record.members, record.exposed_before_ns) == ("a+1", ("a", "b"), 60e3)


def test_a_merge_that_loses_something_is_caught():
    schedule = parse(LAYER)
    moved, report = bucket(schedule, ROOMY)
    broken = replace(
        moved, nodes=tuple(replace(n, writes=("a", "b"), reads=("c",)) if n.name == "a+1" else n for n in moved.nodes)
    )
    with pytest.raises(ScheduleError, match=r"a\+1 does without d of b"):
        verify(broken, "test", reference=schedule, merged=report.merged)


@st.composite
def with_units(draw: st.DrawFn) -> Schedule:
    """Random schedules whose collectives belong to one of two modules or to none."""
    schedule = draw(schedules(most_nodes=20))
    unit = st.sampled_from(["m", "m", "n", ""])
    return replace(
        schedule,
        nodes=tuple(
            replace(node, comm=replace(node.comm, unit=draw(unit))) if node.comm is not None else node
            for node in schedule.nodes
        ),
    )


@given(with_units(), st.booleans(), st.sampled_from([None, 0, 4]))
@settings(max_examples=300, deadline=None)
def test_random_schedules_keep_what_every_pass_keeps(schedule, reorder, room):
    slow = DeviceProfile(
        "slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.5, collective_floor_ns=2
    )
    budget = None if room is None else peak(schedule) + room
    for ctx in (
        Context(reorder_collectives=reorder, budget_bytes=budget),
        Context(reorder_collectives=reorder, budget_bytes=budget, profile=slow, overlap_margin=1.5),
    ):
        moved, report = bucket(schedule, ctx)
        verify(
            moved, "test", reference=schedule, merged=report.merged, may_reorder_collectives=reorder,
            limit_bytes=ctx.limit_bytes(schedule),
        )  # fmt: skip
        assert simulate(moved, ctx.profile).step_ns <= simulate(schedule, ctx.profile).step_ns * (1 + 1e-9)
        result = run_pipeline(schedule, ctx)
        assert peak(result.schedule) <= ctx.limit_bytes(schedule)
        assert result.after.step_ns <= result.before.step_ns * (1 + 1e-9)
