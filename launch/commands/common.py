"""Options and output folders that several commands share."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from overlapc.config import variable_of
from overlapc.documents import check_suffix
from overlapc.errors import ConfigError
from overlapc.options.checked_options import checked_options

Passes = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", help="passes to run, in this order, or 'none' (default: passes/pipeline.py)", show_default=False
    ),
]
Processes = Annotated[int, typer.Option(metavar="N", help="processes on this host, one per GPU")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="any option that `overlapc options` lists, e.g. memory_budget=70GiB; may be repeated",
        show_default=False,
    ),
]


def option_variables(passes: str | None, given: Sequence[str] | None) -> dict[str, str]:
    """Return the OVERLAPC_ variables for the ranks; ConfigError for values that a compilation would reject."""
    values = option_values(passes, given)
    checked_options(values)
    return {variable_of(name): value for name, value in values.items()}


def option_values(passes: str | None, given: Sequence[str] | None) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--option {text}: write it as NAME=VALUE")
        values[name.strip()] = value
    if passes is not None:
        values["passes"] = passes
    return values


def check_torch() -> None:
    from overlapc.fx.supported_torch import check_torch_version

    check_torch_version()


def new_run_folder() -> Path:
    """Return the path of a new folder for a run, `runs/<date-time>`; it is not created."""
    name = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    return next(Path("runs") / candidate for candidate in names if not (Path("runs") / candidate).exists())


def output_file(path: Path, what: str, suffixes: Sequence[str]) -> Path:
    """Return `path`; ConfigError if it cannot be written, or lacks one of the suffixes.

    Every command calls this for its output files before it does anything else, so that no result is lost. what: the
    content, such as "a report".
    """
    check_suffix(path, what, suffixes)
    writable(path.parent)
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; give the name of a file")
    return path


def writable(folder: Path) -> Path:
    probe = folder / f".probe{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to folder {folder}: {error.strerror}") from None
    return folder.resolve()
