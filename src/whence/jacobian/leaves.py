"""Fitted trees, their structure being fixed: a sum of leaf values, and the same as a network.

The network is linear in its parameters, with sparse gradients; its inputs are rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from whence.errors import InputError, ShapeError, StaleModelError, TargetError

NUMBERS_AT_ONCE = 2**22  # leaf values in a batch: rows times trees times outputs of a leaf

Loss = Literal["gaussian", "bernoulli", "categorical"]


@dataclass(frozen=True)
class TreeEnsemble:
    """The content of a fitted model: the leaf of each row in each tree, and the values of the leaves.

    The raw output is base + sum over trees of values[leaf]. It is the prediction itself for squared error, log-odds for
    "bernoulli", and one score per class for "categorical", to which the softmax is applied. Forests of classifiers
    average shares of classes: they are squared error on zeros and ones, with one output per class.
    """

    leaves: Callable[[Any], NDArray[numpy.int64]]  # from X to (n, trees) leaf numbers, over all trees together
    values: NDArray[numpy.float64]  # (leaves, w) what each leaf adds to the outputs, with shrinkage and averaging
    # (trees,) the output that each tree adds to, if w is 1 and there are several; `None` if a leaf adds to all w
    outputs: NDArray[numpy.int64] | None
    base: NDArray[numpy.float64]  # (k,) outputs without trees
    likelihood: Loss  # of the loss that the trees were grown with
    shrinkage: float = 1.0  # of a leaf's own optimum: the learning rate, or one over the number of trees of a forest
    l2: float = 0.0  # the library's own penalty of squared leaf values, before shrinkage
    l2_by_weight: bool = False  # whether the library multiplies it by the mean weight of the training rows
    classes: tuple[Any, ...] | None = None  # labels in the order of the classes; `None` for regression
    notes: tuple[str, ...] = ()  # what users should know, such as a bootstrap
    own_raw: Callable[[Any], Any] | None = None  # from X to the library's own raw outputs, to compare with


class LeafSum(nn.Module):
    """Outputs base + sum over trees of values[leaf]; the parameters are the leaf values times a scale.

    A penalty on the parameters is a penalty on the squared leaf values times scale^2. So one ridge fits leaves that the
    trees themselves penalise differently.

    Attributes:
        leaf_values: (leaves, w) parameters: what a leaf adds, times its scale.
        scale: (leaves,) scale of each leaf.
        outputs: (trees,) the output that each tree adds to; `None` if a leaf adds to all outputs.
        base: (k,) outputs without trees.
        ensemble: the fitted trees, read by the adapter of their library.
        reread: returns the present leaf values (leaves, w) of the user's model.
        own_ridge: the default ridge on the parameters, and in words where it comes from.
        table: the training rows as the user passed them, for display; `None` if not available.
    """

    scale: Tensor
    base: Tensor
    outputs: Tensor | None

    def __init__(self, ensemble: TreeEnsemble) -> None:
        super().__init__()
        values, outputs = torch.tensor(ensemble.values, dtype=torch.float64), ensemble.outputs
        self.leaf_values = nn.Parameter(values)
        self.register_buffer("scale", torch.ones(len(values), dtype=values.dtype))
        self.register_buffer("base", torch.tensor(ensemble.base, dtype=values.dtype))
        self.register_buffer("outputs", None if outputs is None else torch.tensor(outputs, dtype=torch.int64))
        self.ensemble = ensemble
        self.reread: Callable[[], Any] = lambda: ensemble.values
        self.own_ridge: tuple[float, str] | None = None
        self.table: Any = None
        self.eval()

    def forward(self, leaves: Tensor) -> Tensor:
        """(n, k) outputs from (n, trees) leaf numbers."""
        index = leaves.long()
        values = F.embedding(index, self.leaf_values) / self.scale[index].unsqueeze(2)
        if self.outputs is None:
            return self.base + values.sum(1)
        return self.base + values.squeeze(2) @ self.one_hot_outputs(values.dtype)

    @torch.no_grad()
    def raw(self, x: Any) -> Tensor:
        """(n, k) outputs from rows of a table."""
        return torch.cat([self(one["leaves"]) for one in self.inputs(x)])

    def one_hot_outputs(self, dtype: torch.dtype) -> Tensor:
        """(trees, k) one-hot: the output that each tree adds to."""
        assert self.outputs is not None
        return F.one_hot(self.outputs, len(self.base)).to(dtype)

    def rescale(self, scale: Tensor) -> None:
        """Change the scale (leaves,) of the parameters, and keep the leaf values."""
        with torch.no_grad():
            self.leaf_values.mul_((scale / self.scale).unsqueeze(1))
            self.scale.copy_(scale)

    def note_empty(self, count: int) -> None:
        """Add a note for the diagnostics on leaves without training rows, if there are some."""
        if count:
            words = (
                f"{count} of {len(self.scale)} leaves hold no row of the training data (or only rows of weight zero): "
                "new rows in them get no variance from these leaves. Pass all rows that the trees were grown on."
            )
            self.ensemble = replace(self.ensemble, notes=(*self.ensemble.notes, words))

    def check_unchanged(self) -> None:
        """Raise if the leaf values of the user's model have changed since the fit."""
        now = torch.as_tensor(self.reread(), dtype=self.scale.dtype)
        fitted = self.leaf_values.detach() / self.scale.unsqueeze(1)
        if now.shape != fitted.shape or not torch.allclose(now.to(fitted.device), fitted, rtol=1e-9, atol=0.0):
            raise StaleModelError(
                "expected the trees that were fitted, got a model with other leaf values: it was trained again since. "
                "Call whence.fit again."
            )

    def inputs(self, x: Any) -> Iterator[dict[str, Tensor]]:
        """Yield batches of leaf numbers from rows of a table, or from (rows, targets); leaf numbers pass unchanged."""
        if isinstance(x, Iterator) or (isinstance(x, list) and x and isinstance(x[0], (tuple, Mapping))):
            for one in x:  # batches
                yield from self.inputs(one)
            return
        rows = x[0] if isinstance(x, tuple) else x
        if isinstance(rows, Mapping):
            yield dict(rows)
            return
        try:
            leaves = torch.from_numpy(numpy.ascontiguousarray(self.ensemble.leaves(rows), dtype=numpy.int32))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise InputError(
                f"expected rows that the model accepts, got {type(rows).__name__} and from the model: {error}"
            ) from error
        for part in leaves.split(max(1, NUMBERS_AT_ONCE // (leaves.shape[1] * self.leaf_values.shape[1]))):
            yield {"leaves": part}

    def batches(self, x: Any, y: Any = None, weights: Any = None, *, missing: bool = False) -> list[Any]:
        """Batches of leaf numbers, with targets and weights if given; with `missing`, targets may be missing."""
        inputs = list(self.inputs(x))
        sizes = [len(one["leaves"]) for one in inputs]
        columns = {} if y is None else {"y": self.targets(y, missing=missing)}
        if weights is not None:
            columns["sample_weight"] = torch.as_tensor(numpy.asarray(weights, dtype=numpy.float64))
        for name, column in columns.items():
            if column.ndim == 0 or len(column) != sum(sizes):
                raise ShapeError(
                    f"expected {name} with one entry for each of the {sum(sizes)} rows of X, got shape "
                    f"{tuple(column.shape)}."
                )
        if not columns:
            return inputs
        return list(zip(inputs, *(column.split(sizes) for column in columns.values()), strict=True))

    def targets(self, y: Any, where: str = "y", *, missing: bool = False) -> Tensor:
        """Targets as the likelihood takes them: numbers, class numbers, or shares of classes.

        With `missing`, NaN or None becomes NaN, or -1 as a class; without it, missing targets raise an error.
        """
        given, classes = numpy.asarray(y), self.ensemble.classes
        if classes is None:
            if given.dtype.kind not in "fiub":
                raise TargetError(f"expected numbers in {where}, got {given.dtype}. The model is one of regression.")
            if given.dtype.kind == "f" and not missing and not numpy.isfinite(given).all():
                at = int(numpy.flatnonzero(~numpy.isfinite(given).reshape(len(given), -1).all(1))[0])
                raise TargetError(f"expected finite numbers in {where}, got {given[at]} in row {at}. Leave it out.")
            return torch.as_tensor(given.astype(numpy.float64))
        if given.ndim == 2 and given.shape[1] == 1:
            given = given[:, 0]
        if given.ndim != 1:
            raise ShapeError(f"expected one label a row in {where}, got an array of shape {given.shape}.")
        numbers, labels = {label: at for at, label in enumerate(classes)}, given.tolist()
        codes = torch.tensor([numbers.get(label, -1) for label in labels])
        empty = torch.tensor([missing and (label is None or label != label) for label in labels])
        unknown = ((codes < 0) & ~empty).nonzero().flatten().tolist()
        if unknown:
            raise TargetError(
                f"expected labels of the model's classes {list(classes)[:10]} in {where}, got "
                f"{labels[unknown[0]]!r} in row {unknown[0]}. Pass the labels that the model was trained with."
            )
        if self.ensemble.likelihood == "categorical":
            return codes
        if self.ensemble.likelihood == "bernoulli":
            return codes.to(self.base.dtype).masked_fill(empty, torch.nan)
        shares = F.one_hot(codes.clamp_min(0), len(classes)).to(self.base.dtype)
        return shares.masked_fill(empty.unsqueeze(1), torch.nan)
