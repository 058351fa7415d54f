"""kronfluence: its EKFAC factors, and how much each training example influences its own loss.

It has influences and no variances, so it is judged where influences apply: at finding wrong labels.
"""

from __future__ import annotations

import os
import tempfile
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

FACTORS = "ekfac"


def analyzer_of(
    network: nn.Module,
    folder: str,
    classes: bool = False,
    cpu: bool = True,
    modules: list[str] | None = None,
    copies: bool = True,
) -> Any:
    """Its analyzer of a copy of a network.

    Args:
        network: in evaluation mode.
        folder: where it keeps its files.
        classes: whether outputs are logits and targets labels; else both are numbers (n, k).
        cpu: whether it computes there, and not on a GPU.
        modules: names of the layers it tracks, if not all.
        copies: whether to leave the network itself as it is; it wraps the layers.
    """
    os.environ["ACCELERATE_USE_CPU"] = str(cpu).lower()
    from kronfluence.analyzer import Analyzer, prepare_model  # a peer, present or not
    from kronfluence.task import Task

    class Loss(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            outputs, wanted = model(batch[0]), batch[1]
            if classes:
                outputs, wanted = outputs.flatten(0, -2), wanted.flatten()  # positions are summed over
                outputs = outputs.float() if outputs.dtype.itemsize < 4 else outputs
                if sample:
                    wanted = torch.multinomial(outputs.detach().softmax(1), 1).squeeze(1)
                return F.cross_entropy(outputs, wanted, reduction="sum")
            if sample:
                wanted = outputs.detach() + 0.5**0.5 * torch.randn_like(outputs)
            return (outputs - wanted).square().sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str] | None:
            return modules

    task = Loss()
    model = prepare_model(deepcopy(network) if copies else network, task)
    return Analyzer("measured", model, task, cpu=cpu, output_dir=folder, disable_tqdm=True)


def fit_factors(analyzer: Any, data: TensorDataset, batch: int, arguments: Any = None) -> None:
    """All that it computes once."""
    from kronfluence.arguments import FactorArguments  # a peer, present or not

    analyzer.fit_all_factors(
        factors_name=FACTORS,
        dataset=data,
        per_device_batch_size=batch,
        factor_args=arguments or FactorArguments(strategy="ekfac"),
        overwrite_output_dir=True,
    )


def self_influences(
    network: nn.Module, inputs: Tensor, targets: Tensor, classes: bool, dampings: dict[str, float | None], seed: int
) -> dict[str, Tensor]:
    """(n,) for each damping: how much an example changes its own loss, which is high where a label does not fit.

    Args:
        network: in evaluation mode; it is computed where the inputs are.
        inputs: (n, ...).
        targets: labels (n,), or numbers (n, k).
        classes: which of the two.
        dampings: by name, what is added to the eigenvalues of the mean curvature; `None` is kronfluence's own rule, a
            tenth of their mean.
        seed: of the labels it samples.
    """
    data = TensorDataset(inputs.cpu(), targets.cpu())
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # it draws from the global generator
        analyzer = analyzer_of(network, folder, classes, cpu=not inputs.is_cuda)
        fit_factors(analyzer, data, batch=500)
        return {name: _scores(analyzer, data, damping) for name, damping in dampings.items()}


def pairwise_influences(
    network: nn.Module,
    known: tuple[Tensor, Tensor],
    asked: tuple[Tensor, Tensor],
    dampings: dict[str, float | None],
    seed: int,
) -> dict[str, Tensor]:
    """(m, n) for each damping: how far each training example lowers the loss of each test example, to first order.

    Args:
        network: a classifier in evaluation mode; it is computed where the inputs are.
        known: inputs and labels of the training set.
        asked: those of the test points.
        dampings: as for `self_influences`.
        seed: of the labels it samples.
    """
    from kronfluence.arguments import ScoreArguments  # a peer, present or not

    train, test = (TensorDataset(*(part.cpu() for part in some)) for some in (known, asked))
    found: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # it draws from the global generator
        analyzer = analyzer_of(network, folder, classes=True, cpu=not known[0].is_cuda)
        fit_factors(analyzer, train, batch=500)
        for name, damping in dampings.items():
            analyzer.compute_pairwise_scores(
                scores_name="pairs",
                factors_name=FACTORS,
                query_dataset=test,
                train_dataset=train,
                per_device_query_batch_size=250 if known[0].is_cuda else 50,  # each needs a pass over the training set
                per_device_train_batch_size=500,
                score_args=ScoreArguments(damping_factor=damping),
                overwrite_output_dir=True,
            )
            found[name] = analyzer.load_pairwise_scores("pairs")["all_modules"].double()
    return found


def _scores(analyzer: Any, data: TensorDataset, damping: float | None) -> Tensor:
    from kronfluence.arguments import ScoreArguments  # a peer, present or not

    name = f"damping {damping}"
    analyzer.compute_self_scores(
        scores_name=name,
        factors_name=FACTORS,
        train_dataset=data,
        per_device_train_batch_size=500,
        score_args=ScoreArguments(damping_factor=damping),
        overwrite_output_dir=True,
    )
    found: Tensor = analyzer.load_self_scores(name)["all_modules"]
    return found.double()
