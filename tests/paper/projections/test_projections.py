"""Projections of last layers, quick: they run, are drawn, and doubt lies where classes meet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from whence_paper.projections import projected
from whence_paper.projections.embedding import Embedded, last_inputs, mixed


def test_the_direction_of_the_finding(tmp_path: Path) -> None:
    typed = ["--quick", "--projection", "pca", "--out", str(tmp_path)]
    record = projected.main(typed)  # ends the test where a finding is lost
    bank, digits = record.runs()
    assert bank.results["border_auroc"]["HeC3/Ho"] > 0.8  # classes meet where labels are coins
    assert digits.results["border_auroc"]["HeC3"] > 0.7
    assert digits.results["accuracy"] > 0.9
    assert (tmp_path / "umap-quick-pca-bank-0.png").stat().st_size > 10_000
    assert "| mnist, adam | " in (tmp_path / "umap-quick.md").read_text()
    kept = sorted((tmp_path / "embeddings").glob("*.npz"))
    assert len(kept) == 2
    before = [path.stat().st_mtime_ns for path in kept]
    projected.main([*typed, "--only", "embed"])  # from the disk
    assert [path.stat().st_mtime_ns for path in kept] == before


def test_last_inputs_are_what_the_last_layer_sees() -> None:
    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(last_inputs(network, x, batch=4), network[:2](x).detach())
    assert not network[2]._forward_pre_hooks


def test_mixed_neighbourhoods(tmp_path: Path) -> None:
    train = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    test = torch.tensor([[0.1], [5.1]])
    ones = torch.ones(2)
    embedded = Embedded(train, labels, test, torch.tensor([0, 1]), torch.tensor([0, 1]), ones, ones)
    assert mixed(embedded, count=3).tolist() == pytest.approx([0.0, 1 / 3])
    embedded.save(tmp_path / "points.npz")
    again = Embedded.load(tmp_path / "points.npz")
    torch.testing.assert_close(again.train, train, atol=1e-2, rtol=0)
    assert torch.equal(again.train_labels, labels)


@pytest.mark.slow
def test_umap_keeps_clusters_apart() -> None:
    pytest.importorskip("umap")
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(120, 10, generator=draw)
    points[60:] += 20
    plane = projected.project(points, "umap", 10, 0)
    assert plane.shape == (120, 2)
    between = (plane[:60].mean(0) - plane[60:].mean(0)).norm()
    assert float(between) > 3 * float(plane[:60].std(0).max())
