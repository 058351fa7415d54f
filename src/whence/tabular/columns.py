"""Columns of a table as inputs of a model: what the text of each cell means, and how it is encoded.

`detect_column` decides from the training rows. A column then encodes any other rows, and can be saved as JSON.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy
import pandas

from whence.display import percent

# Spellings of numbers: the cells to which each applies, and what is replaced there. 1234.5 is read in all of them.
# With decimal commas 1.234 is 1234.
STYLES: dict[str, tuple[str, dict[int, int | None]]] = {
    "decimal point": (r"(?!)", {}),
    "thousands separator": (r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", {ord(","): None}),
    "decimal comma": (
        r"[+-]?([1-9]\d{0,2}(\.\d{3})+(,\d*)?|\d+,\d*([eE][+-]?\d+)?)",
        {ord("."): None, ord(","): ord(".")},
    ),
}
LARGEST = 1e100  # numbers beyond this count as text: their squares could not be computed
DAYS = ("%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d", "%d.%m.%Y", "%d-%m-%Y", "%d %b %Y", "%d %B %Y", "%b %d, %Y")
# Tried in this order; of two that read a column equally well, the first wins.
DATE_FORMATS = ("ISO8601", *(day + time for time in ("", " %H:%M", " %H:%M:%S") for day in DAYS))
MOSTLY = 0.9  # share of the cells with a value that must read as a number, or a date, for the column to be one
MOSTLY_MISSING = 0.98  # columns with a larger share of missing values are excluded
MAX_CATEGORIES = 24  # categories with their own input; the others share one
MIN_CATEGORY_ROWS = 3  # rows that a category needs for its own input, in tables of 100 rows or more
HEAVY_TAIL = 8.0  # robust standard deviations from the median; a column with values beyond is compressed
MAX_DISTANCE = 1e9  # robust standard deviations from the median at which new values are clipped
MISSING_CATEGORY, OTHER = "(missing)", "(other)"
# In days. On tables of 600 rows whose target follows the week or the day, or the year for eight years, networks and
# trees that see positions in these cycles err by a factor of 2 to 7 less; without such cycles they lose at most 8 %.
YEAR, WEEK, DAY = 365.2425, 7.0, 1.0
IDENTIFIER = re.compile(r"(?i:(^|[_\s-])(id|uuid|guid|key|index|rowid|rownum|identifier)$)|[a-z](Id|ID|Key)$")
SUBJECT = re.compile(  # names of subjects that several rows may be about
    r"(?i)^(patient|subject|participant|respondent|person|customer|client|user|household|student|pupil|member|animal|"
    r"account|device|machine|sensor)([_\s-]?(id|no|nr|num|number|code))?$"
)
FEWEST_IDS = 10  # different values of an id that repeats: a column with fewer is a category


def read_numbers(cells: pandas.Series, style: str) -> Any:
    """(m,) numbers of any size, with NaN for cells that are not numbers in this spelling."""
    pattern, replacements = STYLES[style]
    bare = cells.str.strip("$€£% ")
    if replacements:
        bare = bare.mask(bare.str.fullmatch(pattern, na=False), bare.str.translate(replacements))
    return pandas.to_numeric(bare, errors="coerce").to_numpy(dtype=numpy.float64)


def parse_numbers(cells: pandas.Series, style: str) -> Any:
    """(m,) numbers, with NaN for cells that are not numbers in this spelling. Currency and percent signs are ignored.

    Examples:
        >>> import pandas
        >>> parse_numbers(pandas.Series(["1,234.5", "$7", "12 %", "x"]), "thousands separator").tolist()
        [1234.5, 7.0, 12.0, nan]
        >>> parse_numbers(pandas.Series(["1.234,5", "3,5", "1.234"]), "decimal comma").tolist()
        [1234.5, 3.5, 1234.0]
    """
    values = read_numbers(cells, style)
    return numpy.where(numpy.abs(values) <= LARGEST, values, numpy.nan)


def guess_style(cells: pandas.Series, comma: str = "thousands separator") -> tuple[str, Any]:
    """The spelling of numbers that reads most cells, and the values; of equals a decimal point, then `comma`."""
    read = {style: parse_numbers(cells, style) for style in ("decimal point", comma, *STYLES)}
    best = max(read, key=lambda style: numpy.isfinite(read[style]).sum())
    return best, read[best]


def guess_comma(frame: pandas.DataFrame, delimiter: str | None = None) -> str:
    """What commas mean in columns that can be read either way, such as 4,812: the same as in most other columns.

    If these do not tell, decimal commas in a file with semicolons between cells, which leave the comma free.

    Examples:
        >>> import pandas
        >>> guess_comma(pandas.DataFrame({"width": ["4,812", "3,907"], "height": ["1,5", "2,25"]}))
        'decimal comma'
    """
    more = 0  # how many more columns have decimal commas than thousands separators
    for name in frame:
        filled = frame[name].dropna()
        if filled.str.contains(",", regex=False).any():
            decimal, thousands = (
                numpy.isfinite(parse_numbers(filled, style)).mean()
                for style in ("decimal comma", "thousands separator")
            )
            if max(decimal, thousands) >= MOSTLY:
                more += int(numpy.sign(decimal - thousands))
    return "decimal comma" if more > 0 or (more == 0 and delimiter == ";") else "thousands separator"


def parse_dates(cells: pandas.Series, format_: str) -> Any:
    """(m,) days since 1970, in UTC where a cell has a time zone, with NaN for cells that are not dates in this format.

    Examples:
        >>> import pandas
        >>> parse_dates(pandas.Series(["1970-01-03", "1970-01-01T12:00:00Z", "soon"]), "ISO8601").tolist()
        [2.0, 0.5, nan]
    """
    parsed = pandas.to_datetime(cells, format=format_, errors="coerce", utc=True)
    start = pandas.Timestamp("1970-01-01", tz="UTC")  # not in nanoseconds, as 0 is: these end in the year 2262
    return ((parsed - start) / pandas.Timedelta(days=1)).to_numpy(dtype=numpy.float64)


def guess_date_format(cells: pandas.Series) -> str | None:
    """The format that reads nearly all cells, or `None`.

    Examples:
        >>> import pandas
        >>> guess_date_format(pandas.Series(["31/12/2020", "01/02/2021"]))
        '%d/%m/%Y'
    """
    shares = dict.fromkeys(DATE_FORMATS, 0.0)
    for some in (cells.head(200), cells):
        shares = {one: float(numpy.isfinite(parse_dates(some, one)).mean()) for one in shares}
        shares = {one: share for one, share in shares.items() if share >= MOSTLY}
    return max(shares, key=lambda one: shares[one], default=None)


@dataclass(frozen=True)
class Scale:
    """Standardizes values, after compressing heavy tails by sinh^-1 of robust standard deviations."""

    median: float
    spread: float
    compressed: bool
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, values: Any) -> Scale:
        """The scale of values without NaN.

        Examples:
            >>> scale = Scale.of(numpy.array([1.0, 2.0, 3.0]))
            >>> scale.apply(numpy.array([2.0])).tolist()
            [0.0]
        """
        low, median, high = numpy.percentile(values, [25, 50, 75])
        spread = float((high - low) / 1.349 or values.std()) if numpy.ptp(values) else 1.0
        compressed = bool(numpy.abs(values - median).max() > HEAVY_TAIL * spread)
        scale = cls(float(median), spread, compressed)
        scaled = scale.apply(values)
        return replace(scale, mean=float(scaled.mean()), std=float(scaled.std()) or 1.0)

    def apply(self, values: Any) -> Any:
        """Standardized values; NaN stays NaN."""
        distance = (values - self.median) / self.spread
        scaled = numpy.arcsinh(distance) if self.compressed else distance.clip(-MAX_DISTANCE, MAX_DISTANCE)
        return (scaled - self.mean) / self.std


@dataclass(frozen=True)
class Numeric:
    """A column of numbers, or of dates, with the position of a date in the year, the week and the day if these vary.

    A missing value is replaced by the mean, and a further input marks it if there were any in training.
    """

    name: str
    kind: Literal["number", "date"]
    format: str  # of numbers, one of `STYLES`; or of dates
    scale: Scale
    gaps: bool  # whether an input marks missing values
    cycles: tuple[float, ...] = ()  # days within which the position of a date matters

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        waves = [f"{self.name} {wave} {period:g} days" for period in self.cycles for wave in ("sin", "cos")]
        return [self.name, *waves, *([f"{self.name} {MISSING_CATEGORY}"] if self.gaps else [])]

    def parse(self, cells: pandas.Series) -> Any:
        """(m,) numbers, or days since 1970; NaN for missing ones."""
        return (parse_numbers if self.kind == "number" else parse_dates)(cells, self.format)

    def encode(self, cells: pandas.Series, codes: bool = False) -> Any:
        """(m, inputs): scaled values, with zero (the mean) for missing ones, and an input that marks them."""
        values = self.parse(cells)
        angles = [2 * math.pi * values / period for period in self.cycles]
        inputs = [self.scale.apply(values), *(wave(angle) for angle in angles for wave in (numpy.sin, numpy.cos))]
        marks = [numpy.isnan(values).astype(float)] if self.gaps else []
        return numpy.stack([*(numpy.where(numpy.isnan(values), 0.0, one) for one in inputs), *marks], axis=1)

    def unrecognized(self, cells: pandas.Series) -> Any:
        """Which cells hold text that cannot be read as a value."""
        return numpy.isnan(self.parse(cells)) & cells.notna().to_numpy()

    def display(self, cells: pandas.Series) -> Any:
        """Numbers, as integers if all of them are whole, and those that are too large as they are; or dates."""
        if self.kind == "date":
            values = self.parse(cells)
            seconds = (numpy.nan_to_num(values) * 86_400).round().astype("datetime64[s]")
            return numpy.where(numpy.isnan(values), numpy.datetime64("NaT", "s"), seconds)
        values = read_numbers(cells, self.format)
        whole = (numpy.abs(values) < 2**53).all() and not (values % 1).any()
        return values.astype(numpy.int64) if whole else values


@dataclass(frozen=True)
class Category:
    """A column of categories, one-hot encoded; rare categories share one input."""

    name: str
    levels: tuple[str, ...]
    other: bool
    kind: Literal["category"] = "category"

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        return [f"{self.name} = {level}" for level in self.levels] + [f"{self.name} = {OTHER}"] * self.other

    def encode(self, cells: pandas.Series, codes: bool = False) -> Any:
        """(m, inputs) indicators, or (m, 1) numbers of the categories if `codes`.

        An unseen category is encoded like a rare one, or as zeros if none was rare.
        """
        found = pandas.Index(self.levels).get_indexer(self.display(cells))[:, None]
        found = numpy.where(found < 0, len(self.levels), found)
        return found if codes else (found == numpy.arange(len(self.inputs))).astype(float)

    def unrecognized(self, cells: pandas.Series) -> Any:
        """Which cells hold a category that was not in training; rare and new ones cannot be distinguished."""
        return ~numpy.isin(self.display(cells), self.levels) & (not self.other)

    def display(self, cells: pandas.Series) -> Any:
        """The categories."""
        return cells.fillna(MISSING_CATEGORY).to_numpy(dtype=object)


Column = Numeric | Category


def column_from_json(fields: dict[str, Any]) -> Column:
    """The column whose `dataclasses.asdict` was written as JSON."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if given["kind"] == "category":
        return Category(**given)
    return Numeric(**{**given, "scale": Scale(**given["scale"])})


@dataclass(frozen=True)
class ExcludedColumn:
    """A column that is not used, and why; identifiers are still written beside the predictions."""

    name: str
    reason: str
    identifier: bool = False


def detect_column(
    cells: pandas.Series, notes: list[str], comma: str = "thousands separator"
) -> Column | ExcludedColumn:
    """Detect what a column holds from the text of the training rows; guesses and repairs are noted.

    The index of the cells are the numbers of the rows in the file. `comma` is what `guess_comma` found in the table.
    """
    name, filled = str(cells.name), cells.dropna()
    missing, different = 1 - len(filled) / len(cells), filled.nunique()
    if missing > MOSTLY_MISSING:
        return ExcludedColumn(name, f"no value in {percent(missing)} of the rows")
    if different == 1 and not missing:
        return ExcludedColumn(name, f"the same value in all rows ({examples(filled)})")
    style, values = guess_style(filled, comma)
    readable = numpy.isfinite(values)
    if readable.mean() >= MOSTLY:
        if readable.all() and _numbers_the_rows(name, values, filled.index.to_numpy()):
            return ExcludedColumn(name, "numbers the rows", identifier=True)
        return _detect_numeric(name, "number", style, cells, values, notes)
    format_ = guess_date_format(filled)
    if format_ is not None:
        return _detect_numeric(name, "date", format_, cells, parse_dates(filled, format_), notes)
    if readable.mean() >= 0.5:
        odd = f"{readable.mean():.0%}) and text (such as {examples(filled[~readable])}"
        notes.append(f"{name!r} mixes numbers ({odd}); taken as categories")
    if different > 20 and different > 0.5 * len(filled):
        unique = different > 0.9 * len(filled)
        text = "a different text in nearly every row" if unique else "too many different texts"
        return ExcludedColumn(name, f"{text} ({different:,})", identifier=unique)
    counts = cells.fillna(MISSING_CATEGORY).value_counts()
    fewest = MIN_CATEGORY_ROWS if len(cells) >= 100 else 1
    frequent = sorted(counts.head(MAX_CATEGORIES).index[counts.head(MAX_CATEGORIES) >= fewest])
    return Category(name, tuple(frequent), len(frequent) < len(counts))


def _numbers_the_rows(name: str, values: Any, rows: Any) -> bool:
    """Whether distinct whole numbers only number the rows: by name, without a gap, or as the file does."""
    if (values % 1).any() or len(values) < 5 or len(numpy.unique(values)) < len(values):
        return False
    dense = numpy.ptp(values) == len(values) - 1
    return bool(dense or numpy.ptp(values - rows) == 0 or IDENTIFIER.search(name))


def repeats_as_id(cells: pandas.Series) -> bool:
    """Whether a column is an id, by its name, of which several rows have the same; numbers must be whole."""
    named = any(names.search(str(cells.name)) for names in (IDENTIFIER, SUBJECT))
    several = FEWEST_IDS <= cells.nunique() <= 0.9 * len(cells)
    return named and several and not numpy.nan_to_num(parse_numbers(cells, "decimal point") % 1).any()


def leave_out_copies(
    found: list[Column | ExcludedColumn], frame: pandas.DataFrame, target: str
) -> list[Column | ExcludedColumn]:
    """Columns detected in a table, without those that have the same values as the target or an earlier column."""
    first: dict[bytes, str] = {}
    columns: list[Column | ExcludedColumn] = []
    for one in sorted(found, key=lambda column: column.name != target):
        if not isinstance(one, ExcludedColumn):
            values = pandas.util.hash_array(one.display(frame[one.name])).tobytes()
            same = first.setdefault(values, one.name)
            if same != one.name:
                one = ExcludedColumn(one.name, f"the same values as {'the target ' * (same == target)}{same!r}")
        columns.append(one)
    return [one for one in columns if one.name != target]


def _detect_numeric(
    name: str, kind: Literal["number", "date"], format_: str, cells: pandas.Series, values: Any, notes: list[str]
) -> Numeric:
    """A column of numbers or dates, from all its cells and the values of those that are not missing."""
    filled, readable = cells.dropna(), numpy.isfinite(values)
    known = values[readable]
    if not readable.all():
        text = f"{name!r} holds text in {(~readable).sum()} of {len(filled)} cells"
        notes.append(f"{text} (such as {examples(filled[~readable])}); treated as missing {kind}s")
    if format_.startswith("%m/%d") and numpy.isfinite(parse_dates(filled, format_.replace("%m/%d", "%d/%m"))).all():
        notes.append(f"{name!r} could be month/day or day/month; month/day was used")
    cycles: list[float] = []
    if kind == "date":  # those that the dates go through, and within which they vary
        cycles = [one for one in (YEAR, WEEK) if numpy.ptp(known) >= one and numpy.ptp(known % one) > 0.01 * one]
        cycles += [DAY] * bool((known % 1).any())
    return Numeric(name, kind, format_, Scale.of(known), len(known) < len(cells), tuple(cycles))


def examples(cells: pandas.Series) -> str:
    """The first three different cells."""
    different = cells.fillna(MISSING_CATEGORY).unique()[:3]
    short = [cell if len(cell) <= 24 else cell[:21] + "..." for cell in different]
    return ", ".join(repr(" ".join(cell.split())) for cell in short)
