"""What is not the model, the data or the file it should be is refused, in words, before memory is taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import networks
import whence
from fits_to_save import Fit, regression
from whence.io import read_attached, save

# --- The model -------------------------------------------------------------------------------------------------------


def changed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.get_parameter("2.bias").view(torch.int64)[0] ^= 1  # one bit
    return model


def swapped(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    model[1] = nn.Sigmoid()
    return model


def wider(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    model[0] = nn.Linear(model[0].in_features, 9, dtype=torch.float64)
    return model


def extended(model: nn.Module) -> nn.Module:
    model.register_buffer("scale", torch.ones(1))
    return model


def rounded(model: nn.Module) -> nn.Module:
    return model.float()


OTHERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str, type[whence.WhenceError]]] = {
    "one bit": (changed, r"weights and buffers that were fitted, got changes in 2\.bias\.", whence.StaleModelError),
    "activation": (swapped, r"got 1: Sigmoid\(\) where 1: Tanh\(\) was\. Build the same model", whence.StaleModelError),
    "width": (wider, r"got 0: Linear\(in_features=3, out_features=9", whence.StaleModelError),
    "buffer": (extended, r"another set of parameters and buffers \(scale\)", whence.StaleModelError),
    "rounded": (rounded, r"got changes in 0\.weight, 0\.bias, 2\.weight, 2\.bias", whence.StaleModelError),
}


@pytest.mark.parametrize(("change", "message", "error"), OTHERS.values(), ids=OTHERS)
def test_another_model(change: Any, message: str, error: type[Exception], fit: Fit, path: Path) -> None:
    with pytest.raises(error, match=message):
        whence.load(path, change(copy.deepcopy(fit.model)))


def test_no_model_at_all(path: Path) -> None:
    with pytest.raises(whence.InputError, match=r"expected a torch\.nn\.Module, or fitted trees .*, got dict"):
        whence.load(path, {})


def test_an_option_of_a_layer_that_has_no_weights(tmp_path: Path) -> None:
    def build(slope: float) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(slope), nn.Linear(4, 2)).double().eval()

    case = networks.build("mlp")
    whence.fit(build(0.1), case.batches(4), structure="ekfac", progress=False).save(tmp_path / "fit.whence")
    assert len(whence.load(tmp_path / "fit.whence", build(0.1)).predict(case.test_inputs)) == len(case.test_inputs)
    message = r"1: LeakyReLU\(negative_slope=0\.2\) where 1: LeakyReLU\(negative_slope=0\.1\) was"
    with pytest.raises(whence.StaleModelError, match=message):
        whence.load(tmp_path / "fit.whence", build(0.2))


class Scaled(nn.Module):
    """Its forward depends on something that neither weights nor modules show."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.net, self.factor = networks.build("mlp").model, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.factor * self.net(x)
        return outputs


def test_another_forward_is_noticed_with_the_data(tmp_path: Path) -> None:
    case = networks.build("mlp")
    whence.fit(Scaled(1.0), case.batches(4), ridge=1.0, progress=False).save(tmp_path / "fit.whence")
    assert whence.load(tmp_path / "fit.whence", Scaled(1.0), case.batches(4)).ridge == 1.0
    with pytest.raises(whence.StaleModelError, match="Its weights are the same, its forward is not"):
        whence.load(tmp_path / "fit.whence", Scaled(1.1), case.batches(4))


def test_weights_that_are_tied_otherwise(tmp_path: Path) -> None:
    def build(tied: bool) -> nn.Module:
        torch.manual_seed(0)
        first, last = nn.Linear(3, 3), nn.Linear(3, 3)
        last.load_state_dict(first.state_dict())
        if tied:
            last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), last).double().eval()

    x = torch.randn(6, 3, dtype=torch.float64)
    whence.fit(build(True), [(x, x)], progress=False).save(tmp_path / "fit.whence")
    whence.load(tmp_path / "fit.whence", build(True))
    with pytest.raises(whence.StaleModelError, match=r"got 2\.weight, which shared its weights with 0\.weight"):
        whence.load(tmp_path / "fit.whence", build(False))


# --- The data --------------------------------------------------------------------------------------------------------

ASKS = {
    "predict": lambda t, x: t.predict(x),
    "attribute": lambda t, x: t.attribute(x),
    "explain": lambda t, x: t.explain(x),
    "what_if": lambda t, x: t.what_if(x, remove=[0]),
    "training_frame": lambda t, x: t.training_frame(x),
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("structure", ["primal", "dual"])
def test_questions_that_need_the_data_say_so(structure: str, ask: str, tmp_path: Path) -> None:
    fit = regression(structure)
    fit.tracer.save(tmp_path / "fit.whence")
    again = whence.load(tmp_path / "fit.whence", fit.model)
    if structure == "primal" and ask == "predict":
        assert len(ASKS[ask](again, fit.test)) == len(fit.test)
        return
    message = r"loaded without them\. Pass them: whence\.load\(path, model, train_loader=\.\.\.\)"
    with pytest.raises(whence.LoaderError, match=message):
        ASKS[ask](again, fit.test)


def test_other_data(fit: Fit, path: Path) -> None:
    x, y = fit.batches[0]
    target, value = y.clone(), x.clone()
    target[1, 1] += 1e-9
    value.view(torch.int64)[2, 0] ^= 1  # one bit
    others = (
        [(x, target), *fit.batches[1:]],
        [(value, y), *fit.batches[1:]],
        fit.batches[::-1],  # another order
        [(x[:2], y[:2]), (x[2:], y[2:]), *fit.batches[1:]],  # other batches
    )
    for data in others:
        with pytest.raises(whence.LoaderError, match=r"of the saved fit, in the same order .* got (other|more)"):
            whence.load(path, fit.model, data)


def test_other_data_after_the_first_batch(fit: Fit, path: Path) -> None:
    x, y = fit.batches[-1]
    with pytest.raises(whence.LoaderError, match=r"got other data in batch 2\. Use the same batch_size"):
        whence.load(path, fit.model, [*fit.batches[:-1], (x, y + 1)])
    with pytest.raises(whence.LoaderError, match=r"got 2 batches instead of 3"):
        whence.load(path, fit.model, fit.batches[:-1])
    with pytest.raises(whence.LoaderError, match=r"got more than 3 batches"):
        whence.load(path, fit.model, [*fit.batches, (x, y)])


def test_other_data_near_the_end_of_a_loader(path: Path) -> None:
    """They are noticed when they are read."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    tracer = whence.fit(model, DataLoader([*zip(x, x, strict=True)], batch_size=2), ridge=0.1, progress=False)
    tracer.save(path)
    moved = [(one, one + (at >= 38)) for at, one in enumerate(x)]
    again = whence.load(path, model, DataLoader(moved, batch_size=2), progress=False)
    with pytest.raises(whence.LoaderError, match=r"got other data in batch 19"):
        again.attribute(x)


def test_a_loader_that_can_be_read_once(fit: Fit, path: Path) -> None:
    with pytest.raises(whence.LoaderError, match="one-shot"):
        whence.load(path, fit.model, iter(fit.batches))


def test_what_is_attached_to_a_fit_comes_back_and_is_not_part_of_it(fit: Fit, tmp_path: Path) -> None:
    path, tensors = tmp_path / "fit.whence", {"rows": torch.arange(3)}
    save(fit.tracer, path, {"name": "a\xa0b"}, tensors)
    about, found = read_attached(path)
    assert about == {"name": "a\xa0b"}
    assert found["rows"].tolist() == [0, 1, 2]
    again = whence.load(path, fit.model, fit.batches, progress=False)
    torch.testing.assert_close(again.predict(fit.test).hec3, fit.tracer.predict(fit.test).hec3, rtol=0, atol=0)
    fit.tracer.save(path)
    assert read_attached(path) == (None, {})
