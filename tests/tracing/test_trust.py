"""Trust: every check catches the case that is planted for it, and is content where there is nothing to find."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import networks
import whence
from doubles import CPU, batches, fit, inputs_and_targets, mlp
from whence.tracing.trust import rules

CHECKS = (
    "distance",
    "leave-one-out",
    "stationarity",
    "linearization",
    "degrees of freedom",
    "leverage",
    "lambda",
)
RIDGE = 1.0
TEST: Tensor = torch.linspace(-2.5, 2.5, 40, dtype=torch.float64).unsqueeze(1)


def look(tracer: whence.Tracer, x: Any = TEST, **options: Any) -> whence.Trust:
    """However long it takes."""
    return tracer.trust(x, **{"seconds": 1e9, **options})


def told_at_once(tracer: whence.Tracer) -> str:
    """What the fit itself said about trust."""
    return next(finding.words for finding in tracer.diagnostics if finding.name == "trust")


def sine(n: int = 60) -> tuple[Tensor, Tensor]:
    """Forty points of a sine with noise."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 6 - 3
    return x, x.sin() + 0.2 * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def trained(ridge: float, steps: int, units: int = 6) -> nn.Sequential:
    """So many steps of L-BFGS towards the optimum of sum of squared errors + ridge |w|^2."""
    x, y = sine()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(1, units), nn.Tanh(), nn.Linear(units, 1)).double()
    optimiser = torch.optim.LBFGS(
        network.parameters(), max_iter=steps, tolerance_grad=1e-8, tolerance_change=1e-13, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = (network(x) - y).square().sum() + ridge * sum(p.square().sum() for p in network.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    return network.eval()


@pytest.fixture(scope="module")
def converged() -> nn.Sequential:
    return trained(RIDGE, 500)


@pytest.fixture(scope="module")
def stopped() -> nn.Sequential:
    return trained(RIDGE, 2)


def test_nothing_is_found_where_there_is_nothing(converged: nn.Sequential) -> None:
    trust = look(fit(converged, [sine()], ridge=RIDGE))
    assert [check.name for check in trust] == list(CHECKS)
    assert trust.level == "fine", str(trust)
    assert all(check.level == "fine" for check in trust)
    assert trust.sample == 16


@pytest.mark.parametrize("structure", ["ekfac", "kfac", "diagonal", "core", "sketch"])
def test_the_distance_is_that_from_an_exact_fit(structure: str, converged: nn.Sequential) -> None:
    """One output, so that variances along a mixture are the variances."""
    tracer = fit(converged, [sine()], ridge=RIDGE, structure=structure)
    exact = fit(converged, [sine()], ridge=RIDGE).predict(TEST)
    found = look(tracer, sample=len(TEST), tolerance=1e-12)["distance"].numbers
    factors = (tracer.predict(TEST).ho / exact.ho).squeeze(1)
    assert found["ho"] == pytest.approx(float(factors.median()), rel=1e-6)
    ranks = [values.squeeze(1).argsort().argsort().double() for values in (tracer.predict(TEST).ho, exact.ho)]
    assert found["ho rank"] == pytest.approx(float(torch.corrcoef(torch.stack(ranks))[0, 1]), abs=1e-9)


@pytest.mark.parametrize(("structure", "level"), [("diagonal", "do not trust"), ("core", "fine")])
def test_a_structure_that_is_off(structure: str, level: str, converged: nn.Sequential) -> None:
    tracer = fit(converged, [sine()], ridge=RIDGE, structure=structure)
    found = look(tracer)["distance"]
    assert found.level == level, found
    if level != "fine":
        assert 'structure="core"' in found.words
        assert max(found.numbers["ho"], 1 / found.numbers["ho"]) > 2


def test_leverages_that_are_off(converged: nn.Sequential) -> None:
    """The diagonal counts directions twice, so that examples seem to decide more than they do."""
    few = [tuple(part[:14] for part in sine())]
    assert look(fit(converged, few, ridge=0.02, structure="diagonal"))["leave-one-out"].level != "fine"
    assert look(fit(converged, few, ridge=0.02, structure="core"))["leave-one-out"].level == "fine"


def test_a_network_that_was_stopped_early(converged: nn.Sequential, stopped: nn.Sequential) -> None:
    tracer = fit(stopped, [sine()], ridge=RIDGE)
    found = look(tracer)["stationarity"]
    assert found.level == "do not trust", found
    assert "recenter=True" in found.words
    assert "stationarity" in told_at_once(tracer)
    there = fit(converged, [sine()], ridge=RIDGE)
    assert look(there)["stationarity"].numbers["moves"] < 1e-3
    assert there.diagnostics["trust"] == "fine"


def test_a_step_that_was_taken_is_not_held_against_the_network(stopped: nn.Sequential) -> None:
    exact = look(fit(stopped, [sine()], ridge=RIDGE, recenter=True))["stationarity"]
    assert exact.level == "fine"
    assert exact.numbers["moves"] < 1e-3
    rough = look(fit(stopped, [sine()], ridge=RIDGE, recenter=True, structure="diagonal"))["stationarity"]
    assert rough.numbers["moves"] > 0.25
    assert "approximate step" in rough.words


def test_a_lambda_that_is_far_too_large(converged: nn.Sequential) -> None:
    """With that penalty the weights should be nearly zero."""
    found = look(fit(converged, [sine()], ridge=1e4 * RIDGE))
    assert found["stationarity"].level == "do not trust"
    assert "whence.ridge_from_weight_decay" in found["stationarity"].words


def test_a_lambda_that_is_far_too_small(generator: torch.Generator) -> None:
    """More weights than numbers: every example decides its own prediction."""
    x = torch.randn(8, 20, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 1, generator=generator, dtype=torch.float64)
    tracer = fit(networks.linear(torch.ones(1, 20)), [(x, y)], ridge=1e-8)
    found = look(tracer, None)
    assert found["degrees of freedom"].level == "careful"
    assert "nearly every number" in found["degrees of freedom"].words
    assert found["leverage"].level == "do not trust"
    assert found["leverage"].numbers["guarded"] == 8
    assert "leverage" in told_at_once(tracer)
    assert tracer.diagnostics["trust"] == "do not trust"


def test_more_freedom_than_numbers() -> None:
    x, y = sine(8)
    tracer = fit(trained(RIDGE, 20), [(x, y)], ridge=1e-5, structure="diagonal")
    found = look(tracer)["degrees of freedom"]
    assert found.numbers["found"] > found.numbers["of"] == 8
    assert found.level == "do not trust"
    assert "impossible" in found.words
    assert found.numbers["exact"] <= 8 + 1e-6
    assert "degrees of freedom" in told_at_once(tracer)
    assert tracer.diagnostics["trust"] == "do not trust"


def test_clipped_leverages() -> None:
    x, y = sine(8)
    found = look(fit(trained(RIDGE, 20), [(x, y)], ridge=1e-5, structure="diagonal", leverage="clip"))["leverage"]
    assert found.level == "do not trust"
    assert "one_plus_q" in found.words


def test_outputs_that_bend(converged: nn.Sequential) -> None:
    """Three examples hold a sine; without one of them it would be another curve."""
    x = torch.tensor([[-2.0], [0.1], [2.0]], dtype=torch.float64)
    found = look(fit(converged, [(x, 3 * x.cos())], ridge=1e-4))["linearization"]
    assert found.level == "do not trust", found
    assert found.numbers["leave-one-out"] > 1


@pytest.mark.parametrize(("taken", "level"), [(False, "careful"), (True, "do not trust")])
def test_a_step_that_bends_matters_where_it_was_taken(taken: bool, level: str) -> None:
    found = rules.linearization(0.1, 0.1, 5.0, taken, 0.0, 0.0)
    assert found.level == level
    assert "recenter=True" in found.words


def test_a_linear_model_does_not_bend(generator: torch.Generator) -> None:
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    model = networks.linear(torch.zeros(2, 3))
    found = look(fit(model, [(x, y)], ridge=0.1), x)["linearization"]
    assert found.level == "fine"
    assert max(found.numbers.values()) < 1e-9


def test_verdicts_that_hang_on_lambda(generator: torch.Generator) -> None:
    """Hardly more examples than weights: what is scarce and what is noisy depends on lambda."""
    x = torch.randn(30, 25, generator=generator, dtype=torch.float64)
    y = torch.randn(30, 1, generator=generator, dtype=torch.float64)
    test = torch.cat([x, torch.randn(60, 25, generator=generator, dtype=torch.float64) * 1.2])
    found = look(fit(networks.linear(torch.zeros(1, 25)), [(x, y)], ridge=1.0, recenter=True), test)["lambda"]
    assert found.level != "fine"
    assert found.numbers["same"] <= min(found.numbers["a tenth"], found.numbers["ten times"])
    assert 'ridge="loo"' in found.words


def test_groups_are_left_out_together_and_verdicts_are_not_theirs(converged: nn.Sequential) -> None:
    x, y = sine()
    tracer = fit(converged, [(x, y)], ridge=RIDGE, groups=[i // 3 for i in range(len(x))])
    found = look(tracer, tolerance=1e-10)
    assert found["lambda"].level == "not checked"
    assert "groups" in found["lambda"].words
    assert found["distance"].numbers["hec3"] == pytest.approx(1.0, rel=1e-6)
    assert found["leave-one-out"].numbers["factor"] == pytest.approx(1.0, rel=1e-6)
    assert found["leverage"].numbers["of"] == 20


def test_no_residuals_no_doubt() -> None:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).unsqueeze(1)
    model = networks.linear([[2.0]])
    found = look(fit(model, [(x, model(x).detach())], ridge=1e-3), x)
    assert found["leave-one-out"].level == "not checked"
    assert found["distance"].level == "fine"


@pytest.mark.parametrize("structure", ["exact", "ekfac", "core"])
def test_single_precision(structure: str, converged: nn.Sequential) -> None:
    x, y = sine()
    rough = copy.deepcopy(converged).float()
    wanted = look(fit(converged, [(x, y)], ridge=RIDGE, structure=structure), tolerance=1e-4)
    single = fit(rough, [(x.float(), y.float())], ridge=RIDGE, structure=structure)
    found = look(single, TEST.float(), tolerance=1e-4)
    for name in ("distance", "leave-one-out", "linearization"):
        assert found[name].level == wanted[name].level, f"{found}\n{wanted}"
    for name in ("ho", "hec3"):
        assert found["distance"].numbers[name] == pytest.approx(wanted["distance"].numbers[name], rel=2e-2)
    for name in ("leave-one-out", "own"):
        assert found["linearization"].numbers[name] == pytest.approx(wanted["linearization"].numbers[name], rel=0.1)


def test_the_model_is_left_as_found(converged: nn.Sequential) -> None:
    tracer = fit(converged, [sine()], ridge=RIDGE, structure="ekfac")
    before = {name: value.clone() for name, value in converged.state_dict().items()}
    state = torch.get_rng_state()
    look(tracer)
    assert all(torch.equal(value, before[name]) for name, value in converged.state_dict().items())
    assert all(p.requires_grad for p in converged.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        converged[0].bias += 1e-3
    try:
        with pytest.raises(whence.StaleModelError):
            look(tracer)
    finally:
        converged.load_state_dict(before)


def test_little_memory_and_small_chunks_change_nothing(converged: nn.Sequential) -> None:
    x, y = sine()
    loader = list(zip(x.split(17), y.split(17), strict=True))
    wanted = look(fit(converged, [(x, y)], ridge=RIDGE, structure="ekfac"), TEST, tolerance=1e-12)
    tracer = fit(converged, loader, ridge=RIDGE, structure="ekfac", chunk_size=3)
    tracer.problem.budget.limit = 2000
    found = look(tracer, TEST, tolerance=1e-12)
    for one, other in zip(found, wanted, strict=True):
        assert one.level == other.level
        if one.name != "degrees of freedom":  # signs are drawn for all right-hand sides at once either way
            assert dict(one.numbers) == pytest.approx(dict(other.numbers), rel=1e-5, abs=1e-9), one.name


def test_no_time_is_told(converged: nn.Sequential) -> None:
    found = look(fit(converged, [sine()], ridge=RIDGE, structure="ekfac"), TEST, seconds=0.0)
    for name in ("distance", "leave-one-out", "stationarity", "linearization", "lambda"):
        assert found[name].level == "not checked"
        assert "seconds" in found[name].words
    assert "exact" not in found["degrees of freedom"].numbers


def test_the_sample_is_a_sample() -> None:
    tracer = fit(mlp(), batches(), structure="ekfac")
    x, _ = inputs_and_targets()
    one, again, other = (look(tracer, x, sample=3, seed=seed)["distance"].numbers for seed in (0, 0, 1))
    assert one == again
    assert one != other


def test_the_training_set_is_looked_at_where_there_is_nothing_else() -> None:
    case = networks.build("single_output")
    tracer = fit(case.model, case.batches(4), structure="ekfac")
    given, training = (look(tracer, x, sample=100, tolerance=1e-8) for x in (case.inputs, None))
    assert given.sample == training.sample == networks.EXAMPLES
    for name in ("distance", "leave-one-out", "stationarity", "linearization", "lambda"):
        assert dict(training[name].numbers) == pytest.approx(dict(given[name].numbers), rel=1e-3), name


def test_inputs_come_as_they_come_elsewhere() -> None:
    tracer = fit(mlp(), batches())
    x, y = inputs_and_targets()
    for given in ([x[:3], x[3:]], [(x[:5], y[:5]), (x[5:], y[5:])], iter([x])):
        assert look(tracer, given, sample=4).sample == 4
    with pytest.raises(whence.InputError, match="empty loader"):
        look(tracer, [])
    with pytest.raises(whence.InputError, match="expected sample"):
        look(tracer, x, sample=0)


def test_examples_of_weight_zero_are_not_in_the_sample() -> None:
    x, y = inputs_and_targets()
    weights = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2], dtype=torch.float64)
    assert look(fit(mlp(), [(x, y, weights)]), None, sample=100).sample == 5


def test_it_shows_itself() -> None:
    trust = look(fit(mlp(), batches(), structure="ekfac"), None, sample=4)
    shown = str(trust)
    assert shown.startswith(trust.headline)
    assert max(map(len, shown.splitlines())) <= 80
    assert repr(trust) == f"Trust({trust.headline})"
    for check in trust:
        assert check.name in shown
        assert "".join(check.words.split())[:20] in "".join(shown.split())
        assert f">{check.name}</td>" in trust._repr_html_()
    table = trust.to_frame()
    assert list(table.columns) == ["name", "level", "figures", "words"]
    assert list(table["name"]) == list(CHECKS)
    with pytest.raises(KeyError):
        trust["nothing"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        trust.sample = 3  # type: ignore[misc]


def test_a_fit_from_a_file_needs_its_training_data(tmp_path: Path) -> None:
    tracer = fit(mlp(), batches(), structure="ekfac")
    tracer.save(tmp_path / "fit.whence")
    with pytest.raises(whence.LoaderError, match="train_loader"):
        whence.load(tmp_path / "fit.whence", mlp()).trust()
    again = whence.load(tmp_path / "fit.whence", mlp(), batches(), progress=False)
    for one, other in zip(look(again, None, tolerance=1e-8), look(tracer, None, tolerance=1e-8), strict=True):
        assert one.level == other.level
        assert dict(one.numbers) == pytest.approx(dict(other.numbers), rel=1e-4), one.name


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def told(**options: Any) -> str:
        whence.fit(mlp(), batches(), ridge=0.5, **options)
        return capsys.readouterr().err

    return told


def test_a_fit_says_at_once_what_is_not_fine(lines: Any) -> None:
    """A network that was never trained."""
    assert lines() == "whence: do not trust (stationarity); print(tracer.trust()) tells why and what to do\n"
    assert lines(progress=False) == ""
    assert lines(recenter=True) == ""


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    for structure in ("exact", "ekfac", "core"):
        wanted = look(fit(mlp(CPU), batches(CPU), structure=structure), None, tolerance=1e-10)
        found = look(fit(mlp(cuda), batches(cuda), structure=structure, tf32=False), None, tolerance=1e-10)
        for one, other in zip(found, wanted, strict=True):
            assert one.level == other.level
            assert dict(one.numbers) == pytest.approx(dict(other.numbers), rel=1e-5, abs=1e-8), one.name
