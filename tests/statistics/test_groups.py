"""Groups left out as a whole: cluster-robust variances, held against refits, definitions and statsmodels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
import torch

import loss_oracles
import networks
import oracles
import whence
from classification import ESTIMATORS, PROBLEMS, M, N, Problem, assert_covariances, inputs
from networks import batches_of, linear

GROUPS = np.array([0, 1, 1, 2, 0, 3, 3, 3, 4, 2, 5, 1, 6, 0])  # sizes 3, 3, 2, 3, 1, 1, 1, scattered over batches
STRUCTURES: dict[str, whence.Structure] = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "core": whence.Core(size=1000, tolerance=0.0),
    "sketch": whence.Sketch(size=1000),
}
every_structure = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
TEST = inputs(M, seed=9)


class Regression:
    """Ridge regression with two outputs at its optimum, noise that groups share, and brute-force refits."""

    RIDGE = 0.7

    def __init__(self) -> None:
        rng = np.random.default_rng(8)
        design = rng.normal(size=(N, 3))
        shared = rng.normal(size=(7, 2))[GROUPS]
        self.targets = design @ rng.normal(size=(3, 2)) + shared + 0.3 * rng.normal(size=(N, 2))
        self.tangents = oracles.linear_tangents(design, 2)
        self.test_design = rng.normal(size=(5, 3))
        self.test_tangents = oracles.linear_tangents(self.test_design, 2)
        self.weights = oracles.ridge_fit(self.tangents, self.targets, self.RIDGE)
        self.model = linear(self.weights.reshape(2, 3))
        self.batches = batches_of(torch.as_tensor(design), torch.as_tensor(self.targets), 4)

    def fit(self, **options: Any) -> whence.Tracer:
        return whence.fit(self.model, self.batches, ridge=self.RIDGE, progress=False, **options)

    def without(self, groups: np.ndarray) -> np.ndarray:
        """Weights of a refit without each group."""
        kept = [groups != label for label in np.unique(groups)]
        return np.stack([oracles.ridge_fit(self.tangents[one], self.targets[one], self.RIDGE) for one in kept])


@pytest.fixture(scope="module")
def regression() -> Regression:
    return Regression()


@every_structure
def test_variances_are_those_of_refits_without_each_group(regression: Regression, structure: whence.Structure) -> None:
    tracer = regression.fit(structure=structure, groups=GROUPS)
    found = tracer.predict(torch.as_tensor(regression.test_design))
    moves = oracles.refit_moves(regression.test_tangents, regression.weights, regression.without(GROUPS))
    for name, centred in (("hec3", False), ("jackknife", True)):
        wanted = np.stack([oracles.jackknife_of(move, centred=centred) for move in moves])
        np.testing.assert_allclose(found.covariance(name), wanted, rtol=1e-9, atol=1e-9 * abs(wanted).max())


@every_structure
def test_left_out_residuals_are_those_of_refits(regression: Regression, structure: whence.Structure) -> None:
    tracer = regression.fit(structure=structure, groups=GROUPS)
    weights = regression.without(GROUPS)[GROUPS]  # the refit in which each example was missing
    left_out = regression.targets - np.einsum("nkp,np->nk", regression.tangents, weights)
    np.testing.assert_allclose(tracer.loo_residuals, left_out, rtol=1e-9, atol=1e-10)
    alone = regression.fit(structure=structure)
    torch.testing.assert_close(tracer.leverage, alone.leverage)
    torch.testing.assert_close(tracer.residuals, alone.residuals)
    torch.testing.assert_close(tracer.sigma, alone.sigma)


@every_structure
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_every_estimator_for_classes(problem: Problem, structure: whence.Structure) -> None:
    tracer = problem.fit(structure=structure, groups=GROUPS.tolist())
    assert_covariances(tracer.predict(TEST), problem.expected(TEST, groups=GROUPS))
    outputs, tangents, _ = oracles.tangents_of(problem.model, problem.x)
    wanted = loss_oracles.left_out(tangents, *problem.terms(outputs), 0.4, 1.0, GROUPS)
    np.testing.assert_allclose(tracer.loo_residuals, wanted, rtol=1e-7, atol=1e-8)


def test_softmax_against_fits_to_convergence_without_each_group() -> None:
    # One step of Newton's method for a fit without up to a fifth of the data: right in order of magnitude only. Traces
    # of HeC3 are 0.57 to 0.88 of the jackknife over groups, those of HeC0 0.41 to 0.64.
    rng = np.random.default_rng(2)
    design = np.concatenate([np.ones((60, 1)), rng.normal(size=(60, 2))], axis=1)
    groups = rng.integers(0, 12, size=60)
    logits = design @ rng.normal(size=(3, 3)) + rng.normal(size=(12, 3))[groups]
    y = np.array([rng.choice(3, p=row) for row in np.exp(logits) / np.exp(logits).sum(1, keepdims=True)])
    tangents, terms = oracles.linear_tangents(design, 3), loss_oracles.softmax_terms(np.eye(3)[y])
    weights = loss_oracles.newton_fit(tangents, terms, 0.5)
    loader = batches_of(torch.as_tensor(design), torch.as_tensor(y), 16)
    options = {"ridge": 0.5, "groups": groups, "progress": False}
    found = whence.fit(linear(weights.reshape(3, 3)), loader, "categorical", **options).predict(torch.as_tensor(design))
    moves = oracles.refit_moves(tangents, weights, loss_oracles.refits(tangents, terms, 0.5, groups))
    truth = np.stack([np.trace(oracles.jackknife_of(move, centred=False)) for move in moves])
    ratios = {name: np.asarray(found.variance(name).sum(1)) / truth for name in ("hec0", "hec3")}
    for name, ratio in ratios.items():
        print(f"{name} / jackknife over groups: {ratio.min():.3f} to {ratio.max():.3f}")
    assert ratios["hec3"].min() > 0.5
    assert ratios["hec3"].max() < 1.5
    assert abs(np.log(ratios["hec3"])).mean() < abs(np.log(ratios["hec0"])).mean()


def test_ordinary_least_squares_is_statsmodels_cluster_covariance() -> None:
    rng = np.random.default_rng(4)
    design = np.concatenate([np.ones((40, 1)), rng.normal(size=(40, 2))], axis=1)
    groups = rng.integers(0, 9, size=40)
    y = design @ rng.normal(size=3) + rng.normal(size=9)[groups] + rng.normal(size=40)
    reference = {
        name: sm.OLS(y, design).fit(cov_type="cluster", cov_kwds={"groups": groups, "use_correction": corrected})
        for name, corrected in (("hec0", False), ("hec1", True))
    }
    model = linear(reference["hec0"].params.reshape(1, -1))
    loader = batches_of(torch.as_tensor(design), torch.as_tensor(y), 16)
    tracer = whence.fit(model, loader, ridge=0.0, groups=groups, progress=False)
    points = rng.normal(size=(6, 3))
    for name, fitted in reference.items():
        wanted = np.einsum("mp,pq,mq->m", points, fitted.cov_params(), points)
        np.testing.assert_allclose(tracer.predict(torch.as_tensor(points)).variance(name)[:, 0], wanted, rtol=1e-9)


@every_structure
def test_groups_of_one_change_nothing_but_the_correction(structure: whence.Structure) -> None:
    problem = PROBLEMS["three classes"]
    apart = problem.fit(structure=structure, groups=[f"example {i}" for i in range(N)])
    alone = problem.fit(structure=structure)
    wanted = {name: np.asarray(value) for name, value in alone.predict(TEST, covariance=True).covariances.items()}
    wanted["hec1"] = wanted["hec1"] * N / (N - 1) * (problem.numbers - 1) / problem.numbers
    assert_covariances(apart.predict(TEST), wanted)
    torch.testing.assert_close(apart.loo_residuals, alone.loo_residuals)


@every_structure
@pytest.mark.parametrize("name", ["three classes", "one logit"])
def test_a_weighted_example_is_a_group_of_its_repetitions(structure: whence.Structure, name: str) -> None:
    problem = PROBLEMS[name]
    times = torch.tensor([1, 2, 3, 1, 1, 2, 1, 1, 1, 4, 1, 1, 1, 2])
    again = torch.repeat_interleave(torch.arange(N), times)
    repeated = replace(problem, x=problem.x[again], y=problem.y[again])
    grouped = repeated.fit(structure=structure, groups=again).predict(TEST)
    loader = [(problem.x, problem.y, times)]
    weighted = whence.fit(problem.model, loader, problem.likelihood, structure, ridge=0.4, progress=False).predict(TEST)
    for estimator in ("ho", "hec0", "hec2", "hec3", "jackknife", "laplace"):
        one, two = grouped.covariance(estimator), weighted.covariance(estimator)
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10 * float(two.abs().max()))


@every_structure
def test_ignored_members_do_not_count(structure: whence.Structure) -> None:
    problem = PROBLEMS["three classes"]
    kept = torch.ones(N, dtype=torch.bool)
    kept[[0, 8, 5]] = False  # one of group 0, all of group 4, one of group 3
    ignored = replace(problem, y=torch.where(kept, problem.y, -100)).fit(structure=structure, groups=GROUPS)
    fewer = replace(problem, x=problem.x[kept], y=problem.y[kept]).fit(structure=structure, groups=GROUPS[kept.numpy()])
    wanted = {name: np.asarray(value) for name, value in fewer.predict(TEST, covariance=True).covariances.items()}
    assert_covariances(ignored.predict(TEST), wanted)


@every_structure
def test_names_order_and_batches_do_not_matter(structure: whence.Structure) -> None:
    problem = PROBLEMS["three logits"]
    plain = problem.fit(structure=structure, groups=torch.as_tensor(GROUPS)).predict(TEST)
    wanted = {name: np.asarray(plain.covariance(name)) for name in ESTIMATORS}
    words = np.array(["seven", "one", "three", "nine", "ten", "four", "zero"])[GROUPS]
    assert_covariances(problem.fit(structure=structure, groups=words, batch=3).predict(TEST), wanted)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    other = replace(problem, x=problem.x[order], y=problem.y[order])
    assert_covariances(other.fit(structure=structure, groups=words[order].tolist()).predict(TEST), wanted)


def test_rows_that_do_not_fit_in_memory_are_read_again() -> None:
    problem = PROBLEMS["three classes"]
    plain = problem.fit(structure=STRUCTURES["primal"], groups=GROUPS)
    tight = problem.fit(structure=STRUCTURES["primal"], groups=GROUPS, execution=whence.Execution(max_memory=110_000))
    assert tight.bread.rows.in_memory is False  # type: ignore[attr-defined]
    wanted = {name: np.asarray(plain.predict(TEST).covariance(name)) for name in ESTIMATORS}
    assert_covariances(tight.predict(TEST), wanted)


# --- What cannot be done ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["ekfac", "kfac", "diagonal", whence.Exact(road="matrix_free")])
def test_structures_without_groups_say_so(structure: Any) -> None:
    message = (
        r'structure "exact" \(primal or dual road\), "core" or "sketch" with groups, got \w+\(.*\)\. Leaving groups'
    )
    with pytest.raises(whence.InputError, match=message):
        PROBLEMS["three classes"].fit(structure=structure, groups=GROUPS)


@pytest.mark.parametrize("groups", [GROUPS[:-1], np.stack([GROUPS, GROUPS]), 3, [[1, 2]] * N], ids=str)
def test_groups_of_the_wrong_shape(groups: Any) -> None:
    with pytest.raises(whence.ShapeError, match=r"groups of shape \(14,\), one label for each training example in the"):
        PROBLEMS["three classes"].fit(groups=groups)


def test_groups_that_are_none() -> None:
    problem = PROBLEMS["three classes"]
    missing = GROUPS.astype(float)
    missing[5] = np.nan
    with pytest.raises(whence.InputError, match="groups without missing labels, got nan for training example 5"):
        problem.fit(groups=missing)
    with pytest.raises(
        whence.InputError, match=r"labels of one kind, numbers or words, got a list that cannot be sort"
    ):
        problem.fit(groups=[None, "a"] * 7)
    with pytest.raises(whence.InputError, match="at least two groups with examples that count, got 1"):
        problem.fit(groups=[0] * N)
    with pytest.raises(whence.InputError, match="at least two groups with examples that count, got 1"):
        replace(problem, y=torch.where(torch.arange(N) < 3, problem.y, -100)).fit(groups=[0] * 3 + [1] * 11)


def test_groups_and_single_outputs_exclude_each_other() -> None:
    case = networks.build("mlp")
    with pytest.raises(whence.InputError, match='loo="example" with groups, which are left out as a whole, got "outp'):
        whence.fit(case.model, case.batches(), loo="output", groups=range(9), progress=False)


def test_variances_of_groups_are_not_attributed_to_examples() -> None:
    tracer = PROBLEMS["three classes"].fit(groups=GROUPS)
    with pytest.raises(whence.InputError, match="a fit without groups to attribute variances to single examples"):
        tracer.attribute(TEST)


def test_groups_are_told() -> None:
    tracer = PROBLEMS["three classes"].fit(groups=GROUPS)
    assert "guarded leverages: 0 (groups at the guard, of 7)" in str(tracer.diagnostics)
