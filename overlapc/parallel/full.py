"""One gathered parameter outside of compiled graphs, and the autograd nodes that take its gradient to the shard.

    shards --_Shards--> local shards --_Connected--> gathered parameters, which programs read

Each outermost forward makes nodes of its own. They refer to no forward and no module: Python's garbage collector cannot
find a reference cycle that passes through a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from overlapc.parallel.gather import ShardedParam, accumulate, as_sharded, reduce_used, with_due
from overlapc.parallel.gather_stream import GatherStream


class Full:
    """One gathered parameter: one tensor for as long as the module lives, whose memory is freed and filled again."""

    def __init__(self, param: DTensor, sharded: ShardedParam) -> None:
        """Describe it; `fill` gives it memory."""
        self.param = param
        self.sharded = sharded
        self.local: Tensor | None = None  # this rank's part of it, if it is a shard of tensor parallelism
        self.is_current = False  # whether it has the values of its last gather
        self.freed_after: object = None
        self._form = _form(param)
        self._version: object = None
        self._bytes = 0

    @property
    def shard(self) -> Tensor:
        """This rank's part of the sharded parameter."""
        return self.param._local_tensor.detach()  # `to_local` is not possible within transforms of torch.func

    def is_for(self, param: DTensor) -> bool:
        """Whether it is the gathered form of `param`, perhaps with other values."""
        return param is self.param and self._form == _form(param)

    def has_changed(self) -> bool:
        """Whether the shard has changed since it was gathered, as far as torch knows."""
        return self._version != _version(self.param)

    def memory(self) -> Tensor | None:
        """Return the memory that `fill` will take the values into, with room for them; None if there is none yet."""
        if self.local is not None:
            self.local.untyped_storage().resize_(self._bytes)
        return self.local

    def fill(self, gathered: Tensor) -> None:
        """Take the gathered values, into the memory if there is some."""
        changed, self._version, self.is_current = self.has_changed(), _version(self.param), True
        if self.local is None:
            # A single rank gathers nothing.
            shared = gathered.untyped_storage().data_ptr() == self.shard.untyped_storage().data_ptr()
            self.local = gathered.clone() if shared else gathered
            self._bytes = self.local.untyped_storage().nbytes()
            return
        if gathered is not self.local:
            with torch.autograd._unsafe_preserve_version_counter(self.local):
                self.local.copy_(gathered)
        if changed:  # a backward that needs the old values raises torch's error
            torch.autograd.graph.increment_version(self.local)

    def empty(self) -> None:
        """Free the memory."""
        self.is_current = False
        if self.local is not None:
            self.local.untyped_storage().resize_(0)


def _form(param: DTensor) -> tuple[Any, ...]:
    """Return what a gathered tensor must be made anew for."""
    shard = param._local_tensor
    return shard.dtype, shard.device, shard.shape


def _version(param: DTensor) -> tuple[int, ...]:
    """Return what differs after most changes of a parameter; optimizers that take DTensors count theirs there only.

    A replaced shard counts as a change also where it is empty and has no address: all ranks must gather then.
    """
    shard = param._local_tensor
    counted = (each._version for each in (shard, param) if not each.is_inference())
    return shard.untyped_storage()._cdata, *counted


def connected(stream: GatherStream, fulls: Sequence[Full], leaves: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the gathered parameters of one group as results of an autograd node that reduces their gradients.

    leaves: those where gradients accumulate unreduced, or None for parameters whose gradients are reduced.
    """
    # The DTensors themselves: before torch 2.13 the gradient of `to_local` is zeros where there should be none.
    params = [full.param if leaf is None else None for full, leaf in zip(fulls, leaves, strict=True)]
    with stream.for_reductions():
        shards = _Shards.apply(fulls, *params)
    results: tuple[Tensor, ...] = _Connected.apply(stream, fulls, *shards, *leaves)
    return results


def reduce_without_gradients(stream: GatherStream, fulls: Sequence[Full]) -> None:
    """Do what the node of `connected` does on ranks where it runs, on a rank where no gradient leads to it."""

    def reduction() -> None:
        given = [with_due(None, full.sharded.key, id(full.param)) for full in fulls]
        parts = reduce_used(given, [full.sharded for full in fulls], [full.shard for full in fulls])
        found = [(full.param, part) for full, part in zip(fulls, parts, strict=True) if part is not None]
        if found:
            accumulate([param for param, _ in found], [as_sharded(part, param) for param, part in found])

    stream.reduce(reduction, None)


class _Shards(torch.autograd.Function):
    """Takes the reduced gradients to the parameters.

    A node's backward runs on the stream of its forward, here that of reductions. So autograd lets whatever it runs
    next with a gradient, on this stream or another one, wait for the reduction; compute does not wait for it here.
    """

    @staticmethod
    def forward(ctx: Any, fulls: Sequence[Full], *params: DTensor | None) -> Any:
        ctx.fulls = fulls
        ctx.set_materialize_grads(False)
        results = [full.shard for full in fulls]
        frozen = [at for at, param in enumerate(params) if param is None or not param.requires_grad]
        ctx.mark_non_differentiable(*(results[at] for at in frozen))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *parts: Tensor | None) -> Any:
        pairs = zip(ctx.fulls, parts, strict=True)
        return None, *(None if part is None else as_sharded(part, full.param) for full, part in pairs)


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: GatherStream, fulls: Sequence[Full], *tensors: Tensor | None) -> Any:
        count = len(fulls)
        ctx.stream, ctx.fulls = stream, fulls
        ctx.leaf_dtypes = [None if leaf is None else leaf.dtype for leaf in tensors[count:]]
        ctx.set_materialize_grads(False)
        results = tuple(full.local.detach() for full in fulls if full.local is not None)
        wanted = [tensor is not None and tensor.requires_grad for tensor in tensors]
        frozen = [at for at in range(count) if not wanted[at] and not wanted[count + at]]
        ctx.mark_non_differentiable(*(results[at] for at in frozen))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        fulls, needed = ctx.fulls, ctx.needs_input_grad[2:]
        of_shards: list[Tensor | None] = [None] * len(fulls)
        of_leaves: list[Tensor | None] = [None] * len(fulls)
        reduced = [at for at in range(len(fulls)) if needed[at]]
        for at, dtype in enumerate(ctx.leaf_dtypes):
            grad = grads[at]
            if dtype is not None and grad is not None:
                of_leaves[at] = grad.to(dtype)
        if reduced:
            given = [with_due(grads[at], fulls[at].sharded.key, id(fulls[at].param)) for at in reduced]
            described = [fulls[at].sharded for at in reduced], [fulls[at].shard for at in reduced]
            parts = ctx.stream.reduce(lambda: reduce_used(given, *described), given)
            for at, part in zip(reduced, parts, strict=True):
                of_shards[at] = part
        return None, None, *of_shards, *of_leaves
