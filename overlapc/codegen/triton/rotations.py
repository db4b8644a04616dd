"""Halves that change places, read once: what a rotary embedding does to the rows of its heads.

    where(p2 < 64, -f(x[p2 + 64]), f(x[p2 - 64]))
 ->  v = f(x[p2 + 64 - 128 * (p2 // 64 % 2)]);  where(p2 < 64, -v, v)

Both branches of a `where` are computed for every element, masked loads included; where they do the same with the two
halves, one rotated read does. (C++ cuts its loops where the condition changes, and so computes each branch once.)
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from torch.utils._sympy.functions import ModularIndexing

from overlapc.ir.body import Body, Cast, Constant, Index, Load, Op, Value, op
from overlapc.ir.facts import known_truth, learn
from overlapc.ir.rewriting import rebuild, rewrite

_REACH = 64  # pairs of values compared below one `where`


def joined_halves(body: Body) -> Body:
    """`body` with one read for two; the same object where nothing is rotated."""
    if not any(isinstance(value, Op) and value.name == "where" for value in body.values()):
        return body
    sizes = {loop.symbol: loop.size for loop in (*body.loops, *body.reduction)}
    changed = False

    def replaced(value: Value) -> Value | None:
        nonlocal changed
        found = _rotated(value, sizes) if isinstance(value, Op) and value.name == "where" else None
        changed = changed or found is not None
        return found

    made = rewrite(body, body.loops, body.reduction, replace=replaced)
    return made if changed else body


def _rotated(where: Op, sizes: dict[sympy.Symbol, sympy.Expr]) -> Value | None:
    condition, yes, no = where.args
    if not isinstance(condition, Op) or condition.name != "lt":
        return None
    position, half = (_whole_number(arg) for arg in condition.args)
    if position is None or half is None or not half.is_Integer or sizes.get(position) != 2 * half:
        return None
    halves = _Halves(condition, position, half)
    value = halves.joined(yes, no)
    if value is not None:
        return value
    if _is_negated(yes):
        value = halves.joined(yes.operands()[0], no)
        return None if value is None else op("where", condition, op("neg", value), value)
    if _is_negated(no):
        value = halves.joined(yes, no.operands()[0])
        return None if value is None else op("where", condition, value, op("neg", value))
    return None


def _whole_number(value: Value) -> sympy.Expr | None:
    if isinstance(value, Index):
        return value.expr
    return sympy.Integer(value.number) if isinstance(value, Constant) and isinstance(value.number, int) else None


def _is_negated(value: Value) -> bool:
    return isinstance(value, Op) and value.name == "neg"


def _same(value: Value, operands: tuple[Value, ...]) -> Value:
    """What `value` does, on other operands; values are hash-consed, so equal ones are one."""
    return rebuild(value, operands, lambda expr: expr)


@dataclass
class _Halves:
    """Joins what is computed where `condition` holds, `position < half`, with what is computed elsewhere."""

    condition: Value
    position: sympy.Symbol
    half: sympy.Expr
    left: int = _REACH

    def joined(self, yes: Value, no: Value) -> Value | None:
        """One value that is `yes` where the condition holds and `no` elsewhere; None unless both are made alike."""
        if yes is no:
            return yes
        self.left -= 1
        if self.left < 0:
            return None
        if isinstance(yes, Load) and isinstance(no, Load):
            return self._read(yes, no)
        if not (isinstance(yes, Op | Cast) and type(yes) is type(no) and len(yes.operands()) == len(no.operands())):
            return None
        if _same(no, yes.operands()) is not yes:
            return None
        operands = []
        for one, other in zip(yes.operands(), no.operands(), strict=True):
            operand = self.joined(one, other)
            if operand is None:
                return None
            operands.append(operand)
        return _same(yes, tuple(operands))

    def _read(self, yes: Load, no: Load) -> Load | None:
        if (yes.buffer, yes.memory_dtype) != (no.buffer, no.memory_dtype) or yes.indirect or no.indirect:
            return None
        if not (self._holds(yes.mask, True) and self._holds(no.mask, False)):
            return None
        other = yes.index.xreplace({self.position: self.position - 2 * self.half})
        if sympy.expand(other - no.index) != 0:
            return None
        # The position and a step: Triton sees neighbours in that, and not in a remainder of a remainder.
        place = self.position - 2 * self.half * ModularIndexing(self.position, self.half, sympy.Integer(2))
        return Load(yes.buffer, sympy.expand(yes.index.xreplace({self.position: place})), yes.memory_dtype)

    def _holds(self, mask: Value | None, side: bool) -> bool:
        facts: dict[Value, bool] = {}
        learn(self.condition, side, facts)
        return mask is None or known_truth(mask, facts) is True
