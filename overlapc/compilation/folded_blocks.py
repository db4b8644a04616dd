"""Traces equal blocks of a model only once, and copies the joint graph of one block for all equal blocks.

    Dynamo's graph:    x = layers.0(x, w0); x = layers.1(x, w1); …
    traced instead:    x = run_block(0, 0, x, w0); x = run_block(0, 1, x, w1); …      and layers.0 by itself
    joint graph:       forward of layers.0, of layers.1, …, backward of layers.1, of layers.0, each with its own names

`Folded` replaces equal stretches of the graph by calls (fx/equal_layers/blocks.py). AOTAutograd traces each call as one
op in forward and one in backward. Before the joint graph is partitioned, `Folded.unfold` replaces these ops by the
block's own nodes (fx/equal_layers/stamps.py), so that every later stage sees the same graph as if each block had been
traced.

Where this is not possible, blocks are traced one by one: see the reasons of `Unfit`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from overlapc.fx.comm.labels import KEY
from overlapc.fx.equal_layers.blocks import (
    Call,
    Stretch,
    Unfit,
    as_module,
    equal_blocks,
    read_originals,
    replace_by_calls,
)
from overlapc.fx.equal_layers.stamps import Names, Stamp, TracedBlock, append_copy, number_checkpoints
from overlapc.fx.subgraphs import carried
from overlapc.fx.versions.changes import contiguous_tangents
from overlapc.fx.versions.graphs import copied_capture
from overlapc.parallel.gather import param_of, unshard, unshard_local
from overlapc.runtime.counters import count

Trace = Callable[..., Any]  # aot_module_simplified, with all options but compilers and partitioner

_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define("block_forward(Tensor[] operands, int block, int call) -> Tensor[]")
_library.define("block_backward(Tensor[] tangents, int block, int call) -> Tensor[]")
_forward, _backward = torch.ops.overlapc.block_forward.default, torch.ops.overlapc.block_backward.default
# Keeps the op even if it has no users: the nodes of backward that read its values are only written by `unfold`.
fx.node.has_side_effect(_forward)
aten = torch.ops.aten

_blocks: dict[int, TracedBlock] = {}  # number -> block, for the steps that are being traced
_without_gradient: set[int] = set()  # blocks with a call that gets fewer gradients than the block was traced with
_numbers = itertools.count()


class Folded:
    """A graph that Dynamo captured, with equal blocks replaced by calls while AOTAutograd traces it."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], trace: Trace) -> None:
        """Fold a copy of `gm`. Unfit if no blocks are equal, or if the graph cannot be folded."""
        if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise Unfit("gradients are disabled, or saved tensors have hooks")
        self.module = copied_capture(gm)
        graph = self.module.graph
        modules = _take_shards_outside(self.module)
        read_originals(graph)
        mode = detect_fake_mode(inputs)
        if mode is None:
            raise Unfit("it is not traced with fake tensors")
        self._names: dict[tuple[int, int], Names] = {}
        self._numbers: list[int] = []
        calls: list[Call] = []
        for blocks in equal_blocks(graph, _described):
            try:
                traced = _traced(blocks[0], mode, trace)
                if any(_share_memory(block, traced.changed) for block in blocks):
                    raise Unfit("it changes an input that shares memory with another, or with a result")
            except Unfit as reason:
                count(f"{blocks[0].block} and {len(blocks) - 1} like it traced one by one: {reason}")
                continue
            number = next(_numbers)
            self._numbers.append(number)
            _blocks[number] = traced
            for call, block in enumerate(blocks):
                self._names[number, call] = Names.of(blocks[0], block, _label)
            calls += [Call(block, run_block, (number, call), traced.changed) for call, block in enumerate(blocks)]
        if not calls:
            raise Unfit("no blocks are equal")
        replace_by_calls(graph, calls)
        for shard, stack in modules.items():
            shard.meta["nn_module_stack"] = stack
        graph.lint()
        self.module.recompile()

    def unfold(self, graph_module: GraphModule) -> None:
        """Replace the calls of each block by the block's nodes. Unfit if the block's graph does not fit a call."""
        if not _without_gradient.isdisjoint(self._numbers):
            raise Unfit("a result of a block has no gradient")
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        stamps: dict[tuple[int, int], Stamp] = {}  # by block and call
        for node in graph_module.graph.nodes:
            if node.target not in (_forward, _backward):
                if node.target is aten.copy.default and _is_new_value(node.args[1], node):
                    copies[node] = copies[node.args[1]]
                elif node not in copies:
                    append_copy(graph, node, copies)
                continue
            given, number, call = node.args
            operands = [copies[operand] for operand in given]
            if node.target is _forward:
                stamps[number, call] = Stamp(_blocks[number], self._names[number, call], (number, call))
                values = stamps[number, call].forward(graph, operands)
            else:
                values = stamps[number, call].backward(graph, operands)
            for item in node.users:
                copies[item] = values[item.args[1]]
        number_checkpoints(graph)
        for number in self._numbers:
            for name, constant in _blocks[number].constants.items():
                setattr(graph_module, name, constant)
        graph_module.graph = graph
        graph.lint()
        count("blocks_traced_once", len(stamps))

    def close(self) -> None:
        """Drop the traced blocks."""
        for number in self._numbers:
            del _blocks[number]
        _without_gradient.difference_update(self._numbers)


def run_block(number: int, call: int, *operands: Tensor) -> tuple[Tensor, ...]:
    """Run block `number` in the folded graph: AOTAutograd traces this call as one op in forward and one in backward."""
    results: tuple[Tensor, ...] = _Run.apply(number, call, *operands)
    return results


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, call: int, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.number, ctx.call = number, call
        ctx.set_materialize_grads(False)  # zeros in place of a missing gradient may become NaN in backward
        results = _forward(list(operands), number, call)
        flags = _blocks[number].differentiable
        ctx.mark_non_differentiable(*(result for result, has in zip(results, flags, strict=True) if not has))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        block = _blocks[ctx.number]
        given = []
        for tangent, result, has in zip(tangents, block.results, block.differentiable, strict=True):
            if has and tangent is None:  # go on with zeros: an error raised here would reach users; `unfold` raises
                _without_gradient.add(ctx.number)
                like = result.meta["val"]
                tangent = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            given += [tangent] if has else []
        found = iter(_backward(given, ctx.number, ctx.call))
        return None, None, *(None if each is None else next(found) for each in block.backwards[0].gradients)


def _like(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@torch.library.register_fake(_forward._name, lib=_library)
def _results(operands: list[Tensor], block: int, call: int) -> list[Tensor]:
    return list(map(_like, _blocks[block].results))


@torch.library.register_fake(_backward._name, lib=_library)
def _gradients(tangents: list[Tensor], block: int, call: int) -> list[Tensor]:
    return [_like(each) for each in _blocks[block].backward_for(tangents).gradients if each is not None]


# --- one block, traced


class _Captured(Exception):
    """Carries a joint graph out of AOTAutograd, whose later stages are not needed."""

    def __init__(self, joint: GraphModule, forward_results: int) -> None:
        self.joint, self.forward_results = joint, forward_results


def _traced(block: Stretch, mode: Any, trace: Trace) -> TracedBlock:
    """Trace a block. Unfit if its graphs do more than map its operands to results and gradients.

    A result that is not contiguous gets a gradient with its own strides, or a contiguous one: both are traced.
    """
    name = block.block.replace(".", "_")
    traced = _traced_alone(block, mode, trace, name)
    if traced.takes_contiguous_tangents:
        return traced
    with contiguous_tangents(lambda size, stride: True):
        return traced.with_backward_of(_traced_alone(block, mode, trace, f"{name}_contiguous"))


def _traced_alone(block: Stretch, mode: Any, trace: Trace, name: str) -> TracedBlock:
    """Trace a block by itself once. name: of its constants, see `TracedBlock.of`."""

    def capture(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        raise _Captured(joint, num_fwd_outputs)

    def never(*args: Any, **kwargs: Any) -> Any:
        raise Unfit("AOTAutograd finds no value that needs a gradient")

    with mode:
        operands = [_operand(node) for node in block.operands]
    differentiable = [bool(node.meta["example_value"].requires_grad) for node in block.results]
    module = as_module(block)
    try:
        with tracing(TracingContext(mode)):
            trace(
                module, operands, fw_compiler=never, bw_compiler=never, inference_compiler=never, partition_fn=capture
            )
    except _Captured as captured:
        return TracedBlock.of(captured.joint.graph, captured.forward_results, differentiable, name)
    raise Unfit("AOTAutograd makes no joint graph")


def _is_new_value(node: Any, copied: fx.Node) -> bool:
    """Whether a block changes an operand to `node`, of which AOTAutograd made a copy of the same layout before."""
    if node.target is not operator.getitem or node.args[0].target is not _forward:
        return False
    call, at = node.args
    block = _blocks[call.args[1]]
    first = len(block.results) - len(block.changed)
    return at >= first and node.meta["val"].stride() == copied.meta["val"].stride()


def _share_memory(block: Stretch, changed: Sequence[int]) -> bool:
    """Whether one of these operands shares memory with another one, or with a result."""
    nodes = (*block.operands, *block.results)
    memory = [node.meta["example_value"].untyped_storage()._cdata for node in nodes]
    return any(memory.count(memory[at]) > 1 for at in changed)


def _operand(node: fx.Node) -> Tensor:
    value = node.meta["example_value"]
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


# --- parameters that fully_shard manages


def _take_shards_outside(gm: GraphModule) -> dict[fx.Node, Any]:
    """Convert DTensor inputs to local shards before all blocks, also for checkpoints: blocks then gather plain shards.

        unshard(%weight, key) -> unshard_local(to_local(%weight), key)

    Return the module stacks of the new nodes. They are set only after blocks are found, because these nodes belong to
    no block.
    """
    modules: dict[fx.Node, Any] = {}
    last = gm.graph.find_nodes(op="placeholder")[-1:]

    def shard_of(param: fx.Node, reader: fx.Node) -> fx.Node:
        value = param.meta["example_value"]
        with gm.graph.inserting_after(last[0]):
            shard = gm.graph.call_method("to_local", (param,))
        shard.meta["stack_trace"] = reader.meta.get("stack_trace")
        shard.meta["example_value"] = value._local_tensor.detach().requires_grad_(value.requires_grad)
        modules[shard] = reader.meta.get("nn_module_stack")
        return shard

    for node in list(gm.graph.nodes):
        if node.target is unshard and _is_sharded_input(node.args[0]) and _takes_a_shard(node):
            _take_shard(node, shard_of(node.args[0], node))
        elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = carried(node.args[0])
            assert body is not None
            body = copied_capture(body)
            setattr(gm, str(node.args[0].target), body)  # replaces the body in this copy of the graph only
            for at, inner in enumerate(body.graph.find_nodes(op="placeholder"), 1):
                readers = list(inner.users)
                whole = all(reader.target is unshard and _takes_a_shard(reader) for reader in readers)
                if readers and whole and _is_sharded_input(node.args[at]):
                    shard = shard_of(node.args[at], readers[0])
                    node.update_arg(at, shard)
                    inner.meta["example_value"] = shard.meta["example_value"]
                    for reader in readers:
                        _take_shard(reader, inner)
            body.recompile()
    return modules


def _is_sharded_input(value: Any) -> bool:
    return (
        isinstance(value, fx.Node)
        and value.op == "placeholder"
        and isinstance(value.meta.get("example_value"), DTensor)
    )


def _takes_a_shard(node: fx.Node) -> bool:
    """Whether an `unshard` needs only the local shard of its parameter."""
    return (node.args[2] if len(node.args) > 2 else node.kwargs.get("unsynced")) is None


def _take_shard(node: fx.Node, shard: fx.Node) -> None:
    node.target, node.args, node.kwargs = unshard_local, (shard, node.args[1]), {}


def _described(node: fx.Node) -> Any:
    return param_of(str(node.args[1])).signature if node.target is unshard_local else None


def _label(node: fx.Node) -> Any:
    if node.target is not unshard_local:
        return None
    return param_of(str(node.args[1])).label.as_annotation()[KEY]
