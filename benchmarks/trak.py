"""TRAK (Park et al. 2023) in a few lines: attribution from projected gradients of the log-odds of the right class.

    score(x, i) = phi(x)^T (Phi^T Phi)^-1 phi_i (1 - p_i)

with phi the gradient of log p / (1 - p) of the label, projected by random numbers. The score estimates how far example
i raises the log-odds of x; several checkpoints are averaged. `traker`, the authors' package, is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

AT_ONCE = 50


def log_odds(outputs: Tensor, label: Tensor) -> Tensor:
    """Of the right class, from logits (k,)."""
    own = torch.arange(len(outputs), device=outputs.device) == label
    return (outputs * own).sum() - outputs.masked_fill(own, -torch.inf).logsumexp(0)


def gradients(network: nn.Module, inputs: Tensor, labels: Tensor) -> Iterator[dict[str, Tensor]]:
    """Gradients of the log-odds of each example in all weights, some examples at a time."""
    weights = {name: value.detach() for name, value in network.named_parameters()}
    buffers = dict(network.named_buffers())

    def output(given: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        return log_odds(functional_call(network, (given, buffers), (x.unsqueeze(0),))[0], label)

    each = vmap(grad(output), in_dims=(None, 0, 0))
    for some, said in zip(inputs.split(AT_ONCE), labels.split(AT_ONCE), strict=True):
        yield each(weights, some, said)


def projected(network: nn.Module, inputs: Tensor, labels: Tensor, size: int, seed: int) -> Tensor:
    """(n, size) gradients times normal numbers, the same in every call with the same seed."""
    draw = torch.Generator(inputs.device).manual_seed(seed)
    weights = dict(network.named_parameters())
    options = {"generator": draw, "device": inputs.device, "dtype": inputs.dtype}
    maps = {name: torch.randn(value.numel(), size, **options) / size**0.5 for name, value in weights.items()}
    rows = [
        sum(values.flatten(1) @ maps[name] for name, values in found.items())
        for found in gradients(network, inputs, labels)
    ]
    return torch.cat(rows)


@torch.no_grad()
def surprise(network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """(n,) 1 - p of the label."""
    p = torch.cat([network(some) for some in inputs.split(500)]).softmax(1)
    found: Tensor = 1 - p.gather(1, labels.unsqueeze(1)).squeeze(1)
    return found


def scores(networks: list[nn.Module], known: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor], size: int) -> Tensor:
    """(m, n) how far each training example raises the log-odds of each test example; the mean over checkpoints.

    Args:
        networks: checkpoints, in evaluation mode.
        known: inputs and labels of the training set.
        asked: those of the test points.
        size: of the projection.
    """
    total, weight = torch.zeros((), device=known[0].device), torch.zeros((), device=known[0].device)
    for seed, network in enumerate(networks):
        phi, tests = (projected(network, *some, size, seed).double() for some in (known, asked))
        total = total + tests @ torch.linalg.solve(phi.T @ phi, phi.T)
        weight = weight + surprise(network, *known)
    return (total * weight.double() / len(networks) ** 2).cpu()
