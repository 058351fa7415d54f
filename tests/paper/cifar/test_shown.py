"""Table 3 from a record: which runs belong together, and what a method is said to take."""

from __future__ import annotations

import pytest

from whence_paper.cifar.table3_shown import accuracies, alike, main_fits, rows
from whence_paper.records import Run

RECIPE = {
    "size": "all",
    "epochs": 30,
    "rate": 1e-3,
    "weight_decay": 0.01,
    "batch": 512,
    "shift": 0,
    "mirror": False,
    "constant": False,
    "loss": "squared error",
}
AREAS = {"margin": 0.8, "largest output": 0.7, "entropy": 0.6}


def network(seed: int, seconds: float, **other) -> Run:
    results = {"train_s": seconds, "auroc": AREAS, "accuracy": 0.9, "training_accuracy": 1.0}
    return Run({**RECIPE, **other, "kind": "network", "seed": seed}, results)


def fit(seed: int, share: float, area: float, **other) -> Run:
    about = {"kind": "fit", "seed": seed, "way": "EKFAC", "ridge share": share, "fit size": 100}
    areas = {"ho": {"sum": area - 0.1}, "hec3": {"sum": area}}
    return Run({**RECIPE, **other, **about}, {"fit_s": 10.0 + seed, "predict_s": 1.0, "auroc": areas})


def test_runs_of_one_recipe_are_shown_in_the_order_of_their_seeds():
    others = [network(seed, 1.0, loss="cross-entropy") for seed in range(5)]
    wanted = [network(2, 1.0), network(0, 1.0), network(1, 1.0)]
    found = alike([network(0, 1.0, epochs=60), *others, *wanted])
    assert [run.configuration["seed"] for run in found] == [0, 1, 2]
    assert all(run.configuration["epochs"] == 30 and run.configuration["loss"] == "squared error" for run in found)
    assert alike(others) == []


def test_other_lambdas_are_not_among_the_main_fits():
    runs = [fit(0, 0.001, 0.5), fit(0, 0.01, 0.9), fit(1, 0.01, 0.8), fit(0, 0.1, 0.7)]
    assert main_fits(runs, "EKFAC") == runs[1:3]
    assert main_fits(runs, "dense") == []


def test_of_two_lambdas_with_one_fit_each_the_one_on_more_examples_is_shown():
    fewer = Run({**fit(0, 0.1, 0.9).configuration, "fit size": 50}, fit(0, 0.1, 0.9).results)
    assert main_fits([fewer, fit(0, 0.01, 0.8)], "EKFAC") == [fit(0, 0.01, 0.8)]


def test_a_record_may_have_fits_and_no_networks():
    assert accuracies([fit(0, 0.01, 0.9)]) == ""
    assert accuracies([network(0, 1.0)]) == ", 1 networks, accuracy 0.900 (training 1.000)"
    assert [name for name, _, _ in rows([fit(0, 0.01, 0.9)])] == ["Ho, EKFAC", "HeC3, EKFAC"]


def test_seconds_are_those_of_the_fastest():
    together = Run(
        {**RECIPE, "kind": "ensemble", "seed": 0, "members": 10},
        {"auroc": {"ensemble variance": 0.9, "ensemble margin": 0.95}, "auroc_members": []},
    )
    runs = [network(0, 30.0), network(1, 15.0), together, fit(0, 0.01, 0.9), fit(1, 0.01, 0.8)]
    found = {name: (areas, seconds) for name, areas, seconds in rows(runs)}
    assert found["deep ensemble, variance"] == ([0.9], 150.0)
    assert found["HeC3, EKFAC"] == ([0.9, 0.8], 11.0)
    assert found["Ho, EKFAC"][0] == pytest.approx([0.8, 0.7])
    assert found["margin"] == ([0.8, 0.8], 0.0)
