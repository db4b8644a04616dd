"""Gather a sharded parameter and reduce its gradient, as differentiable functional collectives.

The collectives are plain `_c10d_functional` ops, so that in a compiled graph each is a node the scheduler can
move. For even shards on dim 0 the output of the all-gather is the parameter, and the full gradient is the input of the
reduce-scatter: apart from casts nothing is copied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ReduceScatterOptions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

from overlapc.errors import ConfigError
from overlapc.fx.comm.claim import CLAIM
from overlapc.fx.comm.labels import ParamLabel, annotate
from overlapc.fx.versions.changes import only_in_backward
from overlapc.fx.versions.sharding import resolve_group
from overlapc.runtime.collective_ops import backend_of, gloo_all_gather, gloo_all_gathers

_ops = torch.ops._c10d_functional
_REDUCTIONS = {"avg": dist.ReduceOp(dist.ReduceOp.AVG), "sum": dist.ReduceOp(dist.ReduceOp.SUM)}


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis as collectives see it."""

    name: str  # equal on all ranks
    group: str  # torch's name of this rank's process group
    size: int  # number of ranks


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The layout of a gathered tensor that is itself a DTensor, on the tensor-parallel mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size  # global
    stride: tuple[int, ...]  # global


class ShardGroup:
    """What the parameters of one `fully_shard` call have in common."""

    def __init__(self, reshard_after_forward: bool | int | None, axis: Axis, replicate: Axis | None) -> None:
        self.paths = [""]  # of its modules, relative to the outermost sharded module; outer calls update them
        self.modules: list[weakref.ref[nn.Module]] = []  # those given to the `fully_shard` call, in its order
        self.reshard_after_forward = reshard_after_forward
        self.axis = axis
        self.replicate = replicate
        self.post: tuple[Axis, int] | None = None  # reshard_after_forward=int: the smaller axis, our rank on it

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGroup:
        return self  # process groups cannot be copied; a copied module shards the same way

    @property
    def path(self) -> str:
        """The group's name: the path of its module, or the paths of its modules joined by commas."""
        return ",".join(self.paths)

    @property
    def reshard(self) -> bool:
        """Whether backward gathers again. As in FSDP2, None means yes, except for the outermost module."""
        if self.reshard_after_forward is None:
            return "" not in self.paths
        return bool(self.reshard_after_forward)


# Compiled code names a parameter by a short key instead of holding its ShardedParam. Dynamo guards on its form, one
# string per parameter, rather than on every field of the description.
_params: weakref.WeakValueDictionary[str, ShardedParam] = weakref.WeakValueDictionary()
_count = itertools.count()
_numbers = itertools.count()

# During an eager backward: full gradients of earlier micro-batches, to be reduced with this one's, by the key of the
# parameter and its id (copies of a module share keys).
due: dict[tuple[str, int], Tensor] = {}


@dataclass(frozen=True, eq=False)
class ShardedParam:
    """How one parameter is gathered from its shards, and how its gradient is reduced."""

    name: str  # relative to its module, `group.paths[part]`
    group: ShardGroup
    dim: int  # the sharded dim; shards on a dim other than 0 have equal sizes
    length: int  # size of `dim` in the gathered tensor
    chunk: int  # size of `dim` in the largest shard, which all ranks send
    local: int  # size of `dim` in this rank's shard
    param_dtype: torch.dtype | None  # of the gathered tensor, if it has floating point; None: that of the shard
    reduce_dtype: torch.dtype | None  # of the reduction; None: that of the computed gradient
    tensor_parallel: TensorParallel | None
    divisor: float | None = None  # of the sum of gradients over ranks; None: the number of ranks
    part: int = 0  # index of its module in the group
    number: int = field(default_factory=lambda: next(_numbers))  # see `ParamLabel.number`
    # Descriptions of the same parameter by the options that controls change: an option set back restores the old key.
    variants: dict[object, ShardedParam] = field(default_factory=dict, repr=False)
    key: str = field(init=False)  # identifies this description to `unshard`; valid as long as this object lives

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.name}#{next(_count)}")
        _params[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParam:
        return self

    @property
    def uneven(self) -> bool:
        """Whether ranks pad their shards; equal on all ranks, so that their graphs have the same nodes."""
        return self.length != self.chunk * self.group.axis.size

    @property
    def signature(self) -> tuple[Any, ...]:
        """How it is gathered and its gradient reduced, as plain values that are equal for equal parameters."""
        group = self.group
        fields = dataclasses.fields(self)
        others = ("name", "group", "part", "number", "variants", "key")
        mine = [getattr(self, each.name) for each in fields if each.name not in others]
        return (*mine, group.axis, group.replicate, group.post, group.reshard)

    @property
    def form(self) -> str:
        """A name that parameters have in common if their signatures are equal, in this process or another."""
        return hashlib.blake2s(repr(self.signature).encode(), digest_size=8).hexdigest()

    @property
    def label(self) -> ParamLabel:
        """The label of nodes that gather this parameter or reduce its gradient."""
        group = self.group
        post, post_rank = group.post or (None, 0)
        path = group.paths[self.part]
        return ParamLabel(
            group=group.path,
            param=f"{path}.{self.name}" if path else self.name,
            axis=group.axis.name,
            replicate_axis=group.replicate.name if group.replicate else "",
            reshard=group.reshard,
            post_size=post.size if post else 0,
            post_group=post.group if post else "",
            post_rank=post_rank,
            number=self.number,
        )

    def computed_dtype(self, shard: Tensor) -> torch.dtype:
        """Return the dtype of the gathered tensor. As in FSDP2, integers are never cast."""
        return (self.param_dtype if shard.dtype.is_floating_point else None) or shard.dtype

    def gathered_size(self, shard: Tensor) -> tuple[int, ...]:
        """Return the size of the gathered tensor."""
        return (*shard.shape[: self.dim], self.length, *shard.shape[self.dim + 1 :])

    def mean(self, grad: Tensor) -> tuple[str, float, float]:
        """Return (reduction, divisor before it, divisor after it) for the mean of `grad` over ranks, as FSDP2 does.

        NCCL computes means itself. Elsewhere the sum is divided after the scatter, where it is smallest. In fp16 a sum
        over ranks could overflow, so half of the division happens before it.
        """
        axis, replicate = self.group.axis, self.group.replicate
        ranks = axis.size * (replicate.size if replicate else 1)
        if self.divisor is None and ranks == 1:
            return "sum", 1.0, 1.0
        divisor = float(ranks) if self.divisor is None else self.divisor
        if grad.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            return "sum", *_halved(divisor)
        if self.divisor is None and grad.device.type == "cuda":
            return "avg", 1.0, 1.0
        return "sum", 1.0, divisor


def _halved(divisor: float) -> tuple[float, float]:
    """Return two roughly equal factors of `divisor`, the first a power of two."""
    before = 1.0
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return before, divisor / before


class _Described(Mapping[str, tuple[Any, ParamLabel]]):
    """Maps the key of a sharded parameter to everything about it that a graph depends on, as plain values."""

    def __getitem__(self, key: str) -> tuple[Any, ParamLabel]:
        sharded = _params[key]
        return sharded.signature, sharded.label

    def __iter__(self) -> Iterator[str]:
        return iter(_params)

    def __len__(self) -> int:
        return len(_params)


described_params = _Described()


def param_of(key: str) -> ShardedParam:
    """Return the description that compiled code refers to by `key`."""
    return _params[key]


@torch.compiler.allow_in_graph
def unshard(param: DTensor, key: str, unsynced: Tensor | None = None) -> Tensor:
    """Return the gathered parameter: a plain tensor, or a DTensor on the tensor-parallel mesh.

    `param` is the sharded parameter that the ShardedParam with this key describes. Its gradient is reduced and
    sharded; if `unsynced` (an `unsynced_leaf`) is given, the gradient flows to that leaf unreduced instead. This
    function is one node in Dynamo's graph, and AOTAutograd traces into it.
    """
    as_dtensor(param, _params[key])
    # The shard gets no gradient if `unsynced` does; before torch 2.13 `to_local` would make zeros of that.
    held: Any = param if unsynced is None else param.detach()
    return unshard_local(held.to_local(), key, unsynced, id(param))


def as_dtensor(param: Tensor, sharded: ShardedParam) -> DTensor:
    """Return a sharded parameter as it is; raise ConfigError if it is no DTensor any more."""
    if not isinstance(param, DTensor):
        raise ConfigError(
            f"parameter {sharded.label.param} was replaced by a plain tensor; load DTensors, or copy into it"
        )
    return param


def unshard_local(shard: Tensor, key: str, unsynced: Tensor | None = None, param_id: int = 0) -> Tensor:
    """Return what `unshard` does, given the local shard of the parameter."""
    return as_parameter(_Unshard.apply(shard, key, unsynced, param_id), _params[key])


def as_parameter(full: Tensor, sharded: ShardedParam) -> Tensor:
    """Return a gathered tensor as programs see it: a DTensor if it is a shard of tensor parallelism."""
    tp = sharded.tensor_parallel
    if tp is None:
        return full
    return DTensor.from_local(full, tp.mesh, tp.placements, run_check=False, shape=tp.shape, stride=tp.stride)


def unsynced_leaf(param: Tensor, key: str) -> Tensor:
    """Return a leaf tensor without memory whose `.grad` accumulates the parameter's unreduced gradients."""
    assert isinstance(param, DTensor)
    sharded = _params[key]
    shard = param.to_local()
    dtype = sharded.reduce_dtype or sharded.computed_dtype(shard)
    return shard.new_empty(1, dtype=dtype).expand(sharded.gathered_size(shard)).requires_grad_()


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, key: str, unsynced: Tensor | None, param_id: int) -> Tensor:
        ctx.key, ctx.param_id = key, param_id
        ctx.dtype = shard.dtype
        ctx.unsynced_dtype = None if unsynced is None else unsynced.dtype
        sharded = _params[key]
        if _is_shape_inference(shard) and sharded.dim == 0 and sharded.group.axis.size > 1:
            dtype = sharded.computed_dtype(shard)
            return shard.new_empty((sharded.length, *shard.shape[1:]), dtype=dtype)
        with annotate(sharded.label):
            return _gather(shard, sharded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        if ctx.unsynced_dtype is not None:
            return None, None, grad.to(ctx.unsynced_dtype), None
        sharded = _params[ctx.key]
        if type(grad) is Tensor:  # not while a graph is traced, whose tensors are subclasses
            grad = with_due(grad, ctx.key, ctx.param_id)
        with annotate(sharded.label):
            return _own(_reduce(grad, sharded, ctx.dtype), grad), None, None, None


def with_due(grad: Tensor | None, key: str, param_id: int) -> Any:
    """Return `grad` plus the gradient of earlier micro-batches that is to be reduced with it, if there is one."""
    former = due.pop((key, param_id), None)
    return grad if former is None else former if grad is None else former + grad.to(former.dtype)


def _is_shape_inference(tensor: Tensor) -> bool:
    """Whether only shapes and dtypes are computed from `tensor`, as Dynamo does; no nodes are traced then."""
    return type(tensor) is FakeTensor and all(isinstance(mode, FakeTensorMode) for mode in dispatch_modes())


def as_sharded(part: Tensor, param: DTensor) -> DTensor:
    """Return this rank's part of a gradient as a DTensor that is sharded like `param`."""
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def accumulate(leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add `grads` to the `.grad` of `leaves` as backward does, with their hooks."""
    torch.autograd.backward(list(leaves), list(grads))


@torch.no_grad()
def accumulate_reduced(param: DTensor, key: str, grad: Tensor) -> None:
    """Reduce the full gradient `grad` of `param` and add this rank's part to `param.grad`; every rank must do so."""
    reduced = as_sharded(_reduce(grad, _params[key], param.dtype), param)
    param.grad = reduced if param.grad is None else param.grad + reduced


@torch.compiler.allow_in_graph
def reduce_with(
    outputs: list[Tensor], shards: list[DTensor], keys: list[str], pending: list[Tensor], wanted: Tensor, end: Tensor
) -> list[Tensor]:
    """Return `outputs`; a backward from any of them also reduces the `pending` gradients of gathered parameters, once.

    The sharded parameters receive these gradients in addition to those of the step; in a compiled graph the two are
    added up first and reduced once (`fx.comm.gathers.merge_reductions`).

    wanted: a single bool, see `fx.claim`. end: an empty leaf that gets a gradient at the end of backward.
    """
    locals_ = [shard.to_local() for shard in shards]
    reduced = _Reduced.apply(keys, len(locals_), wanted, end, *locals_, *pending)
    return [_Behind.apply(output, reduced) for output in outputs]


class _Reduced(torch.autograd.Function):
    """An empty tensor whose backward reduces pending gradients."""

    @staticmethod
    def forward(ctx: Any, keys: list[str], count: int, wanted: Tensor, end: Tensor, *tensors: Tensor) -> Tensor:
        ctx.keys = keys
        ctx.dtypes = [shard.dtype for shard in tensors[:count]]
        ctx.save_for_backward(wanted, *tensors[count:])
        return end.view_as(end)

    @staticmethod
    def backward(ctx: Any, ended: Tensor) -> tuple[Tensor | None, ...]:
        wanted, *gradients = ctx.saved_tensors
        with only_in_backward():
            first = CLAIM(wanted)
        reduced = []
        for key, dtype, pending in zip(ctx.keys, ctx.dtypes, gradients, strict=True):
            waiting = torch.where(first, pending, pending.new_zeros(()))
            with annotate(_params[key].label):
                reduced.append(_reduce(waiting, _params[key], dtype))
        return None, None, None, ended, *reduced, *(None for _ in reduced)


class _Behind(torch.autograd.Function):
    """An output whose backward runs that of `reduced`.

    Only Dynamo may change it in place: `copy_results_that_reduce` then copies it before AOTAutograd traces.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, reduced: Tensor) -> Tensor:
        ctx.save_for_backward(reduced)
        if _is_shape_inference(output):
            return torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=output.device)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (reduced,) = ctx.saved_tensors
        return grad, torch.zeros_like(reduced)


def gather_all(
    shards: Sequence[Tensor], params: Sequence[ShardedParam], memory: Sequence[Tensor | None]
) -> list[Tensor]:
    """Gather several local shards eagerly, those over the same ranks by one launch.

    memory: where the gathered parameters should be, or None for new memory; some may still be elsewhere.
    """
    with torch.no_grad(), torch.inference_mode(False):
        dtypes = [param.computed_dtype(shard) for shard, param in zip(shards, params, strict=True)]
        sent = [_sent(shard, param) for shard, param in zip(_cast_all(shards, dtypes), params, strict=True)]
        whole = list(sent)
        for axis, at in _by_axis(params):
            if axis.size == 1:
                continue
            given = [sent[each] for each in at]
            if _is_gloo(axis, given[0]):
                found = [_ops.wait_tensor(each) for each in gloo_all_gathers(given, axis.size, axis.group)]
            else:
                found = [_whole_like(sent[each], params[each], memory[each]) for each in at]
                resolve_group(axis.group).allgather_into_tensor_coalesced(found, given).wait()
            for each, gathered in zip(at, found, strict=True):
                whole[each] = gathered
        return [_arranged(each, shard, param) for each, shard, param in zip(whole, shards, params, strict=True)]


def _whole_like(sent: Tensor, param: ShardedParam, memory: Tensor | None) -> Tensor:
    """Return memory for the shards of all ranks, one after the other: `memory` if the parameter looks like that."""
    if memory is not None and not param.dim and not param.uneven:
        return memory
    return sent.new_empty((param.group.axis.size * sent.shape[0], *sent.shape[1:]))


def _cast_all(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return `tensors` in other dtypes, cast by one launch for each pair of dtypes instead of one for each tensor."""
    found = list(tensors)
    changed: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for at, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        if tensor.dtype != dtype:
            changed.setdefault((tensor.dtype, dtype), []).append(at)
    for (_, dtype), places in changed.items():
        given = [tensors[at] for at in places]
        cast = [torch.empty_like(tensor, dtype=dtype) for tensor in given]
        torch._foreach_copy_(cast, given)
        for at, tensor in zip(places, cast, strict=True):
            found[at] = tensor
    return found


def reduce_used(grads: Sequence[Tensor | None], params: Sequence[ShardedParam], shards: Sequence[Tensor]) -> list[Any]:
    """Return this rank's parts of the gradients of parameters of one group; None for those that no rank has.

    grads: the full gradients, or None for a parameter that this rank did not use. Every rank must call this.
    """
    used = _used_by_any([grad is not None for grad in grads], params[0].group, shards[0].device)
    full: dict[int, Tensor] = {}  # by position
    for at, (grad, param, shard) in enumerate(zip(grads, params, shards, strict=True)):
        if used[at]:
            if grad is None:
                grad = shard.new_zeros(param.gathered_size(shard), dtype=param.computed_dtype(shard))
            full[at] = grad
    cast = _cast_all(list(full.values()), [params[at].reduce_dtype or each.dtype for at, each in full.items()])
    parts: list[Tensor | None] = [None] * len(params)
    prepared: dict[str, dict[int, tuple[Tensor, float]]] = {}  # by kind of reduction, then by position
    for at, grad in zip(full, cast, strict=True):
        reduction, tensor, after = _prepared(grad, params[at])
        prepared.setdefault(reduction, {})[at] = tensor, after
    axis, replicate = params[0].group.axis, params[0].group.replicate
    for reduction, tensors in prepared.items():
        reduced = [tensor for tensor, _ in tensors.values()]
        if axis.size > 1:
            if _is_gloo(axis, reduced[0]):
                started = [_ops.reduce_scatter_tensor(each, reduction, axis.size, axis.group) for each in reduced]
                reduced = [_ops.wait_tensor(each) for each in started]
            else:
                scattered = [each.new_empty((each.shape[0] // axis.size, *each.shape[1:])) for each in reduced]
                options = ReduceScatterOptions()
                options.reduceOp = _REDUCTIONS[reduction]
                resolve_group(axis.group).reduce_scatter_tensor_coalesced(scattered, reduced, options).wait()
                reduced = scattered
        if replicate is not None and replicate.size > 1:
            started = [_ops.all_reduce(each, reduction, replicate.group) for each in reduced]
            reduced = [_ops.wait_tensor(each) for each in started]
        finished = [
            _finished(part, after, params[at], part.dtype)
            for (at, (_, after)), part in zip(tensors.items(), reduced, strict=True)
        ]
        for at, part in zip(tensors, _cast_all(finished, [shards[at].dtype for at in tensors]), strict=True):
            parts[at] = _own(part, grads[at])
    return parts


def _own(part: Tensor, grad: Tensor | None) -> Tensor:
    """Return `part` in memory of its own: a single rank reduces nothing, and two parameters may get one gradient."""
    return part.clone() if part is grad else part


def _by_axis(params: Sequence[ShardedParam]) -> list[tuple[Axis, list[int]]]:
    """Return the axes of `params` with the positions of the parameters that are sharded over each."""
    found: dict[Axis, list[int]] = {}
    for at, param in enumerate(params):
        found.setdefault(param.group.axis, []).append(at)
    return list(found.items())


def _is_gloo(axis: Axis, tensor: Tensor) -> bool:
    return backend_of(axis.group, tensor.device.type) == "gloo"


def _used_by_any(used: list[bool], group: ShardGroup, device: torch.device) -> list[bool]:
    """Return which parameters are used by any rank of the group."""
    axes = [axis for axis in (group.axis, group.replicate) if axis is not None and axis.size > 1]
    if not axes:
        return used
    flags = torch.ones(len(used), device=device) if all(used) else torch.tensor(used, device=device).float()
    for axis in axes:
        flags = _ops.wait_tensor(_ops.all_reduce(flags, "max", axis.group))
    return used if all(used) else [bool(flag) for flag in flags.tolist()]


def _gather(shard: Tensor, param: ShardedParam) -> Tensor:
    """Gather the local shard, cast before so that the all-gather moves fewer bytes."""
    axis, whole = param.group.axis, _sent(shard, param)
    if axis.size > 1:
        # Eager code over gloo needs `gloo_all_gather`; while a graph is traced, every tensor is a subclass.
        apart = type(whole) is Tensor and _is_gloo(axis, whole)
        gather = gloo_all_gather if apart else _ops.all_gather_into_tensor
        whole = gather(whole, axis.size, axis.group)
    return _arranged(_waited(whole, param), shard, param)


def _sent(shard: Tensor, param: ShardedParam) -> Tensor:
    """Return what this rank sends for the gathered parameter."""
    # Cast after padding, and in `_reduce` before it is taken away: all ranks then compute tensors of the same size, and
    # plan the same kernels. A rank whose shard has no rows would have a call that makes an empty tensor instead.
    full = _pad(shard, param.chunk) if param.uneven else shard
    full = full.to(param.computed_dtype(shard))
    return full.contiguous() if param.group.axis.size > 1 else full


def _waited(whole: Tensor, param: ShardedParam) -> Tensor:
    return _ops.wait_tensor(whole) if param.group.axis.size > 1 else whole


def _arranged(full: Tensor, shard: Tensor, param: ShardedParam) -> Tensor:
    """Return the gathered parameter, given the shards of all ranks one after the other."""
    if param.dim:
        full = full.unflatten(0, (param.group.axis.size, -1)).movedim(0, param.dim).flatten(param.dim, param.dim + 1)
    if param.uneven:
        full = full.narrow(0, 0, param.length)
    return full.view_as(full) if full is shard else full


def _reduce(grad: Tensor, param: ShardedParam, dtype: torch.dtype) -> Tensor:
    """Return this rank's part of the gathered parameter's gradient, averaged over data-parallel ranks, as `dtype`."""
    axis, replicate = param.group.axis, param.group.replicate
    reduction, grad, after = _prepared(grad, param)
    if axis.size > 1:
        grad = _ops.wait_tensor(_ops.reduce_scatter_tensor(grad, reduction, axis.size, axis.group))
    if replicate is not None and replicate.size > 1:
        grad = _ops.wait_tensor(_ops.all_reduce(grad, reduction, replicate.group))
    return _finished(grad, after, param, dtype)


def _prepared(grad: Tensor, param: ShardedParam) -> tuple[str, Tensor, float]:
    """Return (reduction, what this rank adds to it, divisor after it)."""
    axis = param.group.axis
    if param.reduce_dtype is not None:
        grad = grad.to(param.reduce_dtype)
    reduction, before, after = param.mean(grad)
    if before != 1:
        grad = grad / before
    if param.uneven:
        grad = _pad(grad, param.chunk * axis.size)
    if param.dim:
        grad = grad.unflatten(param.dim, (axis.size, -1)).movedim(param.dim, 0).flatten(0, 1)
    return reduction, grad.contiguous() if axis.size > 1 else grad, after


def _finished(part: Tensor, after: float, param: ShardedParam, dtype: torch.dtype) -> Tensor:
    """Return this rank's part of the gradient, given its part of the reduction."""
    if after != 1:
        part = part / after
    part = part.to(dtype)
    return part.narrow(0, 0, param.local) if param.uneven else part


def _pad(tensor: Tensor, rows: int) -> Tensor:
    """Append zeros up to `rows` rows; also a node where none are missing, so that all ranks have the same graph."""
    sides = [0] * (2 * (tensor.ndim - 1)) + [0, rows - tensor.shape[0]]
    return torch.ops.aten.constant_pad_nd(tensor, sides)
