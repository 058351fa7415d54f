"""A text coloured token by token, as a picture and as a page: how uncertain each token is, and by which document."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997744", "#88aa55")
"""Of documents, after Paul Tol; in order."""

WIDTH = 92
"""Characters of a line."""

Paint = Callable[[int], tuple[str, float]]
"""From the position of a token to a colour and how strong it is, from 0 to 1."""


def by_uncertainty(values: Sequence[float | None], low: float, high: float) -> Paint:
    """Orange, stronger from a low to a high deviation; none where nothing was predicted."""

    def paint(at: int) -> tuple[str, float]:
        value = values[at]
        return "#dd6600", 0.0 if value is None else min(max((value - low) / (high - low), 0.0), 1.0)

    return paint


def by_source(shares: Sequence[Sequence[float] | None], parts: Sequence[float]) -> Paint:
    """The colour of the document whose share is largest for its part of the corpus; full at four times its part."""

    def paint(at: int) -> tuple[str, float]:
        share = shares[at]
        if share is None:
            return COLOURS[0], 0.0
        best = leading(share, parts)
        return COLOURS[best % len(COLOURS)], min(max((share[best] / parts[best] - 1) / 3, 0.0), 1.0)

    return paint


def leading(share: Sequence[float], parts: Sequence[float]) -> int:
    """The document whose share is largest for its part of the corpus."""
    return max(range(len(share)), key=lambda one: share[one] / parts[one])


def laid_out(tokens: Sequence[str]) -> Iterator[tuple[int, int, int, str]]:
    """Yield (token, line, column, text) with lines broken between tokens.

    Examples:
        >>> list(laid_out(["The", " wine"]))
        [(0, 0, 0, 'The'), (1, 0, 3, ' wine')]
    """
    line, column = 0, 0
    for at, token in enumerate(tokens):
        text = token.replace("\n", " ")
        if column + len(text) > WIDTH:
            line, column, text = line + 1, 0, text.lstrip()
        yield at, line, column, text
        column += len(text)


def picture(results: dict[str, Any], path: Path) -> Path:
    """Every sentence twice, coloured by uncertainty and by source, with the documents' colours below."""
    from matplotlib.figure import Figure  # an extra, slow to import
    from matplotlib.patches import Rectangle  # likewise
    from PIL import Image  # comes with matplotlib

    rows: list[tuple[str, Sequence[str], Paint]] = []
    for one in results["statements"]:
        first, second = paints(results, one)
        rows += [(one["about"] or "(no document)", one["tokens"], first), ("", one["tokens"], second)]
    lines = [1 + max(line for _, line, _, _ in laid_out(tokens)) for _, tokens, _ in rows]
    height = sum(lines) * 1.15 + 0.5 * len(rows) / 2 + 4.5
    figure = Figure(figsize=(11, 0.21 * height), dpi=110)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-21, WIDTH + 2), ylim=(height, -1.6))
    axes.axis("off")
    font = {"family": "monospace", "size": 10.5, "va": "center"}

    def write(x: float, y: float, text: str, **more: Any) -> None:
        axes.text(x, y, text, **{**font, **more})

    write(-20, -0.7, "about", color="#555555")
    write(
        0,
        -0.7,
        "each sentence: by uncertainty (sd by HeC3), then by source (share of Ho for its part)",
        color="#555555",
    )
    y = 0.6
    for number, (about, tokens, paint) in enumerate(rows):
        write(-20, y, about, color="#222222")
        for at, line, column, text in laid_out(tokens):
            colour, strength = paint(at)
            blank = len(text) - len(text.lstrip())
            place = (column + blank - 0.15, y + 1.15 * line - 0.5)
            size = len(text) - blank + 0.3
            axes.add_patch(Rectangle(place, size, 1.0, color=colour, alpha=0.75 * strength, linewidth=0))
            for offset, letter in enumerate(text):
                write(column + offset + 0.5, y + 1.15 * line, letter, ha="center")
        y += 1.15 * lines[number] + (0.5 if number % 2 else 0.05)
    for number, name in enumerate(results["names"]):
        x, below = (number % 4) * 27 - 20, y + 0.9 + 1.3 * (number // 4)
        axes.add_patch(Rectangle((x, below - 0.4), 1.6, 0.8, color=COLOURS[number % len(COLOURS)], alpha=0.75))
        write(x + 2.4, below, name)
    found = BytesIO()
    figure.savefig(found)
    Image.open(found).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(
        path, optimize=True
    )  # a third of the size
    return path


def paints(results: dict[str, Any], one: dict[str, Any]) -> tuple[Paint, Paint]:
    """How to colour a sentence by uncertainty, on the scale of all sentences, and by source."""
    found = sorted(value for each in results["statements"] for value in each["hec3"] if value is not None)
    low, high = found[0], found[int(0.95 * (len(found) - 1))]
    return by_uncertainty(one["hec3"], low, high), by_source(one["shares"], results["part"])


def page(results: dict[str, Any], path: Path) -> Path:
    """The same as a page of its own, with the numbers of a token shown when it is pointed at."""
    names = results["names"]
    parts = []
    for one in results["statements"]:
        parts.append(f"<h2>{html.escape(one['about'] or 'no document')}</h2>")
        for paint in paints(results, one):
            spans = []
            for at, token in enumerate(one["tokens"]):
                colour, strength = paint(at)
                shade = f"{colour}{round(190 * strength):02x}"
                spans.append(
                    f'<span title="{_numbers(one, results, at)}" style="background:{shade}">{html.escape(token)}</span>'
                )
            parts.append(f"<p>{''.join(spans)}</p>")
    legend = " ".join(
        f'<b style="background:{COLOURS[number % len(COLOURS)]}be">{html.escape(name)}</b>'
        for number, name in enumerate(names)
    )
    style = (
        "body{font:16px/1.7 Georgia,serif;max-width:46em;margin:2em auto;padding:0 1em}"
        "h2{font-size:1em}b{font-weight:400;padding:0 .3em}"
    )
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Uncertainty, token by token</title><style>{style}'
        f"</style><h1>Uncertainty, token by token</h1><p>Each sentence by uncertainty, then by source: {legend}</p>"
        f"{''.join(parts)}</html>\n",
        encoding="utf-8",
    )
    return path


def _numbers(one: dict[str, Any], results: dict[str, Any], at: int) -> str:
    if one["hec3"][at] is None:
        return "the first token is not predicted"
    share = one["shares"][at]
    best = leading(share, results["part"])
    source = f"{results['names'][best]} carries {share[best]:.0%} of Ho"
    words = f"sd {one['hec3'][at]:.3g} by HeC3, {one['ho'][at]:.3g} by Ho; {source}"
    return html.escape(words, quote=True)
