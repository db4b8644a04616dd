"""`benchmark_fusion`: two kernels are fused only if the fused kernel is measured to be faster than both."""

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
    """Return a measurement by which a kernel with one store takes 100 ns and one with two stores `fused_ns`."""

    def measure(op: Loops) -> KernelTiming:
        return KernelTiming(100.0) if len(op.body.stores) == 1 else KernelTiming(fused_ns, spills)

    return measure


def test_a_fusion_measured_as_faster_is_accepted() -> None:
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
def test_a_slower_spilling_or_unmeasured_fusion_is_refused_with_its_reason(measure, reason: str) -> None:
    _, report = fuse_ops(two_readers(), measure=measure)
    assert report.fused == []
    assert report.refused["x", "y"].reason.startswith(reason)


def test_kernels_of_equal_source_are_measured_once(tmp_path: Path) -> None:
    made = graph([pointwise("x", "a"), extern("m", "x"), pointwise("y", "b")], ["m", "y"])
    measure = KernelTimes(made, tmp_path)
    first, second = (measure(made.ops[at]) for at in (0, 2))
    assert isinstance(first, KernelTiming)
    assert first.ns > 0
    assert second is first  # cached: both kernels have the same source


def test_a_function_compiled_with_benchmark_fusion_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.utils.counters.clear()
    timed: list[KernelTiming | str] = []
    measure = KernelTimes.__call__
    monkeypatch.setattr(KernelTimes, "__call__", lambda self, op: timed.append(measure(self, op)) or timed[-1])

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.sin(), -1).cos()

    x = torch.randn(64, 64)
    torch.testing.assert_close(compiled(function, benchmark_fusion=True)(x), function(x))
    assert any(isinstance(each, KernelTiming) for each in timed)
    assert counted("fallbacks") == 0


def test_a_kernel_whose_check_zeros_would_fail_is_not_measured() -> None:
    table, places = torch.randn(100), torch.arange(50, 80)

    def function(table, places):
        return table[places - 50] * 2 + 1

    torch.testing.assert_close(compiled(function, benchmark_fusion=True)(table, places), function(table, places))


def test_refusals_are_printed_when_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(8, 8)
    compiled(lambda x: (x.sin() @ x).cos(), debug="fusion")(x)
    printed = capfd.readouterr().err
    assert "decisions" in printed
    assert "[overlapc rank0" in printed
