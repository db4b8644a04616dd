"""Scatters are generated and equal eager; with deterministic algorithms, which exclude atomics, they are calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from tests.lowering.against_eager import compiled, same

aten = torch.ops.aten
SHAPES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
INDEX = torch.tensor([[4, 0, 4], [1, 1, 0], [4, 2, 2], [0, 0, 1]])
ROWS = torch.tensor([3, 0, 3, 1])


def generated(function, *args, dynamic=False, **tolerance):
    """Assert that results equal eager's and that no op falls back to a library call."""
    counters.clear()
    same(function, *args, dynamic=dynamic, **tolerance)
    assert not counters["overlapc"]["fallbacks"], dict(counters["overlapc"])


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(*shape) * 4
    return made > 0 if dtype == torch.bool else made.to(dtype)


@SHAPES
@pytest.mark.parametrize("reduce", ["sum", "amax", "amin"])
def test_elements_with_equal_indices_are_combined(reduce, dynamic):
    """All dtypes in one graph, because compiling a graph takes most of the time."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.bool)

    def call(index, *pairs):
        return [
            torch.scatter_reduce(x, 0, index, source, reduce) for x, source in zip(pairs[::2], pairs[1::2], strict=True)
        ]

    pairs = [numbers(rows, 3, dtype=dtype) for dtype in dtypes for rows in (5, 4)]
    generated(call, INDEX, *pairs, dynamic=dynamic)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extremes_propagate_nan_and_order_infinities_and_zeros(reduce, dtype):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.5, 3e-42, -float("nan")])
    x, source = (part.to(dtype) for part in torch.broadcast_tensors(special[:, None], special[None, :]))
    index = torch.arange(8)[:, None].expand(8, 8).contiguous()
    generated(lambda a, b: torch.scatter_reduce(a, 0, index, b, reduce), x.contiguous(), source.contiguous())
    generated(lambda a, b: torch.scatter_reduce(a, 1, index.t(), b, reduce), x.contiguous(), source.contiguous())


@SHAPES
def test_integers_add_up_exactly(dynamic):
    def call(index, source):
        return torch.zeros(5, dtype=torch.int64).scatter_add(0, index, source)

    generated(call, torch.randint(5, (4000,)), torch.randint(2**40, 2**50, (4000,)), dynamic=dynamic)


@SHAPES
@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, v: torch.scatter(x, 0, i[:, None].expand(4, 3), v),
        lambda x, i, v: torch.scatter(x, 0, i[:, None].expand(4, 2), v),  # the source is larger than the index
        lambda x, i, v: torch.scatter(x, 1, (i[:, None] // 2).expand(4, 2), 7.0),
        lambda x, i, v: torch.scatter_add(x, 0, i[:, None].expand(4, 3), v),
        lambda x, i, v: torch.scatter_add(x.t().contiguous().t(), 0, i[:, None].expand(4, 3), v.t().contiguous().t()),
        lambda x, i, v: torch.scatter_add(x[0], 0, i[:0].view(2, 0), v),
        lambda x, i, v: x.index_add(0, i, v, alpha=2),
        lambda x, i, v: x.index_add(1, i[:2] // 2, v[:, :2].repeat(2, 1)[:6]),
        lambda x, i, v: x.index_copy(0, i.unique(return_inverse=True)[1] * 0 + torch.arange(4), v),
        lambda x, i, v: x.index_fill(0, i, 2.5),
        lambda x, i, v: x.t().index_fill(-1, i - 6, v[0, 0]),  # with eager's layout
        lambda x, i, v: (
            x[::2].index_fill(0, i[:1] % 2, 7).long().index_fill(1, i[:2] % 3, 2).sum(0).index_fill(0, i[1] % 3, 1)
        ),
        lambda x, i, v: x[0, 0].index_fill(0, i[:1] * 0, 2.5),
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        lambda x, i, v: x.index_put((i - 6,), v, accumulate=True),
        lambda x, i, v: x.index_put((i, i % 3), v[:, 0], accumulate=True),
        lambda x, i, v: x.index_put((i[:, None], i[None, :2] % 3), torch.ones(()), accumulate=True),
        lambda x, i, v: aten.index_put(x[None], [None, i], v, True),
        lambda x, i, v: aten.index_put(x[:, None], [i, None, i % 3], v[:, :1], True),
        lambda x, i, v: x.exp().index_add(0, i, v.sin()).tanh().sum(0),
    ],
)
def test_scatters_agree_with_eager(function, dynamic):
    def call(x, i, v):
        return function(x, i, v)

    same(call, numbers(6, 3), ROWS, numbers(4, 3), dynamic=dynamic)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, v: torch.slice_scatter(x, v[:, :2], 0, 0, 6, 2),
        lambda x, v: torch.slice_scatter(x, v[:, :2], 0, 1, 7, 2),
        lambda x, v: torch.slice_scatter(x, v[:2, :2], 0, 3, None, 3),
        lambda x, v: torch.slice_scatter(x, v[:3, :2], 0, 0, 3),
        lambda x, v: torch.slice_scatter(x, v[:3, :2], 0, 4),
        lambda x, v: torch.slice_scatter(x, x.exp(), 0, 0, None),
        lambda x, v: torch.diagonal_scatter(x, v[0, :2], 0),
        lambda x, v: torch.diagonal_scatter(x, v[0, :2], -3),
        lambda x, v: torch.diagonal_scatter(x, v[0, :1], 1),
        lambda x, v: torch.diagonal_scatter(x.t(), v[0, :2], 3),
        lambda x, v: torch.select_scatter(x, v[0, :2], 0, -2),
        lambda x, v: torch.select_scatter(x[0].expand(3, 2), v[:, 0], 1, 0),  # the result's elements share no memory
        lambda x, v: torch.slice_scatter(x[0].expand(3, 2), v[:, :1], 1, 0, 1),
        lambda x, v: torch.diagonal_scatter(x[0].expand(3, 2), v[0, :2]),
    ],
)
def test_scatters_of_slices_and_diagonals_agree_with_eager(function):
    def call(x, v):
        return function(x, v) * 2

    generated(call, numbers(7, 2), numbers(3, 3))


@SHAPES
@pytest.mark.parametrize("words", [7, 100], ids=["few-words", "many-words"])
@pytest.mark.parametrize("padding", [None, 3])
def test_the_gradient_of_an_embedding_is_as_exact_as_eager(words, padding, dynamic):
    """With many words, one token of each word that occurs adds up that word's row; with few, tokens are added into the
    table."""
    tokens = torch.tensor([[3, 0, 3, 6], [1, 3, 0, 0], [2, 2, 2, 3]])
    dtypes = torch.float32, torch.bfloat16, torch.float64
    chosen = [numbers(3, 4, 5, dtype=dtype) for dtype in dtypes]
    eager = [numbers(words, 5, dtype=dtype).requires_grad_() for dtype in dtypes]
    ours, exact = (
        [weight.detach().to(dtype or weight.dtype, copy=True).requires_grad_() for weight in eager]
        for dtype in (None, torch.float64)
    )

    def loss(weights, tokens, chosen):
        found = [
            (F.embedding(tokens, weight, padding) * each).sum() for weight, each in zip(weights, chosen, strict=True)
        ]
        return sum(each.double() for each in found)

    loss(eager, tokens, chosen).backward()
    loss(exact, tokens, [each.double() for each in chosen]).backward()
    counters.clear()
    compiled(loss, dynamic)(ours, tokens, chosen).backward()
    assert not counters["overlapc"]["fallbacks"]
    for weight, theirs, right in zip(ours, eager, exact, strict=True):
        assert weight.grad.dtype == theirs.dtype
        far, allowed = ((each.grad.double() - right.grad).abs().max() for each in (weight, theirs))
        assert far <= allowed, weight.dtype


@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (1, 6), (2, 1, 3)])
@pytest.mark.parametrize("strided", [False, True])
def test_the_gradient_of_an_embedding_of_odd_shapes_is_rounded_once(shape, strided):
    tokens = torch.randint(4, shape)
    grad = numbers(*shape[::-1], 5, dtype=torch.bfloat16).permute(*range(len(shape))[::-1], len(shape))
    grad = grad if strided else grad.contiguous()
    found = compiled(lambda g, t: aten.embedding_dense_backward(g, t, 50, -1, False))(grad, tokens)
    exact = aten.embedding_dense_backward(grad.double(), tokens, 50, -1, False)
    # We round the sum once. Eager rounds after each addition, so its sums of terms that cancel may be far off.
    torch.testing.assert_close(found, exact.bfloat16(), rtol=2**-7, atol=0)


def test_with_deterministic_algorithms_a_scatter_is_a_library_call():
    counters.clear()
    torch.use_deterministic_algorithms(True)
    try:
        same(lambda x, v: x.index_add(0, ROWS, v), numbers(6, 3), numbers(4, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert counters["overlapc"]["fallback index_put"] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.index_add(0, i, torch.ones(2, 3)),
        lambda x, i: x.index_put((i,), torch.ones(3), accumulate=False),
        lambda x, i: torch.scatter(x, 0, i[:, None].expand(2, 3), torch.ones(2, 3)),
    ],
)
def test_a_place_out_of_bounds_is_an_error(function):
    call = compiled(function)
    with pytest.raises(IndexError, match=r"an index is out of bounds for dimension 0 with size 5"):
        call(torch.zeros(5, 3), torch.tensor([1, 5]))
