"""Files, definitions and variables that docs/ and README.md name exist, and COVERAGE.md has a row for every system."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlapc.config import describe

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("overlapc", "passes", "estimators", "launch", "benchmarks", "tests", "docs")
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
SYSTEMS = [*(f"S{number}" for number in range(1, 37)), *(f"B{number}" for number in range(1, 14))]
_PATH = re.compile(r"(?:[\w*.-]+/)*[\w*-]+\.(?:py|md|sh|c|h|json|toml|jinja)|(?:[\w-]+/)+")
_MADE_BY_RUNS = {"record.json", "examples/NAME.py"}
_OWNED = re.compile(r"(?:(?!(?:tests|torch)\b)\w+\.)*(\w+)\.(?!txt\b|py\b)(\w+)")  # module.function, Class.method


def quoted(page: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text in backticks or target of a link) of a page, except in code blocks."""
    in_block = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        in_block ^= line.startswith("```")
        if not in_block:
            yield from ((number, text) for text in re.findall(r"`([^`]+)`", line) + re.findall(r"\]\(([^)]+)\)", line))


def exists(path: str) -> bool:
    """Whether `path` exists below the repository's root or the package; a bare name anywhere in our folders counts."""
    if "/" in path:
        return any(any(home.glob(path)) for home in (ROOT, ROOT / "overlapc"))
    return any(ROOT.glob(path)) or any(any((ROOT / folder).rglob(path)) for folder in FOLDERS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    named = {
        (line, path)
        for line, text in quoted(page)
        for path in (word.split("#")[0] for word in text.split())
        if path not in _MADE_BY_RUNS and _PATH.fullmatch(path)
    }
    assert named
    missing = [f"{page.name}:{line}: {path}" for line, path in sorted(named) if not exists(path)]
    assert not missing, "\n".join(missing)


def owners() -> dict[str, str]:
    """Map each module, package or class of ours to the text of the files that are or define it."""
    found = defaultdict(str, overlapc=" ".join(FOLDERS))
    for folder in FOLDERS[:4]:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for name in (path.parent.name if path.stem == "__init__" else path.stem, *re.findall(r"class (\w+)", text)):
                found[name] += text
    return found


def test_the_definitions_that_a_page_names_exist() -> None:
    known = owners()
    missing = [
        f"{page.name}:{line}: {text}"
        for page in PAGES
        if page.name != "README.md"  # where `model` is the user's
        for line, text in quoted(page)
        if (found := _OWNED.fullmatch(text)) and found[1] in known
        if not re.search(rf"\b{found[2]}\b", known[found[1]])
    ]
    assert not missing, "\n".join(missing)


def test_the_variables_that_a_page_names_are_read() -> None:
    known = {variable for _, variable, _, _ in describe()} | {"OVERLAPC_TEST_SEED"}
    named = {(page.name, name) for page in PAGES for name in re.findall(r"OVERLAPC_[A-Z_]*[A-Z]", page.read_text())}
    assert len(named) > len(known)
    assert not [each for each in sorted(named) if each[1] not in known]


def test_every_system_has_a_row_and_those_that_work_name_their_tests() -> None:
    page = (ROOT / "docs" / "COVERAGE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([SB]\d+) \| ([^|]+) \| ([^|]+) \| (.*) \| ([^|]*) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == SYSTEMS
    for system, _, status, what, shown_by in rows:
        assert status in ("works", "partly", "not yet"), system
        assert (status == "not yet") == (not what.strip()) == ("`tests/" not in shown_by), system
