"""`whence fit`: fit a network that a Python file defines by `model()`, `train_loader()` and perhaps `test_loader()`."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from torch import nn

import whence
from whence.cli import console
from whence.cli.console import Output, figure, jsonable, stop
from whence.cli.texts import TextFolder, beginning
from whence.errors import CorruptArtifactError, InputError
from whence.tabular.fitted import FIT, check_folder, replacing_folder

FORMAT, VERSION, DESCRIPTION = "whence spec", 1, "spec.json"
SUSPECTS = 10
"""Texts that are listed."""

SAMPLE, SECONDS = 8, 20.0
"""Predictions that trust is about, and how long it may take."""


@console.handle_errors
def fit(
    spec: Annotated[
        Path,
        typer.Argument(
            help="A Python file with model(), train_loader(), perhaps test_loader(); or a folder with a language model."
        ),
    ],
    texts: Annotated[
        Path | None, typer.Option(help="The JSONL file that the language model was trained on.", dir_okay=False)
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of a text that are read at most.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Texts that are run at once.")] = 8,
    likelihood: Annotated[
        str | None, typer.Option(help="The loss it was trained with: gaussian, categorical or bernoulli.")
    ] = None,
    structure: Annotated[
        console.Structure | None, console.one_of(console.Structure, "Of the curvature; exact by default.")
    ] = None,
    parameters: Annotated[
        list[str] | None, typer.Option(help="all, last_layer, or patterns of names; may be given several times.")
    ] = None,
    ridge: Annotated[str | None, typer.Option(help="Lambda on the sum scale, auto or loo.")] = None,
    recenter: Annotated[bool, typer.Option("--recenter", help="Take the last step to the optimum in the fit.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust/--no-trust", help="Examine a sample: how far to trust the fit.")
    ] = True,
    save: Annotated[Path | None, typer.Option(help="Keep the fit in this folder.")] = None,
    out: console.Report = None,
    as_json: console.AsJson = False,
    quiet: console.Quiet = False,
) -> None:
    """Fit a network of your own, defined by a Python file, which is run; or a language model and its texts.

    The file defines `model()`, which returns the trained network, `train_loader()` with the data it was
    trained on, and perhaps `test_loader()`, which the report is about, and `fit_options()`, a dict of
    arguments of whence.fit; what is given here wins.

    Of a language model, saved by Hugging Face's save_pretrained together with its tokenizer, the linear layers are
    fitted. Each line of the JSONL file has a "text", or a "prompt" and a "completion". The most doubtful texts are
    listed.

    Examples:
    - `whence fit network.py --save fitted`
    - `whence fit model-folder --texts train.jsonl --ridge 10 --save fitted`
    - `whence fit network.py --likelihood categorical --ridge 5 --structure core --out report.html`
    """
    began = time.perf_counter()
    console.check_writable(out)
    if spec.is_dir() and texts is None:
        stop(f"expected --texts, the JSONL file that the language model in {spec} was trained on, got none.")
    source = TextFolder(spec, texts, tokens, batch) if texts is not None else SpecFile(spec)
    if out is not None and not source.has("test_loader"):
        stop(f"expected {spec} to define test_loader(), which a report is about, got none. Define it, or drop --out.")
    if save is not None:
        check_folder(save, DESCRIPTION)
    given: dict[str, Any] = {
        "likelihood": likelihood,
        "structure": structure,
        "parameters": parameters[0] if parameters and len(parameters) == 1 else parameters or None,
        "ridge": _number_or_word(ridge),
        "recenter": recenter or None,
    }
    options = {**source.options(), **{name: value for name, value in given.items() if value is not None}}
    model = source.model()
    if isinstance(source, TextFolder) and "parameters" not in options:
        options["parameters"] = source.parameters(model)
    tracer = whence.fit(model, source.call("train_loader"), **{"progress": not quiet, **options})
    if save is not None:
        with replacing_folder(save, DESCRIPTION) as new:
            tracer.save(new / FIT)
            about = {"format": FORMAT, "version": VERSION, "whence": whence.__version__, "spec": spec.name}
            about |= {"sha256": source.digest, "options": jsonable(options)}
            about |= source.about if isinstance(source, TextFolder) else {}
            (new / DESCRIPTION).write_text(json.dumps(about, indent=1), encoding="utf-8")
    test = source.call("test_loader") if source.has("test_loader") else None
    trusted = tracer.trust(test, sample=SAMPLE, seconds=SECONDS) if trust else None
    if out is not None:
        write_report(tracer, out, source.call("test_loader"), trusted)
    suspects = _suspects(tracer, source) if isinstance(source, TextFolder) else []
    files = {"report": out, "saved": save}
    _print_fit(Output(as_json), tracer, trusted, files, time.perf_counter() - began, suspects)


def _suspects(tracer: whence.Tracer, source: TextFolder) -> list[dict[str, Any]]:
    """The most doubtful texts, counted from one."""
    frame = tracer.training_frame().sort_values("suspect_rank").head(SUSPECTS)
    return [
        {"text": int(at) + 1, "suspicion": float(row.suspicion), "begins": beginning(source.texts[int(at)])}
        for at, row in frame.iterrows()
    ]


def _print_fit(
    output: Output,
    tracer: whence.Tracer,
    trust: whence.Trust | None,
    files: dict[str, Path | None],
    seconds: float,
    suspects: list[dict[str, Any]],
) -> None:
    found = {one.name: one for one in tracer.diagnostics}["trust"]
    findings = [one for one in tracer.diagnostics if one.name not in ("note", "trust")]
    notes = [str(one.value) for one in tracer.diagnostics if one.name == "note"]
    output.say(repr(tracer))
    output.head("What the fit found")
    shown = [[one.name, one.value if isinstance(one.value, str) else figure(one.value), one.words] for one in findings]
    output.rows(shown, right=(1,))
    output.notes(notes)
    output.head("How far to trust it")
    output.say(f"  {found.value}: {found.words}" if trust is None else f"  {trust.headline}")
    if trust is not None:
        output.rows([[check.level, check.name, check.text] for check in trust])
    if suspects:
        output.head("Which texts to look at first")
        shown = [[str(one["text"]), figure(one["suspicion"]), one["begins"]] for one in suspects]
        output.rows(shown, ["text", "suspicion", "begins"], right=(0, 1))
    for name, path in files.items():
        if path is not None:
            output.file(name.capitalize(), path)
    output.finish(
        {
            **({"suspects": suspects} if suspects else {}),
            "examples": tracer.problem.n,
            "outputs": tracer.problem.k,
            "parameters": tracer.problem.selection.size,
            "likelihood": tracer.problem.likelihood.name,
            "ridge": tracer.ridge,
            "degrees_of_freedom": tracer.degrees_of_freedom,
            "diagnostics": {one.name: one.value for one in findings},
            "notes": notes,
            "trust": {"level": found.value} if trust is None else {"level": trust.level, **_levels(trust)},
            "files": files,
            "seconds": round(seconds, 1),
        }
    )


def _levels(trust: whence.Trust) -> dict[str, str]:
    return {check.name: check.level for check in trust}


def write_report(tracer: whence.Tracer, out: Path, inputs: Any, trust: whence.Trust | None = None) -> None:
    """Write the report on all inputs, which are counted from one, as by the other commands."""
    rows = len(tracer.predict(inputs))
    tracer.report(out, inputs, ids=[f"row {row}" for row in range(1, rows + 1)], trust=trust)


def load_fit(folder: Path, spec: Path | None, loader: str, progress: bool) -> tuple[whence.Tracer, Any, list[str]]:
    """The tracer that `whence fit --save` wrote, what the function `loader` of the spec returns, and notes.

    Of texts, their source in place of what a function returns.
    """
    path = folder / DESCRIPTION
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        written, name, digest = (about["format"], about["version"]), about["spec"], about["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifactError(f"expected the description of a saved fit, got damaged JSON: {path}.") from error
    if written != (FORMAT, VERSION):
        raise CorruptArtifactError(f"expected {FORMAT!r} of version {VERSION} in {path}, got something else.")
    if spec is None:
        raise InputError(
            f"expected the Python file that this fit was made with ({name}), got none. Pass it: --spec {name}. It is "
            "not taken from the folder, since it will be run."
        )
    if "texts" in about:
        source: Any = TextFolder(spec, Path(about["texts"]), int(about["tokens"]), int(about["batch"]))
    else:
        source = SpecFile(spec)
    notes = [f"{spec.name} has changed since the fit was made"] * (source.digest != digest)
    tracer = whence.load(folder / FIT, source.model(), source.call("train_loader"), progress=progress)
    return tracer, source if isinstance(source, TextFolder) else source.call(loader), notes


class SpecFile:
    """A Python file, which is run, with a network and its data; what goes wrong in it is a fault of that file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(
                f"expected a Python file that defines model() and train_loader(), got {path}, which does not exist."
            )
        self.path = path
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self._module = self._run()
        missing = [name for name in ("model", "train_loader") if not self.has(name)]
        if missing:
            raise InputError(
                f"expected {path} to define functions model() and train_loader(), got no {' and no '.join(missing)}."
            )

    def has(self, name: str) -> bool:
        """Whether it defines a function."""
        return callable(getattr(self._module, name, None))

    def call(self, name: str) -> Any:
        """What one of its functions returns, such as `test_loader`."""
        if not self.has(name):
            raise InputError(f"expected {self.path} to define a function {name}(), got none.")
        return self._blame(getattr(self._module, name), f"{name}()")

    def model(self) -> nn.Module:
        """The trained network, in evaluation mode."""
        model = self.call("model")
        if not isinstance(model, nn.Module):
            raise InputError(
                f"expected model() in {self.path} to return a torch.nn.Module, got {type(model).__name__}."
            )
        return model.eval()

    def options(self) -> dict[str, Any]:
        """Arguments of `whence.fit`, from `fit_options()` where it is defined."""
        found = self.call("fit_options") if self.has("fit_options") else {}
        if not isinstance(found, dict):
            raise InputError(f"expected fit_options() in {self.path} to return a dict, got {type(found).__name__}.")
        return dict(found)

    def _run(self) -> ModuleType:
        name = f"whence_spec_{self.digest[:12]}"
        found = spec_from_file_location(name, self.path)
        if found is None or found.loader is None:
            raise InputError(f"expected a Python file, named something.py, got {self.path}.")
        module, loader = module_from_spec(found), found.loader
        folder = str(self.path.resolve().parent)
        sys.path.insert(0, folder)  # so that it imports its neighbours, as it would when run by itself
        sys.modules[name] = module  # so that its classes know their module
        try:
            self._blame(lambda: loader.exec_module(module), "the file")
        finally:
            sys.path.remove(folder)
        return module

    def _blame(self, work: Callable[[], Any], what: str) -> Any:
        try:
            return work()
        except whence.WhenceError:
            raise
        except Exception as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(self.path)]
            where = f", line {frames[-1].lineno}" if frames else ""
            raise InputError(f"{what} in {self.path} failed{where}: {type(error).__name__}: {error}") from error


def _number_or_word(given: str | None) -> float | str | None:
    """A number, or a word that `whence.fit` will judge."""
    try:
        return None if given is None else float(given)
    except ValueError:
        return given
