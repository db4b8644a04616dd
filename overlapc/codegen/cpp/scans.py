"""Scans in C++: each element moves a state on, or, along rows, a block of elements is scanned at once.

Along a row each result waits for the one before it, and would hold up everything else in its loop. So a block goes

    for (r0 ...) scan3[r0 - r0_block] = ...;               what is scanned, side by side
    scan_sums(scan3, r0_end - r0_block, so_far3);          prelude.h: several at a time, where their kind allows that
    for (r0 ...) out0[r0] = ... scan3[r0 - r0_block] ...;  all else, side by side again

Columns have a state each and go side by side as they are; short rows do not repay the arrays.
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

_SHORT = 32  # elements of a row, up to which arrays and calls cost more than they save


class ScanningFunction(Function):
    """Writes nests of loops in which values are scanned."""

    def nest(
        self,
        loops: Sequence[For],
        roots: Iterable[Value],
        known: Mapping[Value, str],
        finish: Callable[[Mapping[Value, str]], Iterable[str]],
        collapsed: int = 0,
    ) -> None:
        """As for other kernels; what `roots` need scanned is scanned from the first iteration of `loops` on."""
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
        """As for other kernels; a scan's also moves its state on."""
        if not isinstance(value, Scan):
            return super().statement(value, known)
        lane = "[lane]" if self.plan.columns else ""
        return _moved_on(value, self.number[value], known[value.arg], f"int64_t({index_text(value.position)})", lane)

    def _scans_of(self, roots: Iterable[Value], known: Mapping[Value, str]) -> list[Scan]:
        """What has to be scanned for `roots`, a scan of another after it."""
        return [value for value in self.needed(roots, known) if isinstance(value, Scan)]

    def _in_arrays(self, scans: Sequence[Scan]) -> bool:
        """Whether blocks are scanned at once: of long rows, where the scans or what they are given gain by it."""
        vector = self.plan.vector
        assert vector is not None
        if self.plan.columns or (vector.size.is_Integer and int(vector.size) <= _SHORT):
            return False
        given = self.needed([scan.arg for scan in scans], {})
        return any(weight(value) >= EXPENSIVE for value in given) or not all(_waits(scan) for scan in scans)

    def _nest_in_blocks(
        self,
        loops: Sequence[For],
        scans: Sequence[Scan],
        roots: Sequence[Value],
        known: Mapping[Value, str],
        finish: Callable[[Mapping[Value, str]], Iterable[str]],
    ) -> None:
        """The last of `loops` goes over a row, or a block of it."""
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
        """The statement that scans a block, and finds the places of extremes."""
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
    """The maxima of an argmax, the minima of an argmin."""
    return Scan(scan.kind.removeprefix("arg"), scan.arg, scan.arg.dtype, scan.position)


def _waits(scan: Scan) -> bool:
    """Whether one element after another is as fast as any other way that is as exact: see prelude.h."""
    return scan.kind == "prod" or (scan.kind == "sum" and not scan.dtype.is_floating_point)


@dataclass(frozen=True, slots=True)
class _Array:
    """A block of what is scanned, and then of the results."""

    kind: str
    identity: str  # initial state of a scan
    function: str  # of prelude.h: (array, how much of it counts, what all blocks before add up to); "" for places
    given: str = "{}"  # an element from a value
    result: str = "{}"  # a value from an element


def _array(scan: Scan) -> _Array:
    (*_, state) = _states(scan, 0)
    if scan.kind in ("max", "min"):
        of_floats = "true" if scan.dtype.is_floating_point else "false"
        function = f"scan_{'maxima' if scan.kind == 'max' else 'minima'}<{of_floats}>"
        if not scan.dtype.is_floating_point:
            return _Array(state.kind, state.identity, function)
        # Integers of the same order: GCC makes branches of comparisons that look for NaN.
        bits = 32 if scan.dtype == torch.float32 else 64
        of_nan = f"INT{bits}_{'MAX' if scan.kind == 'max' else 'MIN'}"
        begin = f"ordered({state.identity}, {of_nan})"
        return _Array(f"int{bits}_t", begin, function, f"ordered({{}}, {of_nan})", "from_ordered({})")
    function = {"sum": "scan_sums", "prod": "scan_products", "logsumexp": "scan_logs"}.get(scan.kind, "")
    return _Array(state.kind, state.identity, function, result=f"{C_TYPE[scan.dtype]}({{}})")


def _states(scan: Scan, number: int) -> tuple[Variable, ...]:
    """What a scan carries from one iteration to the next, at its start."""
    name = f"scan{number}"
    if scan.kind in ("sum", "prod", "logsumexp"):
        # As in eager, whose kernels carry a double for floats.
        kind = "double" if scan.dtype.is_floating_point else C_TYPE[scan.dtype]
        start = {"sum": "0", "prod": "1", "logsumexp": "-INFINITY"}[scan.kind]
        return (Variable(kind, name, start),)
    limit = limit_of(scan.arg.dtype, larger=scan.kind.endswith("max"))
    best = Variable(C_TYPE[scan.arg.dtype], name, limit)
    return (best, Variable("int64_t", f"{name}_at", "0")) if scan.kind.startswith("arg") else (best,)


def _moved_on(scan: Scan, number: int, value: str, position: str, lane: str) -> str:
    """An expression that takes `value` into the state and is the scan's value there; `lane` indexes the state."""
    state = f"scan{number}{lane}"
    kind = C_TYPE[scan.arg.dtype]
    if scan.kind in ("sum", "prod"):
        return f"{C_TYPE[scan.dtype]}({state} {'+' if scan.kind == 'sum' else '*'}= {value})"
    if scan.kind == "logsumexp":
        return f"{C_TYPE[scan.dtype]}({state} = log_add_exp({state}, {value}))"
    if scan.kind in ("max", "min"):
        return f"{state} = {'maximum' if scan.kind == 'max' else 'minimum'}<{kind}>({state}, {value})"
    return f"running_{scan.kind}<{kind}>({value}, {position}, {state}, scan{number}_at{lane})"
