"""The protocol of the disentanglement error: its draws, its formula by hand, and that of the authors' package."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from whence_paper.baselines.base import Data, Sampled
from whence_paper.disentanglement.cases import CASES, drawn
from whence_paper.disentanglement.measures import sampled, traced
from whence_paper.disentanglement.protocol import (
    SHUFFLED,
    SIZES,
    Curve,
    disentanglement_error,
    shuffled,
    smaller,
)


def test_parts_of_a_training_set_are_nested_and_have_all_classes():
    labels = torch.arange(200) % 7
    parts = [set(smaller(labels, share, torch.Generator().manual_seed(3)).tolist()) for share in SIZES]
    assert all(small <= large for small, large in itertools.pairwise(parts))
    assert parts[-1] == set(range(200))
    assert {int(labels[at]) for at in parts[0]} == set(range(7))


@pytest.mark.parametrize("share", SHUFFLED)
def test_shuffled_labels_keep_their_counts(share):
    labels = torch.arange(100) % 4
    found = shuffled(labels, share, torch.Generator().manual_seed(0))
    assert torch.equal(found.bincount(), labels.bincount())
    assert int((found != labels).sum()) <= 100 * share


def test_the_error_by_hand():
    sizes = Curve([0.2, 0.6, 1.0], {"A": [1.0, 0.0, 1.0], "E": [3.0, 2.0, 1.0], "flat": [1.0, 1.0, 1.0]})
    noise = Curve([1.0, 0.5, 0.0], {"A": [0.0, 1.0, 2.0], "E": [0.0, 1.0, 2.0], "flat": [1.0, 1.0, 1.0]})
    assert [sizes.correlation(name) for name in ("A", "E", "flat")] == pytest.approx([0, 1, 0])
    assert disentanglement_error(sizes, noise, "A", "E") == pytest.approx(0.25)  # E follows noise as it should not
    assert disentanglement_error(sizes, noise, "A", "flat") == pytest.approx(0.25)  # and a constant follows nothing
    assert disentanglement_error(sizes, noise, "flat", "flat") == pytest.approx(0.5)


def test_correlations_are_those_of_the_authors_package():
    """The figure that 0.1.6 returns counts |1 - corr(A, noise)| twice, where its page has E over sizes."""
    metric = pytest.importorskip("disentanglement_error.error_metric")
    model = pytest.importorskip("disentanglement_error.disentangling_model").DisentanglingModel
    rows = np.random.default_rng(0).random((len(SIZES) + len(SHUFFLED), 3))

    class Told(model):
        def __init__(self):
            self.at = -1

        def fit(self, x, y):
            self.at += 1

        def predict_disentangling(self, x):
            return np.zeros(len(x)), np.full(len(x), rows[self.at, 1]), np.full(len(x), rows[self.at, 2])

        def score(self, true, predicted):
            return rows[self.at, 0]

    labels = np.arange(40) % 2
    _, theirs = metric.calculate_disentanglement_error(
        labels[:, None], labels, Told(), labels[:, None], labels, {"n_runs": 1}, return_json=False
    )
    sizes, noise = (
        Curve(part[:, 0].tolist(), {"A": part[:, 1].tolist(), "E": part[:, 2].tolist()})
        for part in np.split(rows, [len(SIZES)])
    )
    ours = [sizes.correlation("A"), sizes.correlation("E"), noise.correlation("A"), noise.correlation("E")]
    assert ours == pytest.approx([theirs[f"{key}_corr"] for key in ("ua_Ue", "ue_Ue", "ua_Ua", "ue_Ua")])


def test_information_of_samples_by_hand():
    certain = torch.tensor([[30.0, 0.0], [0.0, 30.0]])
    found = sampled(Sampled(lambda x: certain.unsqueeze(1), True), torch.zeros(1, 3))
    assert found.measures["expected entropy"] == pytest.approx(0, abs=1e-6)
    assert found.measures["mutual information"] == pytest.approx(np.log(2), abs=1e-6)


def test_measures_of_one_network():
    known, asked = drawn(CASES["wine"], None, 0, torch.device("cpu"))
    assert (len(known), len(asked)) == (142, 36)
    torch.testing.assert_close(known.inputs.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    torch.manual_seed(0)
    network = torch.nn.Linear(13, 3)
    found = traced(network, Data(known.inputs, known.targets), asked.inputs, "exact")
    assert found.measures["supported noise"] <= found.measures["noise"] <= 1
    assert found.predicted.shape == (36,)
    x, z = (torch.cat([some.inputs, torch.ones(len(some), 1)], 1).double() for some in (known, asked))
    ridge = 0.1 * x[:20].square().sum(1).mean()
    by_hand = (z @ torch.linalg.inv(x.T @ x + ridge * torch.eye(14)) * z).sum(1)
    assert found.measures["variance"] == pytest.approx(float(by_hand.mean()), rel=1e-4)
