"""`overlapc plan`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlapc.config import Config
from overlapc.documents import read_text, write_file
from overlapc.errors import ConfigError, MemoryBudgetError
from overlapc.launch.commands.common import Options, Passes, check_torch, option_values, output_file

if TYPE_CHECKING:  # a command starts without torch
    from overlapc.report.plans import Axes, Outcome, Point
    from overlapc.report.record import Report

    PlanOne = Callable[[Point], Report]


_OF_MODELS = ("mesh", "seq", "batch", "layers", "dtype", "no_reshard", "whole")
_OF_MODELS_AND_SCRIPTS = ("world_size", "budget", "gpus_per_host", "network")


def plan(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="a training script (*.py), or schedules in text form (a run's schedule.txt); not with --model",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ...]", help="arguments of the script, after --", show_default=False),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="llama-8b|llama-70b|demo|tiny", help="plan a training step of this model")
    ] = "",
    mesh: Annotated[
        str,
        typer.Option(
            metavar="dp=N,tp=N", help="with --model: ranks of each axis (replicate, dp, tp; default: all ranks in dp)"
        ),
    ] = "",
    world_size: Annotated[
        str,
        typer.Option(
            metavar="N,N",
            help="number of ranks (default: those of --mesh; for a script: 8); several make a table",
            show_default=False,
        ),
    ] = "0",
    seq: Annotated[
        str, typer.Option(metavar="N,N", help="with --model: tokens per row; several make a table")
    ] = "4096",
    batch: Annotated[
        str, typer.Option(metavar="N,N", help="with --model: rows per data-parallel rank; several make a table")
    ] = "1",
    budget: Annotated[
        str, typer.Option(metavar="SIZE,SIZE", help="memory_budget; several make a table", show_default=False)
    ] = "",
    gpus_per_host: Annotated[
        int, typer.Option(metavar="N", help="ranks per host (default: the profile's)", show_default=False)
    ] = 0,
    network: Annotated[
        str,
        typer.Option(
            metavar="RATE", help="network rate per GPU, e.g. 400Gb/s (default: the profile's)", show_default=False
        ),
    ] = "",
    layers: Annotated[
        int, typer.Option(metavar="N", help="with --model: number of layers (default: all)", show_default=False)
    ] = 0,
    dtype: Annotated[
        str, typer.Option(metavar="fp32|bf16", help="with --model: dtype of compute; gradients are reduced in fp32")
    ] = "bf16",
    no_reshard: Annotated[
        bool,
        typer.Option("--no-reshard", help="with --model: keep parameters gathered between forward and backward"),
    ] = False,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="with --model: trace every layer (default: extrapolate from a few if there are many)"
        ),
    ] = False,
    passes: Passes = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="device profile for estimates, a name or a file (default: h200-nvlink; for schedules: the saved one)",
            show_default=False,
        ),
    ] = None,
    option: Options = None,
    save: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="write schedule.txt, report.html, trace.pftrace or record.json; for several plans a plot (.html); may"
            " be repeated",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Plan a model or your script on N ranks, or run the passes on schedules. Needs no GPU and no ranks.

    A script runs as rank 0 up to its first optimizer step, on tensors without values; pass its arguments after --. The
    options that it gives to overlapc apply, too, except those that are given here, and except its profile.
    """
    values = option_values(passes, option)
    if profile is not None:
        values["profile"] = profile
    if (file is None) == (not model):
        raise ConfigError("give either FILE or --model")
    targets = save or ()
    if file is not None and file.suffix == ".py":
        why = f"needs --model: {file.name} makes its model and its mesh, from WORLD_SIZE and its arguments after --"
        _refuse(context, _OF_MODELS, why)
    elif file is not None:
        why = f"does not apply to the schedules in {file.name}, whose ranks and sizes are fixed"
        _refuse(context, (*_OF_MODELS, *_OF_MODELS_AND_SCRIPTS, "arguments"), why)
        _plan_schedules(file, values, targets)
        return
    check_torch()
    from overlapc.launch import sweep

    axes = {"world size": world_size.split(","), "seq": seq.split(","), "batch": batch.split(",")}
    axes["budget"] = [part.strip() for part in budget.split(",")]
    several = len(sweep.points(axes)) > 1
    _check_outputs(targets, several)
    assumptions: dict[str, None] = {}  # in the order in which they are first made
    if file is not None:
        assumptions["only what the script runs before its first optimizer step is planned"] = None
    with tempfile.TemporaryDirectory() as folder:
        named = Config.of(values).profile or "h200-nvlink"
        values["profile"], machine = sweep.hardware(named, gpus_per_host, network, Path(folder))
        if file is not None:
            plan_one = _script_planner(file, arguments or (), values, machine.ranks_per_host, assumptions)
        else:
            settings = {"model": model, "mesh": mesh, "layers": layers, "dtype": dtype, "reshard": not no_reshard}
            plan_one = _model_planner(values, settings, whole)
        outcomes = list(sweep.sweep(axes, plan_one))
    assumed = sweep.assumed(machine, *assumptions)
    if several:
        _show_table(axes, outcomes, assumed, targets)
    else:
        _show_step(outcomes[0][1], assumed, targets)


def _refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise ConfigError if the user gave one of these parameters."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":  # releases of typer have different enums
            shown = f"the argument {context.params[name][0]}" if name == "arguments" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{shown} {why}")


def _plan_schedules(file: Path, values: Mapping[str, str], targets: Sequence[Path]) -> None:
    from overlapc.launch.plan import plan_text

    _check_outputs(targets)
    report = plan_text(read_text(file), Config.of(values))
    print(report)
    _save(report, targets)


def _show_step(step: Outcome, assumed: str, targets: Sequence[Path]) -> None:
    """Print and save one plan; raise MemoryBudgetError if `step` is the reason why there is none."""
    from overlapc.report.record import Report

    if isinstance(step, str):
        raise MemoryBudgetError(step)
    report = Report((step,))
    print(f"{report}\n{assumed}")
    _save(report, targets)


def _show_table(axes: Axes, found: Sequence[tuple[Point, Outcome]], assumed: str, targets: Sequence[Path]) -> None:
    """Print a sweep's table and save its page; raise MemoryBudgetError if no point has a plan."""
    from overlapc.report import plans

    if all(isinstance(step, str) for _, step in found):
        raise MemoryBudgetError(str(found[0][1]))
    print(f"{plans.table(axes, found)}\n{assumed}")
    for target in targets:
        write_file(target, plans.page(axes, found, assumed))
        print(f"written to {target}")


def _check_outputs(targets: Sequence[Path], several: bool = False) -> None:
    from overlapc.report.record import FORMS

    what, suffixes = ("several plans", (".html",)) if several else ("a plan", FORMS)
    for target in targets:
        output_file(target, what, suffixes)


def _save(report: Report, targets: Sequence[Path]) -> None:
    for target in targets:
        print(f"written to {report.save(target)}")


def _script_planner(
    script: Path, arguments: Sequence[str], values: Mapping[str, str], per_host: int, assumptions: dict[str, None]
) -> PlanOne:
    """Return a function that plans a script at one point of a sweep and adds its assumptions to `assumptions`."""
    from overlapc.launch.plan_script import plan_script
    from overlapc.launch.sweep import MOST_RANKS, counts

    def plan_one(point: Point) -> Report:
        (ranks,) = counts(point["world size"], "world-size", MOST_RANKS)
        options = Config(**_at(point, values))  # only these, which override those of the script
        report, assumed = plan_script(script, arguments, ranks or 8, per_host, options)
        assumptions.update(dict.fromkeys(assumed))
        return report

    return plan_one


def _model_planner(values: Mapping[str, str], settings: Mapping[str, Any], whole: bool) -> PlanOne:
    """Return a function that plans one of our models at one point of a sweep."""
    from overlapc.launch.plan_model import PlanConfig, plan_model
    from overlapc.launch.sweep import MOST_RANKS, counts

    def plan_one(point: Point) -> Report:
        (ranks,) = counts(point["world size"], "world-size", MOST_RANKS)
        (seq,), (batch,) = counts(point["seq"], "seq", 2**31), counts(point["batch"], "batch", 2**31)
        cfg = PlanConfig.of(world_size=ranks, seq=seq, batch=batch, **settings)
        return plan_model(cfg, Config.of(_at(point, values)), whole=whole)

    return plan_one


def _at(point: Point, values: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options of one point of a sweep."""
    return {**values, "memory_budget": point["budget"]} if point["budget"] else values
