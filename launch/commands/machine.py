"""`overlapc doctor`, `overlapc options` and `overlapc version`: checks of this machine and installation."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from tabulate import tabulate

from overlapc.config import Config, describe
from overlapc.errors import ToolchainError
from overlapc.launch.commands.common import Options, check_torch, option_values


def doctor(option: Options = None) -> None:
    """Check this machine: compiler, GPUs, links, cache and profile. Say what would be slow, and why. Takes seconds."""
    check_torch()
    from overlapc.launch.doctor import examine

    for what, version_of in _versions():
        print(f"{what:<17} {version_of}")
    found = []
    for finding in examine(Config.of(option_values(None, option))):
        found.append(finding)
        print(f"{finding.what:<17} {finding.found}", flush=True)
    slow = [finding for finding in found if finding.hint]
    print(f"\n{len(slow)} of {len(found)} findings need attention" if slow else "\nno problems found")
    for finding in slow:
        print(f"  {finding.what}: {finding.hint}")


def options(
    markdown: Annotated[bool, typer.Option("--markdown", help="print the table rows of docs/OPTIONS.md")] = False,
) -> None:
    """List every option: its variable, default and meaning."""
    if markdown:
        for name, variable, default, meaning in option_rows():
            print(f"| `{name}` | `{variable}` | {default} | {meaning} |")
        return
    print(tabulate(option_rows(), ("option", "variable", "default", "meaning"), maxcolwidths=[None, None, 28, 60]))


def option_rows() -> list[tuple[str, str, str, str]]:
    """Return `config.describe()` in readable form: `-` for an empty default, `~` for the home folder."""
    plain = {"None": "-", "frozenset()": "-", "True": "on", "False": "off"}
    home = str(Path.home())
    return [
        (name, variable, plain.get(default, default.replace(home, "~")), meaning)
        for name, variable, default, meaning in describe()
    ]


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
