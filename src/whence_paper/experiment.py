"""What all experiments share: their options, their record, and the order compute, show, check.

An experiment is a module with `main = Experiment(...).main`, named in pyproject.toml among the entry points
"whence.experiments", from which `whence reproduce` knows it. The first line of its description is what `--list` prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .provenance import command_line
from .records import Record


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes:
        data: folder of the data sets; `None` for the public sources, or what scikit-learn ships where `quick`.
        quick: a small version that takes seconds.
        device: where networks are trained and fitted.
        seeds: one run each.
        out: folder of the record, the tables and the figures.
        more: the experiment's own options.
    """

    data: Path | None
    quick: bool
    device: torch.device
    seeds: tuple[int, ...]
    out: Path
    more: argparse.Namespace

    def __getattr__(self, name: str) -> Any:
        """The experiment's own options, by their name."""
        if name.startswith("__") or name == "more":
            raise AttributeError(name)
        return getattr(self.more, name)

    def asked(self, record: Record) -> Iterator[tuple[int, dict[str, Any]]]:
        """Seed and results of those runs of a record that were asked for."""
        for run in record.runs():
            if run.configuration["seed"] in self.seeds:
                yield run.configuration["seed"], run.results


def _none(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


@dataclass(frozen=True)
class Experiment:
    """One of the paper's tables or figures.

    Attributes:
        name: as in `whence reproduce NAME`; also that of the record's file, with "-quick" after it where it is.
        about: description, for --help.
        compute: makes the runs that are missing from the record.
        show: prints tables and writes figures, from the record alone; gives back the files.
        check: what of the paper's findings does not show in the record, in words; nothing when all do.
        options: adds the experiment's own to a parser.
        runs: how many by default, in full and quick.
    """

    name: str
    about: str
    compute: Callable[[Settings, Record], None]
    show: Callable[[Settings, Record], list[Path]]
    check: Callable[[Settings, Record], list[str]] = lambda settings, record: []
    options: Callable[[argparse.ArgumentParser], None] = _none
    runs: tuple[int, int] = (5, 2)

    def main(self, arguments: list[str] | None = None) -> Record:
        """Compute, unless only to be drawn again; show; check.

        Raises:
            SystemExit: with `--quick`, when a finding of the paper is lost.
        """
        typed = sys.argv[1:] if arguments is None else arguments
        settings, redraw = self.parse(typed)
        record = Record(self.file(settings), self.name, command_line(f"whence reproduce {self.name}", typed))
        if redraw and not record.path.exists():
            raise SystemExit(f"expected a record at {record.path} to draw again, got none. Run without --redraw.")
        settings.out.mkdir(parents=True, exist_ok=True)
        if not redraw:
            self.compute(settings, record)
        for path in self.show(settings, record):
            print(f"wrote {path}")
        print(f"record: {record.path}")
        lost = self.check(settings, record)
        for words in lost:
            print(f"not as in the paper: {words}")
        if lost and settings.quick:
            raise SystemExit(1)
        return record

    def file(self, settings: Settings) -> Path:
        """The record's."""
        return settings.out / f"{self.name}{'-quick' if settings.quick else ''}.json"

    def parse(self, arguments: list[str]) -> tuple[Settings, bool]:
        """Read the command line; also whether results are only to be drawn again."""
        parser = argparse.ArgumentParser(
            prog=f"whence reproduce {self.name}",
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        full, quick = self.runs
        add = parser.add_argument
        add("--data", type=Path, help="folder of the data sets; without it they are downloaded and kept")
        add("--quick", action="store_true", help="a small version in seconds; fails where a finding is lost")
        add("--device", default="cpu", help="cpu or cuda (default cpu)")
        add("--seeds", type=int, help=f"number of runs (default {full}, quick {quick})")
        add("--first-seed", type=int, default=0, help="of the first run (default 0); the others count on")
        add("--out", type=Path, default=Path("out/paper"), help="folder of the results (default out/paper)")
        add("--redraw", action="store_true", help="draw from the record, compute nothing")
        self.options(parser)
        given = parser.parse_args(arguments)
        wanted = given.seeds if given.seeds is not None else quick if given.quick else full
        if wanted < 1:
            parser.error(f"expected --seeds of at least 1, got {wanted}")
        if given.data is not None and not given.data.is_dir():
            parser.error(f"expected --data to be a folder, got {given.data}, which is none")
        seeds = tuple(range(given.first_seed, given.first_seed + wanted))
        settings = Settings(given.data, given.quick, _device(parser, given.device), seeds, given.out, given)
        return settings, given.redraw


def _device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        parser.error(f"expected --device to be cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device for --device cuda, got none that torch can use. Take --device cpu.")
    return device
