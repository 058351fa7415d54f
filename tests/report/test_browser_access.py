"""The report for everyone: without barriers, on phones and paper, with hostile texts, and large."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from browsers import KEPT, PHONE, SETTLED, Visit, visit
from report_examples import EVIL, draw, fitted, pictures, rows, texts

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
    seen.shows("#points tbody tr")
    seen.keep(f"{name}-{scheme}", full_page=True)
    source = Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    seen.page.evaluate(source)
    assert barriers(seen) == []
    seen.page.locator("button.open").first.click()
    seen.shows("#window")
    assert barriers(seen, "#window") == []
    assert seen.wrong == []


def barriers(seen: Visit, where: str = "html") -> list[str]:
    found = seen.page.evaluate("where => axe.run(where, {resultTypes: ['violations']})", where)
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found["violations"]]


def test_fits_a_phone_and_paper(browser: Any, form: tuple[str, Path]) -> None:
    name, path = form
    seen = visit(browser, path, PHONE, is_mobile=True, has_touch=True, device_scale_factor=2)
    seen.until("width => document.documentElement.scrollWidth <= width", PHONE["width"])
    seen.page.locator("#plot").scroll_into_view_if_needed()
    seen.until(SETTLED)
    box = seen.page.locator("#plot canvas").bounding_box()
    seen.page.touchscreen.tap(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.45)
    seen.says("#inspector h3", re.compile("^prediction"))
    seen.page.evaluate("scrollTo(0, 0)")
    seen.keep(f"{name}-phone")
    seen.page.emulate_media(media="print")
    seen.hides("nav")
    seen.shows("#actions")
    assert len(seen.page.pdf()) > 20_000
    assert seen.wrong == []


def test_hostile_text_is_shown_and_never_runs(browser: Any, tmp_path: Path) -> None:
    example = texts(extra=EVIL)
    ids = [f"{number} {EVIL}" for number in range(len(example.x))]
    path = example.write(tmp_path / "evil.html", title=EVIL, about=[EVIL], ids=ids)
    seen = visit(browser, path)
    seen.page.locator("button.open:visible").first.click()
    seen.page.locator("#window .close").click()
    seen.hides("#window")
    seen.page.locator("#table-box summary").click()
    seen.shows("#points tbody tr")
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
    seen.until("() => performance.getEntriesByType('navigation')[0].loadEventEnd > 0")
    seconds = seen.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000
    (KEPT / "large.json").parent.mkdir(parents=True, exist_ok=True)
    (KEPT / "large.json").write_text(json.dumps({"seconds": seconds, "bytes": path.stat().st_size, "shown": shown}))
    assert 0 < seconds < 5
    seen.says("#count", "10,000 of 10,000 shown")
    seen.page.locator("#plot").scroll_into_view_if_needed()
    seen.page.locator('#filters input[value="0"]').uncheck()
    seen.page.mouse.click(*seen.at(0.9, 0.9))
    seen.keep("large")
    assert seen.wrong == []
