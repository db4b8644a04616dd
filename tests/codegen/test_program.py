"""The instructions of a schedule: how buffers are allocated, reused and freed; and the wrapper that runs them."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import overlapc.codegen.cpp  # noqa: F401 (registers the generator)
from overlapc.codegen.generators import generator_for
from overlapc.codegen.program import Allocate, Call, Free, Launch, Program, Reuse, TakeOver, WaitFor
from overlapc.codegen.program_builder import build_program
from overlapc.codegen.python import PythonWrapper
from overlapc.codegen.sources import Sources, generate_kernels
from overlapc.config import Config
from overlapc.fusion import fuse_ops
from overlapc.fusion.to_schedule import to_schedule
from overlapc.ir.ops import Extern, Start
from overlapc.lowering import lower
from overlapc.runtime.support import LayoutError
from tests.fusion.small_graphs import comm, graph, pointwise, start, view, wait


def compiled(
    function: Callable[..., Any],
    *inputs: Tensor,
    fused: bool = False,
    freeable: tuple[str, ...] = (),
    donated: tuple[str, ...] = (),
) -> tuple[Program, PythonWrapper, Callable[[list[Any]], tuple[Any, ...]]]:
    """Trace and lower `function` (which returns a tensor or a tuple), schedule it in program order, and load it."""

    @functools.wraps(function)  # placeholders are named after its parameters: x_1, y_1
    def several(*args: Tensor) -> tuple[Tensor, ...]:
        result = function(*args)
        return result if isinstance(result, tuple) else (result,)

    gm = make_fx(several, tracing_mode="fake")(*inputs)
    lowered = lower(gm, "test")
    ops, _ = fuse_ops(lowered, enabled=fused)
    schedule = to_schedule(ops, lowered, (*freeable, *donated))
    sources = generate_kernels(schedule, Sources(lowered))
    program = build_program(schedule, lowered, sources, donated=donated)
    wrapper = PythonWrapper(program)
    return program, wrapper, wrapper.function(generator_for("cpu").load(program.kernels(), Config.of({}).cache_dir))


def of(program: Program, kind: type) -> list[Any]:
    return [item for item in program.instructions if isinstance(item, kind)]


def test_a_chain_of_kernels_runs_in_one_buffer():
    x = torch.randn(50)
    program, _, call = compiled(lambda x: x.sin().exp().cos(), x)
    assert len(of(program, Launch)) == 3
    assert len(of(program, Allocate)) == 1
    assert len(of(program, TakeOver)) == 2
    (result,) = call([x])
    torch.testing.assert_close(result, x.sin().exp().cos())
    assert not result._is_view()  # autograd must let the user change it in place


@pytest.mark.parametrize(
    ("function", "donated"),
    [(lambda x, y: y + x.sin().sum(), ()), (lambda x, y: (torch.where(x > 0, y[1:], 0.5), -x), ("x_1",))],
    ids=["new", "new if another object holds the argument"],
)
def test_memory_that_is_not_reused_is_freed_before_new_memory_is_allocated(
    function: Callable[..., Any], donated: tuple[str, ...]
):
    """Both at the same time would exceed the planned peak memory."""
    program, _, _ = compiled(function, torch.randn(20_000), torch.randn(20_001), donated=donated)
    order = [item for item in program.instructions if isinstance(item, Allocate | Reuse | Free)]
    gone = of(program, Allocate)[0].variable  # the sine, the mask
    last = max(at for at, item in enumerate(order) if isinstance(item, Allocate | Reuse))
    freed = next(at for at, item in enumerate(order) if isinstance(item, Free) and gone in item.variables)
    assert freed < last


def test_freed_memory_becomes_the_next_buffer_of_its_size():
    """A kernel that transposes its argument reads another element than it stores, so it cannot work in place."""

    def turned_three_times(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.t().contiguous()
        return x

    x = torch.randn(6, 6)
    program, _, call = compiled(lambda x: turned_three_times(x.sin()), x)
    sine, once, twice, thrice = (item.op.outputs[0].buffer for item in of(program, Launch))
    assert [(item.source, item.variable) for item in of(program, TakeOver)] == [(sine, twice), (once, thrice)]
    torch.testing.assert_close(call([x])[0], x.sin().t())


def test_an_input_is_never_overwritten_even_if_it_is_freed():
    x = torch.randn(50)
    before = x.clone()
    program, _, call = compiled(lambda x: x.sin().exp(), x, freeable=("x_1",))
    assert not {item.source for item in of(program, TakeOver)} & {"x_1"}
    call([x])
    torch.testing.assert_close(x, before)


def test_a_small_donated_input_is_not_reused():
    program, _, _ = compiled(lambda x: x.sin(), torch.randn(50), donated=("x_1",))
    assert not of(program, Reuse)
    assert len(of(program, Allocate)) == 1


def test_a_donated_input_is_overwritten_only_if_no_other_object_holds_it():
    program, _, call = compiled(lambda x: x.sin(), torch.randn(1 << 14), donated=("x_1",))
    assert [(item.source, item.layout.size) for item in of(program, Reuse)] == [("x_1", (1 << 14,))]
    assert not of(program, Allocate)
    x = torch.randn(1 << 14)
    expected, address, arguments = x.sin(), x.data_ptr(), [x]
    del x
    (result,) = call(arguments)
    assert result.data_ptr() == address
    torch.testing.assert_close(result, expected)

    holders: dict[str, Callable[[Tensor], Any]] = {
        "the same tensor": lambda tensor: tensor,
        "a view of it": lambda tensor: tensor.detach()[:10],
        "a node of autograd": torch.sin,
    }
    for name, hold in holders.items():
        x = torch.randn(1 << 14, requires_grad=True) * 1
        held, expected, address = hold(x), x.detach().sin(), x.data_ptr()
        arguments = [x]
        del x
        with torch.no_grad():
            (result,) = call(arguments)
        assert result.data_ptr() != address, name
        torch.testing.assert_close(result, expected)
        del held


def test_a_value_that_is_read_again_keeps_its_memory():
    def function(x: Tensor) -> Tensor:
        a = x.sin()
        return a.exp() + a

    x = torch.randn(50)
    program, _, call = compiled(function, x)
    exp = of(program, Launch)[1]
    assert "sin" not in {item.source for item in of(program, TakeOver) if item.variable == exp.op.outputs[0].buffer}
    torch.testing.assert_close(call([x])[0], function(x))


def test_another_index_forbids_writing_in_place():
    x = torch.randn(6, 6)
    program, _, call = compiled(lambda x: (x.sin().t() + 1).contiguous() + 0, x)
    torch.testing.assert_close(call([x])[0], (x.sin().t() + 1).contiguous())
    transposing = next(
        item for item in of(program, Launch) if "[6*p1 + p0]" in str(item.op.body) or "p0 + 6*p1" in str(item.op.body)
    )
    taken = {item.variable: item.source for item in of(program, TakeOver)}
    assert taken.get(transposing.op.outputs[0].buffer) != "sin"


def test_a_softmax_that_may_run_in_place_equals_eager():
    x = torch.randn(8, 300)
    _, _, call = compiled(lambda x: torch.softmax(x.sin(), -1), x)
    torch.testing.assert_close(call([x])[0], torch.softmax(x.sin(), -1))


def test_saved_inputs_are_freed_after_their_last_use():
    program, _, call = compiled(
        lambda x, y: (x.sin().sum(), y.cos()), torch.randn(9), torch.randn(9), freeable=("x_1",)
    )
    freed = [name for item in of(program, Free) for name in item.variables]
    assert "x_1" in freed
    assert "y_1" not in freed
    args = [torch.randn(9), torch.randn(9)]
    call(args)
    assert args == []


def test_outputs_share_no_memory_with_each_other():
    x = torch.randn(64)
    _, _, call = compiled(lambda x: (x.sin(), x.cos(), x.sin().exp()), x, fused=True)
    outputs = call([x])
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 3


def test_an_argument_of_another_layout_is_an_error():
    _, _, call = compiled(lambda x: x + 1, torch.randn(4, 5))
    with pytest.raises(LayoutError, match=r"x_1 has size \(4, 5\) and stride \(1, 4\)"):
        call([torch.randn(5, 4).t()])


def test_the_source_names_ops_as_python_does():
    _, wrapper, _ = compiled(lambda x, w: (x @ w).cumsum(0).sort().values.relu(), torch.randn(3, 4), torch.randn(4, 5))
    assert "torch.mm(x_1, w_1, out=mm)" in wrapper.source
    assert "aten_sort_default = torch.ops.aten.sort.default" in wrapper.source
    assert "returned = aten_sort_default(cumsum)" in wrapper.source
    assert "# relu" in wrapper.source
    compile(wrapper.source, "wrapper", "exec")


def test_names_of_called_functions_differ_from_names_of_variables():
    program, wrapper, _ = compiled(lambda x: x.sin(), torch.randn(5))
    taken = f"gt_{len(wrapper.objects)}"  # possible name of the node of `s0 > 20` after other comparisons
    other = PythonWrapper(dataclasses.replace(program, inputs=(*program.inputs, taken)))
    assert other.name_of(operator.gt, "gt") != taken


def test_matrix_products_are_called_by_their_public_names():
    a, b, bias, x = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5), torch.randn(2, 3, 3)

    def function(a: Tensor, b: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        added = torch.addmm(bias, a, b, beta=0.5, alpha=2.0)
        return a @ b, added, torch.bmm(x, x), torch.baddbmm(x, x, x, alpha=3.0)

    _, wrapper, call = compiled(function, a, b, bias, x)
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        assert f" torch.{name}(" in wrapper.source
    torch.testing.assert_close(call([a, b, bias, x]), function(a, b, bias, x))


def test_calls_bypass_autograd():
    """A graph records nothing for gradients, so its ops bypass autograd; changed tensors still get a new version."""
    asked: list[bool] = []

    @torch.library.custom_op("overlapc_tests::twice_in", mutates_args=("out",))
    def twice_in(out: Tensor, x: Tensor) -> None:
        out.copy_(2 * x)

    twice_in.register_fake(lambda out, x: None)
    library = torch.library.Library("overlapc_tests", "FRAGMENT")
    library.define("asking(Tensor x) -> Tensor")
    library.impl("asking", lambda x: asked.append(True) or _below(x), "AutogradCPU")
    library.impl("asking", lambda x: x + 1, "CompositeExplicitAutograd")

    def _below(x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.overlapc_tests.asking(x)

    def function(x: Tensor, out: Tensor) -> Tensor:
        torch.ops.overlapc_tests.twice_in(out, x)
        return torch.ops.overlapc_tests.asking(x)

    x, out = torch.randn(5), torch.zeros(5)
    _, _, call = compiled(function, x, out)
    asked.clear()
    version = out._version
    (result,) = call([x, out])
    assert not asked
    torch.testing.assert_close((result, out), (x + 1, 2 * x))
    assert out._version > version
    function(x, out)
    assert asked  # outside of a graph, autograd is called


def test_a_wait_for_part_of_a_bucket_waits_for_the_whole_bucket():
    call = Extern("a+1", torch.ops.aten.split.Tensor, (view("x", 16), 8), {}, [view("a"), view("b")], pure=False)
    ops = [
        Start("a+1", call, comm()),
        start("c", "y"),
        wait("u", "a"),
        pointwise("p", "u"),
        wait("w", "c"),
        wait("v", "b"),
        pointwise("q", "v", "w"),
        wait("t", "y"),  # y was in flight when the graph began
        pointwise("r", "t"),
    ]
    lowered = graph(ops, ["p", "q", "r"], inputs=("x", "y"), views=[view("x", 16)])
    schedule = to_schedule(ops, lowered)
    program = build_program(schedule, lowered, generate_kernels(schedule, Sources(lowered)))
    shown = [item.op.name for item in program.instructions if isinstance(item, Launch | Call | WaitFor)]
    assert shown == ["a+1", "c", "u", "v", "p", "w", "q", "t", "r"]
