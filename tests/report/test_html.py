"""The page is one file, well formed, and shows every collective, wait and reason."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from overlapc.report import html
from overlapc.report.model import Plan, Span, StepRecord
from tests.report.sample import AFTER, BEFORE, FORWARD, REPORT

_VOID = {"meta", "br", "link"}


class Page(HTMLParser):
    """Checks that tags close in order; keeps cells and everything that could reach the network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links += [given[name] for name in ("src", "href") if name in given]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_is_well_formed_and_reaches_nothing():
    page = Page(html.render(REPORT.steps))
    assert page.open == []
    assert page.links == []
    assert "http" not in html.render(REPORT.steps)


def test_every_collective_is_in_the_table_with_its_reason():
    cells = Page(html.render(REPORT.steps)).cells
    for row in FORWARD.collectives:
        assert f"{row.name} {row.op}" in cells
        assert row.limit in cells


def test_bars_start_and_end_where_the_plan_says():
    before, after = html.timelines(FORWARD)
    assert [name for name, _ in after.lanes] == ["compute", "@dp"]
    scale = (html._WIDTH - html._LEFT) / BEFORE.step_ns  # both on the scale of the longer one
    drawn = [(bar.kind, round((bar.x - html._LEFT) / scale), round(bar.width / scale)) for bar in after.bars]
    compute = [span for span in AFTER.spans if span.lane == "compute"]
    assert sorted(drawn[: len(compute)]) == sorted(
        (span.kind, round(span.start_ns), round(span.end_ns - span.start_ns)) for span in compute
    )
    assert max(bar.x + bar.width for bar in before.bars) <= html._WIDTH + 0.01


def test_text_of_the_schedule_is_escaped():
    assert "[table &lt;x&gt;]" in html.render(REPORT.steps)


def test_a_graph_of_twenty_thousand_nodes_stays_a_small_page():
    spans = tuple(Span(f"k{at}", "compute", at * 10.0, at * 10.0 + 9.0, "kernel") for at in range(20_000))
    graph = replace(FORWARD, after=Plan(200_000.0, spans), memory=tuple((at * 10.0, at) for at in range(20_000)))
    page = html.render((StepRecord(0, 1, (graph,)),))
    assert len(page) < 500_000
    bars = html.timelines(graph)[1].bars
    assert 100 < len(bars) < 3000
    assert "nodes, k0 to k" in bars[0].title


def test_thinned_memory_keeps_its_peak():
    memory = tuple((float(at), 5) for at in range(10_000))
    spike = (*memory[:777], (777.0, 9), *memory[778:])
    assert (777.0, 9) in list(html._thinned(spike))
