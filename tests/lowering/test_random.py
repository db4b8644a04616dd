"""Random numbers: right distributions, the same numbers where they must repeat, and new numbers everywhere else."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from overlapc.fx import random
from overlapc.runtime import philox
from tests.lowering.against_eager import compiled

N = 1 << 16


def test_the_words_are_those_of_philox():
    """Known answers of Random123, the reference implementation."""
    assert philox.words(torch.tensor([0, 0]), torch.arange(4)).tolist() == [
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8,
    ]  # fmt: skip
    ones = philox.words(torch.tensor([-1, -1]), torch.tensor([-4, -3, -2, -1]))  # all bits of counter and key
    assert ones.tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_uniform_numbers_fill_their_interval_evenly(dtype):
    def call():
        return torch.rand(N, dtype=dtype), torch.rand(64, N // 64, dtype=dtype)

    torch.manual_seed(0)
    for found in compiled(call)():
        assert found.min() >= 0
        assert found.max() < 1
        counts = torch.histc(found.double().flatten(), 32, 0, 1)
        chi_squared = ((counts - N / 32) ** 2 / (N / 32)).sum()
        assert chi_squared < 70  # 31 degrees of freedom: exceeded with a probability below 1 in 10,000
        neighbours = torch.corrcoef(torch.stack((found.double().flatten()[:-1], found.double().flatten()[1:])))[0, 1]
        assert neighbours.abs() < 5 / math.sqrt(N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_have_the_normal_distribution(dtype):
    torch.manual_seed(0)
    found = compiled(lambda: torch.randn(N, dtype=dtype))().double()
    assert found.mean().abs() < 5 / math.sqrt(N)
    assert (found.var() - 1).abs() < 5 * math.sqrt(2 / N)
    assert ((found**4).mean() - 3).abs() < 5 * math.sqrt(96 / N)
    below = torch.tensor([(found < limit).double().mean() for limit in (-2.0, -1.0, 0.0, 1.0, 2.0)])
    torch.testing.assert_close(below, torch.special.ndtr(torch.tensor([-2.0, -1, 0, 1, 2])).double(), atol=0.01, rtol=0)


def test_integers_cover_their_range():
    torch.manual_seed(0)
    small, large = compiled(lambda: (torch.randint(-3, 14, (N,)), torch.randint(2**50, (N,))))()
    counts = torch.bincount(small + 3, minlength=17)
    assert len(counts) == 17
    assert ((counts - N / 17) ** 2 / (N / 17)).sum() < 50
    assert large.min() >= 0
    assert 2**50 * 0.99 < large.max() < 2**50
    assert (large % 2).double().mean().sub(0.5).abs() < 0.02


def test_integers_cover_all_64_bits():
    torch.manual_seed(0)
    for found in compiled(
        lambda: (torch.randint(-(2**63), 2**63 - 1, (N,)), torch.randint(-(2**62), 2**63 - 1, (N,)))
    )():
        assert len(found.unique()) == N
        quarters = torch.bincount((found >> 62) + 2, minlength=4) / N
        shares = (0.25, 0.25, 0.25, 0.25) if quarters[0] else (0, 0.5, 0.25, 0.25)  # the smallest are twice as likely
        torch.testing.assert_close(quarters, torch.tensor(shares), atol=0.01, rtol=0)
        assert (found & 1).double().mean().sub(0.5).abs() < 0.02


@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_and_torchs_ops_make_the_same_integers(dynamic):
    def call(seed, low, high):
        return random.ops.integers(seed, low, high, [N], [1], torch.int64)

    seed, step = torch.tensor([2**60 + 7, -5]), compiled(call, dynamic)
    for low, high in (
        (-3, 14),
        (0, 2**63 - 1),
        (-(2**62), 2**62),
        (-(2**63), 2**63 - 1),
        (-(2**63), 0),
        (-7, 2**63 - 2),
    ):
        assert torch.equal(step(seed, low, high), call(seed, low, high)), (low, high)


def test_other_distributions_have_their_moments_and_ranges():
    def call(x, p):
        return torch.bernoulli(p), x.clone().uniform_(-2, 3), x.clone().normal_(1, 2), x.clone().exponential_(4), \
            torch.bernoulli(x, 0.2)  # fmt: skip

    torch.manual_seed(0)
    p = torch.linspace(0, 1, N)
    coins, flat, bell, waits, fifths = compiled(call)(torch.empty(N), p)
    assert (coins - p).mean().abs() < 0.01
    assert coins[0] == 0
    assert -2 <= flat.min() < -1.99
    assert 2.99 < flat.max() < 3
    assert (bell.mean() - 1).abs() < 0.05
    assert (bell.std() - 2).abs() < 0.05
    assert waits.min() >= 0
    assert (waits.mean() - 0.25).abs() < 0.01
    assert (fifths.mean() - 0.2).abs() < 0.01


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda x: torch.bernoulli(x), "Expected p_in >= 0 && p_in <= 1"),
        (lambda x: torch.bernoulli(-x), "Expected p_in >= 0 && p_in <= 1"),
        (lambda x: torch.bernoulli(x * math.nan), "Expected p_in >= 0 && p_in <= 1"),
        (lambda x: x.clone().bernoulli_(x.max()), "Expected p_in >= 0 && p_in <= 1"),
        (lambda x: x.clone().bernoulli_(2.0), r"expects p to be in \[0, 1\]"),
        (lambda x: x.clone().uniform_(2, 1), "found from=2 > to=1"),
        (lambda x: x.clone().uniform_(-3e38, 3e38), "expects to-from <="),
        (lambda x: torch.randint(0, 257, (8,), dtype=torch.uint8), "to - 1 is out of bounds"),
        (lambda x: torch.randint(-1, 8, (8,), dtype=torch.uint8), "from is out of bounds"),
    ],
)
def test_arguments_that_describe_no_distribution_are_an_error_as_in_eager(draw, message):
    for call in (draw, compiled(draw)):
        with pytest.raises((RuntimeError, IndexError), match=message):
            call(torch.tensor([0.5, 3.0]))


def test_runs_draw_different_numbers_and_a_seed_repeats_them():
    def call(x):
        return torch.rand_like(x), torch.rand_like(x), torch.randn_like(x)

    step = compiled(call)
    x = torch.empty(5, 7)
    torch.manual_seed(5)
    first, second = step(x), step(x)
    torch.manual_seed(5)
    again = step(x)
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, c)
        assert (a != b).all()
    assert (first[0] != first[1]).all()


def test_numbers_do_not_depend_on_the_layout_or_on_options():
    def call(x):
        return torch.rand_like(x) + x

    x = torch.zeros(6, 4)
    results = []
    for given, options in ((x, {}), (x.t().contiguous().t(), {}), (x, {"native": False}), (x, {"fusion": False})):
        torch.manual_seed(9)
        results.append(compiled(call, **options)(given))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_random_numbers_are_computed_in_the_kernels_that_use_them(cache):
    counters.clear()
    options = {"warm_start": True, "cache_dir": str(cache)}
    compiled(lambda x: (F.dropout(x.exp(), 0.5) * 2).sin(), **options)(torch.randn(32, 32))
    assert (counters["overlapc"]["kernels"], counters["overlapc"]["externs"]) == (1, 1)
    assert not counters["overlapc"]["fallbacks"]
    assert not [name for name in counters["overlapc"] if "not cached" in name]  # the next process starts warm


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_dropout_keeps_its_mask_for_backward(p):
    x = torch.randn(200, 50).requires_grad_()
    y = compiled(lambda x: F.dropout(x, p))(x)
    y.sum().backward()
    kept = y != 0
    assert (kept.double().mean() - (1 - p)).abs() < 0.02
    scale = 0.0 if p == 1 else 1 / (1 - p)
    torch.testing.assert_close(y, torch.where(kept, x * scale, 0.0))
    torch.testing.assert_close(x.grad, kept * scale)


def test_a_graph_may_begin_with_random_numbers():
    def function(x):
        return F.dropout(F.dropout(x, 0.25), 0.5) * torch.rand(64) * torch.randn(64)

    x = torch.ones(64, requires_grad=True)
    result = compiled(function)(x)
    result.sum().backward()
    torch.testing.assert_close(x.grad, result.detach())


def test_a_checkpoint_computes_the_same_mask_again():
    def block(x: Tensor) -> Tensor:
        return F.dropout((x * 2).sin(), 0.5).cos()

    def call(x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(block, x, use_reentrant=False)
        return x

    x = torch.randn(300, 40).requires_grad_()
    step = compiled(call)
    torch.manual_seed(4)
    y = step(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    saved = compiled(lambda x: block(block(block(x))))  # without a checkpoint, masks are saved for backward
    torch.manual_seed(4)
    z = saved(x)
    torch.testing.assert_close(z, y)
    # Another mask would change gradients by about 1; the tolerance allows for other rounding in other fused kernels.
    torch.testing.assert_close(torch.autograd.grad(z.sum(), x)[0], grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "no input with gradients"])
def test_a_checkpoint_may_draw_numbers_without_backward(grad):
    def block(x: Tensor) -> Tensor:
        return F.dropout(x + 1, 0.5)

    x = torch.zeros(64, 64)
    torch._dynamo.reset()
    step = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), backend="overlapc", fullgraph=True)
    with torch.set_grad_enabled(grad):
        dropped = step(x)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


def test_fallback_random_draws_what_eager_draws():
    def call(x):
        chances = x.sigmoid(), x.double().sigmoid()
        return F.dropout(x, 0.3), torch.rand_like(x), torch.randn(7), *map(torch.bernoulli, chances), torch.randn(7)

    x = torch.randn(40, 3)
    torch.manual_seed(2)
    expected = call(x)
    torch.manual_seed(2)
    torch.testing.assert_close(compiled(call, fallback_random=True)(x), expected, rtol=0, atol=0)


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.rand(5)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        torch.rand(3)
        return g + torch.rand_like(g)


def unread_draws(x: Tensor) -> list[Tensor]:
    torch.rand_like(x)
    torch.randn(7).mul(2)
    F.dropout(x, 0.3)
    F.scaled_dot_product_attention(*[x[None, None]] * 3)
    return [DrawsInBackward.apply(x) * torch.rand(3), torch.randn(3)]


def unread_draws_in_a_checkpoint(x: Tensor) -> list[Tensor]:
    def block(y: Tensor) -> Tensor:
        torch.rand(9)
        z = F.dropout(y, 0.5)
        torch.rand_like(y)
        return z.square()

    return [checkpoint(block, x, use_reentrant=False), torch.rand(3)]


@pytest.mark.parametrize(
    ("function", "trained"),
    [(function, trained) for function in (unread_draws, unread_draws_in_a_checkpoint) for trained in (False, True)],
)
def test_fallback_random_keeps_draws_that_nothing_reads(function, trained):
    """Else later draws (in this graph, after it, and in backward) would differ from eager's."""

    def run(call):
        torch.manual_seed(0)
        x = torch.ones(4, 3, requires_grad=trained)
        results = call(x)
        results.append(torch.rand(2))
        if trained:
            results.append(torch.autograd.grad(results[0].sum(), x)[0])
        return [*results, torch.rand(2)]

    torch.testing.assert_close(run(compiled(function, fallback_random=True)), run(function))


def test_random_numbers_of_symbolic_sizes_repeat_with_their_seed():
    step = compiled(lambda x: torch.rand_like(x) + torch.zeros(x.shape[0], 3).uniform_(), dynamic=True)
    for rows in (4, 9):
        torch.manual_seed(1)
        found = step(torch.empty(rows, 3))
        assert ((found > 0) & (found < 2)).all()
        torch.manual_seed(1)
        assert torch.equal(step(torch.empty(rows, 3)), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exponential_numbers_are_never_zero(monkeypatch, dtype):
    """Else Gumbel noise, their logarithm, would be infinite once in 2^24 numbers, and a softmax over it NaN."""
    monkeypatch.setattr(random, "_uniform_like", lambda x, dtype: torch.zeros_like(x, dtype=dtype))
    assert (random.exponential(torch.empty(4, dtype=dtype)) > 0).all()
