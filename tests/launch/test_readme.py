"""README.md says what is so."""

from __future__ import annotations

import re

from overlapc.launch.cli import app, option_rows
from tests import ROOT

README = (ROOT / "README.md").read_text()


def test_the_options_table_is_the_configuration():
    """`overlapc options --markdown` prints the rows to paste."""
    rows = dict(re.findall(r"^\| `(\w+)` (\| `OVERLAPC_\w+` \| .* \|)$", README, re.MULTILINE))
    assert list(rows) == [name for name, *_ in option_rows()]
    for name, variable, default, meaning in option_rows():
        shown = "~/.cache/overlapc" if name == "cache_dir" else default  # which differs between machines
        assert rows[name] == f"| `{variable}` | {shown} | {meaning} |"


def test_every_command_is_shown_and_every_shown_command_exists():
    shown = set(re.findall(r"^overlapc (\w+)", README, re.MULTILINE))
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert shown == known - {"version"}


def test_ci_runs_the_test_command_of_the_readme():
    assert re.search(r"^make test\b", README, re.MULTILINE)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"


def test_every_example_is_listed():
    shown = re.findall(r"\(examples/(\w+)\.py\)", README)
    assert sorted(shown) == sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "common")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
