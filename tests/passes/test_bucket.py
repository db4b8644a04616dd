from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.errors import ScheduleError
from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context, Pass, run_pipeline
from overlapc.passes.bucket import bucket, bucket_finely
from overlapc.passes.bucket_cost import BucketCost
from overlapc.schedule.model import Estimate, Schedule
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify
from tests.graphs import order_of, peak, schedules

FLOOR = DeviceProfile("floor", collective_floor_ns=10e3)
ROOMY = Context(profile=FLOOR, reorder_collectives=True, budget_bytes=1000)


def bucketed(text: str, run: Pass = bucket, **context: object) -> tuple[Schedule, dict[str, str]]:
    schedule = parse(text)
    ctx = replace(ROOMY, **context)
    moved, report = run(schedule, ctx)
    verify(
        moved, "test", reference=schedule, merged=report.merged, limit_bytes=ctx.limit_bytes(schedule),
        may_reorder_collectives=ctx.reorder_collectives,
    )  # fmt: skip
    assert simulate(moved, ctx.profile).step_ns <= simulate(schedule, ctx.profile).step_ns * (1 + 1e-9)
    assert set(report.limits) <= set(report.reasons) <= set(order_of(moved))
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
    assert (node.comm.bytes, node.comm.unit, node.comm.dtype) == (16, "m", "bf16")
    assert node.estimate.ns == 50e3  # one latency saved
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


@pytest.mark.parametrize(
    ("asked_us", "one", "latency_us"),
    [(3, "30us", 10), (12, "30us", 12), (55, "30us", 30), (55, "", 55), (None, "30us", 10)],
    ids=["floor", "asked", "no-longer-than-one", "one-is-unknown", "nobody-knows"],
)
def test_latency_is_at_least_the_profiles_and_at_most_what_one_takes(asked_us, one, latency_us):
    node = parse(f"a = all_gather(p) @dp : 8B {one}; u = wait(a)").node("a")
    asked = None if asked_us is None else Estimate(asked_us * 1e3, "asked")
    assert BucketCost(replace(ROOMY, estimate=lambda node: asked), node).latency_ns == latency_us * 1e3


def test_modules_are_joined_only_where_that_is_faster():
    """The second module's parameter is made by compute that the first one's would have to wait for."""
    text = """
        a = all_gather(p) @dp unit=m : 8B 15us; u = wait(a); y = kernel(u) : 0B 500us
        c = kernel(y) : 8B 1us; b = all_gather(c) @dp unit=n : 8B 15us; v = wait(b); z = kernel(v) : 0B 5us
    """
    moved, _ = bucketed(text)
    assert [node.name for node in moved.starts()] == ["a", "b"]


def test_modules_are_not_joined_where_each_for_itself_is_faster():
    """Joined they take 14us, and both kernels come after; else 12us, and the first kernel runs beside the second."""
    moved, _ = bucketed(passes_of((11, 11), (11, 5)))
    assert [node.name for node in moved.starts()] == ["a0+1", "a1+1"]
    moved, _ = bucketed(passes_of((11, 5), (11, 5)))
    assert [node.name for node in moved.starts()] == ["a0+3"]


@pytest.mark.parametrize(
    "text",
    [
        "warm = kernel(x) : 0B 900us;" + units(11, 2),  # covered
        units(11, 2).replace("@dp unit=m1 : 8B 11us", "@dp unit=m1 : 8B 60us"),  # the second is long
        # the first is covered, as it is needed last
        """
        a0 = all_gather(p) @dp unit=m0 : 8B 11us; a1 = all_gather(p) @dp unit=m1 : 8B 11us
        w1 = wait(a1); k1 = kernel(w1) : 0B 900us; w0 = wait(a0); k0 = kernel(w0) : 0B 5us
        """,
    ],
    ids=["covered", "long", "first-covered"],
)
def test_only_modules_that_are_latency_and_that_nothing_covers_are_joined(text):
    moved, _ = bucketed(text)
    assert [node.name for node in moved.starts()] == ["a0", "a1"]


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
    for other in (text.replace("@dp unit=m :", "@dp :"), text.replace("@dp unit=m mutates", "@tp unit=m mutates")):
        assert [node.name for node in bucketed(other)[0].starts()] == ["a", "b"]
    plain = text.replace("mutates=o : =o", ": 8B")
    assert [node.name for node in bucketed(plain)[0].starts()] == ["a+1"]


@pytest.mark.parametrize(
    "other", ["comm:gather(d) @dp(2) safe=yes collective=all_gather unit=m", "all_gather(d)"], ids=["waits", "nowhere"]
)
def test_what_waits_for_itself_or_goes_nobody_knows_where_is_not_merged(other):
    text = LAYER.replace("all_gather(d) @dp(2) dtype=bf16 unit=m", other)
    assert "a" in order_of(
        bucketed(text if "all_gather(d)" in other else text.replace("v = wait(b)", "v = view(b)"))[0]
    )


def test_a_gather_of_what_compute_made_begins_its_own_bucket():
    moved, reasons = bucketed(LAYER.replace("d = kernel(q) : 0B 1us", "d = kernel(y) : 0B 500us"))
    assert "b" in order_of(moved)
    assert reasons["b"] == "data dependence on d"


@pytest.mark.parametrize(
    ("casts", "joins"),
    [
        ("c = kernel(q) : 0B 20us; d = view(c); e = view(c)", True),  # what both views need counts once
        ("f = kernel(q) : 0B 20us; c = kernel(f) : 0B 10us; d = view(c); e = view(c)", False),
    ],
)
def test_a_quarter_of_a_gathers_time_may_come_along(casts, joins):
    text = f"""
        a = all_gather(p) @dp unit=m : 8B 100us; k = kernel(x) : 0B 900us
        {casts}; b, bb = all_gather(d, e) @dp unit=m : 8B, 8B 100us; u = wait(a); v = wait(b); w = wait(bb)
        y = kernel(u, v, w, k) : 0B 500us
    """
    assert [node.name for node in bucketed(text)[0].starts()] == (["a+1"] if joins else ["a", "b"])


def test_what_came_along_once_is_free_for_the_next():
    text = """
        a = all_gather(p) @dp unit=m : 8B 100us; k = kernel(x) : 0B 900us
        c = kernel(q) : 0B 20us; b = all_gather(c) @dp unit=m : 8B 100us
        d = kernel(c) : 0B 20us; e = all_gather(d) @dp unit=m : 8B 100us; u = wait(a); v = wait(b); w = wait(e)
        y = kernel(u, v, w, k) : 0B 500us
    """
    assert order_of(bucketed(text)[0])[:3] == ["c", "d", "a+2"]


@pytest.mark.parametrize(
    ("made", "joins"),
    [
        ("c = kernel(q) : 0B 500us; {}", True),  # in front of the bucket anyhow
        ("{} t = all_gather(q) @tp : 8B 1us; c = wait(t)", False),
        ("{} c = comm:swap(q) @tp safe=yes : 8B", False),
    ],
    ids=["before", "gathered", "swapped"],
)
def test_what_comes_along_is_compute_that_was_not_there_yet(made, joins):
    text = f"""
        {made.format("a = all_gather(p) @dp unit=m : 8B 100us; k = kernel(x) : 0B 900us;")}
        b = all_gather(c) @dp unit=m : 8B 100us; u = wait(a); v = wait(b); y = kernel(u, v, k) : 0B 500us
    """
    assert ("a+1" in order_of(bucketed(text)[0])) == joins


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


def test_pieces_end_where_nothing_else_runs_with_one_that_is_long_enough():
    """Of reductions that is the end: what is left over goes along with the first of them."""
    reductions = [f"k{at} = kernel(x) : 8B 5us; r{at} = reduce_scatter(k{at}) @dp unit=m : 0B 60us" for at in range(5)]
    moved, _ = bucketed("; ".join([*reductions, *(f"w{at} = wait(r{at})" for at in range(5))]))
    assert [node.name for node in moved.starts()] == ["r0+2", "r3+1"]


def test_fine_pieces_grow_from_the_end_where_nothing_else_runs():
    """10us are latency. Gathers: 30, 30, 50, 90us; reductions: 30 for the last, 30, 50 and 90."""
    gathers = [f"a{at} = all_gather(p{at}) @dp unit=m : 8B 30us" for at in range(8)]
    uses = [f"w{at} = wait(a{at}); k{at} = kernel(w{at}) : 0B 10us" for at in range(8)]
    moved, reasons = bucketed("; ".join([*gathers, *uses]), bucket_finely)
    assert [node.name for node in moved.starts()] == ["a0", "a1", "a2+1", "a4+3"]
    assert reasons["a0"] == reasons["a1"] == "nothing covers all of it: in pieces"
    reductions = [f"k{at} = kernel(x) : 8B 10us; r{at} = reduce_scatter(k{at}) @dp unit=m : 0B 30us" for at in range(8)]
    moved, _ = bucketed("; ".join([*reductions, *(f"w{at} = wait(r{at})" for at in range(8))]), bucket_finely)
    assert [node.name for node in moved.starts()] == ["r0+3", "r4+1", "r6", "r7"]


def test_fine_pieces_grow_no_longer_than_others_and_what_is_covered_is_not_cut():
    gathers = [f"a{at} = all_gather(p{at}) @dp unit=m : 8B 35us" for at in range(24)]
    uses = [f"w{at} = wait(a{at}); k{at} = kernel(w{at}) : 0B 10us" for at in range(24)]
    text = "; ".join([*gathers, *uses])
    starts = [node.name for node in bucketed(text, bucket_finely)[0].starts()]
    assert starts == ["a0", "a1", "a2+1", "a4+2", "a7+3", "a11+3", "a15+3", "a19+4"]
    assert [node.name for node in bucketed(f"warm = kernel(x) : 0B 9ms; {text}", bucket_finely)[0].starts()] == [
        "a0+23"
    ]


def passes_of(*units: tuple[int, int], reductions: bool = False) -> str:
    """A module of two collectives for each (us that one takes, us of compute until the next module's)."""
    lines, ready = [], []
    for at, (each_us, compute_us) in enumerate(units):
        names = (f"a{at}", f"b{at}")
        starts = [f"{name} = {{}}(p) @dp unit=m{at} : 0B {each_us}us" for name in names]
        waits = [f"w{name} = wait({name})" for name in names]
        kernel = f"k{at} = kernel({'x' if reductions else ', '.join(f'w{name}' for name in names)}) : 0B {compute_us}us"
        lines += [*starts, kernel] if reductions else starts
        ready += waits if reductions else [*waits, kernel]
    return "; ".join([*lines, *ready]).format(*["reduce_scatter" if reductions else "all_gather"] * (2 * len(units)))


def test_what_is_covered_counts_all_that_is_on_the_queue():
    """Together the second module's two take 300us and the third's 350us, all of which the stall for the first leaves
    time for. Of reductions each has to be done by the end, so the first one's 500us lack the time that the last takes.
    """
    moved, reasons = bucketed(passes_of((255, 400), (155, 300), (180, 5)))
    assert [node.name for node in moved.starts()] == ["a0", "b0", "a1+1", "a2+1"]
    assert reasons["a0"] == reasons["b0"] == "nothing covers all of it: in pieces"
    moved, _ = bucketed("warm = kernel(x) : 0B 900us;" + passes_of((255, 200), (155, 400), reductions=True))
    assert [node.name for node in moved.starts()] == ["a0", "b0", "a1+1"]


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


SIDE_BY_SIDE = """
    warm = kernel(x) : 0B 900us; a = {0}(p) @dp unit=m : 8B 30us; other = all_reduce(q) @{1} : 0B 5us
    b = {0}(p) @dp unit=m : 8B 30us; last = kernel(warm) : 0B 900us; u = wait(a); v = wait(b); w = wait(other)
"""


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_without_leave_to_pass_others_those_of_other_groups_are_no_hindrance(collective):
    other_group, same_group = SIDE_BY_SIDE.format(collective, "tp"), SIDE_BY_SIDE.format(collective, "dp")
    assert "a+1" in order_of(bucketed(other_group, reorder_collectives=False)[0])
    assert "a" in order_of(bucketed(same_group, reorder_collectives=False)[0])
    assert "a+1" in order_of(bucketed(same_group)[0])


def test_no_start_goes_behind_a_reduction_without_leave_to_pass_others():
    """`r` would take `c`, which reduces its result on, past `q` on the queue of both."""
    text = """
        g = kernel(x) : 4B 5us; r = reduce_scatter(g) @dp unit=m : 2B 30us; s = wait(r)
        c = all_reduce(s) @replicate : 2B 30us; q = all_reduce(p) @replicate : 2B 30us
        h = kernel(x) : 4B 5us; t = reduce_scatter(h) @dp unit=m : 2B 30us
        w = wait(t); u = wait(c); v = wait(q); return u, v, w
    """
    moved, _ = bucketed(text)
    assert [node.name for node in moved.starts()] == ["q", "r+1", "c"]
    kept, _ = bucketed(text, reorder_collectives=False)
    assert [node.name for node in kept.starts()] == ["r", "c", "q", "t"]


def test_what_has_to_come_after_a_member_comes_after_its_bucket():
    moved, _ = bucketed("""
        r = reduce_scatter(x) @dp unit=m : 0B 50us; c = all_reduce(x) @tp after=r : 0B 50us
        t = reduce_scatter(x) @dp unit=m : 0B 50us; k = kernel(x) : 0B 900us; s = wait(r); u = wait(t); v = wait(c)
    """)
    assert order_of(moved)[:2] == ["r+1", "c"]
    assert moved.node("c").after == ("r+1",)


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


@pytest.mark.parametrize(
    ("first", "second", "both_ns"),
    [("30us", "30us", 50e3), ("11us", "2us", 11e3), ("2us", "11us", 11e3), ("30us", "", None), ("", "30us", None)],
)
def test_a_bucket_saves_a_latency_but_is_no_shorter_than_its_longest(first, second, both_ns):
    text = f"""
        a = all_gather(p) @dp unit=m : 8B {first}; b = all_gather(q) @dp unit=m : 8B {second}
        k = kernel(x) : 0B 900us; u = wait(a); v = wait(b); y = kernel(u, v, k)
    """
    estimate = bucketed(text)[0].node("a+1").estimate
    assert (None if estimate is None else estimate.ns) == both_ns


def test_a_bucket_is_no_longer_than_its_members_one_after_the_other():
    moved, _ = bucketed(LAYER, estimate=lambda node: Estimate(node.comm.bytes * 9e3, "asked"))
    assert moved.node("a+1").estimate.ns == 60e3


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
        for each in (bucket, bucket_finely):
            moved, report = each(schedule, ctx)
            verify(
                moved, "test", reference=schedule, merged=report.merged, may_reorder_collectives=reorder,
                limit_bytes=ctx.limit_bytes(schedule),
            )  # fmt: skip
            assert simulate(moved, ctx.profile).step_ns <= simulate(schedule, ctx.profile).step_ns * (1 + 1e-9)
        result = run_pipeline(schedule, ctx)
        assert peak(result.schedule) <= ctx.limit_bytes(schedule)
        assert result.after.step_ns <= result.before.step_ns * (1 + 1e-9)
