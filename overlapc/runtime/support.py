"""Functions that a generated wrapper calls besides kernels and torch ops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from overlapc.errors import OverlapcError

# (size, stride, dtype) -> memory, on the current GPU: past the dispatcher, in half the time of `torch.empty_strided`.
empty_cpu: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
empty_cuda: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]

enter_device = torch.cuda._exchange_device
"""Makes the GPU of this index current, and returns the index of the one that was."""


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Within it an op goes straight to its device's kernel. Nothing in a graph is recorded for gradients, but each op would
ask whether it should be, functional collectives in Python: half of what a start or a wait costs the host."""


class LayoutError(OverlapcError):
    """An argument came with a layout that the graph was not compiled for."""


def check(name: str, tensor: Tensor, size: Sequence[int], stride: Sequence[int]) -> None:
    """LayoutError unless `tensor` has this size and, in dims longer than 1, these strides."""
    if tensor.shape == tuple(size) and (tensor.stride() == tuple(stride) or _same_steps(tensor, stride)):
        return
    raise LayoutError(
        f"{name} has size {tuple(tensor.shape)} and stride {tensor.stride()}, "
        f"but was compiled for size {tuple(size)} and stride {tuple(stride)}\n"
        "hint: torch._dynamo.reset() compiles again; if it comes back, please report it"
    )


class Layouts:
    """Whether tensors are laid out as those were that passed every check: one call for all of them.

    `known` compares more than layouts (what autograd records, for instance) and holds no tensor.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: Callable[..., bool] = _unknown

    def learn(self, *tensors: Tensor) -> None:
        """These passed. The first stay the pattern: who alternates is checked one by one."""
        if self.known is _unknown:
            sizes, strides = [list(each.shape) for each in tensors], [list(each.stride()) for each in tensors]
            guards: Any = torch._C._dynamo.guards
            pattern = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            self.known = pattern.check


def _unknown(*tensors: Tensor) -> bool:
    return False


def _same_steps(tensor: Tensor, stride: Sequence[int]) -> bool:
    # A dim of size 1 has no step, and an empty tensor none at all.
    pairs = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return tensor.numel() == 0 or all(extent == 1 or have == want for extent, have, want in pairs)


def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory on any other device."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


view: Callable[..., Tensor] = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""(tensor, size, stride, offset) -> its memory through another layout; `offset` counts from its first element.

To autograd that is no view: what a graph returns may be changed in place.
"""


def strided(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    """`view` in a form that can be traced; a view to autograd."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def standing_alone(result: Any) -> Any:
    """A graph's result as no view to autograd, which would refuse to let the user change it in place."""
    viewed = isinstance(result, Tensor) and result._is_view()
    return view(result, result.size(), result.stride(), 0) if viewed else result


def carve(pool: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A buffer in a pool of bytes; `offset` bytes from its start, which is a multiple of any element's size."""
    whole = pool if dtype == torch.uint8 else pool.view(dtype)
    return torch.as_strided(whole, size, stride, offset // dtype.itemsize)


def take_over(tensor: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The whole memory of a dead buffer of equal bytes, as a new one."""
    tensor = _as_dtype(tensor, dtype)
    return view(tensor, size, stride, -tensor.storage_offset())


def strided_over(tensor: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`take_over` in a form that can be traced; a view to autograd."""
    return torch.as_strided(_as_dtype(tensor, dtype), size, stride, 0)


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor`'s whole memory as `dtype`; itself if it has that."""
    if tensor.dtype == dtype:
        return tensor
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return flat.view(dtype)


def _references(held: object) -> int:
    return sys.getrefcount(held)


def _references_if_alone() -> int:
    """What Python counts in a function whose caller has the only reference, in a variable.

    One more while Dynamo evaluates frames, so it is asked each time.
    """
    held = object()
    return _references(held)


def reused(source: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The memory of an argument of equal bytes as a new tensor, if the caller's variable is all that holds it.

    Otherwise new memory: for a backward that will run again, what a hook on saved tensors kept, or a view of another.

    Other threads may change these counts meanwhile, but only towards less. Who can get at the memory at all owns a
    reference, which is counted; here all are the caller's, whose variable no other thread sees, and nothing makes a
    reference of a weak one (torch's registry of collectives in flight compares weak ones, and never follows them). A
    thread that dropped its C++ reference and still has to drop the Python one is counted by Python until it has. What
    such a thread wrote, it wrote before the collective was waited for.
    """
    if (
        source._use_count() == 1  # type: ignore[attr-defined]  # or torch holds it elsewhere
        and sys.getrefcount(source) <= _references_if_alone()  # or Python does
        and torch._C._storage_Use_Count(source.untyped_storage()._cdata) == 2  # the second is `untyped_storage()` here
        and source.storage_offset() == 0
    ):
        return take_over(source, size, stride, dtype)
    return torch.empty_strided(size, stride, dtype=dtype, device=source.device)


def as_expected(name: str, tensor: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """`tensor`, copied into the traced strides if the op returned others: generated code relies on them.

    LayoutError if its size is not the traced one.
    """
    if tensor.shape != tuple(size):
        raise LayoutError(
            f"{name} came with size {tuple(tensor.shape)}, but was traced with size {tuple(size)}\n"
            "hint: torch's fake implementation of the op that made it is wrong; please report it"
        )
    if tensor.stride() == tuple(stride) or _same_steps(tensor, stride):
        return tensor
    laid_out = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(tensor)


@cache
def owned(target: Callable[..., Any]) -> Callable[..., Any]:
    """`target`, with results that share memory with nothing: for view ops that no layout describes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        def copy(result: Any) -> Any:
            if isinstance(result, Tensor) and result.layout == torch.strided:
                return result.clone().resolve_conj().resolve_neg()
            return result

        return torch.utils._pytree.tree_map(copy, target(*args, **kwargs))

    call.__name__ = f"owned_{getattr(target, '__name__', 'call')}"
    call.copies_results_of = target  # type: ignore[attr-defined]
    return call


def unboxed(call: Callable[[list[Any]], Any], single: bool) -> Callable[..., Any]:
    """A compiled graph as a function of its arguments, for who calls branches and loop bodies.

    single: it returns one value, and not a tuple of one.
    """

    def run(*args: Any) -> Any:
        results = tuple(call(list(args)))
        return results[0] if single else results

    return run
