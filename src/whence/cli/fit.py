"""`whence fit`: fit a network that a Python file defines, or a language model in a folder with its texts."""

from __future__ import annotations

import inspect
import json
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from typer import Argument, Option

import whence
from whence.cli import console
from whence.cli.console import LACKING, Output, stop
from whence.errors import InputError, did_you_mean
from whence.io import save

SAMPLE, SECONDS = 8, 20.0  # predictions checked by trust, and its time limit
SUSPECTS = 10  # texts that are listed
SHOWN = 60  # characters of a text that are printed
BATCH = 8  # texts in a batch
PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100}


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
    saved: Annotated[Path | None, Option("--save", help="Save the fit in this file.")] = None,
    out: console.Report = None,
    as_json: console.AsJson = False,
    quiet: console.Quiet = False,
) -> None:
    """Fit your own network, defined by a Python file, which is run; or a language model and its texts.

    The file defines `model()`, which returns the trained network, and `train_loader()` with the data it was
    trained on. It may define `test_loader()`, for the report, and `fit_options()`, a dict of arguments of
    whence.fit, such as the likelihood; options given here take precedence.

    A language model was saved in a folder by Hugging Face's save_pretrained, with its tokenizer. Its linear layers are
    fitted, by a core unless --structure says otherwise. Each line of the JSONL file has a "text", or a "prompt" and a
    "completion". The most doubtful texts are listed.

    Examples:
    - `whence fit network.py --save network.whence`
    - `whence fit network.py --ridge 5 --structure core --out report.html`
    - `whence fit model-folder --texts train.jsonl --ridge 10 --save texts.whence`
    """
    began = time.perf_counter()
    console.check_writable(saved, out, read=(spec, texts))
    if texts is None and spec.is_dir():
        stop(f"expected --texts, the JSONL file that the language model in {spec} was trained on, got none.")
    source = SpecFile(spec) if texts is None else LanguageModel(spec, texts, tokens)
    test = source.test_loader()
    if out is not None and test is None:
        stop(f"expected {spec} to define test_loader(), the inputs of the report, got none. Define it, or drop --out.")
    model = source.model()
    given = {"ridge": _number_or_word(ridge), "structure": structure, "recenter": recenter or None}
    options = {**source.options(model), **{name: value for name, value in given.items() if value is not None}}
    tracer = whence.fit(model, source.train_loader(), **{"progress": not quiet, **options})
    if saved is not None:
        save(tracer, saved, source.about)
    trusted = tracer.trust(test, sample=SAMPLE, seconds=SECONDS) if trust else None
    if out is not None:
        write_report(tracer, out, source.test_loader(), trusted)
    output, files = Output(as_json), {"report": out, "saved": saved}
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


def write_report(
    tracer: whence.Tracer, out: Path, inputs: Any, trust: whence.Trust | None = None, pool: Any = None
) -> None:
    """Write the report on all inputs; these and training examples are numbered from one, as by the other commands."""
    counts = {"row": len(tracer.predict(inputs)), "training example": tracer.problem.n}
    ids = [[f"{name} {number}" for number in range(1, total + 1)] for name, total in counts.items()]
    tracer.report(out, inputs, ids=tuple(ids), trust=trust, pool=pool)


class SpecFile:
    """A Python file, which is run, with a network and its data; errors in it are reported as errors of that file."""

    about = None  # nothing is saved beside the fit

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(f"expected a Python file with model() and train_loader(), got {path}, which is none.")
        if path.suffix.lower() != ".py":  # it would be run
            raise InputError(
                f"expected a Python file (.py) with model() and train_loader(), or the folder of a language model, got "
                f"{path}. For a table use `whence table {path}`."
            )
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


class Text(NamedTuple):
    """A line of a file; the words of a prompt are read, but are no labels."""

    prompt: str
    completion: str

    @property
    def beginning(self) -> str:
        """The first words, on one line."""
        words = " ".join(f"{self.prompt} {self.completion}".split())
        return words if len(words) <= SHOWN else words[: SHOWN - 3] + "..."


def read_texts(path: Path) -> list[Text]:
    """Texts of a JSONL file: a "text" in every line, or a "prompt" and a "completion"."""
    if not path.is_file():
        raise InputError(f"expected a JSONL file with texts, got {path}, which does not exist.")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            text = Text("", one["text"]) if "text" in one else Text(one["prompt"], one["completion"])
            if not (text.completion and isinstance(text.prompt + text.completion, str)):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f'expected an object with "text", or with "prompt" and "completion", in every line of {path}, got '
                f"something else in line {number}: {line[:SHOWN]!r}."
            ) from None
        found.append(text)
    if not found:
        raise InputError(f"expected texts in {path}, got none.")
    return found


class LanguageModel:
    """A folder with a Hugging Face model and its tokenizer, and the texts that it was trained on."""

    def __init__(self, folder: Path, texts: Path, tokens: int) -> None:
        if not (folder / "config.json").is_file():
            raise InputError(
                f"expected a folder with a saved Hugging Face model (config.json, weights and tokenizer), got {folder}."
            )
        self.folder, self.tokens, self.texts = folder, tokens, read_texts(texts)
        self.about = {"texts": str(texts.resolve()), "tokens": tokens}  # saved beside the fit

    def model(self) -> nn.Module:
        """The model in evaluation mode, on a GPU if there is one."""
        found: nn.Module = self._pretrained("AutoModelForCausalLM").eval()
        return found.to("cuda" if torch.cuda.is_available() else "cpu")

    def options(self, model: nn.Module) -> dict[str, Any]:
        """A core of the trainable matrices except embeddings and the output layer; of all, if there are no others."""
        head = getattr(model, "get_output_embeddings", lambda: None)()
        left_out = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding) or one is head}
        trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
        inner = [name for name, one in trainable.items() if one.ndim == 2 and id(one) not in left_out]
        return {"likelihood": "categorical", "structure": "core", "parameters": inner or list(trainable)}

    def train_loader(self) -> list[dict[str, Tensor]]:
        """The training texts."""
        return self.batches(self.texts)

    def test_loader(self) -> None:
        """Return none: there are no texts beside those of the training."""

    def batches(self, texts: list[Text]) -> list[dict[str, Tensor]]:
        """Token numbers with masks and labels, padded on the right."""
        tokenizer, rows = self._pretrained("AutoTokenizer"), []
        for prompt, completion in texts:
            given = tokenizer(prompt)["input_ids"] if prompt else []
            words = tokenizer(completion, add_special_tokens=not prompt)["input_ids"]
            ids = torch.tensor([*given, *words][: self.tokens])
            labels = torch.where(torch.arange(len(ids)) < len(given), PADDING["labels"], ids)
            rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
        chunks = [rows[low : low + BATCH] for low in range(0, len(rows), BATCH)]
        return [
            {name: pad_sequence([one[name] for one in some], True, padding) for name, padding in PADDING.items()}
            for some in chunks
        ]

    def suspects(self, tracer: whence.Tracer) -> list[dict[str, Any]]:
        """The texts that the other texts predict worst, numbered from one."""
        frame = tracer.training_frame().sort_values("suspect_rank").head(SUSPECTS)
        return [
            {"text": at + 1, "suspicion": float(frame["suspicion"][at]), "begins": self.texts[at].beginning}
            for at in frame.index.tolist()
        ]

    def _pretrained(self, kind: str) -> Any:
        try:
            import transformers  # an extra: only language models need it
        except ModuleNotFoundError:
            stop("Texts need transformers. Install it with: pip install 'whence[integrations]'", LACKING)
        try:
            return getattr(transformers, kind).from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise InputError(f"expected {self.folder} to hold a model and its tokenizer, got: {error}") from error
