"""What other libraries are made to say is what they compute: against closed forms, and against each other."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from whence_paper.baselines import Data, Recipe

ROOT = Path(__file__).resolve().parents[2]
N, WEIGHT_DECAY = 60, 0.02


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def problem(outputs: int, classes: bool) -> tuple[Recipe, Tensor]:
    """A linear model whose weights are all zero, and inputs to predict at."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=draw, dtype=torch.float64)
    y = torch.randint(outputs, (N,), generator=draw) if classes else x.sum(1, keepdim=True).repeat(1, outputs)

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, outputs, bias=False))
        nn.init.zeros_(model[0].weight)
        return model

    recipe = Recipe(make, lambda *_: None, Data(x.float(), y), "categorical" if classes else "gaussian")
    return recipe, torch.randn(12, 3, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("peer", ["nngeometry", "curvlinops"])
def test_ekfac_of_others_is_the_laplace_variance(peer: str, classes: bool) -> None:
    pytest.importorskip(peer)
    from benchmarks.peers_ekfac import PeerEKFAC  # importable from the root only

    # EKFAC is exact for one output, and for two classes that are equally likely everywhere.
    recipe, at = problem(2 if classes else 1, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers
        answer = PeerEKFAC(peer, WEIGHT_DECAY, times=3.0).fit(recipe).predict(at)
    x = recipe.data.inputs.double()
    with torch.no_grad():
        outputs = recipe.network().double()(x)
    if classes:
        share = outputs.softmax(1)
        root = (share[:, 0] * share[:, 1]).sqrt().unsqueeze(1) * torch.tensor([[1.0, -1.0]])
        rows = (root.unsqueeze(2) * x.unsqueeze(1)).flatten(1)  # (n, 2 * 3)
        ridge = 3.0 * N * WEIGHT_DECAY
        noise = 1.0
    else:
        rows, ridge = x, 3.0 * N * WEIGHT_DECAY / 2
        noise = float((outputs - recipe.data.targets).square().mean())
        assert answer.noise == pytest.approx(noise, rel=1e-6)
    inverse = torch.linalg.inv(rows.T @ rows + ridge * torch.eye(rows.shape[1]))
    inverse = inverse.reshape(2, 3, 2, 3).diagonal(dim1=0, dim2=2) if classes else inverse.unsqueeze(2)
    wanted = noise * torch.einsum("mi,ijc,mj->mc", at, inverse, at)
    torch.testing.assert_close(answer.variance, wanted, rtol=1e-6, atol=1e-12)
    if classes:
        assert answer.probabilities is not None
        smooth = answer.mean / (1 + torch.pi / 8 * wanted).sqrt()
        torch.testing.assert_close(answer.probabilities, smooth.softmax(1), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("classes", [False, True])
def test_influences_on_the_own_loss(classes: bool) -> None:
    pytest.importorskip("kronfluence")
    from benchmarks.influences import self_influences

    recipe, _ = problem(2 if classes else 1, classes)
    x, y, network = recipe.data.inputs, recipe.data.targets.float(), recipe.network()
    y = recipe.data.targets if classes else y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peer
        found = self_influences(network, x, y, classes, {"much": 1e6, "own": None}, seed=0)
    with torch.no_grad():
        outputs = network(x).double()
    # Where damping outweighs all curvature, an influence is the squared gradient of the loss over the damping.
    gradient = outputs.softmax(1) - nn.functional.one_hot(y, 2) if classes else 2 * (outputs - y)
    wanted = gradient.square().sum(1) * x.double().square().sum(1) / 1e6
    torch.testing.assert_close(found["much"], wanted, rtol=1e-3, atol=0.0)
    assert bool((found["own"] > found["much"]).all())


def test_answers_that_are_no_numbers_are_none() -> None:
    from benchmarks.peers_ekfac import finite

    from whence_paper.baselines import Answer

    right = Answer(torch.zeros(2, 1), torch.ones(2, 1))
    assert finite(right) is right
    with pytest.raises(FloatingPointError, match="not numbers"):
        finite(Answer(torch.zeros(2, 1), torch.tensor([[1.0], [float("nan")]])))


def test_a_peer_that_fails_is_told() -> None:
    from benchmarks.record import failed

    assert failed(ModuleNotFoundError("No module named 'x'")) == {"failed": "not installed: No module named 'x'"}
    assert failed(RuntimeError("first\nsecond")) == {"failed": "RuntimeError: first"}
    assert failed(RuntimeError()) == {"failed": "RuntimeError: "}
