"""The column to predict, numbers or classes; columns that leak it; and the split of the rows for testing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from whence.display import listing
from whence.errors import InputError, TargetError, did_you_mean
from whence.tabular.columns import (
    IDENTIFIER,
    SUBJECT,
    Column,
    Date,
    ExcludedColumn,
    Number,
    Scale,
    category_of,
    describe_styles,
    examples,
    folded,
    guess_spelling,
    is_missing,
    note_spaces,
    parse_numbers,
    spelled_alike,
)
from whence.tabular.files import TextTable
from whence.trees.ensemble import Loss

Task = Literal["regression", "classification"]
MAX_CLASSES = 50
MAX_CODES = 10  # up to this many whole numbers 0, 1, ... or 1, 2, ... are taken for classes
MAX_TARGET, MIN_STD = 1e15, 1e-15  # limits of targets whose variances can still be computed and shown
MIN_ROWS, MIN_GROUPS, MIN_CLASS_ROWS = 20, 8, 3
MAX_TEST_ROWS = 10_000
VALIDATION, FOLDS = 0.15, 7
SMALL = 2_000  # up to this many training rows there are `FOLDS` folds of validation rows; beyond, one set of that share


@dataclass(frozen=True)
class Target:
    """The target column."""

    name: str  # of the column
    task: Task  # regression or classification
    classes: tuple[str, ...] = ()  # in the order of the network's outputs; none for regression
    style: str = "plain"  # spelling of the numbers
    unit: str = ""  # unit after the numbers
    shift: float = 0.0  # mean of the training targets; zero for classes
    scale: float = 1.0  # their standard deviation; one for classes

    @property
    def outputs(self) -> int:
        """Outputs of the network: one logit for two classes."""
        return len(self.classes) if len(self.classes) > 2 else 1

    @property
    def likelihood(self) -> Loss:
        """The name of the likelihood in `whence.fit`."""
        if self.task == "regression":
            return "gaussian"
        return "categorical" if len(self.classes) > 2 else "bernoulli"

    def parse(self, cells: Any) -> Any:
        """(m,) numbers, or indices of classes; NaN for missing values and unseen classes."""
        if self.task == "regression":
            return parse_numbers(cells, self.style, self.unit)
        indices = {name: float(index) for index, name in enumerate(self.classes)}
        alike = Counter(map(folded, self.classes))
        indices |= {folded(name): at for name, at in indices.items() if alike[folded(name)] == 1}
        return numpy.array([indices.get(name, indices.get(folded(name), numpy.nan)) for name in map(_class_of, cells)])


def find_column(name: str, names: list[str]) -> str:
    """The column with that name, or an error that suggests the nearest names."""
    if name not in names:
        meant = f"{did_you_mean(name, names, most=3)} Columns: {listing(names, 20)}."
        raise InputError(f"expected the name of a column, got {name!r}, which does not exist.{meant}")
    return name


def detect_target(name: str, cells: Any, task: Task | None, notes: list[str]) -> Target:
    """Detect whether the target is a number or a class, from all cells with a value; guesses are noted."""
    filled = cells[~is_missing(cells)]
    if not len(filled):
        raise TargetError(f"expected values in the target {name!r}, got none in {len(cells)} rows.")
    style, unit, values = guess_spelling(filled)
    unreadable = ~numpy.isfinite(values)
    if (task or _guess_task(name, values, unreadable, notes)) == "classification":
        return Target(name, "classification", _classes(name, filled, task, notes))
    if unreadable.any():
        raise TargetError(
            f"expected numbers in the target {name!r}, got text in {int(unreadable.sum())} of {len(filled)} rows, such "
            f"as {examples(filled[unreadable])}. Correct or empty these cells, or pass --task classification."
        )
    if numpy.ptp(values) == 0:
        raise TargetError(f"expected a target that varies, got {values[0]:g} in all rows of {name!r}.")
    # Variances are squares of the target, which must be neither too large nor too small.
    largest = numpy.abs(values).max()
    std = (values / largest).std() * largest  # the squares of small values would underflow
    if largest > MAX_TARGET:
        raise TargetError(
            f"expected a target of at most {MAX_TARGET:g} in size, so that variances can be computed, got "
            f"{str(filled[numpy.abs(values).argmax()])!r} in {name!r}. If this is not a mistake in single cells, "
            f"divide the column by 1e{numpy.floor(numpy.log10(largest)):.0f}: verdicts stay the same."
        )
    if std < MIN_STD:
        power = -numpy.floor(numpy.log10(std))
        raise TargetError(
            f"expected a target with a standard deviation of at least {MIN_STD:g}, to compute variances, got {std:.3g} "
            f"for {name!r}. Multiply the column by 1e{power:.0f}: verdicts stay the same."
        )
    note_spaces(name, filled, notes)
    notes += describe_styles([Number(name, Scale.of(values), False, style, unit=unit)])
    return Target(name, "regression", style=style, unit=unit)


def _guess_task(name: str, values: Any, unreadable: Any, notes: list[str]) -> Task:
    if unreadable.mean() > 0.5:
        return "classification"
    if unreadable.any():
        return "regression"  # mostly numbers: the error lists the rest
    known = numpy.unique(values)
    if len(known) == 2:
        return "classification"
    whole = bool((known == numpy.round(known)).all())
    if whole and len(known) <= MAX_CODES and known[0] in (0, 1) and numpy.ptp(known) == len(known) - 1:
        notes.append(
            f"{name!r} holds the whole numbers {known[0]:g} to {known[-1]:g}, treated as classes; "
            "if they are amounts, pass --task regression"
        )
        return "classification"
    if whole and len(known) <= 2 * MAX_CODES and len(values) > 10 * len(known):
        notes.append(
            f"{name!r} holds {len(known)} different whole numbers, treated as amounts; "
            "if they are classes, pass --task classification"
        )
    return "regression"


def _classes(name: str, filled: Any, task: Task | None, notes: list[str]) -> tuple[str, ...]:
    counts = Counter(_class_of(cell) for cell in filled)
    for common, *others in spelled_alike(counts):
        few = max(counts[one] for one in others) < MIN_CLASS_ROWS <= counts[common]
        rows = ", ".join(f"{one!r} ({counts[one]:,})" for one in (common, *others))
        taken = "one class" if few else "different classes; correct the file if they are one"
        notes.append(
            f"{name!r} has spellings that differ only in upper and lower case or spaces: {rows}; taken as {taken}"
        )
        if few:
            counts[common] += sum(counts.pop(one) for one in others)
    if len(counts) < 2:
        raise TargetError(f"expected at least two classes in the target {name!r}, got only {next(iter(counts))!r}.")
    rare = [one for one, count in counts.items() if count < MIN_CLASS_ROWS]
    if len(counts) > MAX_CLASSES or len(rare) > len(counts) / 2:
        shown = ", ".join(map(repr, list(counts)[:3]))
        advice = "" if task is None else " If they are amounts, pass --task regression."
        raise TargetError(
            f"expected a target of numbers, or of at most {MAX_CLASSES} classes with several rows each, got "
            f"{len(counts):,} different values in {len(filled):,} rows of {name!r}, such as {shown}.{advice} "
            "Is it the right column?"
        )
    if rare:
        raise TargetError(
            f"expected at least three rows of each class of {name!r}, got fewer of {', '.join(map(repr, rare[:5]))}. "
            "Empty these cells, merge them with another class, or add rows."
            f"{did_you_mean(rare[0], [one for one in counts if one not in rare])}"
        )
    numbers = {one: _number(one) for one in counts}
    return tuple(sorted(counts, key=lambda one: (numbers[one] is None, numbers[one] or 0.0, one)))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _class_of(cell: str) -> str:
    """The class of a cell; equal numbers are one class: 1 and 1.0."""
    bare = category_of(cell)
    number = _number(bare)
    return str(int(number)) if number is not None and number.is_integer() else bare


@dataclass(frozen=True)
class RowSplit:
    """Positions of rows in the table."""

    train: Any  # rows of the final training
    validation: tuple[Any, ...]  # sets of training rows that are predicted by models trained without them
    test: Any  # never trained on
    unlabelled: Any  # rows without a target, which are only predicted

    def names(self) -> list[str]:
        """The part that each row belongs to, in words."""
        names = numpy.full(len(self.train) + len(self.test) + len(self.unlabelled), "train", dtype=object)
        names[self.test], names[self.unlabelled] = "held out", "no target"
        return [str(name) for name in names]


def split_rows(values: Any, target: Target, test: float, seed: int, groups: Any = None) -> RowSplit:
    """Draw the parts at random, stratified by class; targets (m,) are numbers, NaN if missing.

    Rows with the same label in `groups` (m,) stay together in one part. There is no stratification then.

    Examples:
        >>> split = split_rows(numpy.arange(100.0), Target("y", "regression"), 0.2, 0)
        >>> len(split.train), [len(rows) for rows in split.validation], len(split.test)
        (80, [12, 12, 12, 11, 11, 11, 11], 20)
    """
    known = numpy.flatnonzero(numpy.isfinite(values))
    check_row_count(len(known), target.name)
    generator = numpy.random.default_rng(seed)
    unlabelled, share = numpy.flatnonzero(~numpy.isfinite(values)), min(test, MAX_TEST_ROWS / len(known))
    if groups is not None:
        return RowSplit(*_split_groups(known, values, target, share, groups, generator), unlabelled)
    strata = [known[values[known] == index] for index in range(len(target.classes))] or [known]
    held_out, strata = _draw(strata, share, generator)
    train = numpy.sort(numpy.concatenate(strata))
    if len(train) <= SMALL:
        shuffled = numpy.concatenate([generator.permutation(rows) for rows in strata])
        validation = tuple(numpy.sort(shuffled[first::FOLDS]) for first in range(FOLDS))
    else:
        validation = (_draw(strata, VALIDATION, generator)[0],)
    return RowSplit(train, validation, held_out, unlabelled)


def _split_groups(
    known: Any, values: Any, target: Target, share: float, groups: Any, generator: numpy.random.Generator
) -> tuple[Any, tuple[Any, ...], Any]:
    """The same for whole groups: those drawn first are held out, the others are added to the smallest set in turn."""
    labels, codes = numpy.unique(groups[known].astype(str), return_inverse=True)
    if len(labels) < MIN_GROUPS:
        raise InputError(
            f"expected at least {MIN_GROUPS} groups of rows with a value of {target.name!r}, to train on some and test "
            f"on others, got {len(labels)}. Leave out --groups, or name another column."
        )
    order = generator.permutation(len(labels))
    sizes = numpy.bincount(codes)[order].cumsum() / len(known)
    last = max(1, int(numpy.abs(sizes - share).argmin()) + 1)
    drawn = numpy.isin(codes, order[:last])
    train = known[~drawn]
    missing = [name for index, name in enumerate(target.classes) if not (values[train] == index).any()]
    if missing:
        raise InputError(
            f"expected rows of every class of {target.name!r} in several groups, got {missing[0]!r} in held-out ones "
            "alone. Leave out --groups, or pass another --seed."
        )
    sets: list[list[Any]] = [[] for _ in range(min(FOLDS, len(labels) - last))]
    for group in order[last:]:
        min(sets, key=lambda rows: sum(map(len, rows))).append(known[codes == group])
    folds = tuple(numpy.sort(numpy.concatenate(rows)) for rows in sets)
    return train, folds if len(train) <= SMALL else folds[:1], known[drawn]


def group_labels(cells: Any) -> Any:
    """(m,) the group of each row; a row without one is its own group.

    Examples:
        >>> group_labels(numpy.array(["a", "", "a", "?"], dtype=object)).tolist()
        ['a', '(row 1)', 'a', '(row 3)']
    """
    rows = numpy.array([f"(row {at})" for at in range(len(cells))], dtype=object)
    return numpy.where(is_missing(cells), rows, [cell.strip() for cell in cells])


def check_row_count(known: int, name: str) -> None:
    """Raise if there are too few rows with a target."""
    if known < MIN_ROWS:
        raise InputError(
            f"expected at least {MIN_ROWS} rows with a value of {name!r}, got {known}. "
            "A network cannot be trained and tested on fewer."
        )


def _draw(strata: list[Any], share: float, generator: numpy.random.Generator) -> tuple[Any, list[Any]]:
    """A share of each stratum, at least one row if the stratum has two; and the rest of the strata."""
    counts = [max(round(share * len(rows)), int(share > 0 and len(rows) >= 2)) for rows in strata]
    drawn = [generator.permutation(rows)[:count] for rows, count in zip(strata, counts, strict=True)]
    left = [rows[~numpy.isin(rows, some)] for rows, some in zip(strata, drawn, strict=True)]
    return numpy.sort(numpy.concatenate(drawn)), left


# Share of the target's variance, or of the errors of the most frequent class, that one column alone explains.
LEAK = 0.995
FEWEST = 10  # fewest different values of an id that repeats: a column with fewer is a category
MOST_ROWS, MIN_KNOWN = 5_000, 20  # most rows checked for leaks, evenly spaced, and fewest that must have a value


def drop_copies(
    found: Sequence[Column | ExcludedColumn], table: TextTable, target: str
) -> list[Column | ExcludedColumn]:
    """Exclude columns whose cells equal those of the target, or of an earlier column."""
    first = {tuple(map(_bare, table.columns[target])): target}
    kept: list[Column | ExcludedColumn] = []
    for one in found:
        if not isinstance(one, ExcludedColumn):
            same = first.setdefault(tuple(map(_bare, table.columns[one.name])), one.name)
            if same != one.name:
                what = "a copy of the target" if same == target else "the same values as"
                one = ExcludedColumn(one.name, f"{what} {same!r}")
        kept.append(one)
    return kept


def _bare(cell: str) -> float | str:
    """Equal for 1 and 1.0."""
    number = _number(cell)
    return cell.strip() if number is None else number


def suspicious_columns(
    found: Sequence[Column | ExcludedColumn], table: TextTable, target: Target, grouped: bool
) -> list[str]:
    """Notes on columns that may leak the target, and on ids that repeat if rows are not grouped."""
    values = target.parse(table.columns[target.name])
    some = numpy.linspace(0, len(values) - 1, min(MOST_ROWS, len(values))).round().astype(int)
    notes, several = [], sum(not isinstance(column, ExcludedColumn) for column in found) > 1
    for column in found:
        cells, share = table.columns[column.name], 0.0
        if not isinstance(column, ExcludedColumn) and several:
            share = explained_alone(column.features(cells[some])[:, 0], values[some], bool(target.classes))
        if share > LEAK:
            notes.append(
                f"{column.name!r} alone predicts {target.name!r} nearly perfectly: if it is not known before "
                f"{target.name!r} is, it is a leak; leave it out with --ignore {column.name!r}"
            )
        different = len(set(cells))
        if not grouped and FEWEST <= different <= 0.9 * len(cells) and _looks_like_id(column, cells):
            notes.append(
                f"{column.name!r} looks like an id, and repeats ({different:,} different ones in {len(cells):,} rows): "
                "where rows of one id are alike, some are trained on and others held out, and scores are too good; "
                f"--groups {column.name!r} keeps them together"
            )
    return notes


def _looks_like_id(column: Column | ExcludedColumn, cells: Any) -> bool:
    """Whether a column looks like an id, by its name; numbers must be whole."""
    named = any(names.search(column.name) for names in (IDENTIFIER, SUBJECT)) and not isinstance(column, Date)
    return named and bool((numpy.nan_to_num(parse_numbers(cells, "plain")) % 1 == 0).all())


def explained_alone(feature: Any, values: Any, classes: bool) -> float:
    """How much of the target one column explains: by the mean of the others with the same value, or of both neighbours.

    One is all of the variance, or of the errors of the most frequent class; zero or less is none.

    Examples:
        >>> x = numpy.arange(100.0)
        >>> round(explained_alone(x, x**2, False), 3), explained_alone(x % 3, x, False) < 0
        (1.0, True)
    """
    import pandas  # an extra: only tables need it

    known = numpy.isfinite(feature)
    if known.sum() < MIN_KNOWN or known.mean() < 0.5:
        return 0.0
    order = numpy.argsort(feature[known], kind="stable")
    feature, values = feature[known][order], values[known][order]
    rows = pandas.DataFrame(numpy.eye(int(values.max()) + 1)[values.astype(int)] if classes else values)
    groups = rows.groupby(feature)
    others = groups[0].transform("size") - 1
    beside = pandas.concat([rows.shift(1), rows.shift(-1)]).groupby(level=0).mean()
    near = (groups.transform("sum") - rows).div(others, axis=0).where(others > 0, beside).to_numpy()
    if classes:
        wrong, base = (near.argmax(1) != values).mean(), 1 - rows.mean().max()
    else:
        wrong, base = ((near[:, 0] - values) ** 2).mean(), values.var()
    return float(1 - wrong / base) if base > 0 else 0.0
