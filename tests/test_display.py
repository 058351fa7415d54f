"""What results look like in a terminal and in a notebook: short, narrow, and never run as HTML."""

from __future__ import annotations

from collections import OrderedDict
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import whence
from whence import display
from whence.curvature import RidgePath
from whence.display import WIDTH, Column, Shown, Table, cut

EVIL = "<script>alert('x')</script>&\"<img src=x onerror=y>"
ALLOWED = {"div", "table", "thead", "tbody", "tr", "th", "td", "span"}


class Reader(HTMLParser):
    """Collects tags, attributes and the text of cells; checks that tags close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and set(self._open) & {"td", "th"}:
            self.rows[-1][-1] += data


def fitted(outputs: int = 1, likelihood: str = "gaussian", **options: Any) -> whence.Tracer:
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(-3, 3, 40, dtype=torch.float64).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    targets = torch.randint(outputs, (40,), generator=generator)
    y = targets if likelihood == "categorical" else torch.rand(40, outputs, generator=generator).double()
    return whence.fit(net, [(x, y)], likelihood, **{"ridge": 0.1, "progress": False, **options})


X = torch.linspace(-9, 9, 13, dtype=torch.float64).unsqueeze(1)


def everything() -> dict[str, Shown]:
    tracer, classes = fitted(ridge="loo"), fitted(3, "categorical")
    assert tracer.ridge_path is not None
    return {
        "tracer": tracer,
        "predictions": tracer.predict(X),
        "classes": classes.predict(X),
        "some outputs": classes.predict(X, outputs=[0, 2]),
        "several": fitted(3).predict(X),
        "attribution": tracer.attribute(X),
        "explanation": tracer.explain(X),
        "change": tracer.what_if(X, remove=[3]),
        "labels": tracer.suggest(12),
        "pool": tracer.suggest(3, pool=X),
        "path": tracer.ridge_path,
        "diagnostics": tracer.diagnostics,
    }


ALL = everything()


@pytest.mark.parametrize("name", ALL)
def test_prints_narrow_and_short(name: str) -> None:
    lines = str(ALL[name]).splitlines()
    assert 2 < len(lines) <= 20
    if name != "diagnostics":  # one line a finding, to be searched
        assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize("name", ALL)
def test_repr_is_one_line(name: str) -> None:
    assert "\n" not in repr(ALL[name])
    assert repr(ALL[name]).startswith(f"{type(ALL[name]).__name__}(")
    assert len(repr(ALL[name])) < 2 * WIDTH


@pytest.mark.parametrize("name", ALL)
def test_html_is_small_plain_and_without_colours_of_its_own_for_text(name: str) -> None:
    page = ALL[name]._repr_html_()
    reader = Reader(page)
    assert set(reader.tags) <= ALLOWED
    assert set(reader.attributes) <= {"style", "aria-hidden"}
    assert "http" not in page
    assert len(page) < 16_000
    assert "background:#" not in page
    assert "color:#000" not in page
    assert len({len(row) for row in reader.rows}) == 1, "every row has every cell"


def test_predictions_show_the_numbers() -> None:
    u = fitted().predict(X[:3])
    rows = [line.split() for line in str(u).splitlines()[2:5]]
    low, high = u.interval(0.95)
    for number, row in enumerate(rows):
        assert row[0] == str(number)
        shown = [float(row[at]) for at in (1, 2, 4, 5, 6, 7)]
        values = (u.mean, low, high, u.ho, u.hec3)
        expected = [float(value[number, 0]) for value in values] + [float(u.ratio[number])]
        assert shown == pytest.approx(expected, rel=6e-3, abs=6e-3)
    assert Reader(u._repr_html_()).rows[0] == ["no.", "mean", "95% interval", "Ho", "HeC3", "HeC3/Ho"]


def test_classes_show_the_predicted_one() -> None:
    u = fitted(3, "categorical").predict(X[:2])
    rows = [line.split() for line in str(u).splitlines()[2:4]]
    best = u.probabilities.max(1)
    assert [int(row[1]) for row in rows] == best.indices.tolist()
    assert [float(row[2]) for row in rows] == pytest.approx(best.values.tolist(), abs=6e-4)


def test_only_the_first_ten_rows() -> None:
    shown = str(fitted().predict(X)).splitlines()
    assert shown[-1] == "... and 3 more: to_frame()"
    assert shown[-3].split()[0] == "9"


def test_attribution_names_the_largest_shares() -> None:
    found = fitted().attribute(X[:1], top=3)
    line = str(found).splitlines()[2]
    first = f"{int(found.hec3.index[0, 0])}: {float(found.hec3.share[0, 0]):.0%}"
    assert first in line


def test_an_explanation_says_what_to_do() -> None:
    found = fitted(recenter=True).explain(torch.tensor([[0.0], [90.0]]).double(), level=0.92)
    lines = str(found).splitlines()
    assert lines[3].split()[1:3] == ["scarce", "data"]
    assert f"near {int(found.near[1, 0])}," in lines[3]
    assert "&#9679;" in found._repr_html_()


def test_the_best_ridge_is_marked() -> None:
    path = RidgePath(torch.logspace(-9, 9, 19), (torch.arange(19.0) - 17).square())
    marked = [line for line in str(path).splitlines() if "smallest" in line]
    assert marked[0].split()[:2] == ["1e+08", "0"]
    assert len(str(path).splitlines()) == 12


def test_nothing_predicted_is_shown_too() -> None:
    nothing = whence.Uncertainty(torch.zeros(0, 1), {name: torch.zeros(0, 1, 1) for name in ("ho", "hec3")})
    assert str(nothing) == "0 predictions, 1 output"
    assert Reader(nothing._repr_html_()).text == "0 predictions, 1 output"


@pytest.mark.parametrize("name", ["div", EVIL.replace(".", "")])
def test_names_of_layers_are_text(name: str) -> None:
    """The names of a model's layers, which its author chose, are in the diagnostics."""
    net = nn.Sequential(OrderedDict([(name, nn.Linear(1, 1, dtype=torch.float64))]))
    tracer = whence.fit(net, [(X, X)], progress=False)
    for shown in (tracer, tracer.diagnostics):
        reader = Reader(shown._repr_html_())
        assert set(reader.tags) <= ALLOWED
        assert f"{name}.weight" in reader.text, "shown as it is"


@pytest.mark.parametrize("place", ["title", "note", "head", "cell"])
def test_every_part_of_a_table_is_text(place: str) -> None:
    put = {spot: EVIL if spot == place else "x" for spot in ("title", "note", "head", "cell")}
    column = Column(put["head"], (put["cell"],), bars=(0.5,), dots=("noise",))
    reader = Reader(Table(put["title"], (column,), put["note"]).html())
    assert set(reader.tags) <= ALLOWED
    assert set(reader.attributes) <= {"style", "aria-hidden"}
    assert EVIL in reader.text


def test_long_last_cells_go_on_below_and_long_lines_are_cut() -> None:
    words = Column("", ("word " * 40,), left=True)
    lines = Table("t", (Column("", ("name",), left=True), words)).text().splitlines()
    assert len(lines) == 4
    assert all(line.startswith("      word") for line in lines[2:])
    assert all(len(line) <= WIDTH for line in lines)
    assert cut("x" * 100) == "x" * 77 + "..."
    assert len(Table("t", (Column("", ("9" * 100,)),)).text().splitlines()[1]) == WIDTH


def test_bars_stay_in_their_cells() -> None:
    page = Table("t", (Column("", ("a", "b", "c"), bars=(-1.0, 0.25, 7.0)),)).html()
    assert [f" {share}%,transparent" in page for share in (0, 25, 100)] == [True] * 3


def test_large_amounts_are_written_in_full() -> None:
    shown = {
        999.4: "999",
        999.6: "1,000",
        1234.5: "1,234",
        5e5: "500,000",
        -5e5: "-500,000",
        123456789.0: "123,456,789",
    }
    assert {value: display.number(value) for value in shown} == shown
    assert [display.number(value) for value in (2e9, 1e-5, float("inf"))] == ["2e+09", "1e-05", "inf"]
    house = whence.Uncertainty(torch.tensor([[5e5]]), {name: torch.tensor([[[1e8]]]) for name in ("ho", "hec3")})
    assert "500,000" in str(house)
    assert "e+0" not in str(house)
