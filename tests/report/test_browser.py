"""The report in a real browser: points are clicked, filters used, keys pressed; nothing is asked for from outside.

Needs Playwright and a Chromium on this machine. Pictures of the pages are kept in out/report.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from report_examples import EVIL, Example, draw, fitted, pictures, rows, texts

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[dev]'")

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(PATH is None, reason="needs a Chromium or Chrome on the PATH (Debian: chromium)")

KEPT = Path(__file__).resolve().parents[2] / "out" / "report"
MARGIN = {"left": 58, "right": 12, "top": 12, "bottom": 40}  # of the picture, as in scatter.js
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(
            executable_path=PATH, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield started
        started.close()


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

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where two ranks between 0 and 1 are drawn, when all is shown."""
        box = self.page.locator("#plot canvas").bounding_box()
        w, h = (box[size] - sum(MARGIN[side] for side in sides) for size, sides in SIDES.items())
        place = [(value + 0.02) / 1.04 for value in (x, y)]
        return box["x"] + MARGIN["left"] + place[0] * w, box["y"] + MARGIN["top"] + (1 - place[1]) * h


SIDES = {"width": ("left", "right"), "height": ("top", "bottom")}


def visit(browser: Any, path: Path, viewport: dict[str, int] = DESKTOP, **options: Any) -> Visit:
    context = browser.new_context(viewport=viewport, **options)
    found = Visit(context.new_page())
    found.page.set_default_timeout(120_000)  # where tests share the cores
    found.page.on("console", lambda message: found.wrong.append(f"console: {message.text}"))
    found.page.on("pageerror", lambda error: found.wrong.append(f"error: {error}"))
    found.page.on("dialog", lambda dialog: (found.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    found.page.on("request", lambda request: note_request(found, request.url))
    found.page.goto(path.as_uri())
    return found


def note_request(found: Visit, url: str) -> None:
    if not url.startswith(("data:", "file:")) or (url.startswith("file:") and not url.split("#")[0].endswith(".html")):
        found.wrong.append(f"request: {url}")


def ranks(values: torch.Tensor) -> np.ndarray:
    order = np.argsort(values.float().numpy(), kind="stable")
    found = np.empty(len(order))
    found[order] = np.arange(len(order)) / (len(order) - 1)
    return found


@dataclass(frozen=True)
class Written:
    """An example and its report, with what the fit says of it."""

    example: Example
    path: Path
    verdicts: np.ndarray
    x: np.ndarray
    y: np.ndarray


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    example = pictures()
    path = example.write(tmp_path_factory.mktemp("report") / "report.html")
    u = example.tracer.predict(example.x)
    told = np.array(example.tracer.explain(example.x).verdicts)
    return Written(example, path, told, ranks(u.ho.sum(1)), ranks(u.hec3.sum(1)))


def test_a_click_shows_the_prediction_and_what_is_behind_it(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    seen.page.locator("#plot").scroll_into_view_if_needed()
    chosen = int(np.argmax((written.verdicts == "noisy labels nearby") * (written.y - written.x)))
    seen.page.mouse.click(*seen.at(written.x[chosen], written.y[chosen]))
    told = seen.text("#inspector")
    assert f"prediction {chosen}" in told
    assert "noisy labels nearby" in told
    assert re.search(r"belief\s+[\d.]+\s%", told)
    assert seen.page.locator("#inspector article > img").get_attribute("src").startswith("data:image/")
    behind = [int(one.replace(",", "")) for one in re.findall(r"training example ([\d,]+), ", told)]
    assert behind == written.example.tracer.explain(written.example.x[chosen : chosen + 1], top=6).check[0].tolist()
    seen.keep("map")
    assert seen.wrong == []


def test_filters_show_what_they_say(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    names = {1: "noisy labels nearby", 2: "scarce data", 3: "both", 0: "confident"}
    counts = {code: int((written.verdicts == name).sum()) for code, name in names.items()}
    assert seen.text("#count") == "150 of 150 shown"
    for code in (0, 2, 3):
        seen.page.locator(f'#filters input[value="{code}"]').uncheck()
    assert seen.text("#count") == f"{counts[1]} of 150 shown"
    seen.page.locator("#show-all").click()
    answers, truth = written.example.tracer.predict(written.example.x).mean.argmax(1), written.example.y
    seen.page.locator("#filters select[name=right]").select_option("0")
    wrong = int((answers != truth).sum())
    assert seen.text("#count") == f"{wrong} of 150 shown"
    assert wrong > 0
    seen.page.locator("#filters select[name=truth]").select_option("2")
    assert seen.text("#count") == f"{int(((answers != truth) & (truth == 2)).sum())} of 150 shown"
    seen.page.locator("#filters select[name=answer]").select_option("1")
    assert seen.text("#count") == f"{int(((answers == 1) & (truth == 2)).sum())} of 150 shown"
    seen.page.locator("#show-all").click()
    assert seen.text("#count") == "150 of 150 shown"
    assert seen.wrong == []


def test_dragging_selects_and_zooms(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    seen.page.locator("#plot").scroll_into_view_if_needed()
    seen.page.mouse.move(*seen.at(0.703, 1.0))
    seen.page.mouse.down()
    seen.page.mouse.move(*seen.at(0.9, 0.8))
    seen.page.mouse.move(*seen.at(1.01, 0.503))
    seen.page.mouse.up()
    inside = int(((written.x > 0.703) & (written.y > 0.503) & (written.y <= 1.0)).sum())
    count = int(seen.text("#count").split()[0])
    assert abs(count - inside) <= 2, "a pixel at the border of the box"
    seen.page.locator("#table-box summary").click()
    assert seen.text("#page-count").endswith(f"of {count}")
    before = seen.page.locator("#plot").screenshot()
    seen.page.locator("#zoom-selection").click()
    assert seen.page.locator("#plot").screenshot() != before
    seen.keep("selection")
    seen.page.locator("#zoom-reset").click()
    seen.page.locator("#clear-selection").click()
    assert seen.text("#count") == "150 of 150 shown"
    assert seen.wrong == []


def test_all_of_it_by_keyboard(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    plot, heading = seen.page.locator("#plot"), seen.page.locator("#inspector h3")
    plot.focus()
    first = int(re.sub(r"\D", "", heading.inner_text()))
    by_ho = np.argsort(written.x).tolist()
    plot.press("ArrowLeft")
    assert heading.inner_text() == f"prediction {by_ho[by_ho.index(first) - 1]}"
    plot.press("ArrowRight")
    assert heading.inner_text() == f"prediction {first}"
    by_hec3 = np.argsort(written.y).tolist()
    plot.press("ArrowDown")
    below = by_hec3[by_hec3.index(first) - 1]
    assert heading.inner_text() == f"prediction {below}"
    plot.press("+")
    plot.press("0")
    plot.press("Enter")
    window = seen.page.locator("#window")
    assert window.is_visible()
    assert f"prediction {below}" in window.inner_text()
    seen.page.keyboard.press("Escape")
    assert not window.is_visible()
    assert seen.page.evaluate("document.activeElement.id") == "plot", "focus comes back"
    assert seen.wrong == []


def test_the_table_sorts_and_turns_pages(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    seen.page.locator("#table-box summary").click()
    first = seen.page.locator("#points tbody tr").first
    assert first.locator("th").inner_text() == f"prediction {int(np.argmax(written.y))}"
    seen.page.locator("#points thead button", has_text=re.compile("^Ho$")).click()
    assert first.locator("th").inner_text() == f"prediction {int(np.argmax(written.x))}"
    seen.page.locator("#points thead button", has_text=re.compile("^Ho$")).click()
    assert first.locator("th").inner_text() == f"prediction {int(np.argmin(written.x))}"
    seen.page.locator("#page-next").click()
    assert seen.text("#page-count") == "26 to 50 of 150"
    seen.page.locator("#page-back").click()
    first.locator("button").click()
    assert f"prediction {int(np.argmin(written.x))}" in seen.text("#window")
    seen.page.locator("#window .close").click()
    assert seen.wrong == []


def test_gallery_and_actions_open_predictions(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    for selector in ("#gallery button.open", "#actions button.open"):
        button = seen.page.locator(selector).first
        number = button.get_attribute("data-prediction")
        button.click()
        assert f"prediction {number}" in seen.text("#window")
        seen.keep("window")
        seen.page.locator("#window .close").click()
    assert seen.wrong == []


MAKERS = {"pictures": lambda: pictures(m=60, n=60), "rows": rows, "texts": texts}


SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in ("rows", "texts")]


@pytest.fixture(scope="module", params=["pictures", *SLOWER])
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name = request.param
    return name, MAKERS[name]().write(tmp_path_factory.mktemp(name) / "report.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_barrier(browser: Any, form: tuple[str, Path], scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="needs axe: pip install -e '.[dev]'")
    name, path = form
    seen = visit(browser, path, color_scheme=scheme)
    for details in seen.page.locator("details").all():
        details.evaluate("element => { element.open = true; }")
    seen.keep(f"{name}-{scheme}", full_page=True)
    source = Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    seen.page.evaluate(source)
    assert barriers(seen) == []
    seen.page.locator("button.open").first.click()
    assert barriers(seen, "#window") == []
    assert seen.wrong == []


def barriers(seen: Visit, where: str = "html") -> list[str]:
    found = seen.page.evaluate("where => axe.run(where, {resultTypes: ['violations']})", where)
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found["violations"]]


def test_fits_a_phone_and_paper(browser: Any, form: tuple[str, Path]) -> None:
    name, path = form
    seen = visit(browser, path, PHONE, is_mobile=True, has_touch=True, device_scale_factor=2)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    seen.page.locator("#plot").scroll_into_view_if_needed()
    box = seen.page.locator("#plot canvas").bounding_box()
    seen.page.touchscreen.tap(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.45)
    assert seen.page.locator("#inspector h3").inner_text().startswith("prediction")
    seen.page.evaluate("scrollTo(0, 0)")
    seen.keep(f"{name}-phone")
    seen.page.emulate_media(media="print")
    assert not seen.page.locator("nav").is_visible()
    assert seen.page.locator("#actions").is_visible()
    assert len(seen.page.pdf()) > 20_000
    assert seen.wrong == []


def test_reads_without_scripts(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path, java_script_enabled=False)
    assert "predictions are uncertain" in seen.text("body")
    assert seen.page.locator("#actions li").count() >= 6
    assert seen.page.locator("#gallery img").first.is_visible()
    assert not seen.page.locator("#filters").is_visible()


def test_hostile_text_is_shown_and_never_runs(browser: Any, tmp_path: Path) -> None:
    example = texts(extra=EVIL)
    ids = [f"{number} {EVIL}" for number in range(len(example.x))]
    path = example.write(tmp_path / "evil.html", title=EVIL, about=[EVIL], ids=ids)
    seen = visit(browser, path)
    seen.page.locator("button.open").first.click()
    seen.page.locator("#window .close").click()
    seen.page.locator("#table-box summary").click()
    seen.page.locator("#plot").hover()
    assert seen.text("h1") == EVIL
    assert EVIL in seen.text("#inspector")
    assert EVIL in seen.text("#points")
    assert seen.page.evaluate("window.pwned === undefined")
    assert seen.wrong == []


@pytest.mark.slow
def test_ten_thousand_predictions_and_a_thousand_pictures(browser: Any, tmp_path: Path) -> None:
    """Opens in about a second on an idle core; five here, where tests share them."""
    x = draw(500, 24, seed=1)
    kind = (x[:, 0] + 0.7 * draw(500, seed=2) > 0).double().unsqueeze(1)
    tracer = fitted(nn.Linear(24, 1).double(), x, kind, "bernoulli")
    test = draw(10_000, 24, seed=3)

    def paint(inputs: torch.Tensor) -> torch.Tensor:
        small = inputs.reshape(-1, 3, 2, 4).sigmoid()
        noise = draw(1, 3, 64, 64, seed=4) * 0.08  # no two pixels alike, as in photographs
        return nn.functional.interpolate(small, size=(64, 64), mode="bilinear") + noise

    path = tracer.report(tmp_path / "large.html", (test, (test[:, :1] > 0).double()), images=paint, traced=700)
    html = path.read_text(encoding="utf-8")
    data = json.loads(html.split('<script type="application/json" id="data">')[1].split("</script>")[0])
    shown = len(data["test"]) + sum(example[4] is not None for example in data["train"].values())
    assert shown >= 1000
    assert len(base64.b64decode(data["arrays"]["ho"])) == 4 * 10_000
    assert path.stat().st_size < 5_000_000
    seen = visit(browser, path)
    seconds = seen.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000
    (KEPT / "large.json").parent.mkdir(parents=True, exist_ok=True)
    (KEPT / "large.json").write_text(json.dumps({"seconds": seconds, "bytes": path.stat().st_size, "shown": shown}))
    assert 0 < seconds < 5
    assert seen.text("#count") == "10,000 of 10,000 shown"
    seen.page.locator("#plot").scroll_into_view_if_needed()
    seen.page.locator('#filters input[value="0"]').uncheck()
    seen.page.mouse.click(*seen.at(0.9, 0.9))
    seen.keep("large")
    assert seen.wrong == []
