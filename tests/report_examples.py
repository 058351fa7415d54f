"""Small fits to write reports about: pictures, texts and tables; classes, answers and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whence

EVIL = """</script><script>window.pwned = 1</script><img src=x onerror="window.pwned = 2">'"&amp;{{ 7 * 7 }}"""


@dataclass(frozen=True)
class Example:
    """A fit, test inputs with targets, and the options of its report."""

    tracer: whence.Tracer
    x: Tensor
    y: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path, **options: Any) -> Path:
        return self.tracer.report(path, (self.x, self.y), **{**self.options, **options})


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(model: nn.Module, x: Tensor, y: Tensor, loss: Any, steps: int = 150) -> nn.Module:
    model = model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def fitted(model: nn.Module, x: Tensor, y: Tensor, likelihood: str = "gaussian", **options: Any) -> whence.Tracer:
    return whence.fit(model, [(x, y)], likelihood, ridge=0.5, progress=False, **options)


def paint(inputs: Tensor) -> Tensor:
    """(m, 3, 12, 12) coloured pictures of the first numbers of each input."""
    cells = inputs[:, :12].reshape(-1, 3, 2, 2).sigmoid()
    return cells.repeat_interleave(6, 2).repeat_interleave(6, 3)


def pictures(m: int = 150, n: int = 150, seed: int = 1) -> Example:
    """Three classes by squared error; half of the labels of one are wrong, and some test inputs lie far out."""
    centres = 2.0 * draw(3, 12, seed=9)
    kind = torch.arange(n + m) % 3
    x = centres[kind] + 0.8 * draw(n + m, 12, seed=seed)
    y = kind.clone()
    wrong = (kind == 2) & (torch.arange(n + m) % 2 == 0)
    y[:n][wrong[:n]] = 1
    x[n : n + 12] *= 4.0
    tracer = fitted(nn.Linear(12, 3).double(), x[:n], whence.one_hot(y[:n], 3).double(), recenter=True)
    return Example(tracer, x[n:], y[n:], {"images": paint, "names": ["ash", "birch", "cedar"]})


def rows(m: int = 80, n: int = 60) -> Example:
    """One number from a table with words in it, noisier on one side, with two rows far out."""
    x = draw(n + m, 3, seed=3)
    x[n] = torch.tensor([9.0, 0.0, 0.0])
    noise = torch.where(x[:, 1:2] > 0.5, 1.0, 0.1) * draw(n + m, 1, seed=4)
    y = x.sum(1, keepdim=True) + noise
    tracer = fitted(nn.Linear(3, 1).double(), x[:n], y[:n], recenter=True)
    table = {"size": x[:, 0], "age": x[:, 1], "town": ["Ulm" if one > 0 else "Bonn" for one in x[:, 2].tolist()]}
    table["town"][n + 1] = "Rome"
    test, train = ({name: column[part] for name, column in table.items()} for part in (slice(n, None), slice(n)))
    return Example(tracer, x[n:], y[n:], {"table": (test, train), "names": ["price"]})


def texts(m: int = 60, n: int = 80, extra: str = "") -> Example:
    """Two classes told by words; the labels of texts with one of the words are random."""
    words = ["good", "lovely", "bad", "dull", "ironic", "film", "cast", "story", "night", "music"]
    x = (draw(n + m, len(words), seed=5) > 0.6).double()
    kind = (x[:, 0] + x[:, 1] > x[:, 2] + x[:, 3]).long()
    kind = torch.where((x[:, 4] > 0) & (draw(n + m, seed=6) > 0), 1 - kind, kind)
    said = [" ".join(word for word, there in zip(words, row, strict=True) if there) + extra for row in x.tolist()]
    model = trained(nn.Linear(len(words), 2), x[:n], kind[:n], nn.functional.cross_entropy)
    tracer = fitted(model, x[:n], kind[:n], "categorical")
    return Example(tracer, x[n:], kind[n:], {"texts": (said[n:], said[:n]), "names": ["no" + extra, "yes" + extra]})


def kinds() -> dict[str, Example]:
    """One of each kind of task."""
    x, z = draw(40, 3, seed=1), draw(25, 3, seed=2)
    w = draw(3, 3, seed=7)
    scores = {"train": x @ w + 0.3 * draw(40, 3, seed=8), "test": z @ w}
    first = {name: score.argmax(1) for name, score in scores.items()}
    one_hot = {name: whence.one_hot(label, 3).double() for name, label in first.items()}
    sign = {name: score[:, :1].sign() for name, score in scores.items()}
    yes = {name: (score > 0).double() for name, score in scores.items()}
    makers = {
        "numbers": (scores, 3, "gaussian"),
        "a number": ({name: score[:, :1] for name, score in scores.items()}, 1, "gaussian"),
        "one-hot": (one_hot, 3, "gaussian"),
        "plus and minus": (sign, 1, "gaussian"),
        "categorical": (first, 3, "categorical"),
        "yes or no": ({name: one[:, :1] for name, one in yes.items()}, 1, "bernoulli"),
        "several answers": (yes, 3, "bernoulli"),
    }
    found = {}
    for name, (targets, outputs, likelihood) in makers.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Linear(3, outputs).double().eval()
        found[name] = Example(fitted(model, x, targets["train"], likelihood), z, targets["test"])
    return found
