"""How frequent inputs like one are in a pool of inputs of use, beside the training examples."""

from __future__ import annotations

from operator import mul
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import networks
import whence
from whence.influence.fitted import using_model
from whence.influence.frequency import Pool
from whence.tracer import Tracer


def brute_force(known: Tensor, pool: Tensor, x: Tensor, count: int, own: list[int]) -> list[tuple[int, int]]:
    """How many of the nearest are from the pool, and from the training examples, one input after the other.

    All are counted that are as close as the last one, up to rounding.
    """
    found = []
    for vector, number in zip(x.tolist(), own, strict=True):
        ours = [sum(map(mul, vector, known[at].tolist())) for at in range(len(known)) if at != number]
        theirs = sorted((sum(map(mul, vector, one)) for one in pool.tolist()), reverse=True)
        theirs = theirs[1:] if theirs[0] > 1.0 - 1e-9 else theirs
        limit = sorted([*ours, *theirs], reverse=True)[count - 1] - 1e-6
        found.append((sum(one >= limit for one in theirs), sum(one >= limit for one in ours)))
    return found


def classifier(generator: torch.Generator, x: Tensor, y: Tensor) -> Tracer:
    """A network of two layers that has learned classes."""
    torch.manual_seed(0)
    width = int(y.max()) + 1
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 24), torch.nn.Tanh(), torch.nn.Linear(24, width)).double()
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=60)

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = torch.nn.functional.cross_entropy(model(x), y)
        value = value + 1e-3 * sum(weight.square().sum() for weight in model.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    return whence.fit(model.eval(), [(x, y)], likelihood="categorical", ridge=0.1, progress=False)


def blobs(generator: torch.Generator, centres: list[list[float]], each: int) -> tuple[Tensor, Tensor]:
    """Points around centres, and which of them."""
    middle = torch.tensor(centres, dtype=torch.float64)
    label = torch.arange(len(centres)).repeat_interleave(each)
    return middle[label] + torch.randn(len(label), middle.shape[1], generator=generator, dtype=torch.float64), label


KNOWN = [[0.0, 0.0, 0.0, 0.0], [6.0, 0.0, 0.0, 0.0], [0.0, 6.0, 0.0, 0.0]]
BETWEEN = [0.0, 0.0, 2.5, 0.0]  # a class that was never shown, two and a half deviations from a known one


@pytest.fixture
def shifted(generator: torch.Generator) -> tuple[Tracer, Tensor, Tensor]:
    """A classifier of three classes; inputs of use, a quarter of them of a class that it has never seen; which."""
    tracer = classifier(generator, *blobs(generator, KNOWN, 200))
    inputs, label = blobs(generator, [*KNOWN, BETWEEN], 150)
    order = torch.randperm(len(label), generator=generator)
    return tracer, inputs[order], label[order]


def test_neighbours_are_counted_as_by_brute_force(generator: torch.Generator) -> None:
    tracer = classifier(generator, *blobs(generator, KNOWN, 40))
    inputs, _ = blobs(generator, KNOWN, 25)
    with using_model(tracer):
        neighbours = tracer._calibration.neighbours
        vectors = neighbours.vectors(tracer, inputs)
    pool = Pool.of(neighbours, vectors[:60])
    known = neighbours.distance_embedding.known
    counts = [22, 44, 88]  # an eighth of 120 and of 60; twice and four times as many
    x = torch.cat([known[:10], vectors[50:]])  # training examples, inputs of the pool, and others
    own = torch.tensor([*range(10), *[-1] * 25])
    found, share = pool.frequency(x, own), 60 / 180
    scales = [brute_force(known, vectors[:60], x, count, own.tolist()) for count in counts]
    for row in range(len(x)):
        z = []
        for count, found_here in zip(counts, scales, strict=True):
            inside, beside = found_here[row]
            assert inside + beside >= count
            number = inside + beside
            z.append((inside - number * share) / (number * share * (1 - share)) ** 0.5)
        inside, beside = scales[0][row]
        assert float(found.z[row]) == pytest.approx(sum(z) / 3)
        assert float(found.ratio[row]) == pytest.approx((inside + 0.5) / (beside + 0.5) * 2.0)


def test_a_pool_drawn_like_the_training_set_changes_nothing_on_average(generator: torch.Generator) -> None:
    tracer = classifier(generator, *blobs(generator, KNOWN, 300))
    pool, _ = blobs(generator, KNOWN, 300)
    x, _ = blobs(generator, KNOWN, 300)
    found = tracer.explain(x, pool=pool)
    assert abs(float(found.frequency.log().mean())) < 0.1
    assert float((found.frequency > 2.5).double().mean()) < 0.05
    uncertain = sum(verdict != "confident" for verdict in found.verdicts) / len(x)
    assert uncertain < 0.12


def test_inputs_of_a_class_that_was_never_shown_are_found_among_those_of_a_known_one(
    shifted: tuple[Tracer, Tensor, Tensor],
) -> None:
    tracer, inputs, label = shifted
    new = label == 3
    alone, beside = tracer.explain(inputs), tracer.explain(inputs, pool=inputs)

    def scarce(found: Any, which: Tensor) -> float:
        return float(found.scarce[which].double().mean())

    assert scarce(beside, new) > scarce(alone, new) + 0.2
    assert scarce(beside, new) > 0.6
    assert scarce(beside, ~new) < 0.12
    assert float(beside.frequency[new].median()) > 2.5 > 1.2 > float(beside.frequency[~new].median())
    assert bool(alone.frequency.isnan().all())
    # What labels say does not depend on the pool.
    torch.testing.assert_close(alone.noise, beside.noise)
    one = int((beside.frequency * beside.scarce).argmax())
    assert "times as frequent in the pool as among the training examples" in beside.sentence(one)
    assert "pool" not in alone.sentence(one)


def test_a_pool_without_inputs_of_a_kind_hides_few_of_them(shifted: tuple[Tracer, Tensor, Tensor]) -> None:
    tracer, inputs, label = shifted
    new = label == 3
    alone, beside = tracer.explain(inputs[new]), tracer.explain(inputs[new], pool=inputs[~new])
    assert bool((beside.scarcity >= alone.scarcity * (1.0 - 1e-9)).all())
    missed = float((alone.scarce & ~beside.scarce).double().mean())
    assert missed < 0.1


def test_labels_that_contradict_each_other_stay_the_cause_where_the_pool_has_no_more_inputs(
    generator: torch.Generator,
) -> None:
    x, y = blobs(generator, KNOWN, 200)
    coins = torch.randint(0, 3, y.shape, generator=generator)
    tracer = classifier(generator, x, torch.where(y == 0, coins, y))
    inputs, label = blobs(generator, KNOWN, 150)
    alone, beside = tracer.explain(inputs), tracer.explain(inputs, pool=inputs)

    def share(which: Tensor) -> float:
        return float(which[label == 0].double().mean())

    assert share(beside.noisy) > max(0.7, share(alone.noisy) - 0.05)
    assert share(beside.scarce) < min(0.25, share(alone.scarce) + 0.05)


def test_answers_do_not_depend_on_how_inputs_are_batched(shifted: tuple[Tracer, Tensor, Tensor]) -> None:
    tracer, inputs, _ = shifted
    whole = tracer.explain(inputs, pool=inputs)
    parts = tracer.explain(list(inputs.split(77)), pool=list(inputs.split(101)))
    some = tracer.explain(inputs[200:230], pool=inputs)
    torch.testing.assert_close(whole.frequency, parts.frequency)
    torch.testing.assert_close(whole.frequency[200:230], some.frequency)
    assert whole.verdicts == parts.verdicts
    assert whole.verdicts[200:230] == some.verdicts


def test_repeated_inputs_count_as_often_as_they_are(generator: torch.Generator) -> None:
    """Training set and pool are drawn from one distribution, a quarter of both from few rows, as in many tables."""
    x, y = blobs(generator, KNOWN, 300)
    often, _ = blobs(generator, KNOWN, 15)
    draw = torch.randint(0, 45, (225,), generator=generator)
    x = torch.cat([x[225:], often[draw]])
    tracer = classifier(generator, x, torch.cat([y[225:], torch.arange(3).repeat_interleave(15)[draw]]))
    pool, _ = blobs(generator, KNOWN, 60)
    pool = torch.cat([pool[45:], often[torch.randint(0, 45, (45,), generator=generator)]])
    found = tracer.explain(often, pool=pool)
    assert 0.7 < float(found.frequency.median()) < 1.4


def test_a_loader_that_can_be_read_only_once_can_be_its_own_pool(shifted: tuple[Tracer, Tensor, Tensor]) -> None:
    tracer, inputs, _ = shifted
    once = iter(inputs.split(100))
    assert tracer.explain(once, pool=once).verdicts == tracer.explain(inputs, pool=inputs).verdicts


def test_training_examples_are_not_their_own_neighbours(generator: torch.Generator) -> None:
    x, y = blobs(generator, KNOWN, 60)
    tracer = classifier(generator, x, y)
    pool, _ = blobs(generator, KNOWN, 60)
    told = tracer.explain(x, examples=range(180), pool=pool)
    untold = tracer.explain(x, pool=pool)
    assert bool((told.frequency >= untold.frequency).all())
    assert float(told.frequency.log().mean()) > float(untold.frequency.log().mean())


def test_a_pool_that_says_too_little_is_refused(shifted: tuple[Tracer, Tensor, Tensor]) -> None:
    tracer, inputs, _ = shifted
    with pytest.raises(ValueError, match=r"a pool of at least 20 inputs, .* got 19"):
        tracer.explain(inputs, pool=inputs[:19])
    with pytest.raises(ValueError, match="at least one input, got an empty batch 0 of the inputs of the pool"):
        tracer.explain(inputs, pool=inputs[:0])
    with pytest.raises(ValueError, match="at least one batch of the pool"):
        tracer.explain(inputs, pool=[])
    with pytest.raises(ValueError, match="in batch 0 of the inputs of the pool"):
        tracer.explain(inputs, pool=torch.full_like(inputs, torch.nan))


def test_a_regression_and_its_pool(generator: torch.Generator) -> None:
    x = torch.rand(300, 2, generator=generator, dtype=torch.float64) * 2 - 1
    x = x[x[:, 0] < 0.4]
    model = networks.linear([[1.0, 2.0]])
    tracer = whence.fit(model, [(x, x @ torch.tensor([[1.0], [2.0]], dtype=x.dtype))], ridge=0.1, progress=False)
    pool = torch.rand(300, 2, generator=generator, dtype=torch.float64) * 2 - 1
    found = tracer.explain(pool, pool=pool)
    beyond = pool[:, 0] > 0.6
    assert float(found.frequency[beyond].median()) > 2.0 > 1.5 > float(found.frequency[~beyond].median())
    assert float(found.scarce[beyond].double().mean()) > 0.9


def test_trees_and_their_pool(generator: torch.Generator) -> None:
    sklearn = pytest.importorskip("sklearn.ensemble")
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (600, 3))
    known = x[x[:, 0] < 0.3]
    forest = sklearn.RandomForestRegressor(40, min_samples_leaf=3, random_state=0).fit(known, known @ [1, 2, 0])
    tracer = whence.fit(forest, (known, known @ [1, 2, 0]), progress=False)
    pool = random.uniform(-1, 1, (600, 3))
    found = tracer.explain(pool, pool=pool)
    beyond = torch.from_numpy(pool[:, 0] > 0.5)
    assert float(found.frequency[beyond].median()) > 1.5 > float(found.frequency[~beyond].median())
