"""Shares of training examples against dense matrices and refits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import networks
import oracles
import whence
from doubles import fit

RIDGE = 0.5
STRUCTURES = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "matrix_free": whence.Exact(road="matrix_free", tolerance=1e-13),
    "core": whence.Core(),
    "sketch": whence.Sketch(size=20),
    "ekfac": whence.EKFAC(),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
}
SUMS = ("primal", "dual", "matrix_free", "core", "sketch")


@pytest.mark.parametrize("loo", ["example", "output"])
@pytest.mark.parametrize("road", ["primal", "dual"])
def test_shares_are_the_terms_of_the_definition(road: str, loo: str) -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), structure=STRUCTURES[road], ridge=RIDGE, loo=loo)
    found = tracer.attribute(case.test_inputs, top=3, matrix=True)
    outputs, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    _, test, _ = oracles.tangents_of(case.model, case.test_inputs)
    residuals = case.targets.numpy() - outputs
    leverage = oracles.leverage_blocks(tangents, RIDGE)
    inflate = oracles.inflated_residuals_apart if loo == "output" else oracles.inflated_residuals
    left_out = inflate(residuals, leverage, 1.0)
    sigma = oracles.noise_covariance(residuals)
    for x, pull in enumerate(oracles.alignments(test, tangents, RIDGE)):
        ho = np.array([np.trace(a @ sigma @ a.T) for a in pull])
        moves = pull * left_out[:, None, :] if loo == "output" else (pull @ left_out[:, :, None])
        hec3 = (moves**2).sum((1, 2))
        for name, terms in (("ho", ho), ("hec3", hec3)):
            shares = found.shares(name)
            omega = terms / terms.sum()
            order = np.argsort(-omega)[:3]
            np.testing.assert_allclose(shares.matrix[x], omega, rtol=1e-9, atol=1e-13)
            np.testing.assert_array_equal(shares.index[x], order)
            np.testing.assert_allclose(shares.share[x], omega[order], rtol=1e-9)
            np.testing.assert_allclose(shares.total[x], terms.sum(), rtol=1e-9)
            np.testing.assert_allclose(shares.effective[x], 1 / (omega**2).sum(), rtol=1e-9)
            np.testing.assert_allclose(shares.explained[x], omega[order].sum(), rtol=1e-9)
            np.testing.assert_allclose(shares.pull[x], [pull[i] @ left_out[i] for i in order], rtol=1e-8)


@pytest.mark.parametrize("recenter", [False, True])
@pytest.mark.parametrize("structure", SUMS)
@pytest.mark.parametrize("name", ["mlp", "single_output", "convolution", "embedding", "bare_parameters"])
def test_shares_sum_to_the_variance(name: str, structure: str, recenter: bool) -> None:
    case = networks.build(name)
    tracer = fit(case.model, case.batches(4), structure=STRUCTURES[structure], ridge=RIDGE, recenter=recenter)
    found, predicted = tracer.attribute(case.test_inputs), tracer.predict(case.test_inputs)
    for estimator in ("ho", "hec3"):
        shares = found.shares(estimator)
        torch.testing.assert_close(shares.total, predicted.variance(estimator).sum(1), rtol=1e-10, atol=0)
        torch.testing.assert_close(shares.share.sum(1), torch.ones(len(found), dtype=torch.float64))
        assert float(shares.gap.abs().max()) < 1e-10


@pytest.mark.parametrize("structure", ["ekfac", "kfac", "diagonal"])
def test_approximate_meats_have_a_gap_and_it_is_told(structure: str) -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), structure=STRUCTURES[structure], ridge=RIDGE)
    found, predicted = tracer.attribute(case.test_inputs), tracer.predict(case.test_inputs)
    for estimator in ("ho", "hec3"):
        shares, variance = found.shares(estimator), predicted.variance(estimator).sum(1)
        torch.testing.assert_close(shares.variance, variance, rtol=1e-10, atol=0)
        torch.testing.assert_close(shares.total, variance * (1 + shares.gap), rtol=1e-10, atol=0)
        assert float(shares.gap.abs().max()) > 1e-3


def test_pull_is_what_a_refit_without_the_example_gives(generator: torch.Generator) -> None:
    n, p, k = 12, 3, 2
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    y = torch.randn(n, k, generator=generator, dtype=torch.float64)
    tangents = oracles.linear_tangents(x.numpy(), k)
    weights = oracles.ridge_fit(tangents, y.numpy(), RIDGE)
    tracer = fit(networks.linear(weights.reshape(k, p)), [(x[:7], y[:7]), (x[7:], y[7:])], ridge=RIDGE)
    found = tracer.attribute(x[:4], top=n)
    refits = oracles.refits(tangents, y.numpy(), RIDGE)
    moves = oracles.refit_moves(tangents[:4], weights, refits)
    for at in range(4):
        np.testing.assert_allclose(found.hec3.pull[at], moves[at][found.hec3.index[at]], rtol=1e-8, atol=1e-12)


def test_loaders_and_single_batches_give_the_same() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    whole = tracer.attribute(case.test_inputs, top=4, matrix=True)
    parts = tracer.attribute([case.test_inputs[:3], case.test_inputs[3:]], top=4, matrix=True)
    tracer.problem.budget.limit = 100  # one test point at a time
    single = tracer.attribute(case.test_inputs, top=4, matrix=True)
    for other in (parts, single):
        torch.testing.assert_close(other.hec3.index, whole.hec3.index)
        torch.testing.assert_close(other.hec3.matrix, whole.hec3.matrix)
        torch.testing.assert_close(other.ho.pull, whole.ho.pull)


def test_frame_has_a_row_for_each_listed_example() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    found = tracer.attribute(case.test_inputs, top=100)  # more than there are: all of them
    table = found.to_frame()
    assert len(table) == 2 * networks.TEST_POINTS * networks.EXAMPLES
    sums = table.groupby(["prediction", "estimator"])["share"].sum()
    np.testing.assert_allclose(sums, 1.0)
    row = table[(table.estimator == "hec3") & (table.prediction == 1) & (table["rank"] == 1)].iloc[0]
    at = int(found.hec3.index[1, 0])
    assert row["index"] == at
    np.testing.assert_allclose(row.pull, found.hec3.pull[1, 0].norm())
    assert repr(found).startswith(f"Attribution({networks.TEST_POINTS} predictions, {networks.EXAMPLES} of ")


def test_a_perfect_fit_has_no_shares() -> None:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).unsqueeze(1)
    model = networks.linear([[2.0]])
    found = fit(model, [(x, model(x).detach())]).attribute(x[:2], top=3)
    assert not bool(found.hec3.share.any())
    assert not bool(found.hec3.effective.any())
    assert not bool(found.hec3.gap.any())


@pytest.mark.parametrize("top", [0, -1, 1.5, "all"])
def test_top_must_be_a_number_of_examples(top: object) -> None:
    case = networks.build("mlp")
    with pytest.raises(whence.InputError, match="expected top"):
        fit(case.model, case.batches()).attribute(case.test_inputs, top=top)  # type: ignore[arg-type]


def test_estimators_go_by_their_names() -> None:
    case = networks.build("mlp")
    with pytest.raises(whence.InputError, match="expected one of hec3, ho"):
        fit(case.model, case.batches()).attribute(case.test_inputs).shares("hc3")


@pytest.mark.parametrize("given", ["tensor", "list", "array"])
@pytest.mark.parametrize("estimator", ["hec3", "ho"])
def test_groups_carry_what_their_examples_carry_together(estimator: str, given: str) -> None:
    case = networks.build("mlp")
    found = fit(case.model, case.batches(4), ridge=RIDGE).attribute(case.test_inputs, matrix=True)
    labels = np.arange(networks.EXAMPLES) % 3
    groups = {"tensor": torch.from_numpy(labels), "list": ["abc"[at] for at in labels], "array": labels}[given]
    shares = found.by(groups, estimator)
    matrix = found.shares(estimator).matrix.numpy()
    wanted = np.stack([matrix[:, labels == at].sum(1) for at in range(3)], axis=1)
    np.testing.assert_allclose(shares, wanted, rtol=1e-12)
    assert [*shares] == (["a", "b", "c"] if given == "list" else [0, 1, 2])


def test_groups_of_several_kinds_stay_in_their_order() -> None:
    case = networks.build("mlp")
    found = fit(case.model, case.batches(4), ridge=RIDGE).attribute(case.test_inputs, matrix=True)
    shares = found.by(["b", 1] + ["b"] * (networks.EXAMPLES - 2))
    assert [*shares] == ["b", 1]


def test_groups_need_all_shares_and_one_name_an_example() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    with pytest.raises(whence.InputError, match="matrix=True"):
        tracer.attribute(case.test_inputs).by([0] * networks.EXAMPLES)
    found = tracer.attribute(case.test_inputs, matrix=True)
    with pytest.raises(whence.ShapeError, match="expected a group for each"):
        found.by([0, 1])
    with pytest.raises(whence.ShapeError, match="one dimension"):
        found.by(torch.zeros(networks.EXAMPLES, 2))
