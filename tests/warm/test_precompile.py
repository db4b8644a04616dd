"""torch keeps what Dynamo captured, we keep the step: a later process traces nothing. Real processes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overlapc.backend import environment_of
from overlapc.config import Config
from overlapc.warm.precompile import Kept, StepArtifact, StepIsGone

PROGRAM = """
import json, os, sys
import torch
from tests.warm import precompiled

torch.manual_seed(0)
model = precompiled.Model()
step = torch.compile(model, backend="overlapc", fullgraph=True)
x = torch.randn(8, 16)
loss = step(x)
loss.backward()
counters = torch._dynamo.utils.counters
print(json.dumps({
    "loss": loss.item(),
    "gradient": model.linear.weight.grad.norm().item(),
    "captured": counters["stats"]["unique_graphs"],
    "compiled": counters["overlapc"]["graph_compiles"],
    "kept": counters["overlapc"]["steps_from_cache"],
}))
torch.compiler.save_cache_artifacts()
"""


def run(folder: Path, **environment: str) -> dict[str, float]:
    given = {
        **os.environ,
        "TORCH_CACHING_PRECOMPILE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        "OVERLAPC_CACHE_DIR": str(folder / "ours"),
        "OVERLAPC_PROFILE": "cpu-gloo",
        "OVERLAPC_WARM_START": "1",
        **environment,
    }
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=given, cwd=root, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("precompiled")
    return folder, run(folder)


def test_the_second_process_neither_traces_nor_compiles(first: tuple[Path, dict[str, float]]):
    folder, cold = first
    assert (cold["captured"], cold["compiled"], cold["kept"]) == (1, 2, 0)
    warm = run(folder)
    assert (warm["captured"], warm["compiled"], warm["kept"]) == (0, 0, 1)
    assert (warm["loss"], warm["gradient"]) == (cold["loss"], cold["gradient"])


def test_in_another_environment_it_is_traced_and_compiled_again(first: tuple[Path, dict[str, float]]):
    folder, cold = first
    threads = "1" if torch.get_num_threads() > 1 else "2"
    again = run(folder, OMP_NUM_THREADS=threads)
    assert (again["captured"], again["compiled"], again["kept"]) == (1, 2, 0)
    assert again["loss"] == pytest.approx(cold["loss"], rel=1e-6)


def test_a_step_that_is_gone_says_so(tmp_path: Path):
    config = Config(cache_dir=tmp_path, profile="cpu-gloo")
    kept = Kept("0" * 40, environment_of(config, ("cpu",)), config, ("cpu",))
    with pytest.raises(StepIsGone, match="no longer kept in"):
        pickle.loads(pickle.dumps(StepArtifact(key="__compiled_fn_1", content=kept)))
