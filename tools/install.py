"""Makes a virtual environment with everything overlapc needs. It uses only the standard library, as it runs first.

    python3 tools/install.py --venv .venv

On a machine with an NVIDIA GPU, it installs the torch that pip chooses. On others, it prefers a build without
CUDA packages (gigabytes), if the index or find-links that pip is configured with offer one in range. It asks
pip itself by dry runs, so that no host or address is hard-coded here.

The stamp file in the environment is written last. An interrupted run therefore starts over, on top of what
it had installed; with an unchanged pyproject.toml, the next run returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".overlapc-installed"
OLDEST_PYTHON = (3, 10)
TORCH_LOW, TORCH_HIGH = (2, 11), (2, 14)  # [low, high), as in pyproject.toml
TORCH_RANGE = "torch>=2.11,<2.14"
CPU_TRITON = "triton==3.6.*"  # CUDA builds of torch pin a version of triton; CPU builds do not
OLDEST_PIP = (23, 0)  # dry runs with a report were added in 22.2

PipReport = Any  # a dict; `dict[str, Any]` would be an error in a Python that is too old, before we can say so


class CannotInstall(Exception):
    """The environment cannot be created; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    venv = parser.parse_args(argv).venv
    try:
        install(venv)
    except CannotInstall as problem:
        print(f"install: {problem}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failed:
        shown = " ".join(map(str, failed.cmd))
        print(f"install: this command failed with code {failed.returncode}: {shown}", file=sys.stderr)
        return 1
    return 0


def install(venv: Path) -> None:
    """Create or update `venv`; do nothing if it already matches pyproject.toml."""
    check_machine()
    stamp, wanted = venv / STAMP, fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        stamp.touch()  # make compares modification times
        return
    python = make_venv(venv)
    packages = ["-e", f"{ROOT}[dev]"]
    print("install: asking pip which torch it offers", flush=True)
    pip = Pip(python)
    version, note = choose_torch(pip.resolve, pip.versions, has_gpu())
    print(f"install: {note}", flush=True)
    packages.append(f"torch=={version}")
    if "+cpu" in version and sys.platform == "linux":
        packages.append(CPU_TRITON)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    partial = stamp.with_suffix(".partial")
    partial.write_text(wanted)
    partial.replace(stamp)


def check_machine() -> None:
    """Raise CannotInstall if Python is too old or there is no C++ compiler."""
    if sys.version_info < OLDEST_PYTHON:
        raise CannotInstall(f"Python {sys.version.split()[0]} is too old; 3.10 or newer: make PYTHON=/path/to/python3")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise CannotInstall(f"no C++ compiler {compiler!r} found; install g++ (Debian: apt-get install g++) or set CXX")


def fingerprint() -> str:
    """Return a hash that changes if the environment must be created anew."""
    text = (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes() + sys.version.encode()
    return hashlib.sha256(text + str(has_gpu()).encode()).hexdigest()


def has_gpu() -> bool:
    """Whether an NVIDIA driver is installed."""
    return shutil.which("nvidia-smi") is not None


def make_venv(venv: Path) -> str:
    """Return the path of the Python of `venv`, creating `venv` if it is missing or incomplete."""
    python = str(venv / "bin" / "python")
    if pip_version(python) is None:
        print(f"install: creating {venv}", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
        if made.returncode != 0 or pip_version(python) is None:
            reason = " ".join((made.stdout + made.stderr).strip().splitlines()[:1])
            raise CannotInstall(f"python -m venv failed ({reason}); on Debian: apt-get install python3-venv")
    if (pip_version(python) or OLDEST_PIP) < OLDEST_PIP:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
    return python


def pip_version(python: str) -> tuple[int, int] | None:
    """Return the version of pip of `python`; None if it has no working pip."""
    try:
        asked = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True)
    except OSError:  # no such file, or an empty one
        return None
    found = re.match(r"pip (\d+)\.(\d+)", asked.stdout)
    return (int(found[1]), int(found[2])) if found else None


class Pip:
    """Queries the pip of an environment, as it is configured on this machine."""

    def __init__(self, python: str) -> None:
        self.python = python

    def resolve(self, requirement: str) -> PipReport | None:
        """Return pip's report of what it would install for `requirement`; None if it finds nothing."""
        command = ["install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-", requirement]
        asked = subprocess.run([self.python, "-m", "pip", *command], capture_output=True, text=True)
        return json.loads(asked.stdout) if asked.returncode == 0 else None

    def versions(self) -> list[str]:
        """Return the available versions of torch, as pip lists them."""
        asked = subprocess.run([self.python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True)
        return parse_versions(asked.stdout)


def choose_torch(
    resolve: Callable[[str], PipReport | None], versions: Callable[[], list[str]], gpu: bool
) -> tuple[str, str]:
    """Return (version to install, one line that says why). CannotInstall if pip finds no torch in range."""
    offered = resolve(TORCH_RANGE)
    if offered is None:
        raise CannotInstall(f"pip finds no {TORCH_RANGE} for Python {sys.version_info[0]}.{sys.version_info[1]} here")
    version = torch_version(offered)
    heavy = cuda_packages(offered)
    if gpu:
        return version, f"torch {version} for the GPU of this machine"
    if not heavy:
        return version, f"torch {version}, which needs no CUDA packages"
    for candidate in light_first(versions()):
        if candidate == version:
            continue
        other = resolve(f"torch=={candidate}")
        if other is not None and not cuda_packages(other):
            return candidate, f"torch {candidate}, a CPU build, since this machine has no GPU"
    return version, (
        f"this machine has no GPU, but pip finds no CPU build of {TORCH_RANGE}: "
        f"torch {version} also installs {len(heavy)} CUDA packages"
    )


def torch_version(report: PipReport) -> str:
    """Return the version of torch in a pip report, including the local part (`2.13.0+cpu`)."""
    return next(item["metadata"]["version"] for item in report["install"] if item["metadata"]["name"] == "torch")


def cuda_packages(report: PipReport) -> list[str]:
    """Return the packages of a pip report that are only needed for GPUs."""
    names = [item["metadata"]["name"].lower() for item in report["install"]]
    heavy = [name for name in names if re.match(r"(nvidia|cuda)[-_]", name)]
    local = torch_version(report).partition("+")[2]
    return [*heavy, "torch"] if re.match(r"cu\d", local) else heavy


def parse_versions(text: str) -> list[str]:
    """Return the versions in the output of `pip index versions`; empty if it found none."""
    found = re.search(r"^Available versions:(.*)$", text, re.MULTILINE)
    return [version.strip() for version in found[1].split(",")] if found else []


def light_first(versions: Sequence[str]) -> list[str]:
    """Return the released versions in range: CPU builds before others, and newer ones before older ones."""
    ranked = []
    for version in versions:
        number = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\+[\w.]+)?", version)
        if number is not None:
            release = (int(number[1]), int(number[2]), int(number[3]))
            if TORCH_LOW <= release[:2] < TORCH_HIGH:
                ranked.append((number[4] == "+cpu", release, version))
    return [version for _, _, version in sorted(ranked, reverse=True)]


if __name__ == "__main__":
    sys.exit(main())
