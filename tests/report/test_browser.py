"""The report in a real browser: points are clicked, filters used, keys pressed; nothing is asked for from outside."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browsers import visit
from report_examples import Example, pictures


@dataclass(frozen=True)
class Written:
    """An example and its report, with what the fit says of it."""

    example: Example
    path: Path
    verdicts: np.ndarray
    x: np.ndarray  # scarcity, on a logarithmic scale, from 0 to 1 in the picture
    y: np.ndarray  # noise, the same
    hec3: np.ndarray


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    example = pictures()
    path = example.write(tmp_path_factory.mktemp("report") / "report.html")
    found = example.tracer.explain(example.x)
    scarcity, limit = found.scarcity.log(), np.log(found.scarcity_limit)
    low, high = min(0.0, float(scarcity.min())), max(float(scarcity.max()), limit) + np.log(1.1)
    x = (scarcity.numpy() - low) / (high - low)
    y = found.noise.numpy() / (1.1 * max(float(found.noise.max()), found.noise_limit))
    hec3 = example.tracer.predict(example.x).hec3.sum(1).numpy()
    return Written(example, path, np.array(found.verdicts), x, y, hec3)


def test_a_click_shows_the_prediction_and_what_is_behind_it(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    seen.page.locator("#plot").scroll_into_view_if_needed()
    apart = np.hypot(np.subtract.outer(written.x, written.x), np.subtract.outer(written.y, written.y)) + np.eye(150)
    chosen = int(np.argmax((written.verdicts == "noisy labels nearby") * apart.min(1)))
    seen.page.mouse.click(*seen.at(written.x[chosen], written.y[chosen]))
    told = seen.says("#inspector", re.compile(rf"prediction {chosen}\b"))
    assert "noisy labels nearby" in told
    assert re.search(r"probability\s+[\d.]+\s%", told)
    assert seen.page.locator("#inspector article > img").get_attribute("src").startswith("data:image/")
    behind = [int(one.replace(",", "")) for one in re.findall(r"training example ([\d,]+), ", told)]
    shares = written.example.tracer.attribute(written.example.x[chosen : chosen + 1], top=6)
    assert behind == shares.hec3.index[0].tolist()
    seen.keep("map")
    assert seen.wrong == []


def test_filters_show_what_they_say(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    names = {1: "noisy labels nearby", 2: "scarce data", 3: "both", 0: "confident"}
    counts = {code: int((written.verdicts == name).sum()) for code, name in names.items()}
    seen.says("#count", "150 of 150 shown")
    for code in (0, 2, 3):
        seen.page.locator(f'#filters input[value="{code}"]').uncheck()
    seen.says("#count", f"{counts[1]} of 150 shown")
    seen.page.locator("#show-all").click()
    answers, truth = written.example.tracer.predict(written.example.x).mean.argmax(1), written.example.y
    seen.page.locator("#filters select[name=right]").select_option("0")
    wrong = int((answers != truth).sum())
    seen.says("#count", f"{wrong} of 150 shown")
    assert wrong > 0
    seen.page.locator("#filters select[name=truth]").select_option("2")
    seen.says("#count", f"{int(((answers != truth) & (truth == 2)).sum())} of 150 shown")
    seen.page.locator("#filters select[name=answer]").select_option("1")
    seen.says("#count", f"{int(((answers == 1) & (truth == 2)).sum())} of 150 shown")
    seen.page.locator("#show-all").click()
    seen.says("#count", "150 of 150 shown")
    assert seen.wrong == []


DRAWN = "() => document.querySelector('#plot canvas').toDataURL()"


def test_dragging_selects_and_zooms(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    seen.page.locator("#plot").scroll_into_view_if_needed()
    seen.page.mouse.move(*seen.at(0.253, 1.0))
    seen.page.mouse.down()
    seen.page.mouse.move(*seen.at(0.9, 0.8))
    seen.page.mouse.move(*seen.at(1.01, 0.503))
    seen.page.mouse.up()
    inside = int(((written.x > 0.253) & (written.y > 0.503) & (written.y <= 1.0)).sum())
    count = int(seen.says("#count", re.compile(r"^\d+ selected of 150 shown$")).split()[0])
    assert abs(count - inside) <= 2, "a pixel at the border of the box"
    seen.page.locator("#table-box summary").click()
    seen.says("#page-count", re.compile(rf" of {count}$"))
    seen.page.locator("#zoom-selection").hover()  # a point that the mouse was on is drawn as all others
    before = seen.page.evaluate(DRAWN)
    seen.page.locator("#zoom-selection").click()
    seen.until(f"before => ({DRAWN})() !== before", before)
    seen.keep("selection")
    seen.page.locator("#zoom-reset").click()
    seen.until(f"before => ({DRAWN})() === before", before)
    seen.page.locator("#clear-selection").click()
    seen.says("#count", "150 of 150 shown")
    assert seen.wrong == []


def test_all_of_it_by_keyboard(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    plot, heading = seen.page.locator("#plot"), "#inspector h3"
    plot.focus()
    first = int(re.sub(r"\D", "", seen.says(heading, re.compile(r"^prediction \d+$"))))
    by_x = np.argsort(written.x, kind="stable").tolist()
    plot.press("ArrowLeft")
    seen.says(heading, f"prediction {by_x[by_x.index(first) - 1]}")
    plot.press("ArrowRight")
    seen.says(heading, f"prediction {first}")
    plot.press("ArrowDown")
    below = int(re.sub(r"\D", "", seen.says(heading, re.compile(rf"^prediction (?!{first}$)\d+$"))))
    assert written.y[below] <= written.y[first] + 1e-6
    plot.press("+")
    plot.press("0")
    plot.press("Enter")
    seen.shows("#window")
    seen.names("#window", f"prediction {below}")
    seen.page.keyboard.press("Escape")
    seen.hides("#window")
    seen.until("() => document.activeElement.id === 'plot'")  # focus comes back
    assert seen.wrong == []


def test_the_table_sorts_and_turns_pages(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    seen.page.locator("#table-box summary").click()
    first, by = "#points tbody tr th", seen.page.locator("#points thead button", has_text="Scarcity")
    seen.says(first, f"prediction {int(np.argmax(written.hec3))}")
    by.click()
    seen.says(first, f"prediction {int(np.argmax(written.x))}")
    by.click()
    seen.says(first, f"prediction {int(np.argmin(written.x))}")
    seen.page.locator("#page-next").click()
    seen.says("#page-count", "26 to 50 of 150")
    seen.page.locator("#page-back").click()
    seen.says("#page-count", "1 to 25 of 150")
    seen.page.locator(first).first.locator("button").click()
    seen.names("#window", f"prediction {int(np.argmin(written.x))}")
    seen.page.locator("#window .close").click()
    seen.hides("#window")
    assert seen.wrong == []


def test_gallery_and_actions_open_predictions(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path)
    # the first action on a prediction may be the fifth of all, which is folded
    seen.page.locator("#actions details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    for selector in ("#gallery button.open", "#actions button.open"):
        button = seen.page.locator(selector).first
        number = button.get_attribute("data-prediction")
        button.click()
        seen.shows("#window")
        seen.names("#window", f"prediction {number}")
        seen.keep("window")
        seen.page.locator("#window .close").click()
        seen.hides("#window")
    assert seen.wrong == []


def test_reads_without_scripts(browser: Any, written: Written) -> None:
    seen = visit(browser, written.path, java_script_enabled=False)
    assert "predictions are uncertain" in seen.text("body")
    assert seen.page.locator("#actions li").count() >= 6
    seen.shows("#gallery img")
    seen.hides("#filters")
