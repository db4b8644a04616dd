"""Element-wise kernels are inlined into readers through any view if that moves no more bytes; never past a write."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from overlapc.fusion import fuse_ops
from overlapc.fusion.inline import inline
from overlapc.fusion.work import work_of
from overlapc.ir.ops import IROp, Loops
from tests.fusion.programs import capture
from tests.fusion.small_graphs import extern, graph, names, overwrite, pointwise
from tests.ir.interpret import run_ops

A = torch.arange(24.0).reshape(4, 6) - 7


def kernels(function, *inputs: torch.Tensor) -> int:
    """Return the number of kernels after inlining; the result is compared with eager."""
    made = capture(function, *inputs)
    ops = inline(made.ops, made)
    got = run_ops(ops, made, [each.clone() for each in inputs])
    torch.testing.assert_close(got[0], function(*inputs), rtol=0, atol=0)
    return sum(isinstance(op, Loops) for op in ops)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: (a + 1) * 2,
        lambda a: (a + 1).t().contiguous() * 2,
        lambda a: (a + 1)[1:3, ::2] * 2,
        lambda a: (a + 1).reshape(8, 3).t() * 2,
        lambda a: (a + 1).reshape(2, 2, 3, 2).permute(3, 1, 0, 2).sum(-1),
        lambda a: F.pad(a + 1, (2, 1), value=3.0) * 2,
        lambda a: (a + 1).sum(1),
        lambda a: (a * 2).sum(),
    ],
)
def test_a_kernel_is_inlined_through_any_view(function) -> None:
    assert kernels(function, A) == 1


def test_swapped_halves_are_one_kernel_without_divisions() -> None:
    def rotated(a: torch.Tensor) -> torch.Tensor:
        low, high = (a + 1).chunk(2, -1)
        return torch.cat((-high, low), -1) * 2

    assert kernels(rotated, A) == 1
    made = capture(rotated, A)
    (only,) = inline(made.ops, made)
    assert isinstance(only, Loops)
    assert "//" not in str(only.body)  # the mask of each half gives the range of its index
    assert "Modular" not in str(only.body)


def test_a_mask_over_several_loops_bounds_the_index_of_each_loop() -> None:
    def turned(gradient: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        low, high = (gradient * sine).chunk(2, -1)  # (tokens, heads, width): the backward of rotary embeddings
        return gradient + torch.cat((high, -low), -1)

    inputs = torch.arange(96.0).reshape(3, 4, 8), torch.arange(24.0).reshape(3, 1, 8)
    assert kernels(turned, *inputs) == 1
    made = capture(turned, *inputs)
    (only,) = inline(made.ops, made)
    assert isinstance(only, Loops)
    assert "//" not in str(only.body)
    assert "Modular" not in str(only.body)


def test_expensive_values_are_not_recomputed_for_every_row() -> None:
    assert kernels(lambda a: a.exp().expand(3, 4, 6) + 0, A) == 2
    assert kernels(lambda a: (-a).expand(3, 4, 6) + 0, A) == 1


def test_a_scalar_is_computed_in_the_kernel_that_reads_it() -> None:
    """As in the gradient of a mean: the value is computed once before the loops, or once per Triton program."""
    assert kernels(lambda a, total, count: (total / count).expand(4, 6) * a, A, A[0, 0], A[0, 1]) == 1
    assert kernels(lambda a, total: torch.where(a[:, :1] > 0, total.exp(), 0.0).expand(4, 6) * a, A, A[1, 2]) == 1


def test_a_small_tensor_is_read_again_instead_of_launching_another_kernel() -> None:
    def masked(targets: torch.Tensor) -> torch.Tensor:
        kept = targets != -100  # reading the input again takes 8 bytes per element, storing this mask 1
        return kept.sum() + torch.where(kept, targets, 0).sum() * torch.where(kept, 2 * targets, 1).amax()

    few, many = (torch.arange(size) % 7 for size in (64, 1 << 14))
    assert kernels(masked, many) == kernels(masked, few) + 1


def test_a_part_of_a_concatenation_is_computed_by_the_kernel_that_reads_the_same_inputs() -> None:
    def gradients(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = (a * b * weight).sum(1, keepdim=True)
        return torch.cat((b * weight - a * total, a[:, :64]), 1)  # like the gradient of a norm after a joint projection

    inputs = [torch.linspace(-2, shift, 128 * 256).reshape(128, 256) for shift in (1, 2, 3)]
    made = capture(gradients, *inputs)
    kernels_after = [op for op in fuse_ops(made)[0] if isinstance(op, Loops)]
    works = [work_of(op, made) for op in kernels_after]
    whole_bytes = inputs[0].nbytes
    assert len(kernels_after) == 2
    # Three inputs, the gradient written and read, the concatenated tensor, a quarter of `a` again (counted as a whole).
    assert sum(work.read_bytes + work.write_bytes for work in works) <= 7.25 * whole_bytes
    torch.testing.assert_close(run_ops(kernels_after, made, inputs)[0], gradients(*inputs))


def test_a_part_of_a_concatenation_is_inlined_if_no_other_kernel_reads_its_inputs() -> None:
    assert kernels(lambda a, b, c: torch.cat((a * b - c, a[:, :8]), 1), *(torch.ones(256, 256) for _ in range(3))) == 1


def test_a_buffer_that_a_call_or_the_caller_reads_is_not_inlined() -> None:
    ops: list[IROp] = [pointwise("x", "a"), pointwise("y", "x"), extern("z", "x")]
    made = graph(ops, ["y", "z"])
    assert names(inline(made.ops, made)) == ["x", "y", "z"]
    made = graph([pointwise("x", "a"), pointwise("y", "x")], ["x", "y"])
    assert names(inline(made.ops, made)) == ["x", "y"]


def test_expensive_values_with_two_readers_are_not_inlined() -> None:
    made = graph([pointwise("x", "a"), pointwise("y", "x"), pointwise("z", "x")], ["y", "z"])
    assert names(inline(made.ops, made)) == ["x", "y", "z"]


def test_cheap_values_are_computed_twice_instead_of_stored() -> None:
    def sums(a: torch.Tensor) -> torch.Tensor:
        wide = a.float() / 3  # 4 bytes per element, from 2
        return torch.cat((wide.sum(1), wide.sum(0)))

    a = torch.linspace(-4, 4, 40 * 60).reshape(40, 60).bfloat16()
    made = capture(sums, a)
    ops = inline(made.ops, made)
    stored = {store.buffer for op in ops if isinstance(op, Loops) for store in op.body.stores}
    assert max(made.views[name].layout.storage_numel() for name in stored) < a.numel()
    torch.testing.assert_close(run_ops(ops, made, [a])[0], sums(a))


def test_a_reader_of_few_elements_recomputes_them() -> None:
    logits, chosen = torch.linspace(-40, 40, 4 * 500).reshape(4, 500), torch.tensor([3, 499, 0, 77])

    def loss(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        capped = torch.tanh(logits / 30) * 30
        picked = capped.gather(1, chosen[:, None])[:, 0]
        return torch.stack((picked, (capped - capped.amax(1, keepdim=True)).exp().sum(1)))

    made = capture(loss, logits, chosen)
    ops, _ = fuse_ops(made)
    stored = {store.buffer for op in ops if isinstance(op, Loops) for store in op.body.stores}
    assert max(made.views[name].layout.storage_numel() for name in stored) < logits.numel()
    torch.testing.assert_close(run_ops(ops, made, [logits, chosen])[0], loss(logits, chosen))


def test_no_read_moves_past_a_write_over_it() -> None:
    ops: list[IROp] = [pointwise("x", "a"), overwrite("add", "a", "b"), pointwise("y", "x")]
    made = graph(ops, ["y"])
    assert names(inline(made.ops, made)) == ["x", "add", "y"]
    free = graph([pointwise("x", "a"), overwrite("add", "b", "c"), pointwise("y", "x")], ["y"])
    assert names(inline(free.ops, free)) == ["add", "y"]


def test_an_inlined_kernel_names_all_its_fx_nodes() -> None:
    made = capture(lambda a: (a + 1) * 2, A)
    (only,) = inline(made.ops, made)
    assert only.origin.fx == ("add", "mul")


def test_a_table_that_is_read_at_arange_is_read_in_place() -> None:
    """Rows are read in the order of memory, so the read needs no bounds check, no mask and no separate kernel."""

    def embedded(words: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return F.embedding(words, table) + F.embedding(torch.arange(words.shape[1]), places)

    (kernel,) = fuse_ops(
        capture(embedded, torch.zeros(2, 8, dtype=torch.int64), torch.empty(9, 16), torch.empty(8, 16))
    )[0]
    assert isinstance(kernel, Loops)
    assert len(kernel.body.checks()) == 1
    (read,) = [load for load in kernel.body.loads() if not load.operands() and load.memory_dtype is torch.float32]
    assert read.index.is_polynomial()


def test_a_rolled_tensor_is_read_in_place() -> None:
    """torch computes the rows to select; these are known positions, which need no bounds check and no kernel."""
    assert kernels(lambda a: ((a + 1).roll((-1, 2), (0, 1)) * 2).reshape(2, 2, 6).permute(1, 0, 2).contiguous(), A) == 1
    made = capture(lambda a: (a + 1).roll(-3, 1) * 2, A)
    (kernel,) = inline(made.ops, made)
    assert isinstance(kernel, Loops)
    assert not kernel.body.checks()


def test_a_lookup_is_inlined_only_if_each_of_its_elements_is_read() -> None:
    """Else an index that is out of bounds, which eager reports, would not be seen."""
    places, table = torch.tensor([[0, 3, 1], [2, 2, 4]]), torch.arange(5.0)
    for function in (
        lambda a, table, places: a * table[places][:, :, None],
        lambda a, table, places: a * table[places].t()[None, :, :].expand(2, 3, 2).reshape(2, 3, 2),
    ):
        assert kernels(function, torch.arange(12.0).reshape(2, 3, 2), table, places) == 1
    for function in (
        lambda a, table, places: a * table[places][:1, :, None],
        lambda a, table, places: a * table[places][0, 0],
    ):
        assert kernels(function, torch.arange(6.0).reshape(1, 3, 2), table, places) == 2
