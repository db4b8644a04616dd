"""Gradients that accumulate over micro-batches before they are reduced: `set_requires_gradient_sync(False)`.

While synchronization is off, gradients flow to leaf tensors without memory and accumulate in their `.grad`, outside of
every graph. When it is turned on, the sums are *pending*: the backward of the next forward reduces them, be it of the
module on which the method was called or of a sharded module inside it. In a compiled graph they are reduced together
with the step's own gradient. In eager code a hook makes the backward of each parameter's gather add the pending
gradient, and reduces those of parameters whose gather has no backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlapc.errors import ConfigError
from overlapc.fx.comm.claim import claimable, claimed
from overlapc.parallel.gather import ShardedParam, accumulate_reduced, due, reduce_with, unsynced_leaf
from overlapc.parallel.nested import map_tensors

# Maps the key of a ShardedParam to the sharded parameter and its full gradient, which is not reduced yet.
Gradients = dict[str, tuple[DTensor, Tensor]]


class Pending:
    """The gradients of earlier micro-batches, which the first backward of a later forward reduces.

    Modules share them: the outermost one that is called reduces them. Any number of forwards may have them before that.
    In compiled graphs `wanted`, a single bool, is True until a backward reduces them; `end`, an empty leaf, gets a
    gradient once that is done.
    """

    def __init__(self, gradients: Gradients) -> None:
        self.running: Any = None  # whose forward runs and will reduce them; those inside leave it to it
        self.hold(gradients)

    def hold(self, gradients: Gradients) -> None:
        """Make `gradients` the pending ones."""
        self.gradients = gradients
        self.waiting = bool(gradients)  # for Dynamo, which guards on entries of a dictionary even if asked for no entry
        if gradients:
            _, some = next(iter(gradients.values()))
            self.wanted = torch.ones((), dtype=torch.bool, device=some.device)
            self.end = torch.empty(0, device=some.device, requires_grad=True)
            self.end.register_post_accumulate_grad_hook(self._reduced)
            with torch.enable_grad():
                self.end_node = torch.autograd.graph.get_gradient_edge(self.end).node
            claimable[self.wanted.data_ptr()] = self

    def take(self) -> Gradients:
        """Return the gradients unless they are reduced already; they are no longer pending."""
        taken = self.gradients
        self.hold({})
        return taken if taken and claimed(self.wanted) else {}

    def reduce_at_end(self) -> None:
        """Reduce them when the backward that runs has ended."""
        torch.autograd.Variable._execution_engine.queue_callback(lambda: reduce_all(self.take()))

    def _reduced(self, end: Tensor) -> None:
        end.grad = None
        self.hold({})


def managed(module: nn.Module) -> dict[str, ShardedParam]:
    """Return `module`'s own managed parameters by name."""
    return module.__dict__.get("_overlapc_params", {})


def keep_unsynced(modules: Iterable[nn.Module], pending: Gradients) -> None:
    """Make gradients of the modules' parameters accumulate in leaves, beginning with those that are `pending`."""
    leaves: dict[str, Tensor] = {}  # by parameter key, which tied parameters share
    owners: dict[str, Tensor] = {}
    for module in modules:
        for name, sharded in managed(module).items():
            param = module._parameters[name]
            unsynced = module.__dict__["_overlapc_unsynced"]
            if param is None or not param.requires_grad or name in unsynced:
                continue
            assert isinstance(param, DTensor)
            if owners.setdefault(sharded.key, param) is not param:
                raise ConfigError(
                    f"set_requires_gradient_sync(False): {type(module).__name__}.{name} is a copy of another parameter"
                    " of this model, made after sharding, and their gradients would be added up\n"
                    "hint: copy modules before fully_shard, or freeze the copy"
                )
            if sharded.key not in leaves:
                leaves[sharded.key] = unsynced_leaf(param, sharded.key)
                # A copy: a graph may have saved the gradient, and the leaf's is changed in place.
                leaves[sharded.key].grad = pending[sharded.key][1].clone() if sharded.key in pending else None
            unsynced[name] = leaves[sharded.key]


def take_unsynced(modules: Iterable[nn.Module], holder: Any) -> Gradients:
    """End what `keep_unsynced` began, and return the sums, which become pending on `holder`.

    A gradient that arrives later, from a forward before this call, is reduced on arrival together with pending ones.
    """
    held = weakref.ref(holder)
    taken: Gradients = {}
    for module in modules:
        unsynced = module.__dict__.get("_overlapc_unsynced", {})
        for name, leaf in unsynced.items():
            param, key = module._parameters[name], managed(module)[name].key
            assert isinstance(param, DTensor)
            if leaf.grad is not None:
                taken[key] = (param, leaf.grad)
            leaf.grad = None
            leaf.register_post_accumulate_grad_hook(functools.partial(_arrived_late, held, param, key))
        unsynced.clear()
    return taken


def discard_unsynced(modules: Iterable[nn.Module]) -> None:
    """Drop the sums; later gradients accumulate from zero."""
    for module in modules:
        for leaf in module.__dict__.get("_overlapc_unsynced", {}).values():
            leaf.grad = None


def reduce_behind(output: Any, pending: Pending) -> Any:
    """Return `output` of a module; a backward from any tensor in it also reduces the pending gradients.

    They are reduced at once if no tensor in `output` has a gradient.
    """
    ends: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            ends.append(tensor)
        return tensor

    map_tensors(noted, output)
    if not ends:
        _reduce_now(pending)
        return output
    if torch.compiler.is_dynamo_compiling():
        if any(not shard.requires_grad for shard, _ in pending.gradients.values()):
            _reduce_frozen(pending)
        keys, waiting = list(pending.gradients), list(pending.gradients.values())
        shards, gradients = [shard for shard, _ in waiting], [grad for _, grad in waiting]
        behind = iter(reduce_with(ends, shards, keys, gradients, pending.wanted, pending.end))
        return map_tensors(lambda tensor: next(behind) if tensor.requires_grad else tensor, output)
    for end in ends:
        # A hook, not an autograd function: callers may change the result in place, as `loss *= scale` does.
        end.register_hook(functools.partial(_begin, pending))
    return output


@torch._dynamo.disable(reason="gradients of earlier micro-batches are reduced, because this output has no gradient")
def _reduce_now(pending: Pending) -> None:
    reduce_all(pending.take())


@torch._dynamo.disable(reason="parameters were frozen after earlier micro-batches, whose gradients are reduced now")
def _reduce_frozen(pending: Pending) -> None:
    """Reduce pending gradients of parameters that are frozen now: backward returns no gradient for them."""
    frozen = {key: each for key, each in pending.gradients.items() if not each[0].requires_grad}
    pending.gradients = {key: each for key, each in pending.gradients.items() if key not in frozen}
    reduce_all(frozen)


def reduce_all(gradients: Gradients) -> None:
    """Reduce the gradients and add them to the parameters' `.grad`; every rank must call this."""
    for key, (param, grad) in gradients.items():
        accumulate_reduced(param, key, grad)


def _begin(pending: Pending, _grad: Tensor) -> None:
    """Hand `pending` to the gathers of the backward that begins, and reduce at its end what none of them took."""
    waiting = pending.take()
    if not waiting:  # the hook of another output or forward took them
        return
    due.update({(key, id(param)): grad for key, (param, grad) in waiting.items()})

    def finish() -> None:
        reduce_all({key: each for key, each in waiting.items() if due.pop((key, id(each[0])), None) is not None})

    torch.autograd.Variable._execution_engine.queue_callback(finish)


def _arrived_late(holder: weakref.ref[Any], param: DTensor, key: str, leaf: Tensor) -> None:
    grad, leaf.grad = leaf.grad, None
    assert grad is not None
    module = holder()
    waiting = {} if module is None else module._overlapc_pending.take()
    if key in waiting:
        grad = waiting.pop(key)[1] + grad
    accumulate_reduced(param, key, grad)
    if waiting:  # parameters that may get no gradient in this backward
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(reduce_all, waiting))
