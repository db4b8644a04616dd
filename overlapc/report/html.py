"""The report as one self-contained HTML page: the step time and its causes, an interactive timeline, tables.

The file contains everything: the data as JSON, the script page.js, and uPlot (vendor/), with which the script draws.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jinja2

from overlapc.report import compare, text
from overlapc.report.ledger import Ledger, bars, tiles
from overlapc.report.model import GraphRecord, StepRecord
from overlapc.report.page_data import page_data

_HERE = Path(__file__).parent


def render(steps: Sequence[StepRecord]) -> str:
    """Return the page: a timeline of the steps of all ranks, figures and tables of the first."""
    return template("page.html.jinja").render(
        steps=steps,
        ledger_of=Ledger.of,
        tiles=tiles,
        bars=bars,
        headers=text.HEADERS,
        cells=text.collective_cells,
        sort_keys=_sort_keys,
        facts=text.facts,
        totals=text.totals_text,
        measured=compare.totals_text,
        compared=compare.graph_text,
        ms=text.ms,
        data=embedded(page_data(steps)),
        **drawing_parts("page.js"),
    )


def drawing_parts(script: str) -> dict[str, str]:
    """Return what a template embeds for drawing, by name: uPlot, the styles, and the file `script` of this folder."""
    # The first line of uPlot is replaced: it has a web address, and a page must not name one. The license is added.
    source = (_HERE / "vendor" / "uPlot.iife.min.js").read_text().partition("\n")[2]
    return {
        "uplot": f"/* uPlot 1.6.32\n{(_HERE / 'vendor' / 'uPlot.LICENSE').read_text()}*/\n{source}",
        "uplot_css": (_HERE / "vendor" / "uPlot.min.css").read_text(),
        "script": (_HERE / script).read_text(),
        "style": (_HERE / "page.css").read_text(),
    }


def embedded(data: object) -> str:
    """Return `data` as JSON that is safe inside a script element, whatever characters names contain."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _sort_keys(graph: GraphRecord) -> list[list[float | str]]:
    """Return the sort key of each cell of each collective's row: a number if the cell shows one."""
    return [
        [
            row.name, row.origin, row.group, row.via, row.bytes, row.estimate_ns or 0.0, row.source,
            row.hidden_after_ns, row.exposed_after_ns, row.moves, row.limit,
        ]
        for row in graph.collectives
    ]  # fmt: skip


@cache
def template(name: str) -> jinja2.Template:
    """Load a Jinja template of this folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(name)
