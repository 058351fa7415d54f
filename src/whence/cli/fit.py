"""`whence fit`: fit a network that a Python file defines."""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from torch import nn
from typer import Argument, Option

import whence
from whence.cli import console
from whence.cli.console import Output, stop
from whence.errors import InputError

SAMPLE, SECONDS = 8, 20.0  # predictions checked by trust, and its time limit


@console.handle_errors
def fit(
    spec: Annotated[Path, Argument(help="A Python file with model(), train_loader() and perhaps test_loader().")],
    trust: Annotated[bool, Option("--trust/--no-trust", help="Check on a sample how far to trust the fit.")] = True,
    save: Annotated[Path | None, Option(help="Save the fit in this file.", dir_okay=False)] = None,
    out: console.Report = None,
    as_json: console.AsJson = False,
    quiet: console.Quiet = False,
) -> None:
    """Fit your own network, defined by a Python file, which is run.

    The file defines `model()`, which returns the trained network, and `train_loader()` with the data it was
    trained on. It may define `test_loader()`, for the report, and `fit_options()`, a dict of arguments of
    whence.fit, such as the likelihood and the ridge.

    Examples: `whence fit network.py --save network.whence`, `whence fit network.py --out report.html`
    """
    began = time.perf_counter()
    console.check_writable(save, out, read=(spec,))
    source = SpecFile(spec)
    test = source.call("test_loader") if source.has("test_loader") else None
    if out is not None and test is None:
        stop(f"expected {spec} to define test_loader(), the inputs of the report, got none. Define it, or drop --out.")
    options = source.call("fit_options") if source.has("fit_options") else {}
    if not isinstance(options, dict):
        stop(f"expected fit_options() in {spec} to return a dict, got {type(options).__name__}.")
    tracer = whence.fit(source.model(), source.call("train_loader"), **{"progress": not quiet, **options})
    if save is not None:
        tracer.save(save)
    trusted = tracer.trust(test, sample=SAMPLE, seconds=SECONDS) if trust else None
    if out is not None:
        write_report(tracer, out, source.call("test_loader"), trusted)
    output, files = Output(as_json), {"report": out, "saved": save}
    content = _print_fit(output, tracer, trusted)
    output.files(files)
    output.finish({**content, "files": files, "seconds": round(time.perf_counter() - began, 1)})


def _print_fit(output: Output, tracer: whence.Tracer, trust: whence.Trust | None) -> dict[str, Any]:
    """Print the results of the fit for people, and return them for scripts."""
    found = {one.name: one for one in tracer.diagnostics}["trust"]
    findings = [one for one in tracer.diagnostics if one.name not in ("note", "trust")]
    notes = [str(one.value) for one in tracer.diagnostics if one.name == "note"]
    output.say(repr(tracer))
    output.head("What the fit found")
    output.rows([[one.name, one.shown, one.words] for one in findings], right=(1,))
    output.notes(notes)
    output.head("How far to trust it")
    output.say(f"  {found.value}: {found.words}" if trust is None else f"  {trust.headline}")
    if trust is not None:
        output.rows([[check.level, check.name, check.text] for check in trust])
    return {
        "examples": tracer.problem.n,
        "outputs": tracer.problem.k,
        "parameters": tracer.problem.selection.size,
        "likelihood": tracer.problem.likelihood.name,
        "ridge": tracer.ridge,
        "degrees_of_freedom": tracer.degrees_of_freedom,
        "diagnostics": {one.name: one.value for one in findings},
        "notes": notes,
        "trust": {"level": trust.level if trust else found.value, **{one.name: one.level for one in trust or ()}},
    }


def write_report(tracer: whence.Tracer, out: Path, inputs: Any, trust: whence.Trust | None = None) -> None:
    """Write the report on all inputs, numbered from one, as by the other commands."""
    rows = len(tracer.predict(inputs))
    tracer.report(out, inputs, ids=[f"row {row}" for row in range(1, rows + 1)], trust=trust)


class SpecFile:
    """A Python file, which is run, with a network and its data; errors in it are reported as errors of that file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(f"expected a Python file with model() and train_loader(), got {path}, which is none.")
        self.path, folder = path, str(path.resolve().parent)
        sys.path.insert(0, folder)  # so that it can import its neighbours, as when run by itself
        try:
            self._names = self._run(lambda: runpy.run_path(str(path), run_name="whence_spec"), "the file")
        finally:
            sys.path.remove(folder)
        missing = " and no ".join(name for name in ("model", "train_loader") if not self.has(name))
        if missing:
            raise InputError(f"expected {path} to define functions model() and train_loader(), got no {missing}.")

    def has(self, name: str) -> bool:
        """Whether it defines this function."""
        return callable(self._names.get(name))

    def call(self, name: str) -> Any:
        """What one of its functions returns, such as `test_loader`."""
        if not self.has(name):
            raise InputError(f"expected {self.path} to define a function {name}(), got none.")
        return self._run(self._names[name], f"{name}()")

    def model(self) -> nn.Module:
        """The trained network, in evaluation mode."""
        model = self.call("model")
        if not isinstance(model, nn.Module):
            got = type(model).__name__
            raise InputError(f"expected model() in {self.path} to return a torch.nn.Module, got {got}.")
        return model.eval()

    def _run(self, work: Callable[[], Any], what: str) -> Any:
        try:
            return work()
        except whence.WhenceError:
            raise
        except Exception as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(self.path)]
            where = f", line {frames[-1].lineno}" if frames else ""
            raise InputError(f"{what} in {self.path} failed{where}: {type(error).__name__}: {error}") from error
