"""Weighted sums of squares of gradients: what every estimator of a spectral curvature is, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from whence.tangents.linearization import Linearization

from .basis import Basis
from .measure import products_are_rounded
from .rotated import Rotated
from .stream import working_precision
from .view import View


@dataclass(frozen=True)
class Weights:
    """Weights of a block's directions in sums of squares.

    Attributes:
        basis: of the block.
        inside: (w, *shape) for each estimator and coordinate; less the weight outside, unless products are rounded.
        outside: (w, 1, 1, 1) for the squared length, which adds the weight outside everywhere; for the squared length
            of what lies outside, if products are rounded.
        rounded: whether products are rounded to TF32, in which differences of squared lengths mean nothing.
    """

    basis: Basis
    inside: Tensor
    outside: Tensor
    rounded: bool

    @classmethod
    def of(cls, basis: Basis, pairs: Iterable[tuple[Tensor, float]], count: int, dtype: torch.dtype) -> Weights:
        """One set of weights for each of so many estimators, inside and outside; one in float64 at a time."""
        inside, outside, rounded = torch.empty(0, device="cpu"), [], False
        for at, (within, beyond) in enumerate(pairs):
            if at == 0:
                rounded = products_are_rounded(within.device)
                inside = torch.empty(count, *within.shape, dtype=dtype, device=within.device)
            inside[at] = within if rounded or not basis.outside else within - beyond
            outside.append(beyond)
        return cls(basis, inside, inside.new_tensor(outside).reshape(-1, 1, 1, 1), rounded)

    @cached_property
    def positive(self) -> bool:
        """Whether no weight inside is negative, so that gradients may be scaled by their roots."""
        return bool((self.inside >= 0).all())

    def variances(self, view: View) -> Tensor:
        """Weighted squared lengths of the gradients alone, (w, n, c)."""
        parts = [self.squared(rotated) for _, rotated in view.chunks()]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return found if view.complete else found + self.outside.squeeze(-1) * view.lengths()

    def grams(self, view: View) -> Tensor:
        """Weighted inner products of the gradients of every example's cotangents, (w, n, c, c)."""
        parts = [self.crossed(rotated) for _, rotated in view.chunks()]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return found if view.complete else found.add_(self.outside * view.energy())

    def squared(self, rotated: Rotated) -> Tensor:
        """Weighted squared lengths inside the basis, (w, n, c)."""
        return rotated.variances(self.inside)

    def crossed(self, rotated: Rotated) -> Tensor:
        """Weighted inner products inside the basis, (w, n, c, c)."""
        return rotated.grams(self.inside, self.positive)


def sum_of(parts: Sequence[Tensor], shape: Sequence[int], problem: Linearization) -> Tensor:
    """Add tensors of one shape up, the first one in place; zeros where a process has no blocks."""
    if not parts:
        return torch.zeros(*shape, dtype=working_precision(problem), device=problem.device)
    first, *rest = parts
    for part in rest:
        first += part
    return first


def times_noise(root: Tensor | None, given: Tensor | None, noise: Tensor) -> float | None:
    """How many times the noise of a spectrum these weights of the examples are; `None` if they are not.

    Args:
        root: the weights.
        given: roots of the Hessians of the loss, where these are the noise.
        noise: (k, k) covariance of the residuals, where it is that.
    """
    if root is not None and given is not None and root.shape == given.shape:
        times = float(root.norm() / given.norm().clamp_min(torch.finfo(root.dtype).tiny))
        near = max(1e-9, 16 * torch.finfo(root.dtype).eps)
        return times**2 if torch.allclose(root, times * given, rtol=near, atol=1e-3 * near * times) else None
    if root is None or given is not None or len(root) != 1:
        return None
    wanted = (root @ root.transpose(1, 2))[0]
    size = float(noise.diagonal().sum())
    scale = float(wanted.diagonal().sum()) / size if size > 0 else 1.0
    return scale if torch.allclose(wanted, scale * noise, rtol=1e-9, atol=1e-12 * size) else None
