"""A callback for Lightning: fits `whence` when training ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

from whence.api import fit
from whence.errors import InputError
from whence.integrations import decay_of, ridge_of
from whence.likelihoods import Likelihood
from whence.runtime.execution import checked_execution
from whence.runtime.model_state import preserved
from whence.tracer import Tracer

NUMBERS = ("ridge", "degrees of freedom", "Newton change", "largest leverage", "guarded leverages")  # logged


class WhenceCallback(Callback):
    """Fits `whence` at the end of training, keeps the tracer, and logs some of its numbers.

    Lightning moves the module off the training device: move it back and call `module.eval()` before you predict. With
    several processes the first one fits, and needs its own `loader`, since each process sees only a part of the data.

    Args:
        likelihood: the loss of the training, as for `whence.fit`.
        loader: yields the training batches as (inputs, targets); by default the one that Lightning trained with.
        network: selects the part of the module that maps inputs to outputs; by default the module itself.
        options: other options of `whence.fit`. By default the ridge corresponds to the optimiser's weight decay, for a
            mean loss.

    Attributes:
        tracer: the fit; `None` before the end of training.
        logged: the numbers sent to the loggers, by name.
    """

    def __init__(
        self,
        likelihood: str | Likelihood = "gaussian",
        *,
        loader: Iterable[Any] | None = None,
        network: Callable[[LightningModule], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.likelihood, self.loader, self.network, self.options = likelihood, loader, network, options
        self.tracer: Tracer | None = None
        self.logged: dict[str, float] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, and log to every logger of the trainer. The module is left as found."""
        if not trainer.is_global_zero:
            return
        loader = self._loader(trainer)
        model = pl_module if self.network is None else self.network(pl_module)
        execution = checked_execution(self.options.get("execution"))
        options = {**self.options, "execution": replace(execution, distributed=False)}  # others do not take part
        with preserved(model):
            model.eval()
            if "ridge" not in options:
                options["ridge"] = ridge_of(decay_of(trainer.optimizers), loader, self.likelihood, model)
            self.tracer = fit(model, loader, self.likelihood, **options)
        self.logged = {f"whence/{name.replace(' ', '_')}": float(self.tracer.diagnostics[name]) for name in NUMBERS}
        self.logged["whence/noise"] = float(self.tracer.sigma.diagonal().mean().sqrt())
        for logger in trainer.loggers:
            logger.log_metrics(self.logged, step=trainer.global_step)

    def _loader(self, trainer: Trainer) -> Iterable[Any]:
        if self.loader is not None:
            return self.loader
        if trainer.world_size > 1:
            raise InputError(
                f"expected a loader of all training data with {trainer.world_size} processes, each of which sees only "
                "a part, got none. Pass WhenceCallback(loader=...)."
            )
        loader = trainer.train_dataloader
        if isinstance(loader, (dict, list, tuple)) or loader is None:
            got = type(loader).__name__
            raise InputError(f"expected one training loader, got {got}. Pass WhenceCallback(loader=...).")
        return loader  # type: ignore[no-any-return]  # whatever the user gave
