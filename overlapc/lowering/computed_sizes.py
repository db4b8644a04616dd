"""Symbols for computed sizes: kernels see `extent0` where a size is `(s0 - 7) // 8`.

A size is at least 0, which sympy cannot derive from such a formula, and strides are products of sizes, which as
formulas are sums of many terms. With symbols, more divisions in index expressions are simplified, in less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import sympy

from overlapc.ir.body import Body, Loop
from overlapc.ir.ops import LoweredGraph
from overlapc.ir.rewriting import rewrite

_ARITHMETIC = (sympy.Add, sympy.Mul, sympy.Pow)


class ComputedSizes:
    """The computed sizes of a graph, and what replaces the formulas in them."""

    def __init__(self, graph: LoweredGraph) -> None:
        self._graph = graph
        self._replacement: dict[sympy.Expr, sympy.Expr] = {}  # division or maximum -> expression over symbols

    def learn(self, sizes: Iterable[sympy.Expr]) -> None:
        """Introduce symbols for the sizes of a tensor whose formulas are new."""
        for size in sizes:
            if not (size.is_Integer or size.is_Symbol):
                self._learn(size)

    def in_symbols(self, body: Body) -> Body:
        """Return `body` with the symbols in its loops and index expressions."""
        if not self._replacement:
            return body
        loops, reduction = (
            tuple(Loop(loop.symbol, self._in_symbols(loop.size)) for loop in group)
            for group in (body.loops, body.reduction)
        )
        return rewrite(body, loops, reduction, self._in_symbols)

    def _in_symbols(self, expr: sympy.Expr) -> sympy.Expr:
        replaced = expr.xreplace(self._replacement)
        return expr if replaced is expr else sympy.expand(replaced)

    def _learn(self, size: sympy.Expr) -> None:
        new = {part for part in _formulas(size) if part not in self._replacement}
        if len(new) != 1 or not all(map(self._is_given, size.free_symbols)):
            return
        (formula,) = new
        unknown = sympy.Dummy()
        whole = sympy.expand(size.xreplace({**self._replacement, formula: unknown}))
        factor, rest = whole.coeff(unknown, 1), whole.coeff(unknown, 0)
        if sympy.expand(factor * unknown + rest - whole) != 0:
            return
        if factor == 1:
            self._replacement[formula] = self._symbol(size) - rest
        elif rest == 0 and factor.is_positive:
            self._replacement[formula] = self._symbol(formula)

    def _symbol(self, value: sympy.Expr) -> sympy.Symbol:
        symbol = sympy.Symbol(f"extent{len(self._graph.computed)}", integer=True, nonnegative=True)
        self._graph.computed[str(symbol)] = value
        self._graph.size_hints[str(symbol)] = self._graph.hint(value)
        return symbol

    def _is_given(self, symbol: sympy.Symbol) -> bool:
        """Whether an argument has the symbol's value, so that it is known from the beginning."""
        return str(symbol) in self._graph.size_hints and str(symbol) not in self._graph.sources


def _formulas(expr: sympy.Expr) -> Iterator[sympy.Expr]:
    """Yield the outermost parts of `expr` that are no sums, products or powers of symbols."""
    if isinstance(expr, _ARITHMETIC):
        for part in expr.args:
            yield from _formulas(part)
    elif not (expr.is_Symbol or expr.is_Number):
        yield expr
