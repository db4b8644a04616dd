"""Several plans side by side (`overlapc plan --world-size 8,64,512`): one table, and one page with a plot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from overlapc.report.held_memory import step_peak_bytes
from overlapc.report.html import drawing_parts, embedded, template
from overlapc.report.limiting_factor import Spent
from overlapc.report.model import StepRecord
from overlapc.report.times import ms
from overlapc.units import human_bytes, parse_bytes, parse_count

Axes = Mapping[str, Sequence[str]]  # what may vary -> its values
Point = Mapping[str, str]  # what may vary -> its value in one plan
Outcome = StepRecord | str  # the step, or why it does not fit into the memory

GPUS = "world size"
_UNITS = {GPUS: "GPUs", "seq": "tokens a row", "batch": "rows a rank", "budget": "memory budget, GiB"}
_HEADS = ("step", "exposed", "no order can beat", "tokens/s", "tokens/s a GPU", "peak", "bound by")
# What a plot can show: its name and unit, in the order of the choice.
_MEASURES = ("tokens/s a GPU", "tokens/s", "step, ms", "exposed communication, ms", "peak memory, GiB")


@dataclass(frozen=True, slots=True)
class Figures:
    """What is compared of one plan."""

    step_ns: float
    exposed_ns: float
    lower_bound_ns: float
    tokens_per_s: float | None  # of all ranks; None: a script does not say how many tokens a step has
    ranks: int
    peak_bytes: int
    bound_by: str

    @classmethod
    def of(cls, step: StepRecord) -> Figures:
        """Of the plan of one step."""
        spent = Spent.of(step)
        return cls(
            step.step_ns,
            spent.exposed_ns,
            step.lower_bound_ns,
            step.tokens / step.step_ns * 1e9 if step.tokens and step.step_ns else None,
            step.world_size,
            step_peak_bytes(step),
            re.split(r"[:;,]", spent.limiting_factor().why)[0],
        )

    def cells(self) -> tuple[str, ...]:
        """In the order of `_HEADS`."""
        rates = ("", "")
        if self.tokens_per_s is not None:
            rates = (f"{self.tokens_per_s:,.0f}", f"{self.tokens_per_s / self.ranks:,.0f}")
        times = (ms(self.step_ns), ms(self.exposed_ns), ms(self.lower_bound_ns))
        return (*times, *rates, human_bytes(self.peak_bytes), self.bound_by)

    def measures(self) -> tuple[float | None, ...]:
        """In the order of `_MEASURES`."""
        rate = self.tokens_per_s
        rates = (None, None) if rate is None else (rate / self.ranks, rate)
        return (*rates, self.step_ns / 1e6, self.exposed_ns / 1e6, self.peak_bytes / 2**30)


def varied(axes: Axes) -> list[str]:
    """The axes with several values."""
    return [name for name, values in axes.items() if len(values) > 1]


def table_rows(axes: Axes, found: Sequence[tuple[Point, Outcome]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: what varies, then the figures; columns that are empty in every row are left out."""
    rows = []
    for point, outcome in found:
        cells = ("",) * (len(_HEADS) - 1) + (outcome,) if isinstance(outcome, str) else Figures.of(outcome).cells()
        rows.append([*(point[name] for name in varied(axes)), *cells])
    heads = [*varied(axes), *_HEADS]
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    return [heads[at] for at in kept], [[row[at] for at in kept] for row in rows]


def table(axes: Axes, found: Sequence[tuple[Point, Outcome]]) -> str:
    """For a terminal."""
    heads, rows = table_rows(axes, found)
    return tabulate(rows, heads, disable_numparse=True, colalign=(*("right",) * (len(heads) - 1), "left"))


def page(axes: Axes, found: Sequence[tuple[Point, Outcome]], assumed: str) -> str:
    """One file that needs no network: a plot over the number of GPUs, or what else varies first, and the table."""
    heads, rows = table_rows(axes, found)
    return template("plans.html.jinja").render(
        heads=heads,
        rows=rows,
        assumed=assumed,
        data=embedded(plot_data(axes, found)),
        **drawing_parts("plans.js"),
    )


def plot_data(axes: Axes, found: Sequence[tuple[Point, Outcome]]) -> dict[str, object]:
    """What the plot draws: a line for each combination of what varies beside its axis, a value of each measure a point.

    A plan that does not fit into the memory is a gap.
    """
    across, *others = sorted(varied(axes), key=lambda name: name != GPUS)
    drawn = [(point, outcome) for point, outcome in found if point[across]]  # all but "no budget"
    places = sorted({_number(across, point[across]) for point, _ in drawn})
    nothing: tuple[float | None, ...] = (None,) * len(_MEASURES)
    lines: dict[str, list[tuple[float | None, ...]]] = {}
    for point, outcome in drawn:
        values = lines.setdefault(", ".join(_said(other, point[other]) for other in others), [nothing] * len(places))
        if not isinstance(outcome, str):
            values[places.index(_number(across, point[across]))] = Figures.of(outcome).measures()
    known = [
        at for at in range(len(_MEASURES)) if any(each[at] is not None for line in lines.values() for each in line)
    ]
    return {
        "across": _UNITS[across],
        "places": places,
        "measures": [_MEASURES[at] for at in known],
        "lines": [
            {"name": name, "values": [[each[at] for each in line] for at in known]} for name, line in lines.items()
        ],
    }


def _said(axis: str, value: str) -> str:
    return f"{axis} {value}" if value else f"no {axis}"


def _number(axis: str, text: str) -> float:
    return parse_bytes(text) / 2**30 if axis == "budget" else float(parse_count(text.strip()))
