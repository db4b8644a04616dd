"""Our packages are imported by one name only, and nothing of Inductor is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests import ROOT
from tests.no_inductor import ENTRANCES, InductorUsed, no_inductor

LINKED = ("passes", "estimators", "launch")  # folders at the top level that are imported as overlapc.<name>
SOURCES = sorted(path for folder in ("overlapc", *LINKED) for path in (ROOT / folder).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line) of everything imported by statement, importlib or attribute (`torch._inductor`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "_inductor":
            yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((arg.value, node.lineno) for arg in node.args if isinstance(arg, ast.Constant))


def offences(text: str, forbidden: tuple[str, ...]) -> list[tuple[str, int]]:
    return [
        (name, line)
        for name, line in imported(ast.parse(text))
        if any(name == each or name.startswith(each + ".") for each in forbidden)
    ]


def test_the_scan_sees_every_way_of_importing() -> None:
    text = """
import torch._inductor.config
from torch import _inductor
from torch._inductor import scheduler
importlib.import_module("torch._inductor")
torch._inductor.config.x
def later(): import torch._inductor
"""
    assert {line for _, line in offences(text, ("torch._inductor",))} == {2, 3, 4, 5, 6, 7}
    assert not offences("import torch\nfrom . import _inductor\ntorch.inductor", ("torch._inductor",))


@pytest.mark.parametrize("forbidden", ["torch._inductor", *LINKED])
def test_no_module_imports_a_forbidden_package(forbidden: str) -> None:
    assert len(SOURCES) > 10
    found = {
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in SOURCES
        for name, line in imported(ast.parse(path.read_text()))
        if name == forbidden or name.startswith(forbidden + ".")
    }
    assert not found


def test_each_module_is_loaded_once() -> None:
    """Import all our modules in a new process that also has the repository's root on its path."""
    program = """
import pathlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import overlapc
names = [each.name for each in pkgutil.walk_packages(overlapc.__path__, "overlapc.") if "__main__" not in each.name]
for name in names:
    __import__(name)
assert len(names) > 10, names
bare = [name for name in sys.modules if name.split(".")[0] in ("passes", "estimators", "launch")]
assert not bare, bare
files = {}
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "overlapc":
        files.setdefault(pathlib.Path(module.__file__).resolve(), []).append(name)
twice = {path: names for path, names in files.items() if len(names) > 1}
assert not twice, twice
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_package_is_imported_twice_in_this_process() -> None:
    bare = sorted(name for name in sys.modules if name.split(".")[0] in LINKED)
    assert not bare


def test_the_guard_catches_inductor() -> None:
    torch._dynamo.reset()
    with no_inductor(), pytest.raises(InductorUsed, match="compile_fx"):
        torch.compile(lambda x: x + 1, backend="inductor")(torch.ones(3))
    torch._dynamo.reset()


@pytest.mark.parametrize(("module", "owner", "name"), ENTRANCES)
def test_every_entry_point_of_inductor_raises(module: str, owner: str | None, name: str) -> None:
    with no_inductor():
        holder = sys.modules[module] if owner is None else getattr(sys.modules[module], owner)
        with pytest.raises(InductorUsed, match=name):
            getattr(holder, name)()
    holder = sys.modules[module] if owner is None else getattr(sys.modules[module], owner)
    assert getattr(holder, name).__name__ != "refuse"
