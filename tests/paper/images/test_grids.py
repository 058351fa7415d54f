"""Grids of images: predictions that Table 3 has kept are taken as they are."""

from __future__ import annotations

import torch

from whence_paper.cifar import cases, table3
from whence_paper.cifar.fits import Predicted
from whence_paper.images import grids


def test_predictions_of_table_3_serve(tmp_path):
    settings, _ = grids.EXPERIMENT.parse(["--quick", "--sets", "cifar-10", "--out", str(tmp_path)])
    about = cases.configuration(cases.architectures(settings)[0], settings, 0)
    way = {
        "kind": "fit",
        "way": "EKFAC, all layers",
        "ridge share": settings.ridge_share,
        "fit size": settings.fit_size,
    }
    truth = cases.read(settings).test_labels
    draw = torch.Generator().manual_seed(0)
    m = len(truth)
    variances = {name: torch.rand(m, 10, generator=draw, dtype=torch.float64) for name in ("ho", "hec3")}
    kept = Predicted(torch.randn(m, 10, generator=draw), variances, {k: v[:, 1:] for k, v in variances.items()})
    kept.save(table3.arrays(settings, {**about, **way}))
    found, labels = grids.predictions("cifar-10", settings, 0)
    assert torch.equal(labels, truth)
    torch.testing.assert_close(found["HeC3"], variances["hec3"].sum(1), rtol=5e-3, atol=0)
    told = grids.judge("cifar-10", settings, 0)
    first = found["HeC3"].argmax()
    assert told["grids"]["HeC3"]["images"][0] == int(first)
    assert told["grids"]["HeC3"]["wrong"][0] == int(kept.outputs[first].argmax() != truth[first])
