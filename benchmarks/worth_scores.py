"""Scores of test points, each high where a prediction is to be doubted: whence, laplace-torch, and plain outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import whence

Scores = dict[str, Tensor]


def plain(outputs: Tensor, loss: str) -> Scores:
    """What the outputs alone say. With two classes the three of a softmax network rank the same."""
    best, second = outputs.topk(2, 1).values.unbind(1)
    if loss == "squared error":
        return {"margin": second - best, "largest output": -best}
    p = outputs.softmax(1)
    entropy = -(p * outputs.log_softmax(1)).sum(1)
    return {"maximum probability": -p.amax(1), "entropy": entropy, "margin": second - best}


def ours(found: whence.Uncertainty, loss: str, name: str) -> Scores:
    """Traces of Ho and HeC3 and their ratio, in outputs and in probabilities, and the margin over its deviation."""
    scores = {
        f"{name}: Ho": found.trace("ho"),
        f"{name}: HeC3": found.trace("hec3"),
        f"{name}: HeC3 / Ho": found.ratio,
    }
    contrast = top_two(found.mean)
    for shown, estimator in (("Ho", "ho"), ("HeC3", "hec3")):
        covariance = found.covariance(estimator)
        scores[f"{name}: margin / sd by {shown}"] = -over_deviation(found.mean, covariance, contrast)
    if loss == "cross-entropy":
        ho, hec3 = (trace(found.probability_covariance(estimator)) for estimator in ("ho", "hec3"))
        tiny = torch.finfo(ho.dtype).tiny
        scores |= {
            f"{name}: Ho of probabilities": ho,
            f"{name}: HeC3 of probabilities": hec3,
            f"{name}: HeC3 / Ho of probabilities": hec3 / ho.clamp_min(tiny),
        }
    return scores


def trace(matrices: Tensor) -> Tensor:
    """(m,) of (m, k, k)."""
    return matrices.diagonal(dim1=1, dim2=2).sum(1)


def top_two(outputs: Tensor) -> Tensor:
    """(m, k) plus one at the largest output and minus one at the second."""
    first, second = outputs.topk(2, 1).indices.unbind(1)
    k = outputs.shape[1]
    return (nn.functional.one_hot(first, k) - nn.functional.one_hot(second, k)).to(outputs)


def over_deviation(mean: Tensor, covariance: Tensor, contrast: Tensor) -> Tensor:
    """(m,) margins in standard deviations."""
    variance = torch.einsum("mc,mcd,md->m", contrast, covariance, contrast)
    return (mean * contrast).sum(1) / variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


def laplace(network: nn.Module, inputs: Tensor, labels: Tensor, test: Tensor, ridge: float, subset: str) -> Scores:
    """laplace-torch's posterior with our ridge as its prior's precision, and its probit approximation.

    Args:
        network: trained with cross-entropy.
        inputs: (n, ...) training inputs.
        labels: (n,) their classes.
        test: (m, ...) test inputs.
        ridge: lambda on the sum scale, which is the precision of the prior for summed cross-entropies.
        subset: "all" weights, with Kronecker factors, or the "last_layer", with its full matrix.
    """
    from laplace import Laplace  # a peer, present or not
    from laplace.curvature.curvlinops import CurvlinopsGGN

    structure = "kron" if subset == "all" else "full"
    fitted: Any = Laplace(
        network,
        "classification",
        subset_of_weights=subset,
        hessian_structure=structure,
        backend=CurvlinopsGGN,
        prior_precision=ridge,
    )
    fitted.fit(DataLoader(TensorDataset(inputs, labels), batch_size=500))
    parts = [fitted._glm_predictive_distribution(some) for some in test.split(25)]
    mean, covariance = (torch.cat(part).detach().double().cpu() for part in zip(*parts, strict=True))
    variances = covariance.diagonal(dim1=1, dim2=2)
    p = (mean / (1 + torch.pi / 8 * variances).sqrt()).softmax(1)
    name = f"laplace-torch, {structure}, {subset.replace('_', ' ')}"
    return {
        f"{name}: maximum probability": -p.amax(1),
        f"{name}: entropy": -(p * p.clamp_min(1e-300).log()).sum(1),
        f"{name}: variance of logits": trace(covariance),
        f"{name}: margin / sd": -over_deviation(mean, covariance, top_two(mean)),
    }
