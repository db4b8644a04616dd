"""How AOTAutograd is called: when it generates code, and where it finds the sizes that DTensor computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._logging._internal import trace_log
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx._lazy_graph_module import _LazyGraphModule

from overlapc.compilation.tracing import step_of
from overlapc.config import Config
from tests.worlds import fake_world


@pytest.mark.parametrize("logged", [False, True])
def test_graphs_are_printed_as_code_only_where_torch_logs_them(logged, monkeypatch):
    texts: list[str] = []
    print_readable = fx.GraphModule.print_readable

    def noted(self: fx.GraphModule, *args: Any, **kwargs: Any) -> str:
        texts.append(print_readable(self, *args, **kwargs))
        return texts[-1]

    monkeypatch.setattr(fx.GraphModule, "print_readable", noted)
    monkeypatch.setattr(trace_log, "handlers", [])  # pytest listens
    if logged:
        monkeypatch.setattr(torch._functorch._aot_autograd.graph_compile.aot_graphs_log, "isEnabledFor", lambda _: True)
    # By graph: whether its code is not generated yet. torch always generates backward's, because it reorders its nodes.
    unwritten: dict[str, bool] = {}

    def compile_graph(gm: fx.GraphModule, inputs: Any, *, config: Config, name: str) -> Callable[..., Any]:
        unwritten[name] = isinstance(gm, _LazyGraphModule) and gm._needs_recompile()
        return make_boxed_func(gm.forward)  # reading `forward` generates the code

    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    step = torch.compile(torch.sin, backend=lambda gm, inputs: step_of(compile_graph, gm, inputs, Config(), 0))
    step(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3).cos())
    assert unwritten["forward_0"]
    assert bool(texts) == logged


class WithoutGradient(torch.autograd.Function):
    """The sine of the first argument; the second one gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor) -> Tensor:
        ctx.save_for_backward(x, shard)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, shard = ctx.saved_tensors
        return grad * x.cos(), torch.zeros(shard.shape)


def test_ranks_whose_shard_has_no_rows_divide_the_step_as_others():
    graphs: dict[str, list[list[str]]] = {}

    def compile_graph(gm: fx.GraphModule, inputs: Any, *, config: Config, name: str) -> Callable[..., Any]:
        graphs.setdefault(name.split("_")[0], []).append([node.name for node in gm.graph.nodes])
        return make_boxed_func(gm.forward)

    for rows in (1, 0):
        torch._dynamo.reset()
        step = torch.compile(
            WithoutGradient.apply, backend=lambda gm, inputs: step_of(compile_graph, gm, inputs, Config(), 0)
        )
        step(torch.ones(3, requires_grad=True), torch.ones(rows, 4, requires_grad=True)).sum().backward()
    assert all(some == none for some, none in graphs.values())


def test_a_tensor_parallel_model_compiles_for_other_batches_and_lengths():
    graphs = []

    def compile_graph(gm: fx.GraphModule, inputs: Any, *, config: Config, name: str) -> Callable[..., Any]:
        graphs.append(name)
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
        step = torch.compile(model, backend=lambda gm, inputs: step_of(compile_graph, gm, inputs, Config(), 0))
        for rows, length in ((4, 5), (6, 9), (10, 7)):
            step(torch.ones(rows, length, 8)).sum().backward()
    assert graphs == ["forward_0", "backward_0"] * 2


@torch.library.custom_op("overlapc_tests::of_three_rows", mutates_args=())
def of_three_rows(x: Tensor) -> Tensor:
    return x * 2


@of_three_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward_of_three_rows(ctx: Any, grad: Tensor) -> Tensor:
    assert grad.shape[0] == 3  # guards on the size, which forward does not
    return grad * 2


of_three_rows.register_autograd(_backward_of_three_rows)


def test_a_size_of_a_dtensor_may_become_constant_in_backward():
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))

        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            return DTensor.from_local(of_three_rows(x), mesh, [Shard(0)]), x + 1

        x = torch.ones(3, 4, requires_grad=True)
        sharded, plain = torch.compile(function, backend="overlapc", dynamic=True)(x)
        (sharded.to_local().sum() + 3 * plain.sum()).backward()
        assert sharded.shape == (6, 4)
        torch.testing.assert_close(x.grad, torch.full((3, 4), 5.0))
