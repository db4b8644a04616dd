"""Rules for torch functions on tensors whose elements are functions of their positions.

A rule takes the call's arguments, its named arguments and the size of the result, and returns a function from an index
of the result to the element there. It raises UnknownValue if the element depends on more than the position, or on the
position in a way that is not supported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import sympy
import torch

from overlapc.fx.masks.conditions import Box, negated
from overlapc.fx.masks.position_values import (
    LARGEST_FACTOR,
    At,
    Cases,
    Grid,
    Index,
    UnknownValue,
    Value,
    cases_of,
    condition_of,
    is_condition,
    merged_cases,
    number_of,
)

Rule = Callable[[list[Any], dict[str, Any], tuple[sympy.Expr, ...]], At]


def _operand(given: Any) -> At:
    """Return a function that reads an operand of an element-wise rule, which is a grid or a number."""
    if isinstance(given, Grid):
        return given.read
    if isinstance(given, bool):
        return lambda index, box: given
    if isinstance(given, sympy.Expr):
        return lambda index, box: given
    if isinstance(given, float):
        return lambda index, box: Cases({given: True})
    raise UnknownValue


def _element_wise(combine: Callable[..., Value], count: int) -> Rule:
    """Make the rule of an element-wise function from `combine`, which takes a box and `count` values."""

    def rule(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
        given = [*given, *(named[name] for name in ("mask", "value", "other") if name in named)]
        if len(given) != count or not named.keys() <= {"mask", "value", "other"}:
            raise UnknownValue
        operands = [_operand(each) for each in given]
        return lambda index, box: combine(box, *(operand(index, box) for operand in operands))

    return rule


_FLIPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}


def _comparison(op: str) -> Callable[..., Value]:
    def combine(box: Box, left: Value, right: Value) -> Value:
        if is_condition(left) or is_condition(right):
            if op not in ("eq", "ne") or not (is_condition(left) and is_condition(right)):
                raise UnknownValue
            same = box.any_of([box.all_of([left, right]), box.all_of([negated(left, box), negated(right, box)])])  # type: ignore[list-item, arg-type]
            return same if op == "eq" else negated(same, box)
        if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
            if isinstance(right, sympy.Abs):
                return box.compare(_FLIPPED[op], right, left)
            return box.compare(op, left, right)
        compare = getattr(operator, op)
        pairs = product(cases_of(left).of.items(), cases_of(right).of.items())
        return box.any_of(box.all_of([one, other]) for (a, one), (b, other) in pairs if compare(a, b))

    return combine


def _arithmetic(op: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    def combine(box: Box, left: Value, right: Value) -> Value:
        left, right = (
            merged_cases(box, [(1.0, each), (0.0, negated(each, box))]) if is_condition(each) else each  # type: ignore[arg-type, list-item]
            for each in (left, right)
        )
        if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
            factors = [each for each in (left, right) if each.is_number] if op is operator.mul else []
            if op is operator.mul and not (factors and abs(factors[0]) <= LARGEST_FACTOR):
                raise UnknownValue
            return sympy.expand(op(left, right))
        pairs = product(cases_of(left).of.items(), cases_of(right).of.items())
        return merged_cases(box, [(op(a, b), box.all_of([one, other])) for (a, one), (b, other) in pairs])

    return combine


def _quotient(box: Box, left: Value, right: Value) -> Value:
    """Divide and round down; UnknownValue unless the result is the same number at all positions."""
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr) and right.is_number and right > 0):
        raise UnknownValue
    bounds = box.bounds(left)
    if bounds is None or not all(each.is_number for each in bounds):
        raise UnknownValue
    least, largest = (sympy.floor(each / right) for each in bounds)
    if least != largest:
        raise UnknownValue
    return least


def _absolute(box: Box, value: Value) -> Value:
    if not isinstance(value, sympy.Expr):
        raise UnknownValue
    if box.not_negative(value) is True:
        return value
    return -value if box.not_negative(-value) is True else sympy.Abs(value)


def _negative(box: Box, value: Value) -> Value:
    return _arithmetic(operator.sub)(box, sympy.S.Zero, value)


def _logical(join: str) -> Callable[..., Value]:
    def combine(box: Box, left: Value, right: Value) -> Value:
        conditions = [condition_of(left, box), condition_of(right, box)]
        return box.all_of(conditions) if join == "and" else box.any_of(conditions)

    return combine


def _bitwise(join: str) -> Callable[..., Value]:
    def combine(box: Box, left: Value, right: Value) -> Value:
        if not (is_condition(left) and is_condition(right)):
            raise UnknownValue
        return _logical(join)(box, left, right)

    return combine


def _logical_not(box: Box, value: Value) -> Value:
    return negated(condition_of(value, box), box)


def _bitwise_not(box: Box, value: Value) -> Value:
    if not is_condition(value):
        raise UnknownValue
    return negated(value, box)  # type: ignore[arg-type]


def _select(box: Box, condition: Value, then: Value, other: Value) -> Value:
    where = condition_of(condition, box)
    if where is True or then == other:
        return then
    if where is False:
        return other
    if is_condition(then) and is_condition(other):
        return box.any_of([box.all_of([where, then]), box.all_of([negated(where, box), other])])  # type: ignore[list-item]
    found = [(number, box.all_of([where, each])) for number, each in cases_of(then).of.items()]
    found += [(number, box.all_of([negated(where, box), each])) for number, each in cases_of(other).of.items()]
    return merged_cases(box, found)


def _masked_fill(box: Box, value: Value, condition: Value, filled: Value) -> Value:
    return _select(box, condition, filled, value)


def _triangle(op: str) -> Rule:
    """Make the rule of `tril` (op "le") or `triu` (op "ge")."""

    def rule(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
        source, *rest = given
        diagonal = rest[0] if rest else named.get("diagonal", sympy.S.Zero)
        if not isinstance(source, Grid) or not isinstance(diagonal, sympy.Expr):
            raise UnknownValue

        def at(index: Index, box: Box) -> Value:
            value = source.at(index, box)
            kept = box.compare(op, index[-1] - index[-2], diagonal)
            zero: Value = False if is_condition(value) else sympy.S.Zero
            return _select(box, kept, value, zero)

        return at

    return rule


def _arange(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
    start, step = sympy.S.Zero, sympy.S.One
    if not named.keys() <= {"dtype", "device", "requires_grad", "layout", "pin_memory"}:
        raise UnknownValue
    if len(given) > 1:
        start = given[0]
    if len(given) > 2:
        step = given[2]
    if not all(isinstance(each, sympy.Expr) for each in (*given, step)):
        raise UnknownValue
    return lambda index, box: start + step * index[0]


def _constant(number: float | None, at_argument: int) -> Rule:
    """Make the rule of a constant tensor: `number`, or else the argument at `at_argument` or named `fill_value`."""

    def rule(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
        value: Any = number
        if value is None:
            value = given[at_argument] if len(given) > at_argument else named.get("fill_value")
        if isinstance(value, bool):
            return lambda index, box: value
        found = number_of(value)
        return lambda index, box: Cases({found: True})

    return rule


def _tensor(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
    if size:
        raise UnknownValue
    return _operand(given[0])


def _broadcast(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
    if not isinstance(given[0], Grid):
        raise UnknownValue
    return given[0].read


def _reshaped(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
    """Apply a view that adds or removes dims of size 1; UnknownValue for one that changes other dims."""
    source, *rest = given
    if not isinstance(source, Grid) or any(isinstance(each, torch.dtype) for each in rest):  # the bits as another dtype
        raise UnknownValue
    places = [place for place, each in enumerate(size) if each != 1]
    if [size[place] for place in places] != [each for each in source.size if each != 1]:
        raise UnknownValue

    def at(index: Index, box: Box) -> Value:
        others = iter([index[place] for place in places])
        return source.at(tuple(sympy.S.Zero if each == 1 else next(others) for each in source.size), box)

    return at


def _permuted(order: Callable[[list[Any], int], Sequence[int]]) -> Rule:
    """Make the rule of a permutation of dims.

    order: takes the call's integers and the number of dims, and returns the source's dim for each dim of the result.
    """

    def rule(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
        source, *rest = given
        if not isinstance(source, Grid) or named:
            raise UnknownValue
        listed = rest[0] if rest and isinstance(rest[0], list | tuple) else rest
        if not all(isinstance(each, sympy.Integer) for each in listed):
            raise UnknownValue
        dims = order([int(each) for each in listed], len(size))

        def at(index: Index, box: Box) -> Value:
            own = dict(zip(dims, index, strict=True))
            return source.at(tuple(own[dim] for dim in range(len(index))), box)

        return at

    return rule


def _transposed(dims: list[int], count: int) -> list[int]:
    order = list(range(count))
    first, second = dims or (0, count - 1)
    order[first], order[second] = order[second], order[first]
    return order


def _indexed(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
    """Index with integers, slices with a non-negative start, None and `...`; or with a grid for each dim."""
    source, picked = given
    if not isinstance(source, Grid) or isinstance(picked, list):  # a list picks elements, as a tensor does
        raise UnknownValue
    picked = list(picked) if isinstance(picked, tuple) else [picked]
    if picked and all(isinstance(each, Grid) for each in picked):
        return _gathered(source, picked)
    taken = sum(each is not None and each is not Ellipsis for each in picked)
    if Ellipsis in picked:
        at = picked.index(Ellipsis)
        picked = [*picked[:at], *[slice(None)] * (len(source.size) - taken), *picked[at + 1 :]]
    else:
        picked = [*picked, *[slice(None)] * (len(source.size) - taken)]
    for each in picked:
        if isinstance(each, slice):
            begin, step = each.start or sympy.S.Zero, each.step or sympy.S.One
            if not (isinstance(begin, sympy.Integer) and begin >= 0 and isinstance(step, sympy.Integer)):
                raise UnknownValue
        elif each is not None and not (isinstance(each, sympy.Integer) and each >= 0):
            raise UnknownValue

    def at_index(index: Index, box: Box) -> Value:
        places, own = iter(index), []
        for each in picked:
            if each is None:
                next(places)
            elif isinstance(each, slice):
                own.append((each.start or sympy.S.Zero) + (each.step or sympy.S.One) * next(places))
            else:
                own.append(each)
        return source.at(tuple(own), box)

    return at_index


def _difference(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
    """Apply `diff` along a dim, with one value prepended."""
    source, before = given[0], named.get("prepend")
    if len(given) > 1 or not named.keys() <= {"dim", "prepend"} or not isinstance(source, Grid):
        raise UnknownValue
    dim = int(named["dim"]) % len(size) if isinstance(named.get("dim"), sympy.Integer) else len(size) - 1
    if not isinstance(before, Grid) or before.size[dim] != 1 or len(before.size) != len(source.size):
        raise UnknownValue

    def at(index: Index, box: Box) -> Value:
        def beside(position: sympy.Expr) -> Index:
            return (*index[:dim], position, *index[dim + 1 :])

        minus = _arithmetic(operator.sub)
        start, place = sympy.S.Zero, index[dim]
        first = minus(box, source.at(beside(start), box), before.at(beside(start), box))
        others = minus(box, source.at(index, box), source.at(beside(place - 1), box))
        return _select(box, box.compare("eq", place, start), first, others)

    return at


def _running_sum(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
    """Apply `cumsum` along a dim in which all elements are equal."""
    source, *rest = given
    dim = rest[0] if rest else named.get("dim")
    if not isinstance(source, Grid) or not size or not isinstance(dim, sympy.Integer):
        raise UnknownValue
    place = int(dim) % len(size)

    def at(index: Index, box: Box) -> Value:
        anywhere = sympy.Dummy("k", integer=True, nonnegative=True)
        along = Box({**box.sizes, anywhere: size[place]}, box.shape_env)
        value = source.at((*index[:place], anywhere, *index[place + 1 :]), along)
        if isinstance(value, bool):
            value = sympy.Integer(value)
        if not isinstance(value, sympy.Expr) or value.has(anywhere):
            raise UnknownValue
        return sympy.expand(value * (index[place] + 1))

    return at


def _gathered(source: Grid, picked: Sequence[Grid]) -> At:
    if len(picked) != len(source.size):
        raise UnknownValue

    def at(index: Index, box: Box) -> Value:
        own = [each.read(index, box) for each in picked]
        for place, size in zip(own, source.size, strict=True):
            if not isinstance(place, sympy.Expr) or box.not_negative(place) is not True:  # -1 would be the last
                raise UnknownValue
            if box.not_negative(size - 1 - place) is not True:
                raise UnknownValue
        return source.at(tuple(own), box)

    return at


WITHOUT_TENSOR = ("ones", "zeros", "full")  # without a tensor argument; sizes may be named arguments
RULES: dict[str, Rule] = {
    "arange": _arange,
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _constant(1.0, 0)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _constant(0.0, 0)),
    **dict.fromkeys(("full", "full_like", "fill"), _constant(None, 1)),
    "new_full": _constant(None, 2),
    "zero": _constant(0.0, 0),  # in place
    "tensor": _tensor,
    **dict.fromkeys(
        ("expand", "expand_as", "broadcast_to", "contiguous", "clone", "detach", "to", "type", "type_as"), _broadcast
    ),
    **dict.fromkeys(("bool", "float", "double", "half", "bfloat16", "int", "long"), _broadcast),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze"), _reshaped),
    "transpose": _permuted(_transposed),
    "t": _permuted(_transposed),
    "permute": _permuted(lambda dims, count: [dim % count for dim in dims]),
    "getitem": _indexed,
    "diff": _difference,
    "cumsum": _running_sum,
    "tril": _triangle("le"),
    "triu": _triangle("ge"),
    "where": _element_wise(_select, 3),
    "masked_fill": _element_wise(_masked_fill, 3),
    **{op: _element_wise(_comparison(op), 2) for op in _FLIPPED},
    **dict.fromkeys(("and_", "bitwise_and"), _element_wise(_bitwise("and"), 2)),
    **dict.fromkeys(("or_", "bitwise_or"), _element_wise(_bitwise("or"), 2)),
    "logical_and": _element_wise(_logical("and"), 2),
    "logical_or": _element_wise(_logical("or"), 2),
    "logical_not": _element_wise(_logical_not, 1),
    **dict.fromkeys(("invert", "bitwise_not"), _element_wise(_bitwise_not, 1)),
    "add": _element_wise(_arithmetic(operator.add), 2),
    "sub": _element_wise(_arithmetic(operator.sub), 2),
    "rsub": _element_wise(lambda box, left, right: _arithmetic(operator.sub)(box, right, left), 2),
    "mul": _element_wise(_arithmetic(operator.mul), 2),
    "neg": _element_wise(_negative, 1),
    "abs": _element_wise(_absolute, 1),
    **dict.fromkeys(("floordiv", "floor_divide"), _element_wise(_quotient, 2)),
}
