"""`benchmark_fusion`: fusions stay where kernels, really run, are faster together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import overlapc.codegen.cpp  # registers the generator
from overlapc.autotune.fusions import KernelTimes
from overlapc.fusion import fuse_ops
from overlapc.fusion.fuse import KernelTiming
from overlapc.ir.ops import Loops
from overlapc.runtime.counters import counted
from tests.fusion.small_graphs import extern, graph, names, pointwise
from tests.lowering.against_eager import compiled

assert overlapc.codegen.cpp.CppGenerator


def two_readers():
    return graph([pointwise("x", "a"), pointwise("y", "a", "b")], ["x", "y"])


def times(fused_ns: float, spills: int = 0):
    """Single kernels take 100 ns; one that stores twice what is said."""

    def measure(op: Loops) -> KernelTiming:
        return KernelTiming(100.0) if len(op.body.stores) == 1 else KernelTiming(fused_ns, spills)

    return measure


def test_a_fusion_that_is_faster_stays() -> None:
    ops, report = fuse_ops(two_readers(), measure=times(199.0))
    assert names(ops) == ["y"]
    assert len(report.fused) == 1


@pytest.mark.parametrize(
    ("measure", "reason"),
    [
        (times(201.0), "measured: 0.2 us fused, 0.2 us apart"),
        (times(10.0, spills=3), "measured: fused it spills 3 registers"),
        (
            lambda op: "no scan on cpu" if len(op.body.stores) > 1 else KernelTiming(1.0),
            "it could not be measured: no scan on",
        ),
    ],
)
def test_a_fusion_that_is_not_is_refused_with_what_was_measured(measure, reason: str) -> None:
    _, report = fuse_ops(two_readers(), measure=measure)
    assert report.fused == []
    assert report.refused["x", "y"].startswith(reason)


def test_kernels_are_run_once_and_take_time(tmp_path: Path) -> None:
    made = graph([pointwise("x", "a"), extern("m", "x"), pointwise("y", "b")], ["m", "y"])
    measure = KernelTimes(made, tmp_path)
    first, second = (measure(made.ops[at]) for at in (0, 2))
    assert isinstance(first, KernelTiming)
    assert first.ns > 0
    assert second is first  # of equal text


def test_through_torch_compile() -> None:
    torch._dynamo.utils.counters.clear()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.sin(), -1).cos()

    x = torch.randn(64, 64)
    torch.testing.assert_close(compiled(function, benchmark_fusion=True)(x), function(x))
    assert counted("fallbacks") == 0


def test_refusals_are_printed_when_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(8, 8)
    compiled(lambda x: (x.sin() @ x).cos(), debug="fusion")(x)
    printed = capfd.readouterr().err
    assert "decisions" in printed
    assert "[overlapc rank0" in printed
