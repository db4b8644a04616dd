"""The criteria by which candidates for fusion are ranked, most important first."""

from __future__ import annotations

from overlapc.fusion.score import score
from tests.codegen.product_cases import plain
from tests.codegen.terms import f32
from tests.codegen.triton_cases import column_sum, swiglu

PRODUCT, SUM, POINTWISE = (case.body for case in (plain("p", 16, 16, 16, f32), column_sum(8, 8), swiglu(64)))


def test_a_criterion_outweighs_all_later_criteria():
    ranked = [
        score(PRODUCT, POINTWISE, saved_bytes=1, distance=9),
        score(SUM, SUM, saved_bytes=2, distance=2),
        score(POINTWISE, POINTWISE, saved_bytes=2, distance=3),
        score(POINTWISE, POINTWISE, saved_bytes=1, distance=1),
        score(SUM, POINTWISE, saved_bytes=99, distance=1),
    ]
    assert sorted(ranked, reverse=True) == ranked


def test_the_score_does_not_depend_on_the_order_of_the_two_kernels():
    for other in (SUM, POINTWISE):
        assert score(PRODUCT, other, 5, 1) == score(other, PRODUCT, 5, 1)
    assert not score(PRODUCT, PRODUCT, 5, 1).template
