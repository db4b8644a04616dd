"""Comparison of two runs or plans: which parts of the step became longer or shorter, by cause."""

from __future__ import annotations

import html as escaping
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

from overlapc.report.advice import exposures
from overlapc.report.held_memory import step_peak_bytes
from overlapc.report.ledger import Ledger
from overlapc.report.limiting_factor import Spent
from overlapc.report.model import StepRecord, measured_step
from overlapc.report.times import ms
from overlapc.units import human_bytes

_LEAST = 0.002  # fraction of the longer step; smaller changes are summed in one row
_SHOWN = 12  # rows of a section


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of both steps, in ns, or in bytes if `is_bytes`; None where a step does not know it."""

    section: str
    what: str
    first: float | None
    second: float | None
    is_bytes: bool = False

    @property
    def change(self) -> float:
        """The second value minus the first; an unknown value counts as 0."""
        return (self.second or 0.0) - (self.first or 0.0)


def differences(first: StepRecord, second: StepRecord) -> list[Row]:
    """Return the rows that compare two steps.

    In order: the step time, its parts (which add up to it), compute by kind, communication by queue, exposed time by
    cause, peak memory.
    """
    least_ns = _LEAST * max(first.step_ns, second.step_ns)
    rows = [Row("step", "predicted", first.step_ns, second.step_ns)]
    measured = Row("step", "measured", _measured(first), _measured(second))
    if (measured.first, measured.second) != (None, None):
        rows.append(measured)
    rows.append(Row("step", "lower bound", first.lower_bound_ns, second.lower_bound_ns))
    sections = {"where it goes": _parts, "compute": _work, "communication": _queues, "exposed": _causes}
    for section, of in sections.items():
        rows += _section(section, dict(of(first)), dict(of(second)), 0.0 if of is _parts else least_ns)
    return [*rows, _peak(first, second)]


def _peak(first: StepRecord, second: StepRecord) -> Row:
    """Return the row of peak memory, without optimizers unless both steps know their state, as schedules do not."""
    what = "peak"
    if bool(first.optimizer_bytes) != bool(second.optimizer_bytes):
        what = "peak without optimizers"
        first, second = (replace(step, optimizer_bytes={}, update_peak_bytes=0) for step in (first, second))
    return Row("memory", what, step_peak_bytes(first), step_peak_bytes(second), is_bytes=True)


def _measured(step: StepRecord) -> float | None:
    found = measured_step(step)
    return None if found is None else found.step_ns


def _parts(step: StepRecord) -> Iterable[tuple[str, float]]:
    return ((part.name, part.ns) for part in Ledger.of(step).parts)


def _work(step: StepRecord) -> Iterable[tuple[str, float]]:
    return ((each.what, each.ns) for each in Spent.of(step).work)


def _queues(step: StepRecord) -> Iterable[tuple[str, float]]:
    sums: dict[str, float] = defaultdict(float)
    for graph, times in step.called:
        for row in graph.collectives:
            sums[f"{row.op} {row.via or 'library'} @{row.group}"] += times * (row.estimate_ns or 0.0)
    return sums.items()


def _causes(step: StepRecord) -> Iterable[tuple[str, float]]:
    sums: dict[str, float] = defaultdict(float)
    for each in exposures(step):
        sums[f"{each.graph.partition('_')[0]}: {each.cause.why}"] += each.exposed_ns
    return sums.items()


def _section(section: str, first: dict[str, float], second: dict[str, float], least_ns: float) -> list[Row]:
    """Return the rows of a section, the largest change first, small changes in one row, so that columns add up."""
    rows = [
        Row(section, what, first.get(what, 0.0), second.get(what, 0.0)) for what in dict.fromkeys([*first, *second])
    ]
    rows.sort(key=lambda row: -abs(row.change))
    shown = [row for row in rows[:_SHOWN] if abs(row.change) >= least_ns]
    rest = rows[len(shown) :]
    if len(rest) > 1:
        sums = [sum(getattr(row, side) for row in rest) for side in ("first", "second")]
        rest = [Row(section, f"{len(rest)} with small changes", *sums)]
    return [*shown, *rest]


def text(rows: Iterable[Row], names: tuple[str, str]) -> str:
    """Return the rows as a text table; only the first row of a section shows its name."""
    return tabulate(
        [_cells(row, named) for row, named in _named(rows)],
        ("", "", *names, "change", ""),
        colalign=("left", "left", "right", "right", "right", "right"),
        disable_numparse=True,
    )


def _named(rows: Iterable[Row]) -> Iterable[tuple[Row, bool]]:
    before = ""
    for row in rows:
        yield row, row.section != before
        before = row.section


def _cells(row: Row, named: bool) -> tuple[str, ...]:
    def shown(value: float | None, sign: str = "") -> str:
        if value is None:
            return "not known"
        return sign + (human_bytes(int(abs(value))) if row.is_bytes else ms(abs(value)))

    known = row.first is not None and row.second is not None
    sign = "+" if row.change > 0 else "-" if row.change < 0 else ""
    share = f"{row.change / row.first:+.1%}" if known and row.first and row.change else ""
    change = shown(row.change, sign) if known else ""
    return row.section if named else "", row.what, shown(row.first), shown(row.second), change, share


def page(rows: Iterable[Row], names: tuple[str, str]) -> str:
    """Return the rows as a self-contained HTML page, with a bar for each change."""
    rows = list(rows)
    most = max((abs(row.change) for row in rows if not row.is_bytes), default=0.0) or 1.0
    lines = []
    for row, named in _named(rows):
        cells = [escaping.escape(cell) for cell in _cells(row, named)]
        width = 0.0 if row.is_bytes else 50 * abs(row.change) / most
        left = 50.0 if row.change > 0 else 50.0 - width
        kind = "longer" if row.change > 0 else "shorter"
        bar = f'<i class="{kind}" style="left: {left:.2f}%; width: {width:.2f}%"></i>'
        tag = "th" if named else "td"
        lines.append(
            f"<tr><{tag}>{cells[0]}</{tag}>{''.join(f'<td>{cell}</td>' for cell in cells[1:])}<td>{bar}</td></tr>"
        )
    style = (Path(__file__).parent / "page.css").read_text()
    heads = "".join(f"<th>{escaping.escape(each)}</th>" for each in ("", "", *names, "change", "", ""))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>overlapc diff</title>
<style>{style}
td:nth-child(n+3) {{ text-align: right; }} td:last-child {{ position: relative; min-width: 14rem; }}
td i {{ position: absolute; top: .5rem; bottom: .5rem; border-radius: 3px; }}
i.longer {{ background: var(--idle); }} i.shorter {{ background: var(--comm); }}</style>
</head>
<body>
<h1>{escaping.escape(names[0])} and {escaping.escape(names[1])}</h1>
<p>One step of each; times are predicted unless they say measured. Bars to the right: longer in the second.</p>
<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>
{chr(10).join(lines)}
</tbody></table></div>
</body>
</html>
"""
