"""Random ops as functions of a seed, so that they fuse, and give the same numbers when backward recomputes them.

    torch.rand(4) -> uniform(seed(), [4])        and in a whole graph        s0, s1, … = seeds(n), drawn once

The seeds come from torch's generator of the device when the graph runs: each run draws new ones, and
`torch.manual_seed` makes them repeatable. Only the seeds are drawn; a random number depends on its seed and position
alone (`runtime/philox.py`). The seed is saved, so a checkpoint that recomputes forward in backward gets the same
numbers.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import make_contiguous_strides_for
from torch.fx.experimental.symbolic_shapes import guard_or_false

from overlapc.fx.node_writer import described_like
from overlapc.runtime import philox

aten = torch.ops.aten

_library = torch.library.Library("overlapc", "DEF")
_seeded = (torch.Tag.nondeterministic_seeded,)
_library.define("seed(Device device) -> Tensor", tags=_seeded)
_library.define("seeds(int count, Device device) -> Tensor[]", tags=_seeded)
_library.define("uniform(Tensor seed, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor")
_library.define("normal(Tensor seed, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor")
_library.define(
    "integers(Tensor seed, SymInt low, SymInt high, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor"
)
ops = torch.ops.overlapc


def _implement(name: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"overlapc::{name}", fake, lib=_library)


def _draw(count: int, device: torch.device) -> list[Tensor]:
    return [seed.clone() for seed in philox.draw(count, device)]  # results of an op must not share memory


def _laid_out(flat: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    made = torch.empty_strided(size, stride, dtype=flat.dtype, device=flat.device)
    return made.copy_(flat.view(size))


def _like(seed: Tensor, *args: Any) -> Tensor:
    size, stride, dtype = args[-3:]
    return torch.empty_strided(size, stride, dtype=dtype, device=seed.device)


def _uniform(seed: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _laid_out(philox.uniform(seed, math.prod(size), dtype), size, stride)


def _normal(seed: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _laid_out(philox.normal(seed, math.prod(size), dtype), size, stride)


def _integers(
    seed: Tensor, low: int, high: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return _laid_out(philox.integers(seed, math.prod(size), low, high, dtype), size, stride)


def _empty_seeds(count: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(2, dtype=torch.int64, device=device) for _ in range(count)]


_implement("seed", lambda device: _draw(1, device)[0], lambda device: _empty_seeds(1, device)[0])
_implement("seeds", _draw, _empty_seeds)
_implement("uniform", _uniform, _like)
_implement("normal", _normal, _like)
_implement("integers", _integers, _like)


# --- decompositions of torch's random ops into these ops

_FLOATS = frozenset(philox.UNIFORM_BITS)
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_DEVICES = ("cpu", "cuda")


def _uniform_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return ops.uniform(ops.seed(x.device), x.shape, _strides(x), dtype or x.dtype)


def _strides(x: Tensor) -> Sequence[int]:
    return torch.empty_like(x, device="meta").stride()


def _generated(
    dtype: torch.dtype, layout: Any, device: torch.device, pinned: bool | None, known: Collection[torch.dtype]
) -> bool:
    """Whether generated code can make this tensor: a strided one, not pinned, on a known device, of a `known` dtype."""
    return dtype in known and device.type in _DEVICES and layout in (None, torch.strided) and not pinned


def _factory(op: Callable[..., Tensor]) -> Callable[..., Any]:
    def call(
        size: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> Any:
        dtype, device = dtype or torch.get_default_dtype(), torch.device(device or "cpu")
        if not _generated(dtype, layout, device, pin_memory, _FLOATS):
            return NotImplemented
        return op(ops.seed(device), size, make_contiguous_strides_for(tuple(size)), dtype)

    return call


def _factory_like(op: Callable[..., Tensor]) -> Callable[..., Any]:
    def call(
        x: Tensor,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Any:
        dtype, device = dtype or x.dtype, torch.device(device or x.device)
        if not _generated(dtype, layout, device, pin_memory, _FLOATS):
            return NotImplemented
        like = torch.empty_like(x, device="meta", memory_format=memory_format or torch.preserve_format)
        return op(ops.seed(device), x.shape, like.stride(), dtype)

    return call


def randint(
    low: int, high: int, size: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Any:  # fmt: skip
    dtype, device = dtype or torch.int64, torch.device(device or "cpu")
    if not _generated(dtype, layout, device, pin_memory, _INTEGERS):
        return NotImplemented
    held = torch.iinfo(dtype)
    if dtype != torch.int64 and not _in_order(held.min, low, high - 1, held.max):
        return NotImplemented
    return ops.integers(ops.seed(device), low, high, size, make_contiguous_strides_for(tuple(size)), dtype)


def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
    if not _supported(x):
        return NotImplemented
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _uniform_like(x, torch.float32) >= p
    return torch.where(kept, x, 0.0) * (0.0 if p == 1 else 1.0 / (1.0 - p)), kept


def bernoulli(x: Tensor) -> Any:
    if not _supported(x):
        return NotImplemented
    _check_probabilities(x)
    x = x.contiguous()  # as the result is in eager
    return (_uniform_like(x, torch.float64 if x.dtype == torch.float64 else torch.float32) < x).to(x.dtype)


def bernoulli_p(x: Tensor, p: float) -> Any:
    if x.dtype.is_complex or x.device.type not in _DEVICES or not _in_order(0, p, 1):
        return NotImplemented
    return (_uniform_like(x, torch.float32) < p).to(x.dtype)


def bernoulli_tensor(x: Tensor, p: Tensor) -> Any:
    if x.dtype.is_complex or x.device.type not in _DEVICES or not p.dtype.is_floating_point:
        return NotImplemented
    _check_probabilities(p)
    return (_uniform_like(x, torch.float32) < p).to(x.dtype)


def uniform(x: Tensor, low: float = 0.0, high: float = 1.0) -> Any:
    if not _supported(x):
        return NotImplemented
    most = torch.finfo(x.dtype).max
    if not (_in_order(-most, low, high, most) and _in_order(high - low, most)):
        return NotImplemented
    return _uniform_like(x) * (high - low) + low


def normal_functional(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    if not _supported(x):
        return NotImplemented
    return ops.normal(ops.seed(x.device), x.shape, _strides(x), x.dtype) * std + mean


def exponential(x: Tensor, rate: float = 1.0) -> Any:
    if not _supported(x):
        return NotImplemented
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # Never 0, as in eager on a GPU: a uniform number is 0 once in 2^24, and Gumbel noise takes the logarithm of this.
    return (torch.clamp_min(-torch.log1p(-_uniform_like(x, wide)), torch.finfo(wide).eps / 2) / rate).to(x.dtype)


def _in_order(*numbers: float) -> bool:
    """Whether no number is above the next one; for arguments that are not in order, torch's op raises an error."""
    return all(guard_or_false(low <= high) for low, high in itertools.pairwise(numbers))


def _check_probabilities(p: Tensor) -> None:
    """Raise an error at run time, as torch's op does, if an element is no probability, such as NaN."""
    aten._assert_async.msg(((p >= 0) & (p <= 1)).all(), "Expected p_in >= 0 && p_in <= 1 to be true, but got false.")


def _supported(x: Tensor) -> bool:
    return x.dtype in _FLOATS and x.device.type in _DEVICES


def random_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decomposition of each random op."""
    return {
        aten.rand.default: _factory(ops.uniform),
        aten.randn.default: _factory(ops.normal),
        aten.rand_like.default: _factory_like(ops.uniform),
        aten.randn_like.default: _factory_like(ops.normal),
        aten.randint.default: partial(randint, 0),
        aten.randint.low: randint,
        aten.native_dropout.default: native_dropout,
        aten.bernoulli.default: bernoulli,
        aten.bernoulli.p: bernoulli_p,
        aten.bernoulli.Tensor: bernoulli_tensor,
        aten.uniform.default: uniform,
        aten.normal_functional.default: normal_functional,
        aten.exponential.default: exponential,
    }


def draw_once(graph: fx.Graph) -> None:
    """Draw all seeds of a device at once, before the first node of the graph; each seed has memory of its own."""
    drawn: dict[torch.device, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ops.seed.default:
            drawn.setdefault(node.meta["val"].device, []).append(node)
    if not drawn:
        return
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for device, nodes in drawn.items():
        with graph.inserting_before(first):
            seeds = graph.call_function(ops.seeds.default, (len(nodes), device))
            seeds.meta = {**described_like(nodes[0]), "val": [node.meta["val"] for node in nodes]}
            for at, node in enumerate(nodes):
                one = graph.call_function(operator.getitem, (seeds, at))
                one.meta = {**described_like(node), "val": node.meta["val"]}
                node.replace_all_uses_with(one)
    for node in itertools.chain.from_iterable(drawn.values()):  # not before: the first one may be `first`
        graph.erase_node(node)
