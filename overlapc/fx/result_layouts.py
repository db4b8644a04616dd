"""Gives the results of element-wise ops eager's strides, whose order of dims depends on the strides of the arguments.

A decomposition that uses the arguments in another order, or broadcasts one of them first, gives other strides, and so
do the fake tensors of some ops. If the strides of its arguments differ, such an op is therefore traced with all
arguments permuted to the dim order of eager's result, which makes the result contiguous; permuting it back moves no
data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from overlapc.fx.sizes import same_sizes

aten = torch.ops.aten

# Ops that are element-wise in eager, but that torch does not tag as such.
_UNTAGGED = (aten.hardswish_backward, aten.hardtanh_backward, aten.elu_backward, aten.softplus_backward)
# Both eager and the rule order dims by the second argument first.
_BY_THE_SECOND = (aten.threshold_backward, aten.leaky_relu_backward)
# Not decomposed; their fake tensors have other strides than eager's results.
_MISTAKEN = (
    aten.copysign.Tensor,
    aten.div.Tensor_mode,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
)
# Not decomposed; in low precision, their fake tensors are computed in float32, for which an expanded argument becomes
# contiguous. Eager converts only arguments of several dtypes.
_CONVERTING = (
    *(
        getattr(aten, name).Tensor
        for name in "add sub mul div fmod remainder eq ne lt le gt ge clamp_min clamp_max".split()
    ),
    *(getattr(aten, name).default for name in "atan2 hypot maximum minimum igamma igammac".split()),
    aten.pow.Tensor_Tensor,
    aten.ldexp.Tensor,
)
# Eager allocates the result like the first argument: the incoming gradient, the tensor of which elements are replaced.
_LIKE_THE_FIRST = (aten.log_sigmoid_backward, aten.index_put)
# Ops whose results are contiguous in eager, whatever the layout of their arguments.
_CONTIGUOUS = (
    aten.mse_loss_backward,
    aten.smooth_l1_loss_backward,
    aten.huber_loss_backward,
    aten.nll_loss2d_backward,
    aten.upsample_nearest1d,
    aten._upsample_nearest_exact1d,
)


def laid_out_as_eager(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return `table` of decompositions with rules that give the results of these ops eager's strides."""
    changed: dict[Any, Callable[..., Any]] = {op: _in_order(op, None) for op in _MISTAKEN}
    changed |= {op: _in_order_if_expanded(op) for op in _CONVERTING}
    for op, rule in table.items():
        packet = op.overloadpacket
        if op._schema.is_mutable or packet in _BY_THE_SECOND:
            continue
        if torch.Tag.pointwise in op.tags or packet in _UNTAGGED:
            changed[op] = _in_order(op, rule)
        elif packet in _CONTIGUOUS:
            changed[op] = _contiguous(rule)
        elif packet in _LIKE_THE_FIRST:
            changed[op] = _like_the_first(rule)
    return table | changed | {aten.pow.Scalar: _power_of_number, aten.index.Tensor: _indexed}


def _in_order(op: Any, rule: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return `rule`, or `op` itself if that is None, with the dims of the result in eager's memory order."""

    def call(*args: Any, **kwargs: Any) -> Any:
        order = None if op in _entered else _order(args, trusted=rule is not None)
        if order is None:
            return NotImplemented if rule is None else rule(*args, **kwargs)
        if order != sorted(order):
            shape = torch.broadcast_shapes(*(arg.shape for arg in args if _has_dims(arg)))
            args = tuple(arg.expand(shape).permute(order) if _has_dims(arg) else arg for arg in args)
        result = _itself(op, *args, **kwargs) if rule is None else rule(*args, **kwargs)
        return _permuted_back(result.contiguous(), order)

    return call if rule is None else wraps(rule)(call)


_entered: set[Any] = set()  # ops that their own decompositions are calling


def _itself(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `op` in its decomposition, which must then return NotImplemented."""
    _entered.add(op)
    try:
        return op(*args, **kwargs)
    finally:
        _entered.discard(op)


def _in_order_if_expanded(op: Any) -> Callable[..., Any]:
    """Return `_in_order` of `op`, for calls with arguments of one dtype, of which one is expanded."""
    in_order = _in_order(op, None)

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in args if _has_dims(arg)]
        one_dtype = len({tensor.dtype for tensor in tensors}) == 1
        if not one_dtype or not any(map(is_expanded, tensors)) or any(map(has_free_unbacked_symbols, tensors)):
            return NotImplemented
        order = _order(args, trusted=False)
        if order is None or order == sorted(order):  # a contiguous result, as the fake tensor says
            return NotImplemented
        return in_order(*args, **kwargs)

    return call


def is_expanded(x: Tensor) -> bool:
    """Whether elements of `x` share memory; decided without a guard on symbolic sizes."""
    return any(
        isinstance(step, int) and step == 0 and not (isinstance(extent, int) and extent <= 1)
        for extent, step in zip(x.shape, x.stride(), strict=True)
    )


def _order(args: tuple[Any, ...], trusted: bool) -> list[int] | None:
    """The dims of eager's result as they follow in memory; None where all arguments, and so the result, agree.

    trusted: whether the result agrees then, also where the arguments are not contiguous.
    """
    tensors = [arg for arg in args if _has_dims(arg)]
    if not tensors:
        return None
    first = tensors[0]
    agree = all(arg.shape == first.shape and arg.stride() == first.stride() for arg in tensors)
    if agree and (trusted or first.is_contiguous()):
        return None
    shape = torch.broadcast_shapes(*(arg.shape for arg in tensors))
    with disable_proxy_modes_tracing():
        order, _ = compute_elementwise_output_logical_to_physical_perm(*(arg.expand(shape) for arg in tensors))
    return order


def _permuted_back(permuted: Tensor, order: list[int]) -> Tensor:
    """Undo `permute(order)`."""
    return permuted.permute([order.index(dim) for dim in range(len(order))])


def _has_dims(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.dim() > 0


def _contiguous(rule: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(rule)
    def call(*args: Any, **kwargs: Any) -> Any:
        return rule(*args, **kwargs).contiguous()

    return call


def _like_the_first(rule: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(rule)
    def call(first: Tensor, *others: Any, **kwargs: Any) -> Any:
        result = rule(first, *others, **kwargs)
        if result is NotImplemented:
            return result
        with disable_proxy_modes_tracing():
            order, _ = compute_elementwise_output_logical_to_physical_perm(first)
        return _permuted_back(result.permute(order).contiguous(), order)

    return call


def _power_of_number(base: float, exponent: Tensor) -> Any:
    """Decompose `pow` with a contiguous result, as in eager; its fake tensor is not contiguous."""
    return NotImplemented if exponent.is_contiguous() else aten.pow.Scalar(base, exponent.contiguous())


def _indexed(x: Tensor, indices: list[Tensor | None]) -> Any:
    """Decompose `index` with eager's order of dims, which depends on the strides of the indices, too.

    That of the fake tensor depends on `x` alone.
    """
    given = [index for index in indices if index is not None]
    if aten.index.Tensor in _entered or any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return NotImplemented
    if any(map(has_free_unbacked_symbols, (x, *given))):
        return NotImplemented
    with disable_proxy_modes_tracing():
        given = list(torch.broadcast_tensors(*given))
        if x.device.type != "cpu" and not all(same_sizes(index.stride(), given[0].stride()) for index in given):
            given = [index.contiguous() for index in given]
        places = [dim for dim, index in enumerate(indices) if index is not None]
        kept = [dim for dim in range(x.dim()) if dim not in places]
        first = places[0] if places[-1] - places[0] < len(places) else 0  # not side by side: their dims come first
        before, after = kept[:first], kept[first:]
        new = given[0].shape

        def shape(new: Any, of: Any) -> list[Any]:
            return [*(of[dim] for dim in before), *new, *(of[dim] for dim in after)]

        source = x.as_strided(shape(new, x.shape), shape([0] * len(new), x.stride()))
        ones = [1] * x.dim()
        read = (index.reshape(shape(new, ones)).expand(source.shape) for index in given)
        order, _ = compute_elementwise_output_logical_to_physical_perm(source, *read)
    result = _itself(aten.index.Tensor, x, indices)
    permuted = result.permute(order)
    return result if permuted.is_contiguous() else _permuted_back(permuted.contiguous(), order)
