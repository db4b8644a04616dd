"""The ATen ops that AOTAutograd decomposes into smaller ones.

These are torch's core set, except ops that are better lowered whole (variance, softmax's backward), called as a library
kernel (attention), or left as one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols, statically_known_true

from overlapc.fx.captured.drawn import drawn_decompositions, draws
from overlapc.fx.random import random_decompositions
from overlapc.fx.result_layouts import is_expanded, laid_out_as_eager
from overlapc.fx.sizes import same_sizes
from overlapc.fx.top_k import topk_of_groups
from overlapc.fx.versions.tensors import core_decompositions, set_autograd_rule

aten = torch.ops.aten

# Not decomposed, but lowered whole (overlapc/lowering) or called as library kernels: decompositions move more bytes.
KEPT = (
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten.embedding_dense_backward,  # decomposes into index_put with accumulation: one call, too, less exact in bfloat16
    aten.gelu,
    aten.silu,
    aten.lerp,
    aten.addcmul,
    aten.addcdiv,
    aten.addmm,
    aten.baddbmm,
    aten.masked_fill,
    aten.var,
    aten.var_mean,
    aten.clamp_min,
    aten.clamp_max,
    aten.linspace,  # in low precision, its decomposition rounds in other places than eager
)
# Decomposed into ops that compute in float32, also on parameters.
NORMS = (
    aten.native_layer_norm,
    aten.native_group_norm,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
)
# Not in torch's core set, but decomposed, because the parts fuse.
BROKEN_UP = (
    *NORMS,
    aten._softmax,  # backward recomputes a row from its maximum and sum, which take little memory to save
    aten._log_softmax,
    aten.native_layer_norm_backward,
    aten.native_group_norm_backward,
    aten.nll_loss_forward,
    aten.gelu_backward,
    aten.silu_backward,
    aten.native_batch_norm_backward,
    aten.batch_norm_backward,
    aten.elu,
    aten.hardtanh,
    aten.leaky_relu,
    aten.fmax,
    aten.fmin,
    aten.dist,
    aten.linalg_vector_norm,
    aten.addmv,
    aten.narrow_copy,
    aten.permute_copy,
    aten.view_copy,
    aten.index_add,
)
_LOW_PRECISION = (torch.float16, torch.bfloat16)


@lru_cache(None)
def decompositions(native_random: bool = True) -> dict[Any, Callable[..., Any]]:
    """Return the decomposition of each op, for AOTAutograd's `decompositions=`.

    With `native_random`, generated code makes random numbers; without, torch's own ops do, as in eager.
    """
    kept = {getattr(packet, overload) for packet in KEPT for overload in packet.overloads()}
    table = {**core_decompositions(), **get_decompositions(BROKEN_UP)}
    backward = aten.native_group_norm_backward.default
    table[backward] = group_norm_backward(table[backward])
    for loss in (aten.huber_loss.default, aten.soft_margin_loss.default):
        table[loss] = in_the_first_dtype(table[loss])
    for packet in NORMS:
        for overload in packet.overloads():
            rule = table.get(getattr(packet, overload))
            if rule is not None and overload != "out":
                table[getattr(packet, overload)] = with_parameters_in_float32(rule)
    table[aten.log_sigmoid_forward.default] = of_contiguous_on_cpu(table[aten.log_sigmoid_forward.default])
    table[aten.hardtanh_backward.default] = hardtanh_backward
    table[aten.logit_backward.default] = nan_at_nan(table[aten.logit_backward.default])
    table[aten.nll_loss_backward.default] = table[aten.nll_loss2d_backward.default] = nll_loss_backward
    table[aten.native_dropout_backward.default] = native_dropout_backward
    table[aten.smooth_l1_loss_backward.default] = smooth_l1_loss_backward
    table[aten._foreach_norm.Scalar] = norms
    table[aten.topk.default] = topk_of_groups
    table[aten.split_with_sizes.default] = slices
    for scatter in (aten.select_scatter, aten.slice_scatter, aten.diagonal_scatter):
        table[scatter.default] = of_dense(scatter.default)
    set_autograd_rule(aten.softshrink.default, softshrink)
    table[aten.softshrink.default] = softshrink
    table[aten.index_fill.int_Scalar] = table[aten.index_fill.int_Tensor] = index_fill
    table[aten.index_put.default] = put_by_mask
    table = {target: rule for target, rule in table.items() if target not in kept and not draws(target)}
    return laid_out_as_eager(table) | (random_decompositions() if native_random else drawn_decompositions())


def of_dense(op: Any) -> Callable[..., Any]:
    """Return a decomposition that keeps `op`, because torch's rule returns the dtype to which both tensors promote.

    If elements of `x` share memory, `op` is called on a copy: torch 2.11 would trace a result whose elements share
    memory, too.
    """

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        empty = any(isinstance(extent, int) and extent == 0 for extent in x.shape)  # a copy has these strides, too
        return op(x.clone(), *args, **kwargs) if is_expanded(x) and not empty else NotImplemented

    return call


def slices(x: Tensor, sizes: list[Any], dim: int = 0) -> Any:
    """Split into slices: torch's partitioner would save the results of a split, but recomputes slices in backward."""
    if any(isinstance(size, torch.SymInt) for size in (*sizes, x.shape[dim])):
        return NotImplemented  # slices would add guards on where each of them ends
    ends = list(itertools.accumulate(sizes))
    return [aten.slice.Tensor(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def index_fill(x: Tensor, dim: int, index: Tensor, value: Tensor | float) -> Tensor:
    """Decompose `index_fill` into a result laid out as `x`; torch's rule copies in place, which AOTAutograd rejects."""
    if x.dim() == 0:
        return index_fill(x.unsqueeze(0), 0, index, value).squeeze(0)
    number = value.to(x.dtype) if isinstance(value, Tensor) else aten.full([], value, dtype=x.dtype, device=x.device)
    return aten.index_put(x, [None] * (dim % x.dim()) + [index], number)


def put_by_mask(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Decompose `x[mask] = values` into an element-wise op where every chosen element gets the same value or row.

    So no rows are counted, and a number in a CPU tensor (`x[mask] = 0`) is a constant of the kernel. Other uses of
    `index_put` stay one call.
    """
    given = [dim for dim, index in enumerate(indices) if index is not None]
    mask = indices[given[0]] if len(given) == 1 else None
    if mask is None or mask.dtype != torch.bool or values.dtype != x.dtype or has_free_unbacked_symbols(x):
        return NotImplemented
    first, end = given[0], given[0] + mask.dim()
    if not same_sizes(mask.shape, x.shape[first:end]):
        return NotImplemented
    trailing = x.dim() - end
    if values.dim() > trailing:  # one of its dims has an element for each chosen one, or the same for all
        place = values.dim() - trailing - 1
        if not statically_known_true(values.shape[place] == 1):
            return NotImplemented
        if values.device != x.device:
            return NotImplemented
        values = values.reshape(*values.shape[:place], *(1,) * mask.dim(), *values.shape[place + 1 :])
    where = mask.reshape(*mask.shape, *(1,) * trailing)
    return torch.where(where, x + values if accumulate else values, x)


def hardtanh_backward(grad: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Compare `x` in float32, as eager does; torch's rule before 2.13 rounds the bounds to the dtype of `x`."""
    wide = x.float() if x.dtype in _LOW_PRECISION else x
    return torch.where((wide <= low) | (wide >= high), 0.0, grad)


def native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Decompose as torch's rule does, but without its final copy to a contiguous layout."""
    return grad * (mask.to(grad.dtype) * scale)


def smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """NaN where the difference is, as in eager; torch's own rule takes the sign of NaN, 0, where it is not small."""
    grad = 1.0 / x.numel() * grad if reduction == 1 else grad
    difference = x - target
    return torch.where(difference.abs() >= beta, grad * difference.sign(), grad * difference / beta)


def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """Decompose `softshrink`: result and gradient are 0 between the bounds, also if the tangent is infinite or NaN.

    Between the bounds, eager's vectorized code gives 0, too (its scalar tail gives -0 for negative elements). torch's
    rule multiplies the tangent by 0, which gives NaN in the gradient of `softshrink(x).abs().sqrt()`.
    """
    between = torch.where(x.isnan(), x, torch.zeros_like(x))
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, between))


def norms(tensors: list[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Decompose `_foreach_norm` into a norm for each tensor; these fuse with neighbours and still share launches."""
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


def nll_loss_backward(
    grad_output: Tensor,
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Compute the gradient, which is minus the weight at each row's target and 0 elsewhere, by comparing positions.

    This saves nothing for backward. torch's rule scatters into zeros like the log-probabilities, and its partitioner
    saves the log-probabilities or the zeros. It also multiplies the zeros by the weight and the incoming gradient: NaN,
    where eager gives 0, for a class that does not occur and whose weight is infinite (1 / its count).
    """
    dim = 1 if log_probabilities.dim() > 1 else 0
    classes = log_probabilities.shape[dim]
    by_class = [classes, *(1,) * (log_probabilities.dim() - dim - 1)]
    if reduction == 1:  # mean
        grad_output = grad_output / total_weight
    if log_probabilities.dim() == 1 and target.dim() > 0:
        target = target[0]
    rows = target.unsqueeze(dim)
    if grad_output.dim() > 0 and log_probabilities.dim() > 1:
        grad_output = grad_output.unsqueeze(dim)
    if weight is not None:
        grad_output = grad_output * weight.view(by_class)
    chosen = torch.arange(classes, device=target.device).view(by_class) == rows
    return torch.where(chosen & (rows != ignore_index), -grad_output, 0)


def nan_at_nan(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return an element-wise gradient's `rule` with NaN where the input is NaN, as in eager."""

    @wraps(rule)
    def call(grad: Tensor, x: Tensor, *args: Any) -> Any:
        return torch.where(x.isnan(), x, rule(grad, x, *args))

    return call


def of_contiguous_on_cpu(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return `rule` with contiguous results on a CPU, as those of eager's kernel; torch's rule keeps strides."""

    @wraps(rule)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return rule(x.contiguous() if x.device.type == "cpu" else x, *args, **kwargs)

    return call


def in_the_first_dtype(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return `rule` with its result in the dtype of the first tensor, as in eager, instead of the promoted dtype."""

    @wraps(rule)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return rule(x, *args, **kwargs).to(x.dtype)

    return call


def with_parameters_in_float32(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a normalization's `rule` with float32 statistics for a low-precision tensor with float32 parameters.

    Eager's statistics are float32 then, too; torch's rule rounds them on a CPU, whatever the parameters are.
    """

    @wraps(rule)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        others = [arg.dtype for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        if x.dtype not in _LOW_PRECISION or torch.float32 not in others:
            return rule(x, *args, **kwargs)
        out, *statistics = rule(x.float(), *args, **kwargs)
        return (out.to(x.dtype), *statistics)

    return call


def group_norm_backward(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return `rule` computing in float32 on low-precision tensors, as eager's kernels do.

    Each gradient has the dtype of its tensor.
    """

    @wraps(rule)
    def call(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *args: Any) -> Any:
        if x.dtype not in _LOW_PRECISION:
            return rule(grad, x, mean, rstd, weight, *args)
        widened = [None if arg is None else arg.float() for arg in (grad, x, mean, rstd, weight)]
        of_x, *of_parameters = rule(*widened, *args)
        dtype = x.dtype if weight is None else weight.dtype
        return (
            None if of_x is None else of_x.to(x.dtype),
            *(None if gradient is None else gradient.to(dtype) for gradient in of_parameters),
        )

    return call
