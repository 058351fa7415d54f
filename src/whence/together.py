"""Predictions of several processes, put together in order."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError
from .likelihoods import Likelihood
from .outputs import Chosen, Seen, join
from .processes import Distributed, Processes, opened
from .results import Uncertainty


def gather(found: Uncertainty | None, *, distributed: Distributed = "auto") -> Uncertainty:
    """The predictions of all processes, one after the other in the order of ranks; every process gets them all.

    Every process calls it, with what `Tracer.predict` said about its share of the inputs. Covariances come along where
    they were asked for, with `predict(x, covariance=True)`, or computed at once.

    Args:
        found: predictions of this process; `None` where it had no inputs.
        distributed: as for `whence.fit`.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> tracer = whence.fit(net, [(x, 2 * x + 1)], ridge=0.1)
        >>> len(gather(tracer.predict(x[:3])))  # one process
        3
    """
    crew = opened(distributed)
    with crew.working():
        if crew.alone:
            if found is None:
                raise InputError("expected predictions of at least one process, got none.")
            return found
        return _gathered(found, crew)


def _gathered(found: Uncertainty | None, crew: Processes) -> Uncertainty:
    what = "the predictions"
    mine = None if found is None else {name: one.cpu() for name, one in _tensors(found).items()}
    words = None
    if found is not None and mine is not None:
        sketches = None if found.chosen is None else found.chosen.sketches
        words = (list(mine), sketches, found.likelihood)
    told = crew.tell(what, words)
    parts = []
    for rank, said in enumerate(told):
        if said is None:
            continue
        own = list(mine.values()) if mine is not None and rank == crew.rank else None
        sent = crew.send(own, rank, what, torch.device("cpu"))
        moved = [one if found is None else one.to(found.mean.device) for one in sent]
        parts.append(_seen(dict(zip(said[0], moved, strict=True)), said[1]))
    if not parts:
        raise InputError("expected predictions of at least one process, got none.")
    likelihood: Likelihood | None = next(said[2] for said in told if said is not None)
    whole = join(parts)
    return Uncertainty(whole.mean, whole.covariances, whole.variances, None, likelihood, whole.chosen)


def _tensors(found: Uncertainty) -> dict[str, Tensor]:
    """Everything there is, by name."""
    chosen = found.chosen
    listed: dict[str, Tensor | None] = {"mean": found.mean}
    if chosen is not None:
        listed |= {"index": chosen.index, "probabilities": chosen.probabilities}
    listed |= {f"covariance {name}": one for name, one in found.covariances.items()}
    listed |= {f"variance {name}": one for name, one in found.variances.items()}
    return {name: one for name, one in listed.items() if one is not None}


def _seen(tensors: dict[str, Tensor], sketches: bool | None) -> Seen:
    def named(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(kind): one for name, one in tensors.items() if name.startswith(kind)}

    chosen = None if sketches is None else Chosen(tensors.get("index"), tensors.get("probabilities"), sketches)
    return Seen(tensors["mean"], chosen, named("covariance "), named("variance "))
