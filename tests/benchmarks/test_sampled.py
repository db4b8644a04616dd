"""The sampled breakdown of compile time attributes every sample to a phase."""

from __future__ import annotations

import importlib
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sampled import PHASES, Sampled


def module(name: str, text: str) -> Any:
    made = types.ModuleType(name)
    exec(text, made.__dict__)
    return made


def test_a_sample_counts_for_the_innermost_frame_of_a_known_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Waits for a number of samples instead of seconds, so that the test also passes on a busy machine.
    source = "def wait(until):\n    while not until(): pass\ndef call(function, *arguments): function(*arguments)\n"
    dynamo, backend = module("torch._dynamo.a", source), module("torch._inductor.b", source)
    (tmp_path / "slow_to_import.py").write_text(
        "from tests.benchmarks.test_sampled import until\nwhile not until(): pass"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sampled() as sampled:

        def five_moments_later() -> Callable[[], bool]:
            ends = sampled.moments + 5
            return lambda: sampled.moments >= ends

        dynamo.wait(five_moments_later())
        dynamo.call(backend.wait, five_moments_later())
        monkeypatch.setitem(globals(), "until", five_moments_later())
        dynamo.call(importlib.import_module, "slow_to_import")
        until = five_moments_later()
        while not until():
            pass
    found = sampled.seconds()
    assert list(found) == list(PHASES)
    assert all(found[phase] > 0 for phase in ("imports", "dynamo", "compiler", "run"))
    assert found["aot"] == 0
    assert any(what == "imports: slow_to_import" for what in sampled.details())
    sys.modules.pop("slow_to_import")


def test_phases_add_up_to_the_elapsed_time():
    began = time.perf_counter()
    with Sampled() as sampled:
        time.sleep(0.05)
    assert 0.05 <= sum(sampled.seconds().values()) * (1 + 1e-9) <= time.perf_counter() - began + 1e-6
