"""Flex attention as models use it, with masks, score functions and sizes; for the interpreter and for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

Function = Callable[..., Any]


@dataclass(frozen=True)
class FlexCase:
    """One attention; `functions(device, length)` returns (score_mod, mask_mod)."""

    name: str
    functions: Callable[[torch.device, int], tuple[Function | None, Function | None]]
    kv_heads: int = 4  # queries have 4 heads
    uneven: int = 0  # positions of queries beyond whole blocks; keys have twice as many
    widths: tuple[int, int] = (0, 0)  # of queries and values; 0: the default width
    scale: float | None = None
    returns_more: bool = False
    mask_heads: int | None = None
    batch: int = 1
    heads_inside: bool = False  # heads of a position are adjacent in memory, as projections return them
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 20)


def _documents(device: torch.device, length: int) -> tuple[Function | None, Function | None]:
    documents = torch.arange(2 * length, device=device) // (length // 3)
    return None, lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])


def _ranges_of_documents(device: torch.device, length: int) -> tuple[Function | None, Function | None]:
    """A mask that reads a tensor at an index read from another tensor, which the launch checks."""
    documents = torch.arange(2 * length, device=device) // (length // 3)
    begins = torch.arange(8, device=device) * (length // 3)
    return (
        None,
        lambda b, h, q, k: (documents[q] == documents[k]) & (q - begins[documents[q]] >= k - begins[documents[k]]),
    )


def _alibi(device: torch.device, length: int) -> tuple[Function | None, Function | None]:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    return lambda score, b, h, q, k: score + slopes[h] * (k - q), causal


def _bias(device: torch.device, length: int) -> tuple[Function | None, Function | None]:
    bias = torch.linspace(-1, 1, 4 * length * length, device=device).view(4, length, length).to(torch.bfloat16)
    return lambda score, b, h, q, k: score + bias[h][q, k], None


def _only(score: Function | None = None, mask: Function | None = None) -> Callable[..., Any]:
    return lambda device, length: (score, mask)


def _softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2)


def _squared(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score * score.abs().sqrt()  # its gradient is NaN at 0, which is the score of positions behind the end


BOTH = (torch.bfloat16, torch.float32)
CASES = [
    FlexCase("causal", _only(mask=causal), dtypes=(*BOTH, torch.float16)),
    FlexCase("no mask", _only(), uneven=5, returns_more=True),
    FlexCase("window of grouped queries", _only(mask=window), kv_heads=2, dtypes=BOTH),
    FlexCase("documents", _documents, kv_heads=1, batch=2, heads_inside=True, dtypes=BOTH),
    FlexCase("ranges of documents", _ranges_of_documents),
    FlexCase("softcap", _only(_softcap, causal), dtypes=BOTH),
    FlexCase("alibi", _alibi, kv_heads=2),
    FlexCase("bias", _bias),
    FlexCase("rows without scores", _only(_squared, lambda b, h, q, k: q >= k + 20), uneven=3, returns_more=True),
    FlexCase("odd widths", _only(mask=causal), uneven=7, widths=(24, 40), kv_heads=2),
    FlexCase("a negative scale", _only(mask=lambda b, h, q, k: q >= k - torch.tensor(2)), scale=-0.3),
    FlexCase("a mask for each head", _only(mask=lambda b, h, q, k: q >= k + 10 * h), mask_heads=4),
]  # fmt: skip


def errors(
    case: FlexCase, compiled: Callable[[Function], Function], device: str, dtype: torch.dtype, length: int, width: int,
    block: int,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Return for every result and gradient (error of the compiled call, error of eager), relative to float64."""
    torch.manual_seed(0)
    queries, keys = length + case.uneven, length + 2 * case.uneven
    inner, outer = (own or width for own in case.widths)
    shapes = [(4, queries, inner), (case.kv_heads, keys, inner), (case.kv_heads, keys, outer)]
    tensors = [torch.randn(case.batch, *shape, device=device).to(dtype) for shape in shapes]
    if case.heads_inside:
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    score, mask = case.functions(torch.device(device), length)
    blocks: BlockMask | None = None
    if mask is not None:
        blocks = create_block_mask(mask, None, case.mask_heads, queries, keys, device=device, BLOCK_SIZE=block)
    grads = [torch.randn(case.batch, 4, queries, *last, device=device) for last in ((outer,), ())]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        found = flex_attention(
            q, k, v, score_mod=score, block_mask=blocks, scale=case.scale, enable_gqa=case.kv_heads != 4,
            return_aux=AuxRequest(lse=True, max_scores=q.is_cuda) if case.returns_more else None,
        )  # fmt: skip
        if isinstance(found, Tensor):
            return (found,)
        more = (found[1].lse, found[1].max_scores)  # type: ignore[union-attr]
        return (found[0], *(each for each in more if each is not None))  # torch has no maxima on CPUs

    def run(function: Function, kind: torch.dtype) -> dict[str, Tensor]:
        given = [tensor.detach().to(kind).requires_grad_() for tensor in tensors]
        results = function(*given)
        finite = [torch.where(result == -torch.inf, 0.0, result) for result in results[:2]]
        total = sum((result.double() * grad).sum() for result, grad in zip(finite, grads, strict=False))
        assert isinstance(total, Tensor)
        return dict(zip(("out", "lse", "max"), results, strict=False)) | dict(
            zip(("dq", "dk", "dv"), torch.autograd.grad(total, given), strict=True)
        )

    exact, eager, found = run(call, torch.float64), run(call, dtype), run(compiled(call), dtype)
    return {name: (_error(found[name], exact[name]), _error(eager[name], exact[name])) for name in exact}


def _error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.double(), exact.double()
    difference = torch.where(found == exact, 0.0, found - exact)  # 0 for equal infinities
    return float(difference.norm() / torch.where(exact.isinf(), 0.0, exact).norm())


def check(case: FlexCase, found: dict[str, tuple[float, float]], dtype: torch.dtype) -> None:
    """Assert that no error exceeds eager's by more than the order of additions explains."""
    floor = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    wrong = {name: pair for name, pair in found.items() if not pair[0] <= max(1.25 * pair[1], floor)}
    assert not wrong, f"{case.name}, {dtype}: errors (found, eager) {wrong}"
