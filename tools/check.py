"""Runs linter, formatter, type checker and tests for `make test`; all of them, even if one fails.

python tools/check.py [arguments for pytest]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS = (
    ("ruff check", ("-m", "ruff", "check", ".")),
    ("ruff format", ("-m", "ruff", "format", "--check", ".")),
)
MYPY = ("-m", "mypy", "-p", "overlapc")


def main(pytest_arguments: Sequence[str]) -> int:
    """Run all checks. Return 0 if all of them passed, else 1."""
    failed = [name for name, command in CHECKS if run(name, command) != 0]
    # mypy takes half a minute without its cache, on one core: it runs beside the tests, which take the others.
    with tempfile.TemporaryFile("w+") as output:
        mypy = subprocess.Popen(
            [sys.executable, *MYPY], cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT
        )
        if run_tests(pytest_arguments) != 0:
            failed.append("pytest")
        if mypy.wait() != 0:
            failed.append("mypy")
        output.seek(0)
        print(f"== mypy\n{output.read()}", end="")
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


def run_tests(pytest_arguments: Sequence[str]) -> int:
    """Run pytest, on two workers unless the arguments say how many. Return its exit code."""
    # Distribute tests by file, so that fixtures of a module (a launch of ranks, compiled kernels) are made only once,
    # not on every worker. Files run in the order of tests/conftest.py, the longest first; xdist would begin with the
    # files that have the most tests.
    given = any(argument.startswith("-n") for argument in pytest_arguments)
    workers = () if given else ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    return run("pytest", ("-m", "pytest", *workers, *pytest_arguments))


def environment() -> dict[str, str]:
    """Return the variables with which checks run."""
    variables = {**os.environ, "MYPYPATH": ""}
    # Tests start a hundred interpreters; without bytecode files, each would spend a second compiling our modules.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def run(name: str, command: Sequence[str]) -> int:
    """Run `python command` in the project's root, showing its output and its time. Return its exit code."""
    print(f"== {name}", flush=True)
    began = time.monotonic()
    code = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment()).returncode
    if name != "pytest":  # pytest's own summary says it
        print(f"{'ok' if code == 0 else 'FAILED'}, {time.monotonic() - began:.1f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
