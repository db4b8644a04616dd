"""The overlap table, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from overlapc.report import compare
from overlapc.report.record import CollectiveRow, GraphRecord, Report, StepRecord
from overlapc.report.times import change, ms, us
from overlapc.units import human_bytes

HEADERS = ("collective", "of", "group", "size", "time µs", "by", "hidden µs", "exposed µs", "moves", "limited by")
_ALIGN = ("left", "left", "left", "right", "right", "left", "right", "right", "right", "left")
_NAMES_SHOWN = 8


def render(report: Report) -> str:
    """The first rank's step in full, then one line for each rank whose prediction differs from it."""
    if not report.steps or not report.steps[0].graphs:
        return "nothing was compiled with backend='overlapc' yet"
    first, *others = report.steps
    sections = [_heading(first), *(graph_text(graph) for graph in first.graphs)]
    if len(first.graphs) > 1:
        sections.append(totals_text(first))
    if any(graph.measured for graph in first.graphs):
        sections.append(compare.totals_text(first))
    sections.extend(_other_rank(first, other) for other in others if other.graphs != first.graphs)
    return "\n\n".join(sections)


def _heading(step: StepRecord) -> str:
    return f"rank {step.rank} of {step.world_size}: {len(step.graphs)} compiled graph(s), predicted times"


def graph_text(graph: GraphRecord) -> str:
    """One graph: its collectives, and what they add up to."""
    rows = [collective_cells(row) for row in graph.collectives]
    if rows:
        rows.append(total_cells(graph.collectives))
    table = tabulate(rows, HEADERS, colalign=_ALIGN, disable_numparse=True) if rows else "no collectives"
    return "\n".join([f"graph {graph.name}", table, *facts(graph)])


def collective_cells(row: CollectiveRow) -> tuple[str, ...]:
    """The cells of one collective, in the order of HEADERS."""
    return (
        row.name if row.name.startswith(row.op) else f"{row.name} {row.op}",
        _short(row.origin),
        f"@{row.group}({row.ranks})",
        human_bytes(row.bytes),
        "unknown" if row.estimate_ns is None else us(row.estimate_ns),
        row.source,
        change(row.hidden_before_ns, row.hidden_after_ns),
        change(row.exposed_before_ns, row.exposed_after_ns),
        str(row.moves),
        row.limit,
    )


def total_cells(rows: tuple[CollectiveRow, ...]) -> tuple[str, ...]:
    """The last line of the table: sums over all collectives of a graph."""
    return (
        f"all {len(rows)}",
        "",
        "",
        human_bytes(sum(row.bytes for row in rows)),
        us(sum(row.estimate_ns or 0.0 for row in rows)),
        "",
        change(sum(row.hidden_before_ns for row in rows), sum(row.hidden_after_ns for row in rows)),
        change(sum(row.exposed_before_ns for row in rows), sum(row.exposed_after_ns for row in rows)),
        str(sum(row.moves for row in rows)),
        "",
    )


def facts(graph: GraphRecord) -> Iterator[str]:
    """The lines below a table: step time, bound, memory, kernels, fallbacks, what is unknown."""
    after, bound = graph.after.step_ns, graph.lower_bound_ns
    yield f"step time    {ms(graph.before.step_ns)} -> {ms(after)}; {bound_text(after, bound)}"
    budget = "no budget" if graph.budget_bytes is None else f"budget {human_bytes(graph.budget_bytes)}"
    yield f"peak memory  {human_bytes(graph.incoming_peak_bytes)} -> {human_bytes(graph.peak_bytes)} ({budget})"
    yield f"kernels      {graph.kernels} generated, {graph.externs} library calls, {fallback_text(graph)}"
    yield f"compiled in  {graph.compile_seconds:.2f} s" + _pass_seconds(graph)
    if graph.captured:
        yield f"CUDA graphs  {graph.captured}"
    if graph.tuned:
        yield f"block sizes  {graph.tuned}"
    if graph.unknown:
        yield f"unknown      {_some(graph.unknown)}: nobody could estimate these, the times above leave them out"


def _pass_seconds(graph: GraphRecord) -> str:
    spent = [f"{row.name} {row.seconds:.3f} s" for row in graph.passes]
    return f"; passes: {', '.join(spent)}" if spent else "; no passes"


def fallback_text(graph: GraphRecord) -> str:
    """`3 fallbacks (aten.sort 2, aten.topk 1)`, most frequent first."""
    if not graph.fallbacks:
        return "no fallbacks"
    ops = [f"{op} {count}" for op, count in sorted(graph.fallbacks.items(), key=lambda item: (-item[1], item[0]))]
    count = sum(graph.fallbacks.values())
    return f"{count} fallback{'s' if count > 1 else ''} ({_some(tuple(ops))})"


def totals_text(step: StepRecord) -> str:
    """All graphs of a step together: forward and backward run one after the other."""
    before = sum(graph.before.step_ns for graph in step.graphs)
    after = sum(graph.after.step_ns for graph in step.graphs)
    bound = sum(graph.lower_bound_ns for graph in step.graphs)
    exposed_before = sum(graph.exposed_before_ns for graph in step.graphs)
    exposed_after = sum(graph.exposed_after_ns for graph in step.graphs)
    kernels = sum(graph.kernels for graph in step.graphs)
    fallbacks = sum(sum(graph.fallbacks.values()) for graph in step.graphs)
    return "\n".join(
        [
            "all graphs",
            f"step time    {ms(before)} -> {ms(after)}; {bound_text(after, bound)}",
            f"exposed      {ms(exposed_before)} -> {ms(exposed_after)} of communication",
            f"peak memory  {human_bytes(max(graph.peak_bytes for graph in step.graphs))}",
            f"kernels      {kernels} generated; eager fallbacks: {fallbacks}",
        ]
    )


def _other_rank(first: StepRecord, other: StepRecord) -> str:
    after = sum(graph.after.step_ns for graph in other.graphs)
    exposed = sum(graph.exposed_after_ns for graph in other.graphs)
    return f"rank {other.rank}: {len(other.graphs)} graph(s), step time {ms(after)}, exposed {ms(exposed)}"


def schedules(report: Report) -> str:
    """The final schedules of the first rank, as `overlapc plan` reads them back one by one."""
    graphs = report.steps[0].graphs if report.steps else ()
    return "\n\n".join(graph.schedule.rstrip() for graph in graphs) + "\n"


def bound_text(time_ns: float, bound_ns: float) -> str:
    """The lower bound, and how far a time is over it."""
    over = 100 * (time_ns / bound_ns - 1) if bound_ns > 0 else 0.0
    return f"no order can beat {ms(bound_ns)} (gap {over:.1f}%)"


def _short(origin: str, most: int = 36) -> str:
    """The end of a long origin: the last parts of a module path say most."""
    return origin if len(origin) <= most else f"...{origin[3 - most :]}"


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
