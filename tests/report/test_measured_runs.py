"""`overlapc calibrate --from`: from measured records to a profile file."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from overlapc.errors import ConfigError
from overlapc.estimators.calibration.observed import estimated
from overlapc.estimators.profiles.profile_file import load_profile, profile_to_json
from overlapc.launch.cli import main
from overlapc.report.measured_runs import refine, runs_of
from overlapc.report.model import Measured, StepRecord
from overlapc.report.record import Report
from overlapc.schedule.text import parse
from tests.report.sample import FORWARD

# A step of Llama-8B with 8 layers on 4 H200s: the record of rank 0 without spans and origins, written by
# `benchmarks/predict.py --out`.
REAL = Path(__file__).with_name("fsdp_4xh200.record.json.gz")
PROFILE = load_profile("h200-nvlink")
# Six equal layers, each with a gather, a matmul and a kernel.
SCHEDULE = estimated(
    parse(
        "\n".join(
            f"g{n} = all_gather(p{n}) @dp(4) dtype=bfloat16 : 64MiB; w{n} = wait(g{n})\n"
            f"m{n} = extern:mm(x, w{n}) flops=137438953472 in=bfloat16 write=33554432 : 32MiB\n"
            f"k{n} = kernel(m{n}) read=33554432 write=33554432 : 32MiB"
            for n in range(6)
        )
    ),
    PROFILE,
)


def measured(times: dict[str, float]) -> Measured:
    """Return a measurement without any overlap."""
    return Measured(3, 1e6, 1e6, 1e6, 0.0, 0.0, times, dict.fromkeys(times, 0.0))


def record(tmp_path, *factors: float):
    """Save a record with a rank for each factor, on which every node took `factor` times its estimate.

    Estimates are read back from the schedule's text.
    """
    read = parse(str(SCHEDULE))
    steps = []
    for rank, factor in enumerate(factors):
        times = {node.name: node.estimate.ns * factor for node in read.nodes if node.estimate is not None}
        graph = replace(FORWARD, schedule=str(SCHEDULE), measured=measured(times))
        steps.append(StepRecord(rank, len(factors), (graph,)))
    return Report(tuple(steps)).save(tmp_path / "record.json")


def test_a_collectives_time_is_that_of_the_rank_that_waits_least(tmp_path):
    (run,) = runs_of(record(tmp_path, 1.1, 1.3, 2.0))
    nodes = {node.name: node for node in run.schedule.nodes}
    assert run.measured_ns["g0"] == pytest.approx(1.1 * nodes["g0"].estimate.ns)
    assert run.measured_ns["m0"] == pytest.approx(1.3 * nodes["m0"].estimate.ns)


def test_a_folder_holds_the_records_of_all_ranks(tmp_path):
    for rank, factor in enumerate((2.0, 1.1)):
        (tmp_path / f"rank{rank}").mkdir()
        record(tmp_path / f"rank{rank}", factor)
    (run,) = runs_of(tmp_path)
    nodes = {node.name: node for node in run.schedule.nodes}
    assert run.measured_ns["g0"] == pytest.approx(1.1 * nodes["g0"].estimate.ns)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty has no measured times"):
        runs_of(tmp_path / "empty")


def test_a_record_becomes_a_profile_that_predicts_it(tmp_path, capsys):
    out = tmp_path / "mine.json"
    path = record(tmp_path, 1.3)
    assert (
        main(["calibrate", "--from", str(path), "--profile", "h200-nvlink", "--out", str(out), "--name", "mine"]) == 0
    )
    said = capsys.readouterr().out
    assert "library calls: 30.0% before, 0.0% now (3)" in said
    profile = load_profile(out)
    assert profile.name == "mine"
    assert "record.json" in profile.origins[""]
    for node, fitted in zip(SCHEDULE.nodes, estimated(SCHEDULE, profile).nodes, strict=True):
        if node.estimate is not None:
            assert fitted.estimate.ns == pytest.approx(1.3 * node.estimate.ns, rel=0.01)
    document = json.loads(out.read_text())
    assert {each["nodes"] for each in document["fed_back"]} == {6}
    assert document["quantities"]["launch_ns"]["value"] == PROFILE.launch_ns

    again = tmp_path / "again.json"
    assert main(["calibrate", "--from", str(path), "--profile", str(out), "--out", str(again)]) == 2
    assert "improves the predictions of mine" in capsys.readouterr().err
    assert not again.exists()


def test_a_record_that_was_not_measured_is_refused(tmp_path):
    path = Report((StepRecord(graphs=(FORWARD,)),)).save(tmp_path / "overlap.json")
    with pytest.raises(ConfigError, match="has no measured times"):
        runs_of(path)


def test_a_real_step_is_predicted_better_on_held_out_nodes(tmp_path):
    """Starts from rates that are too low, so that the test does not depend on how good the stored profile is."""
    path, start = tmp_path / "fsdp.json", tmp_path / "slow.json"
    path.write_bytes(gzip.decompress(REAL.read_bytes()))
    curves = {name: tuple((size, rate / 1.3) for size, rate in points) for name, points in PROFILE.curves.items()}
    start.write_text(json.dumps(profile_to_json(replace(PROFILE, curves=curves))))
    feedback, document = refine(str(start), [path])
    errors = {each.kind: each for each in feedback.errors}
    for kind in ("kernels", "library calls"):
        assert errors[kind].before > 0.12
        assert errors[kind].after < errors[kind].before / 2
        assert errors[kind].after < 0.1
    assert errors["collectives"].after < 0.25  # measured collectives include the time that this rank waited for others
    assert len(document["fed_back"]) == len(feedback.changes) > 10
