"""Which masked loads may return any value outside their mask because no output depends on it."""

from __future__ import annotations

import torch

from overlapc.ir.body import Body, Constant, Index, Load, Reduce, Store, Value, op
from overlapc.ir.facts import unseen_where_masked
from tests.ir.bodies import P, loops_of, put


def below(limit: int) -> Value:
    return op("lt", Index(P[0]), Index(limit + 0 * P[0]))


def from_(limit: int) -> Value:
    return op("ge", Index(P[0]), Index(limit + 0 * P[0]))


def load(name: str, mask: Value) -> Load:
    return Load(name, P[0], torch.float32, mask)


def body(*values: Value) -> Body:
    return Body(loops_of("p", (9,)), (), tuple(put(f"y{at}", P[0], value) for at, value in enumerate(values)))


def test_masked_parts_of_a_concatenation_are_unseen_outside_their_masks() -> None:
    first, second, third = load("a", below(3)), load("b", op("logical_and", from_(3), below(6))), load("c", from_(6))
    joined = op("where", below(3), op("neg", first), op("where", below(6), second, op("exp", third)))
    assert unseen_where_masked(body(joined)) == {first, second, third}
    # A store of the first part by itself stores the zeros outside its mask.
    assert unseen_where_masked(body(joined, first)) == {second, third}


def test_a_load_that_is_reduced_or_selected_by_another_condition_is_seen() -> None:
    part = load("a", below(3))
    zero = Constant(0.0, torch.float32)
    reduced = op("where", below(3), Reduce("sum", part, torch.float32), zero)
    assert (
        unseen_where_masked(Body(loops_of("p", (9,)), loops_of("r", (2,)), (put("y", P[0], reduced),))) == frozenset()
    )
    other = op("where", below(4), part, zero)
    assert unseen_where_masked(body(other)) == frozenset()
    store = Store("y", P[0], op("where", below(3), part, zero), torch.float32)
    assert unseen_where_masked(Body(loops_of("p", (9,)), (), (store,))) == {part}
