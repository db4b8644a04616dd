"""Every command in the code blocks of README.md and docs/ runs, given files with the names that it uses."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from overlapc.launch.cli import main
from overlapc.report import record
from tests import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Commands that only `make test-slow` runs, in separate processes, and why.
SLOW = {
    "overlapc demo --nproc 2 --steps 12": "trains twice on two ranks; tests/launch/test_demo.py runs a smaller demo",
    "overlapc run --nproc 8 train.py --steps 20": "starts eight ranks; tests/launch/test_demo.py runs a script on two",
    "overlapc plan --model llama-8b --mesh dp=512,tp=2 --profile h200-nvlink": "a minute; "
    "tests/launch/test_plan_model.py plans smaller models",
    "overlapc calibrate --nproc 4 --out my.json": "measures for minutes; tests/launch/test_calibrate.py measures less",
}
MAKE = {"make demo", "make test"}  # .ci/run runs `make test`; test_demo.py runs the command of `make demo`

TRAIN = """
import argparse, os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import overlapc

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=1)
parser.add_argument("--steps", type=int, default=1)
args = parser.parse_args()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(args.layers)))
for layer in model:
    overlapc.fully_shard(layer, mesh)
overlapc.fully_shard(model, mesh)
optimizer = torch.optim.AdamW(model.parameters())
step = torch.compile(model, backend="overlapc")
for _ in range(args.steps):
    step(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def shown() -> list[str]:
    """Return all commands in code blocks; text after two spaces is an explanation."""
    found = []
    for page in PAGES:
        for block in re.split(r"^```.*\n", page.read_text(), flags=re.MULTILINE)[1::2]:
            lines = re.findall(r"^(?:overlapc|make|python|pip|torchrun) .+$", block, re.MULTILINE)
            found += [re.split(r"  +", line)[0] for line in lines]
    return found


def test_the_commands_listed_as_not_run_are_still_shown():
    assert {*SLOW, *MAKE} <= set(shown())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files that the commands name: a script, schedules, records of a run, a profile."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "runs" / "DATE").mkdir(parents=True)
    measured = gzip.decompress((ROOT / "tests" / "report" / "fsdp_4xh200.record.json.gz").read_bytes())
    for name in ("A.json", "B.json", "runs/DATE/overlap.json"):
        (tmp_path / name).write_bytes(measured)
    record.load(tmp_path / "A.json").save(tmp_path / "schedule.txt")
    profile = ROOT / "estimators" / "profiles" / "h200-nvlink.json"
    (tmp_path / "my.json").write_bytes(profile.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [each for each in shown() if each not in {*SLOW, *MAKE}])
def test_a_shown_command_runs(command: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    program, *words = command.split()
    assert program == "overlapc"
    assert main(words) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", SLOW)
def test_a_slow_command_runs(command: str, folder: Path):
    words = [sys.executable, "-m", "overlapc.launch.cli", *command.split()[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
