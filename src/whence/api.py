"""The way in: strings become objects here, and nowhere deeper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from .curvature import EKFAC, KFAC, Bread, Core, Diagonal, Exact, Groups, NewtonStep, Sketch, Structure
from .errors import InputError
from .estimators import LeftOut, Weighing
from .likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from .memory import Budget
from .options import (
    check_apart,
    check_choices,
    check_columns,
    check_groups,
    check_problem,
    check_ridge,
    check_sizes,
    named,
)
from .progress import Progress
from .results import Diagnostics, Finding
from .tangents.batches import Batches
from .tangents.borrow import borrowed, check_model, fingerprint, rounded_products
from .tangents.forward import Network
from .tangents.gathering import linearize
from .tangents.language import follow_own_loss
from .tangents.linearization import Linearization
from .tangents.select import Choice, Selection, select
from .tracer import Tracer
from .tracing.parts import assemble
from .tracing.trust import at_once

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
            leave-one-out error (squared error only).
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
    lam = check_ridge(ridge)
    loss: Likelihood = named(likelihood, LIKELIHOODS, Likelihood, "likelihood")
    chosen: Structure = named(structure, STRUCTURES, Structure, "structure")
    check_choices(noise=(noise, ("mle", "unbiased")), loo=(loo, ("example", "position", "output")))
    check_choices(leverage=(leverage, ("auto", "exact", "one_plus_q", "clip")))
    check_sizes(chunk_size, max_memory)
    check_apart(loss, loo)
    columns = check_columns(outputs)
    check_groups(groups, loo, chosen)
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"expected dtype torch.float64 or torch.float32 for the algebra, got {dtype!r}.")
    check_model(model)
    marks = fingerprint(model)
    with borrowed(model):
        network = Network(model)
        bar = Progress(progress)
        batches = Batches(train_loader, network.device, bar)
        selection = _first_look(network, batches, loss, parameters)
        problem = linearize(
            network,
            selection,
            batches,
            loss,
            dtype=dtype,
            budget=Budget(network.device, max_memory),
            progress=bar,
            chunk_size=chunk_size,
            columns=columns,
            seed=0 if generator is None else int(torch.randint(2**31, (1,), generator=generator)),
        )
        check_problem(problem, lam, loo)
        policy = chosen.policy if leverage == "auto" else leverage
        clusters = None if groups is None else Groups.of(groups, problem)
        alone = problem.units if loo == "position" else None
        weights = Weighing(problem.residuals, problem.hessian_roots, policy, recenter, loo == "output", clusters, alone)
        with rounded_products((tf32 and chosen.tf32) or torch.backends.cuda.matmul.allow_tf32):
            bread = chosen.fit(problem, lam, weights.columns)
            bread.tf32 = tf32 and chosen.tf32
            return _told(_assemble(problem, bread, weights, noise, marks), bar)


def _first_look(network: Network, batches: Batches, loss: Likelihood, parameters: Choice) -> Selection:
    """What the first batch tells: that the model can be relied on, which parameters count, and what labels mean."""
    first = next(batches.read(None))
    batches.notes.extend(network.check_repeatable(first.inputs))
    selection = select(network.model, parameters, lambda: network.last_module(first.inputs))
    unused = network.check_connected(selection.parameters, first.inputs)
    if unused:
        batches.notes.append(f"selected, but not used by the outputs of the first examples: {', '.join(unused)}")
    follow_own_loss(network, batches, first, getattr(loss, "ignore_index", None))
    return selection


def _assemble(
    problem: Linearization,
    bread: Bread,
    weighing: Weighing,
    noise: str,
    marks: dict[str, int],
) -> Tracer:
    parts = assemble(problem, bread, weighing, unbiased=noise == "unbiased")
    return Tracer(
        problem=problem,
        bread=bread,
        sandwich=parts.sandwich,
        meats=parts.meats,
        left_out=parts.left_out,
        step=parts.step,
        weighing=weighing,
        sigma=parts.noise.covariance,
        noise_scale=parts.noise.scale,
        diagnostics=_diagnose(problem, bread, parts.step, parts.left_out, weighing),
        marks=marks,
    )


def _told(tracer: Tracer, bar: Progress) -> Tracer:
    """Add what can be said at once about how far to trust the fit, and say so where it is not fine."""
    trust = at_once(tracer)
    odd = ", ".join(check.name for check in trust if check.level != "fine")
    if odd:
        bar.say(f"whence: {trust.level} ({odd}); print(tracer.trust()) tells why and what to do")
    finding = Finding("trust", trust.level, f"{odd or 'as far as a fit can tell'}; tracer.trust() looks closer")
    return replace(tracer, diagnostics=Diagnostics((*tracer.diagnostics, finding)))


def _diagnose(
    problem: Linearization, bread: Bread, step: NewtonStep, left_out: LeftOut, weighing: Weighing
) -> Diagnostics:
    numbers = problem.numbers
    scale = float(problem.residuals.square().mean().sqrt())
    lost = weighing.lost(slice(0, problem.n), step.change)
    moved = float(lost.square().mean().sqrt()) / scale if scale > 0 else 0.0
    freedom = bread.degrees_of_freedom
    groups = weighing.groups
    units, among = ("training examples", problem.n) if groups is None else ("groups", groups.total)
    findings = [
        Finding("parameters", problem.selection.size, f"selected weights: {_listing(problem.selection.parameters)}"),
        Finding("ridge", bread.ridge, "lambda on the sum scale" + (", by leave-one-out" if bread.path else "")),
        Finding(
            "degrees of freedom",
            freedom,
            f"of {numbers} numbers"
            + ("; more than there are: the approximation or lambda is off" * (freedom > numbers)),
        ),
        Finding(
            "Newton step",
            step.relative,
            "size of the step to the optimum of the linearized model, over the size of the weights"
            + ("; taken" if weighing.recenter else ""),
        ),
        Finding(
            "Newton change",
            moved,
            "how far that step would move the training residuals, over their size (root mean squares)"
            + ("; the network is not at its optimum: consider recenter=True" * (moved > 0.1 and not weighing.recenter)),
        ),
        Finding("leverage policy", weighing.policy, ""),
        Finding(
            "largest leverage", float(left_out.leverage.max()), "one means: the example decides its own prediction"
        ),
        Finding("guarded leverages", left_out.guarded, f"{units} at the guard, of {among}"),
    ]
    findings += [Finding("note", fact, "") for fact in [*problem.batches.notes, *bread.facts]]
    return Diagnostics(tuple(findings))


def _listing(names: Iterable[str], most: int = 6) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (f", ... ({len(shown)} tensors)" if len(shown) > most else "")
