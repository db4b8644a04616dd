"""The judge of random programs: which errors it finds, which differences it accepts, and how failing programs are
shrunk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import get_decompositions

from overlapc.errors import ToolchainError
from tests.programs.by_triton import judge_triton
from tests.programs.draw import draw, less_changed
from tests.programs.judge import Verdict, judge
from tests.programs.noise import Noise, jolted
from tests.programs.program import Program
from tests.programs.shrink import shrink
from tests.programs.writes import DefinedWrites, UndefinedWrite

aten = torch.ops.aten
SETUP = (
    "p0 = leaf(numbers(1, (A, B), 'F32'))",
    "x0 = p0 * 1",
    "x1 = numbers(2, (A, B), 'F32')",
)


def program(*body: str, results: tuple[str, ...] = ("v1",)) -> Program:
    return Program(SETUP, body, results)


def verdict_on(made: Program, change: Callable[..., Any]) -> Verdict:
    """Return the verdict on a compiler whose compiled function calls `change(f, *arguments)`."""
    return judge(made, compiler=lambda f, _: lambda *arguments: change(f, *arguments))


def eager(f: Callable[..., Any], *arguments: Tensor) -> Any:
    return f(*arguments)


def test_eager_is_right() -> None:
    for seed in range(3):
        assert judge(draw(seed), compiler=lambda f, _: f).kind == "right"


def test_a_seed_always_gives_the_same_program() -> None:
    assert draw(5) == draw(5)


def test_a_program_that_changes_less_still_fills_what_is_empty() -> None:
    made = program("v1 = torch.empty_like(x0).fill_(1.5)", "v2 = x0.cos().mul_(x1)", results=("v1", "v2"))
    once = less_changed(made)
    assert once.body == ("v1 = torch.empty_like(x0).fill_(1.5)", "v2 = x0.cos()")
    assert less_changed(once).body == once.body


def test_a_drawn_program_prints_as_a_script() -> None:
    compile(draw(0).script("seed 0"), "program.py", "exec")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("error", lambda f, x, y: f(x)),
        ("result", lambda f, x, y: (f(x, y)[0] + 1e-4,)),
        ("result", lambda f, x, y: (torch.where(f(x, y)[0] > 0, f(x, y)[0], torch.nan),)),
        ("layout", lambda f, x, y: (f(x, y)[0].double(),)),
        ("layout", lambda f, x, y: (f(x, y)[0].t().contiguous().t(),)),
        ("layout", lambda f, x, y: (f(x, y)[0].detach(),)),
        ("gradient", lambda f, x, y: (f(x, y)[0] + 0.01 * (x - x.detach()),)),
        ("argument", lambda f, x, y: (f(x, y.add_(1) - 1)[0],)),
    ],
)
def test_each_kind_of_error_is_found(kind: str, change: Callable[..., Any]) -> None:
    made = program("v1 = x0.sin() * x1")
    assert verdict_on(made, eager).kind == "right"
    verdict = verdict_on(made, change)
    assert verdict.kind == kind, verdict.message


def test_a_result_that_no_longer_is_a_view_is_found() -> None:
    made = program("v1 = x1[1:]")
    assert verdict_on(made, lambda f, x, y: (f(x, y)[0].clone(),)).kind == "layout"


def test_a_sum_in_another_order_is_right() -> None:
    made = program("v1 = (x0 * x1).sum(0)")
    assert verdict_on(made, lambda f, x, y: ((x * y).flip(0).sum(0),)).kind == "right"


def test_a_sum_that_is_exact_in_one_order_only_is_right_in_another() -> None:
    """In float32 1.75 + 0.25 - 2 + 2**-24 is 2**-24, and 2**-24 + 1.75 + 0.25 - 2 is 0."""
    made = program(
        "v1 = (x0 * 0)[0, :4] + torch.tensor([1.75, 0.25, -2.0, 2**-24])", "v2 = v1.cumsum(0)", results=("v2",)
    )

    def sequential(f: Callable[..., Any], x: Tensor, y: Tensor) -> tuple[Tensor]:
        terms = (x * 0)[0, :4] + torch.tensor([1.75, 0.25, -2.0, 2**-24])
        last = terms[3] + terms[0] + terms[1] + terms[2]
        return (torch.cat([terms.cumsum(0)[:3], last[None]]),)

    assert not verdict_on(made, sequential).wrong
    assert verdict_on(made, lambda f, x, y: (f(x, y)[0] + 1e-3,)).wrong


def test_a_sum_without_nans_is_right_in_any_order_of_its_terms() -> None:
    row = "torch.tensor([1.75, 0.25, -2.0, 2**-24, float('nan')])"
    made = program(f"v1 = (x0 * 0)[0, :5] + {row}", "v2 = v1.nansum()", results=("v2",))

    def sequential(f: Callable[..., Any], x: Tensor, y: Tensor) -> tuple[Tensor]:
        terms = (x * 0)[0, :4] + torch.tensor([2**-24, 1.75, 0.25, -2.0])
        return (sum(terms.unbind()),)

    assert not verdict_on(made, sequential).wrong
    assert verdict_on(made, lambda f, x, y: (f(x, y)[0] + 1e-3,)).wrong


def test_a_mean_that_is_inexact_only_where_terms_are_added_one_by_one_is_right() -> None:
    row = torch.tensor([12888623, 15039847, 2832983, 4735681, 9276241]) * 2.0**-24
    made = program(f"v1 = (x0 * 0)[0, :5] + torch.tensor({row.tolist()})", "v2 = v1 - v1.mean()", results=("v2",))

    def sequential(f: Callable[..., Any], x: Tensor, y: Tensor) -> tuple[Tensor]:
        terms = (x * 0)[0, :5] + row
        return (terms - sum(terms.unbind()) / 5,)

    assert not verdict_on(made, sequential).wrong
    assert verdict_on(made, lambda f, x, y: (f(x, y)[0] + 1e-6,)).wrong


def test_noise_moves_a_sum_of_gradients_that_is_exact_in_one_order_only() -> None:
    x = torch.ones(3, requires_grad=True)

    def gradient(*factors: float, seed: int) -> Tensor:
        with Noise(seed):
            return torch.autograd.grad(sum(x * factor for factor in factors).sum(), x)[0]

    moved = torch.stack([gradient(2**-24, -2, 0.25, 1.75, seed=seed) for seed in range(8)]) - 2**-24
    assert 0 < moved.abs().max() < 1e-6
    assert torch.equal(gradient(1.75, 2, seed=2), torch.full((3,), 3.75))


def test_cancellation_within_an_op_is_judged_by_its_steps() -> None:
    made = program("v1 = F.gelu(x0 * 0 - 3.4, approximate='tanh')")

    def in_other_steps(f: Callable[..., Any], x: Tensor, y: Tensor) -> tuple[Tensor]:
        z = x * 0 - 3.4
        return (z * 0.5 * (1 + torch.tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)).mul(1 - 6e-8)),)

    assert not verdict_on(made, in_other_steps).wrong
    assert verdict_on(made, lambda f, x, y: (f(x, y)[0] * 1.02,)).wrong


def test_the_sign_of_a_log_sum_that_cancels_to_zero_is_undecidable() -> None:
    made = program("v1 = torch.logaddexp2(x0 * 0 - 1, x1 * 0 - 1).sign()")
    assert verdict_on(made, lambda f, x, y: (x * 0,)).kind in ("right", "undecidable")


def test_an_interpolation_that_cancels_is_judged_by_its_steps() -> None:
    made = program("v1 = F.interpolate(torch.stack([x0, x0 * -3.001], 1)[None], scale_factor=2, mode='bilinear')")

    def in_steps(f: Callable[..., Any], x: Tensor, y: Tensor) -> tuple[Tensor]:
        rule = aten.upsample_bilinear2d.vec
        return (get_decompositions([rule])[rule](torch.stack([x, x * -3.001], 1)[None], None, False, [2.0, 2.0]),)

    assert not verdict_on(made, in_steps).wrong


def test_a_comparison_that_only_rounding_decides_is_undecidable() -> None:
    made = program("v1 = x0.exp().log() > x0")
    assert verdict_on(made, eager).kind == "right"
    assert verdict_on(made, lambda f, x, y: ((x.double().exp().log().float() * (1 + 1e-7)) > x,)).kind == "undecidable"
    assert verdict_on(made, lambda f, x, y: (x > 2 * x,)).kind in ("result", "undecidable")


def test_a_term_absorbed_by_a_huge_one_counts_as_rounded() -> None:
    made = program("v1 = (x0 + 3e38 - 3e38).sin()")
    verdict = verdict_on(made, lambda f, x, y: (x.sin(),))
    assert not verdict.wrong, verdict.message


def test_noise_corrects_ops_that_eager_computes_imprecisely() -> None:
    x = torch.full((16,), 2.0**-30, dtype=torch.bfloat16)
    with Noise(1):
        noisy = x.erf()
    torch.testing.assert_close(noisy.double(), x.double().erf(), rtol=1e-2, atol=0)


def test_noise_keeps_equal_values_equal_and_exact_values_exact() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).repeat(2)
    moved = jolted(x, 1, 1)
    assert torch.equal(moved[:1000], moved[1000:])
    assert 0 < (moved != x).sum() < 2000
    with Noise(1):
        y = x.sin() * x
        assert (y == y.amax()).sum() == 2
        assert torch.equal((x > 0).float() * 2, (x > 0).to(torch.float32) + (x > 0).to(torch.float32))
    assert not torch.equal(y, x.sin() * x)


def test_which_of_equal_elements_topk_takes_is_left_open() -> None:
    made = program("v1 = (x0 - x0.detach()).flatten().topk(2).values")

    def of_first(f: Callable[..., Any], x: Tensor, y: Tensor) -> tuple[Tensor]:
        return ((x - x.detach()).flatten()[:2] * 1,)

    def of_all(f: Callable[..., Any], x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (f(x, y)[0] + (x - x.detach()).sum(),)

    assert not verdict_on(made, of_first).wrong
    assert verdict_on(made, of_all).kind == "gradient"


def test_noise_survives_a_zero_gradient_without_memory() -> None:
    x = torch.randn(6, requires_grad=True)
    with Noise(1):
        (grad,) = torch.autograd.grad(x.deg2rad().sgn().sum(), x)
    assert not grad.any()


def test_the_smallest_failing_program_is_found() -> None:
    made = program(
        "v1 = x0 + 1",
        "v2 = v1.cos()\nv3 = v2 * 2",
        "def f4(v4):\n    v5 = v4.sin()\n    v6 = v5 + 1\n    return v6",
        "v7 = checkpoint(f4, v3, use_reentrant=False)",
        "v8 = v7.exp() + x1",
        results=("v2", "v8", "x1"),
    )

    def judged(candidate: Program, device: str) -> Verdict:
        return Verdict("result" if "sin()" in candidate.code() else "right")

    small = shrink(made, Verdict("result"), judged=judged)
    assert len(small.body) <= 5
    assert "cos" not in small.code()
    assert "exp" not in small.code()


def test_triton_kernels_are_judged_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = program("v1 = (x0 @ x1.t()).sin() + 1")
    assert judge_triton(made).kind == "right"
    monkeypatch.setattr("tests.programs.by_triton.compile_source", refuse)
    assert judge_triton(made).message == "for sm_90: no such instruction"


def refuse(*_: Any) -> None:
    raise ToolchainError("no such instruction")


@pytest.mark.parametrize(
    ("change", "defined"),
    [
        (lambda x: x.as_strided((3, 2), (1, 1)).add_(1), False),
        (lambda x: x.unfold(0, 2, 1).zero_(), False),
        (lambda x: x.as_strided((4,), (2,), 1).add_(x.as_strided((4,), (1,))), False),
        (lambda x: x.unfold(0, 2, 2).zero_(), True),
        (lambda x: x[::2].add_(x[1::2]), True),
        (lambda x: x.add_(x[2] * 1).mul_(x), True),
    ],
)
def test_an_undefined_write_is_not_drawn(change: Callable[[Tensor], Tensor], defined: bool) -> None:
    with contextlib.nullcontext() if defined else pytest.raises(UndefinedWrite), DefinedWrites():
        change(torch.arange(8.0))
