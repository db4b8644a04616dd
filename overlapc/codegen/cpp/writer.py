"""Writes indented lines of C++."""

from __future__ import annotations

from collections.abc import Iterable

from overlapc.codegen.cpp.loops import For


class Writer:
    """The lines written so far; new lines are indented by the number of open blocks."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def line(self, text: str) -> None:
        """Write one line, which may be empty."""
        self.lines.append("  " * self.depth + text if text else "")

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write several lines."""
        for text in lines:
            self.line(text)

    def open(self, loop: For) -> None:
        """Write the lines before a loop, and begin the loop."""
        self.write_lines(loop.before)
        self.begin(loop)

    def begin(self, loop: For) -> None:
        """Write the head of a loop, and its first lines."""
        if loop.pragma:
            self.line(loop.pragma)
        self.line(loop.header + " {")
        self.depth += 1
        self.write_lines(loop.inside)

    def close(self, loop: For | None = None) -> None:
        """End the innermost block, and write the lines after `loop` if that was begun by `open`."""
        self.depth -= 1
        self.line("}")
        self.write_lines(loop.after if loop is not None else ())
