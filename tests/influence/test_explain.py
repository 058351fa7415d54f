"""Verdicts: the yardsticks against brute force, and the noisy and the missing class of the paper's protocol."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import networks
import oracles
import whence
from classification import linear_softmax
from doubles import fit
from whence.cli.query import SavedNetwork
from whence.errors import InputError, ShapeError
from whence.influence import Calibration, neighbours
from whence.influence.calibration import DistanceScale, LogScale
from whence.influence.classes import predicted_classes
from whence.influence.fitted import leave_one_out_leverage
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


def calibration(**known: Any) -> Calibration:
    """Of which only some fields, or what is derived from others, matter."""
    names = [field.name for field in dataclasses.fields(Calibration)]
    found = Calibration(**{name: known.get(name) for name in names})
    found.__dict__.update(known)
    return found


def test_an_input_is_as_unusual_as_its_rank_among_training_examples() -> None:
    one = torch.ones(1, dtype=torch.float64)
    scale = LogScale(one, 1.0)
    usual = calibration(
        example_z=torch.tensor([3.0, 1.0, 9.0, 4.0, 2.0], dtype=torch.float64),
        ordinary=torch.tensor([True, True, False, True, True]),
        distances=DistanceScale(one, scale, scale),
    )
    remote = torch.tensor([0.5, 2.0, 2.5, 9.0, -1.0], dtype=torch.float64)
    found = usual.scarcity_p(remote, torch.full_like(remote, math.nan))
    torch.testing.assert_close(found, torch.tensor([5.0, 4.0, 3.0, 1.0, 5.0], dtype=found.dtype) / 5)
    both = dataclasses.replace(usual, ambiguities=torch.tensor([0.01, 0.02, 0.03, 0.4], dtype=torch.float64))
    ambiguity = torch.tensor([0.3, 0.3, 0.05, 0.05, 0.5], dtype=torch.float64)  # below .1 it is not unusual
    found = both.scarcity_p(remote, ambiguity)
    torch.testing.assert_close(found, torch.tensor([4.0, 4.0, 5.0, 2.0, 2.0], dtype=found.dtype) / 5)
    assert both.ambiguity_limit(0.5) == pytest.approx(0.03 + 0.25 * 0.37)
    assert (usual.ambiguity_limit(0.5), both.ambiguity_limit(0.1)) == (1.0, 0.1)


@pytest.mark.parametrize(("count", "rank"), [(8, None), (9, 0), (18, 0), (19, 1), (99, 9)])
def test_nine_in_ten_training_examples_with_noisy_labels_reach_the_limit(count: int, rank: int | None) -> None:
    one, level = torch.ones(1, dtype=torch.float64), 0.75
    sources = torch.linspace(-1, 3, count, dtype=torch.float64) ** 3
    found = calibration(
        noisy_sources=sources,
        ordinary_z=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
        distances=DistanceScale(one, LogScale(one, 0.5), LogScale(one, 1.0)),
    )
    wanted = -math.inf if rank is None else float(sources[rank]) + 0.5 * 3.25  # the z-score of the limit of scarcity
    assert found.source_limit(level) == pytest.approx(wanted)


def test_contradicting_labels_that_are_not_the_cause_make_data_scarce(generator: torch.Generator) -> None:
    x = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    y = torch.where(x[:, 0] > 0.5, torch.randint(2, (200,), generator=generator), (x[:, 1] > 0).long())
    model = networks.linear([[0.0, 0.5], [0.0, -0.5]])
    found = fit(model, [(x, y)], likelihood="categorical", ridge=RIDGE).explain(x)
    found = dataclasses.replace(found, probability=torch.full_like(found.probability, 0.9))
    noisy = found.noisy.nonzero().squeeze(1).tolist()
    assert noisy
    other = dataclasses.replace(found, source_limit=float(found.source.max()) + 1)
    for one in noisy:
        assert other.verdicts[one] == "scarce data"
        assert "stand out less than those of nine in ten" in other.sentence(one)
        assert "stand out" not in found.sentence(one)


def test_noise_has_the_moments_of_shuffled_residuals(generator: torch.Generator) -> None:
    values = torch.rand(81, generator=generator, dtype=torch.float64) ** 4
    usual = calibration(squares=values)
    weights = torch.rand(81, generator=generator, dtype=torch.float64) ** 2
    weights = weights / weights.sum()
    shuffled = torch.stack([values[torch.randperm(81, generator=generator)] @ weights for _ in range(4000)])
    effective = 1.0 / weights.square().sum().reshape(1)
    for level in (0.5, 0.8, 0.95):
        found = float(usual.noise_p(shuffled.quantile(level).reshape(1), effective))
        assert abs(found - (1 - level)) < 0.03  # three standard errors of 4,000 draws, and the gamma's own error


def test_what_is_typical_of_an_answer_lies_between_its_own_median_and_that_of_all() -> None:
    values = torch.cat([torch.full((60,), 1.0), torch.full((20,), 3.0)]).double().exp()
    answers = torch.arange(80) // 60
    found = LogScale.of(values, answers, torch.ones(80, dtype=torch.bool))
    torch.testing.assert_close(found.logs, torch.tensor([1.0, 1.0 + 0.5 * 20 / 40 * 2, 1.0], dtype=torch.float64))
    unseen = found.z_scores(values[-1:], torch.tensor([7]))
    torch.testing.assert_close(unseen, torch.tensor([2.0], dtype=torch.float64) / found.spread)


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
    for name in ("probability", "ambiguity"):
        torch.testing.assert_close(getattr(found, name), getattr(exact, name), equal_nan=True)
    same = [one == other for one, other in zip(found.verdicts, exact.verdicts, strict=True)]
    assert sum(same) >= 0.9 * len(same)


def unit_vectors(x: Any, asked: Any, answers: Any, lengths: bool) -> list[tuple[Any, Any]]:
    """Unit vectors of (n, d) and (m, d), whitened by the scatter of all, and by that around the means of answers."""
    d = x.shape[1]
    apart, around = x - x.mean(0), x - x.mean(0)
    if answers is not None:
        around = x - np.array([x[answers == own].mean(0) for own in answers])
    found = []
    for rows in (apart, around):
        scatter = rows.T @ rows / len(x)
        root = np.real(scipy.linalg.inv(scipy.linalg.sqrtm(scatter + np.trace(scatter) / d * np.eye(d))))
        ours, theirs = ((some - x.mean(0)) @ root for some in (x, asked))
        if lengths:
            constant = np.sqrt((ours**2).sum(1).mean())
            ours, theirs = (np.insert(some, 0, constant, axis=1) for some in (ours, theirs))
        found.append(tuple(some / np.linalg.norm(some, axis=1, keepdims=True) for some in (ours, theirs)))
    return found


def order_by(similarity: Any, itself: bool) -> Any:
    """(m, n) numbers of the training examples, the most similar first; without the example itself."""
    if itself:
        similarity = similarity - 9 * np.eye(len(similarity))
    order = np.argsort(-similarity, axis=1, kind="stable")
    return order[:, :-1] if itself else order


def by_hand(
    layers: list[tuple[Any, Any]],
    said: Any,
    squares: Any,
    answers: tuple[Any, Any] | None = None,
    labels: Any = None,
    ambiguity: Any = None,
    classes: bool = True,
    kinds: int = 2,
) -> dict[str, Any]:
    """What `explain` finds, with dense matrices, loops and scikit-learn.

    Args:
        layers: inputs (n, d) and (m, d) of every layer, for the training examples and for those asked about.
        said: (n, k) answers of the network, which decide how much a layer counts.
        squares: (n,) squared residuals with the example left out.
        answers: (n,) and (m,) predicted classes, if there are any.
        labels: (n,) labels, if each example has one.
        ambiguity: (n,) and (m,) of the network's answers.
        classes: whether squares are about classes.
        kinds: how many classes.
    """
    n = len(squares)
    count = max(math.isqrt(n), min(30, n // 8))
    units = [
        unit_vectors(x, asked, None if answers is None else answers[0], not classes or layer == 0)
        for layer, (x, asked) in enumerate(layers)
    ]
    weights = []
    for (ours, _), _ in units:
        near = order_by(ours @ ours.T, True)[:, :count]
        missed = ((said - said[near].mean(1)) ** 2).sum() / ((said - said.mean(0)) ** 2).sum()
        weights.append(max(0.0, 1 - missed) ** 4 if len(layers) > 1 else 1.0)
    weights = np.array(weights) if sum(weights) > 0 else np.ones(len(weights))
    weights = np.where(weights > 0.02 * weights.sum(), weights, 0.0)
    weights = weights / weights.sum()
    similar = [  # by both scatters: among the examples, and of those asked with the examples
        [sum(w * unit[at][j] @ unit[at][0].T for w, unit in zip(weights, units, strict=True)) for j in (0, 1)]
        for at in (0, 1)
    ]
    orders = [order_by(similar[0][0], True), order_by(similar[0][1], False)]
    own = squares
    if labels is not None:
        sizes = np.minimum(np.bincount(labels) - 1, count)[labels]
        share = np.array(
            [np.mean(labels[row[:many]] != mine) for row, mine, many in zip(orders[0], labels, sizes, strict=True)]
        )
        own = np.where(share - 2 * np.sqrt(share * (1 - share) / sizes) > squares, share, squares)
    bandwidth = 3 * lower_median(1 - np.take_along_axis(similar[0][0], orders[0][:, count - 1 : count], 1)[:, 0])
    kernels = [np.exp((some - 1) / bandwidth) for some in similar[0]]
    weights = np.linalg.solve(kernels[0] + np.eye(n), kernels[1].T).T ** 2
    average = [[], weights @ own / weights.sum(1)]
    for i in range(n):  # a real regression without the example
        others = np.delete(np.arange(n), i)
        weight = np.linalg.solve(kernels[0][np.ix_(others, others)] + np.eye(n - 1), kernels[0][i, others]) ** 2
        average[0].append(weight @ own[others] / weight.sum())
    average[0] = np.array(average[0])
    curve = centred(average[0], own)
    square = [np.minimum(curve(some), 1.0) if classes else curve(some) for some in average]
    limit = limit_of(own, kinds) if classes else 1.5 * own.mean()
    noise, noise_limit = square if classes else [np.sqrt(some) for some in square], limit if classes else limit**0.5
    if ambiguity is not None:
        answered = centred(ambiguity[0], own)
        second = [np.minimum(answered(some), 1.0) for some in ambiguity]
        explained = [max(0.01, 1 - np.mean((own - one[0]) ** 2) / own.var()) ** 4 for one in (square, second)]
        weight = max(0.5, explained[1] / sum(explained))
        noise = [np.exp((1 - weight) * np.log(a) + weight * np.log(b)) for a, b in zip(square, second, strict=True)]
        noise_limit = limit_of(noise[0], kinds)
    agreeing = curve(average[0]) <= limit
    some = agreeing if agreeing.sum() >= max(n / 2, 19) else np.ones(n, dtype=bool)
    by = 0 if answers is None else 1
    closest = [order_by(similar[by][0], True)[:, :20], order_by(similar[by][1], False)[:, :20]]
    chords = [np.sqrt(2 - 2 * np.take_along_axis(similar[by][j], closest[j][:, :5], 1)) for j in (0, 1)]
    distances = [chord.mean(1) for chord in chords]
    remote, spread = excess(distances, answers, some)
    local = [distance / distances[0][near].mean(1) for distance, near in zip(distances, closest, strict=True)]
    remote = [(far + dense) / 2 for far, dense in zip(remote, excess(local, None, some)[0], strict=True)]
    noisy = ~agreeing if ambiguity is None else ~agreeing & (noise[0] > noise_limit)
    beyond = np.log(square[0] / limit)  # logarithms of the variance; for classes, of the odds
    if classes:
        disagreement = np.minimum(square[0], 0.999)
        beyond = np.log(disagreement / (1 - disagreement)) - np.log(limit / (1 - limit))
    return {
        "sources of noisy": (beyond - 0.5 * remote[0])[noisy],
        "ambiguities": None if ambiguity is None else ambiguity[0][some],
        "scarcity": np.exp(spread * remote[1]),
        "compared": np.sort(remote[0][some]),
        "remote": remote[1],
        "square": square[1],
        "without itself": square[0],
        "limit": limit,
        "noise": noise[1],
        "noise limit": noise_limit,
        "spread": spread,
    }


def check_unusual(found: whence.Explanation, wanted: dict[str, Any], ambiguity: Any = None) -> None:
    """Count the training examples that are as unusual, and those with noisy labels whose source is lower."""
    for i, scarcity in enumerate(wanted["scarcity"]):
        share = (1 + sum(wanted["compared"] >= wanted["remote"][i])) / (1 + len(wanted["compared"]))
        if scarcity < 1.05:
            share = 1.0
        if ambiguity is not None:
            known = wanted["ambiguities"]
            as_ambiguous = (1 + sum(known >= ambiguity[i])) / (1 + len(known)) if ambiguity[i] >= 0.1 else 1.0
            share = min(1.0, 2 * min(share, as_ambiguous))
        assert float(found.scarcity_p[i]) == pytest.approx(share)
    above = (found.noise > found.noise_limit) & (found.disagreement > found.disagreement_limit)
    above &= (found.noise_p <= 1 - found.level) | found.noisy_everywhere
    often = (found.probability < 0.55) & found.often_undecided & (found.scarcity <= found.scarcity_limit) & ~above
    sources = wanted["sources of noisy"] + 0.5 * math.log(found.scarcity_limit) / wanted["spread"]
    as_low = [(1 + sum(sources <= one)) / (1 + len(sources)) for one in found.source.tolist()]
    among_noisy = torch.tensor(as_low) > 0.1
    assert torch.equal(found.noisy, above & among_noisy | often & (found.disagreement >= 0.8 * found.ambiguity))


def excess(values: Any, answers: Any, some: Any) -> tuple[list[Any], float]:
    """Logarithms of (n,) and (m,) values above the typical one of their answers, in standard deviations; and these."""
    logs = [np.log(value) for value in values]
    middle = lower_median(logs[0][some])
    if answers is not None:
        typical = {}
        for answer in range(max(answers[0]) + 1):
            own = logs[0][some & (answers[0] == answer)]
            share = 0.5 * len(own) / (len(own) + 20)
            typical[answer] = middle + (share * (lower_median(own) - middle) if len(own) else 0.0)
        logs = [log - np.array([typical[a] for a in answer]) for log, answer in zip(logs, answers, strict=True)]
    else:
        logs = [log - middle for log in logs]
    spread = max(float(np.quantile(logs[0][some], 0.84) - lower_median(logs[0][some])), 0.05)
    return [log / spread for log in logs], spread


def lower_median(values: Any) -> Any:
    return np.sort(values)[(len(values) - 1) // 2]


def limit_of(values: Any, kinds: int) -> float:
    """For few classes in proportion to how often two labels can differ, which is 8/9 for nine."""
    share = min(1.0, (1 - 1 / kinds) * 9 / 8)
    return float(max(0.1, min(2.5 * values.mean(), max(share * 2 / 3, share - values.mean()))))


def centred(places: Any, values: Any) -> Any:
    """An isotonic regression whose steps are replaced by lines between their middles."""
    order = np.argsort(places, kind="stable")
    steps = IsotonicRegression().fit(places[order], values[order]).predict(places[order])
    levels = [np.isclose(steps, level, rtol=1e-9, atol=1e-12) for level in np.unique(steps.round(12))]
    middles = [places[order][level].mean() for level in levels]
    return lambda at: np.interp(at, middles, [steps[level].mean() for level in levels])


def layer_inputs(model: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    """Inputs of the layers with weights, one after the other."""
    found = []
    for layer in model:
        if any(True for _ in layer.parameters()):
            found.append(x.detach().numpy())
        x = layer(x)
    return found


def test_regression_by_hand(generator: torch.Generator) -> None:
    x, asked = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (30, 6))
    y = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    tracer = fit(model, [(x[:20], y[:20]), (x[20:], y[20:])], ridge=RIDGE)
    _, tangents, _ = oracles.tangents_of(model, x)
    curvature = oracles.damped_curvature(tangents, RIDGE)
    squares = []
    for block, residual in zip(tangents, y.numpy() - model(x).detach().numpy(), strict=True):
        kept = np.eye(2) - block @ np.linalg.solve(curvature, block.T)
        squares.append(residual @ np.linalg.solve(kept, residual) / 2)  # HeC2's, the mean over outputs
    layers = list(zip(layer_inputs(model, x), layer_inputs(model, asked), strict=True))
    wanted = by_hand(layers, model(x).detach().numpy(), np.array(squares), classes=False)
    found = tracer.explain(asked)
    np.testing.assert_allclose(found.scarcity, wanted["scarcity"], rtol=1e-6)
    check_unusual(found, wanted)
    np.testing.assert_allclose(found.noise, wanted["noise"], rtol=1e-6)
    own = tracer.explain(x, examples=range(30)).noise
    np.testing.assert_allclose(own, np.sqrt(wanted["without itself"]), rtol=1e-6)
    assert found.noise_limit == pytest.approx(wanted["noise limit"])
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
    """Squared error on a code of classes is about classes too."""
    x, asked = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (40, 6))
    labels = torch.randint(3, (40,), generator=generator)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    one_hot = torch.nn.functional.one_hot(labels, 3).double()
    codes = low + (1 - low) * one_hot
    tracer = fit(model, [(x, labels if loss == "categorical" else codes)], likelihood=loss, ridge=RIDGE)
    outputs = model(torch.cat([x, asked])).detach()
    p = outputs.softmax(1) if loss == "categorical" else outputs - low
    squares = (
        (tracer.loo_residuals / (1 - low)).square().sum(1).clamp_max(2.0).numpy()
    )  # these have oracles of their own
    best = outputs.argmax(1)
    left_out = nearest(p[:40] / (1 - low) + (tracer.residuals - tracer.loo_residuals) / (1 - low))
    shares = p[40:] if loss == "categorical" else nearest(p[40:] / (1 - low))
    differ = torch.stack([(row.outer(row) * (1 - torch.eye(3))).sum() for row in torch.cat([left_out, shares])])
    wanted = by_hand(
        list(zip(layer_inputs(model, x), layer_inputs(model, asked), strict=True)),
        np.eye(3)[best[:40]],
        squares,
        (best[:40].numpy(), best[40:].numpy()),
        labels.numpy(),
        (differ[:40].numpy(), differ[40:].numpy()) if loss == "categorical" else None,
        kinds=3,
    )
    found = tracer.explain(asked)
    assert found.classes
    np.testing.assert_allclose(found.scarcity, wanted["scarcity"], rtol=1e-6)
    check_unusual(found, wanted, differ[40:].numpy() if loss == "categorical" else None)
    np.testing.assert_allclose(found.disagreement, wanted["square"], rtol=1e-6)
    np.testing.assert_allclose(found.noise, wanted["noise"], rtol=1e-6)
    some = torch.tensor([-1, 4, 20, -1, 0, 7])  # inputs that are training examples, in two batches
    mixed = torch.where(some.unsqueeze(1) < 0, asked, x[some])
    own = tracer.explain([mixed[:3], mixed[3:]], examples=some).disagreement
    square = np.where(some < 0, wanted["square"], wanted["without itself"][some])
    np.testing.assert_allclose(own, square, rtol=1e-6)
    assert found.disagreement_limit == pytest.approx(wanted["limit"])
    assert found.noise_limit == pytest.approx(wanted["noise limit"])
    odds = [np.log(share / (1 - share)) for share in np.minimum([*wanted["noise"], wanted["noise limit"]], 0.999)]
    beyond = wanted["remote"] - np.log(found.scarcity_limit) / wanted["spread"]
    signs = [np.array(odds[:-1]) - odds[-1], beyond]
    around = [np.log(share / (1 - share)) for share in np.minimum([*wanted["square"], wanted["limit"]], 0.999)]
    np.testing.assert_allclose(found.source, np.array(around[:-1]) - around[-1] - 0.5 * beyond, rtol=1e-5, atol=1e-6)
    if loss == "categorical":
        limit = found.ambiguity_limit
        signs.append(np.log(differ[40:].numpy() / (1 - differ[40:].numpy())) - np.log(limit / (1 - limit)))
    np.testing.assert_allclose(found.doubt, scipy.special.logsumexp(signs, axis=0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.probability, shares.amax(1))
    torch.testing.assert_close(found.ambiguity, differ[40:])


def test_several_labels_by_hand(generator: torch.Generator) -> None:
    """Yes or no for each output."""
    x, asked = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (30, 6))
    y = torch.randint(2, (30, 4), generator=generator).double()
    model = networks.linear(torch.randn(4, 3, generator=generator, dtype=torch.float64))
    tracer = fit(model, [(x, y)], likelihood="bernoulli", ridge=RIDGE)
    differ = 2 * tracer.loo_residuals.square()  # of two labels of each output; residuals have oracles of their own
    p = model(asked).sigmoid().detach()
    left_out = (y - tracer.loo_residuals).clamp(0, 1)
    ambiguity = [(2 * some * (1 - some)).mean(1).numpy() for some in (left_out, p)]
    squares = differ.mean(1).clamp_max(2.0).numpy()
    wanted = by_hand([(x.numpy(), asked.numpy())], model(x).detach().numpy(), squares, ambiguity=ambiguity)
    found = tracer.explain(asked)
    assert found.classes
    np.testing.assert_allclose(found.scarcity, wanted["scarcity"], rtol=1e-6)
    check_unusual(found, wanted, ambiguity[1])
    np.testing.assert_allclose(found.disagreement, wanted["square"], rtol=1e-6)
    np.testing.assert_allclose(found.noise, wanted["noise"], rtol=1e-6)
    assert found.disagreement_limit == pytest.approx(wanted["limit"])
    assert found.noise_limit == pytest.approx(wanted["noise limit"])
    torch.testing.assert_close(found.probability, torch.maximum(p, 1 - p).mean(1))
    torch.testing.assert_close(found.ambiguity, (2 * p * (1 - p)).mean(1))
    assert "as if two differed in" in found.sentence(0)
    assert found.notes == ()


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


def test_what_is_approximated_is_said(
    generator: torch.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    assert fit(model, [(x, y)], ridge=RIDGE).explain(x[:2]).notes == ()
    monkeypatch.setattr(neighbours, "COMPARED", 20)  # 5,000 would be more than there are
    tracer = fit(model, [(x, y)], ridge=RIDGE)
    found = tracer.explain([x[:2], x[2:4]])
    assert len(found) == 4
    assert found.notes == ("Noise and scarcity are measured with 20 of 30 training examples.",)
    assert all(note in " ".join(str(found).split()) for note in found.notes)
    saved = SavedNetwork(tracer, x[:4], [], "")
    saved.frame(verdicts=True)
    assert saved.notes == list(found.notes)
    tracer.report(tmp_path / "report.html", x[:4])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(note in page for note in found.notes)


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


def test_coin_labels_are_noisy_and_their_noise_is_one_half(generator: torch.Generator) -> None:
    x = torch.cat([torch.randn(200, 2, generator=generator) + torch.tensor([5.0, 0.0]) * i for i in range(3)]).double()
    place = torch.arange(600) // 200
    coin = torch.randint(2, (600,), generator=generator)
    y = torch.where(place == 1, coin, 2 * (place == 2).long())
    features = torch.cat([torch.nn.functional.one_hot(place, 3).double(), 0.01 * x], 1)
    model = networks.linear([[4.0, 0.0, -9.0, 0, 0], [-4.0, 0.0, -9.0, 0, 0], [-9.0, -9.0, 4.0, 0, 0]])
    tracer = fit(model, [(features, y)], likelihood="categorical", ridge=RIDGE)
    found = tracer.explain(features)
    assert found.verdicts[200:400].count("noisy labels nearby") >= 190  # few are far from the others
    assert "confident" not in found.verdicts[200:400]
    assert found.verdicts.count("noisy labels nearby") <= 200
    assert float(found.noise[200:400].mean()) == pytest.approx(0.5, abs=0.02)


def trained_classifier(x: torch.Tensor, y: torch.Tensor, steps: int, classes: int = 2) -> torch.nn.Sequential:
    """A few hidden units."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 16), torch.nn.Tanh(), torch.nn.Linear(16, classes)).double()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model


def test_coins_for_two_classes_are_noisy_even_for_half_of_the_inputs(generator: torch.Generator) -> None:
    """Two labels of two classes can differ in half of all pairs at most: no limit may be above that."""
    x = 2 * torch.rand(1400, 3, generator=generator, dtype=torch.float64) - 1
    coin = x[:, 0] < 0
    y = torch.where(coin, torch.randint(2, (len(x),), generator=generator), (x[:, 1] > 0).long())
    model = trained_classifier(x[:1000], y[:1000], 300)
    found = fit(model, [(x[:1000], y[:1000])], likelihood="categorical").explain(x[1000:])
    among, clear = x[1000:, 0] < -0.2, (x[1000:, 0] > 0.2) & (x[1000:, 1].abs() > 0.2)
    assert found.disagreement_limit < 0.5
    assert float(found.noisy[among].double().mean()) > 0.85
    assert float(found.noisy[clear].double().mean()) < 0.05


def test_a_model_that_is_undecided_everywhere_as_its_labels_are_has_noisy_labels(generator: torch.Generator) -> None:
    """Labels that hardly depend on the inputs: data are dense, and more of them would change nothing."""
    x = 2 * torch.rand(2300, 2, generator=generator, dtype=torch.float64) - 1
    y = (torch.rand(len(x), generator=generator, dtype=torch.float64) < (0.3 * x[:, 0]).sigmoid()).long()
    model = trained_classifier(x[:2000], y[:2000], 200)
    found = fit(model, [(x[:2000], y[:2000])], likelihood="categorical").explain(x[2000:])
    undecided = found.probability < 0.55
    assert int(undecided.sum()) > 100
    assert float(found.noisy[undecided].double().mean()) > 0.8
    assert found.noisy_everywhere


def test_indecision_that_labels_explain_is_noise(generator: torch.Generator) -> None:
    """Five classes, a fifth of all labels wrong, and a network that was stopped before it was sure of anything."""
    x = torch.randn(1100, 4, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(4, 5, generator=generator, dtype=torch.float64)).argmax(1)
    y = torch.where(torch.rand(1100, generator=generator) < 0.2, torch.randint(5, (1100,), generator=generator), y)
    model = trained_classifier(x[:800], y[:800], 40, classes=5)
    found = fit(model, [(x[:800], y[:800])], likelihood="categorical").explain(x[800:])
    undecided = (found.probability < 0.55) & (found.disagreement > 0.8 * found.ambiguity)
    undecided &= found.scarcity <= found.scarcity_limit
    assert found.often_undecided
    assert int(undecided.sum()) > 20
    assert float(found.noisy[undecided].double().mean()) > 0.8
    sentence = "the model itself is undecided, as it often is, and these labels explain it"
    assert any(sentence in found.sentence(int(one)) for one in (undecided & found.noisy).nonzero())


def test_one_wrong_target_does_not_hide_the_noise_of_others(generator: torch.Generator) -> None:
    x = 2 * torch.rand(1000, 1, generator=generator, dtype=torch.float64) - 1
    features = torch.exp(-((x - torch.linspace(-1, 1, 12, dtype=torch.float64)) ** 2) / 0.02)
    y = x.sin() + torch.where(x > 0.5, 0.5, 0.05) * torch.randn(1000, 1, generator=generator, dtype=torch.float64)
    model = networks.linear(oracles.ridge_fit(features.unsqueeze(1).numpy(), y.numpy(), 0.1).reshape(1, -1))
    wrong = y.clone()
    wrong[int((x + 0.4).abs().argmin())] += 10.0
    noisy = [fit(model, [(features, said)], ridge=0.1).explain(features).noisy for said in (y, wrong)]
    assert int(noisy[0].sum()) > 150
    assert float(noisy[1][noisy[0]].double().mean()) > 0.9


def test_rounding_is_not_noise(generator: torch.Generator) -> None:
    x = torch.randn(300, 4, generator=generator, dtype=torch.float64)
    model = networks.linear([[100.0, -200.0, 50.0, 300.0]])
    found = fit(model, [(x, model(x).detach() * (1 + 1e-16))], ridge=1e-6).explain(x)
    assert not bool(found.noisy.any())


def test_few_examples_do_not_make_a_remote_input_confident(generator: torch.Generator) -> None:
    y = torch.arange(30) % 3
    x = torch.randn(30, 2, generator=generator, dtype=torch.float64) + 5 * torch.eye(3, dtype=torch.float64)[:, :2][y]
    model = trained_classifier(x, y, 200, classes=3)
    found = fit(model, [(x, y)], likelihood="categorical").explain(torch.tensor([[1e3, -1e3]], dtype=torch.float64))
    assert found.verdicts == ("scarce data",)


def test_outputs_that_no_example_has_change_no_verdict(generator: torch.Generator) -> None:
    """A head of ten outputs, of which two are used: two labels still differ in half of all pairs at most."""
    x = 2 * torch.rand(1000, 2, generator=generator, dtype=torch.float64) - 1
    y = torch.where(x[:, 0] > 0.3, torch.randint(2, (1000,), generator=generator), (x[:, 1] > 0).long())
    model = trained_classifier(x, y, 200)
    wide = torch.nn.Linear(16, 10, dtype=torch.float64)
    with torch.no_grad():
        wide.weight[2:], wide.bias[2:] = 0.0, -30.0
        wide.weight[:2], wide.bias[:2] = model[2].weight, model[2].bias
    found = [
        fit(one, [(x, y)], likelihood="categorical", ridge=RIDGE).explain(x)
        for one in (model, torch.nn.Sequential(model[0], model[1], wide))
    ]
    assert found[0].verdicts == found[1].verdicts


def test_a_doubt_leans_to_noise_where_labels_are_noisy_and_to_scarcity_far_away(generator: torch.Generator) -> None:
    _, y, features = where_noise_grows(generator)
    weights = oracles.ridge_fit(features.unsqueeze(1).numpy(), y.numpy(), 0.1)
    tracer = fit(networks.linear(weights.reshape(1, -1)), [(features, y)], ridge=0.1)
    centres = torch.linspace(-1, 1, 12, dtype=torch.float64)
    noisy = torch.exp(-((torch.tensor([[0.5], [0.6]], dtype=torch.float64) - centres) ** 2) / 0.02)
    clean = torch.exp(-((torch.tensor([[-0.4], [-0.6]], dtype=torch.float64) - centres) ** 2) / 0.02)
    found = tracer.explain(torch.cat([noisy, 9 * clean]))
    assert bool((found.source[:2] > 0).all())
    assert bool((found.source[2:] < 0).all())
    assert "source" in found.to_frame()


@pytest.mark.parametrize("structure", ["exact", "ekfac"])
def test_a_difference_that_is_no_chance_is_not_yet_noise(structure: str, generator: torch.Generator) -> None:
    """A few noisy examples far out decide the slope: HeC3 / Ho is high where labels are good too, noise is not."""
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
    assert bool((found.ratio > 1.2).all())
    assert found.noisy.tolist() == [False, False, False, True]
    np.testing.assert_allclose(found.noise, [1, 1, 1, 5], rtol=0.25)  # the standard deviations that were drawn with


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


def test_regressions_too_can_do_without_names(generator: torch.Generator) -> None:
    _, y, features = where_noise_grows(generator)
    tracer = fit(networks.linear([[0.0] * 12]), [(features, y)], ridge=0.1, recenter=True)
    named, unnamed = (tracer.explain(features[:50], top=top) for top in (3, 0))
    torch.testing.assert_close(unnamed.noise, named.noise, rtol=1e-9, atol=0.0)


def test_verdicts_do_not_depend_on_naming_examples(generator: torch.Generator) -> None:
    tracer, points = classifier_with_wrong_labels(generator)
    named, unnamed = (tracer.explain(points, top=top) for top in (5, 0))
    assert named.check.shape == named.near.shape == (len(points), 5)
    assert unnamed.near.shape == unnamed.check.shape == (len(points), 0)
    assert unnamed.verdicts == named.verdicts
    assert torch.equal(unnamed.noise_p, named.noise_p)
    noisy = int(unnamed.noisy.nonzero()[0])
    assert unnamed.sentence(noisy).endswith("Check the labels nearby.")
    assert "near this input" in str(tracer.explain(points.flip(0), top=0))
    assert len(unnamed.to_frame()) == len(points)


def test_training_examples_are_as_ambiguous_as_the_fit_without_them(generator: torch.Generator) -> None:
    """The reference values are those of training examples that were left out, so theirs must be, too."""
    tracer, points = classifier_with_wrong_labels(generator)
    (x, _), *_ = tracer.problem.batches.loader
    found = tracer.explain(x, examples=torch.arange(len(x)))
    reference = tracer._calibration.ambiguities
    assert reference is not None
    assert bool(torch.isin(reference, found.ambiguity).all())
    assert not torch.allclose(found.ambiguity, tracer.explain(x).ambiguity, atol=1e-3)
    mixed = tracer.explain(torch.cat([x[:3], points[:3]]), examples=[0, 1, 2, -1, -1, -1])
    torch.testing.assert_close(mixed.ambiguity, torch.cat([found.ambiguity[:3], tracer.explain(points[:3]).ambiguity]))
    torch.testing.assert_close(found.probability, tracer.explain(x).probability)  # of the network itself
    for wrong in ([0, 1], [0, 1, 2, 3]):
        with pytest.raises(ShapeError, match=f"for each of 3 inputs.*, got {len(wrong)}"):
            tracer.explain(x[:3], examples=wrong)


def test_some_of_many_examples_stand_for_all(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer, points = classifier_with_wrong_labels(generator)
    everything = tracer.explain(points)
    monkeypatch.setattr(neighbours, "COMPARED", 300)  # half of the examples
    tracer.__dict__.pop("_calibration")
    half = tracer.explain(points)
    same = [one == other for one, other in zip(half.verdicts, everything.verdicts, strict=True)]
    assert sum(same) >= 0.8 * len(same)
    assert bool(torch.isin(half.near, tracer._calibration.neighbours.index).all())


def test_distances_are_those_between_some_examples(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer, points = classifier_with_wrong_labels(generator)
    monkeypatch.setattr(neighbours, "COMPARED", 90)  # of 600, so that they are some of the examples
    tracer.__dict__.pop("_calibration", None)
    tracer.explain(points)
    found = tracer._calibration.neighbours
    assert len(found.index) == len(found.distinct) == 90
    known = found.distance_embedding.known
    chords = (known.unsqueeze(1) - known).norm(dim=2).fill_diagonal_(math.inf).sort(dim=1)
    distances, nearest = found.training_distances()
    torch.testing.assert_close(distances, chords.values[:, :5].mean(1).clamp_min(1e-3), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(known[nearest[:, 0]], known[chords.indices[:, 0]], rtol=1e-4, atol=1e-4)


def test_principal_directions_say_nearly_the_same(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """One direction fewer hardly changes the answers, half as many change them little."""
    tracer, points = classifier_with_wrong_labels(generator)
    every = tracer.explain(points)
    width = tracer._calibration.neighbours.label_embedding.known.shape[1]
    assert tracer._calibration.neighbours.label_embedding.directions is None
    for kept, wanted in ((width - 1, 0.999), (width // 2, 0.9)):
        monkeypatch.setattr(neighbours, "PRINCIPAL", kept)  # this network has fewer than 128
        tracer.__dict__.pop("_calibration", None)
        some = tracer.explain(points)
        embedding = tracer._calibration.neighbours.label_embedding
        assert embedding.directions is not None
        assert embedding.directions.shape == (width, kept)
        for name in ("disagreement", "scarcity"):
            both = torch.stack([getattr(every, name), getattr(some, name)])
            assert float(torch.corrcoef(both)[0, 1]) > wanted


def test_where_something_is_in_an_image_counts(generator: torch.Generator) -> None:
    """Spots in the upper half are ordinary, those in the lower half are not. Means over the image are the same."""
    images = 0.1 * torch.randn(200, 1, 6, 6, generator=generator, dtype=torch.float64)
    label = torch.arange(200) % 2
    images[torch.arange(200), 0, 1, 1 + 3 * label] += 3.0 + label
    torch.manual_seed(0)
    pooled = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 1), *pooled, torch.nn.Linear(4, 2)).double()
    found = fit(model, [(images, label)], likelihood="categorical").explain(
        torch.cat([images[:20], images[:20].flip(2)])
    )
    assert float(found.scarcity[20:].min()) > float(found.scarcity[:20].max())


def test_an_input_unlike_others_with_its_answer_is_scarce() -> None:
    """Two clusters apart; far beyond one of them the answer is certain."""
    draw = torch.Generator().manual_seed(0)
    side = torch.arange(200) % 2
    x = 0.3 * torch.randn(200, 2, generator=draw, dtype=torch.float64) + torch.stack([4.0 * side - 2, 0 * side], 1)
    model = networks.linear([[-1.0, 0.0], [1.0, 0.0]])
    found = fit(model, [(x, side)], likelihood="categorical", ridge=1.0).explain(
        torch.tensor([[2.0, 0.0], [8.0, 0.0]], dtype=torch.float64)
    )
    assert found.verdicts == ("confident", "scarce data")


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_one_output_for_two_classes_has_two_answers(low: float, generator: torch.Generator) -> None:
    """The answer is the nearer code, not the sign of the output: as with one output for each class."""
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    yes = (x[:, :1] > 0).double()
    single = fit(networks.linear([[0.6, 0.0, 0.0]]), [(x, low + (1 - low) * yes)], ridge=RIDGE)
    outputs = single.predict(x).mean
    assert 0 < int((outputs > (1 + low) / 2).sum()) < 60
    answers = predicted_classes(single, outputs, single._calibration.codes)
    assert answers is not None
    assert torch.equal(answers, (outputs > (1 + low) / 2).long().flatten())


def test_an_answer_that_no_training_example_has_is_scarce(generator: torch.Generator) -> None:
    x = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    model = networks.linear([[1.0, 0.0], [-1.0, 0.0], [0.0, 9.0]])
    seen = x[x[:, 1] < 0]  # the third class is answered above zero only
    labels = (seen[:, 0] < 0).long()
    tracer = fit(model, [(seen, labels)], likelihood="categorical", ridge=1.0)
    found = tracer.explain(torch.tensor([[0.0, 3.0]], dtype=torch.float64))
    assert found.verdicts == ("scarce data",)


class SequenceFirst(nn.Module):
    """A layer that sees positions along the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.inner(x.transpose(0, 1)).tanh().mean(0))
        return found


def test_as_many_positions_as_examples_in_a_batch_are_no_examples() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 8, 3, dtype=torch.float64), torch.randint(0, 2, (40,))
    model = SequenceFirst().double().eval()
    found = []
    for size in (8, 20):
        batches = list(zip(x.split(size), y.split(size), strict=True))
        tracer = whence.fit(
            model, batches, likelihood="categorical", parameters="head.*", ridge=1.0, structure="exact", progress=False
        )
        found.append(tracer.explain(x[:8]))
    torch.testing.assert_close(found[0].scarcity, found[1].scarcity)
    torch.testing.assert_close(found[0].noise, found[1].noise)
    near = tracer.explain(x[:1], examples=[0], top=40).near
    assert sorted(near[0].tolist()) == list(range(1, 40))
