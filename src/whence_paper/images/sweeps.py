"""One quantity goes through several values in all draws: tables of the scores, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence_paper.experiment import Settings
from whence_paper.pictures import new_figure, runs_of_scores, save
from whence_paper.records import Record, Run
from whence_paper.tables import Table, mean_and_sd, write_tables

CASES = ("mnist", "fashion-mnist")


@dataclass(frozen=True)
class Sweep:
    """What is varied, and how it is shown.

    Attributes:
        key: of the varied quantity in a run's configuration.
        head: of its column in the tables.
        scores: names of the scores in a run's results, with those of their columns.
        asked: keys of the results with the words for their tables; the first is drawn.
        drawn: names of the scores in the picture, with those of its legend.
        axis: options of the picture's axes.
        label: of its vertical axis.
    """

    key: str
    head: str
    scores: Mapping[str, str]
    asked: Mapping[str, str]
    drawn: Mapping[str, str]
    axis: Mapping[str, Any]
    label: str

    def values(self, runs: Sequence[Run], asked: str) -> tuple[list[float], dict[str, list[list[float]]]]:
        """The places, and at each of them what every run has for each score."""
        places = sorted({run.configuration[self.key] for run in runs})
        at = [[run for run in runs if run.configuration[self.key] == place] for place in places]
        return places, {name: [[run.results[asked][name] for run in some] for some in at] for name in self.scores}

    def tables(self, about: str, runs: Sequence[Run]) -> Iterator[Table]:
        """One for each question."""
        for asked, words in self.asked.items():
            places, values = self.values(runs, asked)
            table = Table(f"{about}: {words}", (self.head, *self.scores.values()))
            for at, place in enumerate(places):
                table.add(f"{place:g}", *(mean_and_sd(values[name][at]) for name in self.scores))
            yield table

    def show(self, settings: Settings, record: Record) -> list[Path]:
        """The tables of every group, and a picture with one panel for each."""
        found = list(self.groups(record))
        figure = new_figure(4.6 * len(found) + 1, 3.8)
        axes = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
        for ax, (_, runs) in zip(axes, found, strict=True):
            places, values = self.values(runs, next(iter(self.asked)))
            runs_of_scores(ax, places, {name: values[name] for name in self.drawn})
            about = runs[0].configuration
            title = f"{about['data']}, {about['network']},\n{about['optimiser']}, {about['size']} images"
            ax.set(title=title, **self.axis)
        axes[0].set_ylabel(self.label)
        handles, _ = axes[0].get_legend_handles_labels()
        axes[0].legend(handles, list(self.drawn.values()), frameon=False)
        tables = [table for about, runs in found for table in self.tables(about, runs)]
        written = write_tables(settings.out / f"{record.path.stem}.md", tables)
        return [*written, save(figure, settings.out / f"{record.path.stem}.png")]

    def groups(self, record: Record) -> Iterator[tuple[str, list[Run]]]:
        """Runs that differ in draw and varied quantity only, and what they share; first those on all images."""
        for case in CASES:
            found: dict[str, list[Run]] = {}
            for run in record.runs(case=case):
                same = {key: value for key, value in run.configuration.items() if key not in ("seed", self.key)}
                found.setdefault(str(sorted(same.items())), []).append(run)
            for runs in sorted(found.values(), key=lambda runs: runs[0].configuration["size"] != "all"):
                about = runs[0].configuration
                draws = len({run.configuration["seed"] for run in runs})
                size = f"{about['size']} images" + (f", {about['fit size']} to fit" if "fit size" in about else "")
                yield f"{case}, {about['optimiser']}, {size}, {about['fit']}, {draws} draws", runs
