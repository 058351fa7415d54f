"""Networks that are trained once and kept, so that a study can be run again without training again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .training import squared_error, train

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared error": squared_error,
    "cross-entropy": lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum"),
}
"""Sums over a batch: of squared errors to targets (n, k), of cross-entropies to labels (n,)."""


def trained(
    folder: Path,
    name: str,
    make: Callable[[], nn.Module],
    inputs: Tensor,
    targets: Tensor,
    *,
    loss: str,
    epochs: int,
    seed: int,
    decoupled: bool = True,
    constant: bool = False,
) -> nn.Module:
    """A trained network in evaluation mode, from `folder` if it was trained before.

    Args:
        folder: where networks are kept.
        name: tells networks on different data apart; loss, optimiser, size, epochs and seed are added to it.
        make: the untrained network.
        inputs: (n, ...).
        targets: as the loss takes them.
        loss: one of `LOSSES`.
        epochs: passes over the data.
        seed: of the first weights and of the order of examples.
        decoupled: AdamW, or Adam with a penalty.
        constant: keep the rate as it is, in place of one that falls to zero.
    """
    with torch.random.fork_rng(devices=[]):  # modules draw their weights from the global generator
        torch.manual_seed(seed)
        network = make()
    short = loss.replace(" ", "-")
    optimiser = "adamw" if decoupled else "adam"
    path = folder / f"{name}-{short}-{optimiser}-n{len(inputs)}-e{epochs}-s{seed}.pt"
    if path.exists():
        network.load_state_dict(torch.load(path, weights_only=True))
        return network.eval()
    train(network, inputs, targets, epochs=epochs, seed=seed, loss=LOSSES[loss], decoupled=decoupled, constant=constant)
    folder.mkdir(parents=True, exist_ok=True)
    partly = path.with_suffix(".part")
    torch.save(network.state_dict(), partly)
    partly.replace(path)
    return network
