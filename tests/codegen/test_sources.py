"""Kernels that differ only in their buffers are generated once."""

from __future__ import annotations

from typing import Any

import pytest

from overlapc.codegen.cpp import CppGenerator
from overlapc.codegen.sources import generate_kernels
from overlapc.fusion.to_schedule import to_schedule
from tests.fusion.small_graphs import graph, pointwise


def test_equal_kernels_of_layers_are_generated_once(monkeypatch: pytest.MonkeyPatch):
    generated = []
    generate = CppGenerator.generate

    def noted(self: CppGenerator, body: Any, *how: Any) -> Any:
        generated.append(body)
        return generate(self, body, *how)

    monkeypatch.setattr(CppGenerator, "generate", noted)
    chain = [("y1", "a"), ("y2", "y1"), ("y3", "y2")]
    made = graph([pointwise(name, read) for name, read in chain] + [pointwise("z", "a", elements=9)], ["y3", "z"])
    sources = generate_kernels(to_schedule(made.ops, made), made)
    assert len(generated) == 2
    assert len({sources[name].text for name, _ in chain}) == 1
    assert [sources[name].buffers for name, _ in chain] == [(name, read) for name, read in chain]
    assert sources["z"].text != sources["y1"].text
