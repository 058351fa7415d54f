"""`whence fit`: fit a network that a Python file defines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import whence
from whence.cli import options as shared
from whence.cli.demo import check_parent
from whence.cli.leaving import guarded, stop
from whence.cli.output import Output, figure, plain
from whence.cli.spec_files import SpecFile
from whence.tabular.saved import FIT, check_folder, replacing_folder

FORMAT, VERSION, DESCRIPTION = "whence spec", 1, "spec.json"
SAMPLE, SECONDS = 8, 20.0
"""Predictions that trust is about, and how long it may take."""


@guarded
def fit(
    spec: Annotated[Path, typer.Argument(help="A Python file with model(), train_loader(), perhaps test_loader().")],
    likelihood: Annotated[
        str | None, typer.Option(help="The loss it was trained with: gaussian, categorical or bernoulli.")
    ] = None,
    structure: Annotated[shared.Structure | None, typer.Option(help="Of the curvature; exact by default.")] = None,
    parameters: Annotated[
        list[str] | None, typer.Option(help="all, last_layer, or patterns of names; may be given several times.")
    ] = None,
    ridge: Annotated[str | None, typer.Option(help="Lambda on the sum scale, or loo.")] = None,
    recenter: Annotated[bool, typer.Option("--recenter", help="Take the last step to the optimum in the fit.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust/--no-trust", help="Look at a sample closely: how far to trust the fit.")
    ] = True,
    save: Annotated[Path | None, typer.Option(help="Keep the fit in this folder.")] = None,
    out: shared.Report = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
) -> None:
    """Fit a network of your own, defined by a Python file, which is run.

    The file defines `model()`, which returns the trained network, `train_loader()` with the data it was
    trained on, and perhaps `test_loader()`, which the report is about, and `fit_options()`, a dict of
    arguments of whence.fit; what is given here wins.

    Examples:
    - `whence fit network.py --save fitted`
    - `whence fit network.py --likelihood categorical --ridge 5 --structure core --out report.html`
    """
    began = time.perf_counter()
    check_parent(out)
    output = Output(as_json)
    source = SpecFile(spec)
    if out is not None and not source.has("test_loader"):
        stop(f"expected {spec} to define test_loader(), which a report is about, got none. Define it, or drop --out.")
    if save is not None:
        check_folder(save, DESCRIPTION)
    chosen = source.options()
    given: dict[str, Any] = {
        "likelihood": likelihood,
        "structure": None if structure is None else structure.value,
        "parameters": _one_or_many(parameters),
        "ridge": _ridge(ridge),
        "recenter": recenter or None,
    }
    chosen.update({name: value for name, value in given.items() if value is not None})
    tracer = whence.fit(source.model(), source.loader("train_loader"), **{"progress": not quiet, **chosen})
    if save is not None:
        with replacing_folder(save, DESCRIPTION) as new:
            tracer.save(new / FIT)
            kept = {"format": FORMAT, "version": VERSION, "whence": whence.__version__, "spec": spec.name}
            about = {**kept, "sha256": source.digest, "options": plain(chosen)}
            (new / DESCRIPTION).write_text(json.dumps(about, indent=1), encoding="utf-8")
    asked = source.loader("test_loader") if source.has("test_loader") else None
    trusted = tracer.trust(asked, sample=SAMPLE, seconds=SECONDS) if trust else None
    if out is not None:
        write_report(tracer, out, source.loader("test_loader"), trusted)
    _tell(output, tracer, trusted, {"report": out, "saved": save}, time.perf_counter() - began)


def _tell(
    output: Output,
    tracer: whence.Tracer,
    trust: whence.Trust | None,
    files: dict[str, Path | None],
    seconds: float,
) -> None:
    findings = [one for one in tracer.diagnostics if one.name != "note"]
    notes = [str(one.value) for one in tracer.diagnostics if one.name == "note"]
    output.say(repr(tracer))
    output.head("What the fit found")
    shown = [[one.name, one.value if isinstance(one.value, str) else figure(one.value), one.words] for one in findings]
    output.rows(["", "", ""], shown, right=(1,))
    for note in notes:
        output.fact("Note", note)
    if trust is not None:
        output.head("How far to trust it")
        output.rows(["", "", ""], [[check.level, check.name, check.text] for check in trust])
    for name, path in files.items():
        if path is not None:
            output.file(name.capitalize(), path)
    output.finish(
        {
            "examples": tracer.problem.n,
            "outputs": tracer.problem.k,
            "parameters": tracer.problem.selection.size,
            "likelihood": tracer.problem.likelihood.name,
            "ridge": tracer.ridge,
            "degrees_of_freedom": tracer.degrees_of_freedom,
            "diagnostics": {one.name: one.value for one in findings},
            "notes": notes,
            "trust": None if trust is None else {check.name: check.level for check in trust},
            "files": files,
            "seconds": round(seconds, 1),
        }
    )


def write_report(tracer: whence.Tracer, out: Path, inputs: Any, trust: whence.Trust | None = None) -> None:
    """The report on all inputs, which are counted from one, as by the other commands."""
    rows = len(tracer.predict(inputs))
    tracer.report(out, inputs, ids=[f"row {row}" for row in range(1, rows + 1)], trust=trust)


def _one_or_many(given: list[str] | None) -> str | list[str] | None:
    return given[0] if given is not None and len(given) == 1 else given or None


def _ridge(given: str | None) -> float | str | None:
    """A number, or a word that `whence.fit` will judge."""
    if given is None:
        return None
    try:
        return float(given)
    except ValueError:
        return given
