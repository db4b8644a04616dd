"""README.md and docs/OPTIONS.md agree with the code: options, commands, figures, the sample report, links."""

from __future__ import annotations

import re

import typer

from overlapc.config import Config
from overlapc.launch.cli import app, main
from overlapc.launch.commands.machine import option_rows
from tests import ROOT

README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs" / "OPTIONS.md").read_text()


def test_the_options_table_is_the_configuration():
    """If this fails: `overlapc options --markdown` prints the rows to paste."""
    rows = dict(re.findall(r"^\| `(\w+)` (\| `OVERLAPC_\w+` \| .* \|)$", OPTIONS, re.MULTILINE))
    assert list(rows) == [name for name, *_ in option_rows()]
    for name, variable, default, meaning in option_rows():
        shown = "~/.cache/overlapc" if name == "cache_dir" else default  # the default depends on the home folder
        assert rows[name] == f"| `{variable}` | {shown} | {meaning} |"


def test_the_options_that_readme_sets_exist_and_accept_these_values():
    shown = re.findall(r"`([a-z_]+)=([\w.]+)`", README[README.index("The most used options") :])
    ours = [each for each in shown if each[0] not in ("check_nan", "reshard_after_forward", "profile")]
    assert len(ours) >= 8
    for name, value in ours:
        assert getattr(Config.of({name: value}), name) != getattr(Config(), name)


def test_the_figures_that_readme_gives_are_those_of_the_benchmarks():
    measured = (ROOT / "docs" / "BENCHMARKS.md").read_text()
    figures = re.findall(r"\b(\d+\.\d+) (?:ms|GiB|times)\b", README[: README.index("## Quick start")])
    assert len(figures) > 6
    assert not [figure for figure in figures if not re.search(rf"\b{re.escape(figure)}\b", measured)]


def test_the_report_in_readme_is_what_the_command_prints(tmp_path, capsys, monkeypatch):
    """A line may end with `...`, and lines that begin with *try* are left out. When the passes find a better order,
    paste what this test prints."""
    shown = re.findall(r"```\n(rank 0 of .*?)\n```", README, re.DOTALL)
    graphs = (ROOT / "tests" / "schedules" / f"llama_8b_fsdp4.{which}.sched" for which in ("forward", "backward"))
    monkeypatch.delenv("OVERLAPC_SEARCH_EFFORT")  # set to a small value by tests/conftest.py
    schedules = tmp_path / "schedule.txt"
    schedules.write_text("".join(graph.read_text() for graph in graphs))
    assert main(["plan", str(schedules), "--profile", "h200-nvlink"]) == 0
    head = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    printed = [line for line in head if not line.strip().startswith("try: ")]
    expected = shown[0].splitlines()
    assert len(expected) == len(printed), "\n".join(printed)
    for line, whole in zip(expected, printed, strict=True):
        assert whole.startswith(line.removesuffix("...")) if line.endswith("...") else whole == line, "\n".join(printed)


def test_every_command_is_shown_and_every_shown_command_exists():
    shown = set(re.findall(r"^overlapc (\w+)", README, re.MULTILINE))
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert shown == known - {"version"}


def test_ci_runs_the_test_command_of_the_readme():
    assert re.search(r"^make test\b", README, re.MULTILINE)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"


def test_every_example_is_listed():
    shown = re.findall(r"\(examples/(\w+)\.py\)", README)
    assert sorted(shown) == sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "common")


def test_links_lead_to_existing_files_and_sections():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        path, _, section = target.partition("#")
        page = ROOT / (path or "README.md")
        assert page.exists(), target
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE) if section else []
        assert not section or section in [heading.lower().replace(" ", "-") for heading in headings], target


GROUP = typer.main.get_command(app)
COMMAND = re.compile(rf"\boverlapc ((?:{'|'.join(GROUP.commands)})\b[^`\n]*)")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(pattern: str) -> list[tuple[str, list[str]]]:
    """Return (page, words) of every `overlapc ...` in the pages; text after two spaces is an explanation, not words."""
    return [
        (page.name, COMMAND.search(text)[1].split("  ")[0].split())
        for page in PAGES
        for text in re.findall(pattern, page.read_text(), re.MULTILINE)
        if COMMAND.search(text)
    ]


def test_the_command_options_that_pages_show_exist():
    shown = commands(r"`[^`\n]+`")
    assert len(shown) > 30
    for page, (name, *words) in shown:
        known = {option for parameter in GROUP.commands[name].params for option in parameter.opts}
        script = (
            next((at for at, word in enumerate(words) if word.endswith(".py")), len(words)) if name == "run" else None
        )
        own = words[:script] if script is not None else " ".join(words).split(" -- ")[0].split()
        assert {word for word in own if word.startswith("-")} <= known, f"{page}: overlapc {name} {' '.join(words)}"


def test_the_commands_in_code_blocks_parse():
    shown = commands(r"^overlapc .+$")
    assert len(shown) > 10
    for _, (name, *words) in shown:
        GROUP.commands[name].make_context(name, words)  # raises UsageError for unknown arguments


def test_the_benchmark_options_that_pages_show_exist():
    shown = [
        (page.name, *found)
        for page in PAGES
        for found in re.findall(r"(benchmarks/\w+\.(?:py|sh))((?: [^`|\n]+)?)", page.read_text())
    ]
    assert len(shown) > 30
    for page, path, words in shown:
        known = (ROOT / path).read_text()
        for option in re.findall(r"(?:^| )(--[a-z-]+)", words):
            assert re.search(rf"\"{option}\"", known), f"{page}: {path} {option}"
