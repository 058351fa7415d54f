"""The cost model of fits by several processes: what it must obey, and the measurements it was checked against."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.distributed import LARGE, predicted, task
from benchmarks.distributed_cost import Crew, eigen_sizes, memory, operations, owned, traffic

RECORD = Path(__file__).resolve().parents[2] / "results" / "distributed.json"
SPEED = {"products": 1e10, "eigen": 1e-9}


def test_seven_billion_weights() -> None:
    assert LARGE.weights == 6_607_077_376


@pytest.mark.parametrize("process_group", [Crew(1, 2), Crew(2, 3), Crew(1, 8)])
def test_every_layer_has_one_owner(process_group: Crew) -> None:
    shares = owned(LARGE, process_group)
    assert len(shares) == process_group.layers
    assert sum(layer.weights for share in shares for layer in share) == LARGE.weights


def test_sharing_data_divides_work_and_sharing_layers_divides_memory() -> None:
    one = Crew(1, 1)
    assert operations(LARGE, Crew(4, 1))["network"] == operations(LARGE, one)["network"] / 4
    assert operations(LARGE, Crew(1, 4))["network"] == operations(LARGE, one)["network"]
    assert memory(LARGE, Crew(4, 1)) == memory(LARGE, one)
    assert memory(LARGE, Crew(1, 4)) < memory(LARGE, one) / 3.5
    assert traffic(LARGE, one) == {}
    assert (
        sum(side**3 for side in eigen_sizes(LARGE, Crew(2, 2))) < sum(side**3 for side in eigen_sizes(LARGE, one)) / 3
    )


def test_measurements_are_near() -> None:
    """Traffic exactly, but for a few small things; memory and time of work that takes more than a second."""
    record = json.loads(RECORD.read_text())
    rows = record["rows"]
    assert {(row["data"], row["layers"]) for row in rows} == {(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)}
    for row in rows:
        process_group = Crew(row["data"], row["layers"])
        told = predicted(task(row["width"]), process_group, SPEED, 4, "cpu")
        assert told["traffic"] == row["traffic"]["predicted"]
        assert row["traffic"]["measured"] == pytest.approx(told["traffic"], abs=1000)
        assert told["bytes"] == row["bytes"]["predicted"]
        if row["seconds"]["measured"] > 1.0:
            assert 0.6 < row["bytes"]["predicted"] / row["bytes"]["measured"] < 1.4
            assert 0.6 < row["seconds"]["predicted"] / row["seconds"]["measured"] < 1.4
