"""Run eager with other rounding: how far results move shows how precisely eager determines them, and where they jump.

Under `Noise` each rounded floating-point result is changed by up to a few units in the last place, depending on a hash
of its bits. Equal values stay equal (a maximum equals the element it came from), and exact values stay exact (copies,
integers, zeros), so only what depends on rounding can change. Ops that eager computes less precisely than their dtype
allows are corrected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from overlapc.fx.versions.sharding import in_backward

aten = torch.ops.aten
# Intermediate values of these ops cancel (gelu far below 0 is x times a difference near 0), so each step is rounded.
_CANCEL = [aten.gelu, aten.gelu_backward, aten.silu_backward, aten.mish_backward]
_CANCEL += [aten.logaddexp, aten.logaddexp2, aten.upsample_bilinear2d]
# Eager's kernels of these ops use 1/6 in float32, whatever the dtype of their argument.
_IMPRECISE = [aten.hardsigmoid, aten.hardsigmoid_backward, aten.hardswish, aten.hardswish_backward]
_IN_STEPS = get_decompositions(_CANCEL + _IMPRECISE)
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
_SUMS += (aten.nansum.default, aten.cumsum.default)
# Ops that move or select values without computing new ones; random numbers are the same in every run.
_MOVES = frozenset(
    """
    amax amin max min maximum minimum fmax fmin sort topk kthvalue median mode cummax cummin clone copy gather
    index index_select where masked_fill masked_select cat stack constant_pad_nd roll flip relu abs neg sign
    aminmax max_pool2d_with_indices clamp clamp_min clamp_max rand randn rand_like randn_like bernoulli
    native_dropout uniform normal randint randperm fill zero full zeros ones empty empty_like zeros_like ones_like
    full_like arange new_zeros new_ones new_full new_empty new_empty_strided empty_strided scalar_tensor
    lift_fresh lift_fresh_copy detach index_fill tril triu select_backward slice_backward select_scatter
    slice_scatter diagonal_scatter as_strided_scatter diagonal_backward take put ceil floor round trunc isnan
    nan_to_num repeat argmax argmin
    """.split()
)


def jolted(x: Tensor, seed: int, units: int) -> Tensor:
    """Return `x` with each element changed by up to `units` units in the last place; zeros and infinities unchanged."""
    kind = _BITS.get(x.dtype)
    if kind is None or not x.numel():
        return x
    bits = x.contiguous().view(kind)
    mixed = bits.long() + seed * 7919
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39
    mixed = (mixed ^ (mixed >> 15)) & 0xFFFF
    step = mixed % (2 * units + 1) - units
    moved = (bits + step.to(kind)).view(x.dtype).reshape(x.shape)
    usable = (x != 0) & moved.isfinite() & x.isfinite() & (moved.sign() == x.sign())
    return torch.where(usable, moved, x)


class Noise(TorchDispatchMode):
    """A dispatch mode in which every op that rounds rounds slightly differently, depending on `seed`."""

    def __init__(self, seed: int, units: int = 1) -> None:
        super().__init__()
        self.seed, self.units = seed, units
        self.largest = WeakIdKeyDictionary()  # of sums of gradients: the largest magnitude of their terms

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._efficientzerotensor.default:
            func = aten.zeros.default  # because under a mode torch's `mul.Scalar` reads the missing memory
        if func is aten.bernoulli.default:  # a probability of 1 may have become larger, which CUDA stops at
            args = (args[0].clamp(0, 1), *args[1:])
        if func is aten.topk.default and self.seed % 2:
            return _topk_of_first(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if func.is_view or (name in _MOVES and not _casts(name, args, kwargs)):
            return func(*args, **kwargs)
        if not any(_is_float(x) for x in tree_flatten((args, kwargs))[0]):
            return func(*args, **kwargs)
        if func in _IN_STEPS:
            with self:
                return _IN_STEPS[func](*args, **kwargs)
        if func in (aten.add.Tensor, aten.add_.Tensor) and in_backward() and all(map(_is_float, args[:2])):
            return self._sum_of_gradients(func, name, args, kwargs)
        return self._rounded(func, name, args, kwargs)

    def _sum_of_gradients(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        """The sum of two, moved by a unit of its largest term if one of the two is a sum itself."""
        known = [self.largest.get(x) for x in args[:2]]
        largest = torch.maximum(*(x.abs() if found is None else found for x, found in zip(args, known, strict=True)))
        out = self._rounded(func, name, args, kwargs)
        if any(found is not None for found in known):
            moved = out + (jolted(largest, self.seed, self.units) - largest)
            out = out.copy_(moved) if func._schema.is_mutable else moved
        self.largest[out] = largest
        return out

    def _rounded(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        exact = _in_float64(func, args, kwargs)
        if name in ("add", "sub") and isinstance(exact, Tensor):
            exact = _unless_absorbed(exact, name, args, kwargs)
        if func._schema.is_mutable:
            out = func(*args, **kwargs)
            written = [a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info is not None]
            if exact is not None:
                for at, target in enumerate(written):
                    if _is_float(target) and isinstance(args[0], Tensor) and at == 0:
                        target.copy_(self._moved(target, exact))
            return out
        if torch.Tag.pointwise in func.tags or name == "_to_copy":
            out = _mapped(_nearer, func(*args, **kwargs), exact)
        else:  # sums: rounding errors are relative to partial sums, which may be larger than the result
            plain = self._in_another_order(func, *args, **kwargs)
            shaken = func(*tree_map(self._jolt, args), **tree_map(self._jolt, kwargs))
            out = _merged(plain, shaken, exact)
        return _mapped(self._moved, out, exact)

    def _in_another_order(self, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """`func(x, ...)`, the terms of a sum in a random order; not in programs being drawn (seed 1), so that these
        stay the same."""
        plain = func(x, *args, **kwargs)
        dim = args[0] if args else None
        if self.seed == 1 or func not in _SUMS or not _is_float(plain) or not x.numel() or not x.ndim:
            return plain
        if func is aten.cumsum.default:
            x = x.movedim(dim, -1)
            rows = x.unsqueeze(-2).expand(*x.shape, x.shape[-1])
            before = torch.ones(rows.shape[-2:], dtype=torch.bool, device=x.device).tril()
            return self._permuted_sum(torch.where(before, rows, 0)).movedim(-1, dim).to(plain.dtype)
        if func is aten.nansum.default:
            x = torch.where(x.isnan(), 0, x)
        dims = [at % x.ndim for at in ([dim] if isinstance(dim, int) else dim or range(x.ndim))]
        rows = x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
        total = self._permuted_sum(rows).reshape(plain.shape)
        return (total / rows.shape[-1] if "mean" in func._schema.name else total).to(plain.dtype)

    def _permuted_sum(self, x: Tensor) -> Tensor:
        """The sum over the last dimension, after a permutation: neighbours are added until one number is left, or, with
        every other seed, one number after the other."""
        generator = torch.Generator().manual_seed(self.seed)
        x = x[..., torch.randperm(x.shape[-1], generator=generator).to(x.device)]
        x = x.float() if x.dtype.itemsize < 4 else x
        if self.seed % 2:
            return sum(x.unbind(-1))
        while x.shape[-1] > 1:
            even, odd = x[..., 0::2], x[..., 1::2]
            x = torch.cat([even[..., : odd.shape[-1]] + odd, even[..., odd.shape[-1] :]], -1)
        return x[..., 0]

    def _jolt(self, x: Any) -> Any:
        return jolted(x, self.seed + 1, self.units) if _is_float(x) else x

    def _moved(self, got: Tensor, exact: Tensor | None) -> Tensor:
        moved = jolted(got, self.seed, self.units)
        return moved if _unknown(exact, got) else torch.where(got.double() == exact, got, moved)


def _topk_of_first(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """`topk` that selects the first of equal elements; torch leaves open which of them is selected."""
    values, places = x.sort(dim=dim, descending=largest, stable=True)
    if x.dim() == 0:
        return values, places
    return values.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()


def _nearer(got: Tensor, exact: Tensor | None) -> Tensor:
    """Return `got`, but `exact` rounded where eager is imprecise: on a CPU, its `erf` of 1e-9 in bfloat16 is 0."""
    if exact is None or _unknown(exact, got):
        return got
    known = torch.finfo(got.dtype)
    off = (got.double() - exact).abs() > 2 * known.eps * exact.abs() + known.smallest_normal
    return torch.where(off, exact.to(got.dtype), got)


def _unless_absorbed(exact: Tensor, name: str, args: Any, kwargs: Any) -> Tensor:
    """Return `exact`, but NaN where a term vanishes in float64, too: 3e38 + 1 - 3e38 is 0 or 1, depending on order."""
    a, b = (x.detach().double() if isinstance(x, Tensor) else torch.tensor(x).double() for x in args[:2])
    b = b * kwargs.get("alpha", 1) * (-1 if name == "sub" else 1)
    return torch.where(((exact == a) & (b != 0)) | ((exact == b) & (a != 0)), torch.nan, exact)


def _casts(name: str, args: Any, kwargs: Any) -> bool:
    return name == "copy" and _is_float(args[1]) and args[0].dtype != args[1].dtype


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _BITS


def _unknown(exact: Any, got: Tensor) -> bool:
    """Whether there is no more precise result that shows which elements were rounded."""
    return not isinstance(exact, Tensor) or exact.shape != got.shape or got.dtype == torch.float64


def _mapped(function: Any, out: Any, exact: Any) -> Any:
    if _is_float(out):
        return function(out, exact if isinstance(exact, Tensor) else None)
    if isinstance(out, (tuple, list)):
        exacts = exact if isinstance(exact, (tuple, list)) and len(exact) == len(out) else [None] * len(out)
        return type(out)(_mapped(function, x, y) for x, y in zip(out, exacts, strict=True))
    return out


def _merged(plain: Any, shaken: Any, exact: Any) -> Any:
    """Return `shaken`, but `plain` where it is exact."""
    if _is_float(plain):
        return shaken if _unknown(exact, plain) else torch.where(plain.double() == exact, plain, shaken)
    if isinstance(plain, (tuple, list)):
        exacts = exact if isinstance(exact, (tuple, list)) and len(exact) == len(plain) else [None] * len(plain)
        return type(plain)(_merged(x, y, z) for x, y, z in zip(plain, shaken, exacts, strict=True))
    return plain


def _in_float64(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of `func` with its arguments in float64, or None if it does not support that."""

    def wide(x: Any) -> Any:
        if _is_float(x):
            return x.double() if x.dtype != torch.float64 else x.clone()
        if isinstance(x, Tensor) and func._schema.is_mutable:
            return x.clone()
        return torch.float64 if isinstance(x, torch.dtype) and x in _BITS else x

    try:
        return func(*tree_map(wide, args), **tree_map(wide, kwargs))
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return None  # there is no float64 kernel: every element counts as rounded
