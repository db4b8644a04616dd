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

Axes = Mapping[str, Sequence[str]]  # option -> its values
Point = Mapping[str, str]  # option -> its value in one plan
Outcome = StepRecord | str  # the step, or the reason why it does not fit into memory

GPUS = "world size"
_UNITS = {GPUS: "GPUs", "seq": "tokens a row", "batch": "rows a rank", "budget": "memory budget, GiB"}
_HEADS = ("step", "exposed", "lower bound", "tokens/s", "tokens/s a GPU", "peak", "bound by")
# The quantities that a plot can show, as the page's menu lists them.
_MEASURES = ("tokens/s a GPU", "tokens/s", "step, ms", "exposed communication, ms", "peak memory, GiB")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one plan that the table and the plot compare."""

    step_ns: float
    exposed_ns: float
    lower_bound_ns: float
    tokens_per_s: float | None  # of all ranks; None: the script does not give the number of tokens of a step
    ranks: int
    peak_bytes: int
    bound_by: str

    @classmethod
    def of(cls, step: StepRecord) -> Figures:
        """Collect the figures of the plan of one step."""
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
        """Return the figures as text, in the order of `_HEADS`."""
        rates = ("", "")
        if self.tokens_per_s is not None:
            rates = (f"{self.tokens_per_s:,.0f}", f"{self.tokens_per_s / self.ranks:,.0f}")
        times = (ms(self.step_ns), ms(self.exposed_ns), ms(self.lower_bound_ns))
        return (*times, *rates, human_bytes(self.peak_bytes), self.bound_by)

    def measures(self) -> tuple[float | None, ...]:
        """Return the figures as numbers, in the order of `_MEASURES`; None: not known."""
        rate = self.tokens_per_s
        rates = (None, None) if rate is None else (rate / self.ranks, rate)
        return (*rates, self.step_ns / 1e6, self.exposed_ns / 1e6, self.peak_bytes / 2**30)


def varied(axes: Axes) -> list[str]:
    """Return the options that have several values."""
    return [name for name, values in axes.items() if len(values) > 1]


def table_rows(axes: Axes, found: Sequence[tuple[Point, Outcome]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the varied options, then the figures, without columns that are empty in every row."""
    rows = []
    for point, outcome in found:
        cells = ("",) * (len(_HEADS) - 1) + (outcome,) if isinstance(outcome, str) else Figures.of(outcome).cells()
        rows.append([*(point[name] for name in varied(axes)), *cells])
    heads = [*varied(axes), *_HEADS]
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    return [heads[at] for at in kept], [[row[at] for at in kept] for row in rows]


def table(axes: Axes, found: Sequence[tuple[Point, Outcome]]) -> str:
    """Return the table as text for a terminal."""
    heads, rows = table_rows(axes, found)
    return tabulate(rows, heads, disable_numparse=True, colalign=(*("right",) * (len(heads) - 1), "left"))


def page(axes: Axes, found: Sequence[tuple[Point, Outcome]], assumed: str) -> str:
    """Return a self-contained HTML page: the table, and a plot over the number of GPUs or the first varied option."""
    heads, rows = table_rows(axes, found)
    return template("plans.html.jinja").render(
        heads=heads,
        rows=rows,
        assumed=assumed,
        data=embedded(plot_data(axes, found)),
        **drawing_parts("plans.js"),
    )


def plot_data(axes: Axes, found: Sequence[tuple[Point, Outcome]]) -> dict[str, object]:
    """Return the data of the plot: a line for each combination of the varied options that are not on the x axis.

    Each point of a line has a value for each of `_MEASURES`; a plan that does not fit into memory is a gap.
    """
    across, *others = sorted(varied(axes), key=lambda name: name != GPUS)
    drawn = [(point, outcome) for point, outcome in found if point[across]]  # "no budget" has no place on the axis
    places = sorted({_number(across, point[across]) for point, _ in drawn})
    nothing: tuple[float | None, ...] = (None,) * len(_MEASURES)
    lines: dict[str, list[tuple[float | None, ...]]] = {}
    for point, outcome in drawn:
        values = lines.setdefault(", ".join(_label(other, point[other]) for other in others), [nothing] * len(places))
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


def _label(axis: str, value: str) -> str:
    return f"{axis} {value}" if value else f"no {axis}"


def _number(axis: str, text: str) -> float:
    return parse_bytes(text) / 2**30 if axis == "budget" else float(parse_count(text.strip()))
