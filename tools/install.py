"""Makes a virtual environment with everything overlapc needs. Standard library only: it runs before all else.

    python3 tools/install.py --venv .venv

Which torch? On a machine with an NVIDIA GPU, the one that pip picks. Without one, a build that brings no
CUDA packages (gigabytes), if the index or find-links that pip is set up with offer any in range: pip itself
is asked, with dry runs, so that no host or address stands here.

The stamp file in the environment is written last. An interrupted run therefore starts over, on top of what
it had installed; an unchanged pyproject.toml makes the next run return at once.
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
CPU_TRITON = "triton==3.6.*"  # CUDA builds of torch pin their own; CPU builds pin none
OLDEST_PIP = (23, 0)  # dry runs with a report came with 22.2

PipReport = Any  # a dict; written so that a Python too old for `dict[str, Any]` gets as far as being told so


class CannotInstall(Exception):
    """The environment cannot be made; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry; returns the exit code."""
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
    """Makes or completes `venv`; does nothing when it is already as pyproject.toml asks."""
    check_machine()
    stamp, wanted = venv / STAMP, fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        stamp.touch()  # for make, which compares times
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
    """CannotInstall when Python is too old or no C++ compiler is there."""
    if sys.version_info < OLDEST_PYTHON:
        raise CannotInstall(f"Python {sys.version.split()[0]} is too old; 3.10 or newer: make PYTHON=/path/to/python3")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise CannotInstall(f"no C++ compiler {compiler!r} found; install g++ (Debian: apt-get install g++) or set CXX")


def fingerprint() -> str:
    """Changes when the environment must be made anew."""
    text = (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes() + sys.version.encode()
    return hashlib.sha256(text + str(has_gpu()).encode()).hexdigest()


def has_gpu() -> bool:
    """Whether an NVIDIA driver is installed."""
    return shutil.which("nvidia-smi") is not None


def make_venv(venv: Path) -> str:
    """The python of `venv`, which is made if it is missing or was left half made."""
    python = str(venv / "bin" / "python")
    if pip_version(python) is None:
        print(f"install: making {venv}", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
        if made.returncode != 0 or pip_version(python) is None:
            reason = " ".join((made.stdout + made.stderr).strip().splitlines()[:1])
            raise CannotInstall(f"python -m venv failed ({reason}); on Debian: apt-get install python3-venv")
    if (pip_version(python) or OLDEST_PIP) < OLDEST_PIP:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
    return python


def pip_version(python: str) -> tuple[int, int] | None:
    """The version of pip that `python` runs; None when it runs none."""
    try:
        asked = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True)
    except OSError:  # no such file, or an empty one
        return None
    found = re.match(r"pip (\d+)\.(\d+)", asked.stdout)
    return (int(found[1]), int(found[2])) if found else None


class Pip:
    """Asks the pip of an environment, as it is set up on this machine."""

    def __init__(self, python: str) -> None:
        self.python = python

    def resolve(self, requirement: str) -> PipReport | None:
        """What pip would install for `requirement`; None when it finds nothing."""
        command = ["install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-", requirement]
        asked = subprocess.run([self.python, "-m", "pip", *command], capture_output=True, text=True)
        return json.loads(asked.stdout) if asked.returncode == 0 else None

    def versions(self) -> list[str]:
        """Every torch version on offer, as pip lists them."""
        asked = subprocess.run([self.python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True)
        return parse_versions(asked.stdout)


def choose_torch(
    resolve: Callable[[str], PipReport | None], versions: Callable[[], list[str]], gpu: bool
) -> tuple[str, str]:
    """(version to install, one line saying why). CannotInstall when pip offers no torch in range."""
    offered = resolve(TORCH_RANGE)
    if offered is None:
        raise CannotInstall(f"pip finds no {TORCH_RANGE} for Python {sys.version_info[0]}.{sys.version_info[1]} here")
    version = torch_version(offered)
    heavy = cuda_packages(offered)
    if gpu:
        return version, f"torch {version} for the GPU of this machine"
    if not heavy:
        return version, f"torch {version}, which brings no CUDA packages"
    for candidate in light_first(versions()):
        if candidate == version:
            continue
        other = resolve(f"torch=={candidate}")
        if other is not None and not cuda_packages(other):
            return candidate, f"torch {candidate}, a CPU build, since this machine has no GPU"
    return version, (
        f"no GPU here, but no CPU build of {TORCH_RANGE} is on offer either: "
        f"torch {version} brings {len(heavy)} CUDA packages along"
    )


def torch_version(report: PipReport) -> str:
    """The version of torch in a pip report, local part included (`2.13.0+cpu`)."""
    return next(item["metadata"]["version"] for item in report["install"] if item["metadata"]["name"] == "torch")


def cuda_packages(report: PipReport) -> list[str]:
    """The packages of a pip report that only a GPU needs."""
    names = [item["metadata"]["name"].lower() for item in report["install"]]
    heavy = [name for name in names if re.match(r"(nvidia|cuda)[-_]", name)]
    local = torch_version(report).partition("+")[2]
    return [*heavy, "torch"] if re.match(r"cu\d", local) else heavy


def parse_versions(text: str) -> list[str]:
    """The versions in the output of `pip index versions`; empty when it found none."""
    found = re.search(r"^Available versions:(.*)$", text, re.MULTILINE)
    return [version.strip() for version in found[1].split(",")] if found else []


def light_first(versions: Sequence[str]) -> list[str]:
    """The released versions in range: CPU builds first, newest first among equals."""
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
