"""Lines of C++ in a nest of blocks."""

from __future__ import annotations

from collections.abc import Iterable

from overlapc.codegen.cpp.loops import For


class Writer:
    """The lines written so far, indented by the blocks that are open."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def line(self, text: str) -> None:
        """One line, which may be empty."""
        self.lines.append("  " * self.depth + text if text else "")

    def write_lines(self, lines: Iterable[str]) -> None:
        """Each of them."""
        for text in lines:
            self.line(text)

    def open(self, loop: For) -> None:
        """The lines before a loop, and its head."""
        self.write_lines(loop.before)
        self.begin(loop)

    def begin(self, loop: For) -> None:
        """The head of a loop, and the first lines within."""
        if loop.pragma:
            self.line(loop.pragma)
        self.line(loop.header + " {")
        self.depth += 1
        self.write_lines(loop.inside)

    def close(self, loop: For | None = None) -> None:
        """Ends the innermost block; the lines after `loop` if it is one that `open` began."""
        self.depth -= 1
        self.line("}")
        self.write_lines(loop.after if loop is not None else ())
