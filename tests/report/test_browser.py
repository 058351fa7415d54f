"""The report in a real browser: points are clicked, filters used, keys pressed; nothing is asked for from outside."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from browsers import visit
from report_examples import Example, pictures


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


def test_reads_without_scripts(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path, java_script_enabled=False)
    assert "predictions are uncertain" in seen.text("body")
    assert seen.page.locator("#actions li").count() >= 6
    assert seen.page.locator("#gallery img").first.is_visible()
    assert not seen.page.locator("#filters").is_visible()
