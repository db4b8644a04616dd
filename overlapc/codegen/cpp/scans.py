"""Scans in C++: each element updates a state, or, along rows, a block of elements is scanned at once.

Along a row each result depends on the previous one, which would keep the whole loop from being vectorized. So a block
is computed in three steps:

    for (r0 ...) scan3[r0 - r0_block] = ...;               the scanned values, vectorized
    scan_sums(scan3, r0_end - r0_block, so_far3);          prelude.h: several at a time if the kind of scan allows it
    for (r0 ...) out0[r0] = ... scan3[r0 - r0_block] ...;  everything else, vectorized

Columns have one state each and are vectorized without this; for short rows the arrays do not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from overlapc.codegen.cpp.accumulators import Variable, limit_of
from overlapc.codegen.cpp.expressions import C_TYPE, EXPENSIVE, index_text, weight
from overlapc.codegen.cpp.function import Function
from overlapc.codegen.cpp.loop_plan import BLOCK, stride
from overlapc.codegen.cpp.loops import For
from overlapc.ir.body import Scan, Value

_SHORT = 32  # elements of a row up to which arrays and calls cost more than they save


class ScanningFunction(Function):
    """Writes nests of loops that contain scans."""

    def nest(
        self,
        loops: Sequence[For],
        roots: Iterable[Value],
        known: Mapping[Value, str],
        finish: Callable[[Mapping[Value, str]], Iterable[str]],
        collapsed: int = 0,
    ) -> None:
        """Write a nest as in the base class; scans that `roots` need begin at the first iteration of `loops`."""
        roots = list(roots)
        scans = self._scans_of(roots, known)
        if not scans:
            super().nest(loops, roots, known, finish, collapsed)
            return
        assert not collapsed, "a scan's loops run in order"
        self.line("{")
        self.depth += 1
        if self._in_arrays(scans):
            self._nest_in_blocks(loops, scans, roots, known, finish)
        else:
            self.declare([state for scan in scans for state in _states(scan, self.number[scan])])
            in_order = loops if self.plan.columns else [*loops[:-1], replace(loops[-1], pragma="")]
            super().nest(in_order, roots, known, finish)
        self.close()

    def statement(self, value: Value, known: Mapping[Value, str]) -> str:
        """Return the expression of a value as in the base class; the expression of a scan also updates its state."""
        if not isinstance(value, Scan):
            return super().statement(value, known)
        lane = "[lane]" if self.plan.columns else ""
        return _updated(value, self.number[value], known[value.arg], f"int64_t({index_text(value.position)})", lane)

    def _scans_of(self, roots: Iterable[Value], known: Mapping[Value, str]) -> list[Scan]:
        """Return the scans that `roots` need; a scan of another scan's result comes after it."""
        return [value for value in self.needed(roots, known) if isinstance(value, Scan)]

    def _in_arrays(self, scans: Sequence[Scan]) -> bool:
        """Whether to scan blocks at once: for long rows whose scans, or the scanned values, become faster by it."""
        vector = self.plan.vector
        assert vector is not None
        if self.plan.columns or (vector.size.is_Integer and int(vector.size) <= _SHORT):
            return False
        given = self.needed([scan.arg for scan in scans], {})
        return any(weight(value) >= EXPENSIVE for value in given) or not all(_fastest_in_order(scan) for scan in scans)

    def _nest_in_blocks(
        self,
        loops: Sequence[For],
        scans: Sequence[Scan],
        roots: Sequence[Value],
        known: Mapping[Value, str],
        finish: Callable[[Mapping[Value, str]], Iterable[str]],
    ) -> None:
        """Write a nest that scans blocks at once; the last of `loops` runs over a row or a block of it."""
        *around, inner = loops
        assert inner.loop is not None
        place_of = {_extremes_of(scan): scan for scan in scans if _is_place(scan)}
        scans = list(dict.fromkeys([*scans, *place_of]))
        size = inner.loop.size
        length = min(BLOCK, int(size)) if size.is_Integer else BLOCK
        for scan in scans:
            number, array = self.number.setdefault(scan, len(self.number)), _array(scan)
            self.line(f"{array.kind} scan{number}[{length}], so_far{number} = {array.identity};")
        for loop in around:
            self.open(loop)
        names = dict(known)
        needed = self.needed([*roots, *(scan.arg for scan in scans)], names)
        self.define((value for value in needed if inner.loop.symbol not in self.symbols[value]), names)
        here = inner.name if inner.begin == "0" else f"{inner.name} - {inner.begin}"
        side_by_side = self.simd(replace(inner, before=[], after=[], pragma=""))
        while scans:
            ready = [scan for scan in scans if not self._scans_of([scan.arg], names)]
            given = [scan for scan in ready if not _is_place(scan)]  # places come with the extremes

            def fill(found: Mapping[Value, str], given: Sequence[Scan] = given) -> list[str]:
                return [f"{self._at(scan, here)} = {_array(scan).given.format(found[scan.arg])};" for scan in given]

            super().nest([side_by_side], [scan.arg for scan in given], names, fill)
            self.write_lines(self._scan_block(scan, place_of.get(scan), inner) for scan in given)
            names.update((scan, _array(scan).result.format(self._at(scan, here))) for scan in ready)
            scans = [scan for scan in scans if scan not in names]
        super().nest([inner], roots, names, finish)
        for loop in reversed(around):
            self.close(loop)

    def _at(self, scan: Scan, here: str) -> str:
        return f"scan{self.number[scan]}[{here}]"

    def _scan_block(self, scan: Scan, place: Scan | None, inner: For) -> str:
        """Return the statement that scans a block, and finds the positions of extremes if `place` is given."""
        count = inner.end if inner.begin == "0" else f"{inner.end} - {inner.begin}"
        number = self.number[scan]
        given = f"scan{number}, {count}, so_far{number}"
        if place is not None:
            assert inner.loop is not None
            symbol, number = inner.loop.symbol, self.number[place]
            assert stride(place.position, symbol) == 1, f"{place.position} does not count the elements of a row"
            begin = sympy.Integer(0) if inner.begin == "0" else sympy.Symbol(inner.begin, integer=True)
            given += f", scan{number}, {index_text(place.position.subs(symbol, begin))}, so_far{number}"
        return f"{_array(scan).function}({given});"


def _is_place(scan: Scan) -> bool:
    return scan.kind.startswith("arg")


def _extremes_of(scan: Scan) -> Scan:
    """Return the scan for the maxima of a cumulative argmax, or for the minima of an argmin."""
    return Scan(scan.kind.removeprefix("arg"), scan.arg, scan.arg.dtype, scan.position)


def _fastest_in_order(scan: Scan) -> bool:
    """Whether no equally exact method is faster than scanning one element after another: see prelude.h."""
    return scan.kind == "prod" or (scan.kind == "sum" and not scan.dtype.is_floating_point)


@dataclass(frozen=True, slots=True)
class _Array:
    """The array that holds a block of scanned values, and then of results."""

    kind: str  # C++ type of an element
    identity: str  # initial state of a scan
    function: str  # in prelude.h: (array, number of elements, state after all earlier blocks); "" for positions
    given: str = "{}"  # format of an element, from a value
    result: str = "{}"  # format of a value, from an element


def _array(scan: Scan) -> _Array:
    (*_, state) = _states(scan, 0)
    if scan.kind in ("max", "min"):
        of_floats = "true" if scan.dtype.is_floating_point else "false"
        function = f"scan_{'maxima' if scan.kind == 'max' else 'minima'}<{of_floats}>"
        if not scan.dtype.is_floating_point:
            return _Array(state.kind, state.identity, function)
        # Compared as integers of the same order: GCC compiles comparisons that handle NaN to branches.
        bits = 32 if scan.dtype == torch.float32 else 64
        of_nan = f"INT{bits}_{'MAX' if scan.kind == 'max' else 'MIN'}"
        begin = f"ordered({state.identity}, {of_nan})"
        return _Array(f"int{bits}_t", begin, function, f"ordered({{}}, {of_nan})", "from_ordered({})")
    function = {"sum": "scan_sums", "prod": "scan_products", "logsumexp": "scan_logs"}.get(scan.kind, "")
    return _Array(state.kind, state.identity, function, result=f"{C_TYPE[scan.dtype]}({{}})")


def _states(scan: Scan, number: int) -> tuple[Variable, ...]:
    """Return the variables that a scan carries from one iteration to the next, with their initial values."""
    name = f"scan{number}"
    if scan.kind in ("sum", "prod", "logsumexp"):
        # A double for floats, as in eager's kernels.
        kind = "double" if scan.dtype.is_floating_point else C_TYPE[scan.dtype]
        start = {"sum": "0", "prod": "1", "logsumexp": "-INFINITY"}[scan.kind]
        return (Variable(kind, name, start),)
    limit = limit_of(scan.arg.dtype, larger=scan.kind.endswith("max"))
    best = Variable(C_TYPE[scan.arg.dtype], name, limit)
    return (best, Variable("int64_t", f"{name}_at", "0")) if scan.kind.startswith("arg") else (best,)


def _updated(scan: Scan, number: int, value: str, position: str, lane: str) -> str:
    """Return an expression that updates the state by `value` and yields the scan's value; `lane` indexes the state."""
    state = f"scan{number}{lane}"
    kind = C_TYPE[scan.arg.dtype]
    if scan.kind in ("sum", "prod"):
        return f"{C_TYPE[scan.dtype]}({state} {'+' if scan.kind == 'sum' else '*'}= {value})"
    if scan.kind == "logsumexp":
        return f"{C_TYPE[scan.dtype]}({state} = log_add_exp({state}, {value}))"
    if scan.kind in ("max", "min"):
        return f"{state} = {'maximum' if scan.kind == 'max' else 'minimum'}<{kind}>({state}, {value})"
    return f"running_{scan.kind}<{kind}>({value}, {position}, {state}, scan{number}_at{lane})"
