"""The page: nothing it is given can run or reach out, and nothing is lost."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch

from whence import InputError
from whence.report import (
    Card,
    Facts,
    Gallery,
    Group,
    Number,
    Page,
    Point,
    Row,
    Scatter,
    Section,
    Table,
    Words,
    build,
    write,
)
from whence.report.images import png

EVIL = """<script>alert("1")</script>'"><img src=https://evil.example/x onerror=alert(2)>&amp;{{ 7 * 7 }}"""
VOID = {"meta", "img"}


class Reader(HTMLParser):
    """Collects elements, attributes and text, and insists that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data


def everything(text: str) -> Page:
    """A page with one of each block, and the same text in every place that takes text."""
    toned = [Group(text, "noise"), Group(text, "scarcity"), Group(text)]
    cards = tuple(Card(text, (text,), png(torch.rand(4, 4)), group) for group in [*toned, None])
    points = tuple(Point(0.25 * number, 0.5, group, text) for number, group in enumerate(toned))
    blocks = (
        Words(((text, text),)),
        Table(text, (text, text), (Row(text, (text,)), Row(text, (text,), text, True)), text),
        Gallery(cards, text),
        Scatter(points, text, text, text, text, text),
        Facts(((text, text, text),)),
    )
    section = Section(text, (text,), blocks, "noise")
    return Page(text, (text,), (section, section, section), (Number(text, text, "scarcity"),), text)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_shows_hostile_text_and_never_runs_it() -> None:
    plain, evil = read(build(everything("word"))), read(build(everything(EVIL)))
    assert "script" not in evil.tags
    assert evil.tags == plain.tags, "text became elements"
    assert [(tag, name) for tag, name, _ in evil.attributes] == [(tag, name) for tag, name, _ in plain.attributes]
    assert evil.words.count(EVIL) == plain.words.count("word") > 30
    assert not any(name.startswith("on") for _, name, _ in evil.attributes)


def test_asks_for_nothing_from_outside() -> None:
    html = build(everything("word"))
    assert not re.search(r"https?:|@import|url\(|<link|<script|<iframe|srcset", html)
    found = read(html).attributes
    links = [value for _, name, value in found if name in ("src", "href", "action", "data", "poster", "xlink:href")]
    assert links
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    policy = [value for tag, name, value in found if tag == "meta" and name == "content"]
    assert any("default-src 'none'" in value and "script-src" not in value for value in policy)


def test_can_be_read_by_machine_and_ear() -> None:
    found = read(build(everything("word")))
    assert ("html", "lang", "en") in found.attributes
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {value for tag, name, value in found.attributes if tag == "a" and name == "href"}
    assert targets == {"#section-1", "#section-2", "#section-3"}
    assert targets <= {f"#{each}" for each in ids}
    assert sum(1 for tag, name, _ in found.attributes if (tag, name) == ("img", "alt")) == 12


def test_rows_of_a_group_stand_together() -> None:
    table = Table("t", ("a", "b"), (Row("1", ("x",), "g"), Row("2", ("x",), "g"), Row("3", ("x",), "h")))
    assert [(group, [row.name for row in rows]) for group, rows in table.grouped()] == [("g", ["1", "2"]), ("h", ["3"])]


def test_writes_broken_text_too(tmp_path) -> None:
    path = write(Page("half a character: \ud800", ("ä → ∂",), ()), tmp_path / "page.html")
    text = path.read_bytes().decode("utf-8")
    assert "&#55296;" in text
    assert "ä → ∂" in text


def test_says_where_the_folder_is_missing(tmp_path) -> None:
    with pytest.raises(InputError, match=r"expected a folder that exists, got .*nowhere"):
        write(Page("t", (), ()), tmp_path / "nowhere" / "page.html")
