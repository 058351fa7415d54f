"""`whence fit`: fit a network that a Python file defines, or a language model in a folder with its texts."""

from __future__ import annotations

import inspect
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
from whence.cli.texts import DESCRIPTION, LanguageModel
from whence.errors import InputError, did_you_mean
from whence.tabular.fitted import check_folder

SAMPLE, SECONDS = 8, 20.0  # predictions checked by trust, and its time limit


@console.handle_errors
def fit(
    spec: Annotated[
        Path, Argument(help="A Python file with model(), train_loader(), perhaps test_loader(); or a model's folder.")
    ],
    texts: Annotated[Path | None, Option(help="JSONL file of a language model's training texts.")] = None,
    tokens: Annotated[int, Option(min=2, help="Most tokens of a text that are read.")] = 512,
    ridge: Annotated[str | None, Option(help="Lambda on the sum scale, auto or loo.")] = None,
    structure: console.Structure = None,
    recenter: Annotated[bool, Option("--recenter", help="Take the last step to the optimum in the fit.")] = False,
    trust: Annotated[bool, Option("--trust/--no-trust", help="Check on a sample how far to trust the fit.")] = True,
    save: Annotated[Path | None, Option(help="Save the fit in this file; with --texts, in this folder.")] = None,
    out: console.Report = None,
    as_json: console.AsJson = False,
    quiet: console.Quiet = False,
) -> None:
    """Fit your own network, defined by a Python file, which is run; or a language model and its texts.

    The file defines `model()`, which returns the trained network, and `train_loader()` with the data it was
    trained on. It may define `test_loader()`, for the report, and `fit_options()`, a dict of arguments of
    whence.fit, such as the likelihood; options given here take precedence.

    A language model was saved in a folder by Hugging Face's save_pretrained, with its tokenizer. Its linear layers are
    fitted. Each line of the JSONL file has a "text", or a "prompt" and a "completion". The most doubtful texts are
    listed.

    Examples:
    - `whence fit network.py --save network.whence`
    - `whence fit network.py --ridge 5 --structure core --out report.html`
    - `whence fit model-folder --texts train.jsonl --ridge 10 --save fitted`
    """
    began = time.perf_counter()
    console.check_writable(save if texts is None else None, out, read=(spec, texts))
    if texts is None and spec.is_dir():
        stop(f"expected --texts, the JSONL file that the language model in {spec} was trained on, got none.")
    if texts is not None and save is not None:
        check_folder(save, DESCRIPTION)
    source = SpecFile(spec) if texts is None else LanguageModel(spec, texts, tokens)
    test = source.test_loader()
    if out is not None and test is None:
        stop(f"expected {spec} to define test_loader(), the inputs of the report, got none. Define it, or drop --out.")
    model = source.model()
    given = {"ridge": _number_or_word(ridge), "structure": structure, "recenter": recenter or None}
    options = {**source.options(model), **{name: value for name, value in given.items() if value is not None}}
    tracer = whence.fit(model, source.train_loader(), **{"progress": not quiet, **options})
    if save is not None:
        source.save(tracer, save)
    trusted = tracer.trust(test, sample=SAMPLE, seconds=SECONDS) if trust else None
    if out is not None:
        write_report(tracer, out, source.test_loader(), trusted)
    output, files = Output(as_json), {"report": out, "saved": save}
    content = _print_fit(output, tracer, trusted)
    suspects = source.suspects(tracer)
    if suspects:
        output.head("Texts to check first")
        output.rows([[*one.values()] for one in suspects], list(suspects[0]), right=(0, 1))
        content["suspects"] = suspects
    output.files(files)
    output.finish({**content, "files": files, "seconds": round(time.perf_counter() - began, 1)})


def _number_or_word(given: str | None) -> float | str | None:
    """A number, or a word that `whence.fit` will check."""
    try:
        return None if given is None else float(given)
    except ValueError:
        return given


def _print_fit(output: Output, tracer: whence.Tracer, trust: whence.Trust | None) -> dict[str, Any]:
    """Print the results of the fit for people, and return them for scripts."""
    found = {one.name: one for one in tracer.diagnostics}["trust"]
    findings = [one for one in tracer.diagnostics if one.name not in ("note", "trust")]
    notes = [str(one.value) for one in tracer.diagnostics if one.name == "note"]
    output.fact("Fit", repr(tracer).removeprefix("Tracer(").removesuffix(")"))
    output.head("What the fit found")
    output.rows([[one.name, one.shown, one.words] for one in findings], right=(1,))
    output.notes(notes)
    output.head("How far to trust it")
    output.say(f"{found.value}: {found.words}" if trust is None else str(trust))
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
    """Write the report on all inputs; these and training examples are numbered from one, as by the other commands."""
    counts = {"row": len(tracer.predict(inputs)), "training example": tracer.problem.n}
    ids = [[f"{name} {number}" for number in range(1, total + 1)] for name, total in counts.items()]
    tracer.report(out, inputs, ids=tuple(ids), trust=trust)


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
        """What one of its functions returns."""
        return self._run(self._names[name], f"{name}()")

    def model(self) -> nn.Module:
        """The trained network, in evaluation mode."""
        model = self.call("model")
        if not isinstance(model, nn.Module):
            got = type(model).__name__
            raise InputError(f"expected model() in {self.path} to return a torch.nn.Module, got {got}.")
        return model.eval()

    def train_loader(self) -> Any:
        """The training data."""
        return self.call("train_loader")

    def test_loader(self) -> Any:
        """The inputs of predictions and reports, or `None`."""
        return self.call("test_loader") if self.has("test_loader") else None

    def options(self, model: nn.Module) -> dict[str, Any]:
        """Arguments of `whence.fit`."""
        options = self.call("fit_options") if self.has("fit_options") else {}
        if not isinstance(options, dict):
            raise InputError(f"expected fit_options() in {self.path} to return a dict, got {type(options).__name__}.")
        known = set(inspect.signature(whence.fit).parameters)
        for name in options:
            if name not in known:
                wanted = f"expected arguments of whence.fit from fit_options() in {self.path}"
                raise InputError(f"{wanted}, got {name!r}.{did_you_mean(name, known)}")
        return options

    def save(self, tracer: whence.Tracer, path: Path) -> None:
        """Write the fit to a file."""
        tracer.save(path)

    def suspects(self, tracer: whence.Tracer) -> list[dict[str, Any]]:
        """Return none: only the file knows what the examples are."""
        return []

    def _run(self, work: Callable[[], Any], what: str) -> Any:
        try:
            return work()
        except whence.WhenceError:
            raise
        except Exception as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(self.path)]
            where = f", line {frames[-1].lineno}" if frames else ""
            raise InputError(f"{what} in {self.path} failed{where}: {type(error).__name__}: {error}") from error
