"""Fit a drawn problem, and hold every public number against dense algebra."""

from __future__ import annotations

import copy
import math
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import whence

from . import dense, problems
from .problems import Problem

Array = np.ndarray

ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")

STRUCTURES: dict[str, whence.Structure] = {
    "auto": whence.Exact(),
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "matrix free": whence.Exact(road="matrix_free"),
    "core": whence.Core(size=10**6, tolerance=0.0),
    "sketch": whence.Sketch(size=10**6),
    "diagonal": whence.Diagonal(),
    "ekfac": whence.EKFAC(tolerance=0.0),
    "ekfac of gradients": whence.EKFAC(tolerance=0.0, basis="gradients"),
    "ekfac, two bases": whence.EKFAC(tolerance=0.0, meat="two_bases", corner=None),
    "kfac": whence.KFAC(),
}
"""The core with all coordinates and the sketch that keeps all blocks whole are exact."""


ILL_POSED = 0.05
"""Tolerances above this compare rounding: examples that decide their own prediction, curvatures without an inverse."""

NUDGES = {"double": 1e-12, "single": 1e-7}
"""Relative change of the network's weights, by its precision: numbers that are not determined move with it in the
oracle too."""


Check = tuple[str, Any, Any, float]
"""Name, the number of whence, the one that is wanted, and the tolerance."""


@dataclass(frozen=True)
class Difference:
    """A number that is not what it should be.

    Attributes:
        name: of the number, or of the exception.
        size: largest difference over the largest number.
        words: what more there is to say.
    """

    name: str
    size: float
    words: str = ""


@dataclass
class Outcome:
    """What became of a problem."""

    seed: int
    told: str
    refused: str = ""
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    undetermined: int = 0  # numbers that differ, of which the oracle's moves as much where weights move a little


def examine(seed: int) -> Outcome:
    """Draw the problem of a seed, fit it, and compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = problems.draw(seed)
    outcome = Outcome(seed, str(problem))
    before = copy.deepcopy(problem.model.state_dict())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for difference in _compared(problem, outcome):
                outcome.differences.append(difference)
    except whence.WhenceError as error:
        outcome.refused = f"{type(error).__name__}: {error}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = [f"{Path(one.filename).name}:{one.lineno}" for one in frames[-4:]]
        outcome.differences.append(Difference(type(error).__name__, math.inf, f"{error} at {' '.join(last)}"[:500]))
    after = problem.model.state_dict()
    if any(not torch.equal(value, after[name]) for name, value in before.items()):
        outcome.differences.append(Difference("the model", math.inf, "its weights or buffers changed"))
    if any(one.grad is not None for one in problem.model.parameters()):
        outcome.differences.append(Difference("the model", math.inf, "gradients were left in it"))
    return outcome


def likelihood_of(loss: dense.Loss) -> whence.Likelihood:
    if loss.kind == "gaussian":
        return whence.Gaussian()
    if loss.kind == "bernoulli":
        return whence.Bernoulli(pos_weight=loss.weight)
    return whence.Categorical(
        weight=loss.weight,
        ignore_index=loss.ignore_index,
        label_smoothing=loss.smoothing,
    )


def fit(problem: Problem) -> whence.Tracer:
    return whence.fit(
        problem.model,
        problem.loader,
        likelihood_of(problem.loss),
        STRUCTURES[problem.structure],
        progress=False,
        **problem.options,
    )


@dataclass
class Truth:
    """The dense fit, and tangents of the test inputs."""

    fit: dense.Dense
    outputs: Array  # (m, ..., w)
    J: Array  # (m, k, d)
    mixtures: bool  # whether the fit looks at mixtures of outputs that span all of them
    close: float  # tolerance

    @classmethod
    def of(cls, problem: Problem, ridge: float, nudge: int | None = None) -> Truth:
        model, options = dense.doubled(problem.model), problem.options
        if nudge is not None:
            _nudged(model, nudge, NUDGES["single" if "float32" in problem.words else "double"])
        f, J = dense.tangents_of(model, problem.inputs, problem.selected)
        w, n = f.shape[-1], len(f)
        targets = problem.loss.encoded(problem.targets, torch.as_tensor(f.reshape(-1, w))).numpy()
        shape = f.shape[:-1]
        omega, given = np.ones(shape), np.ones(n)
        if problem.weights is not None:
            given = problem.weights.double().numpy()
            omega = np.broadcast_to(given.reshape(given.shape + (1,) * (len(shape) - given.ndim)), shape)
        omega = omega.reshape(n, -1).astype(float)
        named = dict(model.named_parameters())
        start = np.concatenate([named[name].detach().numpy().reshape(-1) for name in problem.selected])
        exact = problem.structure in problems.EXACT
        mixtures = isinstance(options.get("hessian_columns"), int)
        found = dense.Dense(
            f.reshape(n, -1),
            J,
            start,
            problem.loss,
            targets,
            omega,
            ridge,
            policy=options.get("leverage", "exact" if exact else "one_plus_q"),
            loo=options.get("loo", "example"),
            groups=np.array(options["groups"]) if "groups" in options else None,
            recenter=options.get("recenter", False),
            unbiased=options.get("noise") == "unbiased",
            one_noise=mixtures,
        )
        if problem.structure == "diagonal":
            found.shape = dense.Shape(np.eye(found.d))
        elif not exact:
            share = (found.units > 0).any(1).astype(float)  # of examples: factors know no weights of positions
            if problem.weights is not None and problem.weights.ndim == 1:
                share *= problem.weights.double().numpy()
            found.shape = dense.kronecker(
                model, problem.inputs, problem.selected, found.L, found.r, share, problem.structure, nudge
            )
        outputs, test = dense.tangents_of(model, problem.test, problem.selected)
        values = np.linalg.eigvalsh(found.curvature)
        close = 1e-14 * (values[-1] + ridge) / max(ridge, values[0], 1e-14 * values[-1], 1e-300)
        if exact:
            close *= 1 / max(1e-9, 1 - min(found.largest.max(), 1 - 1e-9)) ** 2
        floor = 1e-7 if problem.structure != "matrix free" else 1e-5
        if problem.targets.dtype == torch.float32 or "float32" in problem.words:
            floor, close = 1e-2, close * 1e9
        return cls(found, outputs, test, mixtures, max(floor, close))

    def seen(self, problem: Problem) -> Array:
        """Tangents of what is traced: the predicted classes, at several positions and where mixtures are fitted."""
        if problem.loss.kind != "categorical" or (self.outputs.ndim == 2 and not self.mixtures):
            return self.J
        m, w = len(self.J), self.outputs.shape[-1]
        best = self.outputs.reshape(m, -1, w).argmax(-1)
        return np.take_along_axis(self.J.reshape(m, -1, w, self.J.shape[2]), best[:, :, None, None], 2).squeeze(2)


def _nudged(model: torch.nn.Module, seed: int, nudge: float) -> None:
    """Every weight moved by that share of its size, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            signs = torch.randint(0, 2, one.shape, generator=generator) * 2 - 1
            one.mul_(1 + nudge * signs)


def _compared(problem: Problem, outcome: Outcome) -> Iterator[Difference]:
    rng = Random(problem.seed + 1)
    tracer = fit(problem)
    checks = _against(problem, tracer, Truth.of(problem, tracer.ridge), rng)
    if problem.structure != "matrix free":
        checks += [*_again(problem, tracer, rng)]
    moves: dict[tuple[str, int], float] | None = None
    for key, (_, got, wanted, close) in _keyed(checks).items():
        if close > ILL_POSED:
            continue
        size = apart(got, wanted)
        if size <= max(close, 0.0):
            outcome.compared += 1
            continue
        moves = _moves(problem, tracer, checks) if moves is None else moves
        loose = max(close, 10 * moves.get(key, 0.0))
        if loose > ILL_POSED or size <= loose:
            outcome.undetermined += 1
            continue
        outcome.compared += 1
        yield Difference(key[0], size, f"tolerance {loose:.1g}; got {_some(got)}, expected {_some(wanted)}")


def _against(problem: Problem, tracer: whence.Tracer, truth: Truth, rng: Random) -> list[Check]:
    """All numbers that the oracle knows."""
    checks = [*_fitted(problem, tracer, truth), *_predicted(problem, tracer, truth, rng)]
    if problem.structure != "matrix free" and "groups" not in problem.options:
        checks += _traced(problem, tracer, truth, rng)
    return checks


def _keyed(checks: list[Check]) -> dict[tuple[str, int], Check]:
    """Checks by name and by how often the name came before."""
    found: dict[tuple[str, int], Check] = {}
    for check in checks:
        found[check[0], sum(name == check[0] for name, _ in found)] = check
    return found


def _moves(problem: Problem, tracer: whence.Tracer, checks: list[Check]) -> dict[tuple[str, int], float]:
    """How far each number of the oracle moves where the weights move by a nudge: the largest of three."""
    known, found = _keyed(checks), dict[tuple[str, int], float]()
    for nudge in range(3):
        nudged = _against(problem, tracer, Truth.of(problem, tracer.ridge, nudge), Random(problem.seed + 1))
        for key, check in _keyed(nudged).items():
            if key in known:
                found[key] = max(found.get(key, 0.0), apart(check[2], known[key][2]))
    for name in ("ho", "hec3"):  # what is made of a covariance is no more determined than it
        margin, covariance = (f"variance of the margin, {name}", 0), (f"covariance of {name}", 0)
        found[margin] = max(found.get(margin, 0.0), found.get(covariance, 0.0))
    return found


def _some(values: Any) -> str:
    flat = np.asarray(values, dtype=float).reshape(-1)
    return np.array2string(flat[:4], precision=6)


def apart(got: Any, wanted: Any) -> float:
    """Largest difference over the largest number wanted."""
    one, two = (np.asarray(x.detach() if isinstance(x, Tensor) else x, dtype=float) for x in (got, wanted))
    if one.shape != two.shape:
        return math.inf
    if not one.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        same = (one == two) | (np.isnan(one) & np.isnan(two))
    if same.all():
        return 0.0
    scale = np.abs(two[np.isfinite(two)]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(one - two)).max()
    return float(gap / max(scale, 1e-10)) if np.isfinite(gap) else math.inf


def _rows(truth: Truth) -> bool:
    """Whether training examples are seen through all their outputs, one by one."""
    return not truth.mixtures


def _spanning(problem: Problem, truth: Truth) -> bool:
    """Whether mixtures of outputs, where there are any, hold all of them."""
    return not truth.mixtures or problem.options["hessian_columns"] >= truth.fit.k


def _fitted(problem: Problem, tracer: whence.Tracer, truth: Truth) -> Iterator[Check]:
    """The training examples themselves."""
    fitted, close = truth.fit, truth.close
    if not _spanning(problem, truth):
        return
    yield "degrees of freedom", tracer.degrees_of_freedom, fitted.freedom, close
    yield "noise scale", tracer.noise_scale, fitted.noise[1], close
    if _rows(truth):
        yield "residuals", tracer.residuals, fitted.unweighted(fitted.residuals), close
        yield "leave-one-out residuals", tracer.loo_residuals, fitted.unweighted(fitted.u), close
        yield "sigma", tracer.sigma, fitted.noise[2], close
        if problem.loss.kind != "categorical":
            yield "leverages", tracer.leverage, fitted.leverages, close
    if fitted.policy == "exact" and _rows(truth):
        yield "leverage", tracer.leverage.sum(1), fitted.leverage, close
    if fitted.policy == "exact" and "float32" not in problem.words and close <= 1e-6:
        # the diagnostics count leverages of one; within 1e-6 of one rounding may count either way
        least, most = (int((fitted.largest > 1 - far).sum()) for far in (1e-7, 1e-5))
        told = float(tracer.diagnostics["guarded leverages"])
        yield "guarded leverages", told, min(max(told, least), most), 0.0
    if problem.options["ridge"] == "loo":
        yield from _ridge(problem, tracer, truth)


def _ridge(problem: Problem, tracer: whence.Tracer, truth: Truth) -> Iterator[Check]:
    path = tracer.ridge_path
    assert path is not None
    yield "the ridge", tracer.ridge, path.best, 1e-12
    if problem.loss.kind != "gaussian" or problem.weights is not None or truth.mixtures:
        return
    top = np.linalg.eigvalsh(truth.fit.curvature)[-1]
    # Rounding of the gradients counts top / ridge times: in single precision smaller ridges are left out.
    least = (1e-3 if "float32" in problem.words else 1e-5) * top
    at = [g for g in range(0, len(path.ridges), 6) if float(path.ridges[g]) > least]
    wanted = [dense.loo_error(truth.fit, float(path.ridges[g])) for g in at]
    yield "leave-one-out errors of ridges", path.errors[at], wanted, 1e-5


def _predicted(problem: Problem, tracer: whence.Tracer, truth: Truth, rng: Random) -> Iterator[Check]:
    """Means, variances, covariances, and what is made of them."""
    given: Any = problem.test
    if rng.random() < 0.3:
        m = len(truth.J)
        cut = rng.randint(1, m)
        given = [problems.pick(problem.test, slice(0, cut))] + [problems.pick(problem.test, slice(cut, m))] * (cut < m)
    look = {"outputs": "all"} if truth.mixtures else {}
    found = tracer.predict(given, covariance=rng.choice([None, None, True, False]), **look)
    twice = tracer.predict(given, **look)
    for name in ESTIMATORS:
        yield (
            f"variance of {name}, and its covariance",
            found.covariance(name).diagonal(dim1=-2, dim2=-1).clamp_min(0),
            found.variance(name),
            max(1e-8, truth.close),
        )
        yield f"{name} a second time", twice.variance(name), found.variance(name), max(1e-9, 0.01 * truth.close)
    if not _spanning(problem, truth):
        return
    fitted, close, w = truth.fit, truth.close, truth.outputs.shape[-1]
    shape = truth.outputs.shape
    mean = fitted.mean(truth.outputs.reshape(len(truth.J), -1), truth.J).reshape(shape)
    near_zero = 1e-14 * abs(fitted.f).max() / max(abs(mean).max(), 1e-10)  # sums that cancel are zero up to rounding
    yield "mean", found.mean, mean, max(close, near_zero)
    covariances = {}
    for name, matrix in fitted.covariances(truth.J).items():
        cut = matrix.reshape(shape[0], fitted_t(shape), w, fitted_t(shape), w)
        blocks = np.stack([cut[:, t, :, t] for t in range(fitted_t(shape))], 1)
        covariances[name] = blocks.reshape(*shape, w)
    for name in ESTIMATORS:
        wanted = np.einsum("...kk->...k", covariances[name]).clip(0)
        yield f"variance of {name}", found.variance(name), wanted, close
        yield f"covariance of {name}", found.covariance(name), covariances[name], close
    ho, hec3 = (np.einsum("...kk->...", covariances[name]) for name in ("ho", "hec3"))
    if (ho > 1e-12 * max(1e-300, abs(covariances["laplace"]).max())).all():
        yield "ratio", found.ratio, hec3 / ho, close * max(1.0, float((ho.max() / ho).max()))
    if problem.loss.kind != "gaussian":
        yield from _classes(problem, found, mean, covariances, close)
    if w > 1:
        some = rng.sample(range(w), rng.randint(1, w))
        part = tracer.predict(problem.test, outputs=some)
        yield (
            "variance of some outputs",
            part.variance("hec3"),
            np.einsum("...kk->...k", covariances["hec3"])[..., some],
            close,
        )
        cut = covariances["hec0"][..., some, :][..., some]
        yield "covariance of some outputs", part.covariance("hec0"), cut, close
    if problem.loss.kind == "categorical":
        part = tracer.predict(problem.test, outputs="predicted")
        best = mean.argmax(-1)[..., None]
        wanted = np.take_along_axis(np.einsum("...kk->...k", covariances["hec3"]), best, -1)
        yield "variance of the predicted class", part.variance("hec3"), wanted, close


def fitted_t(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:-1])


def _classes(
    problem: Problem, found: whence.Uncertainty, mean: Array, covariances: dict[str, Array], close: float
) -> Iterator[Check]:
    """Probabilities and margins."""
    w = mean.shape[-1]
    flat = mean.reshape(-1, w)
    if problem.loss.kind == "categorical":
        grown = np.exp(flat - flat.max(1, keepdims=True))
        p = grown / grown.sum(1, keepdims=True)
        got, matrix = found.margin_variance("hec3").reshape(-1).numpy(), covariances["hec3"].reshape(-1, w, w)
        rounding = NUDGES["single" if "float32" in problem.words else "double"]
        contrast = np.stack([_leading(*row, rounding) for row in zip(flat, matrix, got, strict=True)])[:, None]
    else:
        p = 1 / (1 + np.exp(-flat))
        contrast = np.stack([np.diag(np.where(row < 0, -1.0, 1.0)) for row in flat])
    yield "probabilities", found.probabilities, p.reshape(mean.shape), close
    L = dense.slopes(problem.loss)(flat)
    for name in ("hec3", "ho"):
        matrix = covariances[name].reshape(-1, w, w)
        wanted = (L @ matrix @ L.transpose(0, 2, 1)).reshape(*mean.shape, w)
        loose = max(close, _cancelled(L, matrix, wanted))
        yield f"covariance of probabilities, {name}", found.probability_covariance(name), wanted, loose
        variance = np.einsum("mck,mkj,mcj->mc", contrast, matrix, contrast).clip(0)
        variance = variance[:, 0] if variance.shape[1] == 1 else variance
        got = found.margin_variance(name)
        loose = max(close, _cancelled(contrast, matrix, variance))
        yield f"variance of the margin, {name}", got.reshape(variance.shape), variance, loose
    margin = np.einsum("mck,mk->mc", contrast, flat)
    yield "margin", found.margin.reshape(-1), margin.reshape(-1), close


def _leading(outputs: Array, matrix: Array, variance: float, rounding: float) -> Array:
    """(w,) the largest output less the second; of those that tie up to rounding the pair that has this variance."""
    w, ordered = len(outputs), -np.sort(-outputs)
    first, second = (abs(outputs - value) <= rounding * abs(outputs).max() for value in ordered[:2])
    pairs = [np.eye(w)[i] - np.eye(w)[j] for i in range(w) for j in range(w) if i != j and first[i] and second[j]]
    return min(pairs, key=lambda pair: abs(pair @ matrix @ pair - variance))


def _cancelled(rows: Array, matrix: Array, wanted: Array) -> float:
    """Rounding of R C R^T, over its size: what outputs share may be larger by orders of magnitude, and cancels."""
    sizes = abs(rows) @ abs(matrix) @ abs(rows).transpose(0, 2, 1)
    return 1e-14 * float(sizes.max()) / max(float(abs(wanted).max()), 1e-10)


def _traced(problem: Problem, tracer: whence.Tracer, truth: Truth, rng: Random) -> Iterator[Check]:
    """Shares, the training frame, and other training sets."""
    if not _spanning(problem, truth):
        return
    fitted, close, J = truth.fit, truth.close, truth.seen(problem)
    found = tracer.attribute(problem.test, top=3, matrix=True)
    terms = fitted.terms(J)
    for name in ("hec3", "ho"):
        shares = found.shares(name)
        total = terms[name].sum(1)
        yield f"total of {name}", shares.total, total, close
        if (total > 1e-12 * max(total.max(), 1e-300)).all() and total.min() > 1e-14:
            wanted = terms[name] / total[:, None]
            grown = close * max(1.0, float(total.max() / total.min()))
            yield f"shares of {name}", shares.matrix, wanted, grown
            yield f"effective number of {name}", shares.effective, 1 / (wanted**2).sum(1), grown
            yield f"largest shares of {name}", shares.share, -np.sort(-wanted, axis=1)[:, :3], grown
            pull = np.take_along_axis(terms["pull"], shares.index.numpy()[:, :, None], 1)
            yield f"pull of {name}", shares.pull, pull, close
    if problem.loss.kind == "categorical" and truth.outputs.ndim == 3 and _rows(truth):
        each = tracer.attribute(problem.test, top=3, matrix=True, positions="each")
        apart_ = fitted.terms(J.reshape(-1, 1, J.shape[2]))
        yield "totals of hec3 at positions", each.hec3.total, apart_["hec3"].sum(1), close
    yield from _framed(problem, tracer, truth, terms)
    if fitted.policy == "exact":
        yield from _what_if(problem, tracer, truth, rng)


def _framed(problem: Problem, tracer: whence.Tracer, truth: Truth, terms: dict[str, Array]) -> Iterator[Check]:
    """One row a training example, and what to do first."""
    fitted, close = truth.fit, truth.close
    frame = tracer.training_frame(problem.test)
    if _rows(truth) or problem.weights is None or problem.weights.ndim == 1:  # mixtures hold weights of positions
        for name, vectors in (("residual", fitted.residuals), ("loo_residual", fitted.u)):
            yield f"norms, {name}", frame[name], np.linalg.norm(fitted.unweighted(vectors), axis=1), close
    if fitted.freedom > 1e-9:
        yield "Cook's distance", frame["cook"], fitted.cook, max(close * 10, fitted.rounding_of_cook)
    moved = np.sqrt(terms["hec3"].mean(0))
    near_zero = 1e-14 * abs(fitted.f).max() / max(moved.max(), 1e-10)
    yield "influence on tests", frame["test_influence"], moved, max(close, close**0.5 * 1e-2, near_zero)
    if _rows(truth):
        yield "suspicion", frame["suspicion"], fitted.suspicion, close * 10
        first = tracer.suggest(3)
        own = fitted.doubt is not fitted.suspicion
        doubt = fitted.doubt if own else np.asarray(frame["suspicion"])
        yield "labels to check first", doubt[first.index.numpy()], -np.sort(-doubt)[:3], close * 10 if own else 1e-12
        yield from _pooled(problem, tracer, truth)


def _pooled(problem: Problem, tracer: whence.Tracer, truth: Truth) -> Iterator[Check]:
    """Inputs to label first: each choice by brute force, and the variance that is left."""
    if truth.outputs.ndim > 2:
        return
    found, fitted = tracer.suggest(2, pool=problem.test), truth.fit
    L = problem.loss.expected(truth.outputs)
    chosen: list[int] = []
    close = 100 * truth.close
    for at, total in zip(found.index.tolist(), found.total.tolist(), strict=True):
        others = [one for one in range(len(truth.J)) if one not in chosen]
        best = min(fitted.variance_left(truth.J, L, [*chosen, one]) for one in others)
        chosen.append(at)
        yield "variance left after a suggestion", total, fitted.variance_left(truth.J, L, chosen), close
        yield "the best suggestion", total, best, close


def _what_if(problem: Problem, tracer: whence.Tracer, truth: Truth, rng: Random) -> Iterator[Check]:
    fitted = truth.fit
    how = rng.choice(["nothing", "remove", "remove", "repeat", "relabel", "all"])
    change, counts, relabel = _drawn_change(problem, truth, rng, how)
    if _removes_all(fitted, counts):
        return
    found = tracer.what_if(problem.test, **change)
    if truth.close > ILL_POSED:
        return
    J = truth.seen(problem)
    wanted, left = fitted.what_if(J, counts, relabel)
    m = len(J)
    before = {f"new_{name}": np.einsum("mkk->mk", fitted.covariances(J)[name]) for name in ("ho", "hec3")}
    for name, values in wanted.items():
        # a solution of whence to 1e-12 of a residual, of the oracle to what rounding leaves
        close = max(1e-6, 100 * truth.close, 1e-10 / max(abs(values).max(), 1e-10), 100 * left)
        if name in before:  # a variance that the example had kept finite is rounding without it
            close = max(close, 1e-15 * abs(values).max() / max(abs(before[name]).max(), 1e-300))
        yield f"what_if, {how}: {name}", getattr(found, name).reshape(m, -1), values, close
    for name in ("ho", "hec3"):
        variance = np.einsum("mkk->mk", fitted.covariances(J)[name])
        yield f"what_if, {how}: {name}", getattr(found, name).reshape(m, -1), variance, truth.close


def _drawn_change(
    problem: Problem, truth: Truth, rng: Random, how: str
) -> tuple[dict[str, Any], Array, dict[int, Array]]:
    """Arguments of `what_if`; how often each example counts then, and new targets, encoded."""
    fitted = truth.fit
    change: dict[str, Any] = {}
    counts, relabel = np.ones(fitted.n), dict[int, Array]()
    every = list(range(fitted.n))
    if how in ("remove", "all"):
        change["remove"] = rng.sample(every, rng.randint(1, 2))
        counts[change["remove"]] -= 1
    if how in ("repeat", "all"):
        change["repeat"] = [rng.choice([at for at in every if counts[at] == 1])]
        counts[change["repeat"]] += 1
    if how in ("relabel", "all") and fitted.t == 1 and truth.outputs.ndim == 2 and _rows(truth):
        free = [at for at in every if counts[at] == 1 and fitted.counts[at]]
        if free:
            at = rng.choice(free)
            target, row = _other_label(problem, rng, fitted.w)
            change["relabel"], relabel[at] = {at: target}, row
    return change, counts, relabel


def _removes_all(fitted: dense.Dense, counts: Array) -> bool:
    return not ((counts > 0) & (fitted.units > 0).any(1)).any()


def _other_label(problem: Problem, rng: Random, w: int) -> tuple[Any, Array]:
    """A target as a user writes it, and encoded."""
    kind = problem.loss.kind
    if kind == "categorical":
        target = torch.tensor(rng.randrange(w))
        row = problem.loss.encoded(target.reshape(1), torch.zeros(1, w, dtype=torch.float64))[0]
        return target, row.numpy()
    values = [float(rng.randrange(2)) if kind == "bernoulli" else rng.gauss(0, 2) for _ in range(w)]
    return torch.tensor(values, dtype=problem.targets.dtype), np.array(values)


def _again(problem: Problem, tracer: whence.Tracer, rng: Random) -> Iterator[Check]:
    """What must not change: after saving and loading, in a second fit, and where data are shuffled or changed later."""
    mixtures = isinstance(problem.options.get("hessian_columns"), int)
    ways = [_loaded] * 6 + [_fitted_again] * 3 + [_shuffled] * 3 + [_changed] * 2
    if "groups" not in problem.options:
        ways += [_explained] * (1 if mixtures else 2)
    if rng.random() < 0.8:
        yield from rng.choice(ways)(problem, tracer, rng)


def _repeats(problem: Problem) -> float:
    """How near a second computation is: in float32 another order of the batches rounds in another way."""
    return 1e-6 if "float32" in problem.words else 1e-9


def _loaded(problem: Problem, tracer: whence.Tracer, rng: Random) -> Iterator[Check]:
    first = tracer.predict(problem.test)
    with tempfile.TemporaryDirectory() as folder:
        tracer.save(f"{folder}/fit.whence")
        loaded = whence.load(f"{folder}/fit.whence", problem.model, problem.loader, progress=False)
    again = loaded.predict(problem.test)
    for name in ("ho", "hec3", "jackknife"):
        yield f"{name} after loading", again.variance(name), first.variance(name), _repeats(problem)
    yield "leave-one-out residuals after loading", loaded.loo_residuals, tracer.loo_residuals, _repeats(problem)
    if "groups" not in problem.options:
        one, two = (each.attribute(problem.test, matrix=True) for each in (tracer, loaded))
        yield "shares after loading", two.hec3.matrix, one.hec3.matrix, max(1e-7, _repeats(problem))


def _fitted_again(problem: Problem, tracer: whence.Tracer, rng: Random) -> Iterator[Check]:
    first, again = (each.predict(problem.test) for each in (tracer, fit(problem)))
    for name in ("ho", "hec3", "jackknife"):
        yield f"{name} of a second fit", again.variance(name), first.variance(name), _repeats(problem)


def _shuffled(problem: Problem, tracer: whence.Tracer, rng: Random) -> Iterator[Check]:
    rows = problems.Rows(problem.inputs, problem.targets, None, False)
    shuffled = DataLoader(rows, batch_size=max(1, problem.n // 2), shuffle=True)
    found = tracer.predict(shuffled, covariance=rng.choice([None, False]))
    yield _of_itself("covariances of a shuffling loader", found, found.variance("hec3").clone())


def _changed(problem: Problem, tracer: whence.Tracer, rng: Random) -> Iterator[Check]:
    changed = copy.deepcopy(problem.test)
    found = tracer.predict(changed, covariance=rng.choice([None, False]))
    variance = found.variance("hec3").clone()
    leaves = (
        [changed] if isinstance(changed, Tensor) else [*(changed.values() if isinstance(changed, dict) else changed)]
    )
    for leaf in leaves:
        leaf.copy_(-1.5 * leaf if leaf.is_floating_point() else leaf.flip(0))
    yield _of_itself("covariances of inputs changed since", found, variance)


def _of_itself(name: str, found: whence.Uncertainty, variance: Tensor) -> Check:
    """The diagonal of covariances against variances that were read before."""
    return name, found.covariance("hec3").diagonal(dim1=-2, dim2=-1).clamp_min(0), variance, 1e-6


def _explained(problem: Problem, tracer: whence.Tracer, rng: Random) -> Iterator[Check]:
    yield "verdicts", len(tracer.explain(problem.test).verdicts), len(tracer.predict(problem.test)), 0.0
