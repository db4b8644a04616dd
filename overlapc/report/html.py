"""The report as one self-contained page: no script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from overlapc.report import compare, text
from overlapc.report.model import GraphRecord, Plan, Span, StepRecord
from overlapc.units import human_bytes

_WIDTH = 1100.0  # of the timeline, in SVG units
_LEFT = 90.0  # room for the lanes' names
_LANE_HEIGHT = 26
_THINNEST = 0.6  # spans narrower than this merge with their neighbours, so that 20,000 nodes stay readable
_MERGED = 4.0  # how wide such a merged bar may get
_TICKS = 8
_POINTS = 1500  # of the curve of live memory


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle of the timeline in SVG units; `title` shows on hover."""

    x: float
    y: int
    width: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """One order drawn: lanes from top to bottom, all orders of a graph on the same time scale."""

    label: str
    lanes: tuple[tuple[str, int], ...]  # name, y
    bars: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]  # x, text
    height: int


def render(steps: Sequence[StepRecord]) -> str:
    """The whole page: the graphs of every rank's step."""
    return _template().render(
        steps=steps,
        headers=text.HEADERS,
        timelines=timelines,
        cells=text.collective_cells,
        total=text.total_cells,
        facts=text.facts,
        totals=text.totals_text,
        measured=compare.totals_text,
        compared=compare.graph_text,
        memory=memory_points,
        human_bytes=human_bytes,
        width=_WIDTH,
        left=_LEFT,
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html.jinja")


def timelines(graph: GraphRecord) -> list[Timeline]:
    """Before and after the passes, on the time scale of the longer one."""
    end_ns = max(graph.before.step_ns, graph.after.step_ns, 1.0)
    return [_timeline("before", graph.before, end_ns), _timeline("after", graph.after, end_ns)]


def _timeline(label: str, plan: Plan, end_ns: float) -> Timeline:
    scale = (_WIDTH - _LEFT) / end_ns
    names = lanes_of(plan.spans)
    heights = {name: row * _LANE_HEIGHT for row, name in enumerate(names)}
    bars: list[Bar] = []
    for name in names:
        spans = [span for span in plan.spans if span.lane == name]
        bars.extend(_bars(spans, heights[name], scale))
    ticks = tuple(
        (_LEFT + fraction / _TICKS * (_WIDTH - _LEFT), f"{text.us(end_ns * fraction / _TICKS)} µs")
        for fraction in range(_TICKS)
    )
    return Timeline(label, tuple(heights.items()), tuple(bars), ticks, _LANE_HEIGHT * len(names) + 18)


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """The resources in use: compute first, then each group's queue by name."""
    return sorted({span.lane for span in spans}, key=lambda lane: (lane != "compute", lane))


def _bars(spans: list[Span], y: int, scale: float) -> Iterator[Bar]:
    merged: list[Span] = []  # too narrow to draw alone

    def flush() -> Iterator[Bar]:
        if merged:
            start_ns, end_ns = merged[0].start_ns, merged[-1].end_ns
            busy_ns = sum(span.end_ns - span.start_ns for span in merged)
            title = f"{len(merged)} nodes, {merged[0].node} to {merged[-1].node}: {text.us(busy_ns)} µs"
            yield Bar(_LEFT + start_ns * scale, y, max((end_ns - start_ns) * scale, 0.2), merged[0].kind, title)
            merged.clear()

    for span in sorted(spans, key=lambda span: span.start_ns):
        width = (span.end_ns - span.start_ns) * scale
        if width <= 0:
            continue
        if width < _THINNEST:
            first = merged[0] if merged else span
            apart = (span.start_ns - merged[-1].end_ns) * scale if merged else 0.0
            if span.kind != first.kind or apart > _THINNEST or (span.end_ns - first.start_ns) * scale > _MERGED:
                yield from flush()
            merged.append(span)
            continue
        yield from flush()
        yield Bar(_LEFT + span.start_ns * scale, y, width, span.kind, _title(span))
    yield from flush()


def _title(span: Span) -> str:
    what = f"compute waits for {span.node}" if span.kind == "idle" else span.node
    origin = f"\n{span.origin}" if span.origin else ""
    return f"{what}: {text.us(span.end_ns - span.start_ns)} µs from {text.us(span.start_ns)} µs{origin}"


def memory_points(graph: GraphRecord, height: float) -> str:
    """The live bytes of the final order as points of an SVG polygon of that height; empty when unknown."""
    if not graph.memory:
        return ""
    end_ns = max(graph.before.step_ns, graph.after.step_ns, 1.0)
    top = max(max(size for _, size in graph.memory), 1)
    scale = (_WIDTH - _LEFT) / end_ns
    points = [f"{_LEFT + graph.memory[0][0] * scale:.1f},{height:.1f}"]
    level = height
    for time_ns, size_bytes in _thinned(graph.memory):
        x = _LEFT + time_ns * scale
        points.append(f"{x:.1f},{level:.1f}")
        level = height * (1 - size_bytes / top)
        points.append(f"{x:.1f},{level:.1f}")
    x = _LEFT + max(graph.after.step_ns, graph.memory[-1][0]) * scale
    return " ".join([*points, f"{x:.1f},{level:.1f}", f"{x:.1f},{height:.1f}"])


def _thinned(memory: tuple[tuple[float, int], ...]) -> Iterator[tuple[float, int]]:
    """Some `_POINTS`; of each stretch left out, the highest stays, so that the peak is drawn."""
    stride = max(1, len(memory) // _POINTS)
    for start in range(0, len(memory), stride):
        yield max(memory[start : start + stride], key=lambda point: point[1])
