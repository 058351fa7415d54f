"""A fit from a file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import InputError
from .likelihoods import Likelihood
from .options import check_sizes
from .persist import Given, restore
from .tangents.wrapped import bare
from .tracer import Tracer


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    train_loader: Iterable[Any] | None = None,
    *,
    likelihood: Likelihood | None = None,
    dtype: torch.dtype | None = None,
    max_memory: float | None = None,
    progress: bool = True,
) -> Tracer:
    """Load a fit that `Tracer.save` wrote.

    The file holds neither the model nor the training data. It is checked before it is believed: its checksum, its
    format, the model's architecture and every weight, the shape of every tensor. Nothing in it is ever run.

    Args:
        path: of the file.
        model: the network that was fitted, with the weights of that time, in evaluation mode, on any device. In a wider
            dtype it may be, too.
        train_loader: the training data of the fit, in the same batches. Without them everything works that needs none:
            `predict` (but for `Exact` on its dual and matrix-free roads), residuals, leverages, `training_frame()`,
            `suggest`. `attribute`, `explain` and `what_if` ask for them.
        likelihood: the one that was fitted with, where it is not one of whence's own.
        dtype: of the algebra; as it was when not given.
        max_memory: bytes that may be taken; as it was when not given, or 80 % of what is free, if that is less.
        progress: show a progress line with the time left on anything over a second.

    Examples:
        >>> import tempfile, torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> tracer = whence.fit(net, [(x, 2 * x + 1)], ridge=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tracer.save(f"{folder}/line.whence")
        ...     again = whence.load(f"{folder}/line.whence", net)
        >>> bool((again.predict(x).hec3 == tracer.predict(x).hec3).all())
        True
    """
    check_sizes(None, max_memory)
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        raise InputError(
            f"expected the likelihood as an object, such as Mine(), got {likelihood!r}. Leave it out if it is one of "
            "whence's own."
        )
    given = Given(bare(model), train_loader, likelihood, max_memory, progress)
    return Tracer(**restore(Path(path), given, dtype))
