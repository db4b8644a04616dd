"""Extrapolates the schedule of a model with many equal layers from schedules with few layers.

Equal layers are traced equally: with each further layer, a schedule grows by one or more stretches, each equal to the
stretch directly before it except for the numbers in its names. `repeated` finds these stretches in the schedules of n,
n + 1 and n + 2 layers, and writes the schedule of any larger number of layers:

    (3)  a_0 a_1 a_2 end_3    (4)  a_0 a_1 a_2 a_3 end_4    (5)  a_0 a_1 a_2 a_3 a_4 end_5
 -> (7)  a_0 a_1 a_2 a_3 a_4 a_5 a_6 end_7

Each number in a name must be a linear function of the number of layers and, in a stretch, of the repetition's index;
everything else (kinds, bytes, times, order) must be the same in every repetition. Three schedules determine the
coefficients and also check them. `Irregular` names the first line that does not fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overlapc.errors import ScheduleError
from overlapc.schedule.model import Buffer, Node, Origin, Schedule
from overlapc.schedule.verify import verify

_NUMBER = re.compile(r"\d+")
_Names = tuple[tuple[str, ...], ...]  # names in groups, such as all names that a node reads


class Irregular(ScheduleError):
    """The schedules of few layers do not determine that of more layers; the message names the first line at fault."""


def repeated(few: Mapping[int, Schedule], layers: int) -> Schedule:
    """Return the schedule of `layers` layers from schedules of three consecutive numbers of layers (keys of `few`).

    Payloads are those of the corresponding nodes in the schedule of fewest layers.
    """
    counts = sorted(few)
    assert counts == list(range(counts[0], counts[0] + 3))
    assert layers >= counts[0]
    first, second, third = (few[count] for count in counts)
    lines = [_lines(each) for each in (first, second, third)]
    more = layers - counts[0]
    made = [line for part in _parts(*lines) for line in part.lines(more)]
    schedule = _schedule(made, first)
    verify(schedule, f"{schedule.name} of {layers} layers")
    return schedule


# --- lines of a schedule


@dataclass(frozen=True, slots=True)
class _Line:
    """An input, a node with the buffers that it writes, or an output, with the numbers in its names separated.

    Two lines are alike if `like` (all properties except names) and `stems` (the names, split at their numbers) are
    equal. payload: of a node.
    """

    like: Any
    stems: tuple[tuple[tuple[str, ...], ...], ...]
    numbers: tuple[int, ...]
    payload: Any = None

    @classmethod
    def of(cls, like: Any, names: _Names, payload: Any = None) -> _Line:
        stems = tuple(tuple(tuple(_NUMBER.split(name)) for name in group) for group in names)
        return cls(
            like,
            stems,
            tuple(int(each) for group in names for name in group for each in _NUMBER.findall(name)),
            payload,
        )

    def is_like(self, other: _Line) -> bool:
        return self.stems == other.stems and self.like == other.like

    def names(self) -> _Names:
        """The line's names, with its numbers put back into the stems."""
        numbers = map(str, self.numbers)

        def whole(stem: tuple[str, ...]) -> str:
            return stem[0] + "".join(next(numbers) + piece for piece in stem[1:])

        return tuple(tuple(whole(stem) for stem in group) for group in self.stems)


def _lines(schedule: Schedule) -> list[_Line]:
    inputs = (buffer for buffer in schedule.buffers.values() if schedule.producer(buffer.name) is None)
    return [
        *(_Line.of(replace(buffer, name=""), ((buffer.name,),)) for buffer in inputs),
        *(_node_line(node, schedule.buffers) for node in schedule.nodes),
        *(_Line.of("output", ((name,),)) for name in schedule.outputs),
    ]


def _node_line(node: Node, buffers: Mapping[str, Buffer]) -> _Line:
    written = [buffers[name] for name in node.writes]
    origin, comm = node.origin, node.comm
    nameless = replace(
        node, name="", reads=(), writes=(), mutates=(), after=(), payload=None,
        comm=None if comm is None else replace(comm, unit="", param="", param_number=-1),
    )  # fmt: skip
    names: _Names = (
        (node.name, origin.module, "" if comm is None else comm.unit),
        node.reads, node.writes, node.mutates, node.after, origin.fx,
        tuple(buffer.alias_of or "" for buffer in written),
    )  # fmt: skip
    return _Line.of((nameless, origin.source, tuple(buffer.bytes for buffer in written)), names, node.payload)


def _schedule(lines: Sequence[_Line], like: Schedule) -> Schedule:
    buffers: dict[str, Buffer] = {}
    nodes: list[Node] = []
    outputs: list[str] = []
    for line in lines:
        names = line.names()
        if isinstance(line.like, Buffer):
            ((name,),) = names
            buffers[name] = replace(line.like, name=name)
        elif isinstance(line.like, tuple):
            node, written = _node(line, names)
            nodes.append(node)
            buffers.update((buffer.name, buffer) for buffer in written)
        else:
            outputs += names[0]
    return Schedule(like.name, tuple(nodes), buffers, tuple(outputs), like.budget_bytes)


def _node(line: _Line, names: _Names) -> tuple[Node, list[Buffer]]:
    nameless, source, sizes = line.like
    (name, module, unit), reads, writes, mutates, after, fx, aliases = names
    node = replace(
        nameless, name=name, reads=reads, writes=writes, mutates=mutates, after=after, payload=line.payload,
        comm=None if nameless.comm is None else replace(nameless.comm, unit=unit), origin=Origin(fx, source, module),
    )  # fmt: skip
    return node, [
        Buffer(written, size, alias_of=alias or None)
        for written, size, alias in zip(writes, sizes, aliases, strict=True)
    ]


# --- parts, which repeat for each layer or do not


@dataclass(frozen=True)
class _Part:
    """Lines of the schedule of fewest layers, and how their numbers continue.

    a_layer: the increment of each number for every further layer. a_repetition: the increment from one repetition to
    the next; None for lines that do not repeat.
    """

    first: Sequence[_Line]
    a_layer: Sequence[tuple[int, ...]]
    a_repetition: Sequence[tuple[int, ...]] | None = None

    def lines(self, more: int) -> Iterator[_Line]:
        """Yield the lines of the part in a schedule with `more` additional layers."""
        for repetition in range(1 if self.a_repetition is None else more + 1):
            for at, line in enumerate(self.first):
                numbers = _plus(line.numbers, self.a_layer[at], more)
                if self.a_repetition is not None:
                    numbers = _plus(numbers, self.a_repetition[at], repetition)
                yield replace(line, numbers=numbers)


def _parts(first: Sequence[_Line], second: Sequence[_Line], third: Sequence[_Line]) -> Iterator[_Part]:
    """Yield the parts of the three schedules: lines that occur once and lines that repeat, alternately."""
    done = [0, 0, 0]  # lines of each that are in a part

    def part(length: int, *, repeats: bool = False) -> _Part:
        ends = [at + length * (1 + more * repeats) for more, at in enumerate(done)]
        found = _part(*(each[at:end] for each, at, end in zip((first, second, third), done, ends, strict=True)))
        done[:] = ends
        return found

    for at, length in _growth(first, second):
        # The repetition may begin up to `length` lines earlier, because adjacent lines may be alike, too. Only the
        # numbers tell where, so try each shift.
        room = at - length - done[0]
        shift = next(
            (
                back
                for back in range(min(length, room + 1))
                if _repeats([each[done[n] + room - back :] for n, each in enumerate((first, second, third))], length)
            ),
            None,
        )
        if shift is None:
            raise Irregular(
                f"{_shown(second[at + done[1] - done[0]])} has numbers that do not continue the lines before it"
            )
        yield part(room - shift)
        yield part(length, repeats=True)
    rest = {len(each) - at for each, at in zip((first, second, third), done, strict=True)}
    if len(rest) > 1:
        raise Irregular(
            f"the schedules grow by {len(second) - len(first)} and {len(third) - len(second)} lines per layer"
        )
    yield part(rest.pop())


def _growth(first: Sequence[_Line], second: Sequence[_Line]) -> Iterator[tuple[int, int]]:
    """Yield (position in `first`, length) of each stretch that `second` repeats there once more than `first`."""
    at = extra = 0
    while at < len(first) or at + extra < len(second):
        here = at + extra
        if at < len(first) and here < len(second) and first[at].is_like(second[here]):
            at += 1
            continue
        for length in range(1, min(at, len(second) - here) + 1):
            resumes = second[here + length : here + length + 1]
            if _all_like(first[at : at + 1], resumes) and _all_like(
                second[here - length : here], second[here : here + length]
            ):
                break
        else:
            raise Irregular(f"{_shown((*second[here:], *first[at:])[0])} does not repeat the lines before it")
        yield at, length
        extra += length


def _part(*versions: Sequence[_Line]) -> _Part:
    """Return the part that consists of these lines of the three schedules. Irregular if their numbers do not fit."""
    length = len(versions[0])
    repeats = len(versions[1]) > length
    found = _Part(
        versions[0],
        [_minus(after.numbers, before.numbers) for before, after in zip(versions[0], versions[1], strict=False)],
        [
            _minus(after.numbers, before.numbers)
            for before, after in zip(versions[1], versions[1][length:], strict=False)
        ]
        if repeats
        else None,
    )
    for more, version in enumerate(versions):
        for line, expected in zip(version, found.lines(more), strict=True):
            if not line.is_like(expected) or line.numbers != expected.numbers:
                raise Irregular(f"{_shown(line)} differs from what fewer layers predict{_difference(line, expected)}")
    return found


def _repeats(versions: Sequence[Sequence[_Line]], length: int) -> bool:
    stretches = [lines[: length * (1 + more)] for more, lines in enumerate(versions)]
    if any(len(stretch) < length * (1 + more) for more, stretch in enumerate(stretches)):
        return False
    try:
        _part(*stretches)
    except Irregular:
        return False
    return True


def _all_like(some: Sequence[_Line], others: Sequence[_Line]) -> bool:
    return len(some) == len(others) and all(one.is_like(other) for one, other in zip(some, others, strict=True))


def _plus(numbers: tuple[int, ...], others: tuple[int, ...], times: int) -> tuple[int, ...]:
    return tuple([number + times * other for number, other in zip(numbers, others, strict=True)])


def _minus(numbers: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([number - other for number, other in zip(numbers, others, strict=True)])


def _difference(line: _Line, expected: _Line) -> str:
    """Return the first names that differ, as `: a_1, b instead of a_2, b`; "" if only other properties differ."""
    pairs = zip(line.names(), expected.names(), strict=False)
    return next((f": {', '.join(some)} instead of {', '.join(others)}" for some, others in pairs if some != others), "")


def _shown(line: _Line) -> str:
    return next(name for group in line.names() for name in group if name)
