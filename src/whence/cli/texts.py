"""A folder with a causal language model, and a JSONL file with its texts, for `whence fit` and `whence explain`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.cli.console import LACKING, stop
from whence.errors import InputError

SHOWN = 60
"""Characters of a text that are printed."""


class TextFolder:
    """The model and the texts that it was trained on, with the methods of a `SpecFile`."""

    def __init__(self, folder: Path, texts: Path, tokens: int, batch: int) -> None:
        if not (folder / "config.json").is_file():
            raise InputError(
                f"expected a folder with a saved Hugging Face model (config.json, weights and tokenizer), got {folder}."
            )
        self.folder, self.path, self.tokens, self.batch = folder, texts, tokens, batch
        self.texts = read_texts(texts)
        self.digest = hashlib.sha256((folder / "config.json").read_bytes() + texts.read_bytes()).hexdigest()

    @property
    def about(self) -> dict[str, Any]:
        """What is saved with a fit."""
        return {"texts": str(self.path.resolve()), "tokens": self.tokens, "batch": self.batch}

    def has(self, name: str) -> bool:
        """Whether there is such a function."""
        return name in ("model", "train_loader")

    def call(self, name: str) -> list[dict[str, Tensor]]:
        """The batches of the training texts."""
        if name != "train_loader":
            raise InputError(f"expected a JSONL file with new texts, got none for {name}().")
        return self.batches(self.texts)

    def model(self) -> nn.Module:
        """In evaluation mode, on a GPU if there is one."""
        found: nn.Module = self._pretrained("AutoModelForCausalLM").eval()
        return found.to("cuda" if torch.cuda.is_available() else "cpu")

    def options(self) -> dict[str, Any]:
        """A sketch of all linear layers but the output layer, which is as large as the vocabulary."""
        return {"likelihood": "categorical", "structure": "sketch"}

    def parameters(self, model: nn.Module) -> list[str]:
        """The trainable matrices that are no embedding and no output layer; all that is trainable, if there is none."""
        tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
        head = getattr(model, "get_output_embeddings", lambda: None)()
        tables |= {id(head.weight)} if head is not None else set()
        trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
        return [name for name, one in trainable.items() if one.ndim == 2 and id(one) not in tables] or list(trainable)

    def batches(self, texts: Sequence[tuple[str, str]]) -> list[dict[str, Tensor]]:
        """Token numbers with masks and labels; the words of a prompt are no labels. Padded on the right."""
        tokenizer = self._pretrained("AutoTokenizer")
        rows = []
        for prompt, text in texts:
            given = tokenizer(prompt)["input_ids"] if prompt else []
            words = tokenizer(text, add_special_tokens=not prompt)["input_ids"]
            rows.append(([*given, *words][: self.tokens], len(given)))
        found = []
        for low in range(0, len(rows), self.batch):
            some = rows[low : low + self.batch]
            longest = max(2, *(len(words) for words, _ in some))
            ids, mask = torch.zeros(2, len(some), longest, dtype=torch.long).unbind(0)
            labels = torch.full_like(ids, -100)
            for at, (words, given) in enumerate(some):
                ids[at, : len(words)], mask[at, : len(words)] = torch.tensor(words), 1
                labels[at, given : len(words)] = torch.tensor(words[given:])
            found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
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
    words = " ".join(f"{pair[0]} {pair[1]}".split())
    return words if len(words) <= SHOWN else words[: SHOWN - 3] + "..."
