"""`wrapper="fx"`: programs as FX graphs compute the same as eager, and can be printed and traced again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.fx.experimental.proxy_tensor import make_fx

import overlapc.codegen.cpp  # noqa: F401 (registers the generator)
from overlapc.codegen import generators
from overlapc.codegen.fx import FxWrapper
from overlapc.codegen.program_builder import build_program
from overlapc.codegen.sources import Sources, generate_kernels
from overlapc.config import Config
from overlapc.fusion import fuse_ops
from overlapc.fusion.to_schedule import to_schedule
from overlapc.fx.comm.canonical import canonicalize
from overlapc.fx.comm.collectives import find_collectives
from overlapc.lowering import Communication, lower
from overlapc.runtime.collective_ops import gloo_all_gather
from tests.codegen.interpreted import triton_on_cpu
from tests.lowering.against_eager import compiled, same
from tests.worlds import fake_world

SHAPES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x + self.down(F.gelu(self.up(x))), (24,)).softmax(-1)


def wrapped(function: Callable[..., Any], *inputs: Tensor) -> FxWrapper:
    """Trace, lower and fuse `function`, schedule it in program order, and return it as an FX graph."""
    gm = make_fx(lambda *args: (function(*args),), tracing_mode="fake")(*inputs)
    canonicalize(gm)
    comm = {each.start: Communication(each.comm, not each.synchronous) for each in find_collectives(gm.graph)}
    lowered = lower(gm, "test", comm.get)
    ops, fusion = fuse_ops(lowered)
    schedule = to_schedule(ops, lowered, kernel_of=fusion.kernel_of)
    sources = generate_kernels(schedule, Sources(lowered))
    program = build_program(schedule, lowered, sources)
    wrapper = FxWrapper(program)
    wrapper.function(generators.generator_for("cpu").load(program.kernels(), Config.of({}).cache_dir))
    return wrapper


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


@pytest.fixture
def interpreted_triton(tmp_path) -> Iterator[None]:
    """Use Triton's generator, in its interpreter, for CPU tensors."""

    with triton_on_cpu():
        yield


@SHAPES
def test_a_step_equals_eager(dynamic):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(3, 10, 24)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    call = compiled(model, dynamic, wrapper="fx")
    torch.testing.assert_close(torch.autograd.grad(call(x).square().sum(), list(model.parameters())), expected)
    if dynamic:  # other sizes in the same graph
        more = torch.randn(4, 7, 24)
        torch.testing.assert_close(call(more), model(more))


def test_sizes_of_several_symbols_equal_eager():
    def function(x: Tensor) -> Tensor:
        return x.diagonal() * 2

    call = compiled(function, True, wrapper="fx")
    for size in ((5, 6), (9, 4)):
        x = torch.randn(size)
        torch.testing.assert_close(call(x), function(x))


@pytest.mark.parametrize(
    "amount",
    [
        lambda size: size / 3,
        lambda size: int(size / 3),
        lambda size: math.floor(size * 0.3),
        lambda size: math.ceil(size / 4),
        lambda size: round(size / 4),
    ],
)
def test_quotients_of_sizes_equal_eager(amount):
    """They are arguments of the library call, which no kernel computes."""

    def function(x: Tensor) -> Tensor:
        return x.histc(4, -1, 1 + amount(x.shape[0]))

    call = compiled(function, True, wrapper="fx")
    for size in (10, 7):
        x = torch.randn(size)
        torch.testing.assert_close(call(x), function(x))


@SHAPES
def test_triton_kernels_run_through_torchs_wrapper_op(dynamic, interpreted_triton):
    def function(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = mask & (x > 0)  # Triton reads bool memory as bytes
        return (x * 2 + 1).softmax(-1), x.sum(0), kept

    x, mask = torch.randn(20, 36), torch.rand(20, 36) > 0.5
    torch.testing.assert_close(compiled(function, dynamic, wrapper="fx")(x, mask), function(x, mask))


@pytest.mark.parametrize("wrapper", ["fx", "python"])
def test_a_kernel_may_reuse_memory_with_another_dtype(wrapper, interpreted_triton):
    """The result reuses the product's memory, so the kernel reads one dtype there and writes another."""

    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.arange(8).remainder(4).unsqueeze(1).expand(8, 16)
        return (a.bfloat16() @ b.bfloat16()).half() + 1, a.scatter_reduce(0, index, a * 2, "amax")

    a, b = torch.randn(8, 16), torch.randn(16, 8)
    torch.testing.assert_close(compiled(function, wrapper=wrapper)(a, b), function(a, b))


def test_the_grid_is_computed_in_the_graph(interpreted_triton):
    x = torch.randn(30, 40)
    wrapper = wrapped(lambda x: x.sin() * 2, x)
    assert targets(wrapper.module).count(triton_kernel_wrapper_mutation) == 1
    torch.testing.assert_close(wrapper.module(x)[0], x.sin() * 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_conditionals_equal_eager(sign):
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda a, b: (a * b + 1).sin(), lambda a, b: (a - b).cos(), (x, y)) * 2

    x, y = torch.rand(4, 3) * sign, torch.randn(4, 3)
    torch.testing.assert_close(compiled(function, wrapper="fx")(x, y), function(x, y))


def test_while_loops_equal_eager():
    from torch._higher_order_ops.while_loop import while_loop

    def function(x: Tensor) -> Tensor:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2 + 1), (torch.tensor(0), x))[1] * 3

    x = torch.randn(4)
    torch.testing.assert_close(compiled(function, wrapper="fx")(x), function(x))


def test_data_dependent_sizes_equal_eager():
    def function(x: Tensor) -> Tensor:
        return x[x > 0].sin().sum() + x.nonzero().shape[0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = torch.randn(50)
        torch.testing.assert_close(compiled(function, wrapper="fx")(x), function(x))


def test_several_results_views_and_updates_in_place_equal_eager():
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y[1:3].add_(1)
        values, indices = x.sort(-1)
        return values[:, ::2].T + 1, indices, y * 2

    same(function, torch.randn(5, 8), torch.randn(4))
    x, y, z = torch.randn(5, 8), torch.randn(4), torch.randn(4)
    z.copy_(y)
    torch.testing.assert_close(compiled(function, wrapper="fx")(x, y), function(x, z))
    torch.testing.assert_close(y, z)


def test_collectives_are_nodes_in_their_order():
    c10d = torch.ops._c10d_functional
    with fake_world(4) as group:

        def function(x: Tensor, y: Tensor) -> Tensor:
            flying = c10d.all_gather_into_tensor(x, 4, group)
            return c10d.wait_tensor(flying) + (y @ y).sum()

        module = wrapped(function, torch.randn(8, 4), torch.randn(3, 3)).module
    called = targets(module)
    assert called.index(gloo_all_gather) < called.index(c10d.wait_tensor.default)
    assert str(called[-1]) == "overlapc.run_kernel.default"


def test_the_graph_can_be_printed_and_traced_again():
    x, y = torch.randn(12, 16), torch.randn(16, 8)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return ((x @ y).relu() + 1).softmax(-1)

    module = wrapped(function, x, y).module
    text = module.print_readable(print_output=False)
    assert "run_kernel" in text
    assert "aten.mm.out" in text
    again = make_fx(module, tracing_mode="fake")(x, y)
    torch.testing.assert_close(again(x, y)[0], function(x, y))


def test_arguments_are_freed_after_their_last_reader():
    from overlapc.fx.versions.graphs import boxed

    wrapper = wrapped(lambda x: (x.sin() @ x.cos()).exp(), torch.randn(8, 8))
    given = [torch.randn(8, 8)]
    boxed(wrapper.module)(given)
    assert given == []
