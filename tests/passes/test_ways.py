from dataclasses import replace

import pytest
from hypothesis import given, settings

from overlapc.errors import ConfigError
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.timeline import simulate
from overlapc.passes import ways
from overlapc.passes.base import Context, PassReport
from overlapc.passes.judge import best, cost
from overlapc.passes.pipeline import AFTER, ENDS, FIRST, ORDER, WAYS, Way
from overlapc.passes.run import run_pipeline
from overlapc.passes.runner import run_passes, select
from overlapc.passes.ways import GOOD_ENOUGH, default_names
from overlapc.schedule.model import Estimate
from overlapc.schedule.text import parse
from tests.graphs import check_kept, order_of, peak, schedules

# The gradient of the weight (dw) is all that can cover the scatter, and stands behind its wait.
COMPUTE_COVERS = """
    dx = extern:mm(g, w) flops=9 : 0B 50us; rs = reduce_scatter(dx) @tp : 0B 40us; s = wait(rs)
    y = kernel(s) : 0B 50us; dw = extern:mm(g, x) flops=9 : 0B 50us; return y, dw
"""


def test_compute_moves_under_what_nothing_else_covers():
    result = run_pipeline(parse(COMPUTE_COVERS), Context())
    assert order_of(result.schedule) == ["dx", "rs", "dw", "s", "y"]
    assert result.after.exposed_ns == 0
    assert {report.name for report in result.reports} == set(ORDER)


def test_the_first_way_that_leaves_nothing_exposed_is_taken():
    result = run_pipeline(parse("ag = all_gather(p) @dp : 0B 5us; a = kernel(x) : 0B 9us; w = wait(ag)"), Context())
    assert [report.name for report in result.reports] == list(ORDER)


# The first gather leaves the device idle for most of the time, so `m` takes half of what it takes at full load.
MOSTLY_IDLE = """
    ag = all_gather(p) @tp : 0B 900us; v = wait(ag); g = kernel(v) : 0B 9us; rs = reduce_scatter(g) @dp : 0B 90us
    m = extern:mm(v) flops=100 in=bfloat16 : 0B 100us; s = wait(rs); y = kernel(s) : 0B 9us; k = kernel(v) : 0B 60us
"""


OFTEN_IDLE = ((700, 0.5), (1000, 1.0))


@pytest.mark.parametrize("nodes_in_all", [1, 1000], ids=["by-bound", "by-first-way"])
@pytest.mark.parametrize(("heat", "covers"), [((), ["m"]), (OFTEN_IDLE, ["m", "k"])], ids=["full-load", "idle"])
def test_compute_covers_what_it_does_at_the_clock_that_the_step_leads_to(monkeypatch, heat, covers, nodes_in_all):
    monkeypatch.setattr(ways, "NODES_IN_ALL", nodes_in_all)
    schedule, profile = parse(MOSTLY_IDLE), DeviceProfile("gpu", throttle={"matmul": ((1, 2.0),)}, heat=heat)
    result = run_pipeline(schedule, Context(profile=profile))
    order = order_of(result.schedule)
    assert sorted(order[order.index("rs") + 1 : order.index("s")]) == sorted(covers)
    assert result.after.exposed_ns == 900e3
    # What ways went by is not what is reported: that is found from the estimates that came, once.
    assert result.schedule.node("m").estimate.ns == (50e3 if heat else 100e3)


@pytest.mark.parametrize("stop", ["plan_overlap", "fill_collectives"])
def test_stopping_early_stops_on_the_way_that_was_chosen(stop):
    schedule, dumped = parse(COMPUTE_COVERS), {}
    whole = run_pipeline(schedule, Context())
    ctx = Context(stop_after=stop, dump=dumped.__setitem__)
    names = [report.name for report in whole.reports]
    expected = names[: names.index(stop) + 1]
    assert [report.name for report in run_pipeline(schedule, ctx).reports] == expected
    assert list(dumped) == [
        f"{at:02}_{name}.{when}" for at, name in enumerate(expected, 1) for when in ("before", "after")
    ]


def test_dumps_are_of_the_way_that_was_chosen_alone():
    dumped = {}
    result = run_pipeline(parse(COMPUTE_COVERS), Context(dump=dumped.__setitem__))
    assert list(dumped) == [
        f"{at:02}_{report.name}.{when}" for at, report in enumerate(result.reports, 1) for when in ("before", "after")
    ]


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_no_way_is_better_than_the_one_taken(schedule):
    for ctx in (Context(), Context(reorder_collectives=True, profile=DeviceProfile("d", launch_ns=3.0))):
        result = run_pipeline(schedule, ctx)
        check_kept(schedule, result.schedule, ctx)
        if result.after.exposed_ns <= GOOD_ENOUGH * result.after.step_ns:
            continue
        given_ctx = replace(ctx, incoming_peak_bytes=peak(schedule))
        for way in WAYS:
            ahead = replace(given_ctx, overlap_margin=ctx.overlap_margin * way.margin)
            ended, _ = run_passes(schedule, ahead, select((*FIRST, *way.passes)))
            ended, _ = run_passes(ended, given_ctx, select(ENDS))
            assert cost(result.schedule, ctx) <= cost(ended, ctx)


def test_of_equal_steps_the_one_that_exposes_less_is_cheaper():
    """The kernel runs beside the collective or before it; the second waits for something that never matters."""
    beside = parse("""
        r = reduce_scatter(g) @dp : 0B 9us; k = kernel(x) : 0B 5us; s = wait(r)
        q = all_gather(p) @tp : 0B 20us; v = wait(q); y = kernel(s, v) : 0B 5us
    """)
    behind = beside.replace_order(["q", "r", "k", "s", "v", "y"])
    assert cost(behind, Context())[0] < cost(beside, Context())[0]
    same = parse("q = all_gather(p) @dp : 0B 9us; k = kernel(x) : 0B 5us; v = wait(q); y = kernel(v) : 0B 5us")
    other = same.with_estimates({"k": Estimate(9e3, "given"), "y": Estimate(5e3, "given")})
    assert simulate(same).step_ns == simulate(other).step_ns
    assert cost(other, Context()) < cost(same, Context())


@pytest.fixture
def tried(monkeypatch):
    """The ways that are tried from now on; none of them does anything."""
    tried: list[Way] = []
    monkeypatch.setattr(ways, "_passes", lambda way, *_: (tried.append(way), select(()))[1])
    return tried


@pytest.mark.parametrize(("nodes_in_all", "count"), [(14, 1), (15, 2), (1, 1), (100, len(WAYS))])
def test_large_schedules_try_fewer_ways_but_one(monkeypatch, tried, nodes_in_all, count):
    """The last of those that there is time for is the best one again, from finer buckets."""
    schedule = parse(COMPUTE_COVERS)
    assert len(schedule.nodes) == 5
    monkeypatch.setattr(ways, "NODES_IN_ALL", nodes_in_all)
    run_pipeline(schedule, Context())
    assert tried == list(WAYS[:count])


@pytest.mark.parametrize(("nodes_in_all", "gone"), [(5, [0]), (14, [0]), (15, [0, 0]), (20, [0, 0, 1])])
def test_a_way_is_gone_to_know_the_clock_where_there_is_time_for_more_than_two(monkeypatch, tried, nodes_in_all, gone):
    monkeypatch.setattr(ways, "NODES_IN_ALL", nodes_in_all)
    profile = DeviceProfile("gpu", throttle={"matmul": ((1, 2.0),)}, heat=OFTEN_IDLE)
    run_pipeline(parse(COMPUTE_COVERS), Context(profile=profile))
    assert tried == [WAYS[at] for at in gone]


@pytest.mark.parametrize(("exposed_ns", "count"), [(0, 1), (90, 1), (200, len(WAYS))])
def test_what_leaves_less_than_a_thousandth_exposed_ends_the_search(tried, exposed_ns, count):
    text = "ag = all_gather(p) @dp : 0B {}ns; k = kernel(x) : 0B 50us; w = wait(ag); y = kernel(w) : 0B 50us"
    run_pipeline(parse(text.format(50_000 + exposed_ns)), Context())
    assert tried == list(WAYS[:count])


def gathers_of_one_module(count: int, each_us: int, compute_us: int, last_us: int = 5) -> str:
    starts = [f"a{at} = all_gather(p{at}) @dp unit=m : 8B {each_us}us" for at in range(count)]
    uses = [f"w{at} = wait(a{at}); k{at} = kernel(w{at}) : 0B {compute_us}us" for at in range(count)]
    return "; ".join([*starts, *uses, f"last = kernel(k{count - 1}) : 0B {last_us}us"])


FINELY, WHOLE = ["a0", "a1", "a2+1", "a4+3"], ["a0+7"]


@pytest.mark.parametrize(
    ("compute_us", "last_us", "nodes_in_all", "starts"),
    [
        (10, 5, 100, FINELY),  # 160us are exposed instead of 170
        (5, 5, 100, WHOLE),  # 180 instead of 170
        (10, 170_000, 100, WHOLE),  # next to nothing is exposed
        (10, 5, 36, FINELY),  # one way from 18 nodes, and it again
        (10, 5, 35, WHOLE),
    ],
    ids=["better", "worse", "good-enough", "time", "no-time"],
)
def test_the_best_way_is_gone_again_from_finer_buckets(monkeypatch, compute_us, last_us, nodes_in_all, starts):
    monkeypatch.setattr(ways, "NODES_IN_ALL", nodes_in_all)
    floor = DeviceProfile("floor", collective_floor_ns=10e3)
    ctx = Context(profile=floor, reorder_collectives=True, budget_bytes=1000)
    result = run_pipeline(parse(gathers_of_one_module(8, 30, compute_us, last_us)), ctx)
    assert [node.name for node in result.schedule.starts()] == starts
    assert result.reports[0].name == ("bucket_finely" if starts == FINELY else "bucket")


def test_a_dump_of_finer_buckets_is_of_what_was_chosen():
    dumped = {}
    floor = DeviceProfile("floor", collective_floor_ns=10e3)
    ctx = Context(profile=floor, reorder_collectives=True, budget_bytes=1000, dump=dumped.__setitem__)
    result = run_pipeline(parse(gathers_of_one_module(8, 30, 10)), ctx)
    assert [node.name for node in parse(dumped["01_bucket_finely.after"]).starts()] == FINELY
    assert list(dumped)[-1] == f"{len(result.reports):02}_{AFTER[-1]}.after"


@pytest.mark.parametrize(
    ("costs", "which"),
    [
        ([(1000.0, 9.0), (1004.9, 8.0)], 1),  # as short, and less is exposed
        ([(1000.0, 9.0), (1005.1, 8.0)], 0),
        ([(1005.1, 0.0), (1000.0, 9.0)], 1),
        ([(1000.0, 9.0), (999.0, 9.0)], 1),
        ([(1000.0, 9.0), (1000.0, 9.0)], 0),
    ],
)
def test_of_steps_about_as_short_the_one_that_exposes_least_is_best(costs, which):
    assert best(costs) == which


def test_of_equal_ways_the_first_is_taken():
    result = run_pipeline(parse("ag = all_gather(p) @dp : 0B 50us; w = wait(ag); y = kernel(w) : 0B 5us"), Context())
    assert [report.name for report in result.reports] == list(ORDER)


def test_stopping_at_a_pass_of_another_way_is_no_error():
    assert "fill_any_waits" in default_names()
    run_pipeline(parse(COMPUTE_COVERS), Context(stop_after="fill_any_waits"))
    with pytest.raises(ConfigError, match="no pass named 'fill_any_wait'; nearest: fill_any_waits"):
        run_pipeline(parse(COMPUTE_COVERS), Context(stop_after="fill_any_wait"))


def test_the_last_passes_may_turn_round_which_way_is_best(monkeypatch):
    """The way that costs 2% more before them ends with less, and is taken; one that costs more than that has no say."""
    made = {name: parse(f"a = kernel(x) : 0B {us}us") for name, us in (("near", 101), ("best", 100), ("far", 110))}
    ends = {"near": parse("a = kernel(x) : 0B 90us"), "far": parse("a = kernel(x) : 0B 80us")}

    def last(schedule, ctx):
        name = next(name for name, each in made.items() if each is schedule)
        finished.append(name)
        return ends.get(name, schedule), PassReport("last")

    finished: list[str] = []
    monkeypatch.setattr(ways, "WAYS", tuple(made))
    monkeypatch.setattr(ways, "GOOD_ENOUGH", -1.0)
    monkeypatch.setattr(ways, "LAST", (last,))
    monkeypatch.setattr(ways, "_passes", lambda way, *_: ((way, lambda *_: (made[way], PassReport(way))),))
    ended, reports = ways.run_ways(parse("a = kernel(x) : 0B 120us"), Context(verify=False))
    assert ended is ends["near"]
    assert [report.name for report in reports] == [*FIRST, "near", "last", *AFTER]
    assert finished == ["best", "near"]


def test_a_pass_runs_once_on_an_order_that_several_ways_lead_to(monkeypatch):
    asked: list[tuple[str, ...]] = []

    def same(schedule, ctx):
        asked.append(tuple(order_of(schedule)))
        return schedule, PassReport("same")

    monkeypatch.setattr(ways, "WAYS", (Way((same,)), Way((same, same)), Way((same,), margin=2.0)))
    monkeypatch.setattr(ways, "ENDS", ())
    run_pipeline(parse(COMPUTE_COVERS), Context())
    assert len(asked) == 2  # at each of the two margins
