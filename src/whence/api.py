"""The way in: strings become objects here, and nowhere deeper."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from .curvature import EKFAC, KFAC, Core, Diagonal, Exact, Sketch, Structure
from .errors import InputError
from .fitting import Asked, run
from .likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from .options import check_apart, check_choices, check_columns, check_groups, check_ridge, check_sizes, named
from .processes import Distributed, opened
from .starting import EVERY, check_checkpoint, check_sharing, divided, labels_of
from .tangents.passes import Passes
from .tangents.select import Choice
from .tracer import Tracer

LIKELIHOODS: dict[str, type[Likelihood]] = {kind.name: kind for kind in (Gaussian, Categorical, Bernoulli)}
STRUCTURES: dict[str, type[Structure]] = {kind.name: kind for kind in (Exact, EKFAC, Core, Sketch, KFAC, Diagonal)}


def fit(
    model: nn.Module,
    train_loader: Iterable[Any],
    likelihood: str | Likelihood = "gaussian",
    structure: str | Structure = "exact",
    parameters: Choice = "all",
    ridge: float | Literal["loo"] = 1.0,
    progress: bool = True,
    *,
    recenter: bool = False,
    noise: Literal["mle", "unbiased"] = "mle",
    loo: Literal["example", "position", "output"] = "example",
    groups: Any = None,
    leverage: Literal["auto", "exact", "one_plus_q", "clip"] = "auto",
    chunk_size: int | None = None,
    max_memory: float | None = None,
    dtype: torch.dtype = torch.float64,
    tf32: bool = True,
    outputs: Literal["auto", "all"] | int = "auto",
    generator: torch.Generator | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: float = EVERY,
    distributed: Distributed = "auto",
    shard: Literal["data", "layers"] | int = "data",
) -> Tracer:
    """Fit the uncertainty of a trained network, after the fact.

    The model is left exactly as found. The training data are read several times.

    Args:
        model: trained network, in evaluation mode, on any device and of any floating dtype.
        train_loader: gives (inputs, targets), (inputs, targets, sample weights), or dicts with the targets under
            "labels" and perhaps weights under "sample_weight"; can be read again and again.
        likelihood: the loss it was trained with: "gaussian" (squared error), "categorical" (softmax cross-entropy),
            "bernoulli" (cross-entropy of one or many logits), or a `Likelihood` with options of its own.
        structure: "exact" for small networks; "core" (dense algebra where it matters, honest scale), "ekfac" (the
            paper's, cheapest), "sketch", "kfac" or "diagonal" for large ones; or a `Structure` with options of its own
            such as `whence.Exact(road="dual")`.
        parameters: "all", "last_layer", names or patterns, or a function of name and parameter. What has
            `requires_grad=False` is left out.
        ridge: lambda on the sum scale, as in "sum of squared errors + lambda ||w||^2" or "sum of cross-entropies +
            lambda / 2 ||w||^2"; see `whence.ridge_from_weight_decay`. "loo" takes the one with the smallest
            leave-one-out error, or leave-one-out loss for losses other than squared error, where what `loo` or `groups`
            say is left out; for structures with true leverages ("exact", "core", "sketch").
        progress: show a progress line with the time left on anything over a second, and a line where the fit is not to
            be trusted as it is (see `Tracer.trust`).
        recenter: use the residuals and predictions of the optimum of the linearized model (the paper's Delta w),
            for networks that were stopped before they converged.
        noise: covariance of the residuals as E^T E / n, or divided by n minus the degrees of freedom an output.
        loo: leave out whole examples; single positions, of a network that answers at several (tokens, pixels); or
            single outputs as in the paper's stacked notation. The same for one output.
        groups: n labels in the order of the training data. Examples of one label (a document, a patient, a sequence)
            belong together and are left out together, which makes HeC0 and HeC3 cluster-robust (CR0 and CR3). For the
            exact structure, the core and the sketch.
        leverage: "exact" for exact structures; "one_plus_q" or the paper's "clip" for approximate ones.
        chunk_size: examples whose tangents are held at once.
        max_memory: bytes that may be taken; 80 % of what is free when not given.
        dtype: of the algebra; the model computes in its own.
        tf32: let approximate structures round single-precision products to TF32 on a GPU; their answers stay the same
            to three digits.
        outputs: how much of an example's outputs is looked at, each number a backward pass: "all"; or so many columns
            of a root of the loss's Hessian, the largest as they are and random mixtures of the rest, beside the
            residual, which stays exact. "auto" takes all up to 64 outputs, and 16 columns of more.
        generator: of what is random about these columns; the same ones every time by default.
        checkpoint: a folder in which the sums of the fit are written down, so that the same call goes on from there
            after a crash, to the same result, in any number of processes; see `docs/saving.md`.
        every: seconds after which the sums of a pass are written down again.
        distributed: let all processes of `torch.distributed` work together, each with its own shard of the data in
            `train_loader` and of the labels in `groups`: "auto" where there are several, or a number of seconds they
            wait for one another; `False` for a fit of this process alone. See `docs/distributed.md`.
        shard: what processes share: the "data"; or the "layers" of a network that is too large for one of them: then
            each reads all data and keeps the curvature of some layers, and they predict together (EKFAC, KFAC and
            diagonal). A number: so many processes, of ranks next to each other, share the layers, and such groups of
            them the data.

    Returns:
        A `Tracer`.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> tracer = whence.fit(net, [(x, 2 * x + 1)], ridge=0.1)
        >>> tracer.predict(x[:3]).hec3.shape
        torch.Size([3, 1])
    """
    data, layers = divided(shard, opened(distributed))
    with data.working(), layers.working(stay=True):
        lam = check_ridge(ridge)
        loss: Likelihood = named(likelihood, LIKELIHOODS, Likelihood, "likelihood")
        chosen: Structure = named(structure, STRUCTURES, Structure, "structure")
        check_choices(noise=(noise, ("mle", "unbiased")), loo=(loo, ("example", "position", "output")))
        check_choices(leverage=(leverage, ("auto", "exact", "one_plus_q", "clip")))
        check_sizes(chunk_size, max_memory)
        check_apart(loss, loo)
        check_groups(groups, loo, chosen)
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f"expected dtype torch.float64 or torch.float32 for the algebra, got {dtype!r}.")
        asked = Asked(
            likelihood=loss,
            structure=chosen,
            parameters=parameters,
            ridge=lam,
            recenter=recenter,
            noise=noise,
            loo=loo,
            groups=labels_of(groups, data),
            policy=chosen.policy if leverage == "auto" else leverage,
            chunk_size=chunk_size,
            max_memory=max_memory,
            dtype=dtype,
            tf32=tf32,
            columns=check_columns(outputs),
            seed=0
            if generator is None
            else int(torch.randint(2**31, (1,), generator=generator, device=generator.device)),
        )
        check_sharing(chosen, data, layers)
        folder = check_checkpoint(checkpoint, every, chosen)
        return run(asked, model, train_loader, Passes(data, layers=layers), folder, every, progress)
