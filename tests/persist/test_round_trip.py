"""A fit that was saved and loaded answers as it did before, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import networks
import whence
from fits_to_save import READS_DATA, STRUCTURES, Counts, Fit, classes, differences, many, regression, tokens
from whence.api import LIKELIHOODS
from whence.api import STRUCTURES as KNOWN
from whence.persist.fitted import KINDS

every_structure = pytest.mark.parametrize("structure", STRUCTURES)
dataless = pytest.mark.parametrize("structure", [name for name in STRUCTURES if name not in READS_DATA])


def test_every_structure_and_curvature_is_saved() -> None:
    assert {type(one) for one in STRUCTURES.values()} == set(KNOWN.values())
    fitted = {type(regression(name, "single_output").tracer.bread) for name in STRUCTURES}
    assert fitted == {kind for kind, _, _ in KINDS.values()}
    assert set(LIKELIHOODS) == {"gaussian", "categorical", "bernoulli"}


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
    again.left_out.hec3[0, 0] += 1
    assert differences(fit.tracer, again) == [
        "tracer.bread.features.orthonormal",
        "tracer.meats.roots['hec3']",
        "tracer.meats.total",
        "tracer.left_out.hec3",
    ]


LOSSES = {
    "categorical": "categorical",
    "categorical, options": whence.Categorical(
        weight=[1.0, 2.0, 0.5], label_smoothing=0.1, ignore_index=7, dispersion="pearson"
    ),
    "bernoulli": "bernoulli",
    "bernoulli, options": whence.Bernoulli(pos_weight=[1.0, 2.0, 3.0], dispersion="pearson"),
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
    "chunks": {"chunk_size": 2},
    "single precision": {"dtype": torch.float32},
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
    for options in ({}, {"generator": torch.Generator().manual_seed(3)}):
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


@pytest.mark.parametrize("structure", ["primal", "dual", "core", "ekfac", "ekfac, two bases", "diagonal"])
def test_single_precision_networks(structure: str, tmp_path: Path) -> None:
    case = networks.build("mlp")
    model = case.model.float()
    batches = [(x.float(), y.float()) for x, y in case.batches(4)]
    tracer = whence.fit(model, batches, structure=STRUCTURES[structure], ridge=0.6, progress=False)
    fit = Fit(model, batches, case.test_inputs.float(), tracer)
    assert_same_answers(fit, reload(fit, tmp_path))


@pytest.mark.parametrize("structure", ["primal", "dual", "core", "ekfac"])
def test_questions_about_training_examples(structure: str, tmp_path: Path) -> None:
    fit = regression(structure)
    again = reload(fit, tmp_path)
    ours, theirs = again.attribute(fit.test, top=3), fit.tracer.attribute(fit.test, top=3)
    assert torch.equal(ours.hec3.share, theirs.hec3.share)
    assert torch.equal(ours.ho.index, theirs.ho.index)
    assert again.explain(fit.test).verdicts == fit.tracer.explain(fit.test).verdicts
    if fit.tracer.weighing.policy == "exact":
        change: dict[str, Any] = {"remove": [1], "relabel": {2: [0.5, 0.5]}}
        assert torch.equal(again.what_if(fit.test, **change).change, fit.tracer.what_if(fit.test, **change).change)
    assert again.training_frame(fit.test).equals(fit.tracer.training_frame(fit.test))


def test_a_loaded_fit_can_be_saved(tmp_path: Path) -> None:
    for structure in ("dual", "ekfac, two bases", "core"):
        fit = regression(structure, max_memory=2**28)
        without = reload(fit, tmp_path, data=False)
        without.save(tmp_path / "second.whence")
        assert (tmp_path / "second.whence").read_bytes() == (tmp_path / "fit.whence").read_bytes()
        again = whence.load(tmp_path / "second.whence", fit.model, fit.batches)
        assert_same_answers(fit, again)


def test_another_precision_of_the_algebra(tmp_path: Path) -> None:
    for structure in ("primal", "core", "ekfac", "ekfac, two bases", "dual"):
        fit = regression(structure)
        again = reload(fit, tmp_path, dtype=torch.float32)
        found, wanted = again.predict(fit.test), fit.tracer.predict(fit.test)
        assert found.hec3.dtype == torch.float32
        assert again.residuals.dtype == torch.float32
        for name in ("ho", "hec0", "hec3", "laplace", "jackknife"):
            torch.testing.assert_close(found.variance(name).double(), wanted.variance(name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("structure", ["primal", "core", "ekfac", "ekfac, two bases", "diagonal"])
def test_a_model_in_a_wider_dtype(structure: str, tmp_path: Path) -> None:
    case = networks.build("mlp")
    model = case.model.float()
    batches = [(x.float(), y.float()) for x, y in case.batches(4)]
    tracer = whence.fit(model, batches, structure=STRUCTURES[structure], ridge=0.6, progress=False)
    before = tracer.predict(case.test_inputs.float())
    tracer.save(tmp_path / "fit.whence")
    again = whence.load(tmp_path / "fit.whence", model.double())
    found = again.predict(case.test_inputs.float().double())
    torch.testing.assert_close(found.hec3, before.hec3, rtol=1e-4, atol=1e-7)
    assert "the model computes in torch.float64, and was fitted in torch.float32" in str(again.diagnostics)


class Odd(nn.Module):
    """Buffers of every kind beside a layer in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("wave", torch.tensor([1 + 2j, 3 - 1j]).conj())
        self.register_buffer("hidden", torch.tensor(3, dtype=torch.int8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.norm(self.layer(x.bfloat16()).float())
        return outputs


def test_parameters_and_buffers_of_every_kind(tmp_path: Path) -> None:
    model, x = Odd().eval(), torch.randn(9, 3)
    batches = list(zip(x.split(4), torch.randn(9, 2).split(4), strict=True))
    for structure in ("primal", "ekfac", "core"):
        tracer = whence.fit(model, batches, structure=STRUCTURES[structure], ridge=0.6, progress=False)
        fit = Fit(model, batches, x[:3], tracer)
        assert_same_answers(fit, reload(fit, tmp_path))
    model.mask[0] = False
    with pytest.raises(whence.StaleModelError, match="got changes in mask"):
        whence.load(tmp_path / "fit.whence", model)


@pytest.mark.gpu
@every_structure
def test_another_device(structure: str, tmp_path: Path) -> None:
    fit = regression(structure)
    before = fit.tracer.predict(fit.test)
    fit.tracer.save(tmp_path / "fit.whence")
    again = whence.load(tmp_path / "fit.whence", fit.model.cuda(), fit.batches)
    found = again.predict(fit.test)
    assert found.hec3.device.type == "cuda"
    torch.testing.assert_close(found.hec3.cpu(), before.hec3, rtol=1e-8, atol=1e-10)


def test_a_likelihood_of_ones_own_is_handed_over_again(tmp_path: Path) -> None:
    case = networks.build("mlp")
    batches = [(x, y.abs().round()) for x, y in case.batches(4)]
    fit = Fit(
        case.model, batches, case.test_inputs, whence.fit(case.model, batches, Counts(), ridge=0.6, progress=False)
    )
    assert_same_answers(fit, reload(fit, tmp_path, likelihood=Counts()))
    message = r"expected the likelihood that was fitted with, 'fits_to_save\.Counts', got none\..*likelihood=\.\.\."
    with pytest.raises(whence.InputError, match=message):
        reload(fit, tmp_path)
    with pytest.raises(whence.InputError, match=r"'fits_to_save\.Counts', got a Gaussian"):
        reload(fit, tmp_path, likelihood=whence.Gaussian())


def test_another_likelihood_than_that_of_the_fit(tmp_path: Path) -> None:
    fit = classes("ekfac", "categorical")
    assert_same_answers(fit, reload(fit, tmp_path, likelihood=whence.Categorical()))
    for other in (whence.Categorical(label_smoothing=0.1), whence.Gaussian()):
        with pytest.raises(whence.InputError, match="expected the likelihood that was fitted with"):
            reload(fit, tmp_path, likelihood=other)


def test_a_structure_of_ones_own_is_not_saved(tmp_path: Path) -> None:
    fit = regression("primal")
    kind = type(fit.tracer.bread)
    fit.tracer.bread.__class__ = type("Mine", (kind,), {})
    with pytest.raises(whence.InputError, match="expected a structure of whence itself to save, got Mine"):
        fit.tracer.save(tmp_path / "fit.whence")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_changed_since_the_fit_is_not_saved(tmp_path: Path) -> None:
    fit = regression("primal")
    with torch.no_grad():
        next(fit.model.parameters()).add_(1.0)
    with pytest.raises(whence.StaleModelError):
        fit.tracer.save(tmp_path / "fit.whence")
    assert list(tmp_path.iterdir()) == []


def test_any_tool_reads_the_tensors(tmp_path: Path) -> None:
    from safetensors import safe_open  # used by this test alone

    fit = regression("primal")
    fit.tracer.save(tmp_path / "fit.whence")
    with safe_open(tmp_path / "fit.whence", "pt") as file:
        assert file.metadata()["whence"] == "1"
        assert torch.equal(file.get_tensor("leverage"), fit.tracer.leverage)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    fit = regression("ekfac")
    before = {name: value.clone() for name, value in fit.model.state_dict().items()}
    state = torch.random.get_rng_state()
    reload(fit, tmp_path).predict(fit.test)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in fit.model.state_dict().items())
    assert all(parameter.grad is None for parameter in fit.model.parameters())
