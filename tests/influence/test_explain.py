"""Verdicts: the yardsticks against brute force, and the noisy and the missing class of the paper's protocol."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

import networks
import oracles
import whence
from classification import linear_softmax
from doubles import fit
from whence.cli.query import SavedNetwork
from whence.errors import InputError, ShapeError
from whence.influence import Calibration
from whence.influence.fitted import leave_one_out_leverage
from whence.influence.neighbours import output_directions
from whence_paper.demo_trial import QUICK, WEIGHT_DECAY, draw_task, train

RIDGE = 0.5


def test_leave_one_out_leverage_is_that_of_a_curvature_without_the_example() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    for i, block in enumerate(tangents):
        others = np.delete(tangents, i, axis=0)
        wanted = block @ np.linalg.solve(oracles.damped_curvature(others, RIDGE), block.T)
        np.testing.assert_allclose(leave_one_out_leverage(tracer)[i], wanted, rtol=1e-8)


def test_leave_one_out_leverage_with_a_hessian(generator: torch.Generator) -> None:
    tracer, tangents, hessians = linear_softmax(generator, RIDGE)
    for i, block in enumerate(tangents):
        others = [J.T @ L @ J for j, (J, L) in enumerate(zip(tangents, hessians, strict=True)) if j != i]
        wanted = block @ np.linalg.solve(sum(others) + RIDGE * np.eye(9), block.T)
        np.testing.assert_allclose(leave_one_out_leverage(tracer)[i], wanted, rtol=1e-8)


def calibration(leverages: list[float], mean: float = 1.0, variance: float = 1.0) -> Calibration:
    """Of which only the leverages and the moments of the squares matter."""
    empty: Any = None
    ordered = torch.tensor(leverages, dtype=torch.float64)
    moments = {"mean": mean, "variance": variance, "examples": len(ordered)}
    fields = {field.name: empty for field in dataclasses.fields(Calibration)}
    return Calibration(**{**fields, **moments, "leverages": ordered, "ordinary": 1.0})


def test_scarcity_is_a_rank_among_leave_one_out_leverages() -> None:
    usual = calibration([1.0, 2.0, 3.0, 4.0])
    found = usual.scarcity_p(torch.tensor([0.5, 2.0, 2.5, 9.0], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([5.0, 4.0, 3.0, 1.0], dtype=found.dtype) / 5)


def test_noise_has_the_moments_of_shuffled_residuals(generator: torch.Generator) -> None:
    values = torch.rand(30, generator=generator, dtype=torch.float64) ** 4
    weights = torch.rand(30, generator=generator, dtype=torch.float64) ** 2
    weights = weights / weights.sum()
    usual = calibration([0.0] * 30, float(values.mean()), float(values.var()))
    shuffled = torch.stack([values[torch.randperm(30, generator=generator)] @ weights for _ in range(4000)])
    effective = 1.0 / weights.square().sum()
    for level in (0.5, 0.8, 0.95):
        limit = shuffled.quantile(level)
        found = float(usual.noise_p(limit.reshape(1), effective.reshape(1)))
        assert abs(found - (1 - level)) < 0.03  # three standard errors of 4,000 draws, and the gamma's own error


def test_calibration_without_any_residual() -> None:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).unsqueeze(1)
    model = networks.linear([[2.0]])
    found = fit(model, [(x, model(x).detach())]).explain(torch.tensor([[0.0], [50.0]], dtype=torch.float64), level=0.85)
    assert found.verdicts == ("confident", "scarce data")


def where_noise_grows(generator: torch.Generator, n: int = 400) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """A line through points left of zero without noise, right of zero with."""
    x = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 2 - 1
    noise = torch.randn(n, 1, generator=generator, dtype=torch.float64) * torch.where(x > 0, 1.0, 0.05)
    # bumps: a prediction leans on the examples around it only
    centres = torch.linspace(-1, 1, 12, dtype=torch.float64)
    features = torch.exp(-((x - centres) ** 2) / 0.02)
    return x, x.sin() + noise, features


@pytest.mark.parametrize("structure", ["exact", "ekfac", "core", "sketch"])
def test_noise_and_scarcity_are_found_where_they_were_put(structure: str, generator: torch.Generator) -> None:
    x, y, features = where_noise_grows(generator)
    weights = oracles.ridge_fit(features.unsqueeze(1).numpy(), y.numpy(), 0.1)
    tracer = fit(networks.linear(weights.reshape(1, -1)), [(features, y)], ridge=0.1, structure=structure)
    points = torch.tensor([[-0.5], [0.5]], dtype=torch.float64)
    centres = torch.linspace(-1, 1, 12, dtype=torch.float64)
    inputs = torch.exp(-((points - centres) ** 2) / 0.02)
    far = 5 * inputs.flip(0).roll(3, 1)  # in a direction and of a size the training set has not
    found = tracer.explain(torch.cat([inputs, far[:1]]), top=4)
    assert found.verdicts[:2] == ("confident", "noisy labels nearby")
    assert found.verdicts[2] in ("scarce data", "both")
    assert bool((x[found.check[1]] > 0).all())
    table = found.to_frame()
    assert list(table.verdict) == list(found.verdicts)
    assert "Check the labels of training examples" in found.sentence(1)
    assert "Collect examples near this input" in found.sentence(2)
    assert str(found).splitlines()[3].split()[1:4] == ["noisy", "labels", "nearby"]


def test_verdicts_on_digits_with_a_noisy_and_a_missing_class() -> None:
    """Six networks, and the mean over them; another torch trains others, whose areas differ by two hundredths."""
    areas, scarce = [], []
    for seed, structure in enumerate(("exact", "core", "exact", "exact", "exact", "exact")):
        generator = torch.Generator().manual_seed(seed)
        task = draw_task(generator, QUICK.train_size)
        network = train(task, QUICK.steps, generator)
        ridge = whence.ridge_from_weight_decay(WEIGHT_DECAY, len(task.train_inputs))
        tracer = fit(network, [(task.train_inputs, task.train_targets)], ridge=ridge, structure=structure)
        found = tracer.explain(task.test_inputs)
        noisy, missing = task.test_digits == task.noisy, task.test_digits == task.missing
        uncertain = (found.noisy | found.scarce) & (noisy | missing)
        areas.append([roc_auc_score(noisy[uncertain], one[uncertain]) for one in (found.noise, found.source)])
        scarce.append([float(found.scarce[one].double().mean()) for one in (missing, task.ordinary)])
        assert min(areas[-1]) >= 0.85
        assert float((~found.noisy & ~found.scarce)[task.ordinary].double().mean()) > 0.85
        assert float(found.noisy[noisy].double().mean()) > 0.9
        assert scarce[-1][0] > 2 * scarce[-1][1]
    assert min(np.mean(areas, axis=0)) >= 0.95
    of_missing, of_ordinary = np.mean(scarce, axis=0)
    assert of_missing > 5 * of_ordinary


@pytest.mark.parametrize("level", [0.0, 1.0, 95, "high", None])
def test_the_level_must_lie_between_zero_and_one(level: Any) -> None:
    case = networks.build("mlp")
    with pytest.raises(whence.InputError, match="level between 0 and 1"):
        fit(case.model, case.batches()).explain(case.test_inputs, level=level)


def test_numbers_of_training_examples_are_checked() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    with pytest.raises(InputError, match="-1 to"):
        tracer.explain(case.inputs[:2], examples=[0, len(case.inputs)])
    with pytest.raises(ShapeError, match="each of 2 inputs, got 3"):
        tracer.explain(case.inputs[:2], examples=[0, 1, 2])


def test_noise_is_told_from_scarcity_under_ekfac_too() -> None:
    """Scarcity does not depend on the structure, noise by its leave-one-out residuals alone."""
    generator = torch.Generator().manual_seed(1)
    task = draw_task(generator, QUICK.train_size)
    network = train(task, QUICK.steps, generator)
    ridge = whence.ridge_from_weight_decay(WEIGHT_DECAY, len(task.train_inputs))
    tracer = fit(network, [(task.train_inputs, task.train_targets)], ridge=ridge, structure="ekfac")
    noisy, missing = task.test_digits == task.noisy, task.test_digits == task.missing
    either = noisy | missing
    found = tracer.explain(task.test_inputs)
    assert roc_auc_score(noisy[either], found.noise[either]) >= 0.95
    exact = fit(network, [(task.train_inputs, task.train_targets)], ridge=ridge).explain(task.test_inputs)
    for name in ("leverage", "probability"):
        torch.testing.assert_close(getattr(found, name), getattr(exact, name), equal_nan=True)
    same = [one == other for one, other in zip(found.verdicts, exact.verdicts, strict=True)]
    assert sum(same) >= 0.9 * len(same)


def by_hand(
    gradients: Any,
    asked: Any,
    squares: Any,
    classes: bool,
    differing: Any = None,
    distances: Any = None,
    angles: Any = None,
    ambiguity: Any = None,
) -> dict[str, Any]:
    """Leverages, averages and what is expected there, with dense matrices and scikit-learn.

    Args:
        gradients: (n, c, d) of the training examples' predictions.
        asked: (m, c, d) of those asked about.
        squares: (n,) squared residuals; those of classes with the example left out.
        classes: whether gradients have length one.
        differing: (n,) share of the nearest examples that have another label and its error, if these are known.
        distances: (n,) of the examples from others with the same answer, and (m,) of those asked, if these are known.
        angles: the same from the nearest directions of features, and how many features there are.
        ambiguity: (n,) of the network's answers to the examples, each left out, and (m,) to those asked, if known.
    """
    if classes:
        gradients, asked = (g / np.linalg.norm(g, axis=2, keepdims=True) for g in (gradients, asked))
    n, c, d = gradients.shape
    flat = gradients.reshape(-1, d)
    ridge = ((gradients**2).sum() / n if classes else RIDGE) * np.eye(d)
    inverse = np.linalg.inv(flat.T @ flat + ridge)
    hats = [g @ inverse @ g.T for g in gradients]
    if not classes:
        squares = squares / (1 - np.array([np.trace(hat) / c for hat in hats]))
    left_out = []
    for i, own in enumerate(gradients):  # a real fit without the example
        others = np.delete(gradients, i, axis=0).reshape(-1, d)
        left_out.append(np.trace(own @ np.linalg.solve(others.T @ others + ridge, own.T)) / c)
    weights = np.array([[((g @ inverse @ h.T) ** 2).sum() for h in gradients] for g in (*gradients, *asked)])
    weights[np.arange(n), np.arange(n)] = 0.0
    heard = np.ones(n, dtype=bool)
    if classes:  # labels of examples that are alone do not count
        heard = np.array(left_out) <= max(0.5, np.sort(left_out)[int(np.ceil(0.95 * n)) - 1] * (1 + 1e-9))
    weights[:, ~heard] = 0.0
    average = weights @ squares / weights.sum(1)
    own = squares
    if differing is not None:
        share, error = differing
        own = np.where(share - 2 * error > squares, share, squares)
    curve = centred(average[:n][heard], own[heard])
    usual = own[heard].mean()
    limit = max(0.1, min(2 * usual, max(0.5, 1 - usual))) if classes else 1.5 * squares.mean()
    agreeing = curve(average[:n]) <= limit
    noise, noise_limit = None, limit
    if ambiguity is not None:
        answered = centred(ambiguity[0][heard], own[heard])
        noise = np.sqrt(np.minimum(curve(average), 1.0) * np.minimum(answered(np.concatenate(ambiguity)), 1.0))
        usual = noise[:n][heard].mean()
        noise_limit = max(0.1, min(2 * usual, max(0.5, 1 - usual)))
    some = agreeing if agreeing.sum() >= max(n / 2, 19) else slice(None)
    leverage = np.array([np.trace(g @ inverse @ g.T) / c for g in asked])
    remote, left_out = leverage, np.array(left_out)
    if distances is not None:
        usual = np.quantile(left_out[some], 0.8)  # leverages count beyond it
        left_out, remote = np.maximum(left_out, usual), np.maximum(remote, usual)
        for (of_examples, of_asked), power in ((distances, 1), (angles[:2], angles[2] / (angles[2] + 16))):
            usual = np.sort(of_examples[some])[(len(of_examples[some]) - 1) // 2]
            left_out, remote = left_out * (of_examples / usual) ** power, remote * (of_asked / usual) ** power
    compared = np.sort(left_out[some])
    return {
        "leverage": leverage,
        "remote": remote,
        "ordinary": compared[(len(compared) - 1) // 2],
        "compared": compared,
        "square": curve(average[n:]),
        "without itself": curve(average[:n]),
        "limit": limit,
        "noise": noise,
        "noise limit": noise_limit,
    }


def centred(places: Any, values: Any) -> Any:
    """An isotonic regression whose steps are replaced by lines between their middles."""
    order = np.argsort(places, kind="stable")
    steps = IsotonicRegression().fit(places[order], values[order]).predict(places[order])
    levels = [np.isclose(steps, level, rtol=1e-9, atol=1e-12) for level in np.unique(steps.round(12))]
    middles = [places[order][level].mean() for level in levels]
    return lambda at: np.interp(at, middles, [steps[level].mean() for level in levels])


def from_nearest_directions(x: Any, answers: Any, asked: Any) -> tuple[Any, Any, int]:
    """Mean distances of directions to the five nearest, (n,) of examples to others, (m,) of those asked; features.

    Directions are seen from the mean of all examples, in coordinates in which those of the same answer scatter alike.
    """
    around = np.concatenate([x[answers == c] - x[answers == c].mean(0) for c in np.unique(answers)])
    scatter = around.T @ around / len(x)
    values, vectors = np.linalg.eigh(scatter + np.trace(scatter) / len(scatter) * np.eye(len(scatter)))
    centre, root = x.mean(0), vectors / np.sqrt(values)
    x, asked = ((rows - centre) @ root for rows in (x, asked))
    x, asked = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, asked))
    near = NearestNeighbors(n_neighbors=5, algorithm="brute").fit(x)
    return near.kneighbors()[0].mean(1), near.kneighbors(asked)[0].mean(1), x.shape[1]


def from_same_answers(x: Any, answers: Any, asked: Any, asked_answers: Any) -> tuple[Any, Any]:
    """Roots of leverages in regressions with an intercept on examples with the same answer, (n,) without each; (m,).

    Beside these examples, a tenth of an example for each feature has the shape that all have around their means.
    """
    d = x.shape[1]
    around = np.concatenate([x[answers == c] - x[answers == c].mean(0) for c in np.unique(answers)])
    penalty = np.zeros((d + 1, d + 1))
    penalty[1:, 1:] = 0.1 * d * around.T @ around / len(x)

    def distance(row: Any, others: Any) -> float:
        if not len(others):
            return float(np.sqrt(1e6 - 1))  # nobody else: taken for a million examples' leverage
        design, own = np.insert(others, 0, 1, axis=1), np.insert(row, 0, 1)
        return float(np.sqrt(own @ np.linalg.solve(design.T @ design + penalty, own)))

    numbers = np.arange(len(x))
    without = [
        distance(row, x[(answers == own) & (numbers != i)]) for i, (row, own) in enumerate(zip(x, answers, strict=True))
    ]
    return np.array(without), np.array(
        [distance(row, x[answers == own]) for row, own in zip(asked, asked_answers, strict=True)]
    )


def other_labels(features: Any, labels: Any) -> Any:
    """(n,) share of each example's nearest others, as many as its class has, whose label is another, and its error."""
    near = (
        NearestNeighbors(n_neighbors=len(labels) - 1, metric="cosine").fit(features).kneighbors(return_distance=False)
    )
    sizes = np.bincount(labels) - 1
    share = np.array([np.mean(labels[row[: sizes[own]]] != own) for row, own in zip(near, labels, strict=True)])
    return share, np.sqrt(share * (1 - share) / sizes[labels])


def test_regression_by_hand() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    _, asked, _ = oracles.tangents_of(case.model, case.test_inputs)
    wanted = by_hand(tangents, asked, (tracer.residuals.numpy() ** 2).mean(1), classes=False)
    found = tracer.explain(case.test_inputs)
    np.testing.assert_allclose(found.leverage, wanted["leverage"], rtol=1e-7)
    np.testing.assert_allclose(found.scarcity, wanted["leverage"] / wanted["ordinary"], rtol=1e-7)
    np.testing.assert_allclose(found.noise, np.sqrt(wanted["square"]), rtol=1e-6)
    own = tracer.explain(case.inputs, examples=range(len(tangents))).noise
    np.testing.assert_allclose(own, np.sqrt(wanted["without itself"]), rtol=1e-6)
    assert found.noise_limit == pytest.approx(wanted["limit"] ** 0.5)
    assert not found.classes
    assert bool(found.probability.isnan().all() & found.ambiguity.isnan().all())


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Probabilities nearest to each row, by bisection for what is taken away."""
    low, high = values.amin(1, keepdim=True) - 1, values.amax(1, keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        large = (values - middle).clamp_min(0).sum(1, keepdim=True) > 1
        low, high = torch.where(large, middle, low), torch.where(large, high, middle)
    return (values - low).clamp_min(0)


@pytest.mark.parametrize(("loss", "low"), [("categorical", 0.0), ("gaussian", 0.0), ("gaussian", -1.0)])
def test_classes_by_hand(loss: str, low: float, generator: torch.Generator) -> None:
    """The gradient of the predicted class's output alone; squared error on a code of classes is about classes too."""
    x, asked = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (21, 6))
    labels = torch.randint(3, (21,), generator=generator)
    model = networks.linear(0.1 * torch.randn(3, 3, generator=generator, dtype=torch.float64))
    one_hot = torch.nn.functional.one_hot(labels, 3).double()
    codes = low + (1 - low) * one_hot
    tracer = fit(model, [(x, labels if loss == "categorical" else codes)], likelihood=loss, ridge=RIDGE)
    outputs = model(torch.cat([x, asked])).detach()
    p = outputs.softmax(1) if loss == "categorical" else outputs - low
    gradients = oracles.linear_tangents(torch.cat([x, asked]).numpy(), 3)
    gradients = np.stack([g[best : best + 1] for g, best in zip(gradients, outputs.argmax(1).tolist(), strict=True)])
    squares = (
        (tracer.loo_residuals / (1 - low)).square().sum(1).clamp_max(2.0).numpy()
    )  # these have oracles of their own
    answers = outputs.argmax(1).numpy()
    distances = from_same_answers(x.numpy(), answers[:21], asked.numpy(), answers[21:])
    angles = from_nearest_directions(x.numpy(), answers[:21], asked.numpy())
    differing = other_labels(x.numpy(), labels.numpy())
    left_out = nearest((one_hot - tracer.loo_residuals / (1 - low)).double())
    shares = p[21:] if loss == "categorical" else nearest(p[21:] / (1 - low))
    differ = torch.stack([(row.outer(row) * (1 - torch.eye(3))).sum() for row in torch.cat([left_out, shares])])
    ambiguity = (differ[:21].numpy(), differ[21:].numpy()) if loss == "categorical" else None
    wanted = by_hand(gradients[:21], gradients[21:], squares, True, differing, distances, angles, ambiguity)
    found = tracer.explain(asked)
    assert found.classes
    np.testing.assert_allclose(found.leverage, wanted["leverage"], rtol=1e-7)
    np.testing.assert_allclose(found.scarcity, wanted["remote"] / wanted["ordinary"], rtol=1e-7)
    square = np.minimum(wanted["square"], 1.0)
    np.testing.assert_allclose(found.disagreement, square, rtol=1e-6)
    np.testing.assert_allclose(found.noise, square if ambiguity is None else wanted["noise"][21:], rtol=1e-6)
    some = torch.tensor([-1, 4, 20, -1, 0, 7])  # inputs that are training examples, in two batches
    mixed = torch.where(some.unsqueeze(1) < 0, asked, x[some])
    own = tracer.explain([mixed[:3], mixed[3:]], examples=some).disagreement
    square = np.where(some < 0, wanted["square"], wanted["without itself"][some])
    np.testing.assert_allclose(own, np.minimum(square, 1.0), rtol=1e-6)
    assert found.disagreement_limit == pytest.approx(wanted["limit"])
    assert found.noise_limit == pytest.approx(wanted["noise limit"])
    odds = [np.log(share / (1 - share)) for share in np.minimum([*wanted["square"], wanted["limit"]], 0.999)]
    stands_out = np.array(odds[:-1]) - odds[-1] - np.log(found.scarcity.numpy() / found.scarcity_limit)
    np.testing.assert_allclose(found.source, stands_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.probability, shares.amax(1))
    torch.testing.assert_close(found.ambiguity, differ[21:])


@pytest.mark.parametrize("outputs", [3, 6])
def test_several_labels_by_hand(outputs: int, generator: torch.Generator) -> None:
    """Yes or no for each output: gradients of all outputs, or of random combinations of more than four."""
    x, asked = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (21, 6))
    y = torch.randint(2, (21, outputs), generator=generator).double()
    model = networks.linear(torch.randn(outputs, 3, generator=generator, dtype=torch.float64))
    tracer = fit(model, [(x, y)], likelihood="bernoulli", ridge=RIDGE)
    gradients = output_directions(outputs).double().numpy() @ oracles.linear_tangents(
        torch.cat([x, asked]).numpy(), outputs
    )
    differ = 2 * tracer.loo_residuals.square()  # of two labels of each output; residuals have oracles of their own
    p = model(asked).sigmoid().detach()
    left_out = (y - tracer.loo_residuals).clamp(0, 1)
    ambiguity = [(2 * some * (1 - some)).mean(1).numpy() for some in (left_out, p)]
    squares = differ.mean(1).clamp_max(2.0).numpy()
    wanted = by_hand(gradients[:21], gradients[21:], squares, classes=True, ambiguity=ambiguity)
    found = tracer.explain(asked)
    assert found.classes
    np.testing.assert_allclose(found.scarcity, wanted["leverage"] / wanted["ordinary"], rtol=1e-7)
    np.testing.assert_allclose(found.disagreement, np.minimum(wanted["square"], 1.0), rtol=1e-6)
    np.testing.assert_allclose(found.noise, wanted["noise"][21:], rtol=1e-6)
    assert found.disagreement_limit == pytest.approx(wanted["limit"])
    assert found.noise_limit == pytest.approx(wanted["noise limit"])
    torch.testing.assert_close(found.probability, torch.maximum(p, 1 - p).mean(1))
    torch.testing.assert_close(found.ambiguity, (2 * p * (1 - p)).mean(1))
    assert "two labels of examples like this one differ" in found.sentence(0)
    assert len(found.notes) == (outputs == 6)


def test_labels_of_several_outputs_that_are_coins(generator: torch.Generator) -> None:
    """One output of two has coins for labels in one place: two labels there differ in a quarter of all pairs."""
    place = torch.arange(600) // 200
    clean = torch.stack([place == 0, place == 2], 1).double()
    coin = torch.randint(2, (600,), generator=generator).double()
    y = torch.stack([clean[:, 0], torch.where(place == 1, coin, clean[:, 1])], 1)
    x = torch.nn.functional.one_hot(place, 3).double()
    tracer = fit(networks.linear([[6.0, -6, -6], [-6.0, 0, 6]]), [(x, y)], likelihood="bernoulli", ridge=RIDGE)
    found = tracer.explain(x)
    assert found.verdicts[200:400] == ("noisy labels nearby",) * 200
    assert found.verdicts.count("noisy labels nearby") == 200
    assert float(found.noise[200:400].mean()) == pytest.approx(0.25, abs=0.02)


def test_what_is_approximated_is_said(generator: torch.Generator, tmp_path: Path) -> None:
    """More weights than projections, and more outputs than are looked at one by one."""
    x = torch.randn(30, 300, generator=generator, dtype=torch.float64)
    y = torch.randn(30, 8, generator=generator, dtype=torch.float64)
    large = fit(torch.nn.Linear(300, 8, dtype=torch.float64), [(x, y)], ridge=RIDGE)
    found = large.explain([x[:2], x[2:4]])
    assert len(found) == 4
    assert found.notes == (
        "Gradients are compared in 2,048 random projections, not in all 2,408 weights.",
        "Gradients are those of 4 random combinations of the 8 outputs, not of each output.",
    )
    assert all(note in " ".join(str(found).split()) for note in found.notes)
    saved = SavedNetwork(large, x[:4], [], "")
    saved.frame(verdicts=True)
    assert saved.notes == list(found.notes)
    large.report(tmp_path / "report.html", x[:4])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(note in page for note in found.notes)
    small = fit(torch.nn.Linear(3, 2, dtype=torch.float64), [(x[:, :3], y[:, :2])], ridge=RIDGE)
    assert small.explain(x[:2, :3]).notes == ()


def test_one_output_with_two_targets_is_about_two_classes(generator: torch.Generator) -> None:
    """The same numbers as two outputs that are each other's negatives."""
    x, asked = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (21, 6))
    y = torch.randint(2, (21, 1), generator=generator).double()
    weights = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    found = fit(networks.linear(weights), [(x, 2 * y - 1)], ridge=RIDGE).explain(asked)
    assert found.classes
    p = ((asked @ weights.T).squeeze(1) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(found.probability, torch.maximum(p, 1 - p))
    regression = fit(networks.linear(weights), [(x, y + 0.01 * x[:, :1])], ridge=RIDGE).explain(asked)
    assert not regression.classes


def test_a_network_that_is_undecided_is_not_called_confident(generator: torch.Generator) -> None:
    """Two clean classes far apart, and a point between them: p = .5, and no noisy label anywhere."""
    x = torch.cat([torch.randn(50, 2, generator=generator) - 4, torch.randn(50, 2, generator=generator) + 4]).double()
    y = (torch.arange(100) >= 50).long()
    model = networks.linear([[-2.0, -2.0], [2.0, 2.0]])
    tracer = fit(model, [(x, y)], likelihood="categorical", ridge=RIDGE)
    found = tracer.explain(torch.tensor([[4.0, 4.0], [-4.0, 4.0], [4.0, -4.01]], dtype=torch.float64))
    assert found.verdicts == ("confident", "scarce data", "scarce data")
    assert found.undecided.tolist() == [False, True, True]
    assert "the model itself is undecided" in found.sentence(1)
    assert not bool(tracer.explain(x).noisy.any())  # a clean table has no noisy verdicts


@pytest.mark.parametrize(("share", "explained"), [(1.0, False), (0.7, True)])
def test_doubt_is_the_labels_where_they_differ_as_often_as_the_network_says(
    share: float, explained: bool, generator: torch.Generator
) -> None:
    """Two places, in which the network says .7, and a third: labels that all agree do not explain it, mixed ones do."""
    place = torch.arange(1000).clamp_max(40) % 2 + 2 * (torch.arange(1000) >= 40)
    agrees = (torch.rand(1000, generator=generator) < share) | (place == 2)
    labels = torch.where(agrees, place % 2, 1 - place % 2)
    x = torch.nn.functional.one_hot(place, 3).double()
    half = 0.5 * float(torch.tensor(0.7 / 0.3).log())
    model = networks.linear([[half, -half, 3.0], [-half, half, -3.0]])
    tracer = fit(model, [(x, labels)], likelihood="categorical", ridge=RIDGE)
    found = tracer.explain(x[:2])
    assert found.probability.tolist() == pytest.approx([0.7, 0.7])
    assert found.ambiguity.tolist() == pytest.approx([0.42, 0.42])
    assert found.undecided.tolist() == [not explained] * 2


def test_coin_labels_are_noisy_and_their_noise_is_one_half(generator: torch.Generator) -> None:
    x = torch.cat([torch.randn(200, 2, generator=generator) + torch.tensor([5.0, 0.0]) * i for i in range(3)]).double()
    place = torch.arange(600) // 200
    coin = torch.randint(2, (600,), generator=generator)
    y = torch.where(place == 1, coin, 2 * (place == 2).long())
    features = torch.cat([torch.nn.functional.one_hot(place, 3).double(), 0.01 * x], 1)
    model = networks.linear([[4.0, 0.0, -9.0, 0, 0], [-4.0, 0.0, -9.0, 0, 0], [-9.0, -9.0, 4.0, 0, 0]])
    tracer = fit(model, [(features, y)], likelihood="categorical", ridge=RIDGE)
    found = tracer.explain(features)
    assert found.verdicts[200:400].count("noisy labels nearby") == 200
    assert found.verdicts.count("noisy labels nearby") == 200
    assert float(found.noise[200:400].mean()) == pytest.approx(0.5, abs=0.02)


def test_a_doubt_leans_to_noise_where_labels_are_noisy_and_to_scarcity_far_away(generator: torch.Generator) -> None:
    _, y, features = where_noise_grows(generator)
    weights = oracles.ridge_fit(features.unsqueeze(1).numpy(), y.numpy(), 0.1)
    tracer = fit(networks.linear(weights.reshape(1, -1)), [(features, y)], ridge=0.1)
    centres = torch.linspace(-1, 1, 12, dtype=torch.float64)
    noisy = torch.exp(-((torch.tensor([[0.4], [0.6]], dtype=torch.float64) - centres) ** 2) / 0.02)
    clean = torch.exp(-((torch.tensor([[-0.4], [-0.6]], dtype=torch.float64) - centres) ** 2) / 0.02)
    found = tracer.explain(torch.cat([noisy, 9 * clean]))
    assert bool((found.source[:2] > 0).all())
    assert bool((found.source[2:] < 0).all())
    assert "source" in found.to_frame()


@pytest.mark.parametrize("structure", ["exact", "ekfac"])
def test_a_difference_that_is_no_chance_is_not_yet_noise(structure: str, generator: torch.Generator) -> None:
    """A few noisy examples far out decide the slope: HeC3 / Ho is high where labels are good too."""
    n, few = 4000, 200
    x = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    x[:few] = 6 + 0.2 * x[:few]
    y = x + torch.where(torch.arange(n) < few, 5.0, 1.0).unsqueeze(1) * torch.randn(
        n, 1, generator=generator, dtype=torch.float64
    )
    features = torch.cat([torch.ones_like(x), x], 1)
    weights = oracles.ridge_fit(features.unsqueeze(1).numpy(), y.numpy(), 0.1)
    tracer = fit(networks.linear(weights.reshape(1, -1)), [(features, y)], ridge=0.1, structure=structure)
    ordinary = torch.tensor([[1.0, 1.3], [1.0, 1.8], [1.0, -1.5]], dtype=torch.float64)
    found = tracer.explain(torch.cat([ordinary, torch.tensor([[1.0, 6.0]], dtype=torch.float64)]))
    assert bool((found.noise_p < 1e-3).all())
    assert found.noisy.tolist() == [False, False, False, True]
    assert found.verdicts[:3] == ("confident",) * 3
    np.testing.assert_allclose(found.noise, [1, 1, 1, 5], rtol=0.1)  # the standard deviations that were drawn with


def test_examples_of_several_shapes_are_asked_about_together(generator: torch.Generator) -> None:
    """Each shape of inputs is a group of its own; what is usual does not depend on how they are batched."""

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(3, 1, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x.mean(1))

    model = Mean().eval()
    parts = [torch.randn(6, length, 3, generator=generator, dtype=torch.float64) for length in (2, 5, 2)]
    y = torch.randn(18, 1, generator=generator, dtype=torch.float64)
    mixed = fit(model, list(zip(parts, y.split(6), strict=True)), ridge=RIDGE)
    means = torch.cat([part.mean(1, keepdim=True) for part in parts])
    plain = fit(model, [(means, y)], ridge=RIDGE)
    torch.testing.assert_close(mixed.explain(means[:4]).source, plain.explain(means[:4]).source)


def test_labels_learned_by_heart_are_noise_all_the_same(generator: torch.Generator) -> None:
    """A network that is certain of random labels leaves nothing in its residuals; their neighbours still contradict."""
    place = torch.arange(300) // 100  # three groups; the labels of the last are random
    x = 5 * torch.nn.functional.one_hot(place, 3) + 0.3 * torch.randn(300, 3, generator=generator)
    y = torch.where(place == 2, torch.randint(2, (300,), generator=generator), place)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2)).double()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(2500):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(x.double()), y).backward()
        optimiser.step()
    net[2].weight.data *= 4.0  # all but certain
    net[2].bias.data *= 4.0
    assert float((net(x.double()).argmax(1) == y)[place == 2].double().mean()) > 0.85
    found = fit(net, [(x.double(), y)], likelihood="categorical", ridge=0.01, structure="ekfac").explain(x.double())
    assert float((found.noise > found.noise_limit)[place == 2].double().mean()) > 0.5
    assert float(found.noise[place == 2].mean()) > 0.25
    assert float((found.noise > found.noise_limit)[place != 2].double().mean()) < 0.05


def test_labels_that_no_other_example_could_predict_are_scarce_not_noisy(generator: torch.Generator) -> None:
    """Two examples, alone in their places, are predicted wrong without themselves, and right new ones near them."""
    place = torch.cat([torch.arange(300) % 2, torch.tensor([2, 3])])
    x = torch.nn.functional.one_hot(place, 4).double() * 3 + 0.1 * torch.randn(302, 4, generator=generator).double()
    labels = place % 2
    model = networks.linear(torch.zeros(2, 4))
    tracer = fit(model, [(x, labels)], likelihood="categorical", ridge=RIDGE, recenter=True)
    found = tracer.explain(x[-2:] + 0.01)
    assert float(tracer.loo_residuals[-2:].square().sum(1).min()) > 0.4  # nothing is known without them
    assert found.verdicts == ("scarce data", "scarce data")
    assert float(found.noise.max()) < found.noise_limit


def classifier_with_wrong_labels(generator: torch.Generator) -> tuple[whence.Tracer, torch.Tensor]:
    """Of 1,400 weights, on three blobs of which one has labels at random; and the inputs."""
    centres = 2.0 * torch.randn(3, 20, generator=generator, dtype=torch.float64)
    labels = torch.arange(600) % 3
    inputs = centres[labels] + torch.randn(600, 20, generator=generator, dtype=torch.float64)
    given = torch.where(labels == 0, torch.randint(0, 3, (600,), generator=generator), labels)
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3)
    network = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(40):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), given).backward()
        optimizer.step()
    tracer = fit(network, [(inputs, given)], ridge=1.0, structure="ekfac", likelihood="categorical")
    return tracer, torch.cat([inputs[:100] + 0.1, 3.0 * inputs[:20]])


def test_leading_directions_stand_for_all(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer, points = classifier_with_wrong_labels(generator)
    monkeypatch.setattr("whence.influence.explanation.FEW_EXAMPLES", 599)
    monkeypatch.setattr("whence.influence.neighbours.LEADING", 10_000)
    everything = tracer.explain(points, top=0)
    for most, close in ((300, 0.02), (100, 0.1)):
        monkeypatch.setattr("whence.influence.neighbours.LEADING", most)
        tracer.__dict__.pop("_quick_calibration")
        few = tracer.explain(points, top=0)
        same = [one == other for one, other in zip(few.verdicts, everything.verdicts, strict=True)]
        assert sum(same) >= 0.95 * len(same)
        torch.testing.assert_close(few.scarcity, everything.scarcity, rtol=close, atol=0.0)
        torch.testing.assert_close(few.noise, everything.noise, rtol=0.0, atol=close)
        assert len(few.notes) == 1
        assert f"along their {most} leading directions" in few.notes[0]


def test_examples_are_named_by_default_where_that_is_cheap(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer, points = classifier_with_wrong_labels(generator)
    few = tracer.explain(points)
    assert few.check.shape == few.near.shape == (len(points), 5)
    monkeypatch.setattr("whence.influence.explanation.FEW_EXAMPLES", 599)
    many = tracer.explain(points)
    assert many.check.shape == (len(points), 0)
    assert "No training examples are named. top=5 names five, and takes longer." in many.notes
    assert "near this input" in str(tracer.explain(points.flip(0)))  # where no examples are named
    assert tracer.explain(points, top=0).notes == many.notes[:-1]
    assert tracer.explain(points, top=2).near.shape == (len(points), 2)


def test_noise_is_the_same_without_naming_examples(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.influence.neighbours.LEADING", 10_000)
    monkeypatch.setattr("whence.influence.explanation.FEW_EXAMPLES", 599)
    tracer, points = classifier_with_wrong_labels(generator)
    own = torch.full((len(points),), -1)
    own[:50] = torch.arange(50)
    for examples in (None, own):
        named, unnamed = (tracer.explain(points, top=top, examples=examples) for top in (5, 0))
        for name in ("noise", "scarcity", "scarcity_p", "probability", "ratio", "source"):
            torch.testing.assert_close(getattr(unnamed, name), getattr(named, name), rtol=1e-4, atol=1e-5)
        same = [one == other for one, other in zip(unnamed.verdicts, named.verdicts, strict=True)]
        assert sum(same) >= 0.95 * len(same)
    assert unnamed.check.shape == unnamed.near.shape == (len(points), 0)
    noisy = int(unnamed.noisy.nonzero()[0])
    assert unnamed.sentence(noisy).endswith("Check the labels nearby.")
    assert len(unnamed.to_frame()) == len(points)


def test_regressions_too_can_do_without_names(generator: torch.Generator) -> None:
    _, y, features = where_noise_grows(generator)
    tracer = fit(networks.linear([[0.0] * 12]), [(features, y)], ridge=0.1, recenter=True)
    named, unnamed = (tracer.explain(features[:50], top=top) for top in (3, 0))
    torch.testing.assert_close(unnamed.noise, named.noise, rtol=1e-9, atol=0.0)


def test_verdicts_of_few_examples_do_not_depend_on_naming_them(generator: torch.Generator) -> None:
    tracer, points = classifier_with_wrong_labels(generator)
    named, unnamed = (tracer.explain(points, top=top) for top in (5, 0))
    assert unnamed.verdicts == named.verdicts
    assert torch.equal(unnamed.noise_p, named.noise_p)
    assert unnamed.near.shape == unnamed.check.shape == (len(points), 0)


def test_answers_that_would_take_too_much_memory_are_not_compared(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer, points = classifier_with_wrong_labels(generator)
    whole = tracer.explain(points)
    monkeypatch.setattr("whence.influence.explanation.FEATURE_SHARE", 0.0)
    again, _ = classifier_with_wrong_labels(torch.Generator().manual_seed(0))
    found = again.explain(points)
    assert any("same answer" in note for note in found.notes)
    assert not any("same answer" in note for note in whole.notes)
    ratio = found.scarcity / found.leverage
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))  # of leverages alone


def test_an_input_unlike_others_with_its_answer_is_scarce() -> None:
    """Two clusters apart; far beyond one of them the answer is certain, and the gradient points the same way."""
    draw = torch.Generator().manual_seed(0)
    side = torch.arange(200) % 2
    x = 0.3 * torch.randn(200, 2, generator=draw, dtype=torch.float64) + torch.stack([4.0 * side - 2, 0 * side], 1)
    model = networks.linear([[-1.0, 0.0], [1.0, 0.0]])
    found = fit(model, [(x, side)], likelihood="categorical", ridge=1.0).explain(
        torch.tensor([[2.0, 0.0], [8.0, 0.0]], dtype=torch.float64)
    )
    assert found.verdicts == ("confident", "scarce data")
    assert float(found.scarcity[1]) > 2 * float(found.leverage[1] / found.leverage[0] * found.scarcity[0])


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_one_output_for_two_classes_has_two_answers(low: float, generator: torch.Generator) -> None:
    """The answer is the nearer code, not the sign of the output: as with one output for each class."""
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    yes = (x[:, :1] > 0).double()
    single = fit(networks.linear([[0.6, 0.0, 0.0]]), [(x, low + (1 - low) * yes)], ridge=RIDGE)
    outputs = single.predict(x).mean
    assert 0 < int((outputs > (1 + low) / 2).sum()) < 60
    calibration = single._calibration
    assert calibration.distance is not None
    assert (
        calibration.distance.same_class.counts.tolist()
        == torch.bincount((outputs > (1 + low) / 2).long().flatten()).tolist()
    )


def test_an_answer_that_no_training_example_has_borrows_the_shape_of_all(generator: torch.Generator) -> None:
    x = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    model = networks.linear([[1.0, 0.0], [-1.0, 0.0], [0.0, 9.0]])
    seen = x[x[:, 1] < 0]  # the third class is answered above zero only
    labels = (seen[:, 0] < 0).long()
    tracer = fit(model, [(seen, labels)], likelihood="categorical", ridge=1.0)
    found = tracer.explain(torch.tensor([[0.0, 3.0]], dtype=torch.float64))
    assert int(tracer._calibration.distance.same_class.counts[2]) == 0
    assert found.verdicts == ("scarce data",)
