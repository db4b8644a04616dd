"""Measures which matrix products are faster as generated kernels, once for each shape on this device; cached on disk.

A product is timed by itself, under load as in a training step: the library's call, and our kernel with each of its
tilings. The time that fusing its epilogue would save is not counted: measured on an H200, fused epilogues of large
products cost more than a separate kernel (docs/BENCHMARKS.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.codegen.triton import TritonGenerator, products
from overlapc.codegen.triton.tiling import Tiling
from overlapc.estimators.measured import Call, Times, measure
from overlapc.ir.body import Body
from overlapc.ir.ops import Loops
from overlapc.lowering import Target, lower
from overlapc.lowering.product import Product

NEVER = 1e18  # ns of a product that could not be measured: finite, because ranks agree on medians
_OURS = "overlapc product, form 1"  # part of cache keys: a change makes all products be measured again


class ProductTimes:
    """Measures products, in ns, as library calls and as our kernels. The fastest tiling becomes the default for the
    product from then on."""

    def __init__(self, device: torch.device, cache_dir: Path) -> None:
        self.device = device
        self.cache_dir = cache_dir
        self.times = Times(cache_dir, device)

    def __call__(self, wanted: Iterable[Product]) -> dict[str, float]:
        """Return the times `"<product> library"` and `"<product> ours"` of each product; NEVER if it cannot be
        measured."""
        found: dict[str, float] = {}
        with _disable_current_modes():  # torch compiles under a fake tensor mode
            for product in dict.fromkeys(wanted):
                key = f"{product} library"
                found[key] = self._time(key, partial(self._library, product))
                found[f"{product} ours"] = self._ours(product)
        self.times.store()
        return found

    def _time(self, key: str, make: Callable[[], Callable[[], object]]) -> float:
        ns = self.times.get(key)
        if ns is None:
            ns = measure(Call(key, self.device, make))
            if ns is None:
                return NEVER
            self.times.put(key, ns)
        return ns

    def _library(self, product: Product) -> Callable[[], object]:
        left, right, out = self._tensors(product)
        return partial(_multiply(product), left, right, out=out)

    def _ours(self, product: Product) -> float:
        body, buffers = self._lowered(product)
        tilings = products.candidates(body, {})
        times = {
            tiling: self._time(
                f"{_OURS}: {product} {products.tile_name(tiling)}",
                partial(self._kernel, product, body, buffers, tiling),
            )
            for tiling in tilings
        }
        best = min(tilings, key=times.__getitem__)
        products.prefer(body, {}, best)
        return times[best]

    def _lowered(self, product: Product) -> tuple[Body, tuple[str, ...]]:
        """Return the kernel's body and its buffers: both factors and the result."""
        multiply = _multiply(product)
        with FakeTensorMode() as mode:  # a mode of its own: that of the graph being compiled would make sizes symbolic
            fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in self._tensors(product)[:2]]
        gm = make_fx(lambda a, b: (multiply(a, b),))(*fakes)
        graph = lower(gm, "trial", target=Target(native_product=lambda product: True))
        (op,) = graph.ops
        assert isinstance(op, Loops)
        return op.body, (*graph.inputs, op.outputs[0].buffer)

    def _kernel(self, product: Product, body: Body, buffers: tuple[str, ...], tiling: Tiling) -> Callable[[], object]:
        generator = TritonGenerator()
        source = generator.generate(body, "product", tiling=tiling)
        launcher = generator.load([source], self.cache_dir)[source.name]
        given = dict(zip(buffers, self._tensors(product), strict=True))
        return partial(launcher, *(given[name] for name in source.buffers))

    def _tensors(self, product: Product) -> tuple[Tensor, Tensor, Tensor]:
        """Allocate both factors, filled with random numbers, and the result."""
        sizes = ((product.rows, product.length), (product.length, product.columns))
        left, right = (self._factor(product, *size, *step) for size, step in zip(sizes, product.strides, strict=True))
        shape = (*_batch(product), product.rows, product.columns)
        return left, right, torch.empty(shape, dtype=product.dtype, device=self.device)

    def _factor(self, product: Product, rows: int, columns: int, row_step: int, column_step: int) -> Tensor:
        span = (rows - 1) * row_step + (columns - 1) * column_step + 1
        memory = torch.zeros(product.batch * span, dtype=product.dtype, device=self.device)
        memory.normal_(generator=torch.Generator(self.device).manual_seed(0))  # the user's generators are not advanced
        steps = (span,) * len(_batch(product))
        return memory.as_strided((*_batch(product), rows, columns), (*steps, row_step, column_step))


def _batch(product: Product) -> tuple[int, ...]:
    return (product.batch,) if product.batch > 1 else ()


def _multiply(product: Product) -> Callable[..., Tensor]:
    return torch.bmm if product.batch > 1 else torch.mm


def choice(times: Mapping[str, float]) -> Callable[[Product], bool]:
    """Return a predicate that chooses products to generate kernels for, by the agreed times of `ProductTimes`."""
    return lambda product: times[f"{product} ours"] < times[f"{product} library"]
