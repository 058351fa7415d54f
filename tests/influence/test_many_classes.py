"""Verdicts of networks with more outputs than a fit reads as they are: labels are known all the same."""

from __future__ import annotations

import torch

import whence


def explained(outputs: int) -> tuple[whence.influence.Explanation, whence.influence.Explanation]:
    """A class with random labels, and one with two examples, of 60; further outputs have no label and no weight."""
    draw = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(60, 8, generator=draw)
    place = torch.arange(1800) % 60
    place = torch.cat([place[place != 5], torch.tensor([5, 5])])
    x = centres[place] + 0.5 * torch.randn(len(place), 8, generator=draw)
    y = torch.where(place == 3, torch.randint(60, (len(place),), generator=draw), place)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 60))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(400):  # the random labels are learned by heart
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    wide = torch.nn.Linear(64, outputs)
    with torch.no_grad():
        wide.weight[60:], wide.bias[60:] = 0.0, -50.0
        wide.weight[:60], wide.bias[:60] = model[2].weight, model[2].bias
    model = torch.nn.Sequential(model[0], model[1], wide)
    data = [(x, y)]
    tracer = whence.fit(model, data, likelihood="categorical", structure="ekfac", ridge=0.1, progress=False)
    asked = [centres[which] + 0.5 * torch.randn(60, 8, generator=draw) for which in (3, 5)]
    return tracer.explain(asked[0]), tracer.explain(asked[1])


def test_labels_learned_by_heart_are_noisy_and_rare_classes_scarce_with_many_outputs() -> None:
    for outputs in (60, 70):
        random, rare = explained(outputs)
        assert float(random.noisy.double().mean()) > 0.8
        answered = rare.rare.double().mean()
        assert float(answered) > 0.5
        assert bool(rare.scarce[rare.rare & ~rare.noisy].all())
