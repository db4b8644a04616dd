"""The breakdown of compile time tells whose work a moment was."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest

from benchmarks.sampled import PHASES, Sampled


def load(path: Path, text: str) -> object:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_moment_belongs_to_the_innermost_frame_that_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wait = "import time\ndef wait(then=None):\n    then() if then else time.sleep(0.12)\n"
    dynamo = load(tmp_path / "torch/_dynamo/a.py", wait)
    backend = load(tmp_path / "torch/_inductor/b.py", wait)
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(0.12)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sampled() as sampled:
        dynamo.wait()  # type: ignore[attr-defined]
        dynamo.wait(backend.wait)  # type: ignore[attr-defined]
        dynamo.wait(lambda: importlib.import_module("slow_to_import"))  # type: ignore[attr-defined]
        time.sleep(0.12)
    found = sampled.seconds()
    assert list(found) == list(PHASES)
    assert all(found[phase] > 0.03 for phase in ("imports", "dynamo", "compiler", "run"))
    assert found["aot"] == 0
    assert any(what == "imports: slow_to_import" for what in sampled.details())
    sys.modules.pop("slow_to_import")


def test_phases_add_up_to_the_whole():
    began = time.perf_counter()
    with Sampled() as sampled:
        time.sleep(0.05)
    assert 0.05 <= sum(sampled.seconds().values()) * (1 + 1e-9) <= time.perf_counter() - began + 1e-6
