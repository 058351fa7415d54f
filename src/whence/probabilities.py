"""From the covariance of logits to that of probabilities and of decisions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import InputError
from .likelihoods import Likelihood


def likelihood_of(likelihood: Likelihood | None) -> Likelihood:
    """The likelihood, or an error where results were put together without one."""
    if likelihood is None:
        raise InputError(
            "expected results that know their likelihood for probabilities, got none. Take them from Tracer.predict."
        )
    return likelihood


def by_row(of: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """What a function says about rows (N, ...), for values (m, ..., k) that have positions or none."""
    shape = values[0].shape[:-1]
    if len(shape) == 1:
        return of(*values)
    found = of(*(value.reshape(-1, *value.shape[len(shape) :]) for value in values))
    return found.reshape(*shape, *found.shape[1:])


def slopes(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """(m, k, k) derivative of the probabilities in the outputs: diag(p) - p p^T for softmax.

    Examples:
        >>> import torch
        >>> from whence import Bernoulli
        >>> slopes(Bernoulli(), torch.zeros(1, 1))
        tensor([[[0.2500]]])
    """

    def one(row: Tensor) -> Tensor:
        return likelihood.probabilities(row.unsqueeze(0)).squeeze(0)

    found: Tensor = torch.func.vmap(torch.func.jacrev(one))(outputs)
    return found


def delta_method(likelihood: Likelihood, outputs: Tensor, covariance: Tensor) -> Tensor:
    """(m, k, k) covariance of the probabilities, L Cov(f) L^T to first order."""
    slope = slopes(likelihood, outputs).to(covariance.dtype)
    return slope @ covariance @ slope.transpose(1, 2)


def margins(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """(m,) or (m, c) how far each decision is from being another."""
    return _single(torch.einsum("mck,mk->mc", likelihood.contrasts(outputs), outputs))


def margin_variances(likelihood: Likelihood, outputs: Tensor, covariance: Tensor) -> Tensor:
    """(m,) or (m, c) variances of the margins."""
    contrasts = likelihood.contrasts(outputs).to(covariance.dtype)
    return _single(torch.einsum("mck,mkj,mcj->mc", contrasts, covariance, contrasts).clamp_min(0.0))


def _single(values: Tensor) -> Tensor:
    return values.squeeze(1) if values.shape[1] == 1 else values
