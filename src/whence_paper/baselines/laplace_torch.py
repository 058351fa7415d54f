"""The Laplace approximation, by the package laplace-torch."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .base import Answer, Baseline, Recipe


@dataclass(frozen=True)
class LaplaceTorch(Baseline):
    """A normal posterior of the trained network's weights.

    Attributes:
        weights: "all" or "last_layer".
        structure: of the Hessian: "kron" (KFAC), "full", "diag", "lowrank" or "gp".
        prior: precision of the weights' prior; `None` tunes it by the marginal likelihood, for regression jointly with
            the noise, as the package's documentation does.
        noise: standard deviation of an observation; `None` tunes it.
        steps: of the tuning.
        batch: examples whose Jacobians are held at once; the package's cost grows with its square.
        subset: training examples that "gp" looks at, at the most; it takes the memory of their Jacobians.
    """

    weights: Literal["all", "last_layer"] = "all"
    structure: str = "kron"
    prior: float | None = None
    noise: float | None = None
    steps: int = 100
    batch: int = 100
    subset: int = 200

    @property
    def name(self) -> str:
        """For tables."""
        told = "" if self.prior is None else f", prior {self.prior:g}"
        return f"laplace-torch {self.structure}, {self.weights.replace('_', ' ')}{told}"

    def fit(self, recipe: Recipe) -> FittedLaplace:
        """Fit to a copy of the recipe's first network.

        Norm layers' parameters are frozen for "kron", which refuses them.
        """
        network = deepcopy(recipe.network())
        frozen = self._freeze(network)
        classes = recipe.likelihood == "categorical"
        loader = DataLoader(TensorDataset(recipe.data.inputs, recipe.data.targets), batch_size=self.batch)
        laplace = self._new(network, classes, len(recipe.data))
        laplace.fit(loader)
        self._tune(laplace, classes)
        return FittedLaplace(laplace, classes, self.batch, frozen)

    def _new(self, network: nn.Module, classes: bool, n: int) -> Any:
        try:
            from laplace import Laplace  # an extra: only this baseline needs it
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"expected laplace-torch for {self.name!r}; {error.name} is missing. Install it without its "
                "dependencies, which may replace torch: pip install 'whence[bench]', then "
                "pip install --no-deps -r benchmarks/peers.txt."
            ) from error
        options: dict[str, Any] = {} if self.prior is None else {"prior_precision": self.prior}
        if self.noise is not None:
            options["sigma_noise"] = self.noise
        if self.structure == "gp":
            options["n_subset"] = min(self.subset, n)
        return Laplace(
            network,
            "classification" if classes else "regression",
            subset_of_weights=self.weights,
            hessian_structure=self.structure,
            **options,
        )

    def _freeze(self, network: nn.Module) -> int:
        """Take from it what the structure refuses; how many parameters that is."""
        if self.weights != "all" or self.structure != "kron":
            return 0
        known = (nn.Linear, nn.Conv2d)
        refused = [
            parameter
            for module in network.modules()
            if not isinstance(module, known)
            for parameter in module.parameters(recurse=False)
        ]
        for parameter in refused:
            parameter.requires_grad_(False)
        return sum(parameter.numel() for parameter in refused)

    def _tune(self, laplace: Any, classes: bool) -> None:
        """To the largest marginal likelihood.

        The documentation does this with Adam; by Nelder and Mead's method here, since the package turns the noise into
        a plain number within the Kronecker structure, where its gradient ends.
        """
        from scipy.optimize import minimize  # comes with scikit-learn, an extra

        free = [
            name for name, value in (("prior", self.prior), ("noise", 1.0 if classes else self.noise)) if value is None
        ]
        if not free:
            return

        def negative(logarithms: Any) -> float:
            given = dict(zip(free, torch.as_tensor(logarithms, dtype=torch.float32).exp().split(1), strict=True))
            with torch.no_grad():
                return -float(laplace.log_marginal_likelihood(given.get("prior"), given.get("noise")))

        start = {"prior": 0.0, "noise": -1.0}
        best = minimize(
            negative,
            [start[name] for name in free],
            method="Nelder-Mead",
            options={"maxfev": self.steps, "fatol": 1e-2},
        )
        negative(best.x)  # leaves the package's object at the best values


@dataclass(frozen=True)
class FittedLaplace:
    """A fitted posterior.

    Attributes:
        laplace: the package's object.
        classes: whether outputs are logits.
        batch: inputs predicted at once.
        frozen: parameters that were left out.
    """

    laplace: Any
    classes: bool
    batch: int
    frozen: int

    def predict(self, x: Tensor) -> Answer:
        """The linearized predictive distribution; probabilities by the probit approximation, the package's default."""
        parts = [
            self.laplace._glm_predictive_distribution(some) for some in x.split(self.batch)
        ]  # no public way for logits
        mean = torch.cat([part[0] for part in parts]).detach()
        variance = torch.cat([part[1].diagonal(dim1=1, dim2=2) for part in parts]).detach()
        if not self.classes:
            return Answer(mean, variance, noise=float(self.laplace.sigma_noise.square()))
        return Answer(mean, variance, (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(1))
