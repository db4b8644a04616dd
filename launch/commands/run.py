"""`overlapc run`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer

from overlapc.errors import ConfigError
from overlapc.launch.commands.common import (
    Options,
    Passes,
    Processes,
    check_torch,
    new_run_folder,
    option_variables,
    output_file,
)
from overlapc.launch.torchrun import Rendezvous, check_world, run_ranks


def run(
    script: Annotated[str, typer.Argument(help="a Python script; arguments after it go to the script")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="...", help="arguments of the script", show_default=False)
    ] = None,
    nproc: Processes = 1,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module, as with `python -m`")
    ] = False,
    passes: Passes = None,
    option: Options = None,
    watchdog: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="print all ranks' stacks and end the job if no optimizer step ends within S seconds (the first step:"
            " ten times S); 0: never",
            min=0,
        ),
    ] = 0.0,
    nnodes: Annotated[
        str, typer.Option(metavar="N", help="hosts of the job, or MIN:MAX; start this command on each of them")
    ] = "1",
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="one of the hosts, for their rendezvous", show_default=False)
    ] = "",
    rdzv_id: Annotated[
        str, typer.Option(metavar="ID", help="distinguishes jobs with the same endpoint", show_default=False)
    ] = "",
    max_restarts: Annotated[
        int, typer.Option(metavar="N", help="how often all ranks are restarted after one has failed", min=0)
    ] = 0,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="record of every rank's collectives, for `overlapc report` (default: runs/<date-time>/overlap.json);"
            " hosts without rank 0 add their first rank to the file name",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a training script on N ranks under torchrun's elastic launcher and collect its report."""
    variables = option_variables(passes, option)
    check_torch()
    check_world(nproc, "cpu")
    if not module and not Path(script).is_file():
        raise ConfigError(f"no script {script!r}")
    rendezvous = Rendezvous(nnodes, rdzv_endpoint, rdzv_id, max_restarts)
    _ = rendezvous.nodes  # raises ConfigError before anything is started
    default = report is None
    report = output_file(report or new_run_folder() / "overlap.json", "a record", (".json",))
    command = ("-m", script) if module else (script,)
    with (
        _removed_if_empty(report.parent) if default else nullcontext(),
        # A unique folder: launchers on other hosts may share this disk.
        tempfile.TemporaryDirectory(prefix=f".{report.name}.", dir=report.parent) as folder,
    ):
        last = run_ranks(
            (*command, *(arguments or ())), nproc, Path(folder), variables, watchdog_s=watchdog, rendezvous=rendezvous
        )
        from overlapc.report import record  # not before the ranks have started, as it takes a second

        collected = record.gather(last)
    if not collected.steps:
        print(f"overlapc: no report: {script} compiled nothing with backend='overlapc'", file=sys.stderr)
        return
    if first := collected.steps[0].rank:
        report = report.with_name(f"{report.stem}.rank{first}{report.suffix}")
    collected.save(report)  # into its folder, which is made again
    print(f"\n{collected}\n\nwritten to {report}; as a web page: overlapc report {report} --save report.html")


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove the folder at the end unless it has files, as after a run without a report."""
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()
