"""Equal blocks are traced once, and the graph equals the one that results if every block is traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from overlapc.compilation.tracing import step_of
from overlapc.config import Config
from overlapc.fx.comm.labels import label_of
from overlapc.fx.equal_layers.stamps import Names, Stamp, TracedBlock, append_copy
from overlapc.fx.source import module_path
from overlapc.fx.supported_torch import check_torch_version
from overlapc.parallel.access import prepare_dynamo
from overlapc.runtime.counters import counted
from tests.parallel.sharded import shard
from tests.parallel.tiny import Tiny, batch, tensor_parallel
from tests.worlds import fake_world

LAYERS = 4
_library = torch.library.Library("overlapc_test_blocks", "DEF")
_library.define("halve(Tensor x) -> Tensor")
_library.impl("halve", lambda x: x / 2, "CompositeExplicitAutograd")
torch.library.register_fake("overlapc_test_blocks::halve", torch.empty_like, lib=_library)
backwards_traced = Counter[str]()


def _halve_back(ctx: Any, grad: Tensor) -> Tensor:
    backwards_traced["halve"] += 1
    return grad / 2


torch.library.register_autograd("overlapc_test_blocks::halve", _halve_back, lib=_library)


class Block(nn.Module):
    def __init__(self, dim: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)
        self.register_buffer("seen", torch.rand(dim))
        self.register_buffer("other", None)
        self.kind = ""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = F.silu(self.up(self.norm(x)))
        if self.kind == "dropout":
            h = F.dropout(h, 0.3)
        if self.kind == "assigns":
            h[0] = 0.5
            h = torch.cat([torch.tensor([]), h])
        if self.kind == "returns an argument":
            return x.to(x.device), x + self.down(h) * mask
        if self.kind == "reads a buffer":
            x = x * self.seen
        if self.kind.startswith("changes a buffer"):
            self.seen.mul_(0.9).add_(x.detach().mean(0))
        if self.kind == "changes a buffer and returns a row":
            return self.seen[0], x + self.down(h) * mask
        if self.kind == "changes a buffer and reads another":
            x = x * self.other
        if self.kind == "no gradients":
            with torch.no_grad():
                x = x + h.mean(-1, keepdim=True)
        if self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return x + self.down(h) * mask
        if self.kind == "vmap":
            h = torch.vmap(torch.vmap(lambda a, b: a * b), in_dims=(0, None))(h, h[0])
        if self.kind == "custom op":
            h = torch.ops.overlapc_test_blocks.halve(h)
        if self.kind == "two results":
            return x + self.down(h) * mask, h.pow(2).mean()
        if self.kind == "other way":
            h = h.tanh()
        return x + self.down(h) * mask


class Model(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(8, 4)
        self.kind = kind
        for layer in self.layers:
            layer.kind = kind

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        extra = torch.zeros(())
        if self.kind == "assigns":
            mask = mask.clone()
            mask[1:] = mask[:-1].clone()
        if self.kind == "transposed":
            x = x.t().contiguous().t()
        for layer in self.layers:
            if self.kind == "checkpoint":
                x = checkpoint(layer, x, mask, use_reentrant=False)
            elif self.kind == "two results":
                x, more = layer(x, mask)
                extra = extra + (more if layer is not self.layers[2] else more.detach())
            elif self.kind == "changes a buffer and returns a row":
                row, x = layer(x, mask)
                row.mul_(2)  # changes the buffer, too
            elif self.kind == "returns an argument":
                before, x = layer(x, mask)
                extra = extra + before.detach().sum()
            else:
                x = layer(x, mask)
        if self.kind == "transposed":
            return (x * torch.arange(40.0).view(5, 8)).sum()  # with a contiguous gradient of `x`
        return x.sum() if self.kind == "expanded gradient" else self.head(x).pow(2).mean() + extra


def a_flag_differs() -> Model:
    model = Model()
    model.layers[2].kind = "other way"
    return model


def a_shape_differs() -> Model:
    model = Model()
    model.layers[1] = Block(hidden=24)
    return model


def tied() -> Model:
    model = Model()
    model.layers[3].up.weight = model.layers[0].up.weight
    return model


def hooked() -> Model:
    model = Model()
    model.layers[1].register_forward_hook(lambda module, args, out: out * 2)
    model.layers[2].up.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


def one_is_frozen() -> Model:
    model = Model()
    model.layers[1].requires_grad_(False)
    return model


def one_buffer_for_all() -> Model:
    model = Model("changes a buffer")
    for layer in model.layers:
        layer.seen = model.layers[0].seen
    return model


def a_buffer_returned_in_part() -> Model:
    model = Model("changes a buffer and returns a row")
    for layer in model.layers:
        layer.seen = torch.rand(2, 8)
    return model


def buffers_of_one_tensor() -> Model:
    model = Model("changes a buffer and reads another")
    for layer in model.layers:
        whole = torch.rand(16)
        layer.seen, layer.other = whole[:8], whole[4:12]
    return model


class Stages(nn.Module):
    """Lists in a list; no stage equals another one."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block(hidden=16 + at) for _ in range(2)) for at in range(LAYERS // 2))
        self.factors = nn.Parameter(torch.arange(1.0, 1 + LAYERS // 2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for stage, factor in zip(self.stages, self.factors, strict=True):
            for layer in stage:
                x = layer(x, mask)
            x = x * factor
        return x.pow(2).mean()


# By name: how to build the model, and how many of its four layers have an equal layer, so that they are traced once.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{
        kind: (partial(Model, kind), LAYERS)
        for kind in (
            "", "dropout", "reads a buffer", "no gradients", "autocast", "custom op", "expanded gradient", "assigns",
            "transposed", "returns an argument", "changes a buffer", "vmap",
        )
    },
    "one buffer for all": (one_buffer_for_all, LAYERS),
    "buffers of one tensor": (buffers_of_one_tensor, 0),
    "a buffer returned in part": (a_buffer_returned_in_part, 0),
    "stages": (Stages, LAYERS),
    "checkpoint": (partial(Model, "checkpoint"), LAYERS),
    "two results": (partial(Model, "two results"), 0),  # one of them has no gradient
    "a flag differs": (a_flag_differs, 3),
    "a shape differs": (a_shape_differs, 3),
    "tied": (tied, LAYERS),
    "hooks": (hooked, 2),
    "one is frozen": (one_is_frozen, 3),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()
    backwards_traced.clear()


class Traced:
    """A backend that runs the traced forward and backward unchanged and records their graphs."""

    def __init__(self, once: bool) -> None:
        self.graphs: dict[str, fx.GraphModule] = {}
        self._config = Config(trace_once=once)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return step_of(self._keep, gm, inputs, self._config, 0)

    def _keep(self, gm: fx.GraphModule, inputs: Any, *, config: Config, name: str) -> Callable[..., Any]:
        self.graphs[name] = gm
        return make_boxed_func(gm.forward)

    def collectives(self, name: str) -> list[str]:
        """Return the names of the nodes that communicate, in order."""
        nodes = self.graphs[name].graph.nodes
        return [node.name for node in nodes if "_c10d_functional" in str(node.target)]

    def lines(self, name: str) -> Counter[str]:
        """Return op, module and label (parameter) of every node, with the number of equal nodes."""
        nodes = [node for node in self.graphs[name].graph.nodes if node.op == "call_function"]
        labels = [label_of(node) for node in nodes]
        # Names of process groups and numbers of parameters differ between two models.
        nameless = [label and replace(label, post_group="", number=0) for label in labels]
        return Counter(
            f"{node.target} {module_path(node)} {label}" for node, label in zip(nodes, nameless, strict=True)
        )


def trained(make: Callable[[], nn.Module], once: bool) -> tuple[Traced, list[Tensor]]:
    """Run a step; return its traced graphs, and its loss, gradients and buffers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, traced = make(), Traced(once)
    x, mask = torch.randn(5, 8, requires_grad=True), torch.rand(5, 1)
    torch.manual_seed(1)
    loss = torch.compile(model, backend=traced, fullgraph=True)(x, mask)
    loss.backward()
    found = [loss.detach(), x.grad, *(each.grad for each in model.parameters()), *model.buffers()]
    return traced, [each for each in found if each is not None]


@pytest.mark.parametrize("name", MODELS)
def test_tracing_once_gives_the_same_losses_gradients_buffers_and_graphs(name: str) -> None:
    make, folded = MODELS[name]
    each, expected = trained(make, once=False)
    assert not counted("blocks_traced_once")
    once, found = trained(make, once=True)
    assert counted("blocks_traced_once") == folded
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    if name != "expanded gradient":  # tracing once copies that gradient for the last layer
        for graph in ("forward_0", "backward_0"):
            assert once.lines(graph) == each.lines(graph)


def test_only_one_of_four_equal_layers_is_traced() -> None:
    trained(partial(Model, "custom op"), once=False)
    assert backwards_traced["halve"] == LAYERS
    backwards_traced.clear()
    trained(partial(Model, "custom op"), once=True)
    assert backwards_traced["halve"] == 1


def test_values_of_different_blocks_do_not_share_memory() -> None:
    once, _ = trained(Model, once=True)
    each, _ = trained(Model, once=False)

    def memory(traced: Traced) -> list[int]:
        """Return the number of forward's values in each storage, sorted."""
        values = [node.meta["val"] for node in traced.graphs["forward_0"].graph.nodes if node.op == "call_function"]
        found = Counter(value.untyped_storage()._cdata for value in values if isinstance(value, Tensor))
        return sorted(found.values())

    assert memory(once) == memory(each)


@pytest.mark.parametrize(
    ("reshard", "ac"), [(True, ""), (False, "around"), (2, ""), (True, "around"), (True, "inside")]
)
def test_sharded_blocks_have_their_own_parameters_and_collectives(reshard: bool | int, ac: str) -> None:
    prepare_dynamo(trace_once=True)
    with fake_world(4, rank=1):
        graphs = []
        for once in (False, True):
            torch._dynamo.reset()
            model = shard(Tiny(layers=3, ac=ac), reshard_after_forward=reshard, param_dtype=torch.bfloat16)
            traced = Traced(once)
            torch.compile(model, backend=traced, fullgraph=True)(*batch(2)).backward()
            assert counted("blocks_traced_once") == (3 if once else 0)
            graphs.append(traced)
        for name in ("forward_0", "backward_0"):
            assert graphs[1].lines(name) == graphs[0].lines(name)
            assert graphs[1].collectives(name) == graphs[0].collectives(name)


@pytest.mark.parametrize("ac", ["", "around", "inside"])
def test_blocks_with_tensor_parallelism_are_traced_once(ac: str) -> None:
    with fake_world(4, rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        prepare_dynamo(trace_once=True)
        # Before torch 2.12, each DTensor call that Dynamo traces is a function of its own.
        folds = check_torch_version() >= (2, 12) or ac != "around"
        graphs = []
        for once in (False, True):
            torch._dynamo.reset()
            model = Tiny(layers=3, ac=ac)
            tensor_parallel(model, mesh["tp"])
            traced = Traced(once)
            torch.compile(shard(model, mesh["dp"]), backend=traced, fullgraph=True)(*batch(2, length=4)).backward()
            assert counted("blocks_traced_once") == (3 if once and folds else 0)
            graphs.append(traced)
        for name in ("forward_0", "backward_0"):
            assert graphs[1].lines(name) == graphs[0].lines(name)
            assert graphs[1].collectives(name) == graphs[0].collectives(name)


def test_gpu_attention_that_also_returns_numbers_can_be_copied_from_a_traced_block() -> None:
    aten = torch.ops.aten
    with FakeTensorMode():
        tensors = [torch.empty(1, 2, 16, 8, dtype=torch.bfloat16) for _ in range(6)]
        small = torch.empty(2, dtype=torch.uint64)
    graph = fx.Graph()
    *operands, tangent = [graph.placeholder(name) for name in ("q", "k", "v", "tangents_1")]
    attention = graph.call_function(aten._scaled_dot_product_flash_attention.default, tuple(operands))
    attention.meta["val"] = (tensors[4], tensors[4].float(), None, None, 16, 16, small, small, small)
    mixed, length = (graph.call_function(getitem, (attention, at)) for at in (0, 4))
    grad = graph.call_function(aten.div.Tensor, (tangent, length))
    for node, value in zip((*operands, tangent, mixed, length, grad), (*tensors[:5], 16, tensors[5]), strict=True):
        node.meta["val"] = value
    graph.output([mixed, grad, None, None])
    traced = TracedBlock.of(graph, 1, [True], "block")
    stamped = fx.Graph()
    given = [append_copy(stamped, node, {}) for node in (*operands, tangent)]
    stamp = Stamp(traced, Names({}, {}, {}), 0)
    (result,), (gradient,) = stamp.forward(stamped, given[:3]), stamp.backward(stamped, given[3:])
    assert result.args[0].meta["val"][4:6] == (16, 16)
    assert gradient.args[1].meta["val"] == 16
