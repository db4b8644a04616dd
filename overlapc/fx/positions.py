"""Tensors of a Dynamo graph whose elements follow from their positions alone: `arange`, `tril`, comparisons of these.

`Positions` goes over a graph and knows such a tensor as a function from an element's index, in symbols, to what the
element is: an integer expression, a condition (bool tensors), or one of a few numbers and the condition under which
it is that one (`Cases`: a mask of 0 and -inf). What it does not know it leaves out; nothing is computed.

    i = arange(n)[:, None]; j = arange(n); allowed = j <= i      ->  allowed[x, y]:  x - y >= 0
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from overlapc.fx.conditions import Box, Condition, negated
from overlapc.fx.wrapped import storage_of

_INTEGERS = (torch.int64, torch.int32)  # narrower ones may wrap around
_MOST_CASES = 6
_LARGEST_FACTOR = 1 << 20  # positions times that do not wrap around


_UNSEEN = object()  # an argument that does not follow from positions


class UnknownValue(Exception):
    """A value does not follow from positions, or not in a way that is known here."""


@dataclass(frozen=True, slots=True)
class Cases:
    """One of several numbers: exactly one condition holds at each position."""

    of: Mapping[float, Condition]


Value: TypeAlias = "sympy.Expr | Condition | Cases"
Index = tuple[sympy.Expr, ...]
At = Callable[[Index, Box], Value]


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor whose elements follow from their positions."""

    size: tuple[sympy.Expr, ...]
    at: At  # the element at an index that is within `size`

    def read(self, index: Index, box: Box) -> Value:
        """The element at an index of a larger tensor that this one is broadcast to."""
        own = index[len(index) - len(self.size) :]
        return self.at(tuple(sympy.S.Zero if n == 1 else each for n, each in zip(self.size, own, strict=True)), box)


class Positions:
    """The nodes of one graph whose values follow from positions, as far as `visit` has seen it."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Grid] = {}
        self.shape_env: ShapeEnv | None = None  # of the first symbolic size

    def grid(self, node: Any) -> Grid | None:
        """What is known of the value of `node`."""
        return self._known.get(node)

    def learn(self, node: fx.Node, grid: Grid) -> None:
        """`node` has these elements: an input of a graph within a graph."""
        self._known[node] = grid

    def visit(self, node: fx.Node) -> None:
        """Takes note of the value of the next node, in the order of the graph, and of what it changes in place."""
        if node.op not in ("call_function", "call_method", "call_module"):
            return
        if not _is_torchs(node):
            for given in node.all_input_nodes:  # which it may write into
                self.forget(given)
            return
        value, name = node.meta.get("example_value"), _name(node)
        changed = _changed(node, name)
        if changed is not None:
            self._change(node, name.removesuffix("_"), changed)
        elif isinstance(value, Tensor) and name in _RULES:
            grid = self._grid_of(node, name, value)
            if grid is not None:
                self._known[node] = grid

    def _grid_of(self, node: fx.Node, name: str, value: Tensor) -> Grid | None:
        try:
            given = [self._argument(each) for each in node.args]
            named = {key: self._argument(each) for key, each in node.kwargs.items()}
            given = [*(named.pop(key) for key in ("input", "self") if key in named), *given]
            if not given and name not in _MADE_OF_NOTHING:
                return None
            size = tuple(map(self.extent, value.shape))
            return Grid(size, _of_dtype(_RULES[name](given, named, size), value.dtype))
        except UnknownValue:
            return None

    def _change(self, node: fx.Node, name: str, changed: fx.Node) -> None:
        """`changed` is written into. Known afterwards only if all that is known in its memory is this very tensor."""
        value, grid = changed.meta.get("example_value"), self._known.get(changed)
        names = [each for each in self._known if _memory(each) == _memory(changed)]
        whole = grid is not None and all(self._known[each] is grid for each in names)
        known = whole and isinstance(value, Tensor) and name in _RULES
        after = self._grid_of(node, name, value) if known else None  # type: ignore[arg-type]
        self.forget(changed)
        if after is not None:
            self._known |= dict.fromkeys([*names, node], after)

    def forget(self, node: fx.Node) -> None:
        """Nothing is known any more of what lies in the memory of `node`."""
        memory = _memory(node)
        for each in [each for each in self._known if _memory(each) == memory]:
            del self._known[each]

    def extent(self, size: int | torch.SymInt) -> sympy.Expr:
        """A size as an expression."""
        if isinstance(size, torch.SymInt):
            self.shape_env = self.shape_env or size.node.shape_env
            return size.node.expr
        return sympy.Integer(size)

    def _argument(self, given: Any) -> Any:
        """An argument of a rule: grids for tensors, expressions for integers, _UNSEEN for other nodes."""
        if isinstance(given, fx.Node):
            if given in self._known:
                return self._known[given]
            given = given.meta.get("example_value")
            if not isinstance(given, bool | int | torch.SymInt):
                return _UNSEEN
        if isinstance(given, list | tuple):
            return [self._argument(each) for each in given]
        if isinstance(given, slice):
            return slice(*(self._argument(each) for each in (given.start, given.stop, given.step)))
        if isinstance(given, torch.SymInt) or (isinstance(given, int) and not isinstance(given, bool)):
            return self.extent(given)
        return given


# --- what a node does


def _name(node: fx.Node) -> str:
    """What the node calls; of an operator's method (torch 2.11 traces `a.__eq__(b)`) the operator, such as `eq`."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    function = getattr(operator, name, None) if name.startswith("__") else None
    return name if function is None else function.__name__


_WRITING_OPERATORS = {
    f"i{name}" for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
}


def _changed(node: fx.Node, name: str) -> fx.Node | None:
    """The tensor that `node` writes into, by the names that torch and Python give such operations."""
    named_so = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_", "is_")
    in_place = named_so or name == "setitem" or name in _WRITING_OPERATORS
    written = node.kwargs.get("out", node.args[0] if in_place and node.args else None)
    return written if isinstance(written, fx.Node) else None


def _is_torchs(node: fx.Node) -> bool:
    """Whether names say truly what `node` writes into: methods of tensors, torch's and Python's functions."""
    home = getattr(node.target, "__module__", None) or "torch"
    ours = isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator)
    return node.op == "call_method" or (not ours and home.split(".")[0] in ("torch", "_operator", "math", "builtins"))


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return storage_of(value)._cdata if isinstance(value, Tensor) and value.layout == torch.strided else None


# --- values


def _is_condition(value: Any) -> bool:
    return not isinstance(value, sympy.Expr | Cases)


def _cases(value: Value) -> Cases:
    """A value as numbers; UnknownValue for integers that differ from position to position."""
    if isinstance(value, Cases):
        return value
    if isinstance(value, sympy.Expr):
        if not value.is_number:
            raise UnknownValue
        return Cases({float(value): True})
    raise UnknownValue


def _number(value: Any) -> float:
    if isinstance(value, sympy.Expr) and value.is_number:
        return float(value)
    if isinstance(value, bool | int | float):
        return float(value)
    raise UnknownValue


def _together(box: Box, found: Sequence[tuple[float, Condition]]) -> Cases:
    """Cases of numbers that may come more than once."""
    by_number: dict[float, list[Condition]] = {}
    for number, condition in found:
        if math.isnan(number):
            raise UnknownValue
        if condition is not False:
            by_number.setdefault(number, []).append(condition)
    if len(by_number) > _MOST_CASES:
        raise UnknownValue
    return Cases({number: box.any_of(conditions) for number, conditions in by_number.items()})


def condition_of(value: Value, box: Box) -> Condition:
    """Where a value is not zero."""
    if isinstance(value, Cases):
        return box.any_of(condition for number, condition in value.of.items() if number)
    if isinstance(value, sympy.Expr):
        return box.compare("ne", value, sympy.S.Zero)
    return value


def _of_dtype(at: At, dtype: torch.dtype) -> At:
    """What `at` gives, as a tensor of `dtype` holds it."""

    def converted(index: Index, box: Box) -> Value:
        value = at(index, box)
        if dtype == torch.bool:
            return condition_of(value, box)
        if _is_condition(value):
            return _together(box, [(1.0, value), (0.0, negated(value, box))])  # type: ignore[arg-type, list-item]
        if isinstance(value, Cases):
            if not dtype.is_floating_point and any(
                number != int(number) for number in value.of if math.isfinite(number)
            ):
                raise UnknownValue
            if not dtype.is_floating_point and any(not abs(number) < _LARGEST_FACTOR for number in value.of):
                raise UnknownValue
            return value
        if dtype in _INTEGERS:
            return value
        return _cases(value)

    return converted


# --- rules: arguments, named arguments and size of the result -> the element at an index of the result

Rule = Callable[[list[Any], dict[str, Any], tuple[sympy.Expr, ...]], At]


def _operand(given: Any) -> At:
    """A grid or a number as what an element-wise rule reads."""
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
    """combine: of a box and `count` values."""

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
        if _is_condition(left) or _is_condition(right):
            if op not in ("eq", "ne") or not (_is_condition(left) and _is_condition(right)):
                raise UnknownValue
            same = box.any_of([box.all_of([left, right]), box.all_of([negated(left, box), negated(right, box)])])  # type: ignore[list-item, arg-type]
            return same if op == "eq" else negated(same, box)
        if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
            if isinstance(right, sympy.Abs):
                return box.compare(_FLIPPED[op], right, left)
            return box.compare(op, left, right)
        compare = getattr(operator, op)
        pairs = product(_cases(left).of.items(), _cases(right).of.items())
        return box.any_of(box.all_of([one, other]) for (a, one), (b, other) in pairs if compare(a, b))

    return combine


def _arithmetic(op: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    def combine(box: Box, left: Value, right: Value) -> Value:
        left, right = (
            _together(box, [(1.0, each), (0.0, negated(each, box))]) if _is_condition(each) else each  # type: ignore[arg-type, list-item]
            for each in (left, right)
        )
        if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
            factors = [each for each in (left, right) if each.is_number] if op is operator.mul else []
            if op is operator.mul and not (factors and abs(factors[0]) <= _LARGEST_FACTOR):
                raise UnknownValue
            return sympy.expand(op(left, right))
        pairs = product(_cases(left).of.items(), _cases(right).of.items())
        return _together(box, [(op(a, b), box.all_of([one, other])) for (a, one), (b, other) in pairs])

    return combine


def _quotient(box: Box, left: Value, right: Value) -> Value:
    """Rounded down, where that is one number at all positions."""
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
        if not (_is_condition(left) and _is_condition(right)):
            raise UnknownValue
        return _logical(join)(box, left, right)

    return combine


def _not(box: Box, value: Value) -> Value:
    return negated(condition_of(value, box), box)


def _inverted(box: Box, value: Value) -> Value:
    if not _is_condition(value):
        raise UnknownValue
    return negated(value, box)  # type: ignore[arg-type]


def _chosen(box: Box, condition: Value, then: Value, other: Value) -> Value:
    where = condition_of(condition, box)
    if where is True or then == other:
        return then
    if where is False:
        return other
    if _is_condition(then) and _is_condition(other):
        return box.any_of([box.all_of([where, then]), box.all_of([negated(where, box), other])])  # type: ignore[list-item]
    found = [(number, box.all_of([where, each])) for number, each in _cases(then).of.items()]
    found += [(number, box.all_of([negated(where, box), each])) for number, each in _cases(other).of.items()]
    return _together(box, found)


def _masked_fill(box: Box, value: Value, condition: Value, filled: Value) -> Value:
    return _chosen(box, condition, filled, value)


def _triangle(op: str) -> Rule:
    """tril and triu."""

    def rule(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
        source, *rest = given
        diagonal = rest[0] if rest else named.get("diagonal", sympy.S.Zero)
        if not isinstance(source, Grid) or not isinstance(diagonal, sympy.Expr):
            raise UnknownValue

        def at(index: Index, box: Box) -> Value:
            value = source.at(index, box)
            kept = box.compare(op, index[-1] - index[-2], diagonal)
            zero: Value = False if _is_condition(value) else sympy.S.Zero
            return _chosen(box, kept, value, zero)

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


def _filled(number: float | None, at_argument: int) -> Rule:
    """Constants: `number`, or the argument at a place or of the name `fill_value`."""

    def rule(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
        value: Any = number
        if value is None:
            value = given[at_argument] if len(given) > at_argument else named.get("fill_value")
        if isinstance(value, bool):
            return lambda index, box: value
        found = _number(value)
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
    """Dims of size 1 come and go; the others stay as they were."""
    source, *rest = given
    if not isinstance(source, Grid) or any(isinstance(each, torch.dtype) for each in rest):  # the same bits as another
        raise UnknownValue
    places = [place for place, each in enumerate(size) if each != 1]
    if [size[place] for place in places] != [each for each in source.size if each != 1]:
        raise UnknownValue

    def at(index: Index, box: Box) -> Value:
        others = iter([index[place] for place in places])
        return source.at(tuple(sympy.S.Zero if each == 1 else next(others) for each in source.size), box)

    return at


def _permuted(order: Callable[[list[Any], int], Sequence[int]]) -> Rule:
    """order: of the arguments and the number of dims, the source's dim of each of the result's."""

    def rule(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
        source, *rest = given
        if not isinstance(source, Grid) or named:
            raise UnknownValue
        listed = rest[0] if rest and isinstance(rest[0], list) else rest
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
    """`source[...]` by whole numbers, slices that begin within, None and `...`; or by one grid a dim."""
    source, picked = given
    picked = picked if isinstance(picked, list) else [picked]
    if not isinstance(source, Grid):
        raise UnknownValue
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
    """`diff` of neighbours along a dim, with one value put before the first."""
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
        return _chosen(box, box.compare("eq", place, start), first, others)

    return at


def _running_sum(given: list[Any], named: dict[str, Any], size: tuple[sympy.Expr, ...]) -> At:
    """`cumsum` along a dim of what is the same everywhere along it."""
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
            if not isinstance(place, sympy.Expr) or box.not_negative(place) is not True:  # -1 is the last one
                raise UnknownValue
            if box.not_negative(size - 1 - place) is not True:
                raise UnknownValue
        return source.at(tuple(own), box)

    return at


_MADE_OF_NOTHING = ("ones", "zeros", "full")  # sizes may be named arguments
_RULES: dict[str, Rule] = {
    "arange": _arange,
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(1.0, 0)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _filled(0.0, 0)),
    **dict.fromkeys(("full", "full_like", "fill"), _filled(None, 1)),
    "new_full": _filled(None, 2),
    "zero": _filled(0.0, 0),  # in place
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
    "where": _element_wise(_chosen, 3),
    "masked_fill": _element_wise(_masked_fill, 3),
    **{op: _element_wise(_comparison(op), 2) for op in _FLIPPED},
    **dict.fromkeys(("and_", "bitwise_and"), _element_wise(_bitwise("and"), 2)),
    **dict.fromkeys(("or_", "bitwise_or"), _element_wise(_bitwise("or"), 2)),
    "logical_and": _element_wise(_logical("and"), 2),
    "logical_or": _element_wise(_logical("or"), 2),
    "logical_not": _element_wise(_not, 1),
    **dict.fromkeys(("invert", "bitwise_not"), _element_wise(_inverted, 1)),
    "add": _element_wise(_arithmetic(operator.add), 2),
    "sub": _element_wise(_arithmetic(operator.sub), 2),
    "rsub": _element_wise(lambda box, left, right: _arithmetic(operator.sub)(box, right, left), 2),
    "mul": _element_wise(_arithmetic(operator.mul), 2),
    "neg": _element_wise(_negative, 1),
    "abs": _element_wise(_absolute, 1),
    **dict.fromkeys(("floordiv", "floor_divide"), _element_wise(_quotient, 2)),
}
