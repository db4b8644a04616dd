"""The whole demo on real ranks: the compiled run, the eager run, and the files that they write."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from overlapc.launch.demo import DemoConfig, LossesDiffer, Run, check_losses, compare, relative
from overlapc.report import record
from tests import ROOT

TIMEOUT_S = 280


@pytest.mark.timeout(300)
def test_two_ranks_train_alike_compiled_and_eager(tmp_path):
    command = [sys.executable, "-m", "overlapc.launch.cli", "demo", "--model", "tiny", "--steps", "3"]
    command += ["--batch", "2", "--seq", "32", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OVERLAPC_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr
    assert "relative difference" in done.stdout
    assert "3/3" in done.stderr  # the progress bar
    for rank in (0, 1):
        folder = tmp_path / "run" / f"rank{rank}"
        report = record.load(folder / "record.json")
        assert (report.steps[0].rank, report.steps[0].world_size) == (rank, 2)
        forward, backward = report.steps[0].graphs
        assert report.steps[0].tokens == 2 * 32 * 2
        assert report.steps[0].clock_ns
        # Two layers and the root are gathered in forward; the gradients of all of them are scattered in backward.
        assert {row.op for row in forward.collectives} == {"all_gather"}
        assert "reduce_scatter" in {row.op for row in backward.collectives}
        for graph in (forward, backward):
            assert graph.kernels > 0
            assert graph.after.step_ns <= graph.before.step_ns
            assert graph.lower_bound_ns <= graph.after.step_ns * (1 + 1e-9)
        page = (folder / "report.html").read_text()
        for row in (*forward.collectives, *backward.collectives):
            assert row.name in page
            assert row.name in done.stdout or rank == 1
        assert (folder / "schedule.txt").read_text().count("schedule ") >= 2


@pytest.mark.timeout(300)
def test_a_script_runs_on_ranks_and_every_rank_is_in_the_report(tmp_path):
    script = ROOT / "examples" / "train_fsdp.py"
    command = [sys.executable, "-m", "overlapc.launch.cli", "run", "--nproc", "2", "--passes", "sink_waits"]
    command += ["--report", str(tmp_path / "overlap.json"), str(script), "--steps", "1"]
    environment = {**os.environ, "OVERLAPC_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr
    assert "losses 5.6" in done.stdout  # of the last rank, a little more than ln 256
    report = record.load(tmp_path / "overlap.json")
    assert [(step.rank, step.world_size, len(step.graphs)) for step in report.steps] == [(0, 2, 2), (1, 2, 2)]
    assert [row.name for row in report.steps[0].graphs[0].passes] == ["sink_waits"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_losses_that_differ_name_the_step():
    eager = Run((5.0, 4.0, 3.0), (1.0, 0.1, 0.1))
    check_losses(Run((5.0, 4.0 * (1 + 5e-6), 3.0), eager.seconds), eager)
    with pytest.raises(LossesDiffer, match=r"step 1: loss 4.1 with overlapc, 4.0 eager"):
        check_losses(Run((5.0, 4.1, 3.0), eager.seconds), eager)
    with pytest.raises(LossesDiffer, match="step 2"):
        check_losses(Run((5.0, 4.0, float("nan")), eager.seconds), eager)
    assert relative(float("nan"), float("nan")) == float("inf")


def test_the_comparison_leaves_compilation_out_of_the_step_time():
    run = Run((2.0,) * 5, (60.0, 1.0, 0.2, 0.3, 0.1))
    shown = compare(run, run, "eager FSDP2")
    assert "60.00 s" in shown
    assert "200.0 ms" in shown


@pytest.mark.parametrize(
    ("cfg", "sharded", "shards", "reference"),
    [
        (DemoConfig(), True, 2, "eager FSDP2"),
        (DemoConfig(nproc=1), True, 1, "eager FSDP2"),
        (DemoConfig(tp=2), False, 1, "eager"),
        (DemoConfig(nproc=4, tp=2), True, 2, "eager FSDP2"),
        (DemoConfig(nproc=4, hsdp=2), True, 2, "eager FSDP2"),
    ],
)
def test_the_demo_shards_over_the_ranks_that_tp_and_hsdp_leave(cfg, sharded, shards, reference):
    cfg.check()
    assert (cfg.sharded, cfg.shards, cfg.reference) == (sharded, shards, reference)
