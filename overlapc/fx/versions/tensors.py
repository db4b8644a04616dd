"""Ops, fake tensors and symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.singleton_int import SingletonInt


def sized_by_data(op: torch._ops.OpOverload) -> bool:
    """Whether the sizes of the op's results depend on data; torch 2.11 lacks the tag on `_unique`."""
    return torch.Tag.dynamic_output_shape in op.tags or op is torch.ops.aten._unique.default


def set_autograd_rule(op: torch._ops.OpOverload, rule: Callable[..., Any]) -> None:
    """Replace torch's Python rule for `op` under autograd by `rule`, so that traces differentiate `rule`."""
    op.py_kernels[torch._C.DispatchKey.Autograd] = rule
    op._dispatch_cache.clear()


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's rules for ops outside of its core set, without the ops that autograd decomposes before.

    `torch._decomp.core_aten_decompositions` has those, too, which takes it a tenth of a second.
    """
    return _core_aten_decompositions_post_autograd()


@lru_cache(None)
def float8_saturates() -> bool:
    """Whether casting an out-of-range value to float8_e4m3fn gives the largest number (torch 2.13) instead of NaN."""
    with _disable_current_modes():
        return not torch.tensor(1e3).to(torch.float8_e4m3fn).float().isnan().item()


def initialize_gpus_once() -> None:
    """Let fake tensors initialize each GPU once per process.

    torch asks the driver for the number of GPUs and allocates a tensor for each fake tensor that it makes.
    """
    module: Any = fake_tensor
    if not hasattr(module.init_gpu_context, "cache_info"):
        module.init_gpu_context = cache(module.init_gpu_context)


def fake_like(
    value: FakeTensor, base: torch.Tensor | None, shift: int, mode: FakeTensorMode | None = None
) -> FakeTensor:
    """Return a fake tensor of the form of `value` in new memory, or in that of `base` with its offset moved by `shift`.

    It is built from a meta tensor, as torch does it; through torch's dispatcher this takes ten times as long.
    mode: default: that of `value`.
    """
    memory = value.untyped_storage().nbytes() if base is None else base.untyped_storage()
    with _disable_current_modes():
        storage = torch.UntypedStorage(memory, device="meta") if isinstance(memory, int) else memory
        form = torch.empty(0, dtype=value.dtype, device="meta")
        form.set_(storage, value.storage_offset() + shift, value.shape, value.stride())
        return FakeTensor(mode or value.fake_mode, form, value.device)


_OF_JAGGED_DIMS = (torch.SymInt, SingletonInt)  # sizes that equal themselves only
_agreed_hints: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()  # by shape environment, then by symbol


def agree_on_hint(size: torch.SymInt, hint: int) -> None:
    """Plan as if a symbolic size had been `hint` where it was traced; on every rank, so that all plan alike."""
    if size.node.expr.is_symbol:
        _agreed_hints.setdefault(size.node.shape_env, {})[size.node.expr] = hint


def size_hint(size: int | torch.SymInt) -> int:
    """Return a size as an integer for planning: for a symbolic size, its hint.

    A size that depends on data has no hint, and that of a jagged dim is no number; overlapc assumes 4096 for them, as
    torch's partitioner does.
    """
    if isinstance(size, int):
        return size
    if size.node.shape_env in _agreed_hints:
        known = {symbol: symbol_hint(size, symbol) for symbol in size.node.expr.free_symbols}
        if None not in known.values():
            return max(0, int(size.node.expr.xreplace(known)))  # medians need not keep what holds for one rank's sizes
    hint = size.node.hint if size.node.has_hint() else None
    return 4096 if hint is None or isinstance(hint, _OF_JAGGED_DIMS) else int(hint)


def symbol_hint(size: torch.SymInt | torch.SymFloat, symbol: Any) -> int | None:
    """Return the value that `symbol` had when the graph of `size` was traced, or that ranks agreed on; None if it is
    known only at run time."""
    shape_env = size.node.shape_env
    if shape_env is None:
        return None
    agreed = _agreed_hints.get(shape_env, {}).get(symbol)
    if agreed is not None:
        return agreed
    known = getattr(shape_env, "backed_var_to_val", None)  # torch 2.13
    if known is None:
        known = shape_env.var_to_val
    value = known.get(symbol)
    return None if value is None or isinstance(value, _OF_JAGGED_DIMS) else int(value)
