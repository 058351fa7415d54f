"""Trust leaves everything as it was, keeps to its memory and its time, and says what it did."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import networks
import whence
from doubles import CPU, batches, fit, inputs_and_targets, mlp
from trusted_fits import CHECKS, RIDGE, TEST, look, sine


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
    tracer = fit(converged, loader, ridge=RIDGE, structure="ekfac", execution=whence.Execution(chunk_size=3))
    tracer.problem.budget.limit = 2000
    found = look(tracer, TEST, tolerance=1e-12)
    for one, other in zip(found, wanted, strict=True):
        assert one.level == other.level
        if one.name != "degrees of freedom":  # signs are drawn for all right-hand sides at once either way
            assert dict(one.numbers) == pytest.approx(dict(other.numbers), rel=1e-5, abs=1e-9), one.name


def test_no_time_is_told(converged: nn.Sequential) -> None:
    found = look(fit(converged, [sine()], ridge=RIDGE, structure="ekfac"), TEST, seconds=0.0)
    for name in ("distance", "leave-one-out", "stationarity", "linearization"):
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
    for name in ("distance", "leave-one-out", "stationarity", "linearization"):
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
    assert " ".join(shown.split()).startswith(trust.headline)
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
    said = lines()
    assert said.startswith("whence: do not trust (stationarity). The network is so far")
    assert said.count("\n") == 1
    assert "tracer" not in said
    assert lines(progress=False) == ""
    assert lines(recenter=True) == ""


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    for structure in ("exact", "ekfac", "core"):
        wanted = look(fit(mlp(CPU), batches(CPU), structure=structure), None, tolerance=1e-10)
        found = look(
            fit(mlp(cuda), batches(cuda), structure=structure, execution=whence.Execution(precision="float32")),
            None,
            tolerance=1e-10,
        )
        for one, other in zip(found, wanted, strict=True):
            assert one.level == other.level
            assert dict(one.numbers) == pytest.approx(dict(other.numbers), rel=1e-5, abs=1e-8), one.name
