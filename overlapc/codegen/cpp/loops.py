"""C++ loops as text: plain ones, and ones over blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import sympy

from overlapc.codegen.cpp.expressions import index_text
from overlapc.ir.body import Loop


@dataclass(slots=True)
class For:
    """A C++ loop about to be written."""

    name: str  # of its variable
    begin: str
    end: str
    loop: Loop | None = None  # of the body, whose symbol is known inside
    origin: sympy.Expr = sympy.S.Zero  # position in that loop at which the variable is 0
    step: int = 1
    before: list[str] = field(default_factory=list)  # lines just before it
    pragma: str = ""  # its own, after those
    inside: list[str] = field(default_factory=list)  # first lines of its body
    after: list[str] = field(default_factory=list)  # lines just after it

    @property
    def header(self) -> str:
        """`for (int64_t p0 = 0; p0 < 8; ++p0)`."""
        step = f"++{self.name}" if self.step == 1 else f"{self.name} += {self.step}"
        return f"for (int64_t {self.name} = {self.begin}; {self.name} < {self.end}; {step})"

    def between(self, begin: sympy.Expr | None, end: sympy.Expr | None) -> For:
        """The part from position `begin` of its loop up to `end`; None where it goes as far as the whole."""
        first = self.begin if begin is None else _extreme("at_least", self.begin, index_text(begin - self.origin))
        last = self.end if end is None else _extreme("at_most", self.end, index_text(end - self.origin))
        return replace(self, begin=first, end=last, before=[], after=[])


def _extreme(name: str, a: str, b: str) -> str:
    if a.isdigit() and b.isdigit():
        return str(max(int(a), int(b)) if name == "at_least" else min(int(a), int(b)))
    return f"{name}({a}, {b})"


def plain(loop: Loop, begin: str = "0", end: str | None = None) -> For:
    """The whole of `loop`, or from `begin` to `end`."""
    return For(str(loop.symbol), begin, index_text(loop.size) if end is None else end, loop)


def blocks(loop: Loop, step: int, begin: str = "0", end: str | None = None) -> For:
    """The loop over blocks of `loop`; `in_block` is the one over a block."""
    name = f"{loop.symbol}_block"
    end = index_text(loop.size) if end is None else end
    inside = [f"const int64_t {loop.symbol}_end = at_most({name} + {step}, {end});"]
    return For(name, begin, end, step=step, inside=inside)


def stripes(loop: Loop, step: int, block: int) -> tuple[For, For]:
    """The loop over stripes of `loop`, and the one over the blocks of a stripe."""
    name, end = f"{loop.symbol}_stripe", f"{loop.symbol}_stripe_end"
    inside = [f"const int64_t {end} = at_most({name} + {step}, {index_text(loop.size)});"]
    return For(name, "0", index_text(loop.size), step=step, inside=inside), blocks(loop, block, name, end)


def in_block(loop: Loop) -> For:
    """The loop over one block; see `blocks`."""
    return plain(loop, f"{loop.symbol}_block", f"{loop.symbol}_end")


def longer_than(loop: Loop, step: int) -> bool:
    """Whether `loop` may have more than `step` iterations."""
    return not (loop.size.is_Integer and int(loop.size) <= step)
