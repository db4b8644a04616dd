"""Which kernels share a launch (foreach kernels)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from overlapc.fusion import combo, live
from overlapc.fusion.fuse import fuse
from overlapc.fusion.report import FusionReport
from overlapc.fusion.work import work_of
from overlapc.ir.body import Body, Checked, Constant, op
from overlapc.ir.ops import Combo, IROp, LoweredGraph, Provenance
from tests.fusion.small_graphs import extern, graph, kernel, overwrite, pointwise, start, view, wait
from tests.ir.bodies import P, loops_of, put, x


def combined(made: LoweredGraph) -> tuple[list[IROp], FusionReport]:
    """Return the graph's ops fused and combined, and the report."""
    ops, report = fuse(made.ops, made)
    return combo.combine(ops, made, report), report


def launches(made: LoweredGraph) -> tuple[list[list[str]], FusionReport]:
    """Return the names of the kernels in each launch, in order, and the report."""
    ops, report = combined(made)
    return [[part.name for part in op.parts] if isinstance(op, Combo) else [op.name] for op in ops], report


def test_kernels_of_one_kind_share_a_launch() -> None:
    ops = [pointwise("x", "a", elements=8), pointwise("y", "b", elements=100), pointwise("z", "c", elements=3)]
    found, report = launches(graph(ops, ["x", "y", "z"]))
    assert found == [["x", "y", "z"]]
    assert report.combined == [("x", "y"), ("y", "z")]
    assert "one launch x + y" in str(report)


def test_a_kernel_that_other_ranks_have_in_another_form_keeps_its_launch() -> None:
    kernels = [pointwise(name, name.upper()) for name in "xyz"]
    named = [replace(kernel, origin=Provenance(fx=(kernel.name,))) for kernel in kernels]
    made = graph(named, ["x", "y", "z"])
    report = FusionReport()
    ops = combo.combine(made.ops, made, report, alone={"y"})
    assert [op.name for op in ops] == ["y", "z"]
    assert report.combined == [("x", "z")]


def test_a_launch_reads_and_writes_the_bytes_of_all_its_parts() -> None:
    ops: Sequence[IROp] = [pointwise("x", "a"), pointwise("y", "b")]
    made = graph(ops, ["x", "y"])
    (both,), _ = combined(made)
    alone = [work_of(each, made) for each in ops]
    assert work_of(both, made).read_bytes == sum(work.read_bytes for work in alone)
    assert work_of(both, made).write_bytes == sum(work.write_bytes for work in alone)


def test_kernels_of_different_kinds_do_not_share_a_launch() -> None:
    other = kernel("y", Body(loops_of("p", (8,)), (), (put("y", P[0], op("neg", x("b", P[0]))),)))
    assert launches(graph([pointwise("x", "a"), other, pointwise("z", "c")], ["x", "y", "z"]))[0] == [["y"], ["x", "z"]]


def test_a_kernel_that_depends_on_another_is_in_a_later_launch() -> None:
    # Each chain is cut by a call, so that nothing fuses.
    ops: list[IROp] = []
    for name in "ab":
        ops += [pointwise(f"x{name}", name), extern(f"m{name}", f"x{name}"), pointwise(f"y{name}", f"m{name}")]
    assert launches(graph(ops, ["ya", "yb"]))[0] == [["xa", "xb"], ["ma"], ["mb"], ["ya", "yb"]]


def test_a_launch_does_not_raise_the_peak_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SLACK_BYTES", 0)
    ops = [extern("m", "a"), pointwise("y", "m"), extern("n", "y"), pointwise("z", "b")]
    found, report = launches(graph(ops, ["n", "z"]))
    assert found[-1] == ["z"]
    assert "exceed peak memory" in report.refused["y", "z"].reason


def test_a_writer_that_must_wait_for_a_reader_is_not_combined_with_it() -> None:
    ops: list[IROp] = [pointwise("x", "a"), overwrite("w", "a"), pointwise("y", "a__w")]
    found, report = launches(graph(ops, ["x", "y", "a__w"]))
    assert found == [["x"], ["w"], ["y"]]
    assert "not one launch: w must run between them" in report.refused["x", "y"].reason


def test_nothing_is_combined_across_a_library_call() -> None:
    ops: list[IROp] = [
        pointwise("x", "a"),
        extern("m", "b", "c", target=torch.ops.aten.mm.default),
        pointwise("y", "c"),
    ]
    assert launches(graph(ops, ["x", "m", "y"]))[0] == [["x"], ["m"], ["y"]]


def test_nothing_is_combined_across_communication() -> None:
    ops: list[IROp] = [pointwise("x", "a"), start("s", "b"), pointwise("y", "c"), wait("w", "s")]
    assert launches(graph(ops, ["x", "y", "w"]))[0] == [["x"], ["s"], ["y"], ["w"]]


def test_the_buffers_of_a_launch_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlapc.fusion.combo.MOST_POINTERS", 4)
    inputs = [f"a{at}" for at in range(5)]
    ops = [pointwise(f"x{at}", name) for at, name in enumerate(inputs)]
    made = graph(ops, [each.name for each in ops], inputs=inputs)
    assert launches(made)[0] == [["x0", "x1"], ["x2", "x3"], ["x4"]]


def test_kernels_with_checks_do_not_share_a_launch() -> None:
    def checked(out: str, read: str) -> IROp:
        value = Checked(x(read, P[0]), op("lt", x(read, P[0]), Constant(9.0, torch.float32)), "too large")
        return kernel(out, Body(loops_of("p", (8,)), (), (put(out, P[0], value),)), view(out))

    assert launches(graph([checked("x", "a"), checked("y", "b")], ["x", "y"]))[0] == [["x"], ["y"]]


def test_the_number_of_attempts_is_linear_in_the_number_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlapc.fusion.combo.MOST_POINTERS", 2)  # no two kernels fit into a launch
    tried: list[int] = []
    monkeypatch.setattr(
        "overlapc.fusion.combo._try_combine",
        lambda groups, report, one, other: bool(tried.append(other)),  # always False
    )
    inputs = [f"a{at}" for at in range(50)]
    ops = [pointwise(f"x{at}", name) for at, name in enumerate(inputs)]
    launches(graph(ops, [each.name for each in ops], inputs=inputs))
    assert len(tried) <= combo.MOST_OPEN * len(ops)


def test_kernels_are_of_one_kind_if_one_function_can_run_them() -> None:
    small, large = pointwise("x", "a", elements=8), pointwise("y", "b", elements=100)
    assert combo.kind_of(small) == combo.kind_of(large) == combo.kind_of(Combo("xy", (small, large)))
    other = kernel("z", Body(loops_of("p", (8,)), (), (put("z", P[0], op("neg", x("b", P[0]))),)))
    assert combo.kind_of(other) not in (combo.kind_of(small), None)
    checked = Body(loops_of("p", (8,)), (), (put("z", P[0], Checked(x("b", P[0]), Constant(True, torch.bool), "no")),))
    assert combo.kind_of(kernel("z", checked)) is None


def test_a_launch_made_of_kernels_holds_all_their_parts() -> None:
    ops = [pointwise("x", "a"), Combo("yz", (pointwise("y", "b"), pointwise("z", "c"))), pointwise("w", "d")]
    launch = combo.one_launch(ops)
    assert isinstance(launch, Combo)
    assert launch.name == "x+2"
    assert [part.name for part in launch.parts] == ["x", "y", "z", "w"]


def test_kernels_that_use_too_many_buffers_are_refused_as_one_launch() -> None:
    most = combo.MOST_POINTERS // 2
    ops = [pointwise(f"x{at}", f"a{at}") for at in range(most + 1)]
    assert isinstance(combo.one_launch(ops[:most]), Combo)
    assert combo.one_launch(ops) == "together they use more than 240 buffers"
