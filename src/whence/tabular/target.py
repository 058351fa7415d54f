"""The column to predict, numbers or classes; columns that leak it; and the split of the rows for testing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import pandas

from whence.display import listing
from whence.errors import InputError, TargetError, did_you_mean
from whence.jacobian.leaves import Loss
from whence.tabular.columns import Column, examples, guess_style, parse_numbers

Task = Literal["regression", "classification"]
MAX_CLASSES = 50
MAX_CODES = 10  # up to this many whole numbers 0, 1, ... or 1, 2, ... are taken for classes
SMALLEST, LARGEST = 1e-15, 1e15  # limits of targets whose variances can still be computed and shown
MIN_ROWS, MIN_GROUPS, MIN_CLASS_ROWS = 20, 8, 3
MAX_TEST_ROWS = 10_000
VALIDATION, FOLDS = 0.15, 7
SMALL = 2_000  # up to this many training rows there are `FOLDS` folds of validation rows; beyond, one set of that share


@dataclass(frozen=True)
class Target:
    """The target column."""

    name: str  # of the column
    task: Task  # regression or classification
    classes: tuple[str, ...] = ()  # as spelled in the file, in the order of the outputs; none for regression
    style: str = "decimal point"  # spelling of the numbers
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

    def parse(self, cells: pandas.Series) -> Any:
        """(m,) numbers, or indices of classes; NaN for missing values and unseen classes."""
        if self.task == "regression":
            return parse_numbers(cells, self.style)
        indices = {key: float(index) for index, key in enumerate(class_keys(pandas.Series(self.classes)))}
        return class_keys(cells).map(indices).to_numpy(dtype=numpy.float64, copy=True)

    def spell(self, value: float, digits: int = 15) -> str:
        """A value as a cell of the column: the name of a class, or a number with the decimal mark of the column.

        Examples:
            >>> Target("y", "regression", style="decimal comma").spell(1234.5)
            '1234,5'
        """
        if self.classes:
            return self.classes[int(value)]
        text = numpy.format_float_positional(value, precision=digits, fractional=False, trim="-")
        return text.replace(".", ",") if self.style == "decimal comma" else text

    def spelled(self, answers: pandas.Series) -> pandas.Series:
        """Answers as cells of the column: names of classes, and numbers as given, but with its decimal mark."""
        values = self.parse(answers)
        other = numpy.full(len(answers), bool(self.classes))
        if self.style == "decimal comma":
            same = values == parse_numbers(answers, "decimal point")
            other = same & answers.str.contains(".", regex=False).to_numpy()
        return answers.where(~other, [self.spell(value) for value in values])


def class_keys(cells: pandas.Series) -> pandas.Series:
    """What two cells of the same class have in common: equal whole numbers are one class, however they are spelled.

    Whole numbers from 2**53 on are compared as text: as doubles, different ones could be equal.

    Examples:
        >>> import pandas
        >>> class_keys(pandas.Series(["1", "01.0", "red", "9007199254740993"])).tolist()
        ['1', '1', 'red', '9007199254740993']
    """
    values = parse_numbers(cells, "decimal point")
    whole = (values % 1 == 0) & (numpy.abs(values) < 2**53)
    keys = cells.astype(object)
    keys[whole] = [str(int(value)) for value in values[whole]]
    return keys


def find_column(name: str, names: list[str]) -> str:
    """The column with that name, or an error that suggests the nearest names."""
    if name not in names:
        meant = f"{did_you_mean(name, names, most=3)} Columns: {listing(names, 20)}."
        raise InputError(f"expected the name of a column, got {name!r}, which does not exist.{meant}")
    return name


def detect_target(
    cells: pandas.Series, task: Task | None, notes: list[str], comma: str = "thousands separator"
) -> Target:
    """Detect whether the target is a number or a class, from all cells with a value; guesses are noted.

    `comma` is what `guess_comma` found in the table.
    """
    name, filled = str(cells.name), cells.dropna()
    if len(filled) < MIN_ROWS:
        raise TargetError(
            f"expected at least {MIN_ROWS} rows with a value of {name!r}, to train and test a model, got {len(filled)}."
        )
    style, values = guess_style(filled, comma)
    unreadable = numpy.isnan(values)
    if (task or _guess_task(name, values, unreadable, notes)) == "classification":
        return Target(name, "classification", _classes(name, filled))
    if unreadable.any():
        raise TargetError(
            f"expected numbers in the target {name!r}, got text in {int(unreadable.sum())} of {len(filled)} rows, such "
            f"as {examples(filled[unreadable])}. Correct or empty these cells, or pass --task classification."
        )
    largest = numpy.abs(values).max()
    if not (values.std() > SMALLEST and largest < LARGEST):
        raise TargetError(
            f"expected a target that varies by at least {SMALLEST:g}, with values up to {LARGEST:g}, got {name!r} with "
            f"a standard deviation of {values.std():.3g} and values up to {largest:.3g}. Multiply it by a power of "
            "ten; if its values are codes, pass --task classification."
        )
    if style != "decimal point":
        notes.append(f"{name!r} was read with a {style}")
    return Target(name, "regression", style=style)


def _guess_task(name: str, values: Any, unreadable: Any, notes: list[str]) -> Task:
    if unreadable.any():
        return "classification" if unreadable.mean() > 0.5 else "regression"  # mostly numbers: the error lists the rest
    known = numpy.unique(values)
    if len(known) == 2:
        return "classification"
    codes = known[0] in (0, 1) and len(known) <= MAX_CODES and numpy.array_equal(known, known[0] + range(len(known)))
    if codes or (len(known) <= 2 * MAX_CODES and len(values) > 10 * len(known) and not (known % 1).any()):
        taken, other, option = (
            ("classes", "amounts", "regression") if codes else ("amounts", "classes", "classification")
        )
        notes.append(
            f"{name!r} holds {len(known)} different whole numbers, treated as {taken}; if they are {other}, pass "
            f"--task {option}"
        )
    return "classification" if codes else "regression"


def _classes(name: str, filled: pandas.Series) -> tuple[str, ...]:
    spellings = filled.value_counts().sort_index().sort_values(ascending=False, kind="stable")
    keys = class_keys(spellings.index.to_series())
    counts = spellings.groupby(keys).transform("sum")[~keys.duplicated()]  # by the most frequent spelling of each class
    rare = counts.index[counts < MIN_CLASS_ROWS]
    if not 2 <= len(counts) <= MAX_CLASSES or len(rare):
        few = (
            f", of which {len(rare):,} have fewer rows (such as {listing(list(map(repr, rare)), 3)})"
            if len(rare)
            else ""
        )
        raise TargetError(
            f"expected a target of numbers, or of 2 to {MAX_CLASSES} classes with at least {MIN_CLASS_ROWS} rows each, "
            f"got {len(counts):,} different values in {len(filled):,} rows of {name!r}{few}. Is it the right column, "
            "and the right --task? If so, empty the cells of rare classes, merge classes, or add rows."
        )
    names = counts.index.to_series()
    numbers = dict(zip(names, parse_numbers(names, "decimal point"), strict=True))
    return tuple(sorted(names, key=lambda one: (numpy.isnan(numbers[one]), numpy.nan_to_num(numbers[one]), one)))


@dataclass(frozen=True)
class RowSplit:
    """Positions of rows in the table."""

    train: Any  # rows of the final training
    validation: tuple[Any, ...]  # sets of training rows that are predicted by models trained without them
    test: Any  # never trained on
    unlabelled: Any  # rows without a target, which are only predicted

    def names(self) -> Any:
        """The part that each row belongs to, in words."""
        names = numpy.full(len(self.train) + len(self.test) + len(self.unlabelled), "train", dtype=object)
        names[self.test], names[self.unlabelled] = "held out", "no target"
        return names


def split_rows(values: Any, target: Target, test: float, seed: int, groups: pandas.Series | None = None) -> RowSplit:
    """Draw the parts at random, with the same share of each class; targets (m,) are numbers, NaN if missing.

    Rows with the same value in `groups` (m,) stay together in one part, where classes may then have other shares.

    Examples:
        >>> split = split_rows(numpy.arange(100.0), Target("y", "regression"), 0.2, 0)
        >>> len(split.train), [len(rows) for rows in split.validation], len(split.test)
        (80, [12, 12, 12, 11, 11, 11, 11], 20)
    """
    known, generator = numpy.flatnonzero(numpy.isfinite(values)), numpy.random.default_rng(seed)
    share, unlabelled = min(test, MAX_TEST_ROWS / len(known)), numpy.flatnonzero(numpy.isnan(values))
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


def _draw(strata: list[Any], share: float, generator: numpy.random.Generator) -> tuple[Any, list[Any]]:
    """A share of each stratum, at least one row if the stratum has two; and the rest of the strata."""
    counts = [max(round(share * len(rows)), int(share > 0 and len(rows) >= 2)) for rows in strata]
    drawn = [generator.permutation(rows)[:count] for rows, count in zip(strata, counts, strict=True)]
    left = [rows[~numpy.isin(rows, some)] for rows, some in zip(strata, drawn, strict=True)]
    return numpy.sort(numpy.concatenate(drawn)), left


def _split_groups(
    known: Any, values: Any, target: Target, share: float, groups: pandas.Series, generator: numpy.random.Generator
) -> tuple[Any, tuple[Any, ...], Any]:
    """The same for whole groups, in random order: each goes to the part with the fewest rows for its share."""
    codes = groups.iloc[known].factorize()[0]
    codes = numpy.where(codes < 0, len(known) + numpy.arange(len(known)), codes)  # a row without a group is its own
    _, codes, sizes = numpy.unique(codes, return_inverse=True, return_counts=True)
    if len(sizes) < MIN_GROUPS:
        raise InputError(
            f"expected at least {MIN_GROUPS} groups of rows with a value of {target.name!r}, to train on some and test "
            f"on others, got {len(sizes)}. Leave out --groups, or name another column."
        )
    shares = numpy.array([share, *[(1 - share) / FOLDS] * FOLDS])
    part, rows = numpy.zeros(len(sizes), dtype=int), numpy.zeros(len(shares))
    for group in generator.permutation(len(sizes)):
        part[group] = numpy.argmin(rows / shares)
        rows[part[group]] += sizes[group]
    held_out, *folds = (known[part[codes] == one] for one in range(len(shares)))
    train = numpy.sort(numpy.concatenate(folds))
    absent = [name for index, name in enumerate(target.classes) if not (values[train] == index).any()]
    if absent:
        raise InputError(
            f"expected rows of every class of {target.name!r} in several groups, got {absent[0]!r} in held-out ones "
            "alone. Leave out --groups, or pass another --seed."
        )
    return train, tuple(folds if len(train) <= SMALL else folds[:1]), held_out


LEAK = 0.99  # share of the target's variance, or of the errors of the most frequent class, that one column explains
MOST_ROWS = 5_000  # checked for leaks, evenly spaced


def leak_notes(columns: Sequence[Column], frame: pandas.DataFrame, target: Target) -> list[str]:
    """Notes on columns that alone predict the target nearly perfectly, in a cross-validated tree."""
    # an extra: only tables need it
    from sklearn.model_selection import KFold, cross_val_predict
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    some = frame.iloc[numpy.linspace(0, len(frame) - 1, min(MOST_ROWS, len(frame))).round().astype(int)]
    values, notes = target.parse(some[target.name]), []
    tree = (DecisionTreeClassifier if target.classes else DecisionTreeRegressor)(random_state=0)
    base = 1 - numpy.bincount(values.astype(int)).max() / len(values) if target.classes else values.var()
    for column in columns:
        inputs = column.encode(some[column.name])
        found = cross_val_predict(tree, inputs, values, cv=KFold(5, shuffle=True, random_state=0))
        error = (found != values).mean() if target.classes else ((found - values) ** 2).mean()
        if error < (1 - LEAK) * base:
            notes.append(
                f"{column.name!r} alone predicts {target.name!r} nearly perfectly: if it is not known before "
                f"{target.name!r} is, it is a leak; leave it out with --ignore {column.name!r}"
            )
    return notes
