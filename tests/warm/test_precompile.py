"""torch caches what Dynamo captured and overlapc caches the step, so a later process traces nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.precompile_context import PrecompileContext
from torch._dynamo.utils import counters

from overlapc.config import Config
from overlapc.warm.loading import environment_of
from overlapc.warm.precompile import CachedStepKey, CachedStepMissing, StepArtifact
from tests import ROOT, precompiled

PROGRAM = """
import json, os, sys
import torch
from tests import precompiled

torch.manual_seed(0)
model = precompiled.Model(float(os.environ.get("SCALE", "1")))
step = torch.compile(model, backend="overlapc", fullgraph=True)
x = torch.randn(8, 16)
eager = model(x).item()
loss = step(x)
loss.backward()
counters = torch._dynamo.utils.counters
print(json.dumps({
    "loss": loss.item(),
    "eager": eager,
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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=given, cwd=ROOT, capture_output=True, text=True, timeout=240
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


def test_in_another_environment_it_is_traced_and_compiled_again(first: tuple[Path, dict[str, float]], tmp_path: Path):
    folder, cold = first
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)  # a copy, because the new trace replaces the cached one
    threads = "1" if torch.get_num_threads() > 1 else "2"
    again = run(tmp_path, OMP_NUM_THREADS=threads)
    assert (again["captured"], again["compiled"], again["kept"]) == (1, 2, 0)
    assert again["loss"] == pytest.approx(cold["loss"], rel=1e-6)


def test_another_function_behind_a_global_name_is_traced_again(first: tuple[Path, dict[str, float]], tmp_path: Path):
    """torch drops the guard on the function that the global name refers to."""
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    again = run(tmp_path, ACTIVATION="tanh")
    assert (again["captured"], again["compiled"], again["kept"]) == (1, 2, 0)
    assert again["loss"] == pytest.approx(again["eager"], rel=1e-5)
    assert again["loss"] != pytest.approx(first[1]["loss"], rel=1e-2)


def test_where_a_cached_guard_fails_dynamo_traces_another_graph(first: tuple[Path, dict[str, float]], tmp_path: Path):
    """The first names that Dynamo would generate are already in the module, from the cached trace."""
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    again = run(tmp_path, SCALE="2")
    assert (again["captured"], again["compiled"], again["kept"]) == (1, 2, 1)
    assert again["loss"] == pytest.approx(again["eager"], rel=1e-5)


def test_other_options_by_variable_are_compiled_again(first: tuple[Path, dict[str, float]], tmp_path: Path):
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    again = run(tmp_path, OVERLAPC_MEMORY="pool")
    assert (again["captured"], again["compiled"], again["kept"]) == (1, 2, 0)


def test_a_trace_that_depends_on_an_object_of_the_model_is_not_cached(tmp_path: Path):
    model = precompiled.WithActivation(torch.relu)
    counters["overlapc"].clear()
    options = {"profile": "cpu-gloo", "warm_start": True, "cache_dir": tmp_path}
    with torch._dynamo.config.patch(caching_precompile=True):
        torch.compile(model, backend="overlapc", fullgraph=True, options=options)(torch.ones(4))
    assert [name for name in counters["overlapc"] if name.startswith("trace not stored")] == [
        "trace not stored: it depends on which object L['self'].activation is"
    ]
    assert not PrecompileContext._backend_artifacts_by_key


def test_a_step_that_is_no_longer_cached_is_an_error(tmp_path: Path):
    config = Config.of({"cache_dir": tmp_path, "profile": "cpu-gloo"})  # includes options set by variables
    kept = CachedStepKey("0" * 40, environment_of(config, ("cpu",)), config, None, ("cpu",))
    with pytest.raises(CachedStepMissing, match="no longer in the cache"):
        pickle.loads(pickle.dumps(StepArtifact(key="__compiled_fn_1", content=kept)))
