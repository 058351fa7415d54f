"""A causal language model in a folder, and the texts of a JSONL file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import whence
from whence.cli.console import LACKING, stop
from whence.errors import InputError
from whence.tabular.fitted import FIT, read_description, replacing_folder

DESCRIPTION, KIND = "texts.json", ("whence texts", 1)  # in a saved folder: the file, its format and version
SUSPECTS = 10  # texts that are listed
SHOWN = 60  # characters of a text that are printed
BATCH = 8  # texts in a batch
PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100}


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
        self.folder, self.tokens, self.path, self.texts = folder, tokens, texts, read_texts(texts)

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

    def save(self, tracer: whence.Tracer, folder: Path) -> None:
        """Write the fit to a folder, with the path of the training texts."""
        format_, version = KIND
        about = {"format": format_, "version": version, "texts": str(self.path.resolve()), "tokens": self.tokens}
        with replacing_folder(folder, DESCRIPTION) as new:
            tracer.save(new / FIT)
            (new / DESCRIPTION).write_text(json.dumps(about, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, model: Path, progress: bool) -> tuple[LanguageModel, whence.Tracer]:
        """Read what `save` wrote, for the model in another folder."""
        about = read_description(folder, DESCRIPTION, KIND)
        source = cls(model, Path(about["texts"]), int(about["tokens"]))
        return source, whence.load(folder / FIT, source.model(), source.train_loader(), progress=progress)

    def _pretrained(self, kind: str) -> Any:
        try:
            import transformers  # an extra: only language models need it
        except ModuleNotFoundError:
            stop("Texts need transformers. Install it with: pip install 'whence[integrations]'", LACKING)
        try:
            return getattr(transformers, kind).from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise InputError(f"expected {self.folder} to hold a model and its tokenizer, got: {error}") from error
