"""The report as text: the overlap table of each graph, and the totals of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tabulate import tabulate

from overlapc.report import compare
from overlapc.report.advice import Exposure, exposed_is_measured, exposures
from overlapc.report.captures import captures_lines
from overlapc.report.held_memory import peak_parts, step_peak_bytes
from overlapc.report.kept_gathered import gathered_lines
from overlapc.report.ledger import beside_compute, tokens_per_s
from overlapc.report.limiting_factor import Spent, sources
from overlapc.report.model import CollectiveRow, Found, GraphRecord, StepRecord, measured_step
from overlapc.report.times import change, ms, us
from overlapc.units import human_bytes

HEADERS = (
    "collective",
    "of",
    "group",
    "via",
    "size",
    "time µs",
    "by",
    "hidden µs",
    "exposed µs",
    "moves",
    "limited by",
)
_ALIGN = ("left", "left", "left", "left", "right", "right", "left", "right", "right", "right", "left")
_NAMES_SHOWN = 8
_ROWS_SHOWN = 24  # a longer table omits hidden collectives, unless all rows are requested
_EXPOSURES_SHOWN = 4
_WORK_SHOWN = 4  # kinds of compute that are listed
_NAMED = 3  # modules of an exposure that are listed
_FOUND: Mapping[Found, str] = {
    "step": "the whole step, without tracing it in AOTAutograd",
    "graph": "this graph, once AOTAutograd had traced the step",
}
_LEAST_SLOWED = 0.01  # fraction of compute; smaller slowdowns by communication are not printed


def render(steps: Sequence[StepRecord], *, all_rows: bool = False) -> str:
    """Return the totals and the graphs of the first rank, and a line for each rank whose prediction differs.

    all_rows: show hidden collectives in long tables, too.
    """
    if not steps or not steps[0].graphs:
        return "nothing was compiled with backend='overlapc' yet"
    first, *others = steps
    sections = [f"{_heading(first)}\n{totals_text(first)}"]
    sections += [graph_text(graph, all_rows=all_rows) for graph in first.graphs]
    if any(graph.measured for graph in first.graphs):
        sections.append(compare.totals_text(first))
    sections.extend(_other_rank(first, other) for other in others if other.graphs != first.graphs)
    return "\n\n".join(sections)


def _heading(step: StepRecord) -> str:
    return f"rank {step.rank} of {step.world_size}: {len(step.graphs)} compiled graph(s), predicted times"


def graph_text(graph: GraphRecord, *, all_rows: bool = True) -> str:
    """Return the table of a graph's collectives with their sums, and the lines of `facts` below it."""
    rows = graph.collectives
    if not all_rows and len(rows) > _ROWS_SHOWN:
        rows = tuple(row for row in rows if row.exposed_after_ns > 0 or row.estimate_ns is None)
    cells = [collective_cells(row) for row in rows]
    if graph.collectives:
        cells.append(total_cells(graph.collectives))
    table = tabulate(cells, HEADERS, colalign=_ALIGN, disable_numparse=True) if cells else "no collectives"
    left_out = len(graph.collectives) - len(rows)
    notes = [f"             {left_out} more are hidden: not shown (`overlapc report FILE --all`)"] if left_out else []
    return "\n".join([f"graph {graph.name}", table, *notes, *facts(graph)])


def collective_cells(row: CollectiveRow) -> tuple[str, ...]:
    """Return the cells of one collective, in the order of HEADERS."""
    return (
        row.name if row.name.startswith(row.op) else f"{row.name} {row.op}",
        _short(row.origin),
        f"@{row.group}({row.ranks})",
        row.via or "library",
        human_bytes(row.bytes),
        "unknown" if row.estimate_ns is None else us(row.estimate_ns),
        row.source,
        change(row.hidden_before_ns, row.hidden_after_ns),
        change(row.exposed_before_ns, row.exposed_after_ns),
        str(row.moves),
        row.limit,
    )


def total_cells(rows: tuple[CollectiveRow, ...]) -> tuple[str, ...]:
    """Return the cells of the table's last line: sums over all collectives of a graph."""
    return (
        f"all {len(rows)}",
        "",
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
    """Yield the lines below a graph's table: step time, lower bound, memory, kernels, fallbacks, unknown nodes."""
    after, bound = graph.after.step_ns, graph.lower_bound_ns
    yield f"step time    {ms(graph.before.step_ns)} -> {ms(after)}; {bound_text(after, bound)}"
    if sum(graph.gap.values()) > 0:
        parts = ", ".join(f"{kind} {ms(ns)}" for kind, ns in graph.gap.items())
        yield f"gap          {ms(sum(graph.gap.values()))} above the lower bound: {parts}"
    budget = "no budget" if graph.budget_bytes is None else f"budget {human_bytes(graph.budget_bytes)}"
    yield f"peak memory  {human_bytes(graph.incoming_peak_bytes)} -> {human_bytes(graph.peak_bytes)} ({budget})"
    yield f"kernels      {graph.kernels} generated, {graph.externs} library calls, {fallback_text(graph)}"
    for at, (what, calls) in enumerate(graph.attention.items()):
        yield f"{'' if at else 'attention':<12} {calls} x {what}"
    yield _compiled_line(graph)
    if graph.captured:
        yield f"CUDA graphs  {graph.captured}"
    if graph.pool_bytes:
        yield f"copies       use {human_bytes(graph.pool_bytes)} of shared memory on each rank, part of the peak above"
    if graph.not_copied:
        by_reason: dict[str, list[str]] = {}
        for name, reason in graph.not_copied.items():
            by_reason.setdefault(reason, []).append(name)
        why = (f"{reason} ({_some(tuple(names))})" for reason, names in by_reason.items())
        yield f"not copied   {'; '.join(why)}"
    if graph.tuned:
        yield f"block sizes  {graph.tuned}"
    if graph.unknown:
        yield f"unknown      {_some(graph.unknown)}: no estimate; the times above do not include these nodes"


def _compiled_line(graph: GraphRecord) -> str:
    """Return how long this process took to compile the graph, or to load it from the disk cache."""
    if graph.found:
        return f"loaded in    {graph.compile_seconds:.2f} s from the disk cache: {_FOUND[graph.found]}"
    spent = [f"{row.name} {row.seconds:.3f} s" for row in graph.passes]
    passes = f"passes: {', '.join(spent)}" if spent else "no passes"
    return f"compiled in  {graph.compile_seconds:.2f} s; {passes}"


def fallback_text(graph: GraphRecord) -> str:
    """Return `3 fallbacks (aten.sort 2, aten.topk 1)`, most frequent first."""
    if not graph.fallbacks:
        return "no fallbacks"
    ops = [f"{op} {count}" for op, count in sorted(graph.fallbacks.items(), key=lambda item: (-item[1], item[0]))]
    count = sum(graph.fallbacks.values())
    return f"{count} fallback{'s' if count > 1 else ''} ({_some(tuple(ops))})"


def totals_text(step: StepRecord) -> str:
    """Return the totals over the graphs of a step: times, the limiting factor, exposed communication and advice."""
    exposed_before = step.sum(lambda graph: graph.exposed_before_ns)
    kernels = step.sum(lambda graph: graph.kernels)
    fallbacks = step.sum(lambda graph: sum(graph.fallbacks.values()))
    spent = Spent.of(step)
    why = spent.limiting_factor()
    after = step.step_ns
    lines = [*_calls_lines(step), *captures_lines(step)]
    lines += _measured_lines(step)
    lines += [f"step time    {ms(step.step_before_ns)} -> {ms(after)}; {bound_text(after, step.lower_bound_ns)}"]
    lines += [f"bound by     {why.why}", *([f"             try: {why.advice}"] if why.advice else [])]
    seen = measured_step(step) if exposed_is_measured(step) else None
    as_seen = "" if seen is None else f"; measured {ms(seen.exposed_ns)}:"
    lines += [f"exposed      {ms(exposed_before)} -> {ms(spent.exposed_ns)} of communication{as_seen}"]
    worst = exposures(step, measured=seen is not None)
    for exposure in worst[:_EXPOSURES_SHOWN]:
        lines += _exposure_lines(exposure)
    rest_ns = sum(exposure.exposed_ns for exposure in worst[_EXPOSURES_SHOWN:])
    if rest_ns:
        lines.append(f"  {ms(rest_ns)}  from {len(worst) - _EXPOSURES_SHOWN} other causes")
    return "\n".join(
        [
            *lines,
            *(f"{f'busy {queue}':<12} {ms(time_ns)}" for queue, time_ns in spent.queues_ns.items()),
            f"compute      {ms(spent.compute_ns)}{_slowed(spent)}{_work(spent)}",
            f"estimates    {', '.join(f'{share:.0%} {source}' for source, share in sources(step).items()) or 'none'}",
            *([] if step.host_ns is None else [f"host         {ms(step.host_ns)}, if it never waits for the device"]),
            f"kernels      {kernels:.0f} generated; eager fallbacks: {fallbacks:.0f}",
            f"peak memory  {human_bytes(step_peak_bytes(step))}{f'; {parts}' if (parts := peak_parts(step)) else ''}",
            *gathered_lines(step),
        ]
    )


def _measured_lines(step: StepRecord) -> Iterator[str]:
    """Yield the measured time of the graphs, if all were measured, and of the whole step by the host's clock."""
    seen = measured_step(step)
    if seen is not None:
        parts = [("compute", seen.compute_ns), *beside_compute(seen)]
        for_host = f" ({ms(seen.late_ns)} of it waiting for the host)" if seen.late_ns else ""
        yield f"measured     {ms(seen.step_ns)}: {', '.join(f'{what} {ms(ns)}' for what, ns in parts)}{for_host}"
    if step.clock_ns is not None:
        rate = f"; {tokens_per_s(step):,.0f} tokens/s" if step.tokens else ""
        yield f"by the clock {ms(step.clock_ns)} from one optimizer step to the next{rate}"


def _calls_lines(step: StepRecord) -> Iterator[str]:
    """Yield the graphs that a step calls, unless it calls every graph exactly once."""
    left_out = [graph.name for graph in step.left_out]
    if left_out or any(times != 1 for _, times in step.called):
        calls = tuple(f"{times} x {graph.name}" if times > 1 else graph.name for graph, times in step.called)
        rest = f"; not part of it: {_some(tuple(left_out))}" if left_out else ""
        yield f"one step     {_some(calls)}{rest}"


def _slowed(spent: Spent) -> str:
    """Return the text about the time that overlapping communication adds to compute, "" if it is negligible."""
    if spent.slowed_ns < _LEAST_SLOWED * spent.compute_ns:
        return ""
    return f", {ms(spent.slowed_ns)} of it because communication overlaps it"


def _work(spent: Spent) -> str:
    """Return the largest kinds of compute as `: mm 71% (98), generated kernels 15% (138)`."""
    shares = [f"{each.what} {100 * each.ns / spent.compute_ns:.0f}% ({each.count})" for each in spent.work if each.ns]
    if not shares:
        return ""
    more = f", {len(shares) - _WORK_SHOWN} more" if len(shares) > _WORK_SHOWN else ""
    return f": {', '.join(shares[:_WORK_SHOWN])}{more}"


def _exposure_lines(exposure: Exposure) -> Iterator[str]:
    """Yield one cause of exposed communication: time, collectives with their modules, explanation, advice."""
    names = [row.origin or row.name for row in exposure.rows]
    whose = ", ".join(dict.fromkeys(map(_short, names[:_NAMED]))) + (" ..." if len(names) > _NAMED else "")
    count = f"{len(names)} collectives" if len(names) > 1 else "a collective"
    time = f"  {ms(exposure.exposed_ns)}  "
    yield f"{time}{count} of {exposure.graph} ({whose}): {exposure.cause.why}"
    if exposure.cause.advice:
        yield f"{' ' * len(time)}try: {exposure.cause.advice}"


def _other_rank(first: StepRecord, other: StepRecord) -> str:
    exposed = other.sum(lambda graph: graph.exposed_after_ns)
    return f"rank {other.rank}: {len(other.graphs)} graph(s), step time {ms(other.step_ns)}, exposed {ms(exposed)}"


def bound_text(time_ns: float, bound_ns: float) -> str:
    """Return the text of a lower bound and of the gap between it and a time."""
    over = 100 * (time_ns / bound_ns - 1) if bound_ns > 0 else 0.0
    return f"lower bound {ms(bound_ns)} (gap {over:.1f}%)"


def _short(origin: str, most: int = 36) -> str:
    """Return an origin, shortened at its beginning, because the last parts of a module path are the most specific."""
    return origin if len(origin) <= most else f"...{origin[3 - most :]}"


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
