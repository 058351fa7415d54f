"""Sweeps: runs that differ in more than their draw stand in tables of their own."""

from __future__ import annotations

import torch

from whence_paper.images.cases import some_of
from whence_paper.images.lambda_sweep import SWEEP
from whence_paper.records import Record


def test_runs_are_grouped_by_what_they_have_in_common(tmp_path):
    record = Record(tmp_path / "lambda-sweep.json", "lambda-sweep")
    areas = dict.fromkeys(("Ho", "Laplace", "HeC3", "HeC3/Ho"), 0.75)
    usual = {"case": "mnist", "optimiser": "adam", "size": "all", "fit": "ekfac"}
    for more in ({}, {"fit size": 100}):
        for seed in (0, 1):
            for share in (0.1, 1.0):
                wanted = {**usual, **more, "seed": seed, "ridge share": share}
                record.add(wanted, {"missing_auroc": areas, "noisy_auroc": areas}, 0.0)
    found = dict(SWEEP.groups(record))
    assert list(found) == [
        "mnist, adam, all images, ekfac, 2 draws",
        "mnist, adam, all images, 100 to fit, ekfac, 2 draws",
    ]
    for runs in found.values():
        places, values = SWEEP.values(runs, "missing_auroc")
        assert places == [0.1, 1.0]
        assert values["Ho"] == [[0.75, 0.75], [0.75, 0.75]]


def test_a_part_of_the_data_is_always_the_same():
    data = torch.arange(20.0)[:, None], torch.arange(20.0)[:, None] * 2
    assert some_of(data, None) is data
    inputs, targets = some_of(data, 5)
    assert len(inputs.unique()) == 5
    assert torch.equal(targets, 2 * inputs)
    assert torch.equal(some_of(data, 5)[0], inputs)
