"""The HTML report in Chromium: figures, zoom, clicks on bars and rows, sorting, filtering, phones, and many layers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlapc.report import plans
from overlapc.report.model import GraphRecord, Plan, Span, StepRecord
from overlapc.report.record import Report
from tests.report.sample import FORWARD, REPORT
from tests.report.test_plans import AXES, FOUND

CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; CHROMIUM=FILE names one")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        # A container may have neither a sandbox nor shared memory. The browser opens only our own files.
        found = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Return a function that opens a report's page; errors in its script and network requests fail the test."""
    wrong: list[str] = []
    pages = []

    def open_page(report: Report, width: int = 1280, dark: bool = False) -> Any:
        page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", service_workers="block"
        )
        pages.append(page)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or wrong.append(request.url))
        page.goto(f"file://{report.save(tmp_path / 'report.html')}")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not wrong


def bar(page: Any, share: float, y: float) -> tuple[float, float]:
    box = page.locator("#timeline .u-over").bounding_box()
    return box["x"] + box["width"] * share, box["y"] + y


def shown_ms(page: Any) -> list[float]:
    """Return the ends of the time axis, as reported by uPlot."""
    return page.evaluate("overlapcTimeline.range()")


OPENED_MS, SMOOTH_MS = 2000, 50  # limits for opening and redrawing a large page on an idle machine
# Rank 0's step takes 0.56 ms after the passes and 0.72 ms before. Heights in pixels: the heading of a band 18, a lane
# 22, the gap between bands 6.
COMPUTE, QUEUE = 18 + 22 / 2, 18 + 22 + 22 / 2
AFTER_QUEUE = 18 + 2 * 22 + 6 + QUEUE


def test_a_click_on_a_bar_shows_its_node_and_its_row_and_a_row_leads_to_the_bar(opened):
    page = opened(REPORT)
    page.mouse.click(*bar(page, 150 / 720, AFTER_QUEUE))  # ag1 is in flight from 100 to 200 us
    panel = page.locator("#node").inner_text()
    assert panel.startswith("ag1 in forward")
    assert "100.0 µs, from 100.0 µs on @dp" in panel
    assert "peak memory" in panel
    assert "mm0" in panel.split("runs beside")[1]
    assert page.locator("#collectives tr.chosen").get_attribute("data-node") == "forward/ag1"
    before = shown_ms(page)
    page.locator("#collectives tbody tr").nth(0).click()
    assert page.locator("#node").inner_text().startswith("ag0 in forward")
    low, high = shown_ms(page)
    assert low <= 0.0 < 0.1 <= high < before[1]


def test_dragging_and_the_wheel_zoom_and_a_double_click_shows_the_whole_step(opened):
    page = opened(REPORT)
    whole = shown_ms(page)
    assert whole == pytest.approx([0.0, 0.72])
    x, y = bar(page, 0.25, COMPUTE)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(bar(page, 0.5, COMPUTE)[0], y, steps=4)
    page.mouse.up()
    assert shown_ms(page) == pytest.approx([0.18, 0.36], abs=0.01)
    page.mouse.wheel(0, -100)
    low, high = shown_ms(page)
    assert high - low == pytest.approx(0.18 * 0.8, abs=0.02)
    page.mouse.dblclick(x, y)
    assert shown_ms(page) == pytest.approx(whole)


def test_memory_is_drawn_before_and_after_and_beside_the_budget(opened):
    page = opened(REPORT)
    assert page.evaluate("overlapcTimeline.memory()") == [3 * 2**20, 2 * 2**20, 4 * 2**20]
    page.locator("#order-before").uncheck()
    assert page.evaluate("overlapcTimeline.memory()") == [3 * 2**20, 4 * 2**20]


def test_several_plans_are_a_plot_with_axes_and_units(browser, tmp_path):
    path = tmp_path / "plans.html"
    path.write_text(plans.page(AXES, FOUND, "assumed"))
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"file://{path}")
    assert page.evaluate("overlapcPlans.axes()") == ["GPUs", "tokens/s a GPU"]
    assert page.evaluate("overlapcPlans.data()[0]") == [8, 64]
    assert page.locator("#lines span").all_inner_texts() == ["no budget", "budget 70GiB"]
    page.locator("#measure").select_option(label="step, ms")
    assert page.evaluate("overlapcPlans.axes()") == ["GPUs", "step, ms"]
    assert page.evaluate("overlapcPlans.data().slice(1)") == [[1, 2], [None, 2.5]]
    box = page.locator("#plot .u-over").bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + 100)
    assert page.locator("#point").inner_text().split("\n") == [
        "8 GPUs: step, ms", "no budget", "1", "budget 70GiB", "does not fit",
    ]  # fmt: skip
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()
    assert not wrong


def test_tables_sort_and_filter(opened):
    page = opened(REPORT)
    rows = page.locator("#collectives tbody tr")
    exposed = page.locator("#collectives th", has_text="exposed")
    exposed.click()
    names = [rows.nth(at).get_attribute("data-node") for at in range(rows.count())]
    assert names == ["forward/ag1", "forward/ag0"]  # exposed for 20 us and for 100 us
    exposed.click()
    assert rows.nth(0).get_attribute("data-node") == "forward/ag0"
    page.locator("#filter").fill("layers.1 memory")
    assert [rows.nth(at).is_visible() for at in range(2)] == [False, True]
    assert page.locator("#count").inner_text() == "1 of 2"


@pytest.mark.parametrize("dark", [False, True])
def test_a_page_on_a_phone_does_not_scroll_sideways(opened, dark):
    page = opened(REPORT, width=390, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator(".tile").count() >= 3
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 24, 29)" if dark else "rgb(251, 251, 250)")


def test_fingers_move_and_zoom_the_timeline_of_a_phone(opened):
    page = opened(REPORT, width=390)
    touch = page.context.new_cdp_session(page)
    page.locator("#timeline").scroll_into_view_if_needed()

    def swipe(begin: tuple[float, ...], end: tuple[float, ...]) -> None:
        y = bar(page, 0.5, COMPUTE)[1]
        for kind, shares in (("touchStart", begin), ("touchMove", end), ("touchEnd", ())):
            points = [{"x": bar(page, share, 0)[0], "y": y} for share in shares]
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    swipe((0.4, 0.6), (0.2, 0.8))  # three times as far apart
    low, high = shown_ms(page)
    assert high - low == pytest.approx(0.72 / 3, rel=0.1)
    swipe((0.5,), (0.25,))
    assert shown_ms(page)[0] == pytest.approx(low + (high - low) / 4, abs=0.02)


def large(layers: int, rank: int) -> StepRecord:
    """Return a step of `layers` layers with 60 nodes each, which differs from the steps of other ranks."""
    spans, rows, at_ns = [], [], 0.0
    for layer in range(layers):
        spans.append(Span(f"ag{layer}", "@dp", at_ns, at_ns + 400e3, "start"))
        rows.append(replace(FORWARD.collectives[0], name=f"ag{layer}", origin=f"layers.{layer}"))
        for node in range(60):
            spans.append(Span(f"k{layer}_{node}", "compute", at_ns, at_ns + 8e3 + rank, "kernel"))
            at_ns += 10e3
    plan = Plan(at_ns, tuple(spans))
    graph: GraphRecord = replace(FORWARD, before=plan, after=plan, collectives=tuple(rows), lower_bound_ns=at_ns)
    return StepRecord(rank, 8, (graph,))


def test_eighty_layers_on_eight_ranks_open_and_redraw_quickly(opened):
    page = opened(Report(tuple(large(80, rank) for rank in range(8))))
    loaded = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    times_ms = [page.evaluate(loaded)]
    while min(times_ms) > OPENED_MS and len(times_ms) < 4:  # try again, as the machine may be busy
        page.reload()
        times_ms.append(page.evaluate(loaded))
    assert min(times_ms) < OPENED_MS
    page.locator("#all-ranks").check()
    drawn = page.evaluate("overlapcTimeline.drawn()")  # what was painted, and in how many ms
    assert drawn["bands"] == 8 * 2 * (1 + 2)
    assert 1000 < drawn["spans"] < 200_000
    times_ms = []
    for _ in range(5):
        page.locator("#whole").click()
        page.wait_for_timeout(50)
        times_ms.append(page.evaluate("overlapcTimeline.drawn().ms"))
    assert min(times_ms) < SMOOTH_MS
    x, y = bar(page, 0.5, COMPUTE)
    page.mouse.move(x, y)
    for _ in range(8):
        page.mouse.wheel(0, -300)
    assert page.evaluate("overlapcTimeline.drawn()")["spans"] < drawn["spans"]
    page.mouse.click(x, y)
    assert " in forward" in page.locator("#node").inner_text()
