"""C++ loops as text: over a whole loop of the body, or over its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import sympy

from overlapc.codegen.cpp.expressions import index_text
from overlapc.ir.body import Loop


@dataclass(slots=True)
class For:
    """A C++ loop to be written."""

    name: str  # name of its variable
    begin: str
    end: str
    loop: Loop | None = None  # loop of the body whose symbol is defined inside
    origin: sympy.Expr = sympy.S.Zero  # position in `loop` at which the variable is 0
    step: int = 1
    before: list[str] = field(default_factory=list)  # lines before the loop
    pragma: str = ""  # pragma of the loop, after `before`
    inside: list[str] = field(default_factory=list)  # first lines inside of the loop
    after: list[str] = field(default_factory=list)  # lines after the loop

    @property
    def header(self) -> str:
        """The head of the loop: `for (int64_t p0 = 0; p0 < 8; ++p0)`."""
        step = f"++{self.name}" if self.step == 1 else f"{self.name} += {self.step}"
        return f"for (int64_t {self.name} = {self.begin}; {self.name} < {self.end}; {step})"

    def between(self, begin: sympy.Expr | None, end: sympy.Expr | None) -> For:
        """Return this loop restricted to positions from `begin` to `end` of `loop`; None leaves that bound as it is."""
        first = self.begin if begin is None else _extreme("at_least", self.begin, index_text(begin - self.origin))
        last = self.end if end is None else _extreme("at_most", self.end, index_text(end - self.origin))
        return replace(self, begin=first, end=last, before=[], after=[])


def _extreme(name: str, a: str, b: str) -> str:
    if a.isdigit() and b.isdigit():
        return str(max(int(a), int(b)) if name == "at_least" else min(int(a), int(b)))
    return f"{name}({a}, {b})"


def plain(loop: Loop, begin: str = "0", end: str | None = None) -> For:
    """Return a C++ loop over the whole of `loop`, or from `begin` to `end`."""
    return For(str(loop.symbol), begin, index_text(loop.size) if end is None else end, loop)


def blocks(loop: Loop, step: int, begin: str = "0", end: str | None = None) -> For:
    """Return the loop over blocks of `loop`; `in_block` returns the loop over one block."""
    name = f"{loop.symbol}_block"
    end = index_text(loop.size) if end is None else end
    inside = [f"const int64_t {loop.symbol}_end = at_most({name} + {step}, {end});"]
    return For(name, begin, end, step=step, inside=inside)


def stripes(loop: Loop, step: int, block: int) -> tuple[For, For]:
    """Return the loop over stripes of `loop`, and the loop over the blocks of a stripe."""
    name, end = f"{loop.symbol}_stripe", f"{loop.symbol}_stripe_end"
    inside = [f"const int64_t {end} = at_most({name} + {step}, {index_text(loop.size)});"]
    return For(name, "0", index_text(loop.size), step=step, inside=inside), blocks(loop, block, name, end)


def in_block(loop: Loop) -> For:
    """Return the loop over one block; see `blocks`."""
    return plain(loop, f"{loop.symbol}_block", f"{loop.symbol}_end")


def longer_than(loop: Loop, step: int) -> bool:
    """Whether `loop` may have more than `step` iterations."""
    return not (loop.size.is_Integer and int(loop.size) <= step)
