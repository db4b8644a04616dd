"""The simulator, which is compiled once per machine, is compiled while the first step is traced."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from overlapc.estimators.simulator import native

AHEAD = "overlapc-build-ahead"


def test_the_simulator_is_built_by_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None):
    builders = []
    built = native._built

    def noted(cache_dir: Path) -> Path:
        builders.append(threading.current_thread().name)
        return built(cache_dir)

    monkeypatch.setattr(native, "_built", noted)
    options = {"cache_dir": str(tmp_path), "profile": "cpu-gloo", "native": False}
    torch.compile(torch.nn.Linear(3, 3), backend="overlapc", options=options)(torch.ones(2, 3))
    for thread in threading.enumerate():
        if thread.name == AHEAD:
            assert not thread.daemon  # the process waits for the build before it exits
            thread.join()
    assert builders[0] == AHEAD
    assert len(list((tmp_path / "simulators").rglob("*.so"))) == 1
