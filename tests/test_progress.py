"""The progress line: silent for quick work, one line on a terminal, few lines in a log."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import whence
from doubles import batches, fit, mlp
from whence.runtime.execution import Progress, clock, describe


class Stream(io.StringIO):
    def __init__(self, interactive: bool) -> None:
        super().__init__()
        self.interactive = interactive

    def isatty(self) -> bool:
        return self.interactive


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A number of items, each of which takes the given seconds on a clock that stands still otherwise."""
    now = [100.0]
    monkeypatch.setattr("whence.runtime.execution.time", SimpleNamespace(monotonic=lambda: now[0]))

    def items(count: int, seconds: float) -> Iterator[int]:
        for item in range(count):
            now[0] += seconds
            yield item

    return items


def run(progress: Progress, items: Any, total: int | None = None) -> list[int]:
    return list(progress.track(items, "curvature, batch", total))


def test_texts_have_tokens_a_second(work: Any) -> None:
    stream = Stream(True)
    texts = (SimpleNamespace(tokens=500) for _ in work(2, 2.0))
    list(Progress(True, stream).track(texts, "curvature, batch", 2))
    assert "batch 2 of 2, 4 s, 0 s left, 250 tokens a second" in stream.getvalue()


@pytest.mark.parametrize("interactive", [True, False])
def test_quick_work_is_silent(work: Any, interactive: bool) -> None:
    stream = Stream(interactive)
    assert run(Progress(True, stream), work(9, 0.1), 9) == list(range(9))
    assert stream.getvalue() == ""


def test_one_line_on_a_terminal(work: Any) -> None:
    stream = Stream(True)
    assert run(Progress(True, stream), work(4, 0.6), 4) == [0, 1, 2, 3]
    clear = "\r\x1b[2K"
    *lines, end = stream.getvalue().split(clear)[1:]
    assert lines == [
        "whence: curvature, batch 2 of 4, 1 s, 1 s left",
        "whence: curvature, batch 3 of 4, 2 s, 1 s left",
        "whence: curvature, batch 4 of 4, 2 s, 0 s left",
    ]
    assert end == "", "the line is cleared at the end"
    assert "\n" not in stream.getvalue()


def test_fast_items_do_not_flood_a_terminal(work: Any) -> None:
    stream = Stream(True)
    run(Progress(True, stream), work(10_000, 0.001), 10_000)
    assert 50 < stream.getvalue().count("whence:") < 100


def test_few_lines_in_a_log(work: Any) -> None:
    stream = Stream(False)
    run(Progress(True, stream), work(60, 1.0), 60)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0] == "whence: curvature, batch 11 of 60, 11 s, 49 s left"
    assert "\x1b" not in stream.getvalue()


def test_without_a_total(work: Any) -> None:
    stream = Stream(True)
    run(Progress(True, stream), work(2, 2.0))
    assert "whence: curvature, batch 1, 2 s" in stream.getvalue()
    assert "left" not in stream.getvalue()


def test_more_items_than_announced(work: Any) -> None:
    stream = Stream(True)
    run(Progress(True, stream), work(4, 2.0), 2)
    assert "batch 4 of 2, 8 s, 0 s left" in stream.getvalue()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_line_is_cleared_when_an_error_flies(work: Any, error: type[BaseException]) -> None:
    def torn() -> Iterator[int]:
        yield from work(3, 2.0)
        raise error

    stream = Stream(True)
    with pytest.raises(error):
        run(Progress(True, stream), torn(), 9)
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_the_line_is_cleared_when_the_reader_stops(work: Any) -> None:
    stream = Stream(True)
    reader = Progress(True, stream).track(work(9, 2.0), "batch", 9)
    for _ in range(3):
        next(reader)
    reader.close()  # type: ignore[attr-defined]
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_disabled(work: Any) -> None:
    stream = Stream(True)
    assert run(Progress(False, stream), work(3, 100.0), 3) == [0, 1, 2]
    assert stream.getvalue() == ""


def test_without_a_console(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert run(Progress(True), work(3, 100.0), 3) == [0, 1, 2]


def test_standard_error_is_the_default(work: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(Progress(), work(3, 20.0), 3)
    captured = capsys.readouterr()
    assert "whence: curvature, batch" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (90000, "25 h 00 min"),
    ],
)
def test_clocks(seconds: float, words: str) -> None:
    assert clock(seconds) == words


def test_nothing_done_yet() -> None:
    assert describe("batch", 0, 10, 5.0) == "whence: batch 0, 5 s"


@pytest.mark.parametrize("progress", [True, False])
def test_a_slow_fit_shows_its_progress(progress: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ticks = iter(range(0, 1_000_000, 20))
    monkeypatch.setattr("whence.runtime.execution.time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    tracer = fit(mlp(), batches(), progress=progress, execution=whence.Execution(max_memory=15_000))
    tracer.predict([x for x, _ in batches()])
    shown = capsys.readouterr().err
    for label in ("outputs, batch 1 of 3", "kernel, batch", "predictions, batch 1 of 3"):
        assert (label in shown) == progress


@pytest.mark.parametrize("structure", ["auto", "core", "sketch", "ekfac", whence.Exact(road="primal")])
def test_what_a_fit_takes_is_said_before_it_starts(
    structure: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SHORT", "LASTS"):
        monkeypatch.setattr(f"whence.fitting.{name}", 0.0)
    fit(mlp(), batches(), structure=structure, progress=False)
    assert capsys.readouterr().err == ""
    fit(mlp(), batches(), structure=structure, progress=True)
    first = capsys.readouterr().err.splitlines()[0]
    assert "takes about 0 s and" in first
    wanted = whence.estimate(mlp(), batches(), structure=structure)
    assert first.startswith(f"whence: {wanted.structure} ")
    assert first.endswith(("KiB", "MiB"))


def test_nothing_is_said_of_what_takes_a_moment(capsys: pytest.CaptureFixture[str]) -> None:
    fit(mlp(), batches(), progress=True)
    assert "takes about" not in capsys.readouterr().err
