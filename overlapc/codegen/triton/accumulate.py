"""How a kernel accumulates its reductions: tile by tile, lane-wise, then once over the lanes; and how it scans.

An accumulation has up to four states and writes statements over them. `update` folds a tile into lane states
`[x, r]`; `reduced` turns these into `[x, 1]`. So it does with the reduced states of several programs, side by side:
that is all a split needs.

A scan combines the elements of a tile along r, and what an earlier tile left in its states `[x, 1]` with all of them.
Where r is divided among programs it is an accumulation as well: what the programs before this one have accumulated is
where this one's scan begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from overlapc.codegen.triton.expressions import COMPUTE
from overlapc.ir.body import Reduce, Scan, Value

_PRELUDE_NAME = {"any": "max", "all": "min"}


@dataclass(frozen=True, slots=True)
class State:
    """One variable of an accumulation, a number for every `width` neighbours along r."""

    name: str
    dtype: torch.dtype
    neutral: str
    width: int = 1


@dataclass(frozen=True, slots=True)
class Plain:
    """sum, prod, max, min, any, all: one state. any/all run on int32."""

    reduce: Reduce
    states: tuple[State, ...]

    @property
    def arg(self) -> Value:
        return self.reduce.arg

    @property
    def provides(self) -> tuple[Value, ...]:
        return (self.reduce,)

    def update(
        self, states: Sequence[str], targets: Sequence[str], value: str, position: str, inside: str
    ) -> list[str]:
        """New states in `targets`, given the current ones.

        Where the mask `inside` ("" if there is no end in this tile) is false `value` is the first state's neutral.
        """
        (state,) = states
        kind = self.reduce.kind
        if kind in ("sum", "prod"):
            return [f"{targets[0]} = {state} {'+' if kind == 'sum' else '*'} {value}"]
        return [f"{targets[0]} = ops.{'maximum' if kind in ('max', 'any') else 'minimum'}({state}, {value})"]

    def start(self, value: str, position: str) -> list[str]:
        """States after the first tile."""
        return [value]

    def reduced(self, states: Sequence[str], targets: Sequence[str]) -> list[str]:
        """Statements that reduce lane states into `targets`."""
        kind = _PRELUDE_NAME.get(self.reduce.kind, self.reduce.kind)
        return [f"{targets[0]} = ops.reduce_{kind}({states[0]})"]

    def results(self, reduced: Sequence[str]) -> list[str]:
        """Values of `provides`, from reduced states."""
        return [f"{reduced[0]} != 0" if self.reduce.dtype is torch.bool else reduced[0]]


@dataclass(frozen=True, slots=True)
class Position:
    """argmax, argmin: the best value and where it was seen first."""

    reduce: Reduce
    states: tuple[State, ...]

    @property
    def arg(self) -> Value:
        return self.reduce.arg

    @property
    def provides(self) -> tuple[Value, ...]:
        return (self.reduce,)

    def start(self, value: str, position: str) -> list[str]:
        return [value, position]

    def update(
        self, states: Sequence[str], targets: Sequence[str], value: str, position: str, inside: str
    ) -> list[str]:
        best, at = states
        wins = f"{value} {'>' if self.reduce.kind == 'argmax' else '<'} {best}"
        # Positions grow from tile to tile, so a tie keeps the earlier one. What never wins is neutral, and at 0: that
        # is the answer for a row in which nothing wins.
        if self.states[0].dtype.is_floating_point:
            wins = f"(({wins}) | ({value} != {value})) & ({best} == {best})"
        return [
            f"{targets[0]} = tl.where({wins}, {value}, {best})",
            f"{targets[1]} = tl.where({wins}, {position}, {at})",
        ]

    def reduced(self, states: Sequence[str], targets: Sequence[str]) -> list[str]:
        return [f"{targets[0]}, {targets[1]} = ops.reduce_{self.reduce.kind}({states[0]}, {states[1]})"]

    def results(self, reduced: Sequence[str]) -> list[str]:
        return [f"{reduced[1]}.to({COMPUTE[self.reduce.dtype]})"]


@dataclass(frozen=True, slots=True)
class Online:
    """max(x) and sum(exp(x - max(x))) in one pass: a lane's running maximum and its sum relative to that.

    A lane is as many neighbours as a thread loads at once. The maximum of these costs no exchange between threads, as
    one of the whole tile would, and it takes one exponential for all of them to make the sum relative to a new one.
    """

    peak: Reduce
    total: Reduce
    states: tuple[State, ...]
    guarded: bool = False  # an infinite maximum counts as 0 in the sum

    @property
    def arg(self) -> Value:
        return self.peak.arg

    @property
    def provides(self) -> tuple[Value, ...]:
        return (self.peak, self.total)

    def update(
        self, states: Sequence[str], targets: Sequence[str], value: str, position: str, inside: str
    ) -> list[str]:
        peak, total = states
        width = self.states[0].width
        return [
            f"{targets[0]} = ops.online_peak({peak}, {value}, {width})",
            f"{targets[1]} = ops.online_total({peak}, {targets[0]}, {total}, {value}, {width})",
        ]

    def reduced(self, states: Sequence[str], targets: Sequence[str]) -> list[str]:
        peak, total = states
        return [
            f"{targets[0]} = ops.reduce_max({peak})",
            f"{targets[1]} = ops.reduce_sum(ops.online_rescale({peak}, {total}, {targets[0]}))",
        ]

    def results(self, reduced: Sequence[str]) -> list[str]:
        finish = "online_finish_guarded" if self.guarded else "online_finish"
        return [reduced[0], f"ops.{finish}({reduced[0]}, {reduced[1]})"]


@dataclass(frozen=True, slots=True)
class Moments:
    """sum(x) and sum((x - mean)²) in one pass: beside the sum a lane keeps its own mean, the squared distances from it
    and how many elements it has seen (Welford); lanes are then joined by these."""

    total: Reduce
    squares: Reduce
    states: tuple[State, ...]

    @property
    def arg(self) -> Value:
        return self.total.arg

    @property
    def provides(self) -> tuple[Value, ...]:
        return (self.total, self.squares)

    def update(
        self, states: Sequence[str], targets: Sequence[str], value: str, position: str, inside: str
    ) -> list[str]:
        total, *lane = states
        call = f"ops.moments_where({inside}, " if inside else "ops.moments("
        return [
            f"{targets[0]} = {total} + {value}",
            f"{', '.join(targets[1:])} = {call}{', '.join(lane)}, {value})",
        ]

    def reduced(self, states: Sequence[str], targets: Sequence[str]) -> list[str]:
        return [
            f"{targets[0]} = ops.reduce_sum({states[0]})",
            f"{', '.join(targets[1:])} = ops.reduce_moments({', '.join(states[1:])})",
        ]

    def results(self, reduced: Sequence[str]) -> list[str]:
        total, _, squares, _ = reduced
        return [total, squares]


# The prelude's functions by kind of scan: of two elements, and of all elements along r, which gives what the scan
# would have at the end.
_COMBINE = {
    "sum": "add", "prod": "multiply", "logsumexp": "log_add_exp", "max": "later_max", "min": "later_min",
    "argmax": "later_largest", "argmin": "later_smallest",
}  # fmt: skip
_AT_THE_END = {kind: f"reduce_{kind}" for kind in _COMBINE} | {
    kind: f"reduce_last_{kind}" for kind in ("max", "min", "argmax", "argmin")
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scanning:
    """A scan in a kernel. Its states, one of them or the extreme and its position, are its value so far.

    As an accumulation, where r is divided among programs, it is the scan's value at the end of a program's share.
    """

    scan: Scan
    states: tuple[State, ...]

    @property
    def arg(self) -> Value:
        return self.scan.arg

    @property
    def provides(self) -> tuple[Value, ...]:
        return (self.scan,)

    def tile(self, elements: Sequence[str]) -> str:
        """The scan of one tile by itself: an expression that yields as many values as there are states."""
        return f"ops.scan_{self.scan.kind}({', '.join(elements)})"

    def joined(self, scanned: Sequence[str]) -> str:
        """What `tile` yielded, with all earlier tiles before it."""
        return f"ops.{_COMBINE[self.scan.kind]}({', '.join([*(state.name for state in self.states), *scanned])})"

    def update(
        self, states: Sequence[str], targets: Sequence[str], value: str, position: str, inside: str
    ) -> list[str]:
        elements = [value, position][: len(states)]
        return [f"{', '.join(targets)} = ops.{_COMBINE[self.scan.kind]}({', '.join([*states, *elements])})"]

    def reduced(self, states: Sequence[str], targets: Sequence[str]) -> list[str]:
        return [f"{', '.join(targets)} = ops.{_AT_THE_END[self.scan.kind]}({', '.join(states)})"]


Reduction = Plain | Position | Online | Moments
Accumulation = Reduction | Scanning
