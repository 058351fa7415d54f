"""What a fit should say, by dense algebra in float64. Nothing here imports whence.

Letters as in `docs/notation.md`: n training examples, m predictions, k outputs of an example (those of all its
positions), d weights. J is (n, k, d), r is (n, k), L is (n, k, k), all with the sample weights multiplied in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray

CLIP = 1e-4  # the paper's bound of leverages under an approximate curvature


# --- Tangents -------------------------------------------------------------------------------------------------------


def doubled(model: nn.Module) -> nn.Module:
    """A copy in float64."""
    return copy.deepcopy(model).double()


def examples_of(inputs: Any) -> list[Any]:
    """Each example as a batch of one, in float64."""

    def one(value: Tensor, at: int) -> Tensor:
        part = value[at : at + 1]
        return part.double() if part.is_floating_point() else part

    if isinstance(inputs, dict):
        n = len(next(iter(inputs.values())))
        return [{name: one(value, at) for name, value in inputs.items()} for at in range(n)]
    if isinstance(inputs, tuple):
        return [tuple(one(value, at) for value in inputs) for at in range(len(inputs[0]))]
    return [one(inputs, at) for at in range(len(inputs))]


def call(model: nn.Module, inputs: Any) -> Tensor:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def tangents_of(model: nn.Module, inputs: Any, selected: Sequence[str]) -> tuple[Array, Array]:
    """Outputs (n, ..., w) and J (n, k, d): every example run alone, one backward pass for each output."""
    named = dict(model.named_parameters())
    parameters = [named[name] for name in selected]
    outputs, rows = [], []
    for example in examples_of(inputs):
        out = call(model, example)
        each = []
        for value in out.reshape(-1):
            found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
            each.append(
                torch.cat(
                    [
                        (torch.zeros_like(p) if g is None else g).reshape(-1)
                        for p, g in zip(parameters, found, strict=True)
                    ]
                )
            )
        outputs.append(out.detach()[0])
        rows.append(torch.stack(each))
    return torch.stack(outputs).numpy(), torch.stack(rows).numpy()


# --- Losses ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A loss of outputs, differentiated by autograd, or by hand where autograd is inaccurate.

    Attributes:
        kind: "gaussian", "categorical" or "bernoulli".
        weight: of the classes, or of the positive class.
        smoothing: of labels.
        ignore_index: of labels that do not count.
    """

    kind: str
    weight: tuple[float, ...] | None = None
    smoothing: float = 0.0
    ignore_index: int = -100

    def encoded(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets (N, w) of outputs (N, w), class weights multiplied in for classes."""
        if self.kind != "categorical":
            return targets.reshape(outputs.shape).double()
        w = outputs.shape[1]
        if targets.is_floating_point():
            rows = targets.reshape(outputs.shape).double()
            counts = torch.ones(len(rows), dtype=torch.float64)
        else:
            labels = targets.reshape(-1)
            counts = (labels != self.ignore_index).double()
            rows = torch.eye(w, dtype=torch.float64)[labels.clamp_min(0)]
        rows = (1 - self.smoothing) * rows + self.smoothing / w
        if self.weight is not None:
            rows = rows * torch.tensor(self.weight, dtype=torch.float64)
        return rows * counts.unsqueeze(1)

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Summed over positions: (N, w) and (N, w) to a number."""
        if self.kind == "gaussian":
            return 0.5 * (target - outputs).square().sum()
        if self.kind == "categorical":
            return -(target * outputs.log_softmax(1)).sum()
        weight = torch.ones_like(outputs) if self.weight is None else torch.tensor(self.weight).to(outputs)
        ls = torch.nn.functional.logsigmoid
        return -(weight * target * ls(outputs) + (1 - target) * ls(-outputs)).sum()

    def terms(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        """Residuals (N, w) and Hessians (N, w, w)."""
        f, y = torch.as_tensor(outputs).clone().requires_grad_(), torch.as_tensor(targets)
        if self.kind == "categorical":  # autograd's 1 - p and p (1 - p) are rounding, or zero, where p is nearly one
            p = f.detach().softmax(1)
            traded = y.unsqueeze(2) * p.unsqueeze(1)  # y_a - s p_a is sum_b y_a p_b - y_b p_a, without b = a
            traded.diagonal(dim1=1, dim2=2).zero_()
            return (traded.sum(2) - traded.sum(1)).numpy(), self.laplacian(f.detach(), y).numpy()
        (slope,) = torch.autograd.grad(self(f, y), f, create_graph=True)
        columns = [torch.autograd.grad(one.sum(), f, retain_graph=True)[0] for one in slope.unbind(1)]
        return -slope.detach().numpy(), torch.stack(columns, 1).numpy()

    @staticmethod
    def laplacian(outputs: Tensor, targets: Tensor) -> Tensor:
        """sum y (diag(p) - p p^T), as the sum over pairs of p_i p_j (e_i - e_j)(e_i - e_j)^T."""
        p = outputs.softmax(1)
        pairs = -p.unsqueeze(2) * p.unsqueeze(1)
        pairs.diagonal(dim1=1, dim2=2).zero_()
        pairs.diagonal(dim1=1, dim2=2).sub_(pairs.sum(2))
        return targets.sum(1).reshape(-1, 1, 1) * pairs

    def roots(self, outputs: Array, targets: Array) -> Array:
        """C (N, w, q) with C C^T the Hessian; for classes a column a pair, in which what all outputs share is zero."""
        if self.kind != "categorical":
            return np.sqrt(self.terms(outputs, targets)[1].clip(0))  # a diagonal matrix
        p, w = torch.as_tensor(outputs).softmax(1).numpy(), outputs.shape[1]
        columns = []
        for one in range(w):
            for two in range(one + 1, w):
                column = np.zeros_like(p)
                column[:, one] = np.sqrt(targets.sum(1)) * np.sqrt(p[:, one]) * np.sqrt(p[:, two])
                column[:, two] = -column[:, one]
                columns.append(column)
        return np.stack(columns, 2)

    def expected(self, outputs: Array) -> Array:
        """Hessians (N, w, w) for labels as the network expects them."""
        f = torch.as_tensor(outputs)
        p = f.softmax(1) if self.kind == "categorical" else f.sigmoid() if self.kind == "bernoulli" else f
        return self.terms(outputs, self.encoded(p, f).numpy())[1]

    def free(self, w: int) -> int:
        """How many of w residuals vary freely."""
        return w - 1 if self.kind == "categorical" else w


# --- Curvatures -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What a structure makes of a matrix (d, d): nothing, or its diagonal in a basis.

    Attributes:
        basis: (d, d) orthonormal columns; `None` keeps matrices as they are.
        eigenvalues: (d,) of the curvature in the basis, where these are not its diagonal there.
        meat: (d, d) another basis, of all meats but Ho's.
    """

    basis: Array | None = None
    eigenvalues: Array | None = None
    meat: Array | None = None

    def of(self, matrix: Array, name: str = "ho") -> Array:
        V = self.basis if self.meat is None or name == "ho" else self.meat
        return matrix if V is None else (V * np.einsum("pi,pq,qi->i", V, matrix, V)) @ V.T

    def curvature(self, matrix: Array) -> Array:
        if self.basis is None or self.eigenvalues is None:
            return self.of(matrix)
        return (self.basis * self.eigenvalues) @ self.basis.T


def kronecker(
    model: nn.Module,
    inputs: Any,
    selected: Sequence[str],
    L: Array,
    r: Array,
    weights: Array,
    how: str,
    nudge: int | None = None,
) -> Shape:
    """EKFAC's or KFAC's basis for networks of linear layers, each used once.

    A layer's gradient matrix is sum_t g_t a_t^T over positions t, a_t with a one for the bias. Its factors are
    A = sum a_t a_t^T and B = sum_cc' L_cc' g_tc g_tc'^T, over examples and positions; for basis="gradients" they are
    those of whole gradient matrices G, sum G^T G and sum G G^T, where a layer is seen at several positions. Meats have
    factors of the same kind, of the gradients G of r_i^T f: they give the meats a basis of their own ("two bases").
    With `nudge`, factors are off by 1e-14 of their size, as sums in float64 are: eigenvectors of eigenvalues closer
    than that are not determined.
    """
    layers = [
        name for name, one in model.named_modules() if isinstance(one, nn.Linear) and f"{name}.weight" in selected
    ]
    factors = {name: [0.0, 0.0, 0.0, 0.0] for name in layers}  # of inputs and outputs, the curvature's and the meat's
    positions = dict.fromkeys(layers, 0.0)
    for i, example in enumerate(examples_of(inputs)):
        for name, (a, g) in passing(model, example, layers).items():
            a = np.concatenate([a, np.ones((len(a), 1))], 1) if f"{name}.bias" in selected else a
            values, vectors = np.linalg.eigh(L[i])
            rooted = np.einsum("cto,cq->qto", g, vectors * np.sqrt(values.clip(0)))
            positions[name] += weights[i] * len(a)
            found = [weights[i] * a.T @ a, np.einsum("qto,qtp->op", rooted, rooted)]
            if how == "ekfac of gradients" and len(a) > 1:
                G = np.einsum("qto,ti->qoi", rooted, a)
                found = [np.einsum("qoi,qoj->ij", G, G), np.einsum("qoi,qpi->op", G, G)]
            G = np.einsum("c,cto,ti->oi", r[i], g, a)
            for at, one in enumerate([*found, G.T @ G, G @ G.T]):
                factors[name][at] = factors[name][at] + one
    pairs, turned = {}, {}
    if nudge is not None:
        rng = np.random.default_rng(nudge)
        for name, some in factors.items():
            noise = [rng.standard_normal(one.shape) for one in some]
            # squares of numbers near 1e-200 are zero: no norm here
            sizes = [1e-14 * len(one) * abs(one).max() for one in some]
            factors[name] = [one + size * (e + e.T) for one, size, e in zip(some, sizes, noise, strict=True)]
    for name, (A, B, C, D) in factors.items():
        pairs[name], turned[name] = (np.linalg.eigh(B), np.linalg.eigh(A)), (np.linalg.eigh(D), np.linalg.eigh(C))
    basis, products = columns_of(model, selected, pairs)
    if how == "ekfac, two bases":
        return Shape(basis, None, columns_of(model, selected, turned)[0])
    counts = np.concatenate([[positions[name]] * len(one[0][0]) * len(one[1][0]) for name, one in pairs.items()])
    return Shape(basis, products / counts if how == "kfac" else None)


def columns_of(model: nn.Module, selected: Sequence[str], pairs: dict[str, Any]) -> tuple[Array, Array]:
    """Kronecker products of eigenvectors as columns among all weights, (d, d), and those of eigenvalues (d,)."""
    named = dict(model.named_parameters())
    sizes = [named[name].numel() for name in selected]
    starts = dict(zip(selected, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    columns, eigenvalues = [], []
    for name, ((s, U), (z, V)) in pairs.items():
        width = named[f"{name}.weight"].shape[1]
        for p, q in np.ndindex(len(s), len(z)):
            column, outer = np.zeros(sum(sizes)), np.outer(U[:, p], V[:, q])
            for part, of in ((outer[:, :width], "weight"), (outer[:, width:], "bias")):
                start = starts.get(f"{name}.{of}", 0)
                column[start : start + part.size] += part.reshape(-1)
            columns.append(column)
            eigenvalues.append(s[p] * z[q])
    return np.stack(columns, 1), np.array(eigenvalues)


def passing(model: nn.Module, example: Any, layers: Sequence[str]) -> dict[str, tuple[Array, Array]]:
    """What goes into each layer (t, i), and the gradients of all outputs in what comes out, (k, t, o)."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = []
    for name in layers:

        def keep(module: nn.Module, given: tuple[Tensor, ...], out: Tensor, name: str = name) -> None:
            seen[name] = (given[0], out)

        hooks.append(model.get_submodule(name).register_forward_hook(keep))
    out = call(model, example).reshape(-1)
    for hook in hooks:
        hook.remove()
    found = {}
    for name, (given, made) in seen.items():
        a = given.detach().reshape(-1, given.shape[-1]).numpy()
        rows = [torch.autograd.grad(value, made, retain_graph=True)[0] for value in out]
        found[name] = a, np.stack([row.reshape(len(a), -1).numpy() for row in rows])
    return found


# --- A fit ----------------------------------------------------------------------------------------------------------


@dataclass
class Dense:
    """Every number of a fit by its definition.

    Attributes:
        f: (n, k) outputs; `J` (n, k, d); `start` (d,) weights.
        loss: the loss; `targets` (n t, w) encoded; `omega` (n, t) weights of positions.
        ridge: lambda.
        shape: what the structure makes of matrices.
        policy: "exact", "one_plus_q" or "clip".
        loo: "example", "position" or "output"; groups go with "example".
        one_noise: whether squared error has one variance for all outputs, as where mixtures of them are looked at.
    """

    f: Array
    J: Array
    start: Array
    loss: Loss
    targets: Array
    omega: Array
    ridge: float
    shape: Shape = field(default_factory=Shape)
    policy: str = "exact"
    loo: str = "example"
    groups: Array | None = None
    recenter: bool = False
    unbiased: bool = False
    one_noise: bool = False

    def __post_init__(self) -> None:
        self.n, self.k, self.d = self.J.shape
        self.t = self.omega.shape[1]
        self.w = self.k // self.t
        r, L = self.loss.terms(self.f.reshape(-1, self.w), self.targets)
        omega = self.omega.reshape(-1)
        self.counts = (omega > 0) & ((self.targets.sum(1) > 0) | (self.loss.kind != "categorical"))
        omega = omega * self.counts
        self.units = omega.reshape(self.n, self.t)
        self.plain_L = L * self.counts[:, None, None]
        self.r = (omega[:, None] * r).reshape(self.n, self.k)
        self.L = self.joined(omega[:, None, None] * L)
        roots = self.loss.roots(self.f.reshape(-1, self.w), self.targets)
        self.roots = self.joined(np.sqrt(omega)[:, None, None] * roots)

    def joined(self, blocks: Array) -> Array:
        """(n t, w, q) to (n, k, t q)."""
        q = blocks.shape[2]
        found = np.zeros((self.n, self.t, self.w, self.t, q))
        for at in range(self.t):
            found[:, at, :, at] = blocks.reshape(self.n, self.t, self.w, q)[:, at]
        return found.reshape(self.n, self.k, self.t * q)

    # The curvature and what follows from it.

    @cached_property
    def curvature(self) -> Array:
        """F."""
        return self.shape.curvature(gram(self.J, self.L))

    @cached_property
    def inverse(self) -> Array:
        """F_lam^-1; of a curvature as it is from singular values of its root, which square what rounding adds."""
        if self.shape.basis is None:
            _, sizes, V = np.linalg.svd(np.einsum("nkq,nkp->nqp", self.roots, self.J).reshape(-1, self.d))
            values = np.zeros(self.d)
            values[: len(sizes)] = sizes**2
            kept = values > (1e-12 * values.max() if self.ridge == 0 else -1.0)
            return (V.T * np.where(kept, 1 / np.where(kept, values + self.ridge, 1.0), 0.0)) @ V
        return self.inverted(self.curvature + self.ridge * np.eye(self.d))

    def inverted(self, damped: Array) -> Array:
        """The inverse of a damped curvature; without a ridge among the directions that it tells of.

        From eigenvectors: a general inverse mixes directions of a tiny ridge into all others.
        """
        if self.ridge == 0:
            return np.linalg.pinv(damped, rcond=1e-12, hermitian=True)
        values, vectors = np.linalg.eigh(damped)
        return (vectors / values) @ vectors.T

    @cached_property
    def leverage_blocks(self) -> Array:
        """Q (n, k, k) J_i F_lam^-1 J_i^T."""
        return np.einsum("nkp,pq,njq->nkj", self.J, self.inverse, self.J, optimize=True)

    @cached_property
    def freedom(self) -> float:
        return float(np.trace(self.curvature @ self.inverse))

    @cached_property
    def step(self) -> Array:
        """F_lam^-1 (sum_i J_i^T r_i - lambda w)."""
        return self.inverse @ (np.einsum("nkp,nk->p", self.J, self.r) - self.ridge * self.start)

    @cached_property
    def residuals(self) -> Array:
        """(n, k), those of the linearized optimum where asked for; weights multiplied in."""
        if not self.recenter:
            return self.r
        return self.r - np.einsum("nkj,njp,p->nk", self.L, self.J, self.step, optimize=True)

    def mean(self, outputs: Array, J: Array) -> Array:
        return outputs + J @ self.step if self.recenter else outputs

    # Leaving out.

    def grow(self, h: Array, power: float) -> Array:
        """What residuals along a leverage h grow by."""
        h = h.clip(0)
        if self.policy == "one_plus_q":
            return (1 + h) ** power
        return (1 / (1 - (h.clip(None, 1 - CLIP) if self.policy == "clip" else h))) ** power

    def sets(self) -> list[list[Array]]:
        """What is left out, one after the other: (example, output) pairs as flat positions, (n k,)."""
        flat = np.arange(self.n * self.k).reshape(self.n, self.k)
        if self.groups is not None:
            return [flat[self.groups == label].reshape(-1) for label in np.unique(self.groups)]
        if self.loo == "output":
            return list(flat.reshape(-1, 1))
        if self.loo == "position":
            return list(flat.reshape(-1, self.w))
        return list(flat)

    @cached_property
    def deletions(self) -> int:
        """How many that count are left out."""
        counts = np.repeat(self.units.reshape(-1) > 0, self.w)
        return sum(bool(counts[rows].any()) for rows in self.sets())

    def left_out(self, power: float) -> Array:
        """(I - L_S Q_SS)^-power r_S for each set S, (n, k)."""
        found = np.zeros(self.n * self.k)
        J, r = self.J.reshape(-1, self.d), self.residuals.reshape(-1)
        for rows in self.sets():
            L = self.block(rows)
            Q = J[rows] @ self.inverse @ J[rows].T
            values, vectors = np.linalg.eigh(L)
            root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
            h, turn = np.linalg.eigh(root @ Q @ root)
            # g(L Q) = I + root (g(S) - I) S^-1 root Q, with S = root Q root
            safe = np.where(h > 1e-13, h, 1.0)
            factor = np.where(h > 1e-13, (self.grow(h, power) - 1) / safe, power)
            found[rows] = r[rows] + root @ turn @ (factor * (turn.T @ (root @ (Q @ r[rows]))))
        return found.reshape(self.n, self.k)

    def block(self, rows: Array) -> Array:
        """L between some (example, output) pairs."""
        at, c = rows // self.k, rows % self.k
        same = at[:, None] == at[None, :]
        return np.where(same, self.L[at[:, None], c[:, None], c[None, :]], 0.0)

    @cached_property
    def largest(self) -> Array:
        """The largest eigenvalue of L_S Q_SS for each set S that is left out."""
        J = self.J.reshape(-1, self.d)
        found = []
        for rows in self.sets():
            L, Q = self.block(rows), J[rows] @ self.inverse @ J[rows].T
            found.append(np.linalg.eigvals(L @ Q).real.max())
        return np.array(found)

    @cached_property
    def u(self) -> Array:
        return self.left_out(1.0)

    def unweighted(self, vectors: Array) -> Array:
        omega = np.repeat(self.units, self.w, axis=1)
        return np.where(omega > 0, vectors / np.where(omega > 0, omega, 1.0), 0.0)

    @cached_property
    def leverage(self) -> Array:
        """(n,) trace of the hat block, as the policy has it; for outputs that are apart their sum."""
        h = self.leverages
        return h.sum(1)

    @cached_property
    def leverages(self) -> Array:
        """(n, k) diagonal of L Q after the policy, for losses whose outputs are apart."""
        h = np.einsum("nkj,njk->nk", self.L, self.leverage_blocks)
        if self.policy == "one_plus_q":
            return h / (1 + h)
        return h.clip(0, 1 - CLIP) if self.policy == "clip" else h

    # Noise.

    @cached_property
    def numbers(self) -> int:
        return int((self.units > 0).sum()) * self.loss.free(self.w)

    @cached_property
    def noise(self) -> tuple[Array, float, Array]:
        """Noise of each example (n, k, k) with its weight, the scale of Laplace's variance, and Sigma (w, w)."""
        used = self.freedom if self.unbiased else 0.0
        counted = int((self.units > 0).sum())
        if self.loss.kind == "gaussian":
            omega = np.repeat(self.units, self.w, axis=1)
            e = np.where(omega > 0, self.residuals / np.sqrt(np.where(omega > 0, omega, 1.0)), 0.0).reshape(-1, self.w)
            sigma = e.T @ e / ((counted * self.w - used) / self.w)
            scale = float(np.trace(sigma) / self.w)
            if self.one_noise:
                sigma = scale * np.eye(self.w)
            blocks = self.units.reshape(-1, 1, 1) * sigma
            return self.joined(blocks), scale, sigma
        return self.L, 1.0, self.plain_L.sum(0) / counted

    # Predictions.

    def alignments(self, J: Array) -> Array:
        """a_i = J F_lam^-1 J_i^T, (m, k, n, k)."""
        return np.einsum("mkp,pq,njq->mknj", J, self.inverse, self.J, optimize=True)

    def rows(self, vectors: Array) -> Array:
        """J_S^T v_S for each set S that is left out, (sets, d)."""
        J, flat = self.J.reshape(-1, self.d), vectors.reshape(-1)
        return np.stack([flat[rows] @ J[rows] for rows in self.sets()])

    @cached_property
    def noise_roots(self) -> Array:
        """(n, k, q) of the noise of each example."""
        noise, scale, _ = self.noise
        if self.loss.kind != "gaussian":
            return np.sqrt(scale) * self.roots
        values, vectors = np.linalg.eigh(noise)
        return vectors * np.sqrt(values.clip(0))[:, None, :]

    @cached_property
    def meat_roots(self) -> dict[str, Array]:
        """(rows, d) each, whose gram matrices are the meats."""
        found = {"ho": np.einsum("nkq,nkp->nqp", self.noise_roots, self.J).reshape(-1, self.d)}
        for name, power in (("hec0", 0.0), ("hec2", 0.5), ("hec3", 1.0)):
            found[name] = self.rows(self.left_out(power))
        return found

    def covariance(self, ends: Array, roots: Array, name: str) -> Array:
        """(m, k, k) with meat R^T R; of a meat as it is without ever squaring R, which rounding would add to."""
        if self.shape.basis is not None:
            return ends @ self.shape.of(roots.T @ roots, name) @ ends.transpose(0, 2, 1)
        moved = ends @ roots.T
        return moved @ moved.transpose(0, 2, 1)

    @cached_property
    def hc1(self) -> float:
        """What HeC1 is of HeC0: for degrees of freedom, and Stata's factor for few groups."""
        left = self.numbers - self.freedom
        factor = self.numbers / left if left > 0 else np.inf
        if self.groups is None:
            return factor
        return factor * self.deletions / (self.deletions - 1) * (self.numbers - 1) / self.numbers

    def covariances(self, J: Array) -> dict[str, Array]:
        """(m, k, k) of each estimator at test tangents J."""
        ends, count = J @ self.inverse, self.deletions
        found = {name: self.covariance(ends, roots, name) for name, roots in self.meat_roots.items()}
        total = self.meat_roots["hec3"].sum(0, keepdims=True)
        of_total = self.covariance(ends, total, "jackknife")
        found["jackknife"] = (count - 1) / count * (found["hec3"] - of_total / count)
        found["hec1"] = self.hc1 * found["hec0"]
        return found | {"laplace": self.noise[1] * J @ self.inverse @ J.transpose(0, 2, 1)}

    # Tracing.

    def terms(self, J: Array) -> dict[str, Array]:
        """What each training example adds: "hec3" and "ho" (m, n), "pull" (m, n, k)."""
        a = self.alignments(J)
        moved = a * self.u  # (m, k, n, k'): what each output of an example adds
        ho = (np.einsum("mkni,niq->mknq", a, self.noise_roots) ** 2).sum((1, 3))
        return {
            "hec3": self.squares(moved).sum(1),
            "ho": ho,
            "pull": moved.sum(-1).transpose(0, 2, 1),
        }

    def squares(self, moved: Array) -> Array:
        """(m, k, n) what each example adds to HeC3, from what each of its outputs adds to predictions (m, k, n, k')."""
        if self.loo == "output":
            return (moved**2).sum(3)
        if self.loo == "position":
            return (moved.reshape(*moved.shape[:3], self.t, self.w).sum(-1) ** 2).sum(3)
        return moved.sum(-1) ** 2

    @cached_property
    def cook(self) -> Array:
        """(n,) u^T Q u / (dof s^2), or u^T Q r where the curvature is taken as one without the example.

        With leverages that are clipped it is u^T L^+ (u - r).
        """
        scale = self.freedom * self.noise[1] or np.inf  # nothing moves what no example tells anything about
        if self.policy == "clip":
            inverses = np.linalg.pinv(self.L, hermitian=True)
            return np.einsum("nk,nkj,nj->n", self.u, inverses, self.u - self.residuals).clip(0) / scale
        vectors, J = (self.u if self.policy == "exact" else self.residuals).reshape(-1), self.J.reshape(-1, self.d)
        found = np.zeros(self.n)
        for rows in self.sets():
            found[rows[0] // self.k] += self.u.reshape(-1)[rows] @ J[rows] @ self.inverse @ J[rows].T @ vectors[rows]
        return found.clip(0) / scale

    @property
    def rounding_of_cook(self) -> float:
        """What rounding does to it, relatively, where it takes an inverse of the Hessians of certain probabilities."""
        if self.policy != "clip":
            return 0.0
        values = np.linalg.eigvalsh(self.L)
        largest = values.max(1, keepdims=True)
        kept = np.where(values > 1e-15 * largest, values, largest)
        return float(1e-15 * (largest[:, 0] / kept.min(1).clip(1e-300)).max(initial=0.0))

    @cached_property
    def suspicion(self) -> Array:
        """(n,) the studentized residual, or the largest residual at the prediction without the example."""
        if self.loss.kind == "gaussian":
            return np.sqrt((self.unweighted(self.residuals) * self.u).sum(1).clip(0) / self.noise[1])
        return self._largest_residual(self._own_outputs - self.left_q())

    @cached_property
    def doubt(self) -> Array:
        """(n,) by which labels are put in order: the suspicion, or that of the network itself, of classes.

        The latter unless labels were learned by heart, so that less than half of the suspicion is left of it.
        """
        if self.loss.kind not in ("categorical", "bernoulli"):
            return self.suspicion
        own, counted = self._largest_residual(self._own_outputs), self.units.max(1) > 0
        return self.suspicion if own[counted].mean() <= 0.5 * self.suspicion[counted].mean() else own

    @property
    def _own_outputs(self) -> Array:
        return self.f + self.J @ self.step if self.recenter else self.f

    def _largest_residual(self, outputs: Array) -> Array:
        after = self.loss.terms(outputs.reshape(-1, self.w), self.targets)[0].reshape(self.n, self.k)
        return abs(np.where(np.repeat(self.units, self.w, 1) > 0, after, 0.0)).max(1)

    def left_q(self) -> Array:
        """(n, k) q_i r_i with the leverage q_i of an example in the fit without it."""
        Q = self.leverage_blocks
        if self.policy == "exact":  # (I - Q C C^T)^-1 Q, through a symmetric matrix: C is tiny where Q is large
            QC = Q @ self.roots
            left = np.eye(QC.shape[2]) - self.roots.transpose(0, 2, 1) @ QC
            Q = Q + QC @ np.linalg.solve(left, QC.transpose(0, 2, 1))
        return np.einsum("nkj,nj->nk", Q, self.residuals)

    def what_if(self, J: Array, counts: Array, relabel: dict[int, Array]) -> tuple[dict[str, Array], float]:
        """Predictions and variances of the linearized problem, solved again with other counts and labels.

        Beside them how far they are from a solution, over the size of a residual.

        The problem is the one whose optimum the network, or the recentered model, is. For squared error that is a
        refit; for other losses changed examples keep their loss, and others their parabola.
        """
        targets, shift = self.relabelled(relabel)
        changed = counts != 1
        changed[list(relabel)] = True
        curved = self.loss.kind != "gaussian" and not self.recenter and self.t == 1 and not self.one_noise
        ridge = self.ridge * np.eye(self.d)

        def after(step: Array) -> tuple[Array, Array]:
            """Residuals and Hessians of all examples after a step."""
            moved = self.J @ step
            residuals = self.residuals + shift - np.einsum("nkj,nj->nk", self.L, moved)
            hessians = self.L.copy()
            if curved:
                (before, _), (here, curvature) = (self.loss.terms(f, targets) for f in (self.f, self.f + moved))
                residuals[changed] = (self.residuals + shift + self.units * (here - before))[changed]
                hessians[changed] = (self.units[:, :, None] * curvature)[changed]
            return residuals, hessians

        def downhill(step: Array) -> Array:
            """Minus the gradient of the new objective; that of the old one is zero at step 0."""
            residuals, _ = after(step)
            old = self.residuals - np.einsum("nkj,nj->nk", self.L, self.J @ step)
            return (
                np.einsum("nkp,nk->p", self.J, counts[:, None] * residuals - old)
                - (gram(self.J, self.L) + ridge) @ step
            )

        step = np.zeros(self.d)
        for _ in range(400):
            gradient = downhill(step)
            move = self.inverted(gram(self.J, counts[:, None, None] * after(step)[1]) + ridge) @ gradient
            if abs(self.J @ move).max() < 1e-11 * max(1.0, abs(self.J @ step).max()):
                break
            part, size = 1.0, np.linalg.norm(gradient)
            while part > 1e-13 and not np.linalg.norm(downhill(step + part * move)) <= (1 - 1e-4 * part) * size:
                part /= 2
            if part <= 1e-13:
                break
            step = step + part * move
        # what is left of the equation where rounding ends Newton's method, over the size of a residual's gradient
        left = np.linalg.norm(downhill(step)) / max(1e-300, np.linalg.norm(self.J.reshape(-1, self.d), axis=1).max())
        residuals, hessians = after(step)
        other = self.forgotten()
        damped = gram(self.J, counts[:, None, None] * hessians) + ridge
        other.__dict__["inverse"] = self.inverted(damped)
        other.__dict__["residuals"], other.L = residuals, hessians
        moved = other.alignments(J) * other.u
        flat, at_once = self.J.reshape(-1, self.d), moved.reshape(*moved.shape[:2], -1)
        for rows in self.sets():  # J F^-1 J_i^T u_i is J F_-i^-1 J_i^T r_i, where rounding would hide one minus h
            if curved and changed[rows[0] // self.k] and counts[rows[0] // self.k]:
                without = self.inverted(damped - flat[rows].T @ other.block(rows) @ flat[rows])
                at_once[:, :, rows] = (J @ without @ flat[rows].T) * residuals.reshape(-1)[rows]
        noise = (np.einsum("mkni,niq->mknq", other.alignments(J), self.noise_roots) ** 2).sum(3)
        found = {
            "change": J @ step,
            "new_hec3": (other.squares(moved) * counts).sum(2),
            "new_ho": (noise * counts).sum(2),
        }
        return found, float(left)

    def variance_left(self, J: Array, L: Array, chosen: Sequence[int]) -> float:
        """Total of tr L s^2 J F^-1 J^T over a pool with the curvature after some of it have joined the training set."""
        seen = J if self.ridge else J @ self.inverse @ self.curvature  # along directions that the training set tells of
        damped = self.curvature + self.ridge * np.eye(self.d) + gram(seen[[*chosen]], L[[*chosen]])
        return self.noise[1] * float(np.einsum("pkj,pjk->", L, J @ self.inverted(damped) @ J.transpose(0, 2, 1)))

    def relabelled(self, relabel: dict[int, Array]) -> tuple[Array, Array]:
        """Targets (n t, w) after some are new, and by how much that changes residuals (n, k)."""
        targets = self.targets.reshape(self.n, -1).copy()
        for at, row in relabel.items():
            targets[at] = row
        targets = targets.reshape(-1, self.w)
        fresh = self.loss.terms(self.f.reshape(-1, self.w), targets)[0].reshape(self.n, self.k)
        shift = np.zeros_like(self.r)
        for at, row in relabel.items():
            if not np.array_equal(row, self.targets.reshape(self.n, -1)[at]):
                shift[at] = np.repeat(self.units[at], self.w) * fresh[at] - self.r[at]
        return targets, shift

    def forgotten(self) -> Dense:
        """The same problem, with nothing computed yet."""
        other = copy.copy(self)
        for name, kind in vars(type(self)).items():
            if isinstance(kind, cached_property):
                other.__dict__.pop(name, None)
        return other


def gram(J: Array, L: Array) -> Array:
    """sum_i J_i^T L_i J_i."""
    return np.einsum("nkp,nkj,njq->pq", J, L, J, optimize=True)


def loo_error(dense: Dense, ridge: float) -> float:
    """Mean over examples of squared errors, each unit's in a ridge regression fitted again without the unit.

    Units are what the fit leaves out: examples, positions, outputs or groups. Squared error without sample weights.
    """
    J, r = dense.J.reshape(-1, dense.d), dense.r.reshape(-1)
    total = 0.0
    for rows in dense.sets():
        kept = np.ones(len(J), dtype=bool)
        kept[rows] = False
        damped = J[kept].T @ J[kept] + ridge * np.eye(dense.d)
        step = np.linalg.solve(damped, J[kept].T @ r[kept] - ridge * dense.start)
        total += float(((r[rows] - J[rows] @ step) ** 2).sum())
    return total / dense.n


def slopes(loss: Loss) -> Callable[[Array], Array]:
    """(N, w) outputs to (N, w, w) derivatives of the probabilities."""

    def one(row: Tensor) -> Tensor:
        return row.softmax(0) if loss.kind == "categorical" else row.sigmoid()

    return lambda outputs: torch.func.vmap(torch.func.jacrev(one))(torch.as_tensor(outputs)).numpy()
