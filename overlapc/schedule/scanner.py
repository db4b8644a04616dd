"""Splits text into statements and statements into tokens; the parser interprets them."""

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
MOST_RANKS = 2**20  # of a job; plans list the ranks of a group
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*)|(?P<end>[;\n])|(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<source>\[[^\]\n]*\])"""
    rf"""|(?P<word>{WORD.pattern})|(?P<mark>[=(),:@])""",
)


@dataclass
class Statement:
    """The tokens of one statement and where it stands; takes what is expected or says what is not.

    Every method that takes raises ScheduleError, with line and column, where something else stands.
    """

    tokens: list[tuple[str, str, int]]  # (kind, text, column)
    line: str
    number: int
    at: int = 0
    comment: str = ""  # behind it, where it is the last of its line

    def peek(self, kind: str, ahead: int = 0) -> str | None:
        """The text of the token `ahead` of the next if it is of `kind`; words may be quoted."""
        if self.at + ahead >= len(self.tokens):
            return None
        found, text, _ = self.tokens[self.at + ahead]
        if kind == "word" and found == "string":
            return self._unquoted(text)
        return text if found == kind else None

    def _unquoted(self, text: str) -> str:
        try:
            name: str = json.loads(text)
            name.encode()  # half of a surrogate pair is no text
        except ValueError:
            self.fail("this is not quoted as in JSON")
        return name

    def peek_mark(self, ahead: int = 0) -> str | None:
        """The same of a mark such as `=`."""
        return self.peek("mark", ahead)

    def take(self, kind: str, what: str = "a name") -> str:
        """The text of the next token, which must be of `kind`."""
        text = self.peek(kind)
        if text is None:
            self.fail(f"expected {what}")
        self.at += 1
        return text

    def take_names(self) -> list[str]:
        """One word or more, with commas between them."""
        names = [self.take("word")]
        while self.accept(","):
            names.append(self.take("word"))
        return names

    def take_integer(self, most: int = MOST_BYTES) -> int:
        """A whole number of at most `most`."""
        return self._take_quantity(lambda word: parse_count(word, most), "a whole number")

    def take_bytes(self) -> int:
        """A size with its unit, in bytes."""
        return self._take_quantity(parse_bytes, "a size")

    def take_ns(self) -> float:
        """A time with its unit, in nanoseconds."""
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
        """Takes `mark` if it comes next; whether it did."""
        if self.peek_mark() != mark:
            return False
        self.at += 1
        return True

    def expect(self, mark: str, what: str) -> None:
        """Takes `mark`; `what` says of the error where it was expected."""
        if not self.accept(mark):
            self.fail(f"expected {mark!r} {what}")

    def finish(self) -> None:
        """Nothing may be left."""
        if self.at < len(self.tokens):
            self.fail("did not expect this")

    def expect_ranks(self) -> range:
        """A rank, or a range of them such as 0-7."""
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
        """Raises the error, pointing to the next token or to one `back` before it."""
        at = self.at - back
        column = self.tokens[at][2] if at < len(self.tokens) else len(self.line.rstrip())
        raise _error(message, self.line, self.number, column)


def statements(text: str) -> Iterator[Statement]:
    """The statements of `text`, each with its comment. ScheduleError with line and column for what is no token."""
    lines = text.split("\n")
    number, begin, at = 1, 0, 0
    tokens: list[tuple[str, str, int]] = []
    comment = ""
    text += "\n"
    while at < len(text):
        match = _TOKEN.match(text, at)
        column = at - begin
        if match is None:
            raise _error(f"cannot read {text[at]!r}", lines[number - 1], number, column)
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
    if len(line) > _SHOWN:  # the part of it that matters
        begin = max(0, min(column - _SHOWN // 2, len(line) - _SHOWN))
        line, column = line[begin : begin + _SHOWN], column - begin
    return ScheduleError(f"line {number}: {message}\n   {line}\n   {' ' * column}^")
