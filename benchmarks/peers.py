"""What is timed: `whence`, and its peers, behind one interface.

Peers are found if they are importable (`make bench` installs them). They do not compute the same thing: none has HeC3,
kronfluence has no variance at all, and those that refuse some layers are given a network with these layers frozen.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

import whence

from .data import batches
from .influences import analyzer_of, fit_factors
from .variants import parse

DAMPING = 0.01
"""Ridge as a share of n, for everyone."""


class Subject(ABC):
    """Something with a fit and a prediction.

    Attributes:
        package: the distribution it comes in.
        refuses: types of layers whose parameters are frozen, since it does not take them.
        squared: whether predictions take memory or time that grows with the square of the batch.
        damping: ridge as a share of n.
        classes: whether outputs are logits and targets labels; only where nngeometry and curvlinops are judged.
    """

    package: str
    refuses: tuple[type[nn.Module], ...] = ()
    bare: bool = True
    squared: bool = True
    damping: float = DAMPING
    classes: bool = False

    def frozen(self, network: nn.Module) -> int:
        """Freeze what it refuses, and say how many parameters that is."""
        before = sum(p.numel() for p in network.parameters() if p.requires_grad)
        for module in network.modules():
            if isinstance(module, self.refuses):
                module.requires_grad_(False)
            if not self.bare and not isinstance(module, (nn.Linear, nn.Conv2d, nn.LayerNorm)):
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad_(False)
        return before - sum(p.numel() for p in network.parameters() if p.requires_grad)

    def version(self) -> str:
        """Of the package."""
        return version(self.package)

    @abstractmethod
    def fit(self, network: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Any:
        """Everything up to the first prediction."""

    def predict(self, fitted: Any, inputs: Tensor, batch: int) -> Tensor | None:
        """Variances of all outputs (m, k), or `None` where there are none."""
        return torch.cat([self.variances(fitted, some) for some in inputs.split(batch)])

    def variances(self, fitted: Any, inputs: Tensor) -> Tensor:
        """Of one batch."""
        raise NotImplementedError


class Whence(Subject):
    """Ho and HeC3 of all outputs."""

    package = "whence"
    squared = False

    def __init__(self, structure: str) -> None:
        self.variant = parse(structure)

    def version(self) -> str:
        return whence.__version__

    def fit(self, network: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Any:
        loader = batches(inputs, targets, batch)
        ridge = DAMPING * len(inputs)
        structure = self.variant.structure
        return whence.fit(network, loader, structure=structure, ridge=ridge, progress=False, **self.variant.options)

    def predict(self, fitted: Any, inputs: Tensor, batch: int) -> Tensor:
        found = fitted.predict(list(inputs.split(batch)))
        return found.ho + found.hec3


class LaplaceKron(Subject):
    """laplace-torch's Kronecker posterior, through curvlinops."""

    package = "laplace-torch"
    refuses = (nn.LayerNorm,)
    bare = False

    def fit(self, network: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Any:
        from laplace import Laplace  # a peer, present or not
        from laplace.curvature.curvlinops import CurvlinopsGGN

        found = Laplace(
            network,
            "regression",
            subset_of_weights="all",
            hessian_structure="kron",
            backend=CurvlinopsGGN,
            prior_precision=DAMPING * len(inputs),
        )
        found.fit(DataLoader(TensorDataset(inputs, targets), batch_size=batch))
        _ = found.posterior_precision  # it decomposes when first asked
        return found

    def variances(self, fitted: Any, inputs: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.diagonal(fitted(inputs)[1], dim1=1, dim2=2)


class NNGeometryEKFAC(Subject):
    """nngeometry's EKFAC, solved against its Jacobian."""

    package = "nngeometry"
    refuses = (nn.LayerNorm,)
    bare = False

    def fit(self, network: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Any:
        from nngeometry.layercollection import LayerCollection  # a peer, present or not
        from nngeometry.metrics import FIM
        from nngeometry.object import PMatEKFAC

        layers = LayerCollection()
        for module in network.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                layers.add_layer_from_model(network, module)
        loader = DataLoader(TensorDataset(inputs.clone(), targets), batch_size=batch)
        found = FIM(
            model=network,
            loader=loader,
            representation=PMatEKFAC,
            variant="regression",
            device="cpu",
            function=lambda *data: rooted(network(data[0])) if self.classes else network(data[0]),
            layer_collection=layers,
        )
        found.update_diag(loader)
        return network, layers, found

    def variances(self, fitted: Any, inputs: Tensor) -> Tensor:
        from nngeometry.backend import TorchHooksJacobianBackend  # a peer, present or not
        from nngeometry.object import PFMapDense

        network, layers, curvature = fitted
        backend = TorchHooksJacobianBackend(
            layer_collection=layers, model=network, function=lambda *data: network(data[0])
        )
        rows = PFMapDense(generator=backend, examples=(inputs.clone(), torch.zeros(len(inputs))))
        solved = curvature.solve(rows, regul=self.damping)
        return (rows.to_torch() * solved.to_torch()).sum(2).T


def rooted(logits: Tensor) -> Tensor:
    """What has the Fisher matrix of a softmax as the square of its gradients, with the probabilities held.

    nngeometry has a closed form of its own for that, which divides by the chance of the classes still to come: zero,
    and its matrices not a number, where a network is certain.
    """
    chance = logits.detach().softmax(1)
    root = torch.diag_embed(chance.sqrt()) - chance.unsqueeze(2) * chance.sqrt().unsqueeze(1)
    return (logits.unsqueeze(1) @ root).squeeze(1)


class CurvlinopsEKFAC(Subject):
    """curvlinops' EKFAC, its inverse applied to all Jacobian rows at once."""

    package = "curvlinops-for-pytorch"
    refuses = (nn.LayerNorm,)
    bare = False

    def fit(self, network: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Any:
        from curvlinops import EKFACLinearOperator, FisherType, KFACInverseLinearOperator  # a peer, present or not

        weights = {name: p for name, p in network.named_parameters() if p.requires_grad}
        operator = EKFACLinearOperator(
            network,
            nn.CrossEntropyLoss(reduction="sum") if self.classes else nn.MSELoss(reduction="sum"),
            list(weights.values()),
            batches(inputs, targets, batch),
            fisher_type=FisherType.TYPE2,
            separate_weight_and_bias=False,
            check_deterministic=False,
        )
        inverse = KFACInverseLinearOperator(operator, damping=self.damping * len(inputs), use_exact_damping=True)
        _ = inverse @ [torch.ones_like(p) for p in weights.values()]  # it works at the first product
        return network, weights, inverse

    def variances(self, fitted: Any, inputs: Tensor) -> Tensor:
        network, weights, inverse = fitted
        rest = {name: p.detach() for name, p in network.named_parameters() if name not in weights}

        def single(values: dict[str, Tensor], example: Tensor) -> Tensor:
            return functional_call(network, {**rest, **values}, (example.unsqueeze(0),)).squeeze(0)

        detached = {name: p.detach() for name, p in weights.items()}
        with sdpa_kernel(SDPBackend.MATH):
            rows = vmap(jacrev(single), in_dims=(None, 0))(detached, inputs)  # (m, k, ...) each
        columns = [rows[name].flatten(0, 1).movedim(0, -1) for name in weights]
        solved = inverse @ columns
        summed = sum((a * b).flatten(0, -2).sum(0) for a, b in zip(columns, solved, strict=True))
        return torch.as_tensor(summed).reshape(len(inputs), -1)


class KronfluenceEKFAC(Subject):
    """kronfluence's EKFAC factors; it has influences on a loss, no variances."""

    package = "kronfluence"

    def fit(self, network: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            analyzer = analyzer_of(network, folder)
            fit_factors(analyzer, TensorDataset(inputs, targets), batch)
        return None

    def predict(self, fitted: Any, inputs: Tensor, batch: int) -> None:
        return None


PEERS: dict[str, type[Subject]] = {
    "laplace": LaplaceKron,
    "nngeometry": NNGeometryEKFAC,
    "curvlinops": CurvlinopsEKFAC,
    "kronfluence": KronfluenceEKFAC,
}


def subject(name: str) -> Subject:
    """A peer by its name, else a structure of `whence`."""
    return PEERS[name]() if name in PEERS else Whence(name)
