"""The oracles themselves, before anything is compared with them: against R, and closed forms against refits."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import oracles
from reference.make_inputs import LINEAR, load

REFERENCE = Path(__file__).parent.parent / "reference"


def test_oracles_owe_nothing_to_the_package() -> None:
    # Read, not imported: another test may have loaded the package already.
    for path in (Path(oracles.__file__), REFERENCE / "make_inputs.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        origins = plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {"numpy"} <= origins
        assert not {name for name in origins if name.split(".")[0] == "whence"}


@pytest.mark.parametrize("name", LINEAR)
def test_closed_forms_give_the_numbers_of_r(name: str) -> None:
    expected = json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8"))
    chosen = load(name)
    k, p = chosen.targets.shape[1], chosen.design.shape[1]
    tangents, test_tangents = (oracles.linear_tangents(x, k) for x in (chosen.design, chosen.test_design))
    weights = oracles.ridge_fit(tangents, chosen.targets, 0.0)
    residuals = chosen.targets - tangents @ weights
    sigma = oracles.noise_covariance(residuals, dof=k * p)
    covariances = oracles.covariances(test_tangents, tangents, residuals, 0.0, sigma=sigma)

    np.testing.assert_allclose(weights.reshape(k, p).T, expected["coefficients"], rtol=1e-9)
    np.testing.assert_allclose(residuals, expected["residuals"], rtol=1e-9, atol=1e-9 * abs(residuals).max())
    leverage = oracles.leverage_blocks(tangents, 0.0)
    hat_values = np.array(expected["hat_values"])
    np.testing.assert_allclose(leverage, hat_values[:, None, None] * np.eye(k), rtol=1e-10, atol=1e-14)
    for ours, theirs in (("ho", "const"), ("hec0", "HC0"), ("hec1", "HC1"), ("hec2", "HC2"), ("hec3", "HC3")):
        wanted = np.reshape(expected[f"prediction_{theirs}"], (-1, k, k))
        np.testing.assert_allclose(covariances[ours], wanted, rtol=1e-10, atol=1e-12 * abs(wanted).max())


def test_leaving_an_example_out_by_formula_is_leaving_it_out(rng: np.random.Generator) -> None:
    # Outputs share parameters, so leverage blocks are full matrices.
    tangents, test_tangents = rng.normal(size=(9, 3, 5)), rng.normal(size=(4, 3, 5))
    targets, ridge = rng.normal(size=(9, 3)), 0.3
    weights = oracles.ridge_fit(tangents, targets, ridge)
    residuals = targets - tangents @ weights
    closed = oracles.covariances(test_tangents, tangents, residuals, ridge, sigma=np.eye(3))
    moves = oracles.refit_moves(test_tangents, weights, oracles.refits(tangents, targets, ridge))
    for name, centred in (("hec3", False), ("jackknife", True)):
        refitted = np.stack([oracles.jackknife_of(move, centred=centred) for move in moves])
        np.testing.assert_allclose(closed[name], refitted, rtol=1e-9, atol=1e-12)

    apart = oracles.covariances(test_tangents, tangents, residuals, ridge, sigma=np.eye(3), apart=True)
    moves = oracles.refit_moves(test_tangents, weights, oracles.refits_apart(tangents, targets, ridge))
    refitted = np.stack([oracles.jackknife_of(move, centred=False) for move in moves])
    np.testing.assert_allclose(apart["hec3"], refitted, rtol=1e-9, atol=1e-12)
    assert abs(apart["hec3"] / closed["hec3"] - 1).max() > 1e-3, "the two readings must differ here"


def test_loo_error_is_the_error_of_refits(rng: np.random.Generator) -> None:
    tangents, targets, ridge = rng.normal(size=(8, 2, 4)), rng.normal(size=(8, 2)), 0.7
    start = rng.normal(size=4)  # the recentred model forgets where it started
    closed = oracles.loo_error(tangents, targets - tangents @ start, start, ridge)
    left_out = [targets[i] - tangents[i] @ w for i, w in enumerate(oracles.refits(tangents, targets, ridge))]
    assert closed == pytest.approx(np.square(left_out).sum() / 8, rel=1e-10)


def test_tangents_by_loops_are_jacrev() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs = torch.randn(5, 3, dtype=torch.float64)
    outputs, tangents, weights = oracles.tangents_of(model, inputs)
    parameters = dict(model.named_parameters())
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (inputs,)))(parameters)
    flat = torch.cat([block.reshape(5, 2, -1) for block in jacobian.values()], dim=2).detach().numpy()
    np.testing.assert_allclose(tangents, flat, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(outputs, model(inputs).detach().numpy(), rtol=1e-12)
    assert weights.shape == (26,)
