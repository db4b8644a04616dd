"""`feed_back` corrects a profile that is wrong in known ways by runs that are simulated with another profile."""

import random
from dataclasses import replace

import pytest

from overlapc.estimators.calibration.feedback import feed_back
from overlapc.estimators.calibration.observed import Run, estimated, observe
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.nccl import interpolate
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.estimators.timeline import Timeline, simulate
from overlapc.passes.base import Context
from overlapc.passes.pipeline import ORDER
from overlapc.passes.run import run_pipeline
from overlapc.report.trace_reading import Covered, merged
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind
from overlapc.schedule.text import parse
from tests import ROOT

SCHEDULES = ROOT / "tests" / "schedules"
H200 = load_profile("h200-nvlink")
# One factor for each kind of compute and 38 multiprocessors held, instead of the curves measured by waves and bytes.
FACTORS = {
    name: each if "@" in name else replace(each, multiprocessors=38.0, memory=1.29, matmuls=(), memories=())
    for name, each in H200.slowdowns.items()
}
BELIEVED = replace(H200, slowdowns=FACTORS)


def machine(
    *, matmul: float = 1.0, kernels: float = 1.0, tables: float = 1.0, held: float = 38.0, memory: float = 1.27
) -> DeviceProfile:
    """Return the profile of the simulated machine: the believed times, multiplied by a factor for each kind."""
    slower = {"matmul": matmul, "generated": kernels}
    return replace(
        BELIEVED,
        tables=tuple(
            replace(table, points=tuple((size, ns * tables) for size, ns in table.points)) for table in BELIEVED.tables
        ),
        curves={
            name: tuple((size, rate / slower.get(name.partition(".")[0], 1.0)) for size, rate in points)
            for name, points in BELIEVED.curves.items()
        },
        slowdowns={
            name: each if "@" in name else replace(each, multiprocessors=held, memory=memory)
            for name, each in BELIEVED.slowdowns.items()
        },
    )


def run_on(truth: DeviceProfile, name: str, *, seed: int = 0, wild: float = 0.03) -> Run:
    """Plan a step with the believed profile and run it on `truth`; times scatter by 4%, and some are tripled.

    It is planned without a search, which would leave no gather beside kernels that it slows, and so no data to fit.
    """
    ctx = Context(profile=BELIEVED, reorder_collectives=True, overlap_margin=1.5, passes=ORDER[: ORDER.index("refine")])
    schedule = estimated(parse((SCHEDULES / f"{name}.sched").read_text()), BELIEVED)
    timeline = simulate(estimated(run_pipeline(schedule, ctx).schedule, truth), truth)
    rng = random.Random(seed)
    measured = {
        name: (end - start) * rng.lognormvariate(0.0, 0.04) * (3.0 if rng.random() < wild else 1.0)
        for name, (start, end) in _spans(timeline, communicating=None).items()
    }
    return Run(timeline.schedule, measured, _beside(timeline))


def _spans(timeline: Timeline, communicating: bool | None) -> dict[str, tuple[float, float]]:
    return {
        node.name: timeline.span(node.name)
        for node in timeline.schedule.nodes
        if node.kind in (*COMPUTE, *COMMUNICATION)
        and communicating in (None, node.comm is not None)
        and timeline.span(node.name)[1] > timeline.span(node.name)[0]
    }


def _beside(timeline: Timeline) -> dict[str, float]:
    found = {}
    for communicating in (False, True):
        others = Covered.by(merged(_spans(timeline, not communicating).values()))
        for name, span in _spans(timeline, communicating).items():
            found[name] = others.share([span])
    return found


@pytest.fixture(scope="module")
def fed_back():
    truth = machine(matmul=1.17, kernels=1.25, tables=1.2, held=24.0, memory=1.6)
    runs = [run_on(truth, f"llama_8b_fsdp4.{which}") for which in ("forward", "backward")]
    return truth, runs, feed_back(BELIEVED, runs)


def test_held_out_times_are_predicted_better(fed_back):
    _, _, feedback = fed_back
    errors = {each.kind: each for each in feedback.errors}
    assert set(errors) == {"collectives", "kernels", "library calls"}
    for each in errors.values():
        assert each.after < each.before / 2, each
        assert each.after < 0.08, each
    assert not feedback.refused


def test_fitted_numbers_are_near_those_of_the_machine(fed_back):
    truth, runs, feedback = fed_back
    assert feedback.profile.slowdowns["all_gather"].memory == pytest.approx(1.6, rel=0.03)
    held = feedback.profile.slowdowns["all_gather"].multiprocessors
    assert abs(held - 24) < abs(38 - 24) / 2  # numbers of waves are integers: several values explain the same times
    for name, size in (("matmul", 481036337152), ("matmul", 137438953472)):
        expected = truth.curve_rate(name, "bf16", size)
        assert feedback.profile.curve_rate(name, "bf16", size) == pytest.approx(expected, rel=0.03)
    for run in runs:
        was, true, now = (
            simulate(estimated(run.schedule, each), each).step_ns for each in (BELIEVED, truth, feedback.profile)
        )
        assert abs(now / true - 1) < 0.02 < 0.1 < abs(was / true - 1)


def test_every_change_names_its_nodes_and_both_values(fed_back):
    _, runs, feedback = fed_back
    assert all(3 <= change.nodes <= sum(len(run.measured_ns) for run in runs) for change in feedback.changes)
    by_name = {change.parameter: change for change in feedback.changes}
    assert by_name["slowdowns.all_gather.memory"].before == 1.29
    assert by_name["matmul.bf16 at 481036337152, ns"].after == pytest.approx(
        1.17 * by_name["matmul.bf16 at 481036337152, ns"].before, rel=0.03
    )


def test_curves_of_contention_are_scaled_as_a_whole():
    def beside(factor: float) -> DeviceProfile:
        memories = tuple((size, times * factor) for size, times in ((2**20, 1.3), (2**26, 1.2), (2**30, 1.1)))
        slowdowns = {name: replace(each, memories=memories) for name, each in BELIEVED.slowdowns.items()}
        return replace(BELIEVED, slowdowns=slowdowns)

    believed, truth = beside(1.0), beside(1.3)
    # The plan of hsdp has enough memory-bound kernels beside gathers; that of llama_8b_fsdp4 has hardly any.
    feedback = feed_back(believed, [run_on(truth, f"hsdp.{which}") for which in ("forward", "backward")])
    for size, times in feedback.profile.slowdowns["all_gather"].memories:
        assert times == pytest.approx(1.3 * dict(believed.slowdowns["all_gather"].memories)[size], rel=0.05)


def test_tables_and_contention_of_copies_are_fitted_apart_from_those_of_the_library():
    """Copies take twice as long as believed, kernels beside them 1.5 times; no measured gather uses the library."""
    text, work = ["schedule copied"], "flops=0 read=64MiB write=64MiB : 64MiB"
    for at in range(12):
        text += [
            f"%p{at} = input : 16MiB",
            f"%x{at} = input : 64MiB",
            f"ag{at} = all_gather(%p{at}) @dp(4) via copy dtype=bfloat16 : 64MiB",
            f"%u{at} = kernel(%x{at}) {work}",  # the gather starts at its end
            *(f"%y{at}_{copy} = kernel(%u{at}) {work}" for copy in range(3)),
            f"%w{at} = wait(ag{at})",
            f"%z{at} = kernel(%w{at}) {work}",
        ]
    schedule = estimated(parse("\n".join(text)), H200)
    longer, beside = {"a": 2.0, "u": 1.0, "y": 1.5, "z": 1.0}, {"a": 0.0, "u": 0.0, "y": 1.0, "z": 0.0}
    times = {node.name: node.estimate.ns for node in schedule.nodes if node.kind in (*COMPUTE, *COMMUNICATION)}
    run = Run(
        schedule,
        {name: ns * longer[name.strip("%")[0]] for name, ns in times.items()},
        {name: beside[name.strip("%")[0]] for name in times},
    )
    fitted = feed_back(H200, [run]).profile
    assert interpolate(fitted.table("all_gather via copy", 4, "bf16"), 2**26) == pytest.approx(2 * times["ag0"])
    assert fitted.table("all_gather", 4, "bf16") == H200.table("all_gather", 4, "bf16")
    changed = [name for name, each in fitted.slowdowns.items() if each != H200.slowdowns.get(name)]
    assert changed == ["all_gather via copy"]


def test_sizes_without_measurements_are_unchanged(fed_back):
    _, _, feedback = fed_back
    old, new = dict(BELIEVED.curves["matmul.bf16"]), dict(feedback.profile.curves["matmul.bf16"])
    seen = [change for change in feedback.changes if change.parameter.startswith("matmul.bf16")]
    least = min(int(change.parameter.split()[2].rstrip(",")) for change in seen)
    below = [size for size in old if size < least / 2]
    assert below
    assert all(new[size] == old[size] for size in below)
    assert feedback.profile.table("all_reduce", 4, "bf16") == BELIEVED.table("all_reduce", 4, "bf16")


def test_a_machine_as_believed_changes_numbers_only_slightly():
    run = run_on(BELIEVED, "fsdp8.forward", seed=1)
    feedback = feed_back(BELIEVED, [run])
    for change in feedback.changes:
        assert change.before is not None
        assert change.after == pytest.approx(change.before, rel=0.15)


def test_random_times_change_numbers_by_at_most_a_factor_of_three():
    """The measured times are random and independent of the predictions."""
    run = run_on(BELIEVED, "fsdp8.forward")
    rng = random.Random(5)
    wild = replace(run, measured_ns={name: ns * 10 ** rng.uniform(-1, 1) for name, ns in run.measured_ns.items()})
    before, feedback = observe(BELIEVED, [wild]), feed_back(BELIEVED, [wild])
    assert all(1 / 3.01 <= change.after / change.before <= 3.01 for change in feedback.changes if change.before)
    assert len(before) == len(observe(feedback.profile, [wild]))


def test_a_run_without_measurements_changes_nothing():
    run = run_on(BELIEVED, "fsdp8.forward")
    feedback = feed_back(BELIEVED, [replace(run, measured_ns={}, beside={})])
    assert feedback.profile == BELIEVED
    assert feedback.changes == feedback.errors == feedback.refused == ()


def test_collectives_without_data_change_no_table():
    text = "\n".join(f"ar{at} = all_reduce(%p) @dp(4) dtype=bfloat16 : 0B; %w{at} = wait(ar{at})" for at in range(8))
    schedule = estimated(parse(text), H200)
    times = {f"ar{at}": 2 * schedule.node("ar0").estimate.ns for at in range(8)}
    assert feed_back(H200, [Run(schedule, times, {})]).profile == H200


def test_without_shares_of_overlap_no_contention_is_fitted():
    run = run_on(machine(matmul=1.2, memory=1.6), "llama_8b_fsdp4.forward")
    feedback = feed_back(BELIEVED, [replace(run, beside={})])
    assert feedback.profile.slowdowns == BELIEVED.slowdowns
    assert any(change.parameter.startswith("matmul.bf16") for change in feedback.changes)


def test_times_that_are_off_by_far_are_not_fitted():
    """Kernels take ten times as long, overlapped or not, because the machine is busy with something else."""
    run = run_on(BELIEVED, "fsdp8.forward")
    kernels = {node.name for node in run.schedule.nodes if node.kind is Kind.KERNEL}
    slow = {name: ns * (10 if name in kernels else 1.3) for name, ns in run.measured_ns.items()}
    feedback = feed_back(BELIEVED, [replace(run, measured_ns=slow)])
    assert not any("generated" in change.parameter or "memory" in change.parameter for change in feedback.changes)
    assert any(change.parameter.startswith("matmul") for change in feedback.changes)
