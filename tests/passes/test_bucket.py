from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.config import Config
from overlapc.errors import ScheduleError
from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.bucket import bucket
from overlapc.passes.run import run_pipeline
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify
from tests.graphs import order_of, peak
from tests.passes.buckets import LAYER, ROOMY, bucketed, with_units


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


@pytest.mark.parametrize(
    "other",
    [
        "@tp(2) dtype=bf16 unit=m",
        "@dp(2) dtype=bf16 unit=n",
        "@dp(2) dtype=bf16",
        '@dp(2) dtype=bf16 unit=m variant="2 blocks"',
    ],
)
def test_collectives_of_another_group_module_or_variant_are_not_merged(other):
    text = LAYER.replace("all_gather(d) @dp(2) dtype=bf16 unit=m", f"all_gather(d) {other}")
    moved, _ = bucketed(text)
    assert "b" in order_of(moved)


def test_different_dtypes_are_merged_except_in_all_reduces():
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


def test_collectives_with_another_module_between_them_are_not_merged():
    """For example, the embedding and the head belong to the root module, but are needed at opposite ends of a step."""
    text = """
        a = all_gather(p) @dp unit=root : 8B 30us; u = wait(a); y = kernel(u) : 0B 500us
        b = all_gather(q) @dp unit=l0 : 8B 30us; v = wait(b); z = kernel(v, y) : 0B 500us
        c = all_gather(r) @dp unit=root : 8B 30us; w = wait(c); o = kernel(z, w) : 0B 500us
    """
    moved, reasons = bucketed(text)
    assert order_of(moved) == order_of(parse(text))
    assert reasons == {}


def test_collectives_that_write_in_place_are_not_merged():
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
    "launches",
    [
        "a = all_reduce(p) @dp unit=m : 8B 30us; {}; b = all_reduce(q) @dp unit=m : 8B 30us",
        "b = all_gather(q) @dp unit=m : 8B 30us; a = all_gather(p) @dp unit=m : 8B 30us; {}",
    ],
    ids=["first", "second"],
)
def test_a_collective_that_is_never_waited_for_is_not_merged(launches: str):
    """Its input may be overwritten at once; a bucket would be sending it until the wait for the other one."""
    text = f"""
        warm = kernel(x) : 0B 900us; p = kernel(x) : 8B 1us
        {launches.format("k = kernel(p) mutates=p : =p 5us")}
        last = kernel(x) : 0B 900us; v = wait(b); y = kernel(v) : 0B 500us
    """
    assert "a" in order_of(bucketed(text)[0])


def test_a_collective_of_a_kind_without_a_row_is_not_merged():
    text = """
        a = all_gather(p) @dp unit=m : 8B 30us; b = all_gather(q) @dp unit=m : 8B 30us
        c = all_gather(r) @dp unit=m collective=permute : 8B 30us
        u = wait(a); v = wait(b); w = wait(c); y = kernel(u, v, w) : 0B 500us
    """
    assert [node.name for node in bucketed(text)[0].starts()] == ["a+1", "c"]


@pytest.mark.parametrize(
    "other", ["comm:gather(d) @dp(2) safe=yes collective=all_gather unit=m", "all_gather(d)"], ids=["waits", "nowhere"]
)
def test_blocking_collectives_and_those_without_a_group_are_not_merged(other):
    text = LAYER.replace("all_gather(d) @dp(2) dtype=bf16 unit=m", other)
    assert "a" in order_of(
        bucketed(text if "all_gather(d)" in other else text.replace("v = wait(b)", "v = view(b)"))[0]
    )


def test_a_step_that_would_be_slower_is_left_alone():
    """Alone, the first collective ends before its result is read; together with the second it would not."""
    text = """
        a = all_gather(p) @dp unit=m : 8B 5us; long = kernel(x) : 0B 50us; u = wait(a); y = kernel(u, long) : 0B 90us
        b = all_gather(q) @tp unit=m : 8B 10us; c = all_gather(q) @dp unit=m : 8B 90us
        k = kernel(y) : 0B 90us; v = wait(c); z = kernel(v, k) : 0B 1us; w = wait(b)
    """
    moved, reasons = bucketed(text, profile=DeviceProfile("quick", collective_floor_ns=1e3))
    assert order_of(moved) == order_of(parse(text))
    assert reasons == {"a": "undone: the simulated step became longer", "c": "undone: the simulated step became longer"}


def test_a_node_that_must_follow_a_member_follows_its_bucket():
    moved, _ = bucketed("""
        r = reduce_scatter(x) @dp unit=m : 0B 50us; c = all_reduce(x) @tp after=r : 0B 50us
        t = reduce_scatter(x) @dp unit=m : 0B 50us; k = kernel(x) : 0B 900us; s = wait(r); u = wait(t); v = wait(c)
    """)
    assert order_of(moved)[:2] == ["r+1", "c"]
    assert moved.node("c").after == ("r+1",)


def test_payloads_are_merged_by_the_given_function():
    schedule = parse(LAYER)
    schedule = replace(
        schedule, nodes=tuple(replace(node, payload=node.name) if node.comm else node for node in schedule.nodes)
    )
    moved, _ = bucket(schedule, replace(ROOMY, merge_payloads=lambda payloads: ("both", *payloads)))
    assert moved.node("a+1").payload == ("both", "a", "b")
    for merge, why in ((lambda payloads: "dtypes differ", "dtypes differ"), (None, "no code for merged collectives")):
        kept, report = bucket(schedule, replace(ROOMY, merge_payloads=merge))
        assert kept is schedule
        assert report.reasons == dict.fromkeys("ab", f"cannot be merged: {why}")


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
    with pytest.raises(ScheduleError, match=r"a\+1 lacks d of its member b"):
        verify(broken, "test", reference=schedule, merged=report.merged)


SLOW = DeviceProfile("slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.5, collective_floor_ns=2)
CONTEXTS = (Context(), Context(profile=SLOW, overlap_margin=1.5, cache_dir=Config().cache_dir))


def limited(ctx: Context, schedule: Schedule, reorder: bool, room: int | None) -> Context:
    budget = None if room is None else peak(schedule) + room
    return replace(ctx, reorder_collectives=reorder, budget_bytes=budget)


@given(with_units(), st.booleans(), st.sampled_from([None, 0, 4]))
@settings(max_examples=300)
def test_random_schedules_keep_what_every_pass_keeps(schedule, reorder, room):
    for ctx in (limited(each, schedule, reorder, room) for each in CONTEXTS):
        moved, report = bucket(schedule, ctx)
        verify(
            moved, "test", reference=schedule, merged=report.merged, may_reorder_collectives=reorder,
            limit_bytes=ctx.limit_bytes(schedule),
        )  # fmt: skip
        assert simulate(moved, ctx.profile).step_ns <= simulate(schedule, ctx.profile).step_ns * (1 + 1e-9)


@given(with_units(), st.booleans(), st.sampled_from([None, 0, 4]), st.sampled_from(CONTEXTS))
@settings(max_examples=50)  # 0.1 s per example
def test_pipelines_that_bucket_stay_within_the_limit_and_are_no_slower(schedule, reorder, room, ctx):
    ctx = limited(ctx, schedule, reorder, room)
    result = run_pipeline(schedule, ctx)
    assert peak(result.schedule) <= ctx.limit_bytes(schedule)
    assert result.after.step_ns <= result.before.step_ns * (1 + 1e-9)
