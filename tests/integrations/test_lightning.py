"""A Lightning run leaves a tracer that equals a fit by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import whence

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: pip install 'whence[integrations]'")
from lightning.pytorch.loggers import Logger  # noqa: E402  after the check that it is there

from whence.integrations.lightning import WhenceCallback  # noqa: E402

pytestmark = [
    # Lightning makes the leaves of torch's trees in the way of before
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    # and advises on the speed of a run that has none to lose.
    pytest.mark.filterwarnings("ignore:The .train_dataloader. does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


class Regression(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, decay: float = 0.01) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
        self.decay = decay

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        return outputs

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02, weight_decay=self.decay)


class Notes(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict[str, float]] = []

    name = version = "notes"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.kept.append(metrics)


def data() -> DataLoader[Any]:
    x = torch.linspace(-2, 2, 24).unsqueeze(1)
    return DataLoader(TensorDataset(x, x.sin() + 0.1 * (50 * x).cos()), batch_size=10, shuffle=True)


def trained(callback: WhenceCallback, module: Regression, loader: Any = None, **options: Any) -> Any:
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=options.pop("logger", False),
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data() if loader is None else loader)
    return trainer


def test_the_tracer_is_that_of_a_fit_by_hand() -> None:
    module, notes = Regression(), Notes()
    callback = WhenceCallback(progress=False)
    assert callback.tracer is None
    trained(callback, module, logger=notes)
    tracer = callback.tracer
    assert tracer is not None
    assert module.training, "left as Lightning left it"
    with pytest.raises(whence.NotDeterministicError, match=r"Call model.eval\(\) first"):
        tracer.predict(torch.zeros(1, 1))
    module.eval()
    by_hand = whence.fit(copy.deepcopy(module.net), data(), ridge=24 * 0.01 / 2, progress=False)
    x = torch.linspace(-3, 3, 5).unsqueeze(1)
    assert torch.allclose(tracer.predict(x).hec3, by_hand.predict(x).hec3)
    assert tracer.ridge == pytest.approx(0.12)
    logged = next(kept for kept in notes.kept if "whence/ridge" in kept)
    assert logged == callback.logged
    assert logged["whence/degrees_of_freedom"] == pytest.approx(by_hand.degrees_of_freedom)
    assert logged["whence/noise"] == pytest.approx(float(by_hand.sigma.sqrt()))


def test_options_reach_the_fit() -> None:
    module = Regression()
    callback = WhenceCallback(
        ridge=0.5, network=lambda whole: whole.net, parameters="3.*", loader=[next(iter(data()))], progress=False
    )
    trained(callback, module)
    assert callback.tracer is not None
    assert callback.tracer.ridge == 0.5
    assert callback.tracer.problem.selection.size == 7
    assert callback.tracer.problem.n == 10


def test_without_weight_decay_the_ridge_is_the_default() -> None:
    callback = WhenceCallback(progress=False)
    trained(callback, Regression(decay=0.0))
    assert callback.tracer is not None
    words = next(one.words for one in callback.tracer.diagnostics if one.name == "ridge")
    assert "of an assumed weight decay" in words


def test_what_is_missing_is_asked_for() -> None:
    with pytest.raises(whence.InputError, match="expected one training loader, got list"):
        WhenceCallback()._loader(_Trainer(world_size=1, train_dataloader=[data()]))
    with pytest.raises(whence.InputError, match="with 2 processes"):
        WhenceCallback()._loader(_Trainer(world_size=2, train_dataloader=data()))


class _Trainer:
    """Stands for a trainer on machines that are not here."""

    def __init__(self, world_size: int, train_dataloader: Any) -> None:
        self.world_size = world_size
        self.train_dataloader = train_dataloader
