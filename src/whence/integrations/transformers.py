"""Fit `whence` to the model of a Hugging Face `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from whence.api import fit
from whence.errors import InputError
from whence.integrations import ridge_of
from whence.likelihoods import Likelihood
from whence.tracer import Tracer

LIKELIHOODS = {
    "regression": "gaussian",
    "single_label_classification": "categorical",
    "multi_label_classification": "bernoulli",
}


def fit_trainer(trainer: Trainer, likelihood: str | Likelihood | None = None, **options: Any) -> Tracer:
    """Fit `whence` to a trainer's model and training data.

    The data are read in order, with the trainer's collator and batch size for evaluation. The model is left in
    evaluation mode. Predict with `tracer.predict(trainer.get_eval_dataloader(dataset))`.

    Args:
        trainer: after training.
        likelihood: as for `whence.fit`; by default derived from `config.problem_type` and `config.num_labels`.
        options: other options of `whence.fit`, such as `structure` and `parameters`. By default the ridge corresponds
            to `args.weight_decay`, for a mean loss.
    """
    model = trainer.model
    if model is None or trainer.train_dataset is None:
        raise InputError("expected a trainer with a model and a training data set, got one without.")
    if trainer.args.world_size > 1:
        raise InputError(
            f"expected a trainer of one process, got {trainer.args.world_size}, among which it repeats examples to "
            "make shards even. Fit in one process, or call whence.fit with a shard of the data in each."
        )
    loss = likelihood_of(model.config) if likelihood is None else likelihood
    loader = trainer.get_eval_dataloader(trainer.train_dataset)
    model.eval()
    if "ridge" not in options:
        options["ridge"] = ridge_of(float(trainer.args.weight_decay), loader, loss, model)
    return fit(model, loader, loss, **options)


def likelihood_of(config: Any) -> str:
    """The loss that a sequence classifier was trained with, from its configuration.

    Examples:
        >>> from types import SimpleNamespace
        >>> likelihood_of(SimpleNamespace(problem_type=None, num_labels=3))
        'categorical'
    """
    kind = getattr(config, "problem_type", None)
    labels = getattr(config, "num_labels", None)
    if kind is None and isinstance(labels, int):
        kind = "regression" if labels == 1 else "single_label_classification"
    if kind not in LIKELIHOODS:
        raise InputError(
            f"expected a configuration with num_labels or problem_type to find the loss, got {kind!r}. "
            'Pass likelihood="gaussian", "categorical" or "bernoulli".'
        )
    return LIKELIHOODS[kind]
