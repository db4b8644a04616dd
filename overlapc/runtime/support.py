"""Functions that a generated wrapper calls in addition to kernels and torch ops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from overlapc.errors import OverlapcError

# (size, stride, dtype) -> uninitialized tensor (`empty_cuda`: on the current GPU). They bypass the dispatcher and take
# half the time of `torch.empty_strided`.
empty_cpu: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
empty_cuda: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]

enter_device = torch.cuda._exchange_device
"""Make the GPU of this index current, and return the index of the previous one."""


below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context in which ops go straight to their device kernels. No op in a graph is recorded for gradients, but each op
would check for that, functional collectives in Python: half of the host cost of a start or a wait."""


class LayoutError(OverlapcError):
    """An argument has a layout that the graph was not compiled for."""


def is_lazy(tensor: Tensor) -> bool:
    """Whether memory does not hold the numbers of `tensor`: it holds their negatives, their conjugates, or nothing.

    Autograd hands such tensors to backward: `sgn` returns a gradient of zeros without memory. Results and gradients of
    views of complex numbers may be negated when they are read.
    """
    return tensor._is_zerotensor() or tensor.is_neg() or tensor.is_conj()


def checked(name: str, tensor: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return `tensor`, or a copy of it if it `is_lazy` or has another dtype than `dtype`.

    The dtype of a gradient differs if torch traced its result with a wrong one (`mse_loss` under autocast).
    Raises LayoutError unless it has this size and, in dims longer than 1, these strides.
    """
    if tensor.shape == tuple(size) and (tensor.stride() == tuple(stride) or _same_steps(tensor, stride)):
        if tensor.dtype == dtype and not is_lazy(tensor):
            return tensor
        return _copied(tensor, stride, dtype)
    raise LayoutError(
        f"{name} has size {tuple(tensor.shape)} and stride {tensor.stride()}, "
        f"but was compiled for size {tuple(size)} and stride {tuple(stride)}\n"
        "hint: torch._dynamo.reset() recompiles; if the error comes back, please report it"
    )


class Layouts:
    """A check of all arguments by one call: whether their layouts are those of tensors that passed every single check.

    `known` compares more than layouts (whether they require gradients, for instance) and holds no tensor.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: Callable[..., bool] = _unknown

    def learn(self, *tensors: Tensor) -> None:
        """Note that these tensors passed. Only the first ones are remembered; other layouts are checked one by one."""
        if self.known is _unknown:
            sizes, strides = [list(each.shape) for each in tensors], [list(each.stride()) for each in tensors]
            guards: Any = torch._C._dynamo.guards
            pattern = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            self.known = pattern.check


def _unknown(*tensors: Tensor) -> bool:
    return False


def _same_steps(tensor: Tensor, stride: Sequence[int]) -> bool:
    # The stride of a dim of size 1 does not matter, and in an empty tensor no stride does.
    pairs = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return tensor.numel() == 0 or all(extent == 1 or have == want for extent, have, want in pairs)


def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialized tensor on any other device."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


view: Callable[..., Tensor] = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""(tensor, size, stride, offset) -> a tensor over the same memory; `offset` counts from the tensor's first element.

Autograd does not regard it as a view, so users may change a graph's result in place.
"""


def strided(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    """`view` in a form that can be traced, which autograd regards as a view."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def counted_with(first: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor`, which lies in the memory of `first`, with the version counter of `first`, standing alone."""
    whole = _as_dtype(_with_bits(first, False, False), tensor.dtype)
    own = torch.as_strided(whole, tensor.size(), tensor.stride(), tensor.storage_offset())
    return _with_bits(own, tensor.is_conj(), tensor.is_neg()).detach()


def _with_bits(tensor: Tensor, is_conj: bool, is_neg: bool) -> Tensor:
    """Return a view of the elements in memory with these bits."""
    tensor = tensor.conj() if tensor.is_conj() != is_conj else tensor
    return torch._neg_view(tensor) if tensor.is_neg() != is_neg else tensor


def standing_alone(result: Any) -> Any:
    """Return a graph's result as a tensor that is no view to autograd, so that users may change it in place."""
    return result.detach() if isinstance(result, Tensor) and result._is_view() else result


def returning_alone(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return `run` with its results standing alone, except for those in the memory of an argument.

    Results that share memory share a version counter, so that autograd notices if users change what backward reads.
    """

    def call(args: list[Any]) -> tuple[Any, ...]:
        given = {_memory(value) for value in args}
        first: dict[int | None, Tensor] = {}
        found = []
        for result in run(args):
            memory = _memory(result)
            if memory in first:
                found.append(counted_with(first[memory], result))
            elif memory is None or memory in given:
                found.append(result)
            else:
                first[memory] = standing_alone(result)
                found.append(first[memory])
        return tuple(found)

    return call


def _memory(value: Any) -> int | None:
    """Return a number for the memory of a tensor that lives; None for values without memory of their own."""
    is_strided = isinstance(value, Tensor) and value.layout == torch.strided
    return int(value.untyped_storage()._cdata) if is_strided else None


def carve(arena: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a buffer in an arena of bytes, `offset` bytes from its start; a multiple of every element's size."""
    whole = arena if dtype == torch.uint8 else arena.view(dtype)
    return torch.as_strided(whole, size, stride, offset // dtype.itemsize)


def take_over(tensor: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a new buffer over the whole memory of a dead buffer of the same size in bytes."""
    tensor = _as_dtype(tensor, dtype)
    return view(tensor, size, stride, -tensor.storage_offset())


def strided_over(tensor: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`take_over` in a form that can be traced, which autograd regards as a view."""
    return torch.as_strided(_as_dtype(tensor, dtype), size, stride, 0)


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the memory of `tensor` from its first element on as a list of elements of another dtype."""
    return _as_dtype(tensor, dtype)[tensor.storage_offset() * tensor.element_size() // dtype.itemsize :]


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor`'s whole memory as `dtype`; `tensor` itself if that is its dtype."""
    if tensor.dtype == dtype:
        return tensor
    size = tensor.untyped_storage().nbytes() // dtype.itemsize * dtype.itemsize
    return torch.as_strided(tensor, (size // tensor.element_size(),), (1,), 0).view(dtype)


def _references(held: object) -> int:
    return sys.getrefcount(held)


def _references_if_alone() -> int:
    """Return the reference count that a function sees for an argument whose only reference is its caller's variable.

    It is measured each time, because it is larger by one while Dynamo evaluates frames.
    """
    held = object()
    return _references(held)


def reused(source: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a new tensor over the memory of `source`, of equal bytes, if only the caller's variable holds that memory.

    Otherwise return new memory: if backward will run again, if a hook on saved tensors holds `source`, or if it is a
    view of another tensor.

    Other threads may change these reference counts meanwhile, but can only lower them. Code that can reach the memory
    owns a counted reference; if the counts are those of the caller alone, its variable is not visible to other threads,
    and weak references are never turned into strong ones (torch's registry of collectives in flight only compares
    them). A thread that has dropped its C++ reference but not yet the Python one is counted by Python until it has. All
    that such a thread wrote, it wrote before the collective was waited for.
    """
    if (
        source._use_count() == 1  # type: ignore[attr-defined]  # else C++ code holds the tensor, too
        and sys.getrefcount(source) <= _references_if_alone()  # else Python code does
        and torch._C._storage_Use_Count(source.untyped_storage()._cdata) == 2  # the second is `untyped_storage()` here
        and source.storage_offset() == 0
    ):
        return take_over(source, size, stride, dtype)
    return torch.empty_strided(size, stride, dtype=dtype, device=source.device)


def as_expected(name: str, tensor: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return `tensor`, copied into the traced strides and dtype if it has others: generated code relies on them.

    Raises LayoutError if its size is not the traced one.
    """
    if tensor.shape != tuple(size):
        raise LayoutError(
            f"{name} has size {tuple(tensor.shape)}, but was traced with size {tuple(size)}\n"
            "hint: torch's fake implementation of the op that computes it is wrong; please report it"
        )
    if tensor.dtype == dtype and (tensor.stride() == tuple(stride) or _same_steps(tensor, stride)):
        return tensor
    return _copied(tensor, stride, dtype)


def _copied(tensor: Tensor, stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a copy of `tensor` in these strides; where one of them is 0, all elements are the first one."""
    copy = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)
    written = copy
    for dim, step in enumerate(stride):
        if step == 0 and tensor.shape[dim] > 1:  # torch writes no element twice
            written, tensor = written.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    if tensor._is_zerotensor():
        written.zero_()
    else:
        written.copy_(tensor)
    return copy


@cache
def owned(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return `target` with results copied to separate memory: for view ops that no layout describes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        def copy(result: Any) -> Any:
            if isinstance(result, Tensor) and result.layout == torch.strided:
                return result.clone().resolve_conj().resolve_neg()
            return result

        return torch.utils._pytree.tree_map(copy, target(*args, **kwargs))

    call.__name__ = f"owned_{getattr(target, '__name__', 'call')}"
    call.copies_results_of = target  # type: ignore[attr-defined]
    return call


def offset_of(target: Callable[..., Any]) -> Callable[..., int]:
    """Return a function that calls a view op and returns the storage offset of its result."""

    def call(*args: Any, **kwargs: Any) -> int:
        return int(target(*args, **kwargs).storage_offset())

    call.__name__ = f"offset_of_{getattr(target, '__name__', 'call')}"
    call.offset_of_result_of = target  # type: ignore[attr-defined]
    return call


def unboxed(call: Callable[[list[Any]], Any], single: bool) -> Callable[..., Any]:
    """Return a compiled graph as a function of its arguments, for ops that call branches and loop bodies.

    single: return one value instead of a tuple of one.
    """

    def run(*args: Any) -> Any:
        results = tuple(call(list(args)))
        return results[0] if single else results

    return run
