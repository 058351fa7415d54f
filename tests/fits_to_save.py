"""Small fits of every kind, to be saved and loaded again."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import networks
import whence
from classification import inputs, labels, network
from networks import batches_of

STRUCTURES: dict[str, whence.Structure] = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "matrix free": whence.Exact(road="matrix_free"),
    "core": whence.Core(size=12),
    "sketch": whence.Sketch(size=20),
    "ekfac": whence.EKFAC(),
    "ekfac, whole": whence.EKFAC(tolerance=0.0),
    "ekfac, two bases": whence.EKFAC(meat="two_bases", corner=2),
    "ekfac, gradients": whence.EKFAC(basis="gradients"),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
}
READS_DATA = ("dual", "matrix free")
"""Structures whose predictions read the training data."""


@dataclass(frozen=True)
class Fit:
    """A fit, and what it takes to make it or load it."""

    model: nn.Module
    batches: list[Any]
    test: Any
    tracer: whence.Tracer


def regression(structure: str, name: str = "mlp", **options: Any) -> Fit:
    """A regression on one of the small networks."""
    case = networks.build(name)
    batches = case.batches(4)
    settings = {"ridge": 0.6, "progress": False, "structure": STRUCTURES[structure], **options}
    return Fit(case.model, batches, case.test_inputs, whence.fit(case.model, batches, **settings))


def classes(structure: str, likelihood: Any, **options: Any) -> Fit:
    """A classification with three classes, or with three yes-or-no outputs."""
    model, x, y = network(3), inputs(), labels(3)
    kind = likelihood if isinstance(likelihood, str) else likelihood.name
    targets = y if kind == "categorical" else torch.nn.functional.one_hot(y, 3).double()
    batches = batches_of(x, targets, 5)
    settings = {"ridge": 0.4, "progress": False, "structure": STRUCTURES[structure], **options}
    return Fit(model, batches, inputs(4, seed=9), whence.fit(model, batches, likelihood, **settings))


def many(structure: str, columns: int = 2, **options: Any) -> Fit:
    """Six classes, seen through a few mixtures of them."""
    model, batches = network(6), batches_of(inputs(), labels(6), 5)
    settings = {
        "ridge": 0.4,
        "progress": False,
        "structure": STRUCTURES[structure],
        "hessian_columns": columns,
        **options,
    }
    return Fit(model, batches, inputs(4, seed=9), whence.fit(model, batches, "categorical", **settings))


def tokens(structure: str, **options: Any) -> Fit:
    """Three positions an example, a class at each; some do not count."""
    draw = torch.Generator().manual_seed(5)
    model = network(3)
    x = torch.randn(14, 3, 3, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 3, (14, 3), generator=draw)
    y[2, 1] = y[5, 0] = -100
    batches = batches_of(x, y, 5)
    settings = {"ridge": 0.4, "progress": False, "structure": STRUCTURES[structure], **options}
    test = torch.randn(4, 3, 3, generator=draw, dtype=torch.float64)
    return Fit(model, batches, test, whence.fit(model, batches, "categorical", **settings))


class Counts(whence.Likelihood):
    """Counts with rate exp(f): a likelihood of a user's own."""

    name = "counts"

    def check_targets(self, targets: Tensor, outputs: Tensor, where: str) -> Tensor:
        return targets

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets - outputs.exp()

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs / 2).exp().diag_embed()


IGNORED = {"network", "loader", "progress", "budget", "kept", "_full", "summed_meats", "white_curvature", "_capture"}
IGNORED |= {"fingerprints"}
"""What a loaded fit may have otherwise: handles to the world, and what is computed when it is needed."""
IGNORED |= {
    "_batched_backward",
    "_forward_mode",
    "_row_methods",
    "_verified",
    "_chunks",
    "chunk_bytes",
    "target_transform",
    "views",
}
IGNORED |= {
    "captures",
    "_batch",
    "_cache",
    "_cached",
    "_keeps_last",
    "_last_chunk",
    "in_use",
    "saved",
}  # memory beside chunks: a loaded fit plans anew
IGNORED |= {"separate"}  # counts the batches that were checked so far


def differences(one: Any, two: Any, where: str = "tracer", seen: set[int] | None = None) -> list[str]:
    """Where two objects of whence differ, down to the last number: every attribute counts that is not ignored."""
    seen = set() if seen is None else seen
    if id(one) in seen:
        return []
    if isinstance(one, Tensor):
        return [] if isinstance(two, Tensor) and one.dtype == two.dtype and torch.equal(one, two) else [where]
    if isinstance(one, dict):
        same = isinstance(two, dict) and list(one) == list(two)
        return (
            [d for key in one for d in differences(one[key], two[key], f"{where}[{key!r}]", seen)] if same else [where]
        )
    if isinstance(one, (list, tuple)):
        same = isinstance(two, (list, tuple)) and len(one) == len(two)
        pairs = enumerate(zip(one, two, strict=True)) if same else ()
        return [d for at, (a, b) in pairs for d in differences(a, b, f"{where}[{at}]", seen)] if same else [where]
    if type(one).__module__.startswith("whence"):
        seen.add(id(one))
        alike = type(one) is type(two) or "Batches" in type(one).__name__
        mine, theirs = _attributes(one), _attributes(two)
        if not alike or mine.keys() != theirs.keys():
            return [f"{where}: {sorted(mine.keys() ^ theirs.keys()) or type(two).__name__}"]
        return [d for name in mine for d in differences(mine[name], theirs[name], f"{where}.{name}", seen)]
    return [] if one == two or (one is two) else [where]


def _attributes(thing: Any) -> dict[str, Any]:
    names = [f.name for f in fields(thing)] if is_dataclass(thing) else list(vars(thing))
    return {name: getattr(thing, name) for name in names if name not in IGNORED}


every_structure = pytest.mark.parametrize("structure", STRUCTURES)


def reload(fit: Fit, folder: Path, data: bool = True, **options: Any) -> whence.Tracer:
    fit.tracer.save(folder / "fit.whence")
    return whence.load(folder / "fit.whence", fit.model, fit.batches if data else None, progress=False, **options)


def assert_same_answers(fit: Fit, again: whence.Tracer) -> None:
    """Predictions and everything the training set says about itself, equal in every bit."""
    for covariance in (True, None):
        ours, theirs = (one.predict(fit.test, covariance=covariance) for one in (again, fit.tracer))
        assert torch.equal(ours.mean, theirs.mean)
        assert ours.estimators == theirs.estimators
        for name in theirs.estimators:
            assert torch.equal(ours.variance(name), theirs.variance(name)), name
            assert torch.equal(ours.covariance(name), theirs.covariance(name)), name
    for name in ("residuals", "leverage", "loo_residuals", "sigma"):
        assert torch.equal(getattr(again, name), getattr(fit.tracer, name)), name
    assert str(again.diagnostics) == str(fit.tracer.diagnostics)
    assert repr(again) == repr(fit.tracer)
    assert again.degrees_of_freedom == fit.tracer.degrees_of_freedom
