"""The wheel and the sdist contain all packages and data files, and the wheel works outside of the repository."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

LINKED = ("passes", "estimators", "launch")
PARTS = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "overlapc", *LINKED)
BUILD = "import sys, setuptools.build_meta as backend; getattr(backend, sys.argv[1])(sys.argv[2])"


def data_files() -> list[str]:
    """Return our data files, as paths in the installed package."""
    return sorted(
        f"overlapc/{path.relative_to(ROOT / 'overlapc') if folder == 'overlapc' else path.relative_to(ROOT)}"
        for folder in ("overlapc", *LINKED)
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".json", ".jinja", ".html") and not path.is_symlink()
    )


def modules() -> list[str]:
    return sorted(
        f"overlapc/{path.relative_to(ROOT / 'overlapc') if folder == 'overlapc' else path.relative_to(ROOT)}"
        for folder in ("overlapc", *LINKED)
        for path in (ROOT / folder).rglob("*.py")
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel and the sdist, built from a copy so that the tree stays clean."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.fail("building needs setuptools: pip install 'setuptools>=70.1'")
    folder = tmp_path_factory.mktemp("packaging")
    source, out = folder / "source", folder / "dist"
    source.mkdir()
    out.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=ignore)
        elif (ROOT / part).exists():
            shutil.copy(ROOT / part, source / part)
    for hook in ("build_sdist", "build_wheel"):  # what pip and build call
        command = [sys.executable, "-c", BUILD, hook, str(out)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(out.iterdir()), done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("overlapc-*.whl")
    return path


def test_the_wheel_holds_every_module_once_and_nothing_generic(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if name.endswith(".py")) == modules()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"overlapc"}
    for folder in LINKED:
        assert f"overlapc/{folder}/__init__.py" in names


def test_the_wheel_holds_every_data_file(wheel: Path) -> None:
    assert set(data_files()) <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_offers_the_backend_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    text = archive.read(entry_points).decode()
    assert "[torch_dynamo_backends]\noverlapc = overlapc.backend:overlapc" in text
    assert "[console_scripts]\noverlapc = overlapc.launch.cli:main" in text


def test_the_sdist_holds_the_linked_packages_as_files(built: Path) -> None:
    (path,) = built.glob("overlapc-*.tar.gz")
    with tarfile.open(path) as archive:
        members = {name.partition("/")[2]: archive.getmember(name) for name in archive.getnames()}
    assert set(modules()) | set(data_files()) <= set(members)
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]


def test_the_installed_wheel_imports_and_reads_its_data(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)  # what installing a pure-Python wheel into a target does
    program = f"""
import overlapc, overlapc.passes, overlapc.launch, overlapc.agreement.rank_agreement
from importlib.metadata import entry_points
from pathlib import Path
site = Path({str(target)!r})
for module in (overlapc, overlapc.passes, overlapc.launch, overlapc.agreement.rank_agreement):
    assert site in Path(module.__file__).parents, module.__file__
found = entry_points(group="torch_dynamo_backends", name="overlapc")
assert {{entry.value for entry in found}} == {{"overlapc.backend:overlapc"}}, found
"""
    # PYTHONPATH takes precedence over the finder of an editable install, if there is one.
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
