"""A fit that was saved and loaded answers as it did before, bit by bit."""

from __future__ import annotations

from inspect import isabstract
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import networks
import whence
from fits_to_save import (
    READS_DATA,
    STRUCTURES,
    Fit,
    assert_same_answers,
    classes,
    differences,
    every_structure,
    many,
    regression,
    reload,
    tokens,
)
from whence.api import STRUCTURES as KNOWN
from whence.curvature import Auto, FittedCurvature
from whence.curvature.leaves import FittedLeaves
from whence.io.objects import saved_classes
from whence.likelihoods import LIKELIHOODS

dataless = pytest.mark.parametrize("structure", [name for name in STRUCTURES if name not in READS_DATA])


def test_every_structure_and_curvature_is_saved() -> None:
    assert {type(one) for one in STRUCTURES.values()} == set(KNOWN.values()) - {Auto}  # which takes one of them
    every = [kind for kind in saved_classes(FittedCurvature) if not isabstract(kind)]
    fitted = {type(regression(name, "single_output").tracer.bread) for name in STRUCTURES}
    assert fitted == set(every) - {FittedLeaves}  # of trees: tests/trees saves it
    assert set(LIKELIHOODS) == {"gaussian", "categorical", "bernoulli"}


@every_structure
def test_every_structure(structure: str, tmp_path: Path) -> None:
    fit = regression(structure, "convolution" if structure != "matrix free" else "mlp")
    assert_same_answers(fit, reload(fit, tmp_path))


@pytest.mark.parametrize("name", networks.NAMES)
def test_every_network(name: str, tmp_path: Path) -> None:
    fit = regression("ekfac, two bases", name)
    assert_same_answers(fit, reload(fit, tmp_path, data=False))


@dataless
def test_no_data_needed(structure: str, tmp_path: Path) -> None:
    fit = regression(structure)
    again = reload(fit, tmp_path, data=False)
    assert_same_answers(fit, again)
    assert again.training_frame().equals(fit.tracer.training_frame())
    assert torch.equal(again.suggest(3).index, fit.tracer.suggest(3).index)
    assert torch.equal(again.suggest(3, pool=fit.test).score, fit.tracer.suggest(3, pool=fit.test).score)


@every_structure
def test_every_attribute_is_there(structure: str, tmp_path: Path) -> None:
    fit = regression(structure, recenter=True)
    again = reload(fit, tmp_path)
    assert differences(fit.tracer, again) == []


def test_differences_are_seen(tmp_path: Path) -> None:
    fit = regression("core")
    again = reload(fit, tmp_path)
    object.__setattr__(again.bread.features, "orthonormal", False)  # type: ignore[attr-defined]
    again.adjusted.hec3[0, 0] += 1
    assert differences(fit.tracer, again) == [
        "tracer.bread.features.orthonormal",
        "tracer.meats.roots['hec3']",
        "tracer.meats.total",
        "tracer.adjusted.hec3",
    ]


LOSSES = {
    "categorical": "categorical",
    "categorical, options": whence.Categorical(weight=[1.0, 2.0, 0.5], label_smoothing=0.1, ignore_index=7),
    "bernoulli": "bernoulli",
    "bernoulli, options": whence.Bernoulli(pos_weight=[1.0, 2.0, 3.0]),
}


@every_structure
def test_every_structure_with_classes(structure: str, tmp_path: Path) -> None:
    fit = classes(structure, "categorical" if structure != "matrix free" else "bernoulli")
    again = reload(fit, tmp_path)
    assert_same_answers(fit, again)
    assert torch.equal(again.predict(fit.test).probabilities, fit.tracer.predict(fit.test).probabilities)


@pytest.mark.parametrize("likelihood", LOSSES.values(), ids=LOSSES)
def test_options_of_likelihoods(likelihood: Any, tmp_path: Path) -> None:
    fit = classes("ekfac", likelihood)
    again = reload(fit, tmp_path)
    assert again.problem.likelihood == fit.tracer.problem.likelihood
    assert_same_answers(fit, again)
    assert differences(fit.tracer, again) == []


OPTIONS: dict[str, dict[str, Any]] = {
    "recenter": {"recenter": True},
    "output": {"loo": "output"},
    "unbiased": {"noise": "unbiased", "ridge": 3.0},
    "path": {"ridge": "loo"},
    "last layer": {"parameters": "last_layer"},
    "some": {"parameters": ["0.weight", "2.*"]},
    "chunks": {"execution": whence.Execution(chunk_size=2)},
    "single precision": {"execution": whence.Execution(dtype=torch.float32)},
    "clip": {"leverage": "clip"},
    "groups": {"groups": ["a", "b", "a", "c", "c", "b", "a", "d", "d"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], tmp_path: Path) -> None:
    names = ["primal", "core"] + (["ekfac"] if not {"groups", "ridge"} & set(options) else ["dual"])
    for structure in names:
        fit = regression(structure, **options)
        again = reload(fit, tmp_path)
        assert_same_answers(fit, again)
        assert differences(fit.tracer, again) == []
        if fit.tracer.ridge_path is not None:
            assert again.ridge_path is not None
            assert torch.equal(again.ridge_path.errors, fit.tracer.ridge_path.errors)


@pytest.mark.parametrize("structure", ["primal", "dual", "core", "ekfac", "ekfac, two bases"])
def test_mixtures_of_many_outputs(structure: str, tmp_path: Path) -> None:
    for options in ({}, {"execution": whence.Execution(seed=3)}):
        fit = many(structure, **options)
        again = reload(fit, tmp_path)
        assert differences(fit.tracer, again) == []
        for outputs in (None, "all", [0, 3]):
            ours, theirs = (one.predict(fit.test, outputs=outputs) for one in (again, fit.tracer))
            assert torch.equal(ours.hec3, theirs.hec3)
            assert torch.equal(ours.mean, theirs.mean)


@pytest.mark.parametrize("structure", ["primal", "dual", "ekfac"])
@pytest.mark.parametrize("loo", ["example", "position"])
def test_several_positions(structure: str, loo: str, tmp_path: Path) -> None:
    fit = tokens(structure, loo=loo)
    again = reload(fit, tmp_path)
    assert differences(fit.tracer, again) == []
    ours, theirs = again.predict(fit.test), fit.tracer.predict(fit.test)
    assert theirs.hec3.shape == (4, 3, 3)
    assert torch.equal(ours.hec3, theirs.hec3)
    assert torch.equal(again.loo_residuals, fit.tracer.loo_residuals)


class NextToken(nn.Module):
    """A tiny language model that tells its own loss, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(4, 3), nn.Linear(3, 4)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.rows(tokens).tanh())
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}


def test_labels_of_the_next_token(tmp_path: Path) -> None:
    model = NextToken().double().eval()
    tokens = torch.randint(0, 4, (8, 3))
    batches = [{"tokens": part, "labels": part} for part in tokens.split(3)]
    tracer = whence.fit(model, batches, "categorical", "ekfac", ridge=0.3, progress=False)
    assert "the model predicts the next token" in str(tracer.diagnostics)
    fit = Fit(model, batches, {"tokens": tokens[:2]}, tracer)
    again = reload(fit, tmp_path)
    assert torch.equal(next(again.problem.read("again")).targets, next(tracer.problem.read("again")).targets)
    assert torch.equal(again.predict(fit.test).hec3, tracer.predict(fit.test).hec3)


def test_sample_weights(tmp_path: Path) -> None:
    case = networks.build("mlp")
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 1.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    batches = [(case.inputs[:5], case.targets[:5], weights[:5]), (case.inputs[5:], case.targets[5:], weights[5:])]
    for structure in ("primal", "dual", "ekfac"):
        tracer = whence.fit(case.model, batches, structure=STRUCTURES[structure], ridge=0.6, progress=False)
        fit = Fit(case.model, batches, case.test_inputs, tracer)
        assert_same_answers(fit, reload(fit, tmp_path))
