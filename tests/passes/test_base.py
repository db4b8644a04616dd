import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.errors import ConfigError, MemoryBudgetError, ScheduleError
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.pipeline import ORDER
from overlapc.passes.run import run_pipeline
from overlapc.passes.runner import select
from overlapc.schedule.model import Estimate
from overlapc.schedule.text import parse
from tests.graphs import check_invariants, order_of, peak, schedules

STEP = """
    schedule step
    p0 = input : 10B; p1 = input : 10B; x = input : 100B
    ag0 = all_gather(p0) @dp(2) : 20B 50us [table]; w0 = wait(ag0); f0 = extern(x, w0) : 5B 100us
    ag1 = all_gather(p1) @dp(2) : 20B 50us [table]; w1 = wait(ag1); f1 = extern(f0, w1) : 5B 100us
    g1 = extern(f1) : 20B 100us; rs1 = reduce_scatter(g1) @dp(2) : 10B 60us; s1 = wait(rs1)
    g0 = extern(f1, f0) : 20B 100us; rs0 = reduce_scatter(g0) @dp(2) : 10B 60us; s0 = wait(rs0)
    return s1, s0
"""


def test_a_late_schedule_has_the_estimates_of_the_schedule_itself():
    """Those of the device's clock under the order's load, say, are set after nodes moved."""
    ctx, schedule = Context(overlap_margin=1.5), parse(STEP)
    assert ctx.late(schedule).node("ag1").estimate.ns == 75e3
    moved = schedule.move("ag1", before="w0").with_estimates(
        {"f0": Estimate(90e3, "at load"), "ag1": Estimate(40e3, "at load")}
    )
    late = ctx.late(moved)
    assert order_of(late) == order_of(moved)
    assert late.node("f0") == moved.node("f0")
    assert late.node("ag1").estimate == Estimate(60e3, "at load")
    assert late.node("ag0") is ctx.late(schedule).node("ag0")


def reversing(schedule, ctx):
    """A user's pass that breaks data dependences."""
    return schedule.replace_order(reversed(order_of(schedule))), PassReport("reversing")


def renaming(schedule, ctx):
    report = PassReport("mine")
    report.because("ag0", "I said so")
    return schedule, report


def test_the_default_pipeline_hides_what_can_be_hidden():
    result = run_pipeline(parse(STEP), Context())
    assert [report.name for report in result.reports] == list(ORDER)
    assert result.before.exposed_ns == 220e3
    records = {record.name: record for record in result.collectives}
    # The second gather and the first scatter are hidden. No compute can overlap the first and the last collective.
    assert {name: record.exposed_after_ns for name, record in records.items()} == {
        "ag0": 50e3, "ag1": 0.0, "rs1": 0.0, "rs0": 60e3,
    }  # fmt: skip
    assert records["ag1"].limit == "hidden"
    assert records["ag0"].limit == "start: start of schedule; wait: f0 reads it"
    assert records["rs0"].limit == "start: data dependence on g0; wait: end of schedule"
    gather = records["ag1"]
    assert (gather.op, gather.group, gather.size, gather.bytes) == ("all_gather", "dp", 2, 20)
    assert (gather.estimate_ns, gather.source) == (50e3, "table")
    assert (gather.exposed_before_ns, gather.hidden_before_ns, gather.hidden_after_ns) == (50e3, 0.0, 50e3)
    assert gather.moves == sum(report.moves.get(name, 0) for report in result.reports for name in ("ag1", "w1")) > 0
    assert result.after.step_ns == result.after.lower_bound_ns


def test_an_empty_list_of_passes_runs_no_pass():
    schedule = parse(STEP)
    result = run_pipeline(schedule, Context(passes=()))
    assert result.schedule is schedule
    assert result.after is result.before
    assert {record.limit for record in result.collectives} == {"no pass looked at it"}


def test_a_collective_without_an_estimate_is_never_reported_as_hidden():
    result = run_pipeline(parse("a = all_gather(p) @dp; w = wait(a); y = kernel(w) : 0B 5us"), Context(passes=()))
    assert result.after.unknown == ("a",)
    assert (result.collectives[0].estimate_ns, result.collectives[0].limit) == (None, "no estimate")


def test_callables_run_in_their_position_among_names():
    result = run_pipeline(parse(STEP), Context(passes=(renaming, "sink_waits")))
    assert [report.name for report in result.reports] == ["mine", "sink_waits"]
    assert result.reports[0].reasons == {"ag0": "I said so"}


def test_a_broken_pass_is_caught_and_named():
    with pytest.raises(ScheduleError, match=r"^reversing: "):
        run_pipeline(parse(STEP), Context(passes=(reversing,)))
    run_pipeline(parse("a = kernel(x); b = kernel(x)"), Context(passes=(reversing,)))


def test_an_incomplete_order_is_an_error_that_names_the_pass():
    def dropping(schedule, ctx):
        return schedule.replace_order(order_of(schedule)[1:]), PassReport("dropping")

    with pytest.raises(ScheduleError, match=r"^dropping: step: an order of \d+ names for \d+ nodes"):
        run_pipeline(parse(STEP), Context(passes=(dropping,)))


def test_values_that_are_not_passes_are_an_error_that_says_what_a_pass_is():
    with pytest.raises(ConfigError, match=r"passes: int is not a pass .*a pass is a function \(Schedule, Context\)"):
        select(("sink_waits", 3))
    with pytest.raises(ConfigError, match=r"passes: len is not a pass"):
        select((len,))

    def forgetful(schedule, ctx):
        return schedule

    with pytest.raises(ScheduleError, match=r"forgetful returned Schedule; a pass is"):
        run_pipeline(parse(STEP), Context(passes=(forgetful,)))


def test_a_pass_is_found_by_module_and_name():
    ((name, found),) = select(("tests.passes.test_base:renaming",))
    assert (name, found.__name__, found.__module__) == ("renaming", "renaming", "tests.passes.test_base")
    with pytest.raises(ConfigError, match=r"cannot import tests.passes.test_base:nowhere: .*PYTHONPATH"):
        select(("tests.passes.test_base:nowhere",))
    with pytest.raises(ConfigError, match="cannot import no_such_module:mine"):
        select(("no_such_module:mine",))


def test_unknown_names_offer_their_neighbours():
    with pytest.raises(ConfigError, match="no pass named 'sink_wait'; nearest: sink_waits"):
        select(("sink_wait",))


def test_names_are_registered_once():
    with pytest.raises(ConfigError, match="registered already"):
        register_pass("sink_waits")(renaming)


def test_a_budget_that_no_order_fits_is_an_error():
    with pytest.raises(MemoryBudgetError, match="memory_budget leaves 30B for this graph, but it needs"):
        run_pipeline(parse(STEP), Context(budget_bytes=30))
    with pytest.raises(MemoryBudgetError):
        run_pipeline(parse("schedule s budget=1B\n a = kernel() : 2B"), Context())


def test_a_schedules_own_budget_limits_the_passes():
    schedule = parse(STEP)
    tight = run_pipeline(parse(STEP.replace("schedule step", f"schedule step budget={peak(schedule)}B")), Context())
    assert peak(tight.schedule) <= peak(schedule)
    assert tight.after.exposed_ns > run_pipeline(schedule, Context()).after.exposed_ns


def test_the_passes_of_a_pipeline_share_one_allowance():
    schedule = parse(STEP)
    result = run_pipeline(schedule, Context(peak_increase=0.1, passes=("raise_under_memory", "sink_waits") * 3))
    assert peak(result.schedule) <= 1.1 * peak(schedule)


def test_dumps_before_and_after_every_pass():
    seen = {}
    result = run_pipeline(parse(STEP), Context(dump=seen.__setitem__))
    assert list(seen) == [f"{at:02}_{name}.{when}" for at, name in enumerate(ORDER, 1) for when in ("before", "after")]
    assert parse(seen[f"{len(ORDER):02}_{ORDER[-1]}.after"]) == result.schedule


@given(schedules(most_nodes=24), st.sampled_from(["", "h200-nvlink"]))
@settings(max_examples=50)  # 0.1 s per example
def test_the_pipeline_keeps_what_every_pass_keeps(schedule, profile):
    ctx = Context(profile=load_profile(profile)) if profile else Context()
    result = run_pipeline(schedule, ctx)
    check_invariants(schedule, result.schedule, ctx)
    assert len(result.collectives) == len(result.after.collectives)
