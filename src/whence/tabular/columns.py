"""Columns of a table as inputs of a model: what the text of each cell means, and how it is encoded.

`detect_column` decides from the training rows. A column then encodes any other rows, and can be saved as JSON.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from whence.display import listing

# Spellings of "no value", lower case.
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "nil", "?", "-", "--", "."})
MISSING_CATEGORY = "(missing)"
STYLES = ("plain", "thousands", "decimal comma")  # spellings of numbers: 1234.5, 1,234.5 and 1.234,5
DAYS = ("%Y-%m-%d", "%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%d-%m-%Y", "%d %b %Y", "%d %B %Y", "%b %d, %Y")
# Tried in this order; of two that read a column equally well, the first wins.
DATE_FORMATS = tuple(f"{day}{time}" for time in ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f") for day in DAYS)
MOSTLY = 0.9  # share of the cells with a value that must read as a number, or a date, for the column to be one
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+),\d*")
# Thousands separated by spaces, including thin ones.
_SPACED = re.compile(r"[+-]?[1-9]\d{0,2}([ \u00a0\u2009\u202f]\d{3})+(?!\d)")
_WITH_UNIT = re.compile(r"([+-]?[\d.,]*\d[.,]?)\s*((?:[^\W\d_]|°)\S*(?: [^\W\d_]\S*){0,2})")
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


def spelled_alike(counts: Counter[str]) -> list[list[str]]:
    """Categories that differ only in upper and lower case or in spaces, the most frequent spelling first.

    Examples:
        >>> spelled_alike(Counter(["red", "red", "Red", "blue"]))
        [['red', 'Red']]
    """
    groups: dict[str, list[str]] = {}
    for name, _ in counts.most_common():
        groups.setdefault(folded(name), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def folded(name: str) -> str:
    """A category in lower case, with single spaces."""
    return " ".join(name.casefold().split())


def parse_numbers(texts: Any, style: str, unit: str = "") -> Any:
    """Numbers, with NaN for cells that are not numbers in this spelling. Currency and percent signs are ignored.

    Examples:
        >>> parse_numbers(["1,234.5", "$7", "12%", "x"], "thousands").tolist()
        [1234.5, 7.0, 12.0, nan]
        >>> parse_numbers(["1.234,5", "3,5", "1 234,50"], "decimal comma").tolist()
        [1234.5, 3.5, 1234.5]
        >>> parse_numbers(["1 year", "2 years", "3", "4 days"], "plain", unit="year").tolist()
        [1.0, 2.0, 3.0, nan]
    """
    return numpy.fromiter((_parse_number(text, style, unit) for text in texts), dtype=numpy.float64, count=len(texts))


def _parse_number(text: str, style: str, unit: str) -> float:
    bare = _without_spaces(_without_signs(text))
    if unit and (split := _WITH_UNIT.fullmatch(bare)) and _singular(split[2]) == unit:
        bare = split[1]
    if style == "thousands" and _THOUSANDS.fullmatch(bare):
        bare = bare.replace(",", "")
    elif style == "decimal comma" and _DECIMAL_COMMA.fullmatch(bare):
        bare = bare.replace(".", "").replace(",", ".")
    try:
        return math.nan if "_" in bare else float(bare)  # Python accepts 1_000; people do not write it
    except ValueError:
        return math.nan


def _without_signs(text: str) -> str:
    return text.strip().lstrip("$€£").rstrip("$€£%").strip()


def _without_spaces(text: str) -> str:
    """A number without the spaces between its thousands."""
    spaced = _SPACED.match(text) if " " in text or not text.isascii() else None
    return "".join(spaced[0].split()) + text[spaced.end() :] if spaced else text


def note_spaces(name: str, texts: Any, notes: list[str]) -> None:
    """Add a note if numbers have spaces between thousands, as codes may have too."""
    if any(_without_spaces(bare) != bare for bare in map(_without_signs, texts)):
        notes.append(
            f"{name!r} was read as numbers with spaces between thousands; if these are codes, put a letter before each"
        )


def units(texts: Any) -> Counter[str]:
    """Units after numbers, in the singular, and how many cells have each.

    Examples:
        >>> units(["80 kg", "1.5kg", "3 years", "7"])
        Counter({'kg': 2, 'year': 1})
    """
    found = (_WITH_UNIT.fullmatch(_without_spaces(text.strip())) for text in texts)
    return Counter(_singular(one[2]) for one in found if one)


def _singular(unit: str) -> str:
    return unit.removesuffix("s") if len(unit) > 3 else unit


def guess_spelling(texts: Any) -> tuple[str, str, Any]:
    """The style that reads most cells, the unit of most of them (if one reads nearly all), and the values.

    Examples:
        >>> guess_spelling(["1,5", "2,75"])[0], guess_spelling(["120 mmHg", "95 mmHg"])[1]
        ('decimal comma', 'mmHg')
    """
    plain = _guess_style(texts, "")
    for unit, cells in units(texts).most_common(1) if numpy.isfinite(plain[2]).mean() < MOSTLY else ():
        found = _guess_style(texts, unit)
        if cells >= 0.5 * len(texts) and numpy.isfinite(found[2]).mean() >= MOSTLY:
            return found
    return plain


def _guess_style(texts: Any, unit: str) -> tuple[str, str, Any]:
    best = STYLES[0], unit, parse_numbers(texts, STYLES[0], unit)
    for style in STYLES[1:] if numpy.isnan(best[2]).any() else ():
        values = parse_numbers(texts, style, unit)
        if numpy.isnan(values).sum() < numpy.isnan(best[2]).sum():
            best = style, unit, values
    return best


def parse_dates(texts: Any, format_: str) -> Any:
    """Days since 1970, with NaN for cells that are not dates in this format.

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

    def read(formats: Iterable[str], cells: Any) -> dict[str, float]:
        shares = {one: float(numpy.isfinite(parse_dates(cells, one)).mean()) for one in formats}
        return {one: share for one, share in shares.items() if share >= MOSTLY}

    shares = read(read(DATE_FORMATS, texts[:200]), texts)
    return max(shares, key=lambda one: shares[one], default=None)  # the first of ties


MAX_CATEGORIES = 24  # categories with their own input; the others share one
MAX_UNITS = 5  # endings of numbers that may be units
MIN_CATEGORY_ROWS = 3  # rows that a category needs for its own input, in tables of 100 rows or more
HEAVY_TAIL = 8.0  # robust standard deviations from the median; a column with values beyond is compressed
MAX_DISTANCE = 1e9  # robust standard deviations from the median at which values are clipped
MOSTLY_MISSING = 0.98  # columns with a larger share of missing values are excluded
OTHER = "(other)"
YEAR, WEEK, DAY = 365.2425, 7.0, 1.0
IDENTIFIER = re.compile(r"(?i:(^|[_\s-])(id|uuid|guid|key|index|rowid|rownum|identifier)$)|[a-z](Id|ID|Key)$")
SUBJECT = re.compile(  # names of subjects that several rows may be about
    r"(?i:^(patient|subject|participant|respondent|person|customer|client|user|household|student|pupil|member|animal|"
    r"account|device|machine|sensor)([_\s-]?(id|no|nr|num|number|code))?$)"
)


@dataclass(frozen=True)
class Scale:
    """Standardizes values, after compressing heavy tails by sinh^-1 of robust standard deviations."""

    median: float
    spread: float
    compressed: bool
    mean: float
    std: float

    @classmethod
    def of(cls, values: Any) -> Scale:
        """The scale of values without NaN.

        Examples:
            >>> scale = Scale.of(numpy.array([1.0, 2.0, 3.0]))
            >>> scale.apply(numpy.array([2.0])).tolist()
            [0.0]
        """
        if not len(values):
            return cls(0.0, 1.0, False, 0.0, 1.0)
        unit = float(numpy.abs(values).max()) or 1.0  # the squares of values above 1e154 would overflow
        low, middle, high = numpy.percentile(values / unit, [25, 50, 75])
        spread = min(unit * float((high - low) / 1.349 or (values / unit).std()), 1e308) or 1.0
        rough = cls(float(unit * middle), spread, False, 0.0, 1.0)
        rough = replace(rough, compressed=bool(numpy.abs(rough.distance(values)).max() > HEAVY_TAIL))
        scaled = rough.apply(values)
        std = float(scaled.std())
        varies = std > 1e-9 * max(1.0, float(numpy.abs(scaled).max()))
        return replace(rough, mean=float(scaled.mean()), std=std if varies else 1.0)

    def apply(self, values: Any) -> Any:
        """Standardized values; NaN stays NaN."""
        clipped = numpy.clip(self.distance(values), -MAX_DISTANCE, MAX_DISTANCE)
        return ((numpy.arcsinh(clipped) if self.compressed else clipped) - self.mean) / self.std

    def distance(self, values: Any) -> Any:
        """(values - median) / spread, without overflow in the difference; infinite where the quotient overflows."""
        with numpy.errstate(over="ignore"):
            return 2.0 * ((values / 2 - self.median / 2) / self.spread)


@dataclass(frozen=True)
class _Measured:
    """Shared by numbers and dates: a scale, and possibly an input that marks missing values."""

    name: str
    scale: Scale
    missing_input: bool
    cycles: tuple[float, ...] = field(default=(), kw_only=True)  # days within which the position of a date matters

    def parse(self, cells: Any) -> Any:
        """(m,) values, NaN for missing ones."""
        raise NotImplementedError

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        waves = [f"{self.name} {wave} {period:g} days" for period in self.cycles for wave in ("sin", "cos")]
        return [self.name, *waves, *([f"{self.name} {MISSING_CATEGORY}"] if self.missing_input else [])]

    def encode(self, cells: Any) -> Any:
        """(m, inputs): scaled values, with zero (the mean) for missing ones, and an input that marks them."""
        values = self.parse(cells)
        angles = [2 * math.pi * values / period for period in self.cycles]
        inputs = [self.scale.apply(values), *(wave(angle) for angle in angles for wave in (numpy.sin, numpy.cos))]
        known = numpy.isfinite(values)
        marks = [(~known).astype(float)] if self.missing_input else []
        return numpy.stack([*(numpy.where(known, one, 0.0) for one in inputs), *marks], axis=1)

    def features(self, cells: Any) -> Any:
        """(m, 1 + periods) for trees, which need no scale: values, and positions in each period; NaN if missing."""
        values = self.parse(cells)
        values = numpy.where(numpy.isfinite(values), values, numpy.nan)
        return numpy.stack([values, *(values % period for period in self.cycles)], axis=1)

    def unrecognized(self, cells: Any) -> Any:
        """Which cells hold text that cannot be read as a value."""
        return ~numpy.isfinite(self.parse(cells)) & ~is_missing(cells)


@dataclass(frozen=True)
class Number(_Measured):
    """A column of numbers. A missing one is replaced by the mean, and a second input marks it."""

    style: str
    kind: str = "number"
    unit: str = ""

    @property
    def description(self) -> str:
        """What the column holds, in words."""
        unit = f" ({self.unit})" if self.unit else ""
        return f"number{unit}" + ", heavy-tailed" * self.scale.compressed + ", with gaps" * self.missing_input

    def parse(self, cells: Any) -> Any:
        """(m,) numbers."""
        return parse_numbers(cells, self.style, self.unit)

    def clipped(self, cells: Any) -> Any:
        """Which cells hold numbers so far from the median that they are clipped."""
        return numpy.abs(self.scale.distance(self.parse(cells))) > MAX_DISTANCE

    def display(self, cells: Any) -> Any:
        """The numbers, as integers if all of them are whole."""
        values = self.parse(cells)
        whole = numpy.isfinite(values).all() and (values % 1 == 0).all() and numpy.abs(values).max() < 2**53
        return values.astype(numpy.int64) if whole else values


@dataclass(frozen=True)
class Date(_Measured):
    """A column of dates: time itself, and the position in the year, the week and the day if these vary."""

    format: str
    kind: str = "date"

    @property
    def description(self) -> str:
        """What the column holds, in words."""
        return f"date, {self.format.replace('%', '')}" + ", with gaps" * self.missing_input

    def parse(self, cells: Any) -> Any:
        """(m,) days since 1970."""
        return parse_dates(cells, self.format)

    def display(self, cells: Any) -> Any:
        """Dates, which have an order; text if some cells cannot be read."""
        days = self.parse(cells)
        known = numpy.isfinite(days)
        if not (known | is_missing(cells)).all():
            return numpy.array([category_of(cell) for cell in cells], dtype=object)
        seconds = numpy.where(known, days, 0.0) * 86_400
        return numpy.where(known, seconds.round().astype("datetime64[s]"), numpy.datetime64("NaT", "s"))


@dataclass(frozen=True)
class Category:
    """A column of categories, one-hot encoded; rare categories share one input."""

    name: str
    levels: tuple[str, ...]
    other: bool
    kind: str = "category"

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        return [f"{self.name} = {level}" for level in self.levels] + [f"{self.name} = {OTHER}"] * self.other

    @property
    def description(self) -> str:
        """What the column holds, in words."""
        return f"{len(self.levels)} categories" + " and others" * self.other

    def encode(self, cells: Any) -> Any:
        """(m, inputs); an unseen category is encoded like a rare one, or as zeros if none was rare."""
        return (self.features(cells) == numpy.arange(len(self.inputs))).astype(float)

    def features(self, cells: Any) -> Any:
        """(m, 1) for trees: the number of the category; rare ones share the last number, unseen ones are NaN."""
        codes = {level: float(code) for code, level in enumerate(self.levels)}
        unseen = float(len(self.levels)) if self.other else numpy.nan
        return numpy.array([[codes.get(label, unseen)] for label in self.display(cells)])

    def unrecognized(self, cells: Any) -> Any:
        """Which cells hold a category that was not in training; rare and new ones cannot be distinguished."""
        return numpy.isnan(self.features(cells)[:, 0])

    def display(self, cells: Any) -> Any:
        """The categories."""
        return numpy.array([category_of(cell) for cell in cells], dtype=object)


Column = Number | Category | Date


def column_from_json(fields: dict[str, Any]) -> Column:
    """The column whose `dataclasses.asdict` was written as JSON."""
    kinds: dict[str, type[Column]] = {"number": Number, "category": Category, "date": Date}
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if given["kind"] not in kinds:
        raise ValueError(f"expected a column of kind number, category or date, got {given['kind']!r}")
    if "scale" in given:
        given["scale"] = Scale(**given["scale"])
    return kinds[given["kind"]](**given)


@dataclass(frozen=True)
class ExcludedColumn:
    """A column that is not used, and why; identifiers are still written beside the predictions."""

    name: str
    reason: str
    identifier: bool = False


def detect_column(name: str, cells: Any, notes: list[str], rows: Any = None) -> Column | ExcludedColumn:
    """Detect what a column holds from the text of the training rows; guesses and repairs are noted.

    `rows` are the numbers of the training rows in the file, to detect columns that only repeat them.
    """
    missing = is_missing(cells)
    filled = cells[~missing]
    different = {cell.strip() for cell in filled}
    if not len(filled):
        return ExcludedColumn(name, "no value in any row")
    if missing.mean() > MOSTLY_MISSING:
        return ExcludedColumn(name, f"no value in {missing.mean():.1%} of the rows")
    if len(different) == 1 and not missing.any():
        return ExcludedColumn(name, f"the same value in all rows ({_short(different.pop())})")
    style, unit, values = guess_spelling(filled)
    readable = numpy.isfinite(values)
    gaps = bool(missing.any() or not readable.all())
    odd = f"(such as {examples(filled[~readable])})"
    if readable.mean() >= MOSTLY:
        if readable.all() and _numbers_the_rows(name, values, None if rows is None else rows[~missing]):
            return ExcludedColumn(name, "numbers the rows", identifier=True)
        if not readable.all():
            text = f"{name!r} holds text in {(~readable).sum()} of {len(filled)} cells {odd}"
            notes.append(f"{text}; treated as missing numbers")
        note_spaces(name, filled[readable], notes)
        return Number(name, Scale.of(values[readable]), gaps, style, unit=unit)
    format_ = guess_date_format(filled)
    if format_ is not None:
        return _detect_date(name, format_, filled, bool(missing.any()), notes)
    endings = units(filled)
    if readable.mean() >= 0.5:
        notes.append(f"{name!r} mixes numbers ({readable.mean():.0%}) and text {odd}; taken as categories")
    elif 1 < len(endings) <= MAX_UNITS and endings.total() >= MOSTLY * len(filled):
        notes.append(
            f"{name!r} holds numbers with different endings ({listing(list(map(repr, endings)), MAX_UNITS)}), taken "
            "as text; if these are units, convert the numbers to one of them"
        )
    return _detect_category(name, cells, len(different), len(filled), notes)


def _numbers_the_rows(name: str, values: Any, rows: Any) -> bool:
    """Whether distinct whole numbers only number the rows: by name, without a gap, or as the file does."""
    if not (values == numpy.round(values)).all() or len(values) < 5 or len(numpy.unique(values)) < len(values):
        return False
    dense = values.max() - values.min() == len(values) - 1
    in_order = rows is not None and numpy.ptp(values - rows) == 0
    return bool(dense or in_order or IDENTIFIER.search(name))


def _detect_date(name: str, format_: str, filled: Any, missing: bool, notes: list[str]) -> Column:
    days = parse_dates(filled, format_)
    readable = numpy.isfinite(days)
    known = days[readable]
    if format_.startswith("%m/%d") and numpy.isfinite(parse_dates(filled, format_.replace("%m/%d", "%d/%m"))).all():
        notes.append(f"{name!r} could be month/day or day/month; month/day was used")
    if not readable.all():
        odd = examples(filled[~readable])
        notes.append(f"{name!r} holds {(~readable).sum()} cells that are not dates (such as {odd})")
    # Cycles that the dates go through, and within which they vary.
    cycles = [one for one in (YEAR, WEEK) if numpy.ptp(known) >= one and numpy.ptp(known % one) > 0.01 * one]
    cycles += [DAY] * bool((known % 1 != 0).any())
    return Date(name, Scale.of(known), missing or not readable.all(), format_, cycles=tuple(cycles))


def _detect_category(name: str, cells: Any, different: int, filled: int, notes: list[str]) -> Column | ExcludedColumn:
    if different > 20 and different > 0.5 * filled:
        unique = different > 0.9 * filled
        text = "a different text in nearly every row" if unique else "too many different texts"
        return ExcludedColumn(name, f"{text} ({different:,})", identifier=unique)
    counts = Counter(category_of(cell) for cell in cells)
    if len(counts) == 1:
        return ExcludedColumn(name, f"the same value in all rows ({_short(next(iter(counts)))})")
    alike = spelled_alike(counts)
    if alike:
        notes.append(
            f"{name!r} spells {listing([' and '.join(map(repr, names)) for names in alike], 3)} with upper and lower "
            "case or spaces as the only difference; taken as different categories"
        )
    fewest = MIN_CATEGORY_ROWS if len(cells) >= 100 else 1
    frequent = [level for level, count in counts.most_common(MAX_CATEGORIES) if count >= fewest]
    return Category(name, tuple(sorted(frequent)), len(frequent) < len(counts))


def describe_styles(columns: Iterable[Column]) -> list[str]:
    """One line for each spelling of numbers other than Python's, and for each unit, with the columns that use it."""
    found: dict[str, list[str]] = {}
    for column in columns:
        if isinstance(column, Number) and column.style != "plain":
            ending = " separator" * (column.style == "thousands")
            found.setdefault(f"with a {column.style}{ending}", []).append(repr(column.name))
        if isinstance(column, Number) and column.unit:
            found.setdefault(f"as numbers, without the unit {column.unit!r}", []).append(repr(column.name))
    several = {how: f"{len(names)} columns were read {how}: {listing(names, 3)}" for how, names in found.items()}
    return [f"{names[0]} was read {how}" if len(names) == 1 else several[how] for how, names in found.items()]


def examples(cells: Any) -> str:
    """The first three different cells."""
    return ", ".join(_short(cell) for cell in list(dict.fromkeys(cells))[:3])


def _short(cell: str) -> str:
    bare = " ".join(cell.split())
    return repr(bare if len(bare) <= 24 else bare[:21] + "...")
