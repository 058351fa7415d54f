"""Memory of curvatures built layer by layer, told before it is taken.

The numbers are those that fits of real processes were seen to take at their peak; `tests/test_estimate.py` compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from whence.curvature.base import LayerStructure, Weigh
from whence.curvature.cost import Cost, ProblemSizes, Work
from whence.curvature.kronecker import (
    LARGEST_SIDE,
    Found,
    cut,
    decompose,
    gather_factors,
    takes_one_output_each,
)
from whence.curvature.rotation import Basis
from whence.curvature.spectral import FittedSpectral, Spectrum, Squares, gather_squares
from whence.curvature.stream import LEAST_PIECES, PIECES, LayerGradients, working_precision
from whence.curvature.two_bases import FittedTwoBases, MeatFactors, leading
from whence.display import count
from whence.errors import InputError
from whence.jacobian.gradients import Block
from whence.jacobian.linearization import Linearization

SUMS = 26.0
"""Sums, weights and what is made on the way to them, in float64 numbers for each coordinate that is kept."""

HOLES = 1.1
"""A heap in which factors and eigenvectors come and go takes so many times what they do."""

WHOLE = 5.0
"""Scores and steps, in float64 numbers for each weight."""

INSTEAD = (
    "structure=whence.EKFAC(tolerance=0.1) or a core of fewer coordinates, whence.Core(size=...), "
    "fit(..., hessian_columns=16) where outputs are many, or a larger max_memory."
)


def factor_bytes(blocks: Sequence[Block], largest_exact: int) -> tuple[float, float]:
    """Bytes of all Kronecker factors, in float64, and of the largest one."""
    each = []
    for block in blocks:
        shape = block.matrix_shape
        if block.kind == "kronecker":
            each += [shape[0] * side**2 for side in shape[1:] if side <= LARGEST_SIDE]
        elif block.kind == "rows" or block.numel <= largest_exact:
            each.append(shape[-1] ** 2)
    return 8.0 * sum(each), 8.0 * max(each, default=0)


def decomposition_bytes(blocks: Sequence[Block], largest_exact: int) -> float:
    """All factors, the eigenvectors of those that are decomposed, and the workspace for the largest."""
    total, largest = factor_bytes(blocks, largest_exact)
    return 2.0 * total + 4.0 * largest


def sums_bytes(kept: float, size: int, working: int) -> float:
    """Everything of the size of the weights, for so many coordinates kept of so many weights."""
    return (SUMS + 6.0 * (working == 8)) * 8.0 * kept + WHOLE * 8.0 * size


def examples_bytes(n: int, k: int, q: int, item: int) -> float:
    """Residuals, leverages and weights of n training examples with k outputs and q columns of the Hessian's root."""
    blocks = 8.0 if q else 3.5  # roots of Hessians and of the noise, leverage blocks, their inverses
    return item * n * (12.0 * k + blocks * k * max(k, q))


def require_factors(stream: LayerGradients, largest_exact: int) -> None:
    """Raise when the factors and their eigenvectors do not fit."""
    need = decomposition_bytes(stream.blocks, largest_exact)
    stream.problem.budget.require(
        HOLES * need, f"the Kronecker factors of {count(len(stream.blocks), 'block')} of parameters", _instead(stream)
    )


def require_sums(stream: LayerGradients, bases: Sequence[Basis]) -> None:
    """Raise when the sums in these bases, and the weights of the training examples, do not fit; pieces get the rest."""
    problem = stream.problem
    kept = sum(math.prod(basis.shape) for basis in bases)
    roots = problem.hessian_roots
    size = sum(block.numel for block in stream.blocks)
    need = sums_bytes(kept, size, working_precision(problem).itemsize)
    need += examples_bytes(problem.n, problem.k, 0 if roots is None else roots.shape[2], problem.dtype.itemsize)
    what = f"sums over {kept} coordinates, and the weights of {problem.n} examples with {problem.k} outputs,"
    least = max(PIECES * stream.example(problem.k), LEAST_PIECES * problem.budget.limit)
    problem.budget.require(need + least, what, _instead(stream))
    stream.held = need


def require_all(stream: LayerGradients) -> None:
    """The same before there are any bases, where all coordinates will be kept."""
    require_sums(stream, [Basis(block) for block in stream.blocks])


def _instead(stream: LayerGradients) -> str:
    return (
        "Use " if stream.problem.selection.one_layer else "Use parameters='last_layer' or a list of layers, "
    ) + INSTEAD


LARGEST_EXACT = 1024
"""Blocks without a Kronecker form (norms, biases, bare parameters) up to this size get an exact block."""


@dataclass(frozen=True)
class EKFAC(LayerStructure):
    """Kronecker eigenbasis with corrected eigenvalues: the paper's scaling to deep networks.

    Args:
        meat: basis of the meats of HeC0, HeC2 and HeC3. "two_bases" gives them an eigenbasis of their own among the
            leading directions of each layer (the paper's appendix); "one_basis" takes them as diagonal in the
            curvature's.
        basis: what a layer seen at several positions is decomposed by: "gradients", of examples, summed over
            positions; or "positions", one by one, as KFAC does.
        corner: leading directions of each side of a layer in which "two_bases" are kept, or `None` for all.
        tolerance: share of the homoscedastic variance that may lie outside the corner of the eigenbasis in which
            eigenvalues are kept one by one; outside, they are replaced by their mean. Zero keeps all of them.
        largest_exact: blocks without a Kronecker form are kept exactly up to this size, as a diagonal above.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> tracer = whence.fit(net, [(x, x**2)], structure=whence.EKFAC(tolerance=0), ridge=0.1, progress=False)
        >>> tracer.predict(x[:2]).hec3.shape
        torch.Size([2, 1])
    """

    name: ClassVar[str] = "ekfac"
    tolerance: float = 1e-2
    largest_exact: int = LARGEST_EXACT
    meat: Literal["one_basis", "two_bases"] = "one_basis"
    basis: Literal["positions", "gradients"] = "positions"
    corner: int | None = 64

    def __post_init__(self) -> None:
        """Check the choices at once, not after a pass over the data."""
        choices = {"meat": ("one_basis", "two_bases"), "basis": ("positions", "gradients")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                wanted = ", ".join(map(repr, allowed))
                raise InputError(f"expected EKFAC's {name} to be one of {wanted}, got {getattr(self, name)!r}.")
        if self.corner is not None and self.corner < 1:
            raise InputError(f"expected EKFAC's corner to be at least 1 or None, got {self.corner!r}.")

    def fit(self, problem: Linearization, ridge: float | None, weigh: Weigh | None = None) -> FittedSpectral:
        """Factors, eigenvalues, leverage: three passes."""
        lam = needs_ridge(ridge, self.name)
        stream, facts = open_stream(problem)
        if self.tolerance <= 0:
            require_all(stream)
        with stream.keeping():
            return self._fit(stream, facts, lam, weigh)

    def _fit(self, stream: LayerGradients, facts: list[str], lam: float, weigh: Weigh | None) -> FittedSpectral:
        problem = stream.problem
        whole = self.basis == "gradients"
        bases, _ = eigenbases(stream, lam, self.tolerance, self.largest_exact, facts, whole=whole)
        require_sums(stream, bases)
        noise = noise_covariance(problem)
        if self.meat != "two_bases":
            return FittedSpectral(stream, bases, gather_squares(stream, bases, noise), lam, noise, facts, weigh)
        factors = MeatFactors([leading(basis, self.corner) for basis in bases], problem.device)
        spectrum = gather_squares(stream, bases, noise, factors.add, factors.state())
        turns = factors.turns(facts)
        parts = [one for turn in turns if turn is not None for one in turn.tensors]
        problem.passes.process_group.share(parts, 0, "the eigenvectors of the meats")  # signs of vectors are anybody's
        return FittedTwoBases(turns, stream, bases, spectrum, lam, noise, facts, weigh)

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        two_bases = self.meat == "two_bases" and self.corner is None
        return kronecker_cost(sizes, self.name, self.largest_exact, two_bases, bounded=self.tolerance > 0)


@dataclass(frozen=True)
class KFAC(LayerStructure):
    """Kronecker factors without corrected eigenvalues. For comparison: EKFAC costs one more pass and is never worse.

    Args:
        largest_exact: blocks without a Kronecker form are kept exactly up to this size, as a diagonal above.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> whence.fit(net, [(x, x**2)], structure=whence.KFAC(), ridge=0.1, progress=False).predict(x[:2]).ho.shape
        torch.Size([2, 1])
    """

    name: ClassVar[str] = "kfac"
    largest_exact: int = LARGEST_EXACT

    def fit(self, problem: Linearization, ridge: float | None, weigh: Weigh | None = None) -> FittedSpectral:
        """As EKFAC, with products of the factors' eigenvalues for the blocks that have two factors."""
        lam = needs_ridge(ridge, self.name)
        stream, facts = open_stream(problem)
        require_all(stream)
        with stream.keeping():
            return self._fit(stream, facts, lam, weigh)

    def _fit(self, stream: LayerGradients, facts: list[str], lam: float, weigh: Weigh | None) -> FittedSpectral:
        problem = stream.problem
        bases, products = eigenbases(stream, lam, 0.0, self.largest_exact, facts, products=True)
        require_sums(stream, bases)
        noise = noise_covariance(problem)
        measured = gather_squares(stream, bases, noise)
        curvature = [
            squares if product is None else Squares(product, 0.0)
            for squares, product in zip(measured.curvature, products, strict=True)
        ]
        return FittedSpectral(
            stream, bases, Spectrum(curvature, measured.noise, measured.score), lam, noise, facts, weigh
        )

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        return kronecker_cost(sizes, self.name, self.largest_exact)


@dataclass(frozen=True)
class Diagonal(LayerStructure):
    """The diagonal of the curvature in the coordinates of the weights themselves. Crude, and one pass cheaper.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> whence.fit(net, [(x, x**2)], structure=whence.Diagonal(), ridge=0.1, progress=False).predict(x[:2]).ho.shape
        torch.Size([2, 1])
    """

    name: ClassVar[str] = "diagonal"

    def fit(self, problem: Linearization, ridge: float | None, weigh: Weigh | None = None) -> FittedSpectral:
        """As EKFAC, without any rotation."""
        lam = needs_ridge(ridge, self.name)
        stream, facts = open_stream(problem)
        bases = [Basis(block) for block in stream.blocks]
        require_sums(stream, bases)
        noise = noise_covariance(problem)
        facts.append("the curvature is taken as diagonal in the weights")
        with stream.keeping():
            return FittedSpectral(stream, bases, gather_squares(stream, bases, noise), lam, noise, facts, weigh)

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        return diagonal_cost(sizes, self.name)


def open_stream(problem: Linearization) -> tuple[LayerGradients, list[str]]:
    """The layers of the network, and what is worth telling about them."""
    stream = LayerGradients(problem)
    return stream, list(stream.notes)


def noise_covariance(problem: Linearization) -> Tensor:
    """(k, k) covariance of the residuals, for squared error; other losses bring their own for each example."""
    if problem.hessian_roots is not None:
        return torch.eye(problem.k, dtype=problem.dtype, device=problem.device)
    found = problem.noise(problem.residuals, None)
    if problem.units is None:
        return found.covariance
    root = found.roots[0]
    return root @ root.T  # the same at every position


def eigenbases(
    stream: LayerGradients,
    ridge: float,
    tolerance: float,
    largest_exact: int,
    facts: list[str],
    *,
    whole: bool = False,
    products: bool = False,
) -> tuple[list[Basis], list[Tensor | None]]:
    """One pass: the corner of each block's Kronecker eigenbasis, and KFAC's eigenvalues in it.

    Args:
        stream: tangents of the training set.
        ridge: lambda.
        tolerance: share of the homoscedastic variance that may lie outside the corner.
        largest_exact: dense blocks up to this size are decomposed.
        facts: is told what is worth telling.
        whole: sum gradients over positions before they are counted.
        products: whether KFAC's eigenvalues are wanted; else there are none.
    """
    require_factors(stream, largest_exact)
    factors = gather_factors(stream, largest_exact, whole=whole)
    precision = working_precision(stream.problem)

    def make(at: int, notes: list[str]) -> Found:
        one = factors[at]
        positions = one.positions / stream.problem.total_weight
        basis, product = cut(*one.basis(notes), positions, stream.problem.k, ridge, tolerance)
        stream.problem.passes.trim_memory()
        return basis.to(precision), product if products else None

    found = decompose(factors, make, stream.problem.passes.process_group, stream.problem.device, facts)
    bases = [basis for basis, _ in found]
    facts += describe_blocks(stream, largest_exact)
    if takes_one_output_each(stream, whole):
        facts.append("bases of layers come from one output of each example, in turn; eigenvalues from all of them")
    kept = sum(math.prod(basis.shape) for basis in bases)
    size = sum(block.numel for block in stream.blocks)
    if kept < size:
        facts.append(
            f"eigenvalues kept one by one for {kept} of {size} directions; outside, at most "
            f"{tolerance:g} of the homoscedastic variance, their mean serves"
        )
    return bases, [product for _, product in found]


def needs_ridge(ridge: float | None, name: str) -> float:
    """The ridge, which this structure cannot choose by itself."""
    if ridge is None:
        raise InputError(
            f'expected a number as ridge for structure "{name}", got "loo", which needs true leverages. '
            'Use structure="core" or "exact" with ridge="loo", or whence.ridge_from_weight_decay.'
        )
    return ridge


def describe_blocks(stream: LayerGradients, largest_exact: int) -> list[str]:
    """In words: which parameters have a Kronecker form, which an exact block, which a diagonal."""
    kinds: dict[str, list[Block]] = {"Kronecker": [], "exact block": [], "diagonal": []}
    for block in stream.blocks:
        exact = "exact block" if block.numel <= largest_exact else "diagonal"
        kinds["Kronecker" if block.kind != "dense" else exact].append(block)
    facts = []
    for kind, blocks in kinds.items():
        if blocks:
            names = ", ".join(block.name for block in blocks[:4]) + (", ..." if len(blocks) > 4 else "")
            weights = count(sum(block.numel for block in blocks), "weight")
            facts.append(f"{kind}: {weights} in {count(len(blocks), 'block')} ({names})")
    return facts


# --- Cost ------------------------------------------------------------------------------------------------------------


def diagonal_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Of sums of squares, without a basis."""
    memory = sums_bytes(sizes.d, sizes.d, sizes.working) + sizes.layer_bytes + sizes.example_bytes
    steps, prediction = _spectral_work(sizes, rotations=0.0)
    return Cost(name, stages={"sums and weights": memory}, steps=steps, prediction=prediction)


def kronecker_cost(
    sizes: ProblemSizes, name: str, largest_exact: int, two_bases: bool = False, bounded: bool = False
) -> Cost:
    """Of Kronecker factors and sums of squares in their eigenbasis; the meats may have a basis of their own."""
    bases = factor_bytes(sizes.blocks, largest_exact)[0] * sizes.working / 8
    sums = sums_bytes(sizes.d, sizes.d, sizes.working)
    if two_bases:
        bases, sums = 3.0 * bases, sums + 8.0 * 4 * sizes.d
    stages = factor_stages(sizes, largest_exact)
    stages["sums and weights"] = bases + sums + sizes.layer_bytes + sizes.example_bytes
    steps, prediction = _spectral_work(sizes, sizes.rotations)
    return Cost(name, stages, {**factor_steps(sizes, largest_exact), **steps}, prediction, bounded)


def factor_stages(sizes: ProblemSizes, largest_exact: int) -> dict[str, float]:
    """Bytes of the Kronecker factors, and of their eigendecomposition."""
    return {
        "factors": factor_bytes(sizes.blocks, largest_exact)[0] + sizes.layer_bytes,
        "eigenvectors": decomposition_bytes(sizes.blocks, largest_exact),
    }


def factor_steps(sizes: ProblemSizes, largest_exact: int) -> dict[str, Work]:
    """Work of the Kronecker factors, and of their eigendecomposition."""
    cubes = 0.0
    for block in sizes.blocks:
        shape = block.matrix_shape
        if block.kind == "kronecker":
            cubes += shape[0] * (float(shape[1]) ** 3 + float(shape[2]) ** 3)
        elif block.kind == "rows" or block.numel <= largest_exact:
            cubes += float(shape[-1]) ** 3
    factors = Work(read=sizes.n, layers=sizes.n, working=sizes.n * sizes.rotations)
    return {"factors": factors, "eigenvectors": Work(cubes=cubes)}


def _spectral_work(sizes: ProblemSizes, rotations: float) -> tuple[dict[str, Work], Work]:
    """Steps of the fit, and a prediction."""
    squares = 2.0 * sizes.k * sizes.d

    def a_pass(sets: float) -> Work:
        return Work(read=sizes.n, layers=sizes.n, working=sizes.n * (rotations + sets * squares))

    steps = {"eigenvalues": a_pass(2.0), "leverages and meats": a_pass(1.0 + 3.0 / sizes.k)}
    return steps, Work(layers=1.0, working=rotations + 7.0 * squares)
