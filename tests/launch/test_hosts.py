"""The launchers of two hosts, both on this machine: they rendezvous, restart all ranks after a failure, and each writes
a report of its own ranks."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from overlapc.errors import ConfigError
from overlapc.launch.torchrun import Rendezvous
from overlapc.report import record

TIMEOUT_S = 200

SCRIPT = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist

out = Path(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
total = torch.tensor([rank + 1])
dist.all_reduce(total)
if rank == 1 and not (out / "failed").exists():
    (out / "failed").touch()
    raise ValueError("the first try")
dist.all_reduce(total)
step = torch.compile(lambda x: x + 1, backend="overlapc")
(out / f"rank{rank}").write_text(f"{total.item()} of {world}, {step(torch.ones(2)).sum().item()}")
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_two_launchers_rendezvous_and_restart_together(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable, "-m", "overlapc.launch.cli", "run", "--nproc", "1", "--nnodes", "2",
        "--rdzv-endpoint", f"localhost:{free_port()}", "--max-restarts", "1",
        "--report", str(tmp_path / "overlap.json"), str(script), str(tmp_path),
    ]  # fmt: skip
    launchers = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [launcher.communicate(timeout=TIMEOUT_S) for launcher in launchers]
    errors = "".join(error for _, error in ended)
    assert [launcher.returncode for launcher in launchers] == [0, 0], errors
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["6 of 2, 4.0"] * 2
    assert "overlapc: rank 1: ValueError: the first try" in errors
    assert errors.count("overlapc: restarting all ranks") == 2
    for name, rank in (("overlap.json", 0), ("overlap.rank1.json", 1)):
        assert [(step.rank, step.world_size) for step in record.load(tmp_path / name).steps] == [(rank, 2)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("nnodes", "endpoint", "message"),
    [
        ("2", "", "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ("4:2", "a:1", "--nnodes 4:2: a number of hosts, or MIN:MAX"),
        ("two", "a:1", "--nnodes two: a number of hosts"),
        ("0", "", "--nnodes 0: a number of hosts"),
    ],
)
def test_unusable_numbers_of_hosts_are_an_error(nnodes: str, endpoint: str, message: str):
    with pytest.raises(ConfigError, match=message):
        _ = Rendezvous(nnodes, endpoint).nodes


def test_a_range_of_hosts_is_parsed():
    assert Rendezvous("2:4", "a:1").nodes == (2, 4)
    assert Rendezvous().nodes == (1, 1)
