"""Images with class labels: MNIST, Fashion-MNIST, CIFAR-10, and the digits that come with scikit-learn."""

from __future__ import annotations

import gzip
import lzma
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .sources import DataError, Source, find

Name = Literal["mnist", "fashion-mnist", "cifar-10", "digits"]

CLASSES: dict[str, tuple[str, ...]] = {
    "mnist": tuple("0123456789"),
    "digits": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
    "cifar-10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
"""What the labels 0 to 9 stand for."""

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_SHA256 = {
    "mnist": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion-mnist": (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
}
_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_CIFAR: list[list[Source]] = [
    [*(Source(f"cifar-10/{name}.res.xz") for name in _BATCHES), Source("cifar-10/labels.npy")],
    [
        Source(
            "cifar-10/cifar-10-binary.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
        )
    ],
]


@dataclass(frozen=True)
class Images:
    """A training and a test set.

    Attributes:
        name: of the data set.
        inputs: (n, colours, side, side), standardised by the training set's mean and deviation a colour.
        labels: (n,) from 0.
        test_inputs: (m, colours, side, side), standardised likewise.
        test_labels: (m,).
        mean: (colours, 1, 1), with `std` to turn inputs into brightness between 0 and 1 again.
        std: (colours, 1, 1).
    """

    name: str
    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    mean: Tensor
    std: Tensor

    @property
    def classes(self) -> tuple[str, ...]:
        """What the labels stand for."""
        return CLASSES[self.name]

    def to(self, device: torch.device) -> Images:
        """With inputs and labels on a device."""
        moved = {name: getattr(self, name).to(device) for name in ("inputs", "labels", "test_inputs", "test_labels")}
        return replace(self, **moved)

    def brightness(self, inputs: Tensor) -> Tensor:
        """Inputs as they were before they were standardised, between 0 and 1."""
        return (inputs.cpu() * self.std + self.mean).clamp(0, 1)


def read_images(name: Name, folder: Path | None) -> Images:
    """A data set from a folder with all of them, or from its public source when there is none.

    Args:
        name: "mnist", "fashion-mnist", "cifar-10", or "digits", which come with scikit-learn.
        folder: with `mnist/`, `fashion-mnist/` (the original .gz files) and `cifar-10/` (the original binary archive,
            or `*.res.xz` and `labels.npy`).
    """
    if name == "digits":
        parts = _read_digits()
    elif name == "cifar-10":
        parts = _read_cifar(folder)
    elif name in _SHA256:
        parts = _read_idx(name, folder)
    else:
        raise DataError(f"expected one of {', '.join(CLASSES)}, got {name!r}.")
    images, labels, test_images, test_labels = (torch.from_numpy(part) for part in parts)
    images, test_images = images / 255, test_images / 255
    std, mean = torch.std_mean(images, (0, 2, 3))
    mean, std = mean[:, None, None], std[:, None, None]
    return Images(name, (images - mean) / std, labels.long(), (test_images - mean) / std, test_labels.long(), mean, std)


Parts = list["np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"]


def _read_idx(name: str, folder: Path | None) -> Parts:
    url = _MNIST if name == "mnist" else _FASHION
    form = [
        Source(f"{name}/{file}.gz", f"{url}{file}.gz", f"sha256:{checksum}")
        for file, checksum in zip(_IDX, _SHA256[name], strict=True)
    ]
    _, paths = find(folder, name, [form])
    parts = []
    for path in paths:
        with gzip.open(path) as raw:
            content = raw.read()
        images = "images" in path.name
        values = np.frombuffer(content, np.uint8, offset=16 if images else 8)
        parts.append(values.reshape(-1, 1, 28, 28).copy() if images else values.copy())
    return parts


def _read_cifar(folder: Path | None) -> Parts:
    form, paths = find(folder, "CIFAR-10", _CIFAR)
    if form == 1:
        return _read_binary(paths[0])
    with ThreadPoolExecutor(6) as threads:
        images = list(threads.map(read_residuals, paths[:6]))
    labels = np.load(paths[6]).astype(np.uint8)
    return [np.concatenate(images[:5]), labels[:50_000], images[5], labels[50_000:]]


def decoded(path: Path) -> Path:
    """Where the images of a batch of CIFAR-10 lie once they are decoded.

    Examples:
        >>> decoded(Path("cifar-10/test_batch.res.xz")).as_posix()
        'cifar-10/test_batch.npy'
    """
    return path.with_name(f"{path.name.removesuffix('.res.xz')}.npy")


def read_residuals(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """(n, 3, 32, 32) images stored as R-G, G, B-G, differenced along rows and columns modulo 256; or decoded before."""
    if decoded(path).exists():
        found: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = np.load(decoded(path))
        return found
    with lzma.open(path) as raw:
        coded = np.frombuffer(raw.read(), np.uint8).reshape(-1, 3, 32, 32)
    pixels = coded.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    pixels[:, [0, 2]] += pixels[:, 1:2]
    return pixels


def _read_binary(path: Path) -> Parts:
    """The original archive in its binary version: a byte of label, 3,072 of pixels."""
    rows = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name).name
            content = archive.extractfile(member) if name.endswith(".bin") else None
            if content is not None:
                rows[name.removesuffix(".bin")] = np.frombuffer(content.read(), np.uint8).reshape(-1, 3073)
    train, test = np.concatenate([rows[name] for name in _BATCHES[:5]]), rows[_BATCHES[5]]
    return [part for side in (train, test) for part in (side[:, 1:].reshape(-1, 3, 32, 32).copy(), side[:, 0].copy())]


def _read_digits(train: int = 1300) -> Parts:
    """1,797 digits of 8 x 8 pixels, cut in two in a fixed random order."""
    from sklearn.datasets import load_digits  # an extra, for what is quick only

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0)).numpy()
    pixels = (data.images[order, None] * (255 / 16)).round().astype(np.uint8)
    labels = data.target[order].astype(np.uint8)
    return [pixels[:train], labels[:train], pixels[train:], labels[train:]]
