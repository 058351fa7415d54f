"""A core, or an eigenbasis, that misses the gradients of wrong labels says so: against the exact dual algebra."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import whence
from whence.curvature import core
from whence.trust.checks import share_inside_core


def certain(times: float, wrong: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A trained network whose logits are made `times` larger, and labels of which some are turned round."""
    generator = torch.Generator().manual_seed(0)
    centres = 2.0 * torch.randn(3, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (120,), generator=generator)
    x = centres[labels] + 0.7 * torch.randn(120, 8, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)).double()
    steps = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        steps.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        steps.step()
    with torch.no_grad():
        for parameter in model[-1].parameters():
            parameter.mul_(times)
    turned = torch.arange(wrong) * (120 // max(wrong, 1))
    labels[turned] = (labels[turned] + 1) % 3
    return model, x, labels


def share_of_truth(tracer: whence.Tracer, exact: whence.Tracer, x: torch.Tensor) -> float:
    """Median of HeC3 over that of the exact dual algebra."""
    return float((tracer.predict(x).hec3.sum(1) / exact.predict(x).hec3.sum(1)).median())


def told(tracer: whence.Tracer) -> tuple[str, str]:
    """Level and words of the fit about itself."""
    found = next(one for one in tracer.diagnostics if one.name == "trust")
    return str(found.value), found.words


@pytest.mark.parametrize("structure", ["core", whence.Core(size=20)], ids=["default", "small"])
@pytest.mark.parametrize("times", [20.0, 100.0])
def test_a_core_that_misses_wrong_labels_says_so(times: float, structure: str | whence.Core) -> None:
    model, x, labels = certain(times, wrong=6)
    data = [(x, labels)]
    exact = whence.fit(model, data, likelihood="categorical", structure="exact", ridge=1.0, progress=False)
    tracer = whence.fit(model, data, likelihood="categorical", structure=structure, ridge=1.0, progress=False)
    assert share_of_truth(tracer, exact, x) < 0.5
    level, words = told(tracer)
    assert level == "do not trust"
    assert "outside the core" in words
    assert float(tracer.diagnostics["HeC3 inside the core"]) < 0.5
    assert "outside the core" not in told(exact)[1]  # whose last step is long, because of the wrong labels


def test_a_core_that_holds_nearly_everything_is_not_doubted() -> None:
    model, x, labels = certain(1.0, wrong=6)
    data = [(x, labels)]
    exact = whence.fit(model, data, likelihood="categorical", structure="exact", ridge=1.0, progress=False)
    tracer = whence.fit(model, data, likelihood="categorical", structure="core", ridge=1.0, progress=False)
    assert share_of_truth(tracer, exact, x) > 0.9
    assert "outside the core" not in told(tracer)[1]
    assert float(tracer.diagnostics["HeC3 inside the core"]) > 0.8


@pytest.mark.parametrize("sample", core.SAMPLES, ids=str)
def test_the_share_does_not_depend_much_on_the_sample(sample: tuple[int, int, int]) -> None:
    """Every size of the sample tells a core that holds HeC3 from one that does not."""
    for times, wrong, low, high in ((1.0, 6, 0.8, 1.2), (20.0, 6, 0.0, 0.3)):
        model, x, labels = certain(times, wrong)
        tracer = whence.fit(model, [(x, labels)], likelihood="categorical", structure="core", ridge=1.0, progress=False)
        share = share_inside_core(tracer, sample)
        assert share is not None
        assert low < share < high


@pytest.mark.parametrize("structure", ["ekfac", "kfac", whence.EKFAC(meat="two_bases")], ids=str)
def test_an_eigenbasis_without_the_gradients_of_wrong_labels_says_so(structure: str | whence.EKFAC) -> None:
    for times, wrong, sized in ((20.0, 6, False), (1.0, 6, True), (20.0, 0, True)):
        model, x, labels = certain(times, wrong)
        exact, tracer = (
            whence.fit(model, [(x, labels)], likelihood="categorical", structure=one, ridge=1.0, progress=False)
            for one in ("exact", structure)
        )
        assert (share_of_truth(tracer, exact, x) > 0.4) == sized
        assert ("diagonal meat" in told(tracer)[1]) != sized
        assert (float(tracer.diagnostics["HeC3 in the eigenbasis"]) > 0.4) == sized


def test_networks_of_ordinary_size_are_checked_in_little_memory() -> None:
    """60,000 weights and ten classes: checked, in less than a hundred megabytes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 300), nn.Tanh(), nn.Linear(300, 100), nn.Tanh(), nn.Linear(100, 10)).eval()
    x, labels = torch.randn(60, 100), torch.randint(0, 10, (60,))
    fit = partial(whence.fit, model, [(x, labels)], likelihood="categorical", ridge=1.0, progress=False)
    tracer = fit(structure=whence.Core(size=100))
    exact = fit(structure="exact")
    share = float(tracer.diagnostics["HeC3 inside the core"])
    assert share == pytest.approx(share_of_truth(tracer, exact, x), abs=0.25)
    small = fit(structure=whence.Core(size=100), execution=whence.Execution(max_memory=10**8))
    assert small.diagnostics["HeC3 inside the core"] == "not checked"
