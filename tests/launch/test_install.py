"""How the installer chooses a build of torch from pip's reports."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT

PATH = ROOT / "tools" / "install.py"


def load_installer() -> ModuleType:
    """Import tools/install.py by path: tools/ is not a package, as the script runs before anything is installed."""
    spec = importlib.util.spec_from_file_location("overlapc_tools_install", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load_installer()


def report(*packages: tuple[str, str]) -> dict[str, Any]:
    """Return what the installer reads from `pip install --dry-run --report -`, as pip 23 and 26 write it."""
    return {
        "version": "1",
        "install": [{"metadata": {"name": name, "version": version}, "requested": False} for name, version in packages],
    }


CPU = report(("torch", "2.13.0+cpu"), ("sympy", "1.14.0"), ("filelock", "4.2.11"))
PLAIN_CPU = report(("torch", "2.12.1"), ("sympy", "1.14.0"))  # as on macOS or aarch64
CUDA = report(("torch", "2.13.1"), ("nvidia-cublas", "13.0.2"), ("cuda-bindings", "13.0.3"), ("triton", "3.7.0"))
LISTED = """torch (2.14.0)
Available versions: 2.14.0, 2.13.1, 2.13.0, 2.12.1, 2.12.0+cpu, 2.12.0, 2.11.0+cpu, 2.10.0+cpu, 2.13.0rc1
  INSTALLED: 2.9.0
"""


class Offers:
    """A fake package index that answers requirements and records the queries."""

    def __init__(self, answers: dict[str, dict[str, Any] | None], listed: str = "") -> None:
        self.answers, self.listed = answers, listed
        self.asked: list[str] = []

    def resolve(self, requirement: str) -> dict[str, Any] | None:
        self.asked.append(requirement)
        return self.answers.get(requirement)

    def versions(self) -> list[str]:
        self.asked.append("versions")
        return install.parse_versions(self.listed)


def choose(offers: Offers, gpu: bool = False) -> tuple[str, str]:
    return install.choose_torch(offers.resolve, offers.versions, gpu)


def test_a_cpu_build_that_pip_prefers_anyway_is_taken_without_more_questions():
    offers = Offers({install.TORCH_RANGE: CPU})
    assert choose(offers)[0] == "2.13.0+cpu"
    assert offers.asked == [install.TORCH_RANGE]


def test_a_gpu_takes_what_pip_prefers():
    offers = Offers({install.TORCH_RANGE: CUDA})
    version, note = choose(offers, gpu=True)
    assert (version, "GPU" in note) == ("2.13.1", True)
    assert offers.asked == [install.TORCH_RANGE]


def test_without_a_gpu_the_newest_cpu_build_in_range_beats_a_newer_cuda_build():
    offers = Offers({install.TORCH_RANGE: CUDA, "torch==2.12.0+cpu": CPU | {"install": CPU["install"][:1]}}, LISTED)
    assert choose(offers)[0] == "2.12.0+cpu"
    assert offers.asked == [install.TORCH_RANGE, "versions", "torch==2.12.0+cpu"]


def test_a_plain_version_that_brings_no_cuda_is_found_too():
    answers = {install.TORCH_RANGE: CUDA, "torch==2.13.0": CUDA, "torch==2.12.1": PLAIN_CPU}
    assert choose(Offers(answers, "Available versions: 2.13.1, 2.13.0, 2.12.1"))[0] == "2.12.1"


def test_without_a_cpu_build_the_installer_notes_that_and_continues():
    version, note = choose(Offers({install.TORCH_RANGE: CUDA, "torch==2.13.0": CUDA}, "Available versions: 2.13.0"))
    assert version == "2.13.1"
    assert "no CPU build" in note
    assert "2 CUDA packages" in note
    assert "\n" not in note


def test_a_cuda_local_version_counts_as_cuda_even_if_it_brings_no_packages():
    assert install.cuda_packages(report(("torch", "2.11.0+cu130"))) == ["torch"]
    assert install.cuda_packages(CPU) == []


def test_no_version_in_range_is_an_error():
    with pytest.raises(install.CannotInstall, match=r"pip finds no torch>=2.11"):
        choose(Offers({}))


def test_candidates_are_in_range_releases_cpu_builds_first():
    listed = install.parse_versions(LISTED)
    assert install.light_first(listed) == ["2.12.0+cpu", "2.11.0+cpu", "2.13.1", "2.13.0", "2.12.1", "2.12.0"]
    assert install.parse_versions("ERROR: No matching distribution found for torch") == []


def test_the_range_is_that_of_pyproject():
    assert f'"{install.TORCH_RANGE}"' in (install.ROOT / "pyproject.toml").read_text()
    low, high = install.TORCH_RANGE.removeprefix("torch>=").split(",<")
    assert (low, high) == tuple(".".join(map(str, bound)) for bound in (install.TORCH_LOW, install.TORCH_HIGH))


def test_no_compiler_is_a_clear_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert install.main(["--venv", str(tmp_path / "venv")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("install: no C++ compiler 'no-such-compiler' found; install g++")
    assert error.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_a_finished_environment_is_left_alone(tmp_path):
    """The stamp file suffices: pip is not called (this folder has none)."""
    (tmp_path / install.STAMP).write_text(install.fingerprint())
    assert install.main(["--venv", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [install.STAMP]


def test_an_interrupted_environment_is_made_again(tmp_path):
    """An interrupt while the environment is created leaves a folder whose python does not run."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    (tmp_path / "bin" / "python").chmod(0o755)
    python = install.make_venv(tmp_path)
    assert Path(python).stat().st_size > 0
    assert (tmp_path / "pyvenv.cfg").exists()
