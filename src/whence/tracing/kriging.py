"""What a training example's neighbours say about it: a prediction of its residual that its own noise does not enter.

Leave-one-out residuals are u_i = b(x_i) + noise, where b, what the model cannot represent, is shared by neighbours and
the noise is not. Each u_i is predicted from the others as a weighted mean; the product of the two then estimates
b b^T without the noise, and their difference times u_i the noise without b. This is difference-based variance
estimation; with weights from a Gaussian process it is kriging, whose nugget is the noise. The noise may be uneven: it
is taken to be as large as the residuals around an example are, or else quiet places would pass for smooth ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)
"""Squared lengths of the kernel that are tried, in medians of the squared distances."""

LOCAL = 20
"""Neighbours that tell how large residuals are around an example."""

NUGGETS = (*(10.0 ** (step / 2) for step in range(-12, 7)), 1e9)
"""Noise variances over signal variances that are tried; the last one means: no signal."""


@dataclass(frozen=True)
class Neighbours:
    """Weights with which the residuals of some examples (anchors) predict those of all.

    Attributes:
        weights: (k, n, r) of the anchors for each output; an anchor has none in its own prediction.
        doubt: (n, k) variance of b given the anchors' residuals; zero for plain means.
        lengths: squared length of the kernel for each output, in medians of the squared distances; `nan` for plain
            means.
        nuggets: noise variance over the variance of b for each output; `nan` for plain means.
    """

    weights: Tensor
    doubt: Tensor
    lengths: tuple[float, ...]
    nuggets: tuple[float, ...]


def nearest(distances: Tensor, anchors: Tensor, values: Tensor, count: int) -> Neighbours:
    """Plain means over the nearest anchors.

    Args:
        distances: (r, n) squared distances of the anchors to all examples.
        anchors: (r,) which examples the anchors are.
        values: (n, k) leave-one-out residuals.
        count: how many neighbours.
    """
    k = values.shape[1]
    others = distances.T.clone()
    others[anchors, torch.arange(len(anchors), device=anchors.device)] = torch.inf
    chosen = others.topk(count, dim=1, largest=False).indices
    weights = torch.zeros_like(others).scatter_(1, chosen, 1.0 / count)
    nothing = (float("nan"),) * k
    return Neighbours(weights.expand(k, -1, -1), torch.zeros_like(values), nothing, nothing)


def krige(distances: Tensor, anchors: Tensor, values: Tensor) -> Neighbours:
    """Weights of Gaussian processes with kernel exp(-distance / length) and noise as uneven as the residuals are.

    Args:
        distances: (r, n) squared distances of the anchors to all examples.
        anchors: (r,) which examples the anchors are.
        values: (n, k) leave-one-out residuals.
    """
    within = distances[:, anchors]
    unit = float(within[within > 0].median()) if bool((within > 0).any()) else 1.0
    sizes = _sizes(distances, anchors, values)  # (n,)
    scaled = values[anchors] / sizes[anchors].unsqueeze(1)
    weights = values.new_zeros(values.shape[1], *distances.T.shape)
    doubt = torch.zeros_like(values)
    chosen = _by_evidence(within / unit, sizes[anchors], scaled)
    for length in {length for length, _ in chosen}:
        spectrum, vectors = _decompose(within / unit, length, sizes[anchors])
        cross = torch.exp(-distances / (length * unit)).T / sizes[anchors]  # (n, r)
        for output, (ours, nugget) in enumerate(chosen):
            if ours != length or nugget == NUGGETS[-1]:
                continue
            inverse = (vectors / (spectrum + nugget)) @ vectors.T
            weights[output], unknown = _weights(inverse, cross, anchors, sizes, nugget)
            scale = scaled[:, output] @ inverse @ scaled[:, output] / len(scaled)
            # No more than the share of b in the residuals around the example.
            here = sizes.square()
            most = here * values[anchors, output].square().mean() / (unknown + nugget * here)
            doubt[:, output] = torch.minimum(scale, most) * unknown
    return Neighbours(weights, doubt, tuple(length for length, _ in chosen), tuple(nugget for _, nugget in chosen))


def _sizes(distances: Tensor, anchors: Tensor, values: Tensor) -> Tensor:
    """(n,) root mean square of the residuals of the nearest anchors and of one like all, over that of all."""
    squares = values[anchors].square().sum(1)
    usual = squares.mean().clamp_min(torch.finfo(values.dtype).tiny)
    others = distances.T.clone()  # (n, r)
    others[anchors, torch.arange(len(anchors), device=anchors.device)] = torch.inf
    few = min(LOCAL, len(anchors) - 1)
    near = squares[others.topk(few, dim=1, largest=False).indices]
    return ((near.sum(1) / usual + 1.0) / (few + 1)).sqrt()


def _decompose(distances: Tensor, length: float, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of the kernel, in units in which the noise is even."""
    kernel = torch.exp(-distances / length) / sizes / sizes.unsqueeze(1)
    spectrum, vectors = torch.linalg.eigh(kernel)
    return spectrum.clamp_min(0.0), vectors


def _weights(inverse: Tensor, cross: Tensor, anchors: Tensor, sizes: Tensor, nugget: float) -> tuple[Tensor, Tensor]:
    """Weights (n, r) and what they leave unknown of b (n,); anchors as if left out."""
    scaled = cross @ inverse
    unknown = 1.0 - (scaled * cross).sum(1)
    weights = scaled / sizes[anchors]
    own = inverse.diagonal()
    left_out = -inverse / own.unsqueeze(1) * sizes[anchors].unsqueeze(1) / sizes[anchors]
    left_out.diagonal().zero_()
    weights[anchors] = left_out
    unknown[anchors] = (1.0 / own - nugget) * sizes[anchors].square()
    return weights, unknown.clamp_min(0.0)


def _by_evidence(distances: Tensor, sizes: Tensor, scaled: Tensor) -> list[tuple[float, float]]:
    """Length and nugget of the largest evidence for each output, with the variance that suits it best."""
    best = [(float("inf"), LENGTHS[0], NUGGETS[-1])] * scaled.shape[1]
    for length in LENGTHS:
        spectrum, vectors = _decompose(distances, length, sizes)
        squares = (vectors.T @ scaled).square()  # (r, k)
        for nugget in NUGGETS:
            variances = spectrum + nugget
            means = (squares / variances.unsqueeze(1)).mean(0).clamp_min(torch.finfo(squares.dtype).tiny)
            surprises = 0.5 * (len(scaled) * means.log() + variances.log().sum())
            best = [min(old, (new, length, nugget)) for old, new in zip(best, surprises.tolist(), strict=True)]
    return [(length, nugget) for _, length, nugget in best]
