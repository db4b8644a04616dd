"""Dynamo traces equal sharded blocks only once, and the captured graph equals that of tracing every block."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, GetItemSource, LocalSource
from torch._dynamo.variables.builder import VariableBuilder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from overlapc.fx.source import module_path
from overlapc.fx.versions.dynamo import compile_reads_of_sources_once
from overlapc.parallel import fully_shard
from overlapc.parallel.access import call_block, prepare_dynamo
from overlapc.parallel.gather import described_params
from overlapc.runtime.counters import counted
from tests.parallel.sharded import mesh_1d

pytestmark = pytest.mark.usefixtures("world", "fresh_dynamo")
DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, DIM)
        self.drop = nn.Dropout(0.5)
        self.scale = 1.5
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return x + self.drop(self.up(self.norm(x))) * self.scale


class Model(nn.Module):
    def __init__(self, block: type[Block] = Block, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * 2).sum()  # the blocks' input requires a gradient and is not a graph input

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(model: nn.Module) -> Any:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh_1d())
    return fully_shard(model, mesh=mesh_1d())


def lines(graph: fx.Graph) -> list[Any]:
    """Return a comparable description of all nodes, with the keys of parameters replaced by the parameters."""

    def plain(value: Any) -> Any:
        if isinstance(value, str) and value in described_params:
            return described_params[value]
        return str(value) if isinstance(value, fx.Node | torch.Tensor) else value

    def of(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)  # with tensor parallelism, meshes are also inputs
        return (tuple(value.shape), value.dtype, value.requires_grad) if is_tensor else None

    def called(node: fx.Node) -> str:  # before torch 2.12, Dynamo makes a function for each call of a DTensor's method
        return str(getattr(node.target, "__qualname__", node.target))

    def where(node: fx.Node) -> Any:  # not of inputs, whose trace is that of their first reader
        return None if node.op == "placeholder" else (module_path(node), node.meta.get("stack_trace"))

    return [
        (
            *(node.op, node.name, called(node), fx.node.map_aggregate(node.args, plain)),
            *(fx.node.map_aggregate(node.kwargs, plain), of(node.meta.get("example_value")), where(node)),
        )
        for node in graph.nodes
    ]


def capture(model: Any, once: bool, run: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """Return the graphs that Dynamo captures while `run` calls the compiled model, and the result of `run`.

    once: whether equal blocks are traced only once.
    """
    graphs = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        bodies = [each for each in gm.modules() if isinstance(each, fx.GraphModule)]
        graphs.append([lines(each.graph) for each in bodies])
        return gm.forward

    torch._dynamo.reset()
    dispatch: Any = VariableBuilder._id_dispatch()
    dispatch.pop(id(call_block), None)
    if once:
        prepare_dynamo(trace_once=True)
    try:
        result = run(torch.compile(model, backend=keep))
    finally:
        dispatch.pop(id(call_block), None)
    return graphs, result


def once(model: Any, traced: int, calls: int = 1, run: Callable[[Any], Any] | None = None) -> None:
    """Assert that tracing equal blocks once gives the same graphs, results and block state as tracing every block.

    traced: the expected number of blocks whose trace is that of another block.
    """
    x = torch.randn(2, DIM, requires_grad=True)

    def default(compiled: Any) -> Any:
        return [compiled(x).shape for _ in range(calls)]

    def state() -> Any:
        return [(layer.calls, list(layer.seen)) for layer in model.layers]

    run = run or default
    begun = state()
    expected = (*capture(model, False, run), state())
    for layer, (made, seen) in zip(model.layers, begun, strict=True):
        layer.calls, layer.seen[:] = made, seen
    before = counted("blocks_replayed")
    found = (*capture(model, True, run), state())
    assert counted("blocks_replayed") - before == traced
    assert found == expected


def test_equal_blocks_are_traced_once_and_give_the_graph_of_tracing_each():
    once(sharded(Model()), 3)


def test_guards_of_blocks_that_are_not_traced_name_the_line_that_calls_them(monkeypatch: pytest.MonkeyPatch):
    stacks: dict[str, Any] = {}
    install = GuardBuilder.TYPE_MATCH

    @wraps(install)
    def noted(self: GuardBuilder, guard: Any, *args: Any) -> Any:
        stacks[str(guard.name)] = guard.user_stack
        return install(self, guard, *args)

    monkeypatch.setattr(GuardBuilder, "TYPE_MATCH", noted)
    once(sharded(Model()), 3)
    (norm,) = (stack for name, stack in stacks.items() if "'2'" in name and name.endswith("['norm']"))
    assert any(frame.name == "run" and frame.line == "x = layer(x)" for frame in norm)


def test_sources_are_read_as_their_expressions_say_however_often_these_are_read():
    compile_reads_of_sources_once()
    x, y = SimpleNamespace(weights=[1, 2]), SimpleNamespace(weights=[3, 4])
    frame = {"L": {"x": x, "y": y, "tmp": 5}, "G": {}}
    sources = [GetItemSource(AttrSource(LocalSource(name), "weights"), at) for name in "xy" for at in (0, 1)]
    assert [source.get_value(frame, {"tmp": 6}, {}) for source in sources * 2] == [1, 2, 3, 4] * 2


def test_equal_blocks_with_tensor_parallelism_are_traced_once():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(output_layouts=Replicate())})
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    once(model, traced=3)


def change_scale(layer: Any) -> None:
    layer.scale = 2.5


def evaluate(layer: Any) -> None:
    layer.eval()


def freeze(layer: Any) -> None:
    layer.up.weight.requires_grad_(False)


def hook(layer: Any) -> None:
    layer.register_forward_hook(lambda module, args, result: result * 2)


def hook_within(layer: Any) -> None:
    layer.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def replace_forward(layer: Any) -> None:
    layer.up.forward = lambda x: x * 3


def reduce_otherwise(layer: Any) -> None:
    layer.set_gradient_divide_factor(3.0)


def replace_dropout(layer: Any) -> None:
    layer.drop = nn.Identity()


def drop_less(layer: Any) -> None:
    layer.drop.p = 0.25


def remove_bias(layer: Any) -> None:
    layer.up = nn.Linear(DIM, DIM, bias=False)


CHANGES = [change_scale, evaluate, freeze, replace_forward, reduce_otherwise, replace_dropout, drop_less]


@pytest.mark.parametrize("change", [*CHANGES, remove_bias, hook, hook_within])
def test_a_block_that_differs_is_traced_itself(change):
    model = Model()
    if change is not reduce_otherwise and change is not freeze:
        change(model.layers[2])
    model = sharded(model)
    if change is reduce_otherwise or change is freeze:
        change(model.layers[2])
    once(model, 2)


def scale_input(layer: Any, factor: float, **how: bool) -> None:
    def multiplied(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        changed = (args[0] * factor,)
        return changed if kwargs is None else (changed, kwargs)

    layer.norm.register_forward_pre_hook(multiplied, **how)


@pytest.mark.parametrize(
    ("hooks", "traced"),
    [
        ([(2.0, {})] * 4, 3),
        ([(2.0, {}), (2.0, {}), (3.0, {}), (2.0, {})], 2),
        ([(2.0, {}), (2.0, {}), (2.0, {"with_kwargs": True}), (2.0, {})], 2),
    ],
)
def test_hooks_that_do_the_same_are_traced_once(hooks, traced):
    model = Model()
    for layer, (factor, how) in zip(model.layers, hooks, strict=True):
        scale_input(layer, factor, **how)
    once(sharded(model), traced)


def doubling() -> Any:
    def doubled(module: nn.Module, args: Any, again: bool = True) -> Any:
        return doubled(module, args, False) if again else (args[0] * 2,)

    return doubled


def test_hooks_that_call_themselves_are_traced_once():
    model = Model()
    for layer in model.layers:
        layer.norm.register_forward_pre_hook(doubling())
    once(sharded(model), 3)


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_change_of_a_block_that_was_not_traced_is_noticed(change):
    model = sharded(Model())
    x = torch.randn(2, DIM, requires_grad=True)

    def run(compiled: Any) -> None:
        compiled(x)
        change(model.layers[2])
        compiled(x)

    graphs, _ = capture(model, True, run)
    assert len(graphs) == 2
    assert graphs[1] == capture(model, False, lambda compiled: compiled(x))[0][0] != graphs[0]


class Shared(Block):
    def forward(self, x: Tensor, other: Any, *others: Any, **named: Any) -> Any:
        return self.up(x) * other.mean() + named.get("shift", 0.0)


class Pairs(Model):
    """Passes each block either one tensor twice or two tensors, and a constant."""

    def run(self, x: Tensor) -> Tensor:
        y = x
        for layer, other, shift in zip(self.layers, (None, x, None, None), (1.0, 1.0, 1.0, 2.0), strict=True):
            y = layer(y, y if other is None else other, shift=shift)
        return y


def test_repeated_inputs_and_different_constants_are_distinguished():
    once(sharded(Pairs(Shared)), 1)  # the third block as the first


class Modes(Model):
    """Calls two of the blocks under other modes than the first."""

    def run(self, x: Tensor) -> Tensor:
        y = x
        for at, layer in enumerate(self.layers):
            with torch.set_grad_enabled(at != 1), torch.autocast("cpu", torch.bfloat16, enabled=at == 2):
                y = layer(y)
            y = y.float() + x
        return y


def test_modes_around_a_block_are_distinguished():
    once(sharded(Modes()), 1)  # the fourth block, which runs in the modes of the first


class Contexts(Block):
    """Enters modes, as norms and rotary embeddings do; the nodes that enter them have no source line."""

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.up(x)
            with torch.autocast("cpu", enabled=False):
                y = self.norm(y.float())
        with torch.no_grad():
            scale = y.abs().amax()
        return x + y / scale


class CheckpointedContexts(Contexts):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("block", [Contexts, CheckpointedContexts])
def test_blocks_that_enter_modes_are_traced_once(block):
    once(sharded(Model(block)), 3)


class Counting(Block):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        self.calls += 1
        return super().forward(x) * (1 + self.calls)


class Listing(Block):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        self.seen.append(len(self.seen))
        return super().forward(x) * len(self.seen)


class Appending(Block):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        others[0].append(x)
        return super().forward(x)


class Lists(Model):
    def run(self, x: Tensor) -> Tensor:
        states: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, states)
        return sum((state.sum() for state in states), x.sum())


class Identity(Block):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return x if self.scale else self.up(x)


class View(Block):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return x.view(-1).view(2, DIM)


class Breaking(Block):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        x = self.norm(x)
        torch._dynamo.graph_break()
        return self.up(x)


class Checkpointed(Block):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Selective(Block):
    """A checkpoint whose policy depends on an attribute of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.saved = lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default] * self.calls)

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=self.saved)


class Around(Model):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("block", [Counting, Listing, Identity, View, Breaking, Selective])
def test_blocks_with_side_effects_are_each_traced(block):
    once(sharded(Model(block)), 0, calls=2)


def test_checkpoints_in_equal_blocks_are_traced_once():
    once(sharded(Model(Checkpointed)), 3)


@pytest.mark.parametrize("model", [lambda: Lists(Appending), Around])
def test_blocks_that_get_lists_or_are_called_in_checkpoints_are_each_traced(model):
    once(sharded(model()), 0)


class Several(Block):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        y = self.up(x)
        return y, (self.norm(y), y)


class Unpacking(Model):
    def run(self, x: Tensor) -> Tensor:
        total = x.sum()
        for layer in self.layers:
            x, (y, z) = layer(x)
            total = total + y.sum() + (x is z)
        return total


def test_blocks_that_return_several_tensors_are_traced_once():
    once(sharded(Unpacking(Several)), 3)


class Twice(Model):
    def run(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


class ChangedInPlace(Model):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 1
            torch.relu_(x.view(-1))
        return x


def test_results_of_equal_blocks_may_be_changed_in_place():
    once(sharded(ChangedInPlace()), traced=3)


def test_blocks_that_are_called_twice_are_traced_once():
    once(sharded(Twice()), 7)


def test_blocks_that_share_a_parameter_are_traced_once():
    model = Model()
    model.layers[3].norm = model.layers[2].norm
    once(sharded(model), 3)


class TwoNorms(Block):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return self.other(self.up(self.norm(x)))


def test_a_block_with_one_parameter_twice_replaces_no_other_block():
    model = Model(TwoNorms)
    model.layers[0].other.weight = model.layers[0].norm.weight
    once(sharded(model), 2)


TABLE = torch.ones(DIM)


class Tables(Block):
    """Reads a global tensor and a tensor of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(DIM)

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return self.up(x * TABLE) + self.table


def test_a_block_with_a_global_tensor_replaces_no_other_block():
    model = Model(Tables)
    model.layers[0].table = TABLE
    once(sharded(model), 2)


class Probing(Block):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return self.up(x) * (2.0 if hasattr(self, "extra") else 1.0)


def test_an_attribute_that_only_one_block_has_is_noticed():
    model = sharded(Model(Probing))
    model.layers[2].extra = True
    once(model, 2)


class Remembering(Model):
    """Stores a value while it runs, on which the blocks' computation depends."""

    def run(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            MEMORY.at = at
            x = layer(x)
        MEMORY.at = -1
        return x


class Memory:
    at = -1


MEMORY = Memory()


class Reading(Block):
    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return self.up(x) * (1.0 + MEMORY.at)


def test_values_stored_between_blocks_are_noticed():
    once(sharded(Remembering(Reading)), 0)


def test_equal_blocks_are_traced_once_when_gradients_of_earlier_micro_batches_are_reduced():
    model = sharded(Model())
    x = torch.randn(2, DIM, requires_grad=True)

    def accumulate(compiled: Any) -> Any:
        shapes = []
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            shapes.append(compiled(x).shape)
            compiled(x).sum().backward()
        return shapes

    once(model, 6, run=accumulate)


class Scaled(Block):
    held: Any = ()

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        first, second = self.held
        return x + self.up(x) * first / (second + 1)


@pytest.mark.parametrize("held", [(2.0, 3), (2, True), (0.0, 3), (-0.0, 3)])
def test_constants_that_are_equal_but_not_the_same_are_distinguished(held: Any):
    model = Model(Scaled)
    for layer, each in zip(model.layers, [(2, 3), held, (0, 3), held], strict=True):
        layer.held = each
    once(sharded(model), 1)


def test_constant_arguments_that_are_equal_but_not_the_same_are_distinguished():
    class Signed(Model):
        def run(self, x: Tensor) -> Tensor:
            for layer, zero in zip(self.layers, (0.0, -0.0, 0.0, -0.0), strict=True):
                x = layer(x, zero)
            return x

    class Copying(Block):
        def forward(self, x: Tensor, zero: float) -> Tensor:  # type: ignore[override]
            return self.up(x) / zero

    once(sharded(Signed(Copying)), 2)


def test_parameters_may_be_moved_after_tracing():
    """torch moves a DTensor by swapping it, which it refuses while anything refers to it weakly, as guards do."""
    model = sharded(Model())
    gc.disable()
    try:
        torch.compile(model, backend="aot_eager")(torch.ones(2, DIM))
        model.to(torch.bfloat16)
    finally:
        gc.enable()
    assert model.layers[0].up.weight.dtype is torch.bfloat16
