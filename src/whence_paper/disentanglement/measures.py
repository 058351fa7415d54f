"""Measures of noise and of scarcity: of one network by `whence`, of one with dropout, and of an ensemble."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence_paper.baselines.base import Data, Sampled

MEMORY = 24 * 2**30
"""Bytes of a GPU that a fit may take, so that several runs share it."""

GRADIENTS, RIDGE = 20, 0.1
"""Number of training examples whose mean squared gradient is the unit of the ridge, and the ridge in that unit."""


def at_once(inputs: Tensor) -> int:
    """Examples in one batch of a fit: on a GPU few batches, since the CPU starts every operation."""
    return 2000 if inputs.is_cuda else 500


@dataclass(frozen=True)
class Found:
    """Predictions for the test points, and the mean over them of each measure.

    Attributes:
        predicted: (m,) classes.
        measures: by name.
    """

    predicted: Tensor
    measures: dict[str, float]


def entropy(probabilities: Tensor) -> Tensor:
    """Of each row.

    Examples:
        >>> entropy(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
        tensor([0.6931, 0.5623])
    """
    found: Tensor = -torch.special.xlogy(probabilities, probabilities).sum(-1)
    return found


def sampled(fitted: Sampled, inputs: Tensor) -> Found:
    """Information theory: the mean entropy of several functions, and their mutual information with the answer."""
    with torch.no_grad():
        each = fitted.sample(inputs).softmax(-1)
    mean, within = each.mean(0), entropy(each).mean(0)
    measures = {"expected entropy": within, "mutual information": entropy(mean) - within}
    return Found(mean.argmax(1).cpu(), {name: float(values.mean()) for name, values in measures.items()})


def untrained(network: nn.Module) -> nn.Module:
    """A copy with new random weights, the same for every training set.

    Examples:
        >>> old, new = (untrained(nn.Linear(2, 1)).weight for _ in range(2))
        >>> torch.equal(old, new)
        True
    """
    device = next(network.parameters()).device
    found = deepcopy(network).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in found.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    return found.to(device)


def explained(network: nn.Module, data: Data, inputs: Tensor, **settings: Any) -> whence.Explanation:
    """What a fit says about test points."""
    limit = MEMORY if data.inputs.is_cuda else None
    tracer = whence.fit(
        network,
        data.batches(at_once(data.inputs)),
        likelihood="categorical",
        progress=False,
        execution=whence.Execution(max_memory=limit),
        **settings,
    )
    return tracer.explain(list(inputs.split(at_once(inputs))))


def variances(network: nn.Module, data: Data, inputs: Tensor, structure: str) -> Tensor:
    """(m,) variances of predictions in units of the noise: about 1 / c with c training examples like the input.

    Gradients of all outputs are compared as for squared error, which has no Hessian, so no label enters. The ridge is a
    tenth of the mean squared gradient of a training example, so without any example the variance is about 10.
    """
    targets = torch.zeros_like(network(data.inputs[:1]).detach()).expand(len(data.inputs), -1)
    squares = [_squared_gradient(network, row.unsqueeze(0)) for row in data.inputs[:GRADIENTS]]
    size = at_once(data.inputs)
    tracer = whence.fit(
        network,
        list(zip(data.inputs.split(size), targets.split(size), strict=True)),
        likelihood="gaussian",
        ridge=RIDGE * sum(squares) / len(squares),
        structure=structure,
        progress=False,
        execution=whence.Execution(max_memory=MEMORY if data.inputs.is_cuda else None),
    )
    found = [tracer.predict(some).laplace / tracer.sigma.diagonal().mean() for some in inputs.split(size)]
    return torch.cat(found).mean(1).cpu()


def _squared_gradient(network: nn.Module, row: Tensor) -> float:
    """Of an output, the mean over the outputs."""
    outputs = network(row).squeeze(0)
    weights = [parameter for parameter in network.parameters() if parameter.requires_grad]
    total = 0.0
    for one in outputs:
        total += sum(float(part.square().sum()) for part in torch.autograd.grad(one, weights, retain_graph=True))
    return total / len(outputs)


def traced(network: nn.Module, data: Data, inputs: Tensor, structure: str) -> Found:
    """Of one network by `whence`.

    "variance" is that of the same network before training: it has seen no labels, so shuffled labels cannot change it.
    "supported noise" is the noise over one plus this variance. With c training examples like an input, its variance is
    about 1 / c; of the variance of a new label, a Dirichlet distribution with c counts leaves 1 / (1 + c) to ignorance
    and c / (1 + c) to noise.

    Args:
        network: trained, in evaluation mode.
        data: what it was trained on.
        inputs: test points.
        structure: of the fit.
    """
    found = explained(network, data, inputs, structure=structure)
    with torch.no_grad():
        outputs = torch.cat([network(some) for some in inputs.split(at_once(inputs))]).double()
    before = variances(untrained(network), data, inputs, structure)
    measures = {
        "entropy": entropy(outputs.softmax(1)),
        "noise": found.noise,
        "disagreement": found.disagreement,
        "supported noise": found.noise.cpu() / (1 + before),
        "variance": before,
        "scarcity": found.scarcity,
        "Ho": found.ho,
        "HeC3": found.hec3,
    }
    means = {name: float(values.mean()) for name, values in measures.items()}
    return Found(outputs.argmax(1).cpu(), means)
