"""Data for the benchmarks: readers of public sets, and the paper's protocol of a noisy and a missing class.

`--data DIR` names a folder with `mnist/` and `fashion-mnist/` (the original .gz files), `cifar-10/` (`*.res.xz`: R-G, G
and B-G differenced along rows and columns modulo 256, and `labels.npy`) and `california-housing/cal_housing.csv.gz`.
`python -m benchmarks.data DIR` writes each batch of CIFAR-10 beside it as `*.npy`, which is then read in its place:
decoding takes four seconds a batch.
"""

from __future__ import annotations

import gzip
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whence import one_hot
from whence_paper.data.images import decoded, read_residuals


@dataclass(frozen=True)
class Split:
    """Inputs and class labels of a training and a test set."""

    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Task:
    """A training set with targets of a squared-error network, and test points with their true classes.

    Attributes:
        noisy: the class whose training labels are random.
        missing: the class left out of the training set, or `None`.
    """

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    test_answers: Tensor
    noisy: int
    missing: int | None


def read_digits(folder: Path, name: str) -> Split:
    """MNIST ("mnist") or Fashion-MNIST ("fashion-mnist"), images (n, 1, 28, 28) standardised as a whole."""
    parts: list[Tensor] = []
    for part in ("train", "t10k"):
        with gzip.open(folder / name / f"{part}-images-idx3-ubyte.gz") as raw:
            images = np.frombuffer(raw.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
        with gzip.open(folder / name / f"{part}-labels-idx1-ubyte.gz") as raw:
            labels = np.frombuffer(raw.read(), np.uint8, offset=8)
        parts += [torch.from_numpy(images / np.float32(255)), torch.from_numpy(labels.astype(np.int64))]
    mean, std = parts[0].mean(), parts[0].std()
    return Split((parts[0] - mean) / std, parts[1], (parts[2] - mean) / std, parts[3])


def read_cifar(folder: Path, most: int = 5) -> Split:
    """CIFAR-10, images (n, 3, 32, 32) standardised a channel; the first batches of 10,000 that are there."""
    home = folder / "cifar-10"
    names = [f"data_batch_{number}" for number in range(1, most + 1)]
    names = [*itertools.takewhile(lambda name: (home / f"{name}.res.xz").exists(), names), "test_batch"]
    with ThreadPoolExecutor(len(names)) as threads:
        images = list(threads.map(lambda name: _brightness(home / f"{name}.res.xz"), names))
    labels = torch.from_numpy(np.load(home / "labels.npy").astype(np.int64))
    train, test = torch.cat(images[:-1]), images[-1]
    mean, std = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    return Split((train - mean) / std, labels[: len(train)], (test - mean) / std, labels[50_000:])


def _brightness(path: Path) -> Tensor:
    return torch.from_numpy(read_residuals(path) / np.float32(255))


def decode(folder: Path) -> list[str]:
    """Write the batches of CIFAR-10 that are there as `*.npy`; which were written now."""
    paths = [path for path in sorted((folder / "cifar-10").glob("*.res.xz")) if not decoded(path).exists()]
    if paths:
        with ThreadPoolExecutor(len(paths)) as threads:
            list(threads.map(_write_decoded, paths))
    return [path.name for path in paths]


def _write_decoded(path: Path) -> None:
    partly = path.with_suffix(".part")
    with partly.open("wb") as kept:
        np.save(kept, read_residuals(path))
    partly.replace(decoded(path))


def read_housing(folder: Path) -> tuple[Tensor, Tensor]:
    """California housing, the eight features of scikit-learn and its target, both standardised: (n, 8), (n, 1)."""
    with gzip.open(folder / "california-housing" / "cal_housing.csv.gz", "rt") as raw:
        lon, lat, age, rooms, bed, people, homes, income, value = np.loadtxt(raw, delimiter=",", skiprows=1).T
    table = np.c_[income, age, rooms / homes, bed / homes, people, people / homes, lat, lon]
    inputs, targets = torch.from_numpy(table).float(), torch.from_numpy(value / 1e5).float().unsqueeze(1)
    return (inputs - inputs.mean(0)) / inputs.std(0), (targets - targets.mean()) / targets.std()


def random_images(n: int, test: int, shape: tuple[int, ...], classes: int = 10, seed: int = 0) -> Split:
    """Noise with random labels, for timings where no data are at hand."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(n + test, *shape, generator=draw)
    labels = torch.randint(classes, (n + test,), generator=draw)
    return Split(images[:n], labels[:n], images[n:], labels[n:])


def random_table(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A smooth function of eight normal inputs with noise that grows along the first: (n, 8), (n, 1)."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 8, generator=draw)
    noise = torch.randn(n, generator=draw) * (0.1 + 0.2 * inputs[:, 0].abs())
    return inputs, (inputs[:, 0].sin() + 0.5 * inputs[:, 1] * inputs[:, 2] + noise).unsqueeze(1)


def corrupt(split: Split, n: int, test: int, seed: int, *, meta: bool) -> Task:
    """The paper's protocol on `n` training and `test` test points drawn at random.

    Args:
        split: the data.
        n: training examples.
        test: test points.
        seed: decides the draw, the noisy class, and with `meta` the missing class and the meta-classes.
        meta: merge the ten classes at random into two and leave a class out; else keep ten and leave none out.
    """
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randperm(10, generator=draw)
    noisy, missing = int(classes[0]), int(classes[1]) if meta else None
    answers = torch.arange(10)
    if meta:
        answers[torch.randperm(10, generator=draw)] = torch.arange(10) % 2
    outputs = 2 if meta else 10
    allowed = torch.arange(len(split.labels)) if missing is None else (split.labels != missing).nonzero().squeeze(1)
    chosen = allowed[torch.randperm(len(allowed), generator=draw)[:n]]
    labels = split.labels[chosen]
    said = answers[labels]
    wrong = labels == noisy
    said[wrong] = torch.randint(outputs, (int(wrong.sum()),), generator=draw)
    tested = torch.randperm(len(split.test_labels), generator=draw)[:test]
    true = split.test_labels[tested]
    return Task(
        split.inputs[chosen],
        one_hot(said, outputs),
        split.test_inputs[tested],
        true,
        answers[true],
        noisy,
        missing,
    )


def batches(inputs: Tensor, targets: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """A loader: a list of batches."""
    return list(zip(inputs.split(size), targets.split(size), strict=True))


if __name__ == "__main__":
    print("decoded:", *decode(Path(sys.argv[1])))
