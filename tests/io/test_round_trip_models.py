"""Models, likelihoods and devices of every kind come back from a file, or are refused when they are saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import networks
import whence
from fits_to_save import (
    STRUCTURES,
    Counts,
    Fit,
    assert_same_answers,
    classes,
    every_structure,
    regression,
    reload,
)


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
    if fit.tracer.loo.policy == "exact":
        change: dict[str, Any] = {"remove": [1], "relabel": {2: [0.5, 0.5]}}
        assert torch.equal(again.what_if(fit.test, **change).change, fit.tracer.what_if(fit.test, **change).change)
    assert again.training_frame(fit.test).equals(fit.tracer.training_frame(fit.test))


def test_a_loaded_fit_can_be_saved(tmp_path: Path) -> None:
    for structure in ("dual", "ekfac, two bases", "core"):
        fit = regression(structure, execution=whence.Execution(max_memory=2**28))
        without = reload(fit, tmp_path, data=False)
        without.save(tmp_path / "second.whence")
        assert (tmp_path / "second.whence").read_bytes() == (tmp_path / "fit.whence").read_bytes()
        again = whence.load(tmp_path / "second.whence", fit.model, fit.batches)
        assert_same_answers(fit, again)


def test_a_model_in_another_dtype_is_another_model(tmp_path: Path) -> None:
    case = networks.build("mlp")
    model = case.model.float()
    batches = [(x.float(), y.float()) for x, y in case.batches(4)]
    whence.fit(model, batches, ridge=0.6, progress=False).save(tmp_path / "fit.whence")
    with pytest.raises(whence.StaleModelError, match="in the same dtype"):
        whence.load(tmp_path / "fit.whence", model.double())


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
    object.__setattr__(fit.tracer.bread, "__class__", type("Mine", (kind,), {}))
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
        assert json.loads(file.metadata()["whence"])["format"] == 10
        assert torch.equal(file.get_tensor("adjusted.leverage"), fit.tracer.leverage)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    fit = regression("ekfac")
    before = {name: value.clone() for name, value in fit.model.state_dict().items()}
    state = torch.random.get_rng_state()
    reload(fit, tmp_path).predict(fit.test)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in fit.model.state_dict().items())
    assert all(parameter.grad is None for parameter in fit.model.parameters())
