"""Splits text into statements, and statements into tokens, for the parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from overlapc.errors import ConfigError, ScheduleError, shown
from overlapc.schedule.syntax import WORD
from overlapc.units import MOST_BYTES, parse_bytes, parse_count, parse_ns

_T = TypeVar("_T")
_SHOWN = 160  # characters of a line that an error quotes
MOST_RANKS = 2**20  # ranks of a job; plans list all ranks of a group
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*)|(?P<end>[;\n])|(?P<string>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<source>\["(?:[^"\\\n]|\\.)*"\]|\[[^\]\n]*\])"""
    rf"""|(?P<word>{WORD.pattern})|(?P<mark>[=(),:@])""",
)


@dataclass
class Statement:
    """The tokens of one statement, its place in the text, and the position of the next token.

    The methods that take a token raise ScheduleError with line and column if the next token is another one.
    """

    tokens: list[tuple[str, str, int]]  # (kind, text, column)
    line: str
    number: int
    at: int = 0
    comment: str = ""  # the comment that follows the last statement of a line

    def peek(self, kind: str, ahead: int = 0) -> str | None:
        """Return the text of the token `ahead` tokens after the next, if it is of `kind`, else None; unquote words."""
        if self.at + ahead >= len(self.tokens):
            return None
        found, text, _ = self.tokens[self.at + ahead]
        if kind == "word" and found == "string":
            return self._unquoted(text)
        return text if found == kind else None

    def take_source(self) -> str | None:
        """Take a source in brackets, if one comes next, and return it without them."""
        text = self.peek("source")
        if text is None:
            return None
        source = text[1:-1]
        source = self._unquoted(source) if source.startswith('"') else source
        self.at += 1
        return source

    def _unquoted(self, text: str) -> str:
        try:
            name: str = json.loads(text)
            name.encode()  # fails for half of a surrogate pair
        except ValueError:
            self.fail("this quoted text is not a valid JSON string")
        return name

    def peek_mark(self, ahead: int = 0) -> str | None:
        """Return the token `ahead` tokens after the next if it is a mark such as `=`, else None."""
        return self.peek("mark", ahead)

    def take(self, kind: str, what: str = "a name") -> str:
        """Take the next token, which must be of `kind`, and return its text."""
        text = self.peek(kind)
        if text is None:
            self.fail(f"expected {what}")
        self.at += 1
        return text

    def take_names(self) -> list[str]:
        """Take one or more words separated by commas."""
        names = [self.take("word")]
        while self.accept(","):
            names.append(self.take("word"))
        return names

    def take_integer(self, most: int = MOST_BYTES) -> int:
        """Take a whole number of at most `most`."""
        return self._take_quantity(lambda word: parse_count(word, most), "a whole number")

    def take_bytes(self) -> int:
        """Take a size with its unit; return bytes."""
        return self._take_quantity(parse_bytes, "a size")

    def take_ns(self) -> float:
        """Take a time with its unit; return nanoseconds."""
        return self._take_quantity(parse_ns, "a time")

    def _take_quantity(self, parse: Callable[[str], _T], what: str) -> _T:
        word = self.peek("word")
        if word is None:
            self.fail(f"expected {what}")
        try:
            value = parse(word)
        except ConfigError as error:
            self.fail(str(error))
        self.at += 1
        return value

    def accept(self, mark: str) -> bool:
        """Take `mark` if it comes next; return whether it did."""
        if self.peek_mark() != mark:
            return False
        self.at += 1
        return True

    def expect(self, mark: str, what: str) -> None:
        """Take `mark`; `what` completes the error message "expected MARK ..."."""
        if not self.accept(mark):
            self.fail(f"expected {mark!r} {what}")

    def finish(self) -> None:
        """Raise ScheduleError if tokens are left."""
        if self.at < len(self.tokens):
            self.fail("unexpected token")

    def expect_ranks(self) -> range:
        """Take a rank, or a range of ranks such as 0-7."""
        word = self.peek("word")
        if word is None:
            self.fail("expected a rank, or a range of them")
        low, dash, high = word.partition("-")
        try:
            first = parse_count(low, MOST_RANKS)
            last = parse_count(high, MOST_RANKS) if dash else first
        except ConfigError:
            last, first = 0, 1
        if last < first or (dash and last == first):
            self.fail(f"{shown(word)} is neither a rank nor a range like 0-7")
        self.at += 1
        return range(first, last + 1)

    def fail(self, message: str, back: int = 0) -> NoReturn:
        """Raise ScheduleError, pointing to the next token, or to the one `back` tokens before it."""
        at = self.at - back
        column = self.tokens[at][2] if at < len(self.tokens) else len(self.line.rstrip())
        raise _error(message, self.line, self.number, column)


def statements(text: str) -> Iterator[Statement]:
    """Yield the statements of `text`, each with its comment. ScheduleError with line and column for a bad token."""
    lines = text.split("\n")
    number, begin, at = 1, 0, 0
    tokens: list[tuple[str, str, int]] = []
    comment = ""
    text += "\n"
    while at < len(text):
        match = _TOKEN.match(text, at)
        column = at - begin
        if match is None:
            raise _error(f"unexpected character {text[at]!r}", lines[number - 1], number, column)
        at = match.end()
        kind = match.lastgroup
        if kind == "end":
            if tokens:
                yield Statement(tokens, lines[number - 1], number, comment=comment)
                tokens = []
            comment = ""
            if match[0] == "\n":
                number, begin = number + 1, at
        elif kind == "space":
            comment = match[0][1:].strip() if match[0][0] == "#" else comment
        else:
            assert kind is not None
            tokens.append((kind, match[0], column))


def _error(message: str, line: str, number: int, column: int) -> ScheduleError:
    if len(line) > _SHOWN:  # show only the part around the column
        begin = max(0, min(column - _SHOWN // 2, len(line) - _SHOWN))
        line, column = line[begin : begin + _SHOWN], column - begin
    return ScheduleError(f"line {number}: {message}\n   {line}\n   {' ' * column}^")
