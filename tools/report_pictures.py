"""Pictures for docs/report.md: the report of `whence demo`, and on a phone that of a table.

    whence demo --out demo.html
    whence table diabetes.csv --target progression --out table.html
    python tools/report_pictures.py demo.html table.html

Needs playwright, Pillow, and Chromium on the PATH.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
WIDE, PHONE = {"width": 1180, "height": 1050}, {"width": 360, "height": 740}
GAP = 18  # pixels between the views on a phone


def answer(browser: Any, report: Path) -> None:
    """The top of a report."""
    page = browser.new_page(viewport=WIDE)
    page.goto(report.resolve().as_uri())
    page.screenshot(path=FIGURES / "report-answer.png")


def map_of(browser: Any, report: Path) -> None:
    """The map, with what is behind one prediction."""
    page = browser.new_page(viewport=WIDE)
    page.goto(report.resolve().as_uri())
    page.evaluate("document.querySelector('nav').style.position = 'static'")
    page.locator("#map").screenshot(path=FIGURES / "report-map.png")


def phone(browser: Any, report: Path) -> None:
    """Three views on a phone, in dark colours, side by side."""
    from PIL import Image  # only here

    page = browser.new_page(viewport=PHONE, color_scheme="dark", device_scale_factor=1)
    page.goto(report.resolve().as_uri())
    views = []
    for selector in ("header", "#actions", "#mapgrid"):
        page.locator(selector).evaluate("one => window.scrollTo(0, one.getBoundingClientRect().top + window.scrollY)")
        views.append(Image.open(io.BytesIO(page.screenshot())))
    width, height = PHONE["width"], PHONE["height"]
    joined = Image.new("RGB", (3 * width + 2 * GAP, height), "white")
    for place, view in enumerate(views):
        joined.paste(view, (place * (width + GAP), 0))
    joined.save(FIGURES / "report-phone.png")


def main() -> None:
    """Take all three."""
    from playwright.sync_api import sync_playwright  # not on every machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="report of `whence demo`")
    parser.add_argument("table", type=Path, help="report of `whence table`")
    given = parser.parse_args()
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        answer(browser, given.demo)
        map_of(browser, given.demo)
        phone(browser, given.table)
        browser.close()


if __name__ == "__main__":
    main()
