"""Which predictions are traced, and what the sums over training examples say."""

from __future__ import annotations

import torch

from report_examples import pictures, rows, texts
from whence import Uncertainty
from whence.report.task import Examples, TrainingLabels
from whence.report.traced import choose, labels_to_check, regions_to_collect, trace


def test_the_most_uncertain_of_each_kind_are_traced(generator: torch.Generator) -> None:
    ho, hec3 = torch.rand(2, 1000, 1, generator=generator).double()
    u = Uncertainty(torch.zeros(1000, 1), {}, {"ho": ho, "hec3": hec3})
    chosen = choose(u, 80)
    assert len(chosen) == 80
    assert chosen.equal(chosen.unique())
    for score in (ho, hec3, hec3 / ho):
        assert set(score.squeeze(1).topk(20).indices.tolist()) <= set(chosen.tolist())
    assert choose(u, 5000).equal(torch.arange(1000))


def test_excess_and_total_by_their_definitions() -> None:
    """Excess is the sum over predictions of HeC3's terms less the usual ratio times Ho's."""
    example = rows()
    tracer = example.tracer
    u = tracer.predict(example.x)
    found = trace(tracer, Examples.of(example.x, 1), u, 0.95, 1000)
    shares = tracer.attribute(example.x, matrix=True)
    terms = {name: shares.shares(name).matrix * shares.shares(name).total[:, None] for name in ("hec3", "ho")}
    u_i = tracer.loo_residuals.square().sum(1) / tracer.sigma.trace()
    torch.testing.assert_close(found.excess, (terms["hec3"] - u_i.mean() * terms["ho"]).sum(0))
    assert found.gap < 1e-9


def test_labels_to_check_are_contradicted_and_regions_are_scarce() -> None:
    example = pictures()
    tracer = example.tracer
    source = Examples.of(example.x, 1)
    found = trace(tracer, source, tracer.predict(example.x), 0.95, 1000)
    training = TrainingLabels.of(tracer, None)
    labels = labels_to_check(found, training.contradicted, 10)
    assert len(labels) == 10
    assert all(bool(training.contradicted[action.at]) for action in labels)
    assert [action.benefit for action in labels] == sorted((action.benefit for action in labels), reverse=True)
    regions = regions_to_collect(tracer, found, 5)
    scarce = found.explanation.scarce
    assert all(bool(scarce[action.at]) for action in regions)
    assert 0 < sum(action.benefit for action in regions) < 1


def test_others_say_probabilities() -> None:
    """Between 0 and 1, and further from the label than with the example among the others."""
    example = texts()
    (x, y), *_ = list(example.tracer.problem.batches.loader)
    training = TrainingLabels.of(example.tracer, None)
    believed = example.tracer.predict(x).probabilities.gather(1, y[:, None])
    without = training.other_probabilities.gather(1, y[:, None])
    assert bool((training.other_probabilities >= -1e-9).all())
    torch.testing.assert_close(training.other_probabilities.sum(1), torch.ones(len(x), dtype=x.dtype))
    assert bool((without <= believed + 1e-9).all())


def test_others_say_what_a_fit_without_the_example_says() -> None:
    """For squared error and a linear model exactly: refitted by the normal equations."""
    example = rows()
    problem = example.tracer.problem
    (x, y), *_ = list(problem.batches.loader)
    training = TrainingLabels.of(example.tracer, None)
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    for left in (0, 7):
        kept = torch.arange(len(x)) != left
        gram = design[kept].T @ design[kept] + 0.5 * torch.eye(4, dtype=x.dtype)
        weights = torch.linalg.solve(gram, design[kept].T @ y[kept])
        torch.testing.assert_close(training.others[left], (design[left] @ weights).reshape(1))
