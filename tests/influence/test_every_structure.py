"""The contract of tracing: every verb, for every likelihood and structure, against what must agree with it."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import networks
import whence
from classification import bernoulli, categorical, inputs
from networks import batches_of
from whence.api import STRUCTURES as KNOWN
from whence.curvature import Auto
from whence.likelihoods import LIKELIHOODS

RIDGE = 0.4
EXACT: dict[str, whence.Structure] = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "matrix_free": whence.Exact(road="matrix_free"),
    "whole core": whence.Core(size=10_000, tolerance=0.0),
    "whole sketch": whence.Sketch(size=10_000),
}
ROUGH: dict[str, whence.Structure] = {
    "core": whence.Core(size=9),
    "sketch": whence.Sketch(size=12),
    "ekfac": whence.EKFAC(),
    "two bases": whence.EKFAC(meat="two_bases"),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
}
STRUCTURES = EXACT | ROUGH
LOSSES = ("gaussian", "categorical", "bernoulli")
TEST = inputs(5, seed=9)
every_loss = pytest.mark.parametrize("loss", LOSSES)


def test_every_likelihood_and_structure_is_here() -> None:
    assert set(LOSSES) == set(LIKELIHOODS)
    assert {type(structure) for structure in STRUCTURES.values()} == set(KNOWN.values()) - {Auto}


def network_and_data(loss: str) -> tuple[torch.nn.Module, Tensor, Tensor, Any]:
    """A tanh network with data, and a label that an example may be given instead of its own."""
    if loss == "gaussian":
        problem = bernoulli(2)
        return problem.model, problem.x, inputs(len(problem.x), seed=4)[:, :2], [0.3, -0.2]
    problem = categorical(3) if loss == "categorical" else bernoulli(2)
    return problem.model, problem.x, problem.y, torch.tensor(1) if loss == "categorical" else [1.0, 0.0]


@functools.cache
def fitted(loss: str, structure: str) -> whence.Tracer:
    model, x, y, _ = network_and_data(loss)
    return whence.fit(model, batches_of(x, y, 7), loss, STRUCTURES[structure], ridge=RIDGE, progress=False)


def asked(tracer: whence.Tracer, label: Any, test: Any = TEST) -> dict[str, Any]:
    """The answers of all verbs, as arrays by name."""
    found: dict[str, Any] = {}
    attribution = tracer.attribute(test, top=4, matrix=True)
    for name in ("hec3", "ho"):
        shares = attribution.shares(name)
        for field in fields(shares):
            found[f"attribute, {name} {field.name}"] = getattr(shares, field.name)
    table = tracer.training_frame(test)
    found |= {f"training_frame, {name}": torch.tensor(table[name].to_numpy()) for name in table}
    explanation = tracer.explain(test, top=3)
    found |= {f"explain, {field.name}": getattr(explanation, field.name) for field in fields(explanation)}
    found["suggest, labels"] = tracer.suggest(budget=5).index
    pool = tracer.suggest(budget=3, pool=test)
    found |= {"suggest, pool": pool.index, "suggest, total": pool.total}
    if tracer.loo.policy == "exact":
        changed = tracer.what_if(test, remove=[1], repeat=[3], relabel={5: label})
        found |= {f"what_if, {field.name}": getattr(changed, field.name) for field in fields(changed)}
    found.pop("what_if, likelihood", None)
    return {name: torch.as_tensor(value).cpu() for name, value in found.items() if value is not None}


def numbers_of(tracer: whence.Tracer) -> dict[str, dict[str, float]]:
    """What trust says, without how well the solves went."""
    trust = tracer.trust(TEST, sample=3, tolerance=1e-9, seconds=1e9)
    return {check.name: {k: v for k, v in check.numbers.items() if k != "solved"} for check in trust}


@functools.cache
def answers(loss: str, structure: str) -> dict[str, Any]:
    return asked(fitted(loss, structure), network_and_data(loss)[3])


@functools.cache
def trusted_numbers(loss: str, structure: str) -> dict[str, dict[str, float]]:
    return numbers_of(fitted(loss, structure))


def agree(found: dict[str, Any], wanted: dict[str, Any], rtol: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=rtol * 1e-3, err_msg=name)


KEEPING = [(loss, name) for loss in LOSSES for name in EXACT if name != "primal"]


@pytest.mark.parametrize(
    ("loss", "structure"),
    [pair for pair in KEEPING if pair[1] != "matrix_free" or pair[0] == "categorical"],  # seconds for every loss
)
def test_structures_that_keep_everything_agree(loss: str, structure: str) -> None:
    agree(answers(loss, structure), answers(loss, "primal"), rtol=1e-6)
    found, wanted = (dict(trusted_numbers(loss, name)) for name in (structure, "primal"))
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
    assert found["distance"]["hec3"] == pytest.approx(1.0, rel=1e-7)
    assert found["leave-one-out"]["factor"] == pytest.approx(1.0, rel=1e-7)


@every_loss
@pytest.mark.parametrize("structure", ROUGH)
def test_structures_that_do_not_keep_everything_answer_too(loss: str, structure: str) -> None:
    tracer = fitted(loss, structure)
    n, m = tracer.problem.n, len(TEST)
    found = answers(loss, structure)
    for name, value in found.items():
        # A regression has neither of the first two, few examples no limit for the source, and frequency needs a pool.
        undefined = ("probability", "ambiguity", "source_limit", "frequency")
        if name not in [f"explain, {one}" for one in undefined]:
            assert bool(torch.isfinite(value.double()).all()), name
    predicted = tracer.predict(TEST)
    for name in ("ho", "hec3"):
        assert found[f"attribute, {name} matrix"].shape == (m, n)
        torch.testing.assert_close(found[f"attribute, {name} matrix"].sum(1), torch.ones(m, dtype=torch.float64))
        torch.testing.assert_close(found[f"attribute, {name} variance"], predicted.variance(name).sum(1))
        if tracer.loo.policy == "exact":
            torch.testing.assert_close(
                found[f"attribute, {name} total"], predicted.variance(name).sum(1), rtol=1e-8, atol=0
            )
    assert bool(((found["explain, noise_p"] >= 0) & (found["explain, noise_p"] <= 1)).all())
    assert found["training_frame, suspect_rank"].sort().values.tolist() == list(range(1, n + 1))
    trust = tracer.trust(TEST, seconds=1e9)
    assert all(check.level in ("fine", "careful", "do not trust") for check in trust), str(trust)


def one_weight(loss: str) -> tuple[torch.nn.Module, Tensor, Tensor, Any]:
    """Outputs that share a single weight: every structure's curvature is the one number there is."""
    k = {"gaussian": 1, "categorical": 3, "bernoulli": 2}[loss]
    generator = torch.Generator().manual_seed(6)
    mixing = torch.randn(k, 3, 1, generator=generator, dtype=torch.float64)
    model = networks.SharedOutputs(mixing, torch.full((1,), 0.3, dtype=torch.float64)).eval()
    _, x, y, label = network_and_data(loss)
    return (model, x, y[:, :1], [0.5]) if loss == "gaussian" else (model, x, y, label)


def fitted_to_one_weight(loss: str, structure: str) -> whence.Tracer:
    model, x, y, _ = one_weight(loss)
    options: dict[str, Any] = {"ridge": RIDGE, "leverage": "exact", "progress": False}
    return whence.fit(model, batches_of(x, y), loss, STRUCTURES[structure], **options)


@functools.cache
def asked_of_one_weight(loss: str) -> dict[str, Any]:
    return asked(fitted_to_one_weight(loss, "primal"), one_weight(loss)[3])


@every_loss
@pytest.mark.parametrize("structure", [name for name in STRUCTURES if name not in ("primal", "sketch", "core")])
def test_with_a_single_weight_every_structure_is_exact(loss: str, structure: str) -> None:
    """Leverages are true ones here, whichever structure they come from."""
    model, x, _, label = one_weight(loss)
    tracer = fitted_to_one_weight(loss, structure)
    found = asked(tracer, label)
    agree(found, asked_of_one_weight(loss), rtol=1e-7)
    if structure in ("ekfac", "diagonal"):
        distance = numbers_of(tracer)["distance"]
        assert distance["ho"] == pytest.approx(1.0, rel=1e-8)
        assert distance["hec3"] == pytest.approx(1.0, rel=1e-8)
    # by hand, with numbers instead of matrices
    slopes = torch.einsum("ni,cip->nc", x, model.mixing).numpy()
    roots = tracer.problem.hessian_roots
    hessians = np.stack([np.eye(slopes.shape[1])] * len(x)) if roots is None else (roots @ roots.mT).numpy()
    curved = np.einsum("nc,ncd,nd->n", slopes, hessians, slopes)
    damped = curved.sum() + RIDGE
    residuals = tracer.residuals.numpy()
    eye = np.eye(slopes.shape[1])
    left_out = np.stack(
        [
            np.linalg.solve(eye - L @ np.outer(s, s) / damped, e)
            for L, s, e in zip(hessians, slopes, residuals, strict=True)
        ]
    )
    pulls = ((slopes * left_out).sum(1) / damped) ** 2
    order = np.argsort(-pulls)[:4]
    for row in range(len(TEST)):  # all predictions rest on the same weight
        np.testing.assert_array_equal(found["attribute, hec3 index"][row], order)
        np.testing.assert_allclose(found["attribute, hec3 share"][row], (pulls / pulls.sum())[order], rtol=1e-8)
    np.testing.assert_allclose(found["training_frame, leverage"], curved / damped, rtol=1e-8)
    np.testing.assert_allclose(found["training_frame, loo_residual"], np.linalg.norm(left_out, axis=1), rtol=1e-8)


@every_loss
@pytest.mark.parametrize("structure", ["dual", "core", "ekfac"])
def test_weights_and_the_optimum(loss: str, structure: str) -> None:
    """Weighted examples, recentred residuals: a weight of two is the example twice."""
    model, x, y, label = network_and_data(loss)
    twice = torch.ones(len(x), dtype=torch.float64)
    twice[2], twice[6] = 2.0, 0.0
    options: dict[str, Any] = {"ridge": RIDGE, "recenter": True, "progress": False, "structure": STRUCTURES[structure]}
    weighted = whence.fit(model, [(x, y, twice)], loss, **options)
    rows = [i for i in range(len(x)) if i != 6] + [2]
    repeated = whence.fit(model, [(x[rows], y[rows])], loss, **options)
    torch.testing.assert_close(weighted.bread.degrees_of_freedom, repeated.bread.degrees_of_freedom)
    found, wanted = (tracer.attribute(TEST, matrix=True).ho for tracer in (weighted, repeated))
    assert found.matrix is not None
    assert wanted.matrix is not None
    ours = found.matrix.clone()
    ours[:, 2] /= 2
    torch.testing.assert_close(ours[:, rows], wanted.matrix, rtol=1e-7, atol=1e-12)
    assert not bool(ours[:, 6].any())
    for verdicts in (tracer.explain(TEST) for tracer in (weighted, repeated)):
        assert bool(torch.isfinite(verdicts.noise_p).all())
    trust = weighted.trust(TEST, seconds=1e9)
    assert trust["leverage"].numbers["of"] == len(x) - 1
    if structure == "dual":
        assert trust["stationarity"].numbers["standard errors"] < 1e-6
        changed = weighted.what_if(TEST, remove=[2], relabel={3: label})
        assert bool(torch.isfinite(changed.change).all())


@every_loss
@pytest.mark.parametrize("structure", ["primal", "dual", "ekfac"])
def test_little_memory_changes_the_pieces_only(loss: str, structure: str) -> None:
    model, x, y, label = network_and_data(loss)
    loader = batches_of(x, y, 9)
    tracer = whence.fit(
        model,
        loader,
        loss,
        STRUCTURES[structure],
        ridge=RIDGE,
        progress=False,
        execution=whence.Execution(chunk_size=4),
    )
    wanted, trusted = answers(loss, structure), trusted_numbers(loss, structure)
    tracer.bread.problem.budget.limit = tracer.problem.budget.limit = 40_000  # bytes
    agree(asked(tracer, label), wanted, rtol=1e-7)
    for name, numbers in numbers_of(tracer).items():
        assert numbers == pytest.approx(trusted[name], rel=1e-5, abs=1e-7), name


@every_loss
@pytest.mark.parametrize("structure", ["ekfac", "two bases", "kfac", "diagonal"])
def test_examples_are_not_taken_out_of_approximate_leverages(loss: str, structure: str) -> None:
    with pytest.raises(whence.InputError, match='Fit with structure="exact", "core" or "sketch"'):
        fitted(loss, structure).what_if(TEST, remove=[1])


@pytest.mark.parametrize("structure", ["primal", "dual", "core", "sketch"])
def test_groups_are_refused_where_single_examples_are_meant(structure: str) -> None:
    model, x, y, _ = network_and_data("gaussian")
    groups = [i // 3 for i in range(len(x))]
    tracer = whence.fit(
        model, batches_of(x, y), "gaussian", STRUCTURES[structure], ridge=RIDGE, progress=False, groups=groups
    )
    for ask in (tracer.attribute, tracer.explain, lambda x: tracer.what_if(x, remove=[1])):
        with pytest.raises(whence.InputError, match="without groups"):
            ask(TEST)
    for ask_nothing in (tracer.training_frame, tracer.suggest):
        with pytest.raises(whence.InputError, match="without groups"):
            ask_nothing()
    assert len(tracer.suggest(budget=2, pool=TEST)) == 2  # no leave-one-out in it


@pytest.mark.gpu
@every_loss
@pytest.mark.parametrize("structure", [name for name in STRUCTURES if name != "matrix_free"])
def test_devices_agree(loss: str, structure: str) -> None:
    model, x, y, label = network_and_data(loss)
    try:
        on_gpu = whence.fit(
            model.cuda(),
            batches_of(x, y),
            loss,
            STRUCTURES[structure],
            ridge=RIDGE,
            progress=False,
            execution=whence.Execution(precision="float32"),
        )
        found, trust = asked(on_gpu, label), numbers_of(on_gpu)
    finally:
        model.cpu()
    agree(found, answers(loss, structure), rtol=1e-6)
    for name, numbers in trusted_numbers(loss, structure).items():
        assert trust[name] == pytest.approx(numbers, rel=1e-5, abs=1e-6), name
