"""What fuses, in which order, and why other pairs do not; every rule has a test that fails without it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.fusion import fuse as fusing
from overlapc.fusion import fuse_ops, legality, live
from overlapc.fusion.deps import edges
from overlapc.fusion.fuse import Fuser, fuse
from overlapc.fusion.report import FusionReport
from overlapc.ir.body import Body, Reduce, op
from overlapc.ir.ops import IROp, Loops, LoweredGraph, Start, Wait
from tests.fusion.programs import capture
from tests.fusion.small_graphs import (
    ELEMENTS,
    barrier,
    extern,
    graph,
    kernel,
    names,
    overwrite,
    pointwise,
    start,
    view,
    wait,
)
from tests.ir.bodies import P, R, loops_of, put, x

CUDA = torch.device("cuda")


def fused(made: LoweredGraph) -> tuple[list[str], FusionReport]:
    ops, report = fuse(made.ops, made)
    return names(ops), report


# --- what fuses


def test_a_reader_fuses_with_its_producer_and_the_intermediate_buffer_is_removed() -> None:
    ops, report = fuse(*_twice(graph([pointwise("x", "a"), pointwise("y", "x")], ["y"])))
    (only,) = ops
    assert isinstance(only, Loops)
    assert [store.buffer for store in only.body.stores] == ["y"]
    assert [each.buffer for each in only.outputs] == ["y"]
    assert report.fused == [("x", "y", 32)]


def _twice(made: LoweredGraph) -> tuple[list[IROp], LoweredGraph]:
    return made.ops, made


def test_a_buffer_that_an_unfused_op_reads_is_still_stored() -> None:
    made = graph([pointwise("x", "a"), pointwise("y", "x"), extern("z", "x")], ["y", "z"])
    ops, _ = fuse(made.ops, made)
    assert names(ops) == ["y", "z"]
    assert isinstance(ops[0], Loops)
    assert [store.buffer for store in ops[0].body.stores] == ["x", "y"]


def test_readers_of_one_buffer_fuse() -> None:
    assert fused(graph([pointwise("x", "a"), pointwise("y", "a")], ["x", "y"]))[0] == ["y"]


def test_equal_kernels_that_share_only_a_scalar_are_left_for_one_launch() -> None:
    def scaled(out: str, read: str) -> Loops:
        value = op("mul", x(read, P[0]), x("scalar", 0))
        return kernel(out, Body(loops_of("p", (1000,)), (), (put(out, P[0], value),)), view(out, 1000))

    views = [view("scalar", 1), view("a", 1000), view("b", 1000)]
    made = graph([scaled("x", "a"), scaled("y", "b")], ["x", "y"], views=views)
    found, report = fused(made)
    assert found == ["x", "y"]
    assert "one launch may run both" in report.refused["x", "y"].reason


def test_kernels_that_share_no_buffer_do_not_fuse() -> None:
    assert fused(graph([pointwise("x", "a"), pointwise("y", "b")], ["x", "y"]))[0] == ["x", "y"]


def test_the_fusion_that_saves_most_bytes_comes_first() -> None:
    # w can fuse with x, which is nearer, or with y, but not with both, because m must run between x and y.
    ops: list[IROp] = [pointwise("x", "a"), pointwise("w", "a", "b"), extern("m", "x"), pointwise("y", "b", "c", "m")]
    assert fused(graph(ops, ["x", "w", "y"]))[1].fused == [("x", "w", 32)]
    ops[1] = pointwise("w", "a", "b", "c")
    assert fused(graph(ops, ["x", "w", "y"]))[1].fused == [("w", "y", 64)]


def test_the_nearest_of_equal_fusions_comes_first() -> None:
    ops = [pointwise("x", "a"), pointwise("y", "b"), pointwise("z", "a", "b")]
    assert fused(graph(ops, ["x", "y", "z"]))[1].fused == [("y", "z", 32), ("x", "z", 32)]


# --- what does not, and why


def row_sum(out: str, read: str) -> Loops:
    """Return a kernel that sums all elements of a buffer."""
    (loop,) = loops_of("r", (8,))
    total = Reduce("sum", x(read, loop.symbol), torch.float32)
    return kernel(out, Body((), (loop,), (put(out, 0, total),)), view(out, 1))


def test_kernels_of_one_kind_fuse_before_others() -> None:
    """The two element-wise kernels fuse first, although the sum saves as many bytes and is nearer to its input."""
    _, report = fused(graph([pointwise("p", "a"), row_sum("s", "p"), pointwise("q", "a")], ["p", "s", "q"]))
    assert report.fused[0][:2] == ("p", "q")


def test_kernels_do_not_fuse_across_an_op_that_must_run_between_them() -> None:
    ops = [pointwise("x", "a"), extern("mm", "x"), pointwise("y", "a", "mm")]
    order, report = fused(graph(ops, ["x", "y"]))
    assert order == ["x", "mm", "y"]
    assert report.refused["x", "y"].reason == "mm must run between them"
    assert "apart x | y: mm must run between them" in str(report)


def test_bodies_are_not_merged_where_an_op_must_run_between_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model's candidates most are refused for this reason, and merging bodies is most of the time of fusion."""

    def merge(first: Body, second: Body) -> Body:
        raise AssertionError("two bodies were merged")

    monkeypatch.setattr(legality, "merge", merge)
    ops = [pointwise("x", "a"), extern("mm", "x"), pointwise("y", "a", "mm")]
    assert fused(graph(ops, ["x", "y"]))[0] == ["x", "mm", "y"]


def test_kernels_of_different_devices_do_not_fuse() -> None:
    first = pointwise("x", "a")
    other = dataclasses.replace(pointwise("y", "a"), device=CUDA)
    assert fused(graph([first, other], ["x", "y"]))[1].refused["x", "y"].reason == "they run on different devices"


def test_the_buffers_of_a_fused_kernel_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    made = graph([pointwise("x", "a", "b"), pointwise("y", "b", "c")], ["x", "y"])
    monkeypatch.setattr(legality, "MOST_BUFFERS", 4)
    assert fused(made)[1].refused["x", "y"].reason == "together they use more than 4 buffers"
    monkeypatch.setattr(legality, "MOST_BUFFERS", 5)
    assert fused(made)[0] == ["y"]


def test_the_values_of_a_fused_kernel_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    made = graph([pointwise("x", "a"), pointwise("y", "a", "b")], ["x", "y"])
    monkeypatch.setattr(legality, "LARGEST_KERNEL", 4)
    assert fused(made)[1].refused["x", "y"].reason == "together they compute more than 4 values"
    monkeypatch.setattr(legality, "LARGEST_KERNEL", 5)
    assert fused(made)[0] == ["y"]


def test_readers_that_are_far_apart_do_not_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    made = graph([pointwise("x", "a"), extern("m", "b"), extern("n", "c"), pointwise("y", "a")], ["x", "m", "n", "y"])
    monkeypatch.setattr(fusing, "FARTHEST", 2)
    assert fused(made)[0] == ["x", "m", "n", "y"]
    monkeypatch.setattr(fusing, "FARTHEST", 3)
    assert fused(made)[0] == ["m", "n", "y"]


def test_the_number_of_candidates_is_linear_in_the_readers_of_one_buffer() -> None:
    made = graph([pointwise(f"x{at}", "a") for at in range(200)], [f"x{at}" for at in range(200)])
    assert len(list(Fuser(made.ops, made).candidates())) <= 200 * fusing.NEIGHBOURS


def test_a_fusion_may_keep_a_few_bytes_live_past_the_peak() -> None:
    ops = [pointwise("x", "saved", "b"), extern("peak", "b"), extern("end", "peak"), pointwise("y", "b", "end")]
    made = graph(ops, ["x", "y"], ["saved", "b"])
    assert names(fuse(made.ops, made, freeable={"saved"})[0]) == ["peak", "end", "y"]


def test_a_fusion_that_would_exceed_peak_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SLACK_BYTES", 0)

    def turned(name: str, other: str, at: sympy.Expr) -> Loops:
        value = op("exp", op("add", x(other, at), x("b", P[0])))
        return kernel(name, Body(loops_of("p", (ELEMENTS,)), (), (put(name, P[0], value),)))

    def held(at: sympy.Expr) -> LoweredGraph:
        # x frees a saved tensor; y, with which x could fuse, comes after the memory peak at `peak`.
        ops = [turned("x", "saved", at), extern("peak", "b"), extern("end", "peak"), turned("y", "end", at)]
        return graph(ops, ["x", "y"], inputs=("b", "saved"))

    made = held(ELEMENTS - 1 - P[0])
    ops, report = fuse(made.ops, made, freeable={"saved"})
    assert names(ops) == ["x", "peak", "end", "y"]
    assert report.refused["x", "y"].reason == "it would keep 32 more bytes live and exceed peak memory"
    assert names(fuse(made.ops, made)[0]) == ["peak", "end", "y"]  # not freeable: the caller holds `saved` anyway
    made = held(P[0])
    assert names(fuse(made.ops, made, freeable={"saved"})[0]) == ["peak", "end", "y"]  # y reuses the memory of `end`


def test_a_reader_fuses_at_its_producers_position_if_that_needs_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SLACK_BYTES", 0)
    # y reads only x but comes after the peak: if both ran at y's position, `saved` would live until then.
    ops = [pointwise("x", "saved", "b"), extern("peak", "x"), extern("end", "peak"), pointwise("y", "x")]
    made = graph([*ops, extern("later", "end")], ["x", "y", "later"], inputs=("b", "saved"))
    assert names(fuse(made.ops, made, freeable={"saved"})[0]) == ["y", "peak", "end", "later"]


def test_an_intermediate_that_is_removed_offsets_an_input_that_lives_longer() -> None:
    # Fusing x into y keeps `saved` live past the peak, but then x, of the same size, is never allocated.
    ops = [pointwise("x", "saved"), extern("peak", "b"), extern("end", "peak"), pointwise("y", "x", "end")]
    made = graph(ops, ["y"], inputs=("a", "b", "c", "saved"))
    assert names(fuse(made.ops, made, freeable={"saved"})[0]) == ["peak", "end", "y"]


# --- communication


@pytest.mark.parametrize("late_first", [True, False])
def test_no_start_becomes_dependent_on_a_wait(late_first: bool) -> None:
    late, early = pointwise("late", "b", "w"), pointwise("early", "b")
    pair = [late, early] if late_first else [early, late]
    ops: list[IROp] = [start("s0", "a"), wait("w", "s0"), *pair, start("s1", "early")]
    order, report = fused(graph(ops, ["late", "s1"]))
    assert order == ["s0", "w", *names(pair), "s1"]
    (refusal,) = report.refused.values()
    assert refusal.reason == "one precedes a collective's start, the other follows a wait"


def test_earlier_fusions_count_for_dependences_of_starts_on_waits() -> None:
    # x fuses with y, which comes after the wait. z needs x, so z comes after the wait, too, and must not fuse with
    # `early`.
    ops: list[IROp] = [
        start("s0", "a"),
        wait("w", "s0"),
        pointwise("y", "w", "b"),
        pointwise("x", "b"),
        extern("mm", "x"),
        pointwise("z", "c", "mm"),
        pointwise("early", "c"),
        start("s1", "early"),
    ]
    made = graph(ops, ["y", "x", "z", "s1"])
    fuser = Fuser(made.ops, made)
    assert fuser.try_merge(2, 3)
    assert not fuser.try_merge(5, 6)
    assert "start" in fuser.report.refused["z", "early"].reason


def test_kernels_on_the_same_side_of_a_wait_fuse() -> None:
    ops: list[IROp] = [start("s0", "a"), wait("w", "s0"), pointwise("x", "b", "w"), pointwise("y", "b", "w")]
    assert fused(graph(ops, ["x", "y"]))[0] == ["s0", "w", "y"]


kinds = ("kernel", "kernel", "kernel", "extern", "start", "wait", "barrier", "effect", "overwrite")


@st.composite
def graphs(draw: st.DrawFn) -> LoweredGraph:
    """Draw legal graphs of kernels, calls, collectives on two groups, barriers, effects and overwrites."""
    ops: list[IROp] = []
    latest = {name: name for name in "abc"}  # memory -> the name of its current content
    flying: list[str] = []

    def pick() -> str:
        return latest[draw(st.sampled_from(sorted(latest)))]

    for at in range(draw(st.integers(3, 16))):
        name = f"n{at}"
        kind = draw(st.sampled_from(kinds))
        if kind == "kernel":
            ops.append(pointwise(name, *{pick(), pick()}))
        elif kind == "extern":
            ops.append(extern(name, pick()))
        elif kind == "effect":
            ops.append(extern(name, pick(), pure=False))
        elif kind == "barrier":
            ops.append(barrier(name, pick()))
        elif kind == "start":
            ops.append(start(name, pick(), group=draw(st.sampled_from(("dp", "tp")))))
            flying.append(name)
            continue
        elif kind == "wait":
            if not flying:
                continue
            source = flying.pop(draw(st.integers(0, len(flying) - 1)))
            ops.append(wait(name, source))
        else:
            root = draw(st.sampled_from("abc"))
            if latest[root] == root:
                ops.append(overwrite(name, root, pick()))
                latest[root] = f"{root}__{name}"
            continue
        latest[name] = name
    ops += [wait(f"w_{name}", name) for name in flying]
    written = [op.name for op in ops if isinstance(op, Loops)]
    return graph(ops, written)


@settings(max_examples=300)
@given(graphs(), st.one_of(st.none(), st.integers(0, 99)))
def test_the_result_keeps_every_dependence_and_no_start_gains_a_wait(made: LoweredGraph, seed: int | None) -> None:
    fuser = Fuser(made.ops, made, shuffle=None if seed is None else random.Random(seed))
    fuser.run()
    order = fuser.groups.order.order()
    group_of = {member: group.number for group in fuser.groups for member in group.members}
    assert sorted(group_of) == sorted(names(made.ops))
    place = {group: at for at, group in enumerate(order)}
    needed: dict[int, set[int]] = {group: set() for group in order}
    for at, before in enumerate(edges(made.ops, made).before):
        for earlier in before:
            a, b = group_of[made.ops[earlier].name], group_of[made.ops[at].name]
            if a != b:
                assert place[a] < place[b]
                needed[b].add(a)
    assert _waits_of_starts(range(len(made.ops)), edges(made.ops, made).before, made.ops) == _waits_of_starts(
        order, needed, {group: fuser.groups[group].op for group in order}
    )


def _waits_of_starts(order, before, op_of):
    """Return for every start the names of the waits that it comes after."""
    behind: dict[int, set[str]] = {}
    for at in order:
        behind[at] = set().union(*(behind[each] for each in before[at]))
        if isinstance(op_of[at], Wait):
            behind[at].add(op_of[at].name)
    return {op_of[at].name: behind[at] for at in order if isinstance(op_of[at], Start)}


# --- whole graphs


def test_a_norm_and_a_scaled_softmax_are_one_kernel_each() -> None:
    def norm(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return a * (a.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    made = capture(norm, torch.rand(4, 16), torch.rand(16))
    assert len(fuse_ops(made)[0]) == 1
    made = capture(lambda a: (a * 0.5).softmax(-1), torch.rand(4, 16))
    assert len(fuse_ops(made)[0]) == 1


def test_disabled_fusion_leaves_every_op() -> None:
    made = capture(lambda a: (a + 1) * 2, torch.rand(4))
    assert len(fuse_ops(made, enabled=False)[0]) == 2


def test_kernels_with_symbolic_sizes_fuse() -> None:
    size = sympy.Symbol("s0", integer=True, positive=True)
    loops = (dataclasses.replace(loops_of("p", (1,))[0], size=size),)
    inner = loops_of("r", (4,))
    total = Reduce("sum", x("a", 4 * P[0] + R[0]), torch.float32)
    rows = kernel("rows", Body(loops, inner, (put("rows", P[0], total),)), view("rows", size))
    after = kernel("after", Body(loops, (), (put("after", P[0], x("rows", P[0])),)), view("after", size))
    made = graph([rows, after], ["after"], views=[view("a", size, 4)])
    assert fused(made)[0] == ["after"]


def test_decisions_are_dumped_with_reasons(tmp_path: Path) -> None:
    torch._dynamo.reset()
    options = {"dump": "fusion", "dump_dir": str(tmp_path)}

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hidden = a.exp()
        return (hidden @ b).sin() + hidden

    torch.compile(function, backend="overlapc", options=options)(torch.rand(4, 4), torch.rand(4, 4))
    (decisions,) = tmp_path.rglob("decisions.txt")
    assert "apart exp | add: mm must run between them" in decisions.read_text()
