"""Makes the pictures of README.md and docs/REPORT.md from the record of a measured run. Needs Chromium and playwright.

python tools/report_pictures.py runs/DATE/record.json [--chromium FILE] [--out docs/images]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from overlapc.report import record

_WIDTH = 1200


def main() -> None:
    """Write report-first.png and report-timeline.png."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        path = record.load(args.record).save(Path(folder) / "report.html")
        browser = play.chromium.launch(executable_path=args.chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": 900})
        page.goto(f"file://{path}")
        picture(page, args.out / "report-first.png", "h1", "#timeline")
        plot = page.locator("#timeline .u-over")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box is not None
        begin, end, y = box["x"] + 0.40 * box["width"], box["x"] + 0.55 * box["width"], box["y"] + 30
        page.mouse.move(begin, y)  # a part of backward
        page.mouse.down()
        page.mouse.move(end, y, steps=4)
        page.mouse.up()
        click_a_collective(page)
        picture(page, args.out / "report-timeline.png", ".controls", "#peak")
        browser.close()


def click_a_collective(page: Page) -> None:
    """Click on a collective that is in flight in the middle of the order after the passes, if there is one."""
    plot = page.locator("#timeline .u-over")
    box = plot.bounding_box()
    assert box is not None
    for share in (0.5, 0.45, 0.55, 0.4, 0.6):
        for y in range(8, int(box["height"]), 4):
            page.mouse.click(box["x"] + share * box["width"], box["y"] + y)
            shown = page.locator("#node").inner_text() if page.locator("#node").is_visible() else ""
            if "after the passes" in shown and "on @" in shown:
                return


def picture(page: Page, target: Path, first: str, last: str) -> None:
    """Save a picture of the page from the top of element `first` to the bottom of element `last`."""
    page.mouse.move(0, 0)
    page.evaluate("scrollTo(0, 0)")
    top, bottom = page.locator(first).first.bounding_box(), page.locator(last).bounding_box()
    assert top is not None
    assert bottom is not None
    begin, end = max(0.0, top["y"] - 6), bottom["y"] + bottom["height"] + 16
    page.screenshot(path=target, full_page=True, clip={"x": 0, "y": begin, "width": _WIDTH, "height": end - begin})
    print(f"written to {target}")


if __name__ == "__main__":
    main()
