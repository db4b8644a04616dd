"""The `overlapc` command line: its commands, in the order of the help text, and its exit codes."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import typer

from overlapc.errors import ConfigError, OverlapcError, ScheduleError, ToolchainError
from overlapc.launch.commands.calibrate import calibrate
from overlapc.launch.commands.demo import demo
from overlapc.launch.commands.machine import doctor, options, show_version
from overlapc.launch.commands.plan import plan
from overlapc.launch.commands.report import diff, report
from overlapc.launch.commands.run import run
from overlapc.launch.torchrun import JobFailed
from overlapc.stack_room import with_stack_room

# New versions of typer contain a copy of click, old ones import it; in both, this is click's `ClickException`.
_UsageProblem: Any = typer.BadParameter.__mro__[2]

_BAD_INPUT = (ConfigError, ToolchainError, ScheduleError)  # ScheduleError: for the schedule text of a user
_USAGE, _FAILED, _INTERRUPTED = 2, 1, 130

app = typer.Typer(
    help="Tools of overlapc, a torch.compile backend that overlaps FSDP/TP communication with compute.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(
    short_help="Train a small Llama, and compare with eager FSDP2.", epilog="example: overlapc demo --nproc 4 --tp 2"
)(demo)
app.command(
    short_help="Run your script on N ranks, and report.",
    context_settings={"allow_interspersed_args": False},
    epilog="example: overlapc run --nproc 8 --passes none train.py --steps 20",
)(run)
app.command(
    short_help="Plan a model, your script or a schedule text, without GPUs.",
    epilog="example: overlapc plan --model llama-8b --mesh dp=512,tp=2",
)(plan)
app.command(
    short_help="Measure this machine for better estimates.",
    epilog="example: overlapc calibrate --nproc 4 --device cuda --out h200.json",
)(calibrate)
app.command(
    short_help="Show a saved report, or save it as a page.",
    epilog="example: overlapc report runs/DATE/overlap.json --save report.html",
)(report)
app.command(
    short_help="Compare two runs or plans, by cause.",
    epilog="example: overlapc diff runs/MONDAY/overlap.json runs/TODAY/overlap.json --save diff.html",
)(diff)
app.command(
    short_help="Check this machine, and name what would be slow.",
    epilog="example: overlapc doctor -o profile=my.json",
)(doctor)
app.command()(options)
app.command("version")(show_version)


@with_stack_room
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 0, 1 (a job failed), 2 (bad input) or 130 (Ctrl-C)."""
    given = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of nodes may not be printable in an ASCII-only terminal
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
