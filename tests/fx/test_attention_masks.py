"""Attention masks computed from positions: which are removed, which stay, and what the report says about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint

import overlapc
from overlapc.fx.captured.wrapped import memory_of
from overlapc.fx.masks import attention_masks as rewriting
from overlapc.fx.masks import positions
from overlapc.fx.masks.attention_masks import KEY, drop_masks
from overlapc.report import record
from overlapc.runtime.counters import counted

N = 12  # queries and keys
INFINITY = float("inf")
Mask = Callable[[Tensor], Tensor]


def qkv(heads: int = 4, kv_heads: int = 4, queries: int = N, keys: int = N, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    shapes = ((2, heads, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8))
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


def rewritten(
    fn: Callable[..., Any], *inputs: Any, eager_dropout: bool = False, dynamic: bool | None = None
) -> list[fx.Node]:
    """Return the attention nodes of the graph that Dynamo captures of `fn`, after `drop_masks`."""
    found: list[fx.Node] = []

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        drop_masks(gm, eager_dropout=eager_dropout)
        graphs = [each for each in gm.modules() if isinstance(each, fx.GraphModule)]
        found.extend(node for each in graphs for node in each.graph.nodes if KEY in node.meta.get("custom", {}))
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    torch.testing.assert_close(compiled, fn(*inputs))
    return found


def become(node: fx.Node) -> str:
    if node.kwargs.get("attn_mask") is not None:
        return "masked"
    return "causal" if node.kwargs.get("is_causal") else "full"


def i_and_j(q: Tensor) -> tuple[Tensor, Tensor]:
    positions = torch.arange(q.shape[-2], device=q.device)
    return positions[:, None], positions[None, :]


def by_compare(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return j <= i


def as_hugging_face_does(q: Tensor) -> Tensor:
    n = q.shape[-2]
    i, j = torch.arange(n) + 0, torch.arange(n) + 0
    i, j = i[None, None, :, None], j[None, None, None, :]
    allowed = i.new_ones((), dtype=torch.bool)
    allowed = allowed & (j > i - 4096).to(q.device)
    allowed = allowed & (j <= i).to(q.device)
    return allowed.expand(q.shape[0], -1, n, n)


def by_tril(q: Tensor) -> Tensor:
    n = q.shape[-2]
    return torch.ones(n, n, dtype=torch.bool).tril()


def by_triu_of_infinity(q: Tensor) -> Tensor:
    n = q.shape[-2]
    return torch.triu(torch.full((n, n), -INFINITY), diagonal=1)


def by_masked_fill(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return torch.zeros(1, 1, q.shape[-2], q.shape[-2]).masked_fill(j > i, torch.finfo(torch.float32).min)


def by_where(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return torch.where(i < j, -INFINITY, 0.0)


def inverted_product(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return (1.0 - (j <= i).float()) * torch.finfo(torch.float32).min


def of_two_additive_masks(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return by_triu_of_infinity(q) + torch.where(j > i + 3, -INFINITY, 0.0)


def with_padding_of_ones(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    batch = torch.arange(q.shape[0])[:, None, None, None]
    padding = torch.ones(q.shape[0], q.shape[-2], dtype=torch.long).bool()
    return (j <= i)[None, None] & padding[batch, j[None, None]]


def of_sequences_packed_one_by_one(q: Tensor) -> Tensor:
    """Return the mask by which Hugging Face separates sequences packed into a row, for rows of one sequence."""
    batch, n = q.shape[0], q.shape[-2]
    positions = torch.arange(n)[None].expand(batch, -1)
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    sequence = jumps.cumsum(-1)
    rows, (i, j) = torch.arange(batch)[:, None, None, None], i_and_j(q)
    same = sequence[rows, i[None, None]] == sequence[rows, j[None, None]]
    return (j <= i)[None, None] & same


def by_operators_methods(q: Tensor) -> Tensor:
    """Return a causal mask in the form in which torch 2.11 traces comparisons under vmap."""
    i, j = i_and_j(q)
    return j.__le__(i).__and__(i.__eq__(i))


def transposed(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return (j >= i).transpose(-1, -2)


CAUSAL: list[Mask] = [
    by_compare, as_hugging_face_does, by_tril, by_triu_of_infinity, by_masked_fill, by_where, inverted_product,
    of_two_additive_masks, with_padding_of_ones, transposed, of_sequences_packed_one_by_one, by_operators_methods,
]  # fmt: skip


@pytest.mark.parametrize("mask", CAUSAL, ids=lambda mask: mask.__name__)
def test_a_causal_mask_becomes_causal_attention(mask):
    (node,) = rewritten(lambda q, k, v: attention(q, k, v, attn_mask=mask(q)), *qkv())
    assert become(node) == "causal"


@pytest.mark.parametrize(
    "mask", [by_compare, by_tril, by_triu_of_infinity, of_sequences_packed_one_by_one], ids=lambda mask: mask.__name__
)
def test_a_causal_mask_of_symbolic_length_becomes_causal_attention(mask):
    (node,) = rewritten(lambda q, k, v: attention(q, k, v, attn_mask=mask(q)), *qkv(), dynamic=True)
    assert become(node) == "causal"
    assert not isinstance(node.args[0].meta["example_value"].shape[-2], int)


def test_a_causal_mask_filled_in_place_becomes_causal_attention():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(N, N)
        mask.fill_(-INFINITY)
        mask.triu_(1)
        return attention(q, k, v, attn_mask=mask)

    (node,) = rewritten(attend, *qkv())
    assert become(node) == "causal"


def and_in_place(i: Tensor, j: Tensor) -> Tensor:
    mask = j > i - 4096
    mask &= j <= i
    return mask


def or_in_place(i: Tensor, j: Tensor) -> Tensor:
    mask = j <= i
    mask |= j > i + 4096
    return mask


def times_in_place(i: Tensor, j: Tensor) -> Tensor:
    mask = j > i - 4096
    mask *= j <= i
    return mask


def sum_in_place(i: Tensor, j: Tensor) -> Tensor:
    mask = torch.zeros(N, N)
    mask += torch.where(j > i, -INFINITY, 0.0)
    return mask


def difference_in_place(i: Tensor, j: Tensor) -> Tensor:
    mask = (j <= i).float()
    mask -= 1
    mask *= torch.finfo(torch.float32).max
    return mask


def by_methods_in_place(i: Tensor, j: Tensor) -> Tensor:
    hidden = (j <= i).logical_not_()
    hidden.bitwise_and_(j < i + 4096)
    return torch.zeros(N, N).masked_fill_(hidden, -INFINITY)


@pytest.mark.parametrize(
    "mask",
    [and_in_place, or_in_place, times_in_place, sum_in_place, difference_in_place, by_methods_in_place],
    ids=lambda mask: mask.__name__,
)
def test_a_causal_mask_changed_in_place_becomes_causal_attention(mask):
    (node,) = rewritten(lambda q, k, v: attention(q, k, v, attn_mask=mask(*i_and_j(q))), *qkv())
    assert become(node) == "causal"


@pytest.mark.parametrize(
    "change",
    [
        lambda mask, other: torch._foreach_copy_([mask], [other]),
        lambda mask, other: torch._foreach_zero_([mask]),
        lambda mask, other: torch.nn.functional.relu(mask, inplace=True),
        lambda mask, other: torch.nn.functional.relu(input=mask, inplace=True),
    ],
)
def test_a_change_that_names_its_mask_otherwise_is_seen(change):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = i_and_j(q)
        mask = torch.where(j > i, -INFINITY, 0.0)
        change(mask, torch.where(j < i - 3, -INFINITY, 0.0))
        return attention(q, k, v, attn_mask=mask)

    (node,) = rewritten(attend, *qkv())
    assert become(node) == "masked"


@pytest.mark.parametrize(
    "chosen",
    [
        lambda hidden, x, y: torch.where(hidden, input=x, other=y),
        lambda hidden, x, y: x.where(hidden, y),
        lambda hidden, x, y: x.where(hidden, other=y),
    ],
)
def test_where_takes_its_condition_from_the_right_argument(chosen):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = i_and_j(q)
        masks = torch.zeros(N, N, dtype=torch.bool), torch.ones(N, N, dtype=torch.bool)
        return attention(q, k, v, attn_mask=chosen(j > i, *masks))

    (node,) = rewritten(attend, *qkv())
    assert become(node) == "causal"


def test_a_list_as_index_picks_rows_of_a_mask_and_a_tuple_one_element():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, attn_mask=by_tril(q)[list(reversed(range(N)))])

    (node,) = rewritten(attend, *qkv())
    assert become(node) == "masked"


def test_a_write_is_compared_with_what_lies_in_its_memory_only(monkeypatch):
    class Memory(frozenset):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Memory.compared += 1
            return super().__eq__(other)

        __hash__ = frozenset.__hash__

    def many(x: Tensor) -> Tensor:
        for _ in range(50):
            x = x + torch.zeros(2).add_(1)
        return x

    monkeypatch.setattr(positions, "memory_of", lambda node: Memory(memory_of(node)))
    rewritten(many, torch.ones(2))
    assert Memory.compared < 200


def test_a_mask_is_read_as_it_was_before_a_later_change():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = i_and_j(q)
        mask = j <= i
        first = attention(q, k, v, attn_mask=mask)
        mask |= j > i
        return first + attention(q, k, v, attn_mask=mask)

    first, second = rewritten(attend, *qkv())
    assert (become(first), become(second)) == ("causal", "full")


def window(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return (j <= i) & (j > i - 4)


def window_of_either_side(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return (i - j).abs() <= 4


def strictly_before(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return j < i  # the first row is masked entirely


def by_chunk(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return (j <= i) & (i // 4 == j // 4)


def anti_causal(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return j >= i


def weakly_additive(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return torch.where(j > i, -10.0, 0.0)


def with_a_bias(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return torch.where(j > i, -INFINITY, 1.0)


def by_head(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return (j <= i + torch.arange(q.shape[1])[:, None, None])[None]


def of_the_data(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return (j <= i) | (q[..., :1] > 1e9)


def of_two_sequences_in_a_row(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    positions = torch.arange(q.shape[-2])
    positions = torch.where(positions < 5, positions, positions - 5)
    sequence = (torch.diff(positions, prepend=positions[:1] - 1) != 1).cumsum(-1)
    return (j <= i) & (sequence[i] == sequence[j])


def changed_through_a_view(q: Tensor) -> Tensor:
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    mask[0].fill_(True)
    return mask


@torch.compiler.allow_in_graph
def tril(n: int) -> Tensor:
    """A function that has the name of torch's `tril` and returns something else."""
    return torch.ones(n, n, dtype=torch.bool).triu()


def by_a_function_of_a_known_name(q: Tensor) -> Tensor:
    return tril(N)


def changed_by_an_index(q: Tensor) -> Tensor:
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    mask[0, 3] = True
    return mask


def changed_by_an_operator(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    mask = j <= i
    mask &= j > i - 4
    return mask


def changed_by_an_operators_method(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    mask = j <= i
    mask.__iand__(j > i - 4)
    return mask


def of_other_bits(q: Tensor) -> Tensor:
    i, j = i_and_j(q)
    return torch.where(j > i, -INFINITY, 0.0).view(torch.int32).view(torch.float32) + 0.0


OTHER: list[Mask] = [
    window, window_of_either_side, strictly_before, by_chunk, anti_causal, weakly_additive, with_a_bias, by_head,
    of_the_data, of_two_sequences_in_a_row, changed_through_a_view, changed_by_an_index,
    changed_by_an_operator, changed_by_an_operators_method,
    by_a_function_of_a_known_name, of_other_bits,
]  # fmt: skip


@pytest.mark.parametrize("mask", OTHER, ids=lambda mask: mask.__name__)
def test_any_other_mask_stays(mask):
    inputs = qkv()
    (node,) = rewritten(lambda q, k, v: attention(q, k, v, attn_mask=mask(q)).nan_to_num(), *inputs)
    assert become(node) == "masked"
    assert node.kwargs["attn_mask"].op != "placeholder"
    assert node.meta["custom"][KEY]["why"].startswith("masked: ")


@pytest.mark.parametrize(("queries", "keys", "offset"), [(5, N, 0), (5, N, N - 5), (N, N, 3), (N, 5, 0)])
def test_masks_with_offsets_or_of_unequal_lengths_stay(queries, keys, offset):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(queries)[:, None] + offset, torch.arange(keys)
        return attention(q, k, v, attn_mask=j <= i)

    (node,) = rewritten(attend, *qkv(queries=queries, keys=keys))
    assert become(node) == "masked"


def test_a_mask_of_two_different_symbolic_lengths_stays():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return attention(q, k, v, attn_mask=j <= i)

    (node,) = rewritten(attend, *qkv(queries=7), dynamic=True)
    assert become(node) == "masked"


def test_a_mask_that_is_an_input_stays():
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    (node,) = rewritten(lambda q, k, v, m: attention(q, k, v, attn_mask=m), *qkv(), mask)
    assert become(node) == "masked"
    assert "depends on data" in node.meta["custom"][KEY]["why"]


@pytest.mark.parametrize("mask", [lambda q: (i_and_j(q)[0] >= 0).expand(2, 1, N, N), lambda q: torch.zeros(N, N)])
def test_a_mask_that_is_true_everywhere_is_removed(mask):
    (node,) = rewritten(lambda q, k, v: attention(q, k, v, attn_mask=mask(q)), *qkv())
    assert become(node) == "full"


def test_a_causal_window_as_long_as_the_sequence_becomes_causal_attention():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = i_and_j(q)
        return attention(q, k, v, attn_mask=(j <= i) & (j > i - N) & (i // N == j // N))

    (node,) = rewritten(attend, *qkv())
    assert become(node) == "causal"


@pytest.mark.parametrize(("eager_dropout", "found"), [(False, "causal"), (True, "masked")])
def test_attention_whose_dropout_must_draw_eagers_numbers_keeps_its_mask(eager_dropout, found):
    nodes: list[fx.Node] = []

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        drop_masks(gm, eager_dropout=eager_dropout)
        nodes.extend(node for node in gm.graph.nodes if KEY in node.meta.get("custom", {}))
        return gm

    torch._dynamo.reset()
    attend = torch.compile(lambda q, k, v: attention(q, k, v, attn_mask=by_tril(q), dropout_p=0.5), backend=backend)
    attend(*qkv())
    assert [become(node) for node in nodes] == [found]


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = by_compare(q)
    first = checkpoint(lambda q, k, v: attention(q, k, v, attn_mask=mask), q, k, v, use_reentrant=False)
    return checkpoint(lambda q, k, v: attention(q, k, v, attn_mask=mask), first, k, v, use_reentrant=False)


def test_a_mask_shared_by_checkpointed_layers_is_classified_once(monkeypatch):
    looked_at: list[tuple[Any, ...]] = []
    look = rewriting._classify
    monkeypatch.setattr(rewriting, "_classify", lambda *given: looked_at.append(given) or look(*given))
    assert [become(node) for node in rewritten(checkpointed, *qkv())] == ["causal", "causal"]
    assert len(looked_at) == 1


def repeated(x: Tensor) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, 2, length, width).reshape(batch, 2 * heads, length, width)


@pytest.mark.parametrize(
    ("repeat", "found"),
    [
        (repeated, True),
        (lambda x: x.repeat_interleave(2, dim=1), True),
        (lambda x: x.repeat(1, 2, 1, 1), False),  # heads in another order
        (lambda x: x[:, None].expand(2, 2, 2, N, 8).reshape(2, 4, N, 8), False),
    ],
)
def test_keys_repeated_for_groups_of_heads_are_not_copied(repeat, found):
    q, k, v = qkv(kv_heads=2)
    (node,) = rewritten(lambda q, k, v: attention(q, repeat(k), repeat(v), attn_mask=by_tril(q)), q, k, v)
    assert become(node) == "causal"
    assert bool(node.kwargs.get("enable_gqa")) is found


def changed_after_the_repeat(k: Tensor) -> Tensor:
    keys = repeated(k)
    keys[..., :4] = -keys[..., :4]
    return keys


def of_keys_changed_later(k: Tensor) -> Tensor:
    k = k * 1
    keys = repeated(k)
    k.zero_()
    return keys


def without_gradient(k: Tensor) -> Tensor:
    with torch.no_grad():
        return repeated(k)


@pytest.mark.parametrize("repeat", [changed_after_the_repeat, of_keys_changed_later, without_gradient])
def test_keys_are_copied_if_they_differ_from_their_source(repeat):
    q, k, v = qkv(kv_heads=2)
    (node,) = rewritten(lambda q, k, v: attention(q, repeat(k), repeated(v), attn_mask=by_tril(q)), q, k, v)
    assert become(node) == "causal"
    assert not node.kwargs.get("enable_gqa")


def test_keys_are_copied_if_the_model_restricts_the_attention_kernel():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return attention(q, repeated(k), repeated(v), attn_mask=by_tril(q))

    (node,) = rewritten(attend, *qkv(kv_heads=2))
    assert become(node) == "causal"
    assert not node.kwargs.get("enable_gqa")


def test_keys_are_copied_if_the_mask_stays():
    q, k, v = qkv(kv_heads=2)
    (node,) = rewritten(lambda q, k, v: attention(q, repeated(k), repeated(v), attn_mask=window(q)), q, k, v)
    assert become(node) == "masked"
    assert not node.kwargs.get("enable_gqa")


@pytest.mark.parametrize(("dtype", "dynamic"), [(torch.bfloat16, False), (torch.float32, True)])
def test_a_step_equals_eager_and_the_report_describes_its_masks(dtype, dynamic, cache):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = attention(q, repeated(k), repeated(v), attn_mask=by_compare(q))
        return causal + attention(q, repeated(k), repeated(v), attn_mask=window(q))

    inputs = qkv(kv_heads=2, dtype=dtype)
    attend(*inputs).float().square().sum().backward()
    wanted = [each.grad.clone() for each in inputs]
    expected = attend(*inputs)
    for each in inputs:
        each.grad = None
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"cache_dir": str(cache)}
    result = torch.compile(attend, backend="overlapc", options=options, dynamic=dynamic)(*inputs)
    result.float().square().sum().backward()
    torch.testing.assert_close(result, expected)
    for each, gradient in zip(inputs, wanted, strict=True):
        scale = gradient.abs().max().item()
        torch.testing.assert_close(
            each.grad, gradient, rtol=0, atol=scale * (2e-2 if dtype == torch.bfloat16 else 1e-5)
        )
    assert counted("attention_masks_causal") == counted("attention_masks_kept") == 1
    text = str(overlapc.report())
    assert "its mask is causal" in text
    assert "(-query + key + 3 >= 0 and query - key >= 0)" in text


def test_the_report_lists_a_checkpointed_attention_once():
    record.clear()
    torch.compile(checkpointed, backend="overlapc")(*qkv()).sum().backward()
    (forward,) = (graph for graph in overlapc.report().steps[0].graphs if graph.name.startswith("forward"))
    ((line, count),) = forward.attention.items()
    assert line.startswith("flash attention")
    assert line.endswith("its mask is causal")
    assert count == 2
