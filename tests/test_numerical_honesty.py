"""Random networks, random data and data of the worst kind: no variance below zero, no NaN, and the laws of scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracles
import whence

STRUCTURES: dict[str, whence.Structure] = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "core": whence.Core(),
    "sketch": whence.Sketch(size=15),
    "ekfac": whence.EKFAC(),
    "ekfac, whole": whence.EKFAC(tolerance=0.0),
    "ekfac, two bases": whence.EKFAC(meat="two_bases", corner=2),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
}
every_structure = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
DEFINITE = ("ho", "hec0", "hec2", "hec3", "jackknife", "laplace")
ACTIVATIONS = (nn.Tanh, nn.ReLU, nn.GELU, nn.Sigmoid, nn.Identity)


@dataclass(frozen=True)
class Problem:
    """A network with training data, inputs to predict and a ridge."""

    model: nn.Module
    x: Tensor
    y: Tensor
    test: Tensor
    likelihood: str
    ridge: float

    def fit(self, structure: whence.Structure, **options: Any) -> whence.Tracer:
        half = (len(self.x) + 1) // 2
        loader = [(self.x[:half], self.y[:half])]
        loader += [(self.x[half:], self.y[half:])] if len(self.x) > half else []
        settings = {"ridge": self.ridge, "progress": False, **options}
        return whence.fit(self.model, loader, self.likelihood, structure, **settings)


def worsen(x: Tensor, kind: str) -> Tensor:
    """Features that give trouble."""
    x = x.clone()
    if kind == "duplicated":
        x[:, -1] = x[:, 0]
    elif kind == "constant":
        x[:, 0] = 1.0
    elif kind == "zero":
        x[:, 0] = 0.0
    elif kind == "huge":
        x[:, 0] *= 1e6
    elif kind == "tiny":
        x[:, -1] *= 1e-6
    elif kind == "ill-conditioned":
        x[:, -1] = x[:, 0] * (1 + 1e-9)
    elif kind == "copies":
        x[:] = x[:1]
    return x


class Convolution(nn.Module):
    """The features as a signal, of which some neighbours are seen at a time."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, channels, kernel)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.unsqueeze(1)).flatten(1)
        return found


class Recurrence(nn.Module):
    """The features one after the other."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.GRU(1, size, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.unsqueeze(2))[0][:, -1]
        return found


class Residual(nn.Module):
    """A way around a layer, whose weights serve twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.inner(x).tanh())


def first_layer(draw: st.DrawFn, width: int) -> tuple[list[nn.Module], int]:
    """What the features meet first, and how many numbers come out."""
    kind = draw(st.sampled_from(("none", "none", "convolution", "recurrence", "residual")))
    if kind == "convolution":
        channels, kernel = draw(st.integers(1, 2)), draw(st.integers(1, width))
        return [Convolution(channels, kernel), nn.Tanh()], channels * (width - kernel + 1)
    if kind == "recurrence":
        size = draw(st.integers(1, 2))
        return [Recurrence(size)], size
    return ([Residual(width)] if kind == "residual" else []), width


KINDS = ("plain", "duplicated", "constant", "zero", "huge", "tiny", "ill-conditioned", "copies")


@st.composite
def problems(draw: st.DrawFn, likelihoods: tuple[str, ...] = ("gaussian", "categorical", "bernoulli")) -> Problem:
    likelihood = draw(st.sampled_from(likelihoods))
    n, width, depth = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(0, 2))
    k = draw(st.integers(2 if likelihood == "categorical" else 1, 3))
    kind, ridge = draw(st.sampled_from(KINDS)), draw(st.sampled_from((1e-3, 0.3, 10.0)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    layers, below = first_layer(draw, width)
    for _ in range(depth):
        above = draw(st.integers(1, 5))
        layers.append(nn.Linear(below, above, bias=draw(st.booleans())))
        if draw(st.booleans()):
            layers.append(nn.LayerNorm(above))
        layers.append(draw(st.sampled_from(ACTIVATIONS))())
        below = above
    layers.append(nn.Linear(below, k))
    model = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = worsen(torch.randn(n, width, generator=generator, dtype=torch.float64), kind)
    y = torch.randn(n, k, generator=generator, dtype=torch.float64)
    if likelihood == "categorical":
        y = y.argmax(1)
    elif likelihood == "bernoulli":
        y = (y > 0).double()
    return Problem(model, x, y, torch.randn(3, width, generator=generator, dtype=torch.float64), likelihood, ridge)


def assert_sound(tracer: whence.Tracer, test: Tensor) -> None:
    """Variances that are variances."""
    found = tracer.predict(test, covariance=True)
    assert bool(torch.isfinite(found.mean).all())
    assert bool(torch.isfinite(found.ratio).all())
    for name in DEFINITE:
        covariance = found.covariance(name)
        assert bool(torch.isfinite(covariance).all()), name
        # the jackknife is HeC3 less its centre, which may be all of it
        size = float(found.covariance("hec3" if name == "jackknife" else name).abs().max())
        torch.testing.assert_close(covariance, covariance.transpose(1, 2), rtol=1e-7, atol=1e-9 * size)
        assert float(torch.linalg.eigvalsh(covariance).min()) >= -1e-9 * size, name
        assert bool((found.variance(name) >= 0).all()), name
    assert not bool(torch.isnan(found.hec1).any())  # infinite, where there is no freedom left
    for values in (tracer.residuals, tracer.leverage, tracer.loo_residuals, tracer.sigma):
        assert bool(torch.isfinite(values).all())
    assert bool((tracer.leverage >= -1e-9).all())
    assert tracer.degrees_of_freedom >= 0


def fitted(structure: whence.Structure, problem: Problem) -> whence.Tracer | None:
    """A fit that is sound; nothing where it is refused, with good reason."""
    try:
        tracer = problem.fit(structure)
    except whence.SingularCurvatureError:
        assert structure == STRUCTURES["dual"]
        assert_lost_in_rounding(problem)
        return None
    assert_sound(tracer, problem.test)
    return tracer


@every_structure
@settings(max_examples=40)
@given(problem=problems())
def test_variances_are_variances(structure: whence.Structure, problem: Problem) -> None:
    tracer = fitted(structure, problem)
    if tracer is not None and tracer.loo.policy == "exact":
        assert float(tracer.leverage.max()) <= 1 + 1e-9
        assert tracer.degrees_of_freedom <= problem.x.shape[0] * tracer.problem.k + 1e-6


@pytest.mark.slow
@every_structure
@settings(max_examples=1000)
@given(problem=problems())
def test_many_more(structure: whence.Structure, problem: Problem) -> None:
    fitted(structure, problem)


def assert_lost_in_rounding(problem: Problem) -> None:
    """The ridge is no more than rounding beside the kernel of huge features: to refuse is right."""
    rows = torch.as_tensor(oracles.tangents_of(problem.model, problem.x)[1]).flatten(0, 1)
    eps = torch.finfo(torch.float64).eps
    assert problem.ridge < 10 * eps * max(len(rows), 32) * float(rows.square().sum(1).max())


def test_a_ridge_below_rounding_is_refused_by_the_dual_road_alone() -> None:
    x = 1e6 * torch.tensor([[-2.0], [2.2], [0.9], [1.1], [-2.9], [0.6], [0.8]], dtype=torch.float64)
    problem = Problem(nn.Linear(1, 1).double().eval(), x, torch.randn(7, 1).double(), x[:3], "gaussian", 1e-3)
    assert_lost_in_rounding(problem)
    with pytest.raises(
        whence.SingularCurvatureError, match=r"5 of 7 directions.*Exact\(road='primal'\) separates more"
    ):
        problem.fit(STRUCTURES["dual"])
    assert_sound(problem.fit(STRUCTURES["primal"]), problem.test)


def test_rounding_that_is_as_large_as_the_ridge_is_not_taken_for_information() -> None:
    """Leverages would be off by a tenth, and one of them below zero."""
    x = torch.tensor(
        [[451289.6647], [448850.018], [-948082.748], [2115915.1984], [1005994.761], [1339314.8146]]
    ).double()
    problem = Problem(nn.Linear(1, 1).double().eval(), x, torch.randn(6, 1).double(), x[:3], "gaussian", 1e-3)
    assert fitted(STRUCTURES["dual"], problem) is None
    assert_sound(problem.fit(STRUCTURES["primal"]), problem.test)


@pytest.mark.parametrize("structure", ["primal", "core", "sketch"])
def test_gradients_that_are_rounding_are_no_information(structure: str) -> None:
    """A norm takes away the bias before it: its gradients are rounding, which without a ridge would count as others."""
    exact = {"core": whence.Core(size=100, tolerance=0.0), "sketch": whence.Sketch(size=100)}
    exact |= {"primal": STRUCTURES["primal"]}
    for seed in range(4):
        torch.manual_seed(seed)
        parts = nn.Conv1d(2, 2, 2), nn.InstanceNorm1d(2, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(10, 2)
        model = nn.Sequential(*parts).double().eval()
        x, y = torch.randn(40, 2, 6).double(), torch.randn(40, 2).double()
        rows = torch.as_tensor(oracles.tangents_of(model, x)[1]).flatten(0, 1)
        values = torch.linalg.svdvals(rows)
        assert int((values > 1e-10 * values[0]).sum()) < rows.shape[1] < len(rows)
        with pytest.raises(whence.SingularCurvatureError, match="without information at ridge=0"):
            whence.fit(model, [(x, y)], structure=exact[structure], ridge=0.0, progress=False)
        head = whence.fit(model, [(x, y)], structure=exact[structure], ridge=0.0, progress=False, parameters=["4.*"])
        assert head.degrees_of_freedom == pytest.approx(22)  # the last layer's are all determined


@every_structure
@settings(max_examples=5)
@given(problem=problems(), options=st.sampled_from(({"recenter": True}, {"leverage": "clip"}, {"noise": "mle"})))
def test_options_keep_variances_sound(structure: whence.Structure, problem: Problem, options: dict[str, Any]) -> None:
    assert_sound(problem.fit(structure, **options), problem.test)


class Scaled(nn.Module):
    """The same network in other units."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.factor * self.model(x)
        return outputs


def assert_times(found: whence.Uncertainty, base: whence.Uncertainty, factor: float, names: tuple[str, ...]) -> None:
    for name in names:
        wanted = factor * base.variance(name)
        atol = 1e-6 * float(wanted.max()) + 1e-12 * factor
        torch.testing.assert_close(found.variance(name), wanted, rtol=1e-5, atol=atol, msg=name)


@every_structure
@settings(max_examples=5)
@given(problem=problems(("gaussian",)), factor=st.sampled_from((1e-3, 7.0, 1e4)))
def test_other_units_of_the_outputs(structure: whence.Structure, problem: Problem, factor: float) -> None:
    """Outputs and targets times s, the ridge times s^2: variances times s^2."""
    base = problem.fit(structure).predict(problem.test)
    other = Problem(
        Scaled(problem.model, factor).eval(),
        problem.x,
        factor * problem.y,
        problem.test,
        "gaussian",
        factor**2 * problem.ridge,
    )
    assert_times(other.fit(structure).predict(problem.test), base, factor**2, ("ho", "hec0", "hec3", "laplace"))


@pytest.mark.parametrize("structure", [STRUCTURES[name] for name in ("primal", "dual", "ekfac, whole", "diagonal")])
@settings(max_examples=5)
@given(problem=problems())
def test_twice_the_data(structure: whence.Structure, problem: Problem) -> None:
    """Every example twice and twice the ridge: half of Ho and HeC0."""
    base = problem.fit(structure).predict(problem.test)
    x, y = torch.cat([problem.x, problem.x]), torch.cat([problem.y, problem.y])
    twice = Problem(problem.model, x, y, problem.test, problem.likelihood, 2 * problem.ridge)
    assert_times(twice.fit(structure).predict(problem.test), base, 0.5, ("ho", "hec0"))


@every_structure
def test_one_example(structure: whence.Structure) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double().eval()
    x, y = torch.randn(1, 2, dtype=torch.float64), torch.randn(1, 1, dtype=torch.float64)
    problem = Problem(model, x, y, torch.randn(4, 2, dtype=torch.float64), "gaussian", 0.5)
    assert_sound(problem.fit(structure), problem.test)
