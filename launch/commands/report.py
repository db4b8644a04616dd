"""`overlapc report` and `overlapc diff`: show and compare saved records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from overlapc.config import Config
from overlapc.documents import read_text, write_file
from overlapc.errors import ConfigError
from overlapc.launch.commands.common import output_file


def report(
    file: Annotated[Path, typer.Argument(help="a record: overlap.json, or record.json of a run folder")],
    save: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="write this form: report.html, trace.pftrace, schedule.txt; may be repeated",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="also list fully hidden collectives, which long tables leave out")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="a trace of the same run, from overlapc.report.measure(trace=...) or `overlapc demo --profile`",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show a saved record as a table, or save it in another form.

    Lists the exposed communication, its causes and what to try, then each graph. With --profile, or for a measured
    record, also every collective and kernel, predicted and measured; predictions that are off by more than 20% are
    marked.
    """
    from overlapc.report import compare, record, report_with_trace, text

    targets = [output_file(target, "a report", record.FORMS) for target in save or ()]
    loaded = record.load(file)
    if profile is not None:
        loaded = report_with_trace(loaded, profile)
    for target in targets:
        print(f"written to {loaded.save(target)}")
    if targets:
        return
    print(text.render(loaded.steps, all_rows=every))
    for graph in loaded.steps[0].graphs if loaded.steps else ():
        if graph.measured is not None:
            print(f"\n{compare.graph_text(graph)}")


def diff(
    first: Annotated[Path, typer.Argument(help="a record (*.json), or schedules in text form (schedule.txt)")],
    second: Annotated[Path, typer.Argument(help="the record or schedules to compare with the first")],
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the comparison as a page: diff.html", show_default=False)
    ] = None,
) -> None:
    """Show what got slower and why: parts of a step, compute by kind, communication, causes of exposure, memory."""
    from overlapc.report import difference

    if save is not None:
        output_file(save, "a comparison", (".html",))
    steps = [_loaded(path).steps for path in (first, second)]
    for path, found in zip((first, second), steps, strict=True):
        if not found or not found[0].graphs:
            raise ConfigError(f"{path} contains no compiled graph")
    rows = difference.differences(steps[0][0], steps[1][0])
    names = _apart(first, second)
    if save is not None:
        write_file(save, difference.page(rows, names))
        print(f"written to {save}")
        return
    print(difference.text(rows, names))


def _loaded(path: Path) -> Any:
    if path.suffix == ".txt":
        from overlapc.launch.plan import plan_text

        return plan_text(read_text(path), Config.of({"passes": "none"}))
    from overlapc.report import record

    return record.load(path)


def _apart(first: Path, second: Path) -> tuple[str, str]:
    """Return labels for two files: their names if these differ, else their paths."""
    if first.name != second.name:
        return first.name, second.name
    return str(first), str(second)
