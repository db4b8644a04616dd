"""The statements with which a Triton kernel accumulates reductions and scans.

An accumulation has up to four state variables. `update` folds a tile into states `[x, r]`, one per lane; `reduced`
reduces these over the lanes to `[x, 1]`. A split reduction applies `reduced` again, to the reduced states of several
programs next to each other.

A scan combines the elements of a tile along r, each also with the state `[x, 1]` that earlier tiles left. If r is
divided among programs, a scan is an accumulation as well: each program's scan begins with the state that the programs
before it accumulated.
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
    """One state variable of an accumulation; it has one element per `width` neighbouring elements along r."""

    name: str
    dtype: torch.dtype
    neutral: str
    width: int = 1


@dataclass(frozen=True, slots=True)
class Plain:
    """A reduction with one state: sum, prod, max, min, any or all. any and all are computed on int32."""

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
        """Return statements that assign the states after one more tile to `targets`.

        inside: the mask of valid elements; "" if all elements of the tile are valid. Elsewhere `value` is the neutral
        element of the first state.
        """
        (state,) = states
        kind = self.reduce.kind
        if kind in ("sum", "prod"):
            return [f"{targets[0]} = {state} {'+' if kind == 'sum' else '*'} {value}"]
        return [f"{targets[0]} = ops.{'maximum' if kind in ('max', 'any') else 'minimum'}({state}, {value})"]

    def start(self, value: str, position: str) -> list[str]:
        """Return expressions of the states after the first tile."""
        return [value]

    def reduced(self, states: Sequence[str], targets: Sequence[str]) -> list[str]:
        """Return statements that reduce states of lanes into `targets`."""
        kind = _PRELUDE_NAME.get(self.reduce.kind, self.reduce.kind)
        return [f"{targets[0]} = ops.reduce_{kind}({states[0]})"]

    def results(self, reduced: Sequence[str]) -> list[str]:
        """Return expressions of the values in `provides`, from reduced states."""
        return [f"{reduced[0]} != 0" if self.reduce.dtype is torch.bool else reduced[0]]


@dataclass(frozen=True, slots=True)
class Position:
    """argmax or argmin: the best value and its first position."""

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
        # Positions grow from tile to tile, so a tie keeps the earlier one. The initial state is the neutral value at
        # position 0, which is the answer for a row in which no element wins.
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
    """max(x) and sum(exp(x - max(x))) in one pass: each lane has a running maximum and a sum relative to that maximum.

    A lane is the group of neighbouring elements that a thread loads at once. Unlike the maximum of the whole tile, a
    lane's maximum needs no exchange between threads, and rescaling a lane's sum takes one exponential.
    """

    peak: Reduce
    total: Reduce
    states: tuple[State, ...]
    guarded: bool = False  # an infinite maximum is replaced by 0 in the sum

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
    """sum(x) and sum((x - mean)²) in one pass (Welford).

    Each lane has its sum, its own mean, the sum of squared distances from that mean and its number of elements; the
    last three are combined over lanes.
    """

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


# Functions of the prelude by kind of scan: `_COMBINE` combines two elements; `_AT_THE_END` reduces all elements along r
# to the last value of the scan.
_COMBINE = {
    "sum": "add", "prod": "multiply", "logsumexp": "log_add_exp", "max": "later_max", "min": "later_min",
    "argmax": "later_largest", "argmin": "later_smallest",
}  # fmt: skip
_AT_THE_END = {kind: f"reduce_{kind}" for kind in _COMBINE} | {
    kind: f"reduce_last_{kind}" for kind in ("max", "min", "argmax", "argmin")
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scanning:
    """A scan. Its states, one or two (an extreme and its position), are the scan's latest value.

    As an accumulation, if r is divided among programs, it computes the scan's value at the end of a program's share.
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
        """Return an expression that scans one tile by itself; it yields as many values as there are states."""
        return f"ops.scan_{self.scan.kind}({', '.join(elements)})"

    def joined(self, scanned: Sequence[str]) -> str:
        """Return an expression that combines the results of `tile` with the state of all earlier tiles."""
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
