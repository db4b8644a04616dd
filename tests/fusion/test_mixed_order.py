"""Row and column reductions over one input become one kernel if that is faster and computes the same."""

from __future__ import annotations

from collections import Counter

import pytest
import sympy
import torch
import torch.nn.functional as F

from overlapc.fusion import fuse_ops, mixed_order
from overlapc.fusion.merge import Refusal
from overlapc.fusion.mixed_order import crosses, merge_across
from overlapc.ir.body import Body, Cast, Load, Reduce, Store, Value, op
from overlapc.ir.ops import Loops
from tests.fusion.programs import capture
from tests.ir.bodies import P, R, loops_of, put, x
from tests.ir.interpret import run_body

ROWS, COLUMNS = 6, 3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let matrices of a few elements count as large enough."""
    monkeypatch.setattr(mixed_order, "FEWEST_ELEMENTS", 1)
    monkeypatch.setattr(mixed_order, "FEWEST_ROWS", 1)


def total(value: Value, kind: str = "sum") -> Reduce:
    return Reduce(kind, value, torch.float32)


def by_rows(rows: int = ROWS, columns: int = COLUMNS) -> Body:
    """Return a body that scales every row by its sum."""
    at = columns * P[0] + R[0]
    value = op("mul", x("a", at), total(x("a", at)))
    return Body(loops_of("p", (rows,)), loops_of("r", (columns,)), (put("y", at, value),))


def by_columns(value: Value | None = None, rows: int = ROWS, columns: int = COLUMNS) -> Body:
    """Return a body that sums every column, or reduces it to `value`."""
    value = total(x("a", columns * R[0] + P[0])) if value is None else value
    return Body(loops_of("p", (columns,)), loops_of("r", (rows,)), (put("w", P[0], value),))


def pointwise(out: str = "z", read: str = "a", rows: int = ROWS, columns: int = COLUMNS) -> Body:
    loops = loops_of("p", (rows * columns,))
    return Body(loops, (), (put(out, P[0], op("exp", x(read, P[0]))),))


def across(first: Body, second: Body) -> Body | Refusal:
    return merge_across(first, second, int, lambda name: 4 * ROWS * COLUMNS)


def check(first: Body, second: Body) -> Body:
    """Merge the bodies, and assert that the merged one computes what they compute one after the other."""
    merged = across(first, second)
    assert isinstance(merged, Body), merged
    given = {"a": torch.randn(ROWS * COLUMNS), "b": torch.randn(ROWS)}
    made = {name: torch.zeros(ROWS * COLUMNS) for name in "yz"} | {"w": torch.zeros(COLUMNS)}
    one, two = ({name: tensor.clone() for name, tensor in (given | made).items()} for _ in range(2))
    run_body(first, one)
    run_body(second, one)
    run_body(merged, two)
    torch.testing.assert_close(two, one)
    return merged


@pytest.mark.usefixtures("small")
def test_a_column_sum_is_stored_by_the_kernel_over_rows() -> None:
    merged = check(by_rows(), by_columns())
    assert [loop.size for loop in (*merged.loops, *merged.reduction)] == [ROWS, COLUMNS]
    assert [(store.buffer, store.mode) for store in merged.stores] == [("y", "set"), ("w", "sum")]
    check(by_columns(), by_rows())


@pytest.mark.usefixtures("small")
def test_a_column_sum_of_the_row_kernels_result_uses_the_value() -> None:
    reader = by_columns(total(x("y", COLUMNS * R[0] + P[0])))
    merged = check(by_rows(), reader)
    assert [load.buffer for load in merged.loads()] == ["a"]


@pytest.mark.usefixtures("small")
def test_a_column_product_may_read_a_value_per_row() -> None:
    value = op("mul", x("a", COLUMNS * R[0] + P[0]), x("b", R[0]))
    check(by_rows(), by_columns(total(value, "prod")))


@pytest.mark.usefixtures("small")
def test_a_total_rounded_to_the_dtype_of_its_store_needs_no_cast() -> None:
    rounded = Cast(total(x("a", COLUMNS * R[0] + P[0])), torch.bfloat16)
    store = Store("w", P[0], rounded, torch.bfloat16)
    merged = across(by_rows(), Body(loops_of("p", (COLUMNS,)), loops_of("r", (ROWS,)), (store,)))
    assert isinstance(merged, Body)
    assert isinstance(merged.stores[-1].value, Load)


@pytest.mark.usefixtures("small")
def test_a_total_rounded_to_a_narrower_dtype_than_its_store_records_that_dtype() -> None:
    """As the gradient of a parameter that is computed in bfloat16 and stored in a float32 shard."""
    merged = check(by_rows(), by_columns(Cast(total(x("a", COLUMNS * R[0] + P[0])), torch.bfloat16)))
    assert [store.total_dtype for store in merged.stores] == [None, torch.bfloat16]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (op("exp", total(x("a", COLUMNS * R[0] + P[0]))), "more is computed from it"),
        (total(x("a", COLUMNS * R[0] + P[0]), "max"), "the max of a column"),
        (total(x("a", R[0] + ROWS * P[0])), "more memory would be read with strides"),
    ],
)
def test_column_reductions_that_are_not_plain_totals_are_refused(value: Value, reason: str) -> None:
    refused = across(by_rows(), by_columns(value))
    assert isinstance(refused, Refusal)
    assert reason in refused.reason


@pytest.mark.usefixtures("small")
def test_a_total_cannot_be_read_by_the_kernel_that_computes_it() -> None:
    at = COLUMNS * P[0] + R[0]
    reader = Body(
        loops_of("p", (ROWS,)), loops_of("r", (COLUMNS,)), (put("y", P[0], total(op("mul", x("a", at), x("w", R[0])))),)
    )
    refused = across(by_columns(), reader)
    assert isinstance(refused, Refusal)
    assert "w is a total" in refused.reason


@pytest.mark.parametrize(
    ("rows", "columns", "pays"),
    [(8192, 1024, True), (4096, 2048, True), (4096, 1024, False), (2048, 4096, False), (65536, 32768, False)],
)
def test_rows_and_columns_merge_only_for_profitable_sizes(rows: int, columns: int, pays: bool) -> None:
    column = by_columns(total(x("a", columns * R[0] + P[0])), rows, columns)
    merged = merge_across(by_rows(rows, columns), column, int, lambda name: 4 * rows * columns)
    assert isinstance(merged, Body) == pays


def test_an_element_wise_kernel_merges_with_a_column_reduction() -> None:
    merged = check(pointwise(), by_columns())
    assert [loop.size for loop in (*merged.loops, *merged.reduction)] == [COLUMNS, ROWS]
    assert all(not store.is_total for store in merged.stores)
    check(pointwise(), by_columns(total(x("z", COLUMNS * R[0] + P[0]))))
    check(by_columns(), pointwise())


def test_element_counts_tell_which_bodies_may_cross() -> None:
    assert crosses(by_rows(), by_columns())
    assert crosses(by_columns(), pointwise())
    assert not crosses(by_rows(), by_rows())
    assert not crosses(pointwise(), pointwise())
    assert not crosses(by_rows(), by_columns(rows=ROWS + 1))


def kernels_of(function, *inputs: torch.Tensor) -> list[Loops]:
    ops, _ = fuse_ops(capture(function, *inputs))
    return [each for each in ops if isinstance(each, Loops)]


def test_norm_backward_is_one_kernel() -> None:
    def backward(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        gw = g * w
        dx = scale * (gw - x * scale * scale * (gw * x).mean(-1, keepdim=True))
        return dx, (g * x * scale).sum(0)

    sizes = (8192, 1024)
    (kernel,) = kernels_of(backward, torch.empty(sizes), torch.empty(sizes), torch.empty(sizes[1]))
    assert sum(store.is_total for store in kernel.body.stores) == 1


def test_gradients_of_an_activation_and_of_a_bias_are_one_kernel() -> None:
    def backward(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dx = g * torch.sigmoid(x) * F.relu(x)
        return dx, dx.sum(0)

    (kernel,) = kernels_of(backward, torch.empty(64, 32), torch.empty(64, 32))
    assert kernel.body.reduction_numel() == sympy.Integer(64)


def test_gradients_of_a_gated_batch_and_of_its_gates_read_the_batch_once() -> None:
    def backward(x: torch.Tensor, g: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return g * gate[:, None], (g * x).sum(1)

    # The 32 tokens could be divided into 8 x 4, which would run over the batch of 8 in the element-wise part.
    x, gate = torch.empty(8, 32, 24), torch.empty(8, 24)
    (kernel,) = kernels_of(backward, x, torch.empty_like(x), gate)
    assert [loop.size for loop in (*kernel.body.loops, *kernel.body.reduction)] == [8, 24, 32]
    assert len({(load.buffer, load.index) for load in kernel.body.loads()}) == 3


def test_elements_are_not_read_in_another_order_because_their_loops_could_be_divided_alike() -> None:
    def backward(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return g * x, (g * x).sum((0, 2))

    # The 32 channels could be divided into 4 x 8: the sum of channel 8 * p0 + p1 would then be beside elements of image
    # p0, and all elements would be read twice.
    x = torch.empty(4, 32, 96)
    ops, report = fuse_ops(capture(backward, x, torch.empty_like(x)))
    for kernel in (each for each in ops if isinstance(each, Loops)):
        places = Counter(buffer for buffer, _ in {(load.buffer, load.index) for load in kernel.body.loads()})
        assert set(places.values()) == {1}
    assert any("different orders" in each.reason for each in report.refused.values())


def test_row_and_column_sums_of_a_square_matrix_do_not_fuse() -> None:
    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.sum(0), a.sum(1)

    ops, report = fuse_ops(capture(function, torch.randn(64, 64)))
    assert sum(isinstance(each, Loops) for each in ops) == 2
    assert any("different orders" in each.reason for each in report.refused.values())


def test_equal_sizes_alone_do_not_merge_an_element_wise_kernel_with_a_column_reduction() -> None:
    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.exp(), a.reshape(1024, 64).sum(0)  # 64 columns, and the 64 rows of a

    ops, _ = fuse_ops(capture(function, torch.randn(64, 1024)))
    for each in ops:
        assert isinstance(each, Loops)
        indices = {load.index for load in each.body.loads()}
        assert len(indices) == 1, each.body
