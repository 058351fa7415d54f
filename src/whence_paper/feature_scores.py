"""What a practitioner computes in ten lines from a network's outputs and last features, to be set beside `whence`."""

from __future__ import annotations

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F

NEIGHBOURS = 50
IN_POOL = 5000
"""Training examples that are compared with a pool, and inputs of the pool among the nearest."""


@torch.no_grad()
def answers_and_features(network: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and what the last linear layer is given."""
    last = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
    features: list[Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, given: features.append(given[0].flatten(1)))
    try:
        outputs = torch.cat([network(some) for some in inputs.split(1000)])
    finally:
        hook.remove()
    return outputs, torch.cat(features)


def probability_scores(p: Tensor) -> dict[str, Tensor]:
    """Entropy and margin of probabilities (m, k); the larger, the more doubtful.

    Examples:
        >>> found = probability_scores(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        >>> found["margin"].tolist()
        [0.0, -1.0]
    """
    two = p.topk(2, dim=1).values
    return {"entropy": -torch.xlogy(p, p).sum(1), "margin": two[:, 1] - two[:, 0]}


def neighbour_scores(known: Tensor, labels: Tensor, squares: Tensor, features: Tensor) -> dict[str, Tensor]:
    """Of the 50 nearest training examples by cosine of features: entropy of labels, mean squared residual, distance.

    Args:
        known: (n, d) features of the training examples.
        labels: (n, k) ones and zeros.
        squares: (n,) squared residuals of the training examples.
        features: (m, d) of the inputs asked about.
    """
    unit = F.normalize(known, dim=1)
    shares, residuals, distances = [], [], []
    for some in F.normalize(features, dim=1).split(1000):
        closest = (some @ unit.T).topk(min(NEIGHBOURS, len(unit)), dim=1)
        distances.append(1 - closest.values.mean(1))
        shares.append(labels[closest.indices].mean(1))
        residuals.append(squares[closest.indices].mean(1))
    share = torch.cat(shares)
    return {
        "kNN label entropy": -torch.xlogy(share, share).sum(1),
        "kNN residual": torch.cat(residuals),
        "kNN distance": torch.cat(distances),
    }


def class_density(known: Tensor, labels: Tensor, features: Tensor) -> Tensor:
    """(m,) log density of features under a mixture of one Gaussian a class (DDU).

    Args:
        known: (n, d) features of the training examples.
        labels: (n,) their classes.
        features: (m, d) of the inputs asked about.
    """
    found = []
    for label in labels.unique():
        own = known[labels == label].double()
        spread = torch.cov(own.T)
        spread.diagonal().add_(1e-3 * own.var())
        gaussian = torch.distributions.MultivariateNormal(own.mean(0), spread)
        found.append(gaussian.log_prob(features.double()) + torch.tensor(len(own) / len(known)).log())
    return torch.stack(found).logsumexp(0).to(features.dtype)


def class_distance(known: Tensor, labels: Tensor, features: Tensor) -> Tensor:
    """(m,) squared distance to the nearest class mean, in the covariance that all classes share (Mahalanobis).

    Args:
        known: (n, d) features of the training examples.
        labels: (n,) their classes.
        features: (m, d) of the inputs asked about.
    """
    classes = labels.unique()
    means = torch.stack([known[labels == label].double().mean(0) for label in classes])
    within = known.double() - means[torch.searchsorted(classes, labels)]
    spread = within.T @ within / len(known)
    spread.diagonal().add_(1e-3 * within.var())
    root = torch.linalg.cholesky(spread)
    away = (features.double().unsqueeze(1) - means).reshape(-1, features.shape[1])
    squares: Tensor = torch.linalg.solve_triangular(root, away.T, upper=False).square().sum(0)
    return squares.reshape(len(features), -1).amin(1).to(features.dtype)


def pool_scores(known: Tensor, features: Tensor) -> dict[str, Tensor]:
    """What inputs of use (m, d) tell, beside training examples (n, d); the larger, the more of a kind never shown.

    The share of such inputs among the 100 nearest of both, by cosine; and how sure a logistic regression is that an
    input is from the pool, if it has learned this from others (five-fold cross-validation).
    """
    known = known[torch.linspace(0, len(known) - 1, min(IN_POOL, len(known)), device=known.device).round().long()]
    pool = torch.linspace(0, len(features) - 1, min(IN_POOL, len(features)), device=known.device).round().long()
    both = F.normalize(torch.cat([known, features[pool]]), dim=1)
    own = torch.full((len(features),), -1, device=known.device)
    own[pool] = len(known) + torch.arange(len(pool), device=known.device)
    shares = []
    for some, itself in zip(F.normalize(features, dim=1).split(1000), own.split(1000), strict=True):
        similar = some @ both.T
        inside = (itself >= 0).nonzero().squeeze(1)
        similar[inside, itself[inside]] = -2.0
        nearest = similar.topk(min(2 * NEIGHBOURS, len(both) - 1), dim=1).indices
        shares.append((nearest >= len(known)).double().mean(1))
    either = torch.cat([known, features]).double().cpu().numpy()
    new = [0] * len(known) + [1] * len(features)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.001, max_iter=500, class_weight="balanced"))
    sure = cross_val_predict(model, either, new, cv=5, method="decision_function")
    return {"pool share": torch.cat(shares), "pool classifier": torch.from_numpy(sure[len(known) :])}
