"""Equal layers are lowered and fused once; the ops are those that result if every layer is lowered and fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.config import Config
from overlapc.fx.equal_layers.repeats import LEAST, Repeats, find_repeats
from overlapc.ir.ops import LoweredGraph
from overlapc.planning.dumps import Dumps
from overlapc.planning.fused_ops import GraphToFuse
from overlapc.runtime.counters import counted
from tests.fusion.programs import STEPS, Step, number, small, steps, trace
from tests.ir.interpret import run_ops
from tests.parallel.sharded import shard
from tests.parallel.tiny import Tiny, batch
from tests.worlds import fake_world

LAYERS = 10


@contextmanager
def compared() -> Iterator[list[int]]:
    """Within, fuse every graph with equal layers in both ways and compare the results.

    Yields a list to which each such graph adds its number of layers, or 0 if they were not fused alike.
    """
    found: list[int] = []
    once = GraphToFuse._once_for_all_layers

    def both(graph: GraphToFuse, repeats: Repeats) -> Any:
        got = once(graph, repeats)
        with mock.patch.object(GraphToFuse, "_repeats", return_value=None):
            wanted, _ = graph.fused()
        found.append(0 if got is None else len(repeats.stretches))
        if got is not None:
            assert_same(got[0], wanted)
        return got

    with mock.patch.object(GraphToFuse, "_once_for_all_layers", both):
        yield found


def assert_same(got: LoweredGraph, wanted: LoweredGraph) -> None:
    for one, other in zip(got.ops, wanted.ops, strict=True):
        assert one == other
        assert one.origin == other.origin
    assert got.outputs == wanted.outputs
    assert got.inputs == wanted.inputs
    assert got.aliases == wanted.aliases
    assert {name: got.views[name] for name in wanted.views} == wanted.views


def fused(gm: fx.GraphModule) -> LoweredGraph:
    config = Config()
    return GraphToFuse(gm, "graph", config, {}, None, (), Dumps(config, "graph")).fused()[0]


# --- models


class Layer(nn.Module):
    def __init__(self, kind: str, dim: int = 16) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim, bias=False)
        self.register_buffer("seen", torch.zeros(dim))
        self.register_buffer("rows", torch.tensor([1, 0]))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        if self.kind == "dropout":
            h = F.dropout(h, 0.3)
        if self.kind == "condition":
            h = h * other.mean(-1, keepdim=True)
        if self.kind == "index_put":
            h = h.index_put((self.rows,), h[:2] * 2)
        if self.kind == "changes a buffer":
            self.seen.add_(x.detach().mean(0))
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, kind: str = "", layers: int = LAYERS) -> None:
        super().__init__()
        self.start = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(layers))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = self.start(x).relu()
        for layer in self.layers:
            x = layer(x, other)
        return self.head(x).pow(2).mean()


def gradients(model: nn.Module, call: Callable[..., Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    x, other = (torch.randn(4, 16, requires_grad=True) for _ in range(2))
    torch.manual_seed(2)
    loss = call(x, other)
    given = (x, other, *model.parameters())
    return [loss, *(each for each in torch.autograd.grad(loss, given, allow_unused=True) if each is not None)]


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        ("", True, True),
        ("dropout", True, True),
        ("index_put", True, True),
        ("condition", True, False),  # one kernel adds the gradients of what all layers read
        ("changes a buffer", False, True),
    ],
)
def test_layers_are_fused_as_if_each_were_lowered(kind: str, forward: bool, backward: bool):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(kind)
    with compared() as found:
        got = gradients(model, torch.compile(model, backend="overlapc", dynamic=False))
    assert [count >= LEAST for count in found] == [True] * (forward + backward)
    assert counted("layers_reusing_fusion") > 0
    if kind != "dropout":  # whose numbers differ from eager's
        torch.testing.assert_close(got, gradients(model, model))


def test_collectives_keep_their_own_names_and_units():
    torch._dynamo.reset()
    with fake_world(4, rank=1):
        model = shard(Tiny(dim=64, hidden=128, layers=LAYERS))
        with compared() as found:
            torch.compile(model, backend="overlapc", options={"rank_check": False})(*batch(2)).backward()
    # In forward the sums of residuals are inlined in every other layer, and half of ten layers are too few.
    assert [count >= LEAST for count in found] == [False, True]


class Gated(nn.Module):
    """Layers of a diffusion transformer: of the sums that they compute, every other one is recomputed in backward."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(64, 128) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(128, 64) for _ in range(layers))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            x = x + gate(condition) * down(F.gelu(up(F.layer_norm(x, (64,)))))
        return x.pow(2).mean()


def test_pairs_of_layers_are_equal_where_every_other_layer_is_fused_in_another_way():
    torch._dynamo.reset()
    with compared() as found:
        call = torch.compile(Gated(18), backend="overlapc", dynamic=False)
        call(torch.randn(8, 64), torch.randn(8, 64)).backward()
    assert found[-2:] == [0, 8]


def test_nothing_is_repeated_in_a_model_of_few_layers_or_with_trace_once_off():
    for options, layers in (({}, 5), ({"trace_once": False}, LAYERS)):
        torch._dynamo.reset()
        model = Model(layers=layers)
        with compared() as found:
            gradients(model, torch.compile(model, backend="overlapc", dynamic=False, options=options))
        assert not found


# --- graphs


def test_layers_with_symbolic_sizes_or_other_constants_are_not_equal():
    def powers(x: Tensor) -> Tensor:
        for exponent in range(12):
            x = (x.sin() + exponent / 8).cos().exp().relu().neg().abs().sqrt().tanh().sigmoid().atan().asin().erf()
        return x

    gm = trace(powers, torch.rand(3))
    assert find_repeats(gm.graph, lambda node: None) is None


OPS = "sin cos exp relu neg abs sqrt tanh sigmoid atan erf ceil square floor".split()


def chain(weights: Sequence[Tensor]) -> Tensor:
    """Compute layers of 16 nodes, of which the last result of one is read only by the next."""
    h = weights[0] * 0.5
    for w in weights:
        for name in OPS:
            h = getattr(torch, name)(h)
        h = h @ w + 1
    return h


def test_stretches_are_as_long_as_a_layer_and_know_their_own_inputs():
    gm = trace(lambda *weights: chain(weights), *(torch.rand(4, 4) for _ in range(LAYERS)))
    found = find_repeats(gm.graph, lambda node: None)
    assert found is not None
    assert {len(nodes) for nodes in found.stretches} == {16}
    assert len(found.stretches) == len(found.inputs) >= LAYERS - 1
    assert all(len(given) == 1 for given in found.inputs)
    assert len({given for (given,) in found.inputs}) == len(found.inputs)


def test_numbers_that_attention_on_a_gpu_returns_beside_its_tensors_are_compared():
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention

    def run(h: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            h, *_ = attend(h, h @ w, h, None, True, 0.0, True)
            for name in OPS:
                h = getattr(torch, name)(h)
        return h

    with FakeTensorMode():
        h, *weights = (torch.empty(size, device="cuda") for size in [(1, 2, 64, 16)] + [(16, 16)] * LAYERS)
        gm = make_fx(run)(h.bfloat16(), *(w.bfloat16() for w in weights))
    found = find_repeats(gm.graph, lambda node: None)
    assert found is not None
    assert len(found.stretches) >= LAYERS - 1


@pytest.mark.parametrize("behind", [1, 5])
def test_a_value_that_is_read_after_all_layers_ends_the_run(behind: int):
    def run(*weights: Tensor) -> Tensor:
        first = chain(weights[:behind])
        return chain((first, *weights[behind:])) + first

    gm = trace(run, *(torch.rand(4, 4) for _ in range(behind + LAYERS)))
    found = find_repeats(gm.graph, lambda node: None)
    assert found is not None
    nodes = [node for nodes in found.stretches[:-1] for node in nodes]
    after = [node for node in gm.graph.nodes if node.op == "call_function" and node not in nodes]
    assert not any(node in user.all_input_nodes for node in nodes[:-16] for user in after[-2:])
    assert_same_results(gm, [torch.rand(4, 4) for _ in range(behind + LAYERS)])


def assert_same_results(gm: fx.GraphModule, arguments: list[Tensor]) -> None:
    wanted = gm(*arguments)
    with compared():
        graph = fused(gm)
    got = run_ops(graph.ops, graph, arguments)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


# --- random layers


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(steps(least=10, most=24))
def test_random_layers_are_fused_as_if_each_were_lowered(recipe: list[Step]):
    def run(x: Tensor, shared: Tensor, *weights: Tensor) -> list[Tensor]:
        results = []
        for weight in weights:
            pool = [x, weight, shared]
            for name, a, b, at in recipe:
                if name != "into input":  # which changes a tensor of the caller
                    pool.append(STEPS[name](pool[-1 - a % len(pool)], b, pool, at))
            results.append(small(pool[3 + recipe[0][1] % (len(pool) - 3)] if len(pool) > 3 else x))
            x = small(x + small(x[:, :4] @ weight) + number(pool[-1]).sum())  # a library call divides layers
        return [*results, x]

    def arguments() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(-2, 3, (4, 8), generator=generator).float() for _ in range(2 + LAYERS)]

    given_, wanted = arguments(), run(*arguments())
    with compared():
        graph = fused(trace(run, *arguments()))
    got = run_ops(graph.ops, graph, given_)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
