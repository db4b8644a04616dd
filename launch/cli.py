"""The `overlapc` command."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from tabulate import tabulate

from overlapc.config import Config, describe, variable_of
from overlapc.documents import read_text
from overlapc.errors import ConfigError, MemoryBudgetError, OverlapcError, ScheduleError, ToolchainError
from overlapc.launch.torchrun import JobFailed, Meeting, check_world, run_ranks
from overlapc.options.checked_options import checked_options

# typer carries its own click in new versions and needs click's in old ones; both put this class here.
_UsageProblem: Any = typer.BadParameter.__mro__[2]

_BAD_INPUT = (ConfigError, ToolchainError, ScheduleError)  # the last from a schedule text that a user wrote
_USAGE, _FAILED, _INTERRUPTED = 2, 1, 130

app = typer.Typer(
    help="A torch.compile backend that runs FSDP/TP communication beside compute, and its tools.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Passes = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", help="passes in this order, or 'none' (default: passes/pipeline.py)", show_default=False
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="any option of `overlapc options`, e.g. memory_budget=70GiB; may be given several times",
        show_default=False,
    ),
]


@app.command(short_help="Train a small Llama, beside eager FSDP2.", epilog="example: overlapc demo --nproc 4 --tp 2")
def demo(
    nproc: Annotated[int, typer.Option(metavar="N", help="processes on this host, one a GPU")] = 2,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="gloo with C++ kernels, or NCCL with Triton")] = "cpu",
    dtype: Annotated[
        str, typer.Option(metavar="fp32|bf16", help="dtype of compute; gradients reduce in fp32")
    ] = "fp32",
    tp: Annotated[int, typer.Option(metavar="N", help="tensor- and sequence-parallel ranks; divides --nproc")] = 1,
    hsdp: Annotated[int, typer.Option(metavar="N", help="replicas of the sharded parameters; divides --nproc")] = 1,
    steps: Annotated[int, typer.Option(metavar="N", help="training steps of each of the two runs")] = 12,
    batch: Annotated[int, typer.Option(metavar="N", help="rows per data-parallel rank")] = 4,
    seq: Annotated[int, typer.Option(metavar="N", help="tokens (bytes) per row")] = 256,
    model: Annotated[str, typer.Option(metavar="tiny|demo|8b", help="shape; 8b has 8 layers of Llama-8B")] = "demo",
    no_reshard: Annotated[
        bool, typer.Option("--no-reshard", help="keep parameters gathered between forward and backward")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="measure 3 more steps and compare each kernel and collective with its prediction"
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder of this run (default: runs/<date-time>)", show_default=False),
    ] = None,
    passes: Passes = None,
    option: Options = None,
) -> None:
    """Train a small Llama on real text with overlapc, then with eager FSDP2, and compare.

    Prints both losses, step times and the overlap table; writes report.html, schedule.txt and record.json
    of every rank. Exit code 1 when fp32 losses differ by more than 1e-5.
    """
    variables = _variables(passes, option)
    _check_torch()
    from overlapc.launch.demo import DemoConfig

    cfg = DemoConfig(nproc, device, dtype, tp, hsdp, steps, batch, seq, not no_reshard, model, profile=profile)
    cfg.check()
    if device == "cpu":
        from overlapc.runtime.toolchain import find_compiler

        find_compiler()
    run_dir = _writable(out or _run_folder())
    command = ("-m", "overlapc.launch.demo", json.dumps(dataclasses.asdict(cfg)))
    run_ranks(command, nproc, run_dir, variables)


@app.command(
    short_help="Run your script on N ranks, and report.",
    context_settings={"allow_interspersed_args": False},
    epilog="example: overlapc run --nproc 8 --passes none train.py --steps 20",
)
def run(
    script: Annotated[str, typer.Argument(help="a Python script; arguments after it go to the script")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="...", help="arguments of the script", show_default=False)
    ] = None,
    nproc: Annotated[int, typer.Option(metavar="N", help="processes on this host, one a GPU")] = 1,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="the script is the name of a module, as after `python -m`")
    ] = False,
    passes: Passes = None,
    option: Options = None,
    watchdog: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="print all ranks' stacks and end when no optimizer steps for so long (the first: ten times); 0: never",
            min=0,
        ),
    ] = 0.0,
    nnodes: Annotated[
        str, typer.Option(metavar="N", help="hosts of the job, or MIN:MAX; start this command on each of them")
    ] = "1",
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="one of the hosts, where all meet", show_default=False)
    ] = "",
    rdzv_id: Annotated[
        str, typer.Option(metavar="ID", help="tells jobs apart that meet at one endpoint", show_default=False)
    ] = "",
    max_restarts: Annotated[
        int, typer.Option(metavar="N", help="how often all ranks start again after one has failed", min=0)
    ] = 0,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="record of every rank's collectives, for `overlapc report` (default: runs/<date-time>/overlap.json);"
            " of several hosts, those without rank 0 add their first rank to its name",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a training script on N ranks under torchrun's elastic launcher and collect its report."""
    variables = _variables(passes, option)
    _check_torch()
    check_world(nproc, "cpu")
    if not module and not Path(script).is_file():
        raise ConfigError(f"no script {script!r}")
    from overlapc.report import record

    meeting = Meeting(nnodes, rdzv_endpoint, rdzv_id, max_restarts)
    _ = meeting.nodes  # now: a mistake should start nothing
    report = report or _run_folder() / "overlap.json"
    command = ("-m", script) if module else (script,)
    # Launchers of other hosts may share this disk.
    with tempfile.TemporaryDirectory(prefix=f".{report.name}.", dir=_writable(report.parent)) as folder:
        last = run_ranks(
            (*command, *(arguments or ())), nproc, Path(folder), variables, watchdog_s=watchdog, meeting=meeting
        )
        collected = record.gather(last)
    if not collected.steps:
        print(f"overlapc: {script} compiled nothing with backend='overlapc'; no report", file=sys.stderr)
        return
    if first := collected.steps[0].rank:
        report = report.with_name(f"{report.stem}.rank{first}{report.suffix}")
    collected.save(report)
    print(f"\n{collected}\n\nwritten to {report}; a page of it: overlapc report {report} --save report.html")


@app.command(
    short_help="Plan a model, or a schedule text, without GPUs.",
    epilog="example: overlapc plan --model llama-8b --mesh dp=512,tp=2",
)
def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="a training script (*.py), or schedules in text form (a run's schedule.txt); or give --model",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ...]", help="arguments of the script, behind --", show_default=False),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="llama-8b|llama-70b|demo|tiny", help="plan a training step of this model")
    ] = "",
    mesh: Annotated[
        str, typer.Option(metavar="dp=N,tp=N", help="ranks by axis: replicate, dp, tp (default: all in dp)")
    ] = "",
    world_size: Annotated[
        str,
        typer.Option(metavar="N,N", help="ranks (default: what --mesh says; of a script: 8); several: one table"),
    ] = "0",
    seq: Annotated[str, typer.Option(metavar="N,N", help="tokens a row, with --model; several: one table")] = "4096",
    batch: Annotated[
        str, typer.Option(metavar="N,N", help="rows a data-parallel rank, with --model; several: one table")
    ] = "1",
    budget: Annotated[
        str, typer.Option(metavar="SIZE,SIZE", help="memory_budget; several: one table", show_default=False)
    ] = "",
    gpus_per_host: Annotated[
        int, typer.Option(metavar="N", help="ranks of one host (default: the profile's)", show_default=False)
    ] = 0,
    network: Annotated[
        str,
        typer.Option(metavar="RATE", help="of one GPU's network: 400Gb/s (default: the profile's)", show_default=False),
    ] = "",
    layers: Annotated[
        int, typer.Option(metavar="N", help="layers (default: all of the model)", show_default=False)
    ] = 0,
    dtype: Annotated[
        str, typer.Option(metavar="fp32|bf16", help="dtype of compute; gradients reduce in fp32")
    ] = "bf16",
    no_reshard: Annotated[
        bool, typer.Option("--no-reshard", help="keep parameters gathered between forward and backward")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="trace every layer (default: of many equal ones a few)")
    ] = False,
    passes: Passes = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="device whose times are estimated, a name or a file (default, but for schedules: h200-nvlink)",
            show_default=False,
        ),
    ] = None,
    option: Options = None,
    save: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="schedule.txt, report.html, trace.pftrace, record.json; of several plans .html, a plot; may repeat",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Plan a model or your script on N ranks, or run the passes on schedules. Needs no GPU and no ranks.

    A script runs as rank 0 up to its first optimizer step, on tensors without values; pass its arguments after --.
    """
    values = _values(passes, option)
    if profile is not None:
        values["profile"] = profile
    if (file is None) == (not model):
        raise ConfigError("give one of FILE and --model")
    is_script = file is not None and file.suffix == ".py"
    if file is not None and not is_script:
        from overlapc.launch.plan import plan_text

        report = plan_text(read_text(file), Config.of(values))
        print(report)
        _save(report, save)
        return
    _check_torch()
    from overlapc.launch import sweep
    from overlapc.report import plans
    from overlapc.report.record import Report

    axes = {"world size": world_size.split(","), "seq": seq.split(","), "batch": batch.split(",")}
    axes["budget"] = [part.strip() for part in budget.split(",")]
    several = len(sweep.points(axes)) > 1
    if is_script and mesh:
        raise ConfigError("--mesh is for --model: a script makes its mesh from WORLD_SIZE and its arguments")
    for target in save or () if several else ():
        if target.suffix != ".html":
            raise ConfigError(f"--save {target.name}: several plans save as .html, other forms are of one plan")
    whole_plan = {"model": model, "mesh": mesh, "layers": layers, "dtype": dtype, "reshard": not no_reshard}
    with tempfile.TemporaryDirectory() as folder:
        named = values.get("profile") or Config.of({}).profile or "h200-nvlink"
        values["profile"], machine = sweep.hardware(named, gpus_per_host, network, Path(folder))
        assumptions: dict[str, None] = {}
        plan_one = _planner(file, arguments or (), values, whole_plan, machine.ranks_per_host, whole, assumptions)
        found = list(sweep.sweep(axes, plan_one))
    steps = [each for _, each in found if not isinstance(each, str)]
    if not steps:
        raise MemoryBudgetError(str(found[0][1]))
    more = ["only what the script runs before its first optimizer step is planned"] if is_script else []
    assumed = sweep.assumed(machine, *more, *assumptions)
    if not several:
        report = Report((steps[0],))
        print(f"{report}\n{assumed}")
        _save(report, save)
        return
    print(f"{plans.table(axes, found)}\n{assumed}")
    for target in save or ():
        _writable(target.parent)
        target.write_text(plans.page(axes, found, assumed), encoding="utf-8")
        print(f"written to {target}")


def _save(report: Any, targets: Sequence[Path] | None) -> None:
    for target in targets or ():
        print(f"written to {report.save(target)}")


def _planner(
    file: Path | None,
    arguments: Sequence[str],
    values: Mapping[str, str],
    settings: Mapping[str, Any],
    per_host: int,
    whole: bool,
    assumptions: dict[str, None],
) -> Callable[[Mapping[str, str]], Any]:
    """Makes the function that plans one point of a sweep; planning a script adds to `assumptions`."""
    from overlapc.launch.plan_model import PlanConfig, plan_model
    from overlapc.launch.plan_script import MOST_RANKS, plan_script
    from overlapc.launch.sweep import counts

    def plan_one(point: Mapping[str, str]) -> Any:
        options = Config.of({**values, **({"memory_budget": point["budget"]} if point["budget"] else {})})
        (ranks,) = counts(point["world size"], "world-size", MOST_RANKS)
        if file is not None:
            report, assumed = plan_script(file, arguments, ranks or 8, per_host, options)
            assumptions.update(dict.fromkeys(assumed))
            return report
        (seq,), (batch,) = counts(point["seq"], "seq", 2**31), counts(point["batch"], "batch", 2**31)
        cfg = PlanConfig.of(world_size=ranks, seq=seq, batch=batch, **settings)
        return plan_model(cfg, options, whole=whole)

    return plan_one


@app.command(
    short_help="Measure this machine for better estimates.",
    epilog="example: overlapc calibrate --nproc 4 --device cuda --out h200.json",
)
def calibrate(
    nproc: Annotated[int, typer.Option(metavar="N", help="processes on this host, one a GPU; 1 measures no links")] = 2,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="what to measure (default: cuda if there is any)")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="the profile to write (default: <name>.json)", show_default=False),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="of the profile (default: made from the device)")
    ] = "",
    ranks_per_host: Annotated[
        int,
        typer.Option(metavar="N", help="devices of a whole host (default: those of this machine)", show_default=False),
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="a CPU's few sizes: about ten seconds")] = False,
    copies_for: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="measure only collectives by copies, and add them to this profile", show_default=False
        ),
    ] = "",
    records: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="RECORD|DIR",
            help="measure nothing, fit --profile to measured runs: a record, or the folder of `overlapc demo --profile`"
            " with the records of all ranks; may repeat",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="with --from: the profile to start from, a name or a file")
    ] = "h200-nvlink",
) -> None:
    """Measure this machine and write a device profile: matmuls, memory, kernels, collectives, contention.

    Takes one to two minutes. Use it with -o profile=FILE, or OVERLAPC_PROFILE=FILE. With --from, prediction errors of
    training steps that were measured are fed back into a profile instead.
    """
    if records:
        _feed_back(profile, records, (out or Path(f"{name or Path(profile).stem + '-fed-back'}.json")).resolve(), name)
        return
    _check_torch()
    from overlapc.launch.calibrate import CalibrateConfig

    if not device:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = CalibrateConfig(nproc, device, name, ranks_per_host, quick, copies_for)
    cfg.check()
    target = (out or Path(f"{cfg.profile_name}.json")).resolve()
    _writable(target.parent)
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "overlapc.launch.calibrate", json.dumps(dataclasses.asdict(cfg)), str(target))
        run_ranks(command, nproc, Path(folder))


def _feed_back(profile: str, records: Sequence[Path], target: Path, name: str) -> None:
    from overlapc.report.measured_runs import feedback_text, refine

    feedback, document = refine(profile, records)
    if name:
        document["name"] = name
    _writable(target.parent)
    target.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{feedback_text(feedback)}\n\nwritten to {target}")


@app.command(
    short_help="Show a saved report, or save it as a page.",
    epilog="example: overlapc report runs/DATE/overlap.json --save report.html",
)
def report(
    file: Annotated[Path, typer.Argument(help="a record: overlap.json, or record.json of a run folder")],
    save: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="write this form: report.html, trace.pftrace, schedule.txt; may repeat",
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="list fully hidden collectives in long tables, too")] = False,
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

    First comes what is exposed, why, and what to try; then each graph. With --profile, or for a record that was
    measured: every collective and kernel, predicted and measured, with what is further off than 20% marked.
    """
    from overlapc.report import compare, record, report_with_trace, text

    loaded = record.load(file)
    if profile is not None:
        loaded = report_with_trace(loaded, profile)
    for target in save or ():
        print(f"written to {loaded.save(target)}")
    if save:
        return
    print(text.render(loaded.steps, all_rows=every))
    for graph in loaded.steps[0].graphs if loaded.steps else ():
        if graph.measured is not None:
            print(f"\n{compare.graph_text(graph)}")


@app.command(
    short_help="Compare two runs or plans, by cause.",
    epilog="example: overlapc diff runs/MONDAY/overlap.json runs/TODAY/overlap.json --save diff.html",
)
def diff(
    first: Annotated[Path, typer.Argument(help="a record (*.json), or schedules in text form (schedule.txt)")],
    second: Annotated[Path, typer.Argument(help="the one to compare with it")],
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write it as a page: diff.html", show_default=False)
    ] = None,
) -> None:
    """Show what became longer and why: parts of a step, compute by kind, communication, causes of exposure, memory."""
    from overlapc.report import difference

    steps = [_loaded(path).steps for path in (first, second)]
    for path, found in zip((first, second), steps, strict=True):
        if not found or not found[0].graphs:
            raise ConfigError(f"{path} holds no compiled graph")
    rows = difference.differences(steps[0][0], steps[1][0])
    names = _apart(first, second)
    if save is not None:
        if save.suffix != ".html":
            raise ConfigError(f"{save.name}: a comparison saves as .html")
        _writable(save.parent)
        save.write_text(difference.page(rows, names), encoding="utf-8")
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
    """What tells two files apart: their names, or as much of their paths as differs."""
    if first.name != second.name:
        return first.name, second.name
    return str(first), str(second)


@app.command(epilog="example: overlapc doctor -o profile=my.json")
def doctor(option: Options = None) -> None:
    """Check this machine: compiler, GPUs, links, cache and profile; names what would be slow. Takes some seconds."""
    _check_torch()
    from overlapc.launch.doctor import examine

    for what, version_of in _versions():
        print(f"{what:<17} {version_of}")
    found = []
    for each in examine(Config.of(_values(None, option))):
        found.append(each)
        print(f"{each.what:<17} {each.found}", flush=True)
    slow = [each for each in found if each.hint]
    print(f"\n{len(slow)} of {len(found)} to look at" if slow else "\nnothing here would be slow")
    for each in slow:
        print(f"  {each.what}: {each.hint}")


@app.command()
def options(
    markdown: Annotated[bool, typer.Option("--markdown", help="as the rows of docs/OPTIONS.md")] = False,
) -> None:
    """List every option: its variable, default and meaning."""
    if markdown:
        for name, variable, default, meaning in option_rows():
            print(f"| `{name}` | `{variable}` | {default} | {meaning} |")
        return
    print(tabulate(option_rows(), ("option", "variable", "default", "meaning"), maxcolwidths=[None, None, 28, 60]))


def option_rows() -> list[tuple[str, str, str, str]]:
    """`config.describe()` for people: `-` for a default that is nothing, `~` for the home folder."""
    plain = {"None": "-", "frozenset()": "-", "True": "on", "False": "off"}
    home = str(Path.home())
    return [
        (name, variable, plain.get(default, default.replace(home, "~")), meaning)
        for name, variable, default, meaning in describe()
    ]


@app.command("version")
def show_version() -> None:
    """Show the versions of overlapc, torch and other libraries."""
    from overlapc.runtime.toolchain import find_compiler

    try:
        compiler = " ".join(find_compiler().command)
    except ToolchainError:
        compiler = "none"
    print(tabulate([*_versions(), ("C++ compiler", compiler)], tablefmt="plain", disable_numparse=True))


def _versions() -> list[tuple[str, str]]:
    packages = ("overlapc", "torch", "triton", "sympy")
    return [*((name, _version_of(name)) for name in packages), ("python", sys.version.split()[0])]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _variables(passes: str | None, given: Sequence[str] | None) -> dict[str, str]:
    """OVERLAPC_ variables for the ranks; ConfigError for values that a compilation would refuse."""
    values = _values(passes, given)
    checked_options(values)
    return {variable_of(name): value for name, value in values.items()}


def _values(passes: str | None, given: Sequence[str] | None) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--option {text}: write it as NAME=VALUE")
        values[name.strip()] = value
    if passes is not None:
        values["passes"] = passes
    return values


def _check_torch() -> None:
    from overlapc.fx.versions import check_torch_version

    check_torch_version()


def _run_folder() -> Path:
    """A new folder for a run."""
    name = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    return next(Path("runs") / each for each in names if not (Path("runs") / each).exists())


def _writable(folder: Path) -> Path:
    probe = folder / f".probe{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to folder {folder}: {error.strerror}") from None
    return folder.resolve()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code is 0, 1 (a job failed), 2 (bad input) or 130 (Ctrl-C)."""
    given = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of other people's nodes, in a terminal that knows ASCII only
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(args=given or ["--help"], prog_name="overlapc", standalone_mode=False)
        if not given:
            return _USAGE
    except _UsageProblem as problem:
        return _say(" ".join(problem.format_message().split()), problem.exit_code)
    except JobFailed as failed:
        return _say(str(failed), failed.exit_code)
    except OverlapcError as error:
        return _say(str(error), _USAGE if isinstance(error, _BAD_INPUT) else _FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", _INTERRUPTED)
    return code if isinstance(code, int) else 0


def _say(message: str, code: int) -> int:
    print(f"overlapc: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
