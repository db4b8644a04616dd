"""The parent process of the soak test reports ranks that finish, die, hang or compute different losses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import soak

# A fake rank, without torch: `sys.argv[2]` has its parameters, of which `layout` says how this rank ends.
_RANK = """
import faulthandler, json, os, signal, struct, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
given = json.loads(sys.argv[2]); rank = os.environ["RANK"]; folder = given["folder"]; how = given["soak"]["layout"]
def mark(name, text=""):
    path = f"{folder}/{name}{rank}"
    open(path + ".new", "w").write(text); os.rename(path + ".new", path)
def until(name):
    while not os.path.exists(f"{folder}/{name}"): time.sleep(0.01)
open(f"{folder}/progress{rank}", "wb").write(struct.pack("q", 7))
if how == "compiles":
    while True: time.sleep(1)
mark("ready"); until("reference"); mark("referenced"); until("go")
if how == "dies" and rank == "1":
    os.abort()
def where_it_stands():
    while True: time.sleep(1)
if how in ("dies", "stands"):
    where_it_stands()
mark("done", json.dumps({"steps": 5, "differ": [[1, 3, "0x1", "0x2"]] if how == "differs" else [], "seconds": 1,
                         "finite": True}))
"""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "COMMAND", [sys.executable, "-c", _RANK])
    monkeypatch.setattr(soak.shutil, "which", lambda name: None)  # no gdb: it takes seconds


def _soaked(how: str, folder: Path, still_s: float = 60, minutes: float = 10) -> soak.Job:
    (job,) = soak.soak_together([soak.Soak(how, "fp32")], soak.Plan(), 2, folder, still_s, minutes, 0)
    assert all(rank.returncode is not None for rank in job.ranks), "every process has ended"
    return job


def test_a_soak_that_finishes_reports_its_steps_without_trouble(ranks: None, tmp_path: Path):
    job = _soaked("ends", tmp_path)
    assert job.row() == ("ends fp32 python", 2, 7, 0, 0, "yes", "200.0")
    assert not job.trouble()


def test_a_rank_that_dies_is_reported_and_the_other_rank_is_ended(ranks: None, tmp_path: Path):
    job = _soaked("dies", tmp_path)
    assert job.row()[3:6] == (1, 0, "not known")
    assert "rank 1 died of SIGABRT" in job.trouble()[0]


def test_ranks_that_hang_are_ended_and_their_stacks_are_reported(ranks: None, tmp_path: Path):
    job = _soaked("stands", tmp_path, still_s=1)
    assert job.row()[3:6] == (0, 1, "not known")
    (told,) = job.trouble()
    assert "stands still after 7 steps" in told
    assert told.count("in where_it_stands") == 2


@pytest.mark.parametrize("how", ["stands", "compiles"])
def test_ranks_that_still_run_at_the_deadline_are_ended_and_reported(
    ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    monkeypatch.setattr(soak, "_GRACE_S", 0.0)
    job = _soaked(how, tmp_path, minutes=0.02)
    assert job.row()[3:6] == (0, 0, "not known")
    assert "the time was over before a round was compared, after " in job.trouble()[0]
    assert "not known" in soak.table([job]).splitlines()[-1]


def test_losses_that_differ_from_the_reference_are_reported_by_round_and_step(ranks: None, tmp_path: Path):
    job = _soaked("differs", tmp_path)
    assert job.row()[5] == "NO"
    assert job.trouble()[0] == "differs fp32 python: rank 0, round 1, step 3: loss 0x1, alone 0x2"
    assert "NO" in soak.table([job]).splitlines()[-1]


def test_configurations_cover_layouts_dtypes_wrappers_and_pools():
    names = {"layout": {"fsdp", "tp", "hsdp"}, "dtype": {"fp32", "bf16"}, "wrapper": {"python", "fx"}}
    for name, wanted in names.items():
        assert {getattr(each, name) for each in soak.SOAKS} == wanted
    assert {each.layout for each in soak.SOAKS if each.memory == "pool"} == {"fsdp", "tp", "hsdp"}
