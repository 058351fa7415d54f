"""A plane shows the decision that the network makes there, firm where it is firm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from plotted import class_fit
from whence import InputError, ShapeError, Uncertainty
from whence.plots import decision_regions, decisions


@pytest.mark.parametrize("outputs", [1, 2])
def test_each_side_of_the_border_has_the_colour_of_its_class(outputs: int) -> None:
    tracer, x, y = class_fit(outputs)
    ax = Figure().subplots()
    assert decision_regions(tracer, x, y, steps=21, names=["no", "yes"], ax=ax) is ax
    picture = ax.images[0].get_array()  # rows from the bottom up
    assert (picture[:, :9, 2] > picture[:, :9, 0]).all(), "blue left, where the first input is negative"
    assert (picture[:, -9:, 0] > picture[:, -9:, 2]).all(), "vermillion right"
    assert picture[10, 10].min() > picture[10, 0].min(), "paler at the border than far from it"
    border = np.concatenate([path.vertices for path in ax.collections[0].get_paths()])
    assert border[:, 0] == pytest.approx(0.0, abs=1e-9)
    drawn = {str(part.get_label()): part.get_offsets().tolist() for part in ax.collections if part.get_offsets().any()}
    assert drawn == {"no": x[y == 0].tolist(), "yes": x[y == 1].tolist()}


def test_three_classes_have_three_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.plots.PAD", 1.0)
    tracer, x, y = class_fit(3)
    ax = decision_regions(tracer, x, y, steps=31, ax=Figure().subplots())
    picture = ax.images[0].get_array()
    hues = [int(np.argmax(picture[row, at])) for row, at in ((28, 0), (28, 30), (0, 15))]
    assert hues == [2, 0, 1], "blue upper left, vermillion upper right, green at the bottom"


@pytest.mark.parametrize(
    ("show", "label"), [("ho", "variance by Ho"), ("hec3", "variance by HeC3"), ("ratio", "HeC3/Ho")]
)
def test_variances_are_drawn_as_they_are(show: str, label: str) -> None:
    tracer, x, y = class_fit(2)
    figure = Figure()
    ax = decision_regions(tracer, x, y, show=show, steps=5, ax=figure.subplots())
    mesh = ax.collections[0]
    corner = tracer.predict(torch.tensor([[-1.3, -1.3], [1.3, 1.3]]).double())
    expected = corner.ratio if show == "ratio" else corner.variance(show).sum(1)
    values = 10 ** np.asarray(mesh.get_array()).reshape(5, 5)
    assert [values[0, 0], values[-1, -1]] == pytest.approx(expected.tolist())
    assert figure.axes[1].get_ylabel() == label
    if show == "ratio":
        assert mesh.get_clim()[0] == -mesh.get_clim()[1], "white is a ratio of one"


def test_lead_counts_in_standard_deviations_of_the_difference() -> None:
    covariance = torch.tensor([[[4.0, 1.0], [1.0, 1.0]]])
    choice, lead = decisions(Uncertainty(torch.tensor([[1.0, 7.0]]), {"hec3": covariance}))
    assert choice.tolist() == [1]
    assert lead.tolist() == pytest.approx([6.0 / 3.0**0.5])
    choice, lead = decisions(Uncertainty(torch.tensor([[-3.0]]), {"hec3": torch.tensor([[[4.0]]])}))
    assert (choice.tolist(), lead.tolist()) == ([0], [1.5])


def test_inputs_are_checked() -> None:
    tracer, x, y = class_fit(2)
    with pytest.raises(ShapeError, match=r"expected inputs of shape \(n, 2\), got \(6, 1\)"):
        decision_regions(tracer, x[:, :1], y)
    with pytest.raises(ShapeError, match="expected 6 labels, one for each input, got 2"):
        decision_regions(tracer, x, y[:2], steps=3, ax=Figure().subplots())
    with pytest.raises(InputError, match="expected show to be"):
        decision_regions(tracer, x, y, show="entropy")  # type: ignore[arg-type]


def test_examples_without_labels_are_drawn_too() -> None:
    tracer, x, _ = class_fit(2)
    ax = decision_regions(tracer, x, steps=3, ax=Figure().subplots())
    assert ax.collections[-1].get_offsets().tolist() == x.tolist()
    assert ax.get_legend() is None
