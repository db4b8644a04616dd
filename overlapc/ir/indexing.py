"""Index expressions: sympy integers over loop symbols and sizes, and their ranges.

An index counts elements of a flat buffer. Divisions round down, as in Python: `FloorDiv` is torch's sympy function,
`ModularIndexing` is defined here. Everything here is exact for symbolic sizes; if nothing can be proved, an expression
is left unchanged, which is slower but never wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

Bounds = tuple[sympy.Expr, sympy.Expr]  # lower and upper bound, both inclusive
Ranges = tuple[tuple[sympy.Symbol, sympy.Expr, sympy.Expr], ...]  # symbol, lowest, highest: hashable Bounds


class ModularIndexing(sympy.Function):
    """`(base // divisor) % modulus` with a positive divisor and modulus: never negative, also if `base` is.

    torch has a function of this name and notation, which to sympy is negative where `base` is, as in C.
    """

    nargs = (3,)
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, base: sympy.Expr, divisor: sympy.Expr, modulus: sympy.Expr) -> sympy.Expr | None:
        """Return the value where all are numbers, or a simpler expression; None if there is none."""
        if base == 0 or modulus == 1:
            return sympy.S.Zero
        if base.is_Integer and divisor.is_Integer and modulus.is_Integer:
            return base // divisor % modulus
        if isinstance(base, FloorDiv):
            return cls(base.args[0], base.args[1] * divisor, modulus)
        if divisor.is_Integer and divisor != 1:
            terms = sympy.Add.make_args(base)
            common = sympy.igcd(divisor, *(term.as_coeff_Mul()[0] for term in terms))
            if common != 1:
                return cls(sympy.Add(*(term / common for term in terms)), divisor // common, modulus)
        return None


@lru_cache(None)
def loop_symbol(prefix: str, position: int) -> sympy.Symbol:
    """Return a symbol: `p0`, `p1`, … for parallel loops, `r0`, … for reduction loops, `i0`, … for loaded indices."""
    return sympy.Symbol(f"{prefix}{position}", integer=True, nonnegative=prefix != "i")


def at_most(low: sympy.Expr, high: sympy.Expr) -> bool:
    """Whether `low <= high` can be proved (sizes are positive integers)."""
    if low == high:
        return True
    difference = high - low
    if difference.is_Integer:
        return bool(difference >= 0)
    return bool(sympy.expand(difference).is_nonnegative)


def is_one(size: sympy.Expr) -> bool:
    """Whether a size is the number 1."""
    return bool(size == 1)


_PLAIN = (sympy.Add, sympy.Mul, sympy.Pow, FloorDiv, ModularIndexing, Mod, PythonMod, Max, Min, sympy.Max, sympy.Min)


@lru_cache(200_000)
def is_plain(expr: sympy.Expr) -> bool:
    """Whether generators can print the expression: it is integer arithmetic without floats."""
    if expr.is_Integer or expr.is_Symbol:
        return True
    return isinstance(expr, _PLAIN) and all(is_plain(arg) for arg in expr.args)


@lru_cache(200_000)
def bounds(expr: sympy.Expr, ranges: Ranges) -> Bounds | None:
    """Return bounds of `expr`; None if a part of it has no known range."""
    if expr.is_Integer:
        return expr, expr
    if expr.is_Symbol:
        for symbol, low, high in ranges:
            if symbol == expr:
                return low, high
        # A size is constant within the kernel, and so its own bound.
        return (expr, expr) if expr.is_nonnegative else None
    if isinstance(expr, sympy.Add):
        low, high = sympy.S.Zero, sympy.S.Zero
        for term in expr.args:
            part = bounds(term, ranges)
            if part is None:
                return None
            low, high = low + part[0], high + part[1]
        return low, high
    if isinstance(expr, sympy.Mul):
        low, high = sympy.S.One, sympy.S.One
        for factor in expr.args:
            part = bounds(factor, ranges)
            if part is None:
                return None
            if not at_most(sympy.S.Zero, part[0]):
                if part[0] != part[1] or not at_most(part[1], sympy.S.Zero):
                    return None
                low, high = high * part[0], low * part[0]  # a negative constant swaps the bounds
            elif at_most(sympy.S.Zero, low):
                low, high = low * part[0], high * part[1]
            elif at_most(high, sympy.S.Zero):
                low, high = low * part[1], high * part[0]
            else:
                return None
        return low, high
    if isinstance(expr, FloorDiv):
        base, divisor = expr.args
        part = bounds(base, ranges)
        if part is None or not at_most(sympy.S.One, divisor):
            return None
        return FloorDiv(part[0], divisor), FloorDiv(part[1], divisor)
    if isinstance(expr, ModularIndexing):
        return sympy.S.Zero, expr.args[2] - 1
    return None


def exact_quotient(term: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    """Return `term / divisor` if that is an integer for every value of the symbols; else None."""
    coefficient, factors = term.as_coeff_Mul()
    of_divisor, divisor_factors = divisor.as_coeff_Mul()
    if isinstance(factors, sympy.Add) and divisor_factors != 1:
        quotient = sympy.cancel(term / divisor)
        return quotient if quotient.is_integer and not sympy.fraction(quotient)[1].free_symbols else None
    if not coefficient.is_Integer or not of_divisor.is_Integer or coefficient % of_divisor != 0:
        return None
    if coefficient == 0 or divisor_factors == 1:
        return coefficient // of_divisor * factors
    powers = dict(factors.as_powers_dict())
    for base, exponent in divisor_factors.as_powers_dict().items():
        left = powers.get(base, sympy.S.Zero) - exponent
        if left.is_nonnegative is not True:
            return None
        powers[base] = left
    return sympy.Mul(coefficient // of_divisor, *(base**exponent for base, exponent in powers.items()))


def _split(expr: sympy.Expr, divisor: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return (quotient, rest) with `expr == quotient * divisor + rest`; quotient has every divisible term."""
    quotient, rest = [], []
    for term in sympy.Add.make_args(expr):
        whole = exact_quotient(term, divisor)
        if whole is not None:
            quotient.append(whole)
        elif term.is_Integer and divisor.is_Integer and term > divisor:
            quotient.append(term // divisor)
            rest.append(term % divisor)
        else:
            rest.append(term)
    return sympy.Add(*quotient), sympy.Add(*rest)


def _only_quotient(expr: sympy.Expr, divisor: sympy.Expr, ranges: Ranges) -> sympy.Expr | None:
    """Return `expr // divisor` if it is the same number everywhere in `ranges`; else None."""
    part = bounds(expr, ranges)
    if part is None:
        return None
    if at_most(sympy.S.Zero, part[0]) and at_most(part[1], divisor - 1):
        return sympy.S.Zero
    if divisor.is_Integer and all(limit.is_Integer for limit in part) and part[0] // divisor == part[1] // divisor:
        return part[0] // divisor
    return None


def _floor_div(base: sympy.Expr, divisor: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    if divisor == 1:
        return base
    base = sympy.expand(base)
    quotient, rest = _split(base, divisor)
    if rest == 0:
        return quotient
    if quotient != 0 and _only_quotient(base, divisor, ranges) == 0:
        return sympy.S.Zero
    whole = _only_quotient(rest, divisor, ranges)
    if whole is not None:
        return quotient + whole
    if isinstance(rest, FloorDiv):
        return quotient + _floor_div(rest.args[0], rest.args[1] * divisor, ranges)
    scale, scaled, _ = _low_digit(rest, divisor, ranges)
    if scale != 1:
        return quotient + _floor_div(scaled, divisor // scale, ranges)
    return quotient + FloorDiv(rest, divisor)


def _modular(base: sympy.Expr, divisor: sympy.Expr, modulus: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    quotient = sympy.expand(_floor_div(base, divisor, ranges))
    split, rest = _split(quotient, modulus)
    if split != 0 and _only_quotient(quotient, modulus, ranges) == 0:  # a size minus 1 minus a loop
        return quotient
    whole = _only_quotient(rest, modulus, ranges)
    if whole is not None:
        return rest - whole * modulus
    if isinstance(rest, FloorDiv):
        return ModularIndexing(rest.args[0], rest.args[1], modulus)
    if isinstance(rest, ModularIndexing) and exact_quotient(rest.args[2], modulus) is not None:
        return ModularIndexing(rest.args[0], rest.args[1], modulus)
    scale, scaled, digit = _low_digit(rest, modulus, ranges)
    if scale != 1:
        return sympy.expand(scale * _modular(scaled, sympy.S.One, modulus // scale, ranges)) + digit
    return ModularIndexing(rest, sympy.S.One, modulus)


def _low_digit(expr: sympy.Expr, divisor: sympy.Expr, ranges: Ranges) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
    """Return (scale, scaled, digit): `expr == scale * scaled + digit`, 0 <= digit < scale, and scale divides divisor.

    For 128*p0 + r0 with r0 < 128 and divisor 4096, it is (128, p0, r0): dividing by 4096 is then dividing p0 by 32. The
    scale is the largest that follows from the coefficients, or 1.
    """
    if not divisor.is_Integer:
        return sympy.S.One, expr, sympy.S.Zero
    terms = [(term.as_coeff_Mul()[0], term) for term in sympy.Add.make_args(expr)]
    if not all(coefficient.is_Integer for coefficient, _ in terms):
        return sympy.S.One, expr, sympy.S.Zero
    terms.sort(key=lambda pair: -abs(pair[0]))
    shared = [sympy.Integer(divisor)]
    for coefficient, _ in terms:
        shared.append(sympy.Integer(sympy.igcd(shared[-1], coefficient)))
    for count in range(1, len(terms) + 1):
        scale = shared[count]
        digit = sympy.Add(*(term for _, term in terms[count:]))
        part = bounds(digit, ranges)
        if scale != 1 and part is not None and at_most(sympy.S.Zero, part[0]) and at_most(part[1], scale - 1):
            return scale, sympy.Add(*(term / scale for _, term in terms[:count])), digit
    return sympy.S.One, expr, sympy.S.Zero


def _rejoined(expr: sympy.Expr) -> sympy.Expr:
    """Return `expr` with quotient and remainder of the same division combined: `64*(x // 64) + x % 64` becomes x."""
    if not isinstance(expr, sympy.Add) or not expr.has(ModularIndexing):
        return expr
    for term in expr.args:
        factor, rest = term.as_coeff_Mul()
        if isinstance(rest, ModularIndexing):
            base, divisor, modulus = rest.args
            quotient = FloorDiv(base, divisor * modulus)
            if expr.coeff(quotient) == factor * modulus:
                whole = base if divisor == 1 else FloorDiv(base, divisor)
                return _rejoined(sympy.expand(expr - term - factor * modulus * quotient + factor * whole))
    return expr


@lru_cache(200_000)
def simplify(expr: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    """Return `expr` with divisions and remainders simplified where the ranges of its symbols allow it."""
    if not expr.has(FloorDiv, ModularIndexing):
        return expr if expr.is_Atom else sympy.expand(expr)
    if isinstance(expr, FloorDiv):
        return _floor_div(simplify(expr.args[0], ranges), simplify(expr.args[1], ranges), ranges)
    if isinstance(expr, ModularIndexing):
        base, divisor, modulus = (simplify(part, ranges) for part in expr.args)
        return _modular(base, divisor, modulus, ranges)
    if expr.is_Atom:
        return expr
    return _rejoined(sympy.expand(expr.func(*(simplify(part, ranges) for part in expr.args))))


@lru_cache(200_000)
def _replace(expr: sympy.Expr, pairs: tuple[tuple[sympy.Symbol, sympy.Expr], ...]) -> sympy.Expr:
    return expr.xreplace(dict(pairs))


def substitute(expr: sympy.Expr, replacement: Mapping[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
    """Return `expr` with all symbols replaced simultaneously; the result is not simplified."""
    pairs = tuple((symbol, replacement[symbol]) for symbol in _symbols(expr) if symbol in replacement)
    return _replace(expr, pairs) if pairs else expr


@lru_cache(200_000)
def _symbols(expr: sympy.Expr) -> tuple[sympy.Symbol, ...]:
    return tuple(sorted(expr.free_symbols, key=str))


def free_symbols(exprs: Iterable[sympy.Expr]) -> set[sympy.Symbol]:
    """Return all symbols in the expressions."""
    found: set[sympy.Symbol] = set()
    for expr in exprs:
        found.update(_symbols(expr))
    return found


def flat_index(position: Sequence[sympy.Expr], stride: Sequence[sympy.Expr], offset: sympy.Expr) -> sympy.Expr:
    """Return the element number of `position` in a strided layout."""
    return sympy.Add(offset, *(at * step for at, step in zip(position, stride, strict=True)))


def position_in(
    index: sympy.Expr, size: Sequence[sympy.Expr], stride: Sequence[sympy.Expr], ranges: Ranges
) -> list[sympy.Expr]:
    """Return the position whose `flat_index` is `index`, in a dense layout (where each element has one position)."""
    return [
        sympy.S.Zero if is_one(extent) else simplify(ModularIndexing(index, step, extent), ranges)
        for extent, step in zip(size, stride, strict=True)
    ]


def is_dense(size: Sequence[sympy.Expr], stride: Sequence[sympy.Expr]) -> bool:
    """Whether the layout has no gaps and no overlaps, in any order of dims."""
    expected = sympy.S.One
    dims = [(step, extent) for extent, step in zip(size, stride, strict=True) if not is_one(extent)]
    while dims:
        for at, (step, extent) in enumerate(dims):
            if step == expected:
                expected = sympy.expand(expected * extent)
                del dims[at]
                break
        else:
            return False
    return True


def numel(size: Iterable[sympy.Expr]) -> sympy.Expr:
    """Return the number of elements of a tensor of this size."""
    return sympy.expand(sympy.Mul(*size))
