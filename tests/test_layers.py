"""Each folder imports only the folders that its row in the table of docs/ARCHITECTURE.md allows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT

PAGE = ROOT / "docs" / "ARCHITECTURE.md"
EVERYBODYS = {"errors", "units", "gc_paused", "stack_room", "when_imported", "documents", "graph_names"}


def allowed() -> dict[str, set[str]]:
    """Map each folder to the folders (and `config`) that its row allows it to import."""
    rows = re.findall(
        r"^\| `(?:overlapc/)?(\w+)/` \|[^|]*\| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    folders = {folder for folder, _ in rows}
    return {
        folder: set(re.findall(r"\w+", re.sub(r"\([^)]*\)", "", may))) & (folders | {"config"}) for folder, may in rows
    }


def imported(path: Path) -> Iterator[str]:
    """Yield the folder, or the top-level module, of every module of ours that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "overlapc":
            parts = node.module.split(".")[1:2]
            yield from parts or (alias.name for alias in node.names)


def test_every_folder_imports_only_what_the_page_allows() -> None:
    layers = allowed()
    inner = layers.keys() - {"launch", "tools"}  # launch may import everything
    assert {path.name for path in (ROOT / "overlapc").iterdir() if path.is_dir()} >= inner > {"ir", "codegen", "passes"}
    found = {
        f"{path.relative_to(ROOT)} imports overlapc.{name}"
        for folder in inner
        for path in (ROOT / "overlapc" / folder).resolve().rglob("*.py")
        for name in imported(path)
        if name not in layers[folder] | EVERYBODYS | {folder}
    }
    assert not found, "\n".join(sorted(found))
    missing = {path.name for path in (ROOT / "overlapc").iterdir() if (path / "__init__.py").exists()} - layers.keys()
    assert not missing, f"{sorted(missing)}: no row in {PAGE.name}"


def test_the_imports_that_the_page_allows_have_no_cycles() -> None:
    layers = {folder: may - {"config"} for folder, may in allowed().items()}
    while layers:
        lowest = {folder for folder, may in layers.items() if not may & layers.keys()}
        assert lowest, f"the page allows an import cycle among {sorted(layers)}"
        layers = {folder: may for folder, may in layers.items() if folder not in lowest}


def modules() -> dict[str, set[str]]:
    """Map each module to the modules of ours that it imports, at any level, except under TYPE_CHECKING."""
    folder = ROOT / "overlapc"
    paths = {
        ".".join(("overlapc", *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
        for top in (folder, *(each for each in folder.iterdir() if each.is_dir()))
        for path in (top.glob("*.py") if top == folder else top.rglob("*.py"))
    }
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        names = found[name] = set()
        for node in _needed_when_run(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in paths:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inner & paths.keys() or {node.module}
    return found


def _needed_when_run(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            yield from _needed_when_run(node)


def test_only_classes_and_their_printers_import_each_other() -> None:
    imports = modules()
    assert len(imports) > 200

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        pending = [*imports[start]]
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                pending += imports[name]
        return seen

    reach = {name: reached(name) for name in imports}
    circles = {name for name in imports if name in reach[name]}
    printed = {f"overlapc.{each}" for each in ("ir.body", "ir.printer", "schedule.model", "schedule.printer")}
    assert circles == printed | {"overlapc.schedule.syntax"}  # syntax shared by a schedule's printer and parser
