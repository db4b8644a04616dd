"""Libraries in C, which are compiled once per machine, are compiled while the first step is traced."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlapc import backend
from overlapc.config import Config
from overlapc.estimators.simulator import native
from overlapc.runtime import triton_workers
from overlapc.runtime.copies import command_queues
from tests.worlds import fake_world

AHEAD = "overlapc-build-ahead"


def await_builds() -> None:
    for thread in threading.enumerate():
        if thread.name == AHEAD:
            assert not thread.daemon  # the process waits for the build before it exits
            thread.join()


def test_the_simulator_is_built_by_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None):
    builders = []
    built = native._built

    def noted(cache_dir: Path) -> Path:
        builders.append(threading.current_thread().name)
        return built(cache_dir)

    monkeypatch.setattr(native, "_built", noted)
    options = {"cache_dir": str(tmp_path), "profile": "cpu-gloo", "native": False}
    torch.compile(torch.nn.Linear(3, 3), backend="overlapc", options=options)(torch.ones(2, 3))
    await_builds()
    assert builders[0] == AHEAD
    assert len(list((tmp_path / "simulators").rglob("*.so"))) == 1


@pytest.mark.parametrize(
    ("ranks", "device", "transport", "built"),
    [(2, "cuda", "auto", True), (2, "cuda", "nccl", False), (1, "cuda", "auto", False), (2, "cpu", "copy", False)],
)
def test_the_code_of_copies_is_built_by_another_thread_where_copies_may_be_used(
    ranks: int, device: str, transport: str, built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders = []

    def noted(name: str, *_: Any) -> Any:
        builders.append((name, threading.current_thread().name))
        return SimpleNamespace(open_driver=lambda driver: None)

    monkeypatch.setattr(command_queues, "native_module", noted)
    monkeypatch.setattr(triton_workers, "start", lambda: None)
    with fake_world(ranks):
        backend._build_ahead(Config(cache_dir=str(tmp_path), transport=transport), {device})
        await_builds()
    assert builders == ([("overlapc_copies", AHEAD)] if built else [])
