"""The schedule of fused ops: kinds of nodes, memory, mutations, and the order of effects."""

from __future__ import annotations

from overlapc.fusion.to_schedule import op_name, to_schedule
from overlapc.ir.ops import IROp
from overlapc.schedule.dependencies import Why, of
from overlapc.schedule.model import Kind
from tests.fusion.small_graphs import barrier, extern, graph, overwrite, pointwise, start, wait


def test_ops_become_nodes_with_their_kind_buffers_and_mutations() -> None:
    ops: list[IROp] = [
        start("ag", "a"),
        wait("w", "ag"),
        pointwise("x", "w", "b"),
        overwrite("add", "c", "x"),
        barrier("all", "x"),
    ]
    schedule = to_schedule(ops, graph(ops, ["x", "all"]), freeable={"a"}, budget_bytes=1000)
    kinds = {node.name: node.kind for node in schedule.nodes}
    assert kinds == {"ag": Kind.START, "w": Kind.WAIT, "x": Kind.KERNEL, "add": Kind.EXTERN, "all": Kind.COMM}
    assert schedule.buffers["w"].alias_of == "ag"
    assert schedule.buffers["w"].bytes == 0
    assert schedule.buffers["x"].bytes == 32
    assert (schedule.buffers["a"].freeable, schedule.buffers["b"].freeable) == (True, False)
    assert schedule.node("add").mutates == ("c",)
    assert schedule.outputs == ("x", "all")
    assert [node.payload for node in schedule.nodes] == ops


def test_the_work_of_a_kernel_is_its_bytes_and_flops() -> None:
    ops: list[IROp] = [pointwise("x", "a", "b")]
    work = to_schedule(ops, graph(ops, ["x"])).node("x").work
    assert work is not None
    assert (work.read_bytes, work.write_bytes, work.flops) == (64, 32, 16)


def test_effects_keep_their_order_in_the_schedule() -> None:
    ops: list[IROp] = [extern("dice", "a", pure=False), extern("sin", "b"), extern("more", "c", pure=False)]
    schedule = to_schedule(ops, graph(ops, ["dice", "sin", "more"]))
    assert [(a, b) for a, b, why in of(schedule).edges() if why is Why.AFTER] == [(0, 2)]


def test_op_names_have_no_aten_prefix_and_no_default_suffix() -> None:
    import torch

    assert op_name(torch.ops.aten.mm.default) == "mm"
    assert op_name(torch.ops._c10d_functional.wait_tensor.default) == "_c10d_functional.wait_tensor"
    assert op_name(len) == "len"
