"""What the studies of tracing share: data sets with their networks, draws, and lists of structures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import whence

from .data import Split, read_digits
from .record import surroundings

DEVELOPMENT = (0, 1, 2, 3, 4)
"""Draws at which scores and thresholds may be looked at while they are made. No published number comes from them."""

UNSEEN = (100, 101, 102, 103, 104)
"""Draws that were first looked at when scores and thresholds were final; 200 to 204 where a fault was found after."""

WEIGHT_DECAY = 1e-2
"""The paper's."""


@dataclass(frozen=True)
class Case:
    """A data set and the network that learns it.

    Attributes:
        data: name of the data set.
        n: training examples.
        test: test points.
        make: the network, from the number of its outputs.
        describe: the network in words.
    """

    data: str
    n: int
    test: int
    make: Callable[[int], nn.Module]
    describe: str


@dataclass(frozen=True)
class Study(Case):
    """The same, and how it is trained and fitted.

    Attributes:
        epochs: passes over the training set.
        structures: what is fitted, as `structure[:option=value][@parameters]`; the first is the main one.
    """

    epochs: int
    structures: tuple[str, ...]


def arguments(
    about: str | None, cases: Iterable[str], record: str, seeds: Sequence[int] = UNSEEN
) -> argparse.ArgumentParser:
    """The options that all studies have.

    Args:
        about: what the study is, for its help.
        cases: names of its data sets.
        record: name of its record.
        seeds: draws it takes if not told.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mnist/ and fashion-mnist/")
    parser.add_argument("--cases", nargs="+", choices=list(cases), default=list(cases))
    parser.add_argument("--structures", nargs="+", help="in place of each case's")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    parser.add_argument("--n", type=int, help="training examples, in place of each case's")
    parser.add_argument("--test", type=int, help="test points, in place of each case's")
    parser.add_argument("--epochs", type=int, help="in place of each case's")
    parser.add_argument("--keep", type=Path, default=Path("out/networks"), help="where trained networks are kept")
    parser.add_argument("--out", type=Path, default=Path(f"out/{record}.json"))
    parser.add_argument("--append", action="store_true", help="add draws to a record, in place of those it has")
    return parser


def adjusted(study: Study, given: argparse.Namespace) -> Study:
    """A case as it was asked for."""
    return replace(
        study,
        n=given.n or study.n,
        test=given.test or study.test,
        epochs=given.epochs or study.epochs,
        structures=tuple(given.structures or study.structures),
    )


def read(name: str, folder: Path | None) -> Split:
    """The digits of scikit-learn, or MNIST and Fashion-MNIST from a folder."""
    if name == "digits":
        return eight_by_eight()
    if folder is None:
        raise SystemExit(f"expected --data DIR with {name}/ in it, got none. Or take --cases digits.")
    return read_digits(folder, name)


def eight_by_eight(train: int = 1300) -> Split:
    """The 1,797 digits of 8 x 8 pixels that come with scikit-learn, cut in two in a fixed random order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(data.data).float()[order]
    pixels = (pixels - pixels.mean()) / pixels.std()
    labels = torch.from_numpy(data.target).long()[order]
    return Split(pixels[:train], labels[:train], pixels[train:], labels[train:])


def options(text: str) -> dict[str, Any]:
    """Arguments of `whence.fit` from a text such as "core:size=1024" or "exact@last_layer"."""
    head, _, parameters = text.partition("@")
    name, _, rest = head.partition(":")
    given = {key: int(value) for key, _, value in (part.partition("=") for part in rest.split(",") if part)}
    kinds = {"core": whence.Core, "ekfac": whence.EKFAC, "exact": whence.Exact, "sketch": whence.Sketch}
    return {"structure": kinds[name](**given), "parameters": parameters or "all"}


def stage(seed: int) -> str:
    """Whether a draw may have been looked at before scores and thresholds were final."""
    return "development" if seed in DEVELOPMENT else "unseen"


def open_record(path: Path, append: bool, **more: Any) -> dict[str, Any]:
    """A new record, or the one that is there with its rows and the commands that made them."""
    old: dict[str, Any] = json.loads(path.read_text()) if append and path.exists() else {}
    new = surroundings()
    before = old.get("commands", [old["command"]] if old else [])
    return {**new, **more, "commands": [*before, new["command"]], "rows": old.get("rows", [])}


def put(record: dict[str, Any], row: dict[str, Any], keys: Sequence[str]) -> None:
    """Add a row, in place of one with the same keys."""
    same = [old for old in record["rows"] if all(old[key] == row[key] for key in keys)]
    record["rows"] = [old for old in record["rows"] if old not in same]
    record["rows"].append({**row, "stage": stage(row["seed"]), "commit": record["commit"], "when": record["when"]})
