"""Noise apart from design: against brute force, expectations that are known, and simulations with a known truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import networks
import oracles
import whence
from doubles import fit
from whence.influence.split import gaussian_process_weights, nearest_neighbour_weights

RIDGE = 0.5
STRUCTURES = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "core": whence.Core(),
    "sketch": whence.Sketch(size=20),
    "ekfac": whence.EKFAC(),
}


def linear_tracer(x: Tensor, y: Tensor, ridge: float = 1e-3, **options: Any) -> whence.Tracer:
    """Least squares with a bias: recentered from zero weights, the linearized optimum is the optimum."""
    model = torch.nn.Linear(x.shape[1], y.shape[1], dtype=torch.float64)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    return fit(model.eval(), [(x, y)], ridge=ridge, recenter=True, **options)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["mlp", "convolution"])
def test_parts_sum_to_hec3(name: str, structure: str) -> None:
    case = networks.build(name)
    tracer = fit(case.model, case.batches(4), structure=STRUCTURES[structure], ridge=RIDGE)
    found = tracer.split([case.test_inputs[:3], case.test_inputs[3:]])
    torch.testing.assert_close(found.noise + found.design + found.remainder, found.hec3)
    if structure != "ekfac":  # which approximates the meat too
        torch.testing.assert_close(found.hec3, tracer.predict(case.test_inputs).hec3, rtol=1e-9, atol=0)
    assert bool(((found.design_share >= 0) & (found.design_share <= 1)).all())
    assert found.experimental


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@pytest.mark.parametrize("road", ["primal", "dual"])
def test_classes(likelihood: str, road: str, generator: torch.Generator) -> None:
    x = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    targets = y if likelihood == "categorical" else torch.nn.functional.one_hot(y).double()
    model = networks.linear(torch.randn(3, 2, generator=generator, dtype=torch.float64))
    tracer = fit(model, [(x, targets)], likelihood=likelihood, structure=STRUCTURES[road])
    found = tracer.split(x[:4])
    torch.testing.assert_close(found.hec3, tracer.predict(x[:4]).hec3, rtol=1e-9, atol=0)
    assert bool(torch.isfinite(found.design).all())


def test_gaussian_process_regression_is_what_fits_without_the_example_predict(generator: torch.Generator) -> None:
    """Anchors as if left out, by solving without them; other examples from all anchors."""
    points = torch.randn(14, 2, generator=generator, dtype=torch.float64)
    values = torch.stack([points[:, 0].sin() + 0.1 * points[:, 1], torch.randn(14, generator=generator).double()], 1)
    anchors = torch.arange(0, 14, 2)
    distances = torch.cdist(points[anchors], points).square()
    found = gaussian_process_weights(distances, anchors, values)
    seen = values[anchors].numpy()
    within = distances[:, anchors].numpy()
    unit = float(np.sort(within[within > 0])[(np.count_nonzero(within) - 1) // 2])
    sizes = np.empty(14)
    for example in range(14):
        others = [a for a in range(7) if int(anchors[a]) != example]  # fewer than twenty: all of them
        squares = (seen**2).sum(1)
        sizes[example] = np.sqrt(
            (squares[sorted(others, key=lambda a: float(distances[a, example]))[:6]].sum() / squares.mean() + 1) / 7
        )
    for output, (length, nugget) in enumerate(zip(found.lengths, found.nuggets, strict=True)):
        if nugget == 1e9:
            assert not bool(found.weights[output].any())
            continue
        kernel = np.exp(-within / (length * unit)) + nugget * np.diag(sizes[anchors] ** 2)
        scale = seen[:, output] @ np.linalg.solve(kernel, seen[:, output]) / 7
        predicted = found.weights[output].numpy() @ seen[:, output]
        for example in range(14):
            kept = [a for a in range(7) if int(anchors[a]) != example]
            cross = np.exp(-distances[kept, example].numpy() / (length * unit))
            solved = np.linalg.solve(kernel[np.ix_(kept, kept)], cross)
            np.testing.assert_allclose(predicted[example], solved @ seen[kept, output], rtol=1e-6, atol=1e-9)
            unknown, size = 1 - solved @ cross, sizes[example] ** 2
            most = size * (seen[:, output] ** 2).mean() / (unknown + nugget * size)
            np.testing.assert_allclose(
                found.variance[example, output], min(scale, most) * unknown, rtol=1e-5, atol=1e-9
            )
    assert found.nuggets[0] < 1  # the first output is smooth


def test_nearest_neighbours_are_the_nearest(generator: torch.Generator) -> None:
    points = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    values = torch.randn(9, 1, generator=generator, dtype=torch.float64)
    distances = torch.cdist(points, points).square()
    found = nearest_neighbour_weights(distances, torch.arange(9), values, 3)
    for example in range(9):
        order = np.argsort(distances[example].numpy())[1:4]
        np.testing.assert_allclose(found.weights[0, example] @ values[:, 0], values[order, 0].mean())


@pytest.mark.parametrize(("outputs", "ridge"), [(1, 0.0), (2, 0.0), (1, 3.0)])
def test_noise_alone_is_all_noise_on_average(outputs: int, ridge: float, generator: torch.Generator) -> None:
    """With plain means of neighbours the parts are quadratic in the labels, so that their expectation over labels of
    unit variance is their sum over unit vectors: no simulation. Noise is then Ho, and there is no design part."""
    n, p = 20, 3
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    test = torch.randn(5, p, generator=generator, dtype=torch.float64)
    noise, design, plain = (torch.zeros(5, outputs, dtype=torch.float64) for _ in range(3))
    model = networks.linear(np.zeros((outputs, p)))
    for example in range(n):
        for output in range(outputs):
            y = torch.zeros(n, outputs, dtype=torch.float64)
            y[example, output] = 1.0
            tracer = fit(model, [(x, y)], ridge=ridge, recenter=True)
            found = tracer.split(test, neighbours=4)
            noise, design = noise + found.noise, design + found.design
            plain += found.hec3
    tangents, points = (oracles.linear_tangents(part.numpy(), outputs) for part in (x, test))
    a = oracles.alignments(points, tangents, ridge)  # (m, n, k, k)
    wanted = (a**2).sum((1, 3))
    np.testing.assert_allclose(noise, wanted, rtol=0.08)
    assert float((design.abs() / torch.from_numpy(wanted)).max()) < 0.08
    assert float((plain / torch.from_numpy(wanted)).min()) > 1.0  # HeC3 alone is too large


Truth = Callable[[Tensor, torch.Generator], Tensor]


def uneven(x: Tensor, generator: torch.Generator) -> Tensor:
    return (0.3 + 0.7 * x[:, :1].abs()) * torch.randn(len(x), 1, generator=generator, dtype=x.dtype)


SCENARIOS: dict[str, tuple[Truth, float, float]] = {
    "noise": (lambda x, g: x.sum(1, keepdim=True) + uneven(x, g), -0.05, 0.15),
    "misspecified": (lambda x, g: x.sum(1, keepdim=True) + (x[:, :1] ** 2 - 1) / 2, 0.85, 1.01),
    "both": (lambda x, g: x.sum(1, keepdim=True) + (x[:, :1] ** 2 - 1) / 2 + uneven(x, g), 0.3, 0.6),  # truth 0.46
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_shares_on_simulations_with_a_known_truth(name: str, generator: torch.Generator) -> None:
    truth, low, high = SCENARIOS[name]
    test = torch.randn(20, 1, generator=generator, dtype=torch.float64).clamp(-2, 2)
    design, both = 0.0, 0.0
    for _ in range(20):
        x = torch.randn(100, 1, generator=generator, dtype=torch.float64)
        found = linear_tracer(x, truth(x, generator)).split(test)
        design += float(found.design.sum())
        both += float((found.design + found.noise).sum())
    assert low <= design / both <= high


def test_outputs_have_sources_of_their_own(generator: torch.Generator) -> None:
    x = torch.randn(150, 2, generator=generator, dtype=torch.float64)
    y = torch.cat([uneven(x, generator), x[:, :1] ** 2], 1)
    found = linear_tracer(x, y).split(x[:30])
    shares = found.design.sum(0) / (found.design + found.noise).sum(0)
    assert float(shares[0]) < 0.2
    assert float(shares[1]) > 0.85
    assert found.sources.nuggets[0] > 10 * found.sources.nuggets[1]


def test_examples_of_weight_zero_are_as_if_removed(generator: torch.Generator) -> None:
    x = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(20, 1, generator=generator, dtype=torch.float64) + x[:, :1] ** 2
    weights = torch.ones(20, dtype=torch.float64)
    weights[[3, 8]] = 0.0
    kept = weights > 0
    model = networks.linear([[0.3, 0.1]])
    some = fit(model, [(x[kept], y[kept])]).split(x[:5])
    all_ = fit(model, [(x, y, weights)]).split(x[:5])
    for name in ("hec3", "noise", "design"):
        torch.testing.assert_close(getattr(all_, name), getattr(some, name), rtol=1e-8, atol=1e-12)


def test_weights_stand_for_noise_of_another_size(generator: torch.Generator) -> None:
    """An example of weight w is one of variance 1 / w: scaling everything by a root gives the same fit."""
    x = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(30, 1, generator=generator, dtype=torch.float64)
    weights = torch.full((30,), 4.0, dtype=torch.float64)
    model = networks.linear([[0.3, 0.1]])
    plain = fit(model, [(x, y)], ridge=0.5).split(x[:5])
    heavy = fit(model, [(x, y, weights)], ridge=2.0).split(x[:5])
    for name in ("hec3", "noise", "design"):
        torch.testing.assert_close(getattr(heavy, name), getattr(plain, name), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("structure", ["dual", "ekfac"])
def test_little_memory_changes_nothing(structure: str) -> None:
    case = networks.build("mlp")
    tracer = fit(
        case.model,
        case.batches(4),
        structure=STRUCTURES[structure],
        ridge=RIDGE,
        execution=whence.Execution(chunk_size=2),
    )
    wanted = tracer.split(case.test_inputs)
    tracer.problem.budget.limit = 20_000
    found = tracer.split(case.test_inputs)
    torch.testing.assert_close(found.noise, wanted.noise, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(found.design, wanted.design, rtol=1e-9, atol=1e-13)
    tracer.problem.budget.limit = 100
    with pytest.raises(whence.TooLargeError, match="anchors"):
        tracer.split(case.test_inputs)


def test_a_part_of_the_examples_can_stand_for_all(generator: torch.Generator) -> None:
    x = torch.randn(150, 1, generator=generator, dtype=torch.float64)
    tracer = linear_tracer(x, x**2)
    some, all_ = tracer.split(x[:20], anchors=50), tracer.split(x[:20])
    assert (some.sources.anchors, all_.sources.anchors) == (50, 150)
    assert abs(float(some.design.sum() / all_.design.sum()) - 1) < 0.2


def test_outputs_left_out_singly() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE, loo="output")
    found = tracer.split(case.test_inputs)
    torch.testing.assert_close(found.hec3, tracer.predict(case.test_inputs).hec3, rtol=1e-9, atol=0)


def test_results_show_themselves() -> None:
    case = networks.build("mlp")
    found = fit(case.model, case.batches(4)).split(case.test_inputs)
    assert repr(found).startswith("Split(4 predictions; of their HeC3 noise ")
    assert repr(found).endswith("experimental)")
    assert "Experimental" in str(found)
    assert max(map(len, str(found).splitlines())) <= 80
    table = found.to_frame()
    assert list(table.columns) == ["hec3", "noise", "design", "remainder", "design_share"]
    np.testing.assert_allclose(table.noise + table.design + table.remainder, table.hec3)


def test_a_perfect_fit_has_no_parts() -> None:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).unsqueeze(1)
    model = networks.linear([[2.0]])
    found = fit(model, [(x, model(x).detach())]).split(x[:2])
    assert not bool(found.hec3.any())
    assert found.design_share.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("options", [{"neighbours": 0}, {"neighbours": 1.5}, {"anchors": -1}])
def test_numbers_of_examples_are_checked(options: dict[str, Any]) -> None:
    case = networks.build("mlp")
    with pytest.raises(whence.InputError, match="whole number of examples"):
        fit(case.model, case.batches()).split(case.test_inputs, **options)


def test_refusals() -> None:
    case = networks.build("mlp")
    with pytest.raises(whence.InputError, match="without groups"):
        fit(case.model, case.batches(), groups=[0, 0, 0, 1, 1, 1, 2, 2, 2]).split(case.test_inputs)
    x = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(whence.InputError, match="three training examples"):
        fit(networks.linear([[1.0, 1.0, 1.0]]), [(x, x[:, :1])]).split(x)
