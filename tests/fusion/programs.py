"""Random programs over tensors, and their lowered graphs.

A program is a list of steps that hypothesis can shrink. All numbers stay small multiples of powers of two, so that
every sum is exact in fp32 and results can be compared bit by bit, however the program is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.fx.decompositions import decompositions
from overlapc.ir.ops import LoweredGraph
from overlapc.lowering import lower

Step = tuple[str, int, int, int]


def trace(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """Return the graph of `function`, functionalized."""

    def run(*arguments: Any) -> list[Any]:
        result = function(*arguments)
        return result if isinstance(result, list) else [result]

    traced = make_fx(functionalize(run), decomposition_table=decompositions(), tracing_mode="fake")(*inputs)
    traced.graph.eliminate_dead_code()
    return traced


def capture(function: Callable[..., Any], *inputs: Any) -> LoweredGraph:
    """Return the loop IR of `function`, functionalized, with generated kernels on every device."""
    return lower(trace(function, *inputs), "graph")


def inputs() -> list[Tensor]:
    """Return new arguments for a program: tensors of three dtypes, one of them transposed in memory."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    return [numbers(4, 8), numbers(8, 4).t(), numbers(8), numbers(2, 4, 8), numbers(4, 8).long(), numbers(4, 8) > 0]


def small(x: Tensor) -> Tensor:
    """Clamp numbers to a range in which their sums are exact."""
    return x.clamp(-8, 8)


def number(x: Tensor) -> Tensor:
    """Return the tensor as fp32."""
    return x.float() if x.dtype != torch.float32 else x


def fitting(x: Tensor, pool: Sequence[Tensor], at: int) -> Tensor:
    """Return a tensor of the pool that broadcasts to the shape of `x`, or `x` itself if there is none."""
    for shift in range(len(pool)):
        other = pool[(at + shift) % len(pool)]
        if other.ndim <= x.ndim and all(
            a in (1, b) for a, b in zip(reversed(other.shape), reversed(x.shape), strict=False)
        ):
            return number(other)
    return number(x)


def _mutate_part(x: Tensor, b: int, pool: Sequence[Tensor], at: int) -> Tensor:
    y = number(x).clone()
    part = y[: max(1, y.shape[0] // 2)] if y.ndim else y
    part.add_(1)
    if y.ndim:
        y[-1:].mul_(2)
    return small(y)


def _into_input(x: Tensor, b: int, pool: Sequence[Tensor], at: int) -> Tensor:
    target = pool[b % 4]  # one of the fp32 arguments
    target.copy_(small(fitting(target, pool, at)))
    return target * 2


def _rows(x: Tensor, b: int, pool: Sequence[Tensor], at: int) -> Tensor:
    table = number(pool[0])
    return F.embedding(x.long().abs() % table.shape[0], table) if x.ndim < 3 else x


def _places(x: Tensor, dim: int, factor: int) -> Tensor:
    """Return for every element of `x` an index into `dim`; some indices occur more than once, others never."""
    return torch.arange(x.numel()).reshape(x.shape) * factor % x.shape[dim]


def _gathered(x: Tensor, b: int, pool: Sequence[Tensor], at: int) -> Tensor:
    return x.gather(b % x.ndim, _places(x, b % x.ndim, at + 1)) if x.ndim else x


def _scattered(x: Tensor, b: int, pool: Sequence[Tensor], at: int) -> Tensor:
    if not x.ndim:
        return x
    into, where, added = number(x), _places(x, b % x.ndim, at), fitting(x, pool, at).expand(x.shape)
    if b % 2:
        return into.scatter_reduce(b % x.ndim, where, added, "amax")
    return small(into.scatter_add(b % x.ndim, where, added))


def _scanned(x: Tensor, b: int, pool: Sequence[Tensor], at: int) -> Tensor:
    if not x.ndim:
        return x
    dim = at % x.ndim
    return small(number(x).cumsum(dim)) if b % 3 == 0 else torch.cummax(number(x), dim)[b % 3 - 1]


def _over_every_second(x: Tensor, b: int, pool: Sequence[Tensor], at: int) -> Tensor:
    y = number(x).clone()
    if y.ndim:
        y[..., b % 2 :: 2] = 1
    return y


STEPS: dict[str, Callable[[Tensor, int, Sequence[Tensor], int], Tensor]] = {
    "add": lambda x, b, pool, at: small(number(x) + fitting(x, pool, at)),
    "mul": lambda x, b, pool, at: small(number(x) * fitting(x, pool, at)),
    "maximum": lambda x, b, pool, at: torch.maximum(number(x), fitting(x, pool, at)),
    "where": lambda x, b, pool, at: torch.where(number(x) > 0, fitting(x, pool, at), number(x)),
    "neg": lambda x, b, pool, at: -number(x),
    "long": lambda x, b, pool, at: x.long() + 1,
    "bool": lambda x, b, pool, at: x > 0,
    "half": lambda x, b, pool, at: x.bfloat16(),
    "double": lambda x, b, pool, at: x.double(),
    "sum": lambda x, b, pool, at: small(number(x).sum(b % x.ndim, keepdim=b % 2 == 0)) if x.ndim else number(x),
    "amax": lambda x, b, pool, at: number(x).amax(b % x.ndim) if x.ndim else number(x),
    "total": lambda x, b, pool, at: small(number(x).sum()),
    "centred": lambda x, b, pool, at: small(number(x) - number(x).amax(-1, keepdim=True)) if x.ndim else number(x),
    "product": lambda x, b, pool, at: small(number(x) @ number(x).t()) if x.ndim == 2 else x,
    "transpose": lambda x, b, pool, at: x.transpose(0, -1) if x.ndim else x,
    "flatten": lambda x, b, pool, at: x.reshape(-1),
    "fold": lambda x, b, pool, at: x.reshape(2, -1) if x.numel() % 2 == 0 else x,
    "slice": lambda x, b, pool, at: x[: max(1, x.shape[0] // 2)] if x.ndim else x,
    "step": lambda x, b, pool, at: x[..., ::2] if x.ndim else x,
    "select": lambda x, b, pool, at: x[b % x.shape[0]] if x.ndim else x,
    "expand": lambda x, b, pool, at: x.unsqueeze(0).expand(2, *x.shape) if x.ndim < 3 else x,
    "cat": lambda x, b, pool, at: torch.cat((x, -number(x)), b % x.ndim) if x.ndim and x.numel() < 256 else x,
    "pad": lambda x, b, pool, at: F.pad(number(x), (1, 2), value=1.0) if x.ndim and x.shape[-1] < 16 else x,
    "contiguous": lambda x, b, pool, at: x.contiguous(),
    "rows": _rows,
    "gather": _gathered,
    "scatter": _scattered,
    "scan": _scanned,
    "remainder": lambda x, b, pool, at: torch.remainder(x.long(), b - 4 or 3),
    "floor": lambda x, b, pool, at: x.long() // (b - 4 or 3),
    "shift": lambda x, b, pool, at: (x.long() << b % 3) >> 1,
    "byte": lambda x, b, pool, at: x.long().to(torch.uint8) * 3 + (at - 9),
    "argmax": lambda x, b, pool, at: number(x).argmax(b % x.ndim, keepdim=at % 2 == 0) if x.ndim else x,
    "any": lambda x, b, pool, at: (number(x) > 1).any(b % x.ndim) if x.ndim else x,
    "flip": lambda x, b, pool, at: x.flip(b % x.ndim) if x.ndim else x,
    "roll": lambda x, b, pool, at: x.roll(at - 3, b % x.ndim) if x.ndim else x,
    "triangle": lambda x, b, pool, at: x.tril(b - 3) if x.ndim > 1 else x,
    "windows": lambda x, b, pool, at: x.unfold(-1, min(2, x.shape[-1]), 1) if 0 < x.ndim < 3 else x,
    "strided": lambda x, b, pool, at: x.contiguous().as_strided((2, x.numel() // 2), (1, 2)) if x.numel() > 3 else x,
    "every second": _over_every_second,
    "mutate part": _mutate_part,
    "into input": _into_input,
}


def steps(least: int = 5, most: int = 40) -> st.SearchStrategy[list[Step]]:
    """Draw programs of `least` to `most` steps."""
    one = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 50), st.integers(0, 7), st.integers(0, 50))
    return st.lists(one, min_size=least, max_size=most)


def program(recipe: Sequence[Step]) -> Callable[..., list[Tensor]]:
    """Return the function that runs a list of steps and returns its last four results."""

    def run(*arguments: Tensor) -> list[Tensor]:
        pool = list(arguments)
        for name, a, b, at in recipe:
            pool.append(STEPS[name](pool[-1 - a % min(len(pool), 12)], b, pool, at))
        return pool[len(arguments) :][-4:]

    return run
