"""What is projected: inputs of a trained network's last layer, with Ho and HeC3 of its predictions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import whence

KEPT = 50
"""Principal directions of an embedding that are kept: nearly all of it, in a small file."""


@dataclass(frozen=True)
class Embedded:
    """Points of a training and a test set, in the coordinates of the last layer's input.

    Attributes:
        train: (n, d) some training points.
        train_labels: (n,) their classes.
        test: (m, d) some test points.
        test_labels: (m,) their classes.
        predicted: (m,) their predicted classes.
        ho: (m,) total variance.
        hec3: (m,) total variance.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    predicted: Tensor
    ho: Tensor
    hec3: Tensor

    def save(self, path: Path) -> None:
        """Write a compressed file, embeddings in half precision."""
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {field.name: getattr(self, field.name).numpy() for field in fields(self)}
        for name in ("train", "test"):
            arrays[name] = arrays[name].astype(np.float16)
        partly = path.with_suffix(".part.npz")
        np.savez_compressed(partly, **arrays)
        partly.replace(path)

    @classmethod
    def load(cls, path: Path) -> Embedded:
        """Read what was saved."""
        with np.load(path) as arrays:
            found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        return cls(**{name: value.float() if value.dtype == torch.float16 else value for name, value in found.items()})


def embed(
    network: nn.Module, tracer: whence.Tracer, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> Embedded:
    """Embeddings of points with labels, and the uncertainty of those to test on.

    Args:
        network: with a linear layer at its end.
        tracer: fitted to it.
        train: inputs and labels of training points.
        test: inputs and labels of test points.
    """
    inside, outside = (last_inputs(network, part[0]) for part in (train, test))
    directions = principal(inside, KEPT)
    found = tracer.predict(list(test[0].split(500)), covariance=False)
    outputs = found.mean
    predicted = outputs.argmax(1) if outputs.shape[1] > 1 else (outputs.squeeze(1) > 0).long()
    return Embedded(
        ((inside - inside.mean(0)) @ directions).cpu().float(),
        train[1].cpu(),
        ((outside - inside.mean(0)) @ directions).cpu().float(),
        test[1].cpu(),
        predicted.cpu(),
        found.trace("ho").cpu(),
        found.trace("hec3").cpu(),
    )


@torch.no_grad()
def last_inputs(network: nn.Module, inputs: Tensor, batch: int = 500) -> Tensor:
    """(n, d) what the last linear layer of a network is given."""
    last = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
    seen: list[Tensor] = []
    hook = last.register_forward_pre_hook(lambda module, given: seen.append(given[0].flatten(1)))
    try:
        for some in inputs.split(batch):
            network(some)
    finally:
        hook.remove()
    return torch.cat(seen)


def principal(points: Tensor, most: int) -> Tensor:
    """(d, r) directions of largest variance.

    Examples:
        >>> import torch
        >>> flat = torch.tensor([[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]])
        >>> principal(flat, 1).abs().squeeze(1)
        tensor([0.7071, 0.7071])
    """
    centred = (points - points.mean(0)).double()
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    kept: Tensor = vectors.flip(1)[:, :most].to(points.dtype)
    return kept


def mixed(embedded: Embedded, count: int = 20) -> Tensor:
    """(m,) share of a test point's nearest training points whose class is not the most frequent among them."""
    distances = torch.cdist(embedded.test, embedded.train)
    labels = embedded.train_labels[distances.topk(count, 1, largest=False).indices]
    classes = int(embedded.train_labels.max()) + 1
    counts = torch.nn.functional.one_hot(labels, classes).sum(1)
    return 1 - counts.amax(1).double() / count
