"""C++ loops as text: plain ones, and ones over blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

from overlapc.codegen.cpp.expressions import index_text
from overlapc.ir.body import Loop


@dataclass(slots=True)
class For:
    """A C++ loop about to be written."""

    header: str
    symbol: sympy.Symbol | None = None  # the loop symbol it binds
    before: list[str] = field(default_factory=list)  # lines just before it, pragmas last
    inside: list[str] = field(default_factory=list)  # first lines of its body
    after: list[str] = field(default_factory=list)  # lines just after it


def plain(loop: Loop, begin: str = "0", end: str | None = None) -> For:
    name = loop.symbol
    end = index_text(loop.size) if end is None else end
    return For(f"for (int64_t {name} = {begin}; {name} < {end}; ++{name})", loop.symbol)


def blocks(loop: Loop, step: int, begin: str = "0", end: str | None = None) -> For:
    """The loop over blocks of `loop`; `in_block` is the one over a block."""
    name = f"{loop.symbol}_block"
    end = index_text(loop.size) if end is None else end
    return For(
        f"for (int64_t {name} = {begin}; {name} < {end}; {name} += {step})",
        inside=[f"const int64_t {loop.symbol}_end = at_most({name} + {step}, {end});"],
    )


def in_block(loop: Loop) -> For:
    return plain(loop, f"{loop.symbol}_block", f"{loop.symbol}_end")


def longer_than(loop: Loop, step: int) -> bool:
    """Whether `loop` may have more than `step` iterations."""
    return not (loop.size.is_Integer and int(loop.size) <= step)
