"""What is kept of a fit: variances of differences are those of the covariances, and come back from a file."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import whence
from whence_paper.cifar.fits import Lens, Predicted, fit
from whence_paper.cifar.scores import (
    of_both,
    of_members,
    of_outputs,
    of_probabilities,
    of_variances,
    with_largest_output,
)


def problem(k: int = 4):
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, k)).double().eval()
    x = torch.randn(60, 5, generator=draw, dtype=torch.float64)
    labels = torch.randint(k, (60,), generator=draw)
    return network, x, labels


@pytest.mark.parametrize("way", ["EKFAC, all layers", "dense, last layer"])
def test_differences_have_the_variances_that_covariances_give(way):
    network, x, labels = problem()
    targets = whence.one_hot(labels, 4).double()
    found, facts = fit(network, (x, targets), x[:10], way, share=0.05, batch=20)
    options = {"structure": "ekfac"} if way.startswith("EKFAC") else {"structure": "exact", "parameters": "last_layer"}
    tracer = whence.fit(network, [(x, targets)], ridge=0.05 * 60, progress=False, **options)
    plain = tracer.predict(x[:10], covariance=True)
    order = plain.mean.argsort(dim=1, descending=True)
    for name in ("ho", "hec3"):
        cov = plain.covariance(name)
        for row in range(10):
            first, *others = order[row].tolist()
            wanted = [float(cov[row, first, first] + cov[row, j, j] - 2 * cov[row, first, j]) for j in others]
            torch.testing.assert_close(
                found.differences[name][row], torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=0
            )
        torch.testing.assert_close(found.variances[name], plain.variance(name), rtol=1e-6, atol=0)
    assert facts["n"] == 60
    assert facts["ridge"] == 3.0


def test_predictions_come_back_from_a_file(tmp_path):
    draw = torch.Generator().manual_seed(1)
    values = {name: torch.rand(7, 3, generator=draw, dtype=torch.float64) for name in ("ho", "hec3")}
    kept = Predicted(torch.randn(7, 3, generator=draw), values, {name: value[:, 1:] for name, value in values.items()})
    kept.save(tmp_path / "one.npz")
    back = Predicted.load(tmp_path / "one.npz")
    torch.testing.assert_close(back.outputs.float(), kept.outputs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(back.variances["hec3"], values["hec3"], rtol=5e-3, atol=0)
    torch.testing.assert_close(back.differences["ho"], values["ho"][:, 1:], rtol=5e-3, atol=0)


def test_a_lens_shows_outputs_or_their_differences():
    lens = Lens(nn.Identity())
    x = torch.tensor([[0.0, 3.0, 1.0]])
    assert torch.equal(lens(x), x)
    lens.differences = True
    assert lens(x).tolist() == [[3.0, 2.0, 3.0]]


def test_scores_are_higher_for_what_is_less_sure():
    outputs = torch.tensor([[1.0, -1.0, -1.0], [0.1, 0.0, -1.0]])
    small, large = torch.full((1, 3), 0.01), torch.full((1, 3), 1.0)
    variances = {"hec3": torch.cat([small, large]).double()}
    found = Predicted(outputs, variances, {"hec3": variances["hec3"][:, 1:]})
    every = {
        **of_outputs(outputs),
        **of_variances(found, "hec3"),
        **of_both(found, "hec3"),
        **of_probabilities(found, "hec3"),
    }
    assert len(every) == 11
    for name, score in every.items():
        assert float(score[1]) > float(score[0]), name


def test_variances_that_grow_with_the_outputs_are_told():
    outputs = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    grows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0]])
    found = Predicted(outputs, {"ho": grows, "hec3": grows.flip(0)}, {})
    assert with_largest_output(found) == pytest.approx({"ho": 1.0, "hec3": -1.0})


def test_an_ensemble_that_disagrees_is_less_sure():
    members = torch.tensor([[[1.0, -1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, 1.0]]])
    for name, score in of_members(members).items():
        assert float(score[1]) > float(score[0]), name


def test_without_differences_there_are_fewer_scores_and_nothing_else_changes(tmp_path):
    network, x, labels = problem()
    data = x, whence.one_hot(labels, 4).double()
    whole, _ = fit(network, data, x[:10], "dense, last layer", share=0.05)
    plain, _ = fit(network, data, x[:10], "dense, last layer", share=0.05, differences=False)
    plain.save(tmp_path / "plain.npz")
    back = Predicted.load(tmp_path / "plain.npz")
    assert back.differences == plain.differences == {}
    assert of_both(back, "hec3") == {}
    assert set(of_variances(back, "hec3")) == {"sum", "predicted output"}
    torch.testing.assert_close(plain.variances["hec3"], whole.variances["hec3"], rtol=0, atol=0)
