"""What `make test` runs: linter, formatter, types, tests. All of them, also after one has failed.

python tools/check.py [arguments for pytest]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS = (
    ("ruff check", ("-m", "ruff", "check", ".")),
    ("ruff format", ("-m", "ruff", "format", "--check", ".")),
    ("mypy", ("-m", "mypy", "-p", "overlapc")),
)


def main(pytest_arguments: Sequence[str]) -> int:
    """Runs everything; 0 only if all of it passed."""
    failed = [name for name, command in CHECKS if run(name, command) != 0]
    # By files: what a module's tests share (a launch of ranks, compiled kernels) is made once, not on every worker. In
    # the order of tests/conftest.py, the longest first; xdist's own begins with the files of many tests.
    given = any(argument.startswith("-n") for argument in pytest_arguments)
    workers = () if given else ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    if run("pytest", ("-m", "pytest", *workers, *pytest_arguments)) != 0:
        failed.append("pytest")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def run(name: str, command: Sequence[str]) -> int:
    """Runs `python command` in the project's root, showing its output and how long it took."""
    print(f"== {name}", flush=True)
    began = time.monotonic()
    environment = {**os.environ, "MYPYPATH": ""}
    # Tests start a hundred interpreters, each of which would compile our modules anew: a second of a core.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    code = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode
    if name != "pytest":  # whose own closing line says it, and stays the last one
        print(f"{'ok' if code == 0 else 'FAILED'}, {time.monotonic() - began:.1f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
