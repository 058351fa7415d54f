"""What is around training examples, each in the fit without it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from whence.tangents.batches import Inputs, batch_size, take, tensors_of

from .fitted import Fitted

TOGETHER = 100
"""Training examples that are predicted in one go."""


def evenly(index: Tensor, most: int) -> Tensor:
    """At most so many of some examples, evenly spaced.

    Examples:
        >>> evenly(torch.arange(10), 4)
        tensor([0, 3, 6, 9])
    """
    if len(index) <= most:
        return index
    return index[torch.linspace(0, len(index) - 1, most, device=index.device).round().long()]


def examples(fitted: Fitted, index: Tensor) -> Iterator[tuple[Tensor, Inputs]]:
    """Yield (which training examples, their inputs): as many together as have the same shapes."""
    groups: dict[tuple[torch.Size, ...], list[tuple[Tensor, Inputs]]] = {}
    for batch in fitted.problem.read("what is usual"):
        here = index[(index >= batch.start) & (index < batch.start + batch.size)]
        if len(here):
            some = take(batch.inputs, here - batch.start)  # type: ignore[arg-type]  # rows by number
            shapes = tuple(leaf.shape[1:] for leaf in tensors_of(some))
            groups.setdefault(shapes, []).append((here, some))
    for parts in groups.values():
        joined = tree_map(
            lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0],
            *(some for _, some in parts),
        )
        yield torch.cat([here for here, _ in parts]), joined


def ratios(fitted: Fitted, index: Tensor) -> Tensor:
    """(s,) HeC3 / Ho at some training examples, each in the fit without it; the model must be borrowed.

    With H_i = J_i F_lam^-1 J_i^T and the Hessian L_i of its loss, an example adds H_i W_i W_i^T H_i^T to the variance
    C_i of its own prediction; in the fit without it what is left of C_i is (I - H_i L_i)^-1 C_i (I - L_i H_i)^-1. An
    approximate curvature behaves as if it did not contain the example: there nothing is taken away.
    """
    found = torch.ones(len(index), dtype=fitted.problem.dtype, device=index.device)
    places = torch.empty(fitted.problem.n, dtype=torch.long, device=index.device)
    places[index] = torch.arange(len(index), device=index.device)
    for which, inputs in examples(fitted, index):
        for low in range(0, batch_size(inputs, "what is usual"), TOGETHER):
            some = which[low : low + TOGETHER]
            covariances = fitted.sandwich.predict(take(inputs, slice(low, low + len(some)))).covariances
            ho, hec3 = (_without(fitted, some, covariances[name], name) for name in ("ho", "hec3"))
            found[places[some]] = torch.where(ho > 0, hec3 / ho.clamp_min(torch.finfo(ho.dtype).tiny), 1.0)
    return found


def _without(fitted: Fitted, index: Tensor, covariances: Tensor, name: str) -> Tensor:
    """(s,) traces of the covariances at training examples in the fits without them."""
    if fitted.weighing.policy != "exact":
        return torch.diagonal(covariances, dim1=1, dim2=2).sum(1).clamp_min(0.0)
    hats, roots = fitted.bread.hats[index], fitted.problem.hessian_roots
    weights = fitted.meats.roots[name]
    own = hats @ (weights if len(weights) == 1 else weights[index])
    inner = hats if roots is None else hats @ roots[index] @ roots[index].transpose(1, 2)
    left = torch.eye(hats.shape[1], dtype=hats.dtype, device=hats.device) - inner
    # As for its leverage: rounding alone keeps this invertible where an example decides its own prediction.
    left.diagonal(dim1=1, dim2=2).clamp_min_(torch.finfo(hats.dtype).eps)
    grown = torch.linalg.solve(left, covariances.to(hats.dtype) - own @ own.transpose(1, 2))
    both = torch.linalg.solve(left, grown.transpose(1, 2))
    return torch.diagonal(both, dim1=1, dim2=2).sum(1).clamp_min(0.0)


def above_average(around: Tensor, own: Tensor) -> float:
    """From which value around them on examples have more noise of their own than the average.

    The isotonic regression of the one on the other exceeds the mean from here on: no other value gathers as much noise
    above the average beyond it. Where examples with high values have no more noise than others, the largest value.

    Args:
        around: (s,) what is around the examples.
        own: (s,) their own noise.

    Examples:
        >>> around = torch.tensor([1.0, 2.0, 3.0, 4.0, 8.0, 9.0])
        >>> above_average(around, torch.tensor([0.0, 1.0, 0.0, 1.0, 6.0, 4.0]))
        6.0
    """
    order = around.argsort(stable=True)
    values = around[order]
    gathered = (own - own.mean())[order].cumsum(0)[:-1]
    least = int(gathered.argmin())
    if float(gathered[least]) >= 0.0:
        return float(values[-1])
    return float(values[least] + values[least + 1]) / 2
