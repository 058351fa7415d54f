"""Text cells of a table: missing values, numbers in several spellings, dates, categories."""

from __future__ import annotations

import re
from typing import Any

import numpy

MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "nil", "?", "-", "--", "."})
"""Spellings of "no value", lower case."""

MISSING_CATEGORY = "(missing)"

STYLES = ("plain", "thousands", "decimal comma")
"""Spellings of numbers: 1234.5, 1,234.5 and 1.234,5."""

DATE_FORMATS = (
    "%Y-%m-%d",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%d %H:%M:%S.%f",
    "%Y/%m/%d",
    "%Y/%m/%d %H:%M",
    "%Y/%m/%d %H:%M:%S",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%m/%d/%Y %H:%M",
    "%d/%m/%Y %H:%M",
    "%m/%d/%Y %H:%M:%S",
    "%d/%m/%Y %H:%M:%S",
    "%d.%m.%Y",
    "%d.%m.%Y %H:%M",
    "%d-%m-%Y",
    "%d %b %Y",
    "%d %B %Y",
    "%b %d, %Y",
)
"""Tried in this order; of two that read a column equally well the first is taken."""

MOSTLY = 0.9
"""Share of the cells with a value that must read as a number, or a date, for the column to be one."""

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+),\d*")
_ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)$")


def is_missing(texts: Any) -> Any:
    """Which cells hold no value.

    Examples:
        >>> is_missing(["3", " ", "N/A", "0"]).tolist()
        [False, True, True, False]
    """
    return numpy.fromiter((text.strip().lower() in MISSING for text in texts), dtype=bool, count=len(texts))


def category_of(text: str) -> str:
    """The category that a cell names.

    Examples:
        >>> category_of(" red "), category_of("?")
        ('red', '(missing)')
    """
    bare = text.strip()
    return MISSING_CATEGORY if bare.lower() in MISSING else bare


def parse_numbers(texts: Any, style: str) -> Any:
    """Numbers, and NaN for cells that are no number in this spelling. Currency and percent signs are ignored.

    Examples:
        >>> parse_numbers(["1,234.5", "$7", "12%", "x"], "thousands").tolist()
        [1234.5, 7.0, 12.0, nan]
        >>> parse_numbers(["1.234,5", "3,5"], "decimal comma").tolist()
        [1234.5, 3.5]
    """
    return numpy.fromiter((_parse_number(text, style) for text in texts), dtype=numpy.float64, count=len(texts))


def _parse_number(text: str, style: str) -> float:
    bare = text.strip().lstrip("$€£").removesuffix("%").strip()
    if style == "thousands" and _THOUSANDS.fullmatch(bare):
        bare = bare.replace(",", "")
    elif style == "decimal comma" and _DECIMAL_COMMA.fullmatch(bare):
        bare = bare.replace(".", "").replace(",", ".")
    if "_" in bare:  # Python reads 1_000 as a number; people do not write it
        return float("nan")
    try:
        return float(bare)
    except ValueError:
        return float("nan")


def guess_number_style(texts: Any) -> tuple[str, Any]:
    """The spelling that reads most cells, and what it reads.

    Examples:
        >>> guess_number_style(["1,5", "2,75"])[0]
        'decimal comma'
    """
    best = STYLES[0], parse_numbers(texts, STYLES[0])
    if numpy.isnan(best[1]).any():
        for style in STYLES[1:]:
            values = parse_numbers(texts, style)
            if numpy.isnan(values).sum() < numpy.isnan(best[1]).sum():
                best = style, values
    return best


def parse_dates(texts: Any, format_: str) -> Any:
    """Days since 1970, and NaN for cells that are no date in this format.

    Examples:
        >>> parse_dates(["1970-01-03", "1970-01-01T12:00", "soon"], "%Y-%m-%d").tolist()
        [2.0, nan, nan]
        >>> parse_dates(["1970-01-01T12:00:00Z"], "%Y-%m-%d %H:%M:%S").tolist()
        [0.5]
    """
    import pandas  # an extra: only tables need it

    bare = [_ZONE.sub("", text.strip().replace("T", " ")) if ":" in text else text.strip() for text in texts]
    parsed = pandas.to_datetime(pandas.Series(bare, dtype=object), format=format_, errors="coerce")
    return ((parsed - pandas.Timestamp(0)) / pandas.Timedelta(days=1)).to_numpy(dtype=numpy.float64)


def guess_date_format(texts: Any) -> str | None:
    """The format that reads nearly all cells, or `None`.

    Examples:
        >>> guess_date_format(["31/12/2020", "01/02/2021"])
        '%d/%m/%Y'
    """

    def share_read(format_: str, cells: Any) -> float:
        return float(numpy.isfinite(parse_dates(cells, format_)).mean()) if len(cells) else 0.0

    likely = [format_ for format_ in DATE_FORMATS if share_read(format_, texts[:200]) >= MOSTLY]
    shares = {format_: share_read(format_, texts) for format_ in likely}
    best = max(shares, key=lambda format_: shares[format_], default=None)  # the first of equals
    return best if best is not None and shares[best] >= MOSTLY else None
