"""A saved fit together with the inputs it is asked about: rows of a table, or what a function of a spec gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import whence
from whence.cli import fit as fits
from whence.cli.opened_table import OpenedTable
from whence.cli.spec_files import SpecFile
from whence.cli.table_output import advice_for
from whence.display import number
from whence.errors import CorruptArtifactError, InputError
from whence.runtime.progress import Progress
from whence.tabular import saved
from whence.tabular.reading import read_table
from whence.tabular.scores import Score

if TYPE_CHECKING:
    import pandas


class Opened(Protocol):
    """What the commands ask."""

    stem: str
    unit: str
    notes: list[str]
    heads: tuple[str, str]

    def frame(self, verdicts: bool) -> pandas.DataFrame:
        """One line for each prediction."""

    def scores(self) -> list[Score]:
        """How good the predictions are, where targets came along."""

    def places(self, rows: list[int] | None) -> list[int]:
        """Places of the rows that were asked about, or of the most uncertain."""

    def explain(self, places: list[int], top: int) -> list[dict[str, Any]]:
        """What is behind some predictions."""

    def report(self, out: Path) -> None:
        """Write the HTML report."""


def open_saved(
    folder: Path,
    data: Path | None,
    spec: Path | None,
    loader: str,
    rows: int,
    delimiter: str | None,
    *,
    progress: bool,
) -> Opened:
    """Load what was saved, and read what it is asked about.

    Args:
        folder: where it was saved.
        data: new rows, for a table.
        spec: the Python file, for a network of the user's own.
        loader: the function of that file that gives the inputs.
        rows: how many rows of the data to take at most; all when zero.
        delimiter: between cells.
        progress: show how far along long work is.
    """
    if (folder / fits.DESCRIPTION).is_file():
        return _open_spec(folder, data, spec, loader, progress)
    if spec is not None:
        raise InputError(f"expected a folder written by `whence fit --save` with --spec, got {folder}, which is none.")
    kept = saved.read_description(folder)
    if data is None:
        raise InputError(f"expected a file with new rows, got none. Columns it needs: {', '.join(_names(kept))}.")
    table = read_table(data, rows, delimiter=delimiter, progress=Progress(progress))
    return OpenedTable(saved.load_saved(folder, progress), table, data)


def _names(description: dict[str, Any]) -> list[str]:
    return [str(column["name"]) for column in description.get("columns", [])]


def _open_spec(folder: Path, data: Path | None, spec: Path | None, loader: str, progress: bool) -> Opened:
    path = folder / fits.DESCRIPTION
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        known, name, digest = about["format"] == fits.FORMAT, about["spec"], about["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifactError(f"expected the description of a saved fit, got damaged JSON: {path}.") from error
    if not known or about["version"] != fits.VERSION:
        raise CorruptArtifactError(f"expected {fits.FORMAT!r} of version {fits.VERSION} in {path}, got something else.")
    if spec is None:
        raise InputError(
            f"expected the Python file that this fit was made with ({name}), got none. Pass it: --spec {name}. It is "
            "not taken from the folder, since it will be run."
        )
    if data is not None:
        raise InputError(f"expected no data file with --spec, got {data}: the inputs come from {loader}() in {spec}.")
    source = SpecFile(spec)
    notes = [f"{spec.name} has changed since the fit was made"] * (source.digest != digest)
    tracer = whence.load(folder / saved.FIT, source.model(), source.loader("train_loader"), progress=progress)
    return OpenedSpec(tracer, source.loader(loader), spec.stem, notes)


class OpenedSpec:
    """A network of the user's own, and a loader of inputs."""

    unit = "example"
    heads = ("residual", "without it")

    def __init__(self, tracer: whence.Tracer, inputs: Any, stem: str, notes: list[str]) -> None:
        """Keep both."""
        self.tracer = tracer
        self.inputs = inputs
        self.stem = stem
        self.notes = notes

    def frame(self, verdicts: bool) -> pandas.DataFrame:
        """What `predict` and `explain` give, side by side."""
        u = self.tracer.predict(self.inputs)
        frame = u.to_frame()
        frame.insert(0, "row", range(1, len(frame) + 1))
        if _classes(u):
            chance, best = u.probabilities.max(dim=-1)
            frame.insert(1, "class", best.flatten().tolist())
            frame.insert(2, "probability", chance.flatten().tolist())
        if verdicts:
            why = self.tracer.explain(self.inputs).to_frame()
            for name in ("verdict", "noise_p", "scarcity_p", "check", "near"):
                frame[name] = why[name]
        return frame

    def scores(self) -> list[Score]:
        """None: what the targets mean is the user's."""
        return []

    def places(self, rows: list[int] | None) -> list[int]:
        """By HeC3, where nothing was asked for."""
        u = self.tracer.predict(self.inputs)
        return choose(rows, u.hec3.sum(1).tolist())

    def explain(self, places: list[int], top: int) -> list[dict[str, Any]]:
        """Verdicts and causes; training examples are counted from zero, as whence does."""
        verdicts = self.tracer.explain(self.inputs, top=top)
        shares = self.tracer.attribute(self.inputs, top=top)
        u = self.tracer.predict(self.inputs)
        residuals, left_out = self.tracer.residuals.norm(dim=1), self.tracer.loo_residuals.norm(dim=1)
        found = []
        for place in places:
            causes = [
                {
                    "row": at,
                    "hec3": float(shares.hec3.share[place, rank]),
                    "label": number(float(residuals[at])),
                    "without": number(float(left_out[at])),
                }
                for rank, at in enumerate(shares.hec3.index[place].tolist())
            ]
            found.append(
                {
                    "row": place + 1,
                    "prediction": _answer(u, place),
                    "verdict": verdicts.verdicts[place],
                    "because": verdicts.sentence(place).partition(": ")[2],
                    "advice": advice_for(verdicts.verdicts[place]),
                    "causes": causes,
                }
            )
        return found

    def report(self, out: Path) -> None:
        """The report on all inputs."""
        fits.write_report(self.tracer, out, self.inputs)


def _classes(u: whence.Uncertainty) -> bool:
    """Whether one class of several is predicted."""
    known = u.likelihood
    return known is not None and known.has_classes and known.couples_outputs and u.chosen is None


def _answer(u: whence.Uncertainty, place: int) -> str:
    """A prediction in words: the class, the probability of one class, or the outputs."""
    if _classes(u) and u.mean.ndim == 2:
        chance, best = u.probabilities[place].max(dim=-1)
        return f"class {int(best)}, probability {float(chance):.3f}"
    return ", ".join(number(value, 4) for value in u.mean[place].flatten().tolist())


def choose(rows: list[int] | None, variances: list[float], most: int = 3) -> list[int]:
    """Places of the rows asked about, or of those with the largest variances.

    Examples:
        >>> choose(None, [1.0, 5.0, 3.0], most=2), choose([3], [1.0, 5.0, 3.0])
        ([1, 2], [2])
    """
    if rows is None:
        return sorted(range(len(variances)), key=lambda at: (math.isnan(variances[at]), -variances[at]))[:most]
    beyond = [row for row in rows if row > len(variances)]
    if beyond:
        raise InputError(f"expected rows from 1 to {len(variances)}, got {', '.join(map(str, beyond))}.")
    return [row - 1 for row in rows]
