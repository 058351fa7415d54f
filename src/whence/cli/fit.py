"""`whence fit`: fit a network defined by a Python file, or a causal language model in a folder with its texts.

Both are a source of a model, its data and options of `whence.fit`: `SpecFile` and `TextFolder`.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from typer import Argument, Option

import whence
from whence.cli import console
from whence.cli.console import LACKING, Output, jsonable, stop
from whence.errors import InputError
from whence.tabular.fitted import FIT, check_folder, read_description, replacing_folder

FORMAT, VERSION, DESCRIPTION = "whence spec", 1, "spec.json"
SUSPECTS = 10  # texts that are listed
SHOWN = 60  # characters of a text that are printed
IGNORED = -100  # label of a token that is no target
SAMPLE, SECONDS = 8, 20.0  # predictions checked by trust, and its time limit


@console.handle_errors
def fit(
    spec: Annotated[
        Path, Argument(help="A Python file with model(), train_loader(), perhaps test_loader(); or a model's folder.")
    ],
    texts: Annotated[Path | None, Option(help="The JSONL file of its training texts.", dir_okay=False)] = None,
    tokens: Annotated[int, Option(min=2, help="Most tokens of a text that are read.")] = 512,
    batch: Annotated[int, Option(min=1, help="Texts in a batch.")] = 8,
    likelihood: Annotated[str | None, Option(help="Loss of the training: gaussian, categorical or bernoulli.")] = None,
    structure: console.Structure = None,
    parameters: Annotated[list[str] | None, Option(help="all, last_layer, or patterns of names; repeatable.")] = None,
    ridge: Annotated[str | None, Option(help="Lambda on the sum scale, auto or loo.")] = None,
    recenter: Annotated[bool, Option("--recenter", help="Take the last step to the optimum in the fit.")] = False,
    trust: Annotated[bool, Option("--trust/--no-trust", help="Check on a sample how far to trust the fit.")] = True,
    save: Annotated[Path | None, Option(help="Save the fit in this folder.")] = None,
    out: console.Report = None,
    as_json: console.AsJson = False,
    quiet: console.Quiet = False,
) -> None:
    """Fit your own network, defined by a Python file, which is run; or a language model and its texts.

    The file defines `model()`, which returns the trained network, and `train_loader()` with the data it was
    trained on. It may define `test_loader()`, for the report, and `fit_options()`, a dict of arguments of
    whence.fit; options given here take precedence.

    For a language model, saved by Hugging Face's save_pretrained together with its tokenizer, the linear layers are
    fitted. Each line of the JSONL file has a "text", or a "prompt" and a "completion". The most doubtful texts are
    listed.

    Examples:
    - `whence fit network.py --save fitted`
    - `whence fit model-folder --texts train.jsonl --ridge 10 --save fitted`
    - `whence fit network.py --likelihood categorical --ridge 5 --structure core --out report.html`
    """
    began = time.perf_counter()
    console.check_writable(out, read=(spec, texts))
    if spec.is_dir() and texts is None:
        stop(f"expected --texts, the JSONL file that the language model in {spec} was trained on, got none.")
    source = SpecFile(spec) if texts is None else TextFolder(spec, texts, tokens, batch)
    if out is not None and not source.has("test_loader"):
        stop(f"expected {spec} to define test_loader(), the inputs of the report, got none. Define it, or drop --out.")
    check_folder(save, DESCRIPTION)
    given: dict[str, Any] = {
        "likelihood": likelihood,
        "structure": structure,
        "parameters": parameters[0] if parameters and len(parameters) == 1 else parameters or None,
        "ridge": _number_or_word(ridge),
        "recenter": recenter or None,
    }
    model = source.model()
    options = {**source.options(model), **{name: value for name, value in given.items() if value is not None}}
    tracer = whence.fit(model, source.call("train_loader"), **{"progress": not quiet, **options})
    if save is not None:
        with replacing_folder(save, DESCRIPTION) as new:
            tracer.save(new / FIT)
            about = {"format": FORMAT, "version": VERSION, "whence": whence.__version__, "spec": spec.name}
            about |= {"sha256": source.digest, "options": jsonable(options), **source.about}
            (new / DESCRIPTION).write_text(json.dumps(about, indent=1), encoding="utf-8")
    test = source.call("test_loader") if source.has("test_loader") else None
    trusted = tracer.trust(test, sample=SAMPLE, seconds=SECONDS) if trust else None
    if out is not None:
        write_report(tracer, out, source.call("test_loader"), trusted)
    output, files = Output(as_json), {"report": out, "saved": save}
    content = _print_fit(output, tracer, trusted, source.suspects(tracer))
    output.files(files)
    output.finish({**content, "files": files, "seconds": round(time.perf_counter() - began, 1)})


def _print_fit(
    output: Output, tracer: whence.Tracer, trust: whence.Trust | None, suspects: list[dict[str, Any]]
) -> dict[str, Any]:
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
    if suspects:
        output.head("Texts to check first")
        output.rows([[*one.values()] for one in suspects], list(suspects[0]), right=(0, 1))
    return {
        **({"suspects": suspects} if suspects else {}),
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


def load_fit(folder: Path, spec: Path | None, progress: bool) -> tuple[whence.Tracer, SpecFile | TextFolder, list[str]]:
    """The tracer that `whence fit --save` wrote, the source of its model and data, and notes."""
    about = read_description(folder, DESCRIPTION, (FORMAT, VERSION))
    if spec is None:
        name = about.get("spec", "spec.py")
        raise InputError(
            f"expected the Python file that this fit was made with ({name}), got none. Pass it: --spec {name}. It is "
            "not taken from the folder, since it will be run."
        )
    source: SpecFile | TextFolder = (
        TextFolder(spec, Path(about["texts"]), int(about["tokens"]), int(about["batch"]))
        if "texts" in about
        else SpecFile(spec)
    )
    notes = [f"{spec.name} has changed since the fit was made"] * (source.digest != about.get("sha256"))
    tracer = whence.load(folder / FIT, source.model(), source.call("train_loader"), progress=progress)
    return tracer, source, notes


class SpecFile:
    """A Python file, which is run, with a network and its data; errors in it are reported as errors of that file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(
                f"expected a Python file with model() and train_loader(), got {path}, which does not exist."
            )
        self.path, self.about = path, dict[str, Any]()  # nothing else is saved with a fit
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        folder = str(path.resolve().parent)
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

    def suspects(self, tracer: whence.Tracer) -> list[dict[str, Any]]:
        """Return none: only the file knows what the examples are."""
        return []

    def options(self, model: nn.Module) -> dict[str, Any]:
        """Arguments of `whence.fit`, from `fit_options()` if it is defined."""
        if not self.has("fit_options"):
            return {}
        found: dict[str, Any] = self._run(lambda: dict(self._names["fit_options"]()), "fit_options()")
        return found

    def _run(self, work: Callable[[], Any], what: str) -> Any:
        try:
            return work()
        except whence.WhenceError:
            raise
        except Exception as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(self.path)]
            where = f", line {frames[-1].lineno}" if frames else ""
            raise InputError(f"{what} in {self.path} failed{where}: {type(error).__name__}: {error}") from error


class TextFolder:
    """A model and the texts that it was trained on, with the methods of a `SpecFile`."""

    def __init__(self, folder: Path, texts: Path, tokens: int, batch: int) -> None:
        if not (folder / "config.json").is_file():
            raise InputError(
                f"expected a folder with a saved Hugging Face model (config.json, weights and tokenizer), got {folder}."
            )
        self.folder, self.tokens, self.batch = folder, tokens, batch
        self.texts = read_texts(texts)
        self.about = {"texts": str(texts.resolve()), "tokens": tokens, "batch": batch}
        self.digest = hashlib.sha256((folder / "config.json").read_bytes() + texts.read_bytes()).hexdigest()

    def has(self, name: str) -> bool:
        """Whether there is such a function."""
        return name in ("model", "train_loader")

    def call(self, name: str) -> list[dict[str, Tensor]]:
        """The batches of the training texts."""
        return self.batches(self.texts)

    def model(self) -> nn.Module:
        """The model in evaluation mode, on a GPU if there is one."""
        found: nn.Module = self._pretrained("AutoModelForCausalLM").eval()
        return found.to("cuda" if torch.cuda.is_available() else "cpu")

    def options(self, model: nn.Module) -> dict[str, Any]:
        """A core of the trainable matrices except embeddings and the output layer; of all, if there are no others."""
        tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
        head = getattr(model, "get_output_embeddings", lambda: None)()
        tables |= {id(head.weight)} if head is not None else set()
        trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
        inner = [name for name, one in trainable.items() if one.ndim == 2 and id(one) not in tables]
        return {"likelihood": "categorical", "structure": "core", "parameters": inner or list(trainable)}

    def suspects(self, tracer: whence.Tracer) -> list[dict[str, Any]]:
        """The most doubtful texts, numbered from one."""
        frame = tracer.training_frame().sort_values("suspect_rank").head(SUSPECTS)
        return [
            {"text": int(at) + 1, "suspicion": float(row.suspicion), "begins": beginning(self.texts[int(at)])}
            for at, row in frame.iterrows()
        ]

    def batches(self, texts: Sequence[tuple[str, str]]) -> list[dict[str, Tensor]]:
        """Token numbers with masks and labels, without labels for prompts. Padded on the right."""
        tokenizer = self._pretrained("AutoTokenizer")
        found: list[dict[str, Tensor]] = []
        for low in range(0, len(texts), self.batch):
            columns: dict[str, list[Tensor]] = {"input_ids": [], "attention_mask": [], "labels": []}
            for prompt, text in texts[low : low + self.batch]:
                given = tokenizer(prompt)["input_ids"] if prompt else []
                words = tokenizer(text, add_special_tokens=not prompt)["input_ids"]
                ids = torch.tensor([*given, *words][: self.tokens])
                columns["input_ids"].append(ids)
                columns["attention_mask"].append(torch.ones_like(ids))
                columns["labels"].append(ids.masked_fill(torch.arange(len(ids)) < len(given), IGNORED))
            found.append(
                {
                    name: pad_sequence(rows, batch_first=True, padding_value=IGNORED if name == "labels" else 0)
                    for name, rows in columns.items()
                }
            )
        return found

    def _pretrained(self, kind: str) -> Any:
        try:
            import transformers  # an extra
        except ModuleNotFoundError:
            stop("Texts need transformers. Install it with: pip install 'whence[integrations]'", LACKING)
        try:
            return getattr(transformers, kind).from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise InputError(f"expected {self.folder} to hold a model and its tokenizer, got: {error}") from error


def read_texts(path: Path) -> list[tuple[str, str]]:
    """Prompts and texts of a JSONL file: a "text" in every line, or a "prompt" and a "completion"."""
    if not path.is_file():
        raise InputError(f"expected a JSONL file with texts, got {path}, which does not exist.")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            pair = ("", one["text"]) if "text" in one else (one["prompt"], one["completion"])
        except (ValueError, KeyError, TypeError):
            pair = (None, None)
        if not all(isinstance(part, str) for part in pair) or not pair[1]:
            raise InputError(
                f'expected an object with "text", or with "prompt" and "completion", in every line of {path}, got '
                f"something else in line {number}: {line[:SHOWN]!r}."
            )
        found.append(pair)
    if not found:
        raise InputError(f"expected texts in {path}, got none.")
    return found


def beginning(pair: tuple[str, str]) -> str:
    """The first words, on one line."""
    return textwrap.shorten(" ".join(pair), SHOWN, placeholder="...")


def _number_or_word(given: str | None) -> float | str | None:
    """A number, or a word that `whence.fit` will check."""
    try:
        return None if given is None else float(given)
    except ValueError:
        return given
