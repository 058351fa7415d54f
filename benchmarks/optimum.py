"""Small networks trained to the optimum of their penalised loss, so that a retrained one differs by its data alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.nn import functional as F


def _flattened(network: nn.Module) -> tuple[Tensor, Callable[[Tensor], Mapping[str, Tensor]]]:
    """All weights in one row, and the way back to named parameters."""
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]

    def named(flat: Tensor) -> Mapping[str, Tensor]:
        return {name: part.reshape(shapes[name]) for name, part in zip(shapes, flat.split(sizes), strict=True)}

    return nn.utils.parameters_to_vector(network.parameters()).detach(), named


def converge(network: nn.Module, x: Tensor, y: Tensor, ridge: float, steps: int = 200) -> float:
    """Damped Newton steps to an optimum of the loss that `whence` has in mind.

    Args:
        network: in double precision; is changed.
        x: inputs.
        y: (n, k) numbers for squared error, or (n,) class indices for cross-entropy.
        ridge: lambda, on the sum scale.
        steps: at most.

    Returns:
        The largest entry of the gradient that is left; zero at the optimum.
    """
    weights, named = _flattened(network)
    eye = torch.eye(len(weights), dtype=x.dtype)

    def loss(flat: Tensor) -> Tensor:
        out = functional_call(network, named(flat), (x,))
        data = 0.5 * (out - y).square().sum() if y.is_floating_point() else F.cross_entropy(out, y, reduction="sum")
        return data + 0.5 * ridge * flat.square().sum()

    damping, now = 1.0, float(loss(weights))
    score = grad(loss)(weights)
    for _ in range(steps):
        if float(score.abs().max()) < 1e-6 or damping > 1e9:
            break
        curved = hessian(loss)(weights)
        while damping <= 1e9:
            factor, info = torch.linalg.cholesky_ex(curved + damping * eye)
            if not int(info):
                tried = weights - torch.cholesky_solve(score.unsqueeze(1), factor).squeeze(1)
                then = float(loss(tried))
                if then <= now:
                    weights, now, damping = tried, then, max(damping / 8, 1e-9)
                    score = grad(loss)(weights)
                    break
            damping *= 4
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), named(weights).values(), strict=True):
            parameter.copy_(value)
    network.eval()
    return float(score.abs().max())


def approach(network: nn.Module, x: Tensor, y: Tensor, ridge: float, steps: int = 200) -> float:
    """Levenberg's and Marquardt's steps towards the same optimum: cheaper, and less exact.

    Takes and returns what `converge` does.
    """
    weights, named = _flattened(network)
    labels = not y.is_floating_point()

    def outputs(flat: Tensor, inputs: Tensor) -> Tensor:
        return functional_call(network, named(flat), (inputs.unsqueeze(0),)).squeeze(0)

    def loss(flat: Tensor) -> float:
        out = functional_call(network, named(flat), (x,))
        data = F.cross_entropy(out, y, reduction="sum") if labels else 0.5 * (out - y).square().sum()
        return float(data + 0.5 * ridge * flat.square().sum())

    slopes = vmap(jacrev(outputs), (None, 0))
    damping, now, score = 1.0, loss(weights), weights
    for _ in range(steps):
        with torch.no_grad():
            out = functional_call(network, named(weights), (x,))
            rows = slopes(weights, x)  # (n, k, d)
            residuals = F.one_hot(y, out.shape[1]) - out.softmax(1) if labels else y - out
            score = torch.einsum("nkd,nk->d", rows, residuals) - ridge * weights
            if float(score.abs().max()) < 1e-6:
                break
            flat = (_root(out).mT @ rows if labels else rows).flatten(0, 1)
            gram = flat.T @ flat
            while damping < 1e12:
                curved = gram + (ridge + damping) * torch.eye(len(weights), dtype=x.dtype)
                tried = weights + torch.linalg.solve(curved, score)
                then = loss(tried)
                if then < now:
                    weights, now, damping = tried, then, max(damping / 5, 1e-9)
                    break
                damping *= 4
            else:
                break
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), named(weights).values(), strict=True):
            parameter.copy_(value)
    network.eval()
    return float(score.abs().max())


def _root(outputs: Tensor) -> Tensor:
    """R with R R^T = diag(p) - p p^T."""
    p = outputs.softmax(1)
    return p.sqrt().diag_embed() - p.unsqueeze(2) * p.sqrt().unsqueeze(1)
