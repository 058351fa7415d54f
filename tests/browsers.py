"""Pages in a real browser, and what goes wrong in them. Pictures of them are kept in out/report.

What a click or a key does may come a moment later: `says`, `shows` and `hides` wait for it, up to two minutes.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "no Chromium or Chrome on the PATH (on Debian: apt-get install chromium)"
KEPT = Path(__file__).resolve().parents[1] / "out" / "report"
PATIENCE = 120_000  # milliseconds, where tests share the cores
SETTLED = """() => {
  const { x, y, width, height } = document.querySelector("#plot canvas").getBoundingClientRect();
  const before = window.placeOfThePlot;
  window.placeOfThePlot = [x, y, width, height].join();
  return height > 0 && window.placeOfThePlot === before;
}"""  # asked at every frame: no layout or scrolling is under way
MARGIN = {"left": 66, "right": 12, "top": 12, "bottom": 40}  # of the picture, as in scatter.js
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


@dataclass
class Visit:
    """A page that was opened, and everything that went wrong in it or left it."""

    page: Any
    wrong: list[str] = field(default_factory=list)

    def keep(self, name: str, **options: Any) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=KEPT / f"{name}.png", **options)

    def text(self, selector: str) -> str:
        found: str = self.page.locator(selector).inner_text()
        return found

    def says(self, selector: str, wanted: str | re.Pattern[str]) -> str:
        """Wait until an element says just this, or something that the pattern is found in; all that it says then."""
        from playwright.sync_api import expect  # not on every machine that runs tests

        expect(self.page.locator(selector).first).to_have_text(wanted, use_inner_text=True, timeout=PATIENCE)
        return self.text(f"{selector} >> nth=0")

    def names(self, selector: str, wanted: str) -> str:
        """Wait until an element says this among other things; all that it says then."""
        return self.says(selector, re.compile(re.escape(wanted)))

    def shows(self, selector: str) -> None:
        """Wait until an element is there to be seen."""
        self.page.locator(selector).first.wait_for(state="visible")

    def hides(self, selector: str) -> None:
        """Wait until an element is not, or no longer, there to be seen."""
        self.page.locator(selector).first.wait_for(state="hidden")

    def until(self, condition: str, given: Any = None) -> None:
        """Wait until a function of JavaScript says so."""
        self.page.wait_for_function(condition, arg=given)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where two numbers between 0 and 1 are drawn, when all is shown."""
        self.until(SETTLED)
        box = self.page.locator("#plot canvas").bounding_box()
        w, h = (box[size] - sum(MARGIN[side] for side in sides) for size, sides in SIDES.items())
        place = [(value + 0.02) / 1.04 for value in (x, y)]
        return box["x"] + MARGIN["left"] + place[0] * w, box["y"] + MARGIN["top"] + (1 - place[1]) * h


SIDES = {"width": ("left", "right"), "height": ("top", "bottom")}


def visit(browser: Any, path: Path, viewport: dict[str, int] = DESKTOP, **options: Any) -> Visit:
    for earlier in browser.contexts:  # pages of earlier tests take memory
        earlier.close()
    context = browser.new_context(viewport=viewport, **options)
    found = Visit(context.new_page())
    found.page.set_default_timeout(PATIENCE)
    found.page.on("console", lambda message: found.wrong.append(f"console: {message.text}"))
    found.page.on("pageerror", lambda error: found.wrong.append(f"error: {error}"))
    found.page.on("dialog", lambda dialog: (found.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    found.page.on("request", lambda request: note_request(found, request.url))
    found.page.goto(path.as_uri())
    return found


def note_request(found: Visit, url: str) -> None:
    if not url.startswith(("data:", "file:")) or (url.startswith("file:") and not url.split("#")[0].endswith(".html")):
        found.wrong.append(f"request: {url}")
