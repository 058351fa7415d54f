"""The Kronecker eigenbasis: factors A and B of every layer, their eigenvectors, and the eigenvalues in that basis.

Pass 1 (`KroneckerFactors`) finds the basis of every block, pass 2 (`SpectrumSums`) the eigenvalues. A basis may span
only the leading directions of a block. Coordinates in it are "inside" and have an eigenvalue each; directions that it
does not span are "outside" and share one eigenvalue, the mean of theirs.

Axis letters: n examples, c cotangents, e groups, t positions, o layer outputs, i layer inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.curvature.accumulate import (
    LARGEST_SIDE,
    Accumulator,
    ConstantCotangents,
    Cotangents,
    LayerGradients,
    has_exact_block,
    pop_each,
    working_precision,
)
from whence.curvature.rotation import (
    ALIGNED,
    Basis,
    BasisView,
    DiagonalMoments,
    Factored,
    example_slices,
    gradient_matrices,
    mix_cotangents,
    products_are_rounded,
    weighted_sum,
    widened,
    widened_on_cpu,
)
from whence.curvature.two_bases import last_coordinates, leading_basis, leading_part, rotate
from whence.jacobian.gradients import (
    Block,
    Dense,
    Kronecker,
    Tangent,
    product,
)
from whence.jacobian.linearization import Linearization
from whence.linalg import NARROWEST, add_gram, check_finite_sums, eigenvectors, eigh, mirror
from whence.runtime.processes import assign_by_cost

LONGEST_SUM = 8192  # rows whose products are summed in their own precision
LARGEST_CLASSES = 256  # with more outputs, a fit on few mixtures of them has no output basis in the last layer
MANY_EXAMPLES = 20_000  # from here on, output factors come from one output of each example, in turn
MANY_MIXTURES = 25_000  # mixtures of outputs, over all examples, that eigenvalues are summed from
EXAMPLES_PER_SIDE = 40  # least number for each output of a layer: small eigenvalues are off by about a fortieth

# --- Pass 1: factors and eigenvectors --------------------------------------------------------------------------------


def gradient_moments(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of G^T G (e, i, i) and G G^T (e, o, o) for G = sum_t g_t a_t^T, a (n, e, t, i), g (n, c, e, t, o)."""
    n, c, e, t, o = g.shape
    i = a.shape[3]
    if t == 1:  # G is never formed
        below = a * g.square().sum((1, 4)).sqrt().unsqueeze(3)
        above = g * a.square().sum(3, keepdim=True).sqrt().unsqueeze(1)
        return sum_of_outer_products(below, 1), sum_of_outer_products(above, 2)
    inputs, outputs = (torch.zeros(e, size, size, dtype=torch.float64, device=a.device) for size in (i, o))
    for some in example_slices(n, c * e * o * i, a):
        below, above = matrix_moments(gradient_matrices(a[some], g[some]))
        inputs += below
        outputs += above
    return inputs, outputs


def matrix_moments(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of G^T G and G G^T, (e, i, i) and (e, o, o), of gradient matrices (n, c, e, o, i)."""
    return sum_of_outer_products(matrices, 2), sum_of_outer_products(matrices.transpose(3, 4), 2)


def sum_of_outer_products(values: Tensor, groups: int) -> Tensor:
    """Sum v v^T over every axis but the last and the axis `groups`: (..., e, ..., i) to (e, i, i)."""
    return second_moment(values.movedim(groups, 0).flatten(1, -2))


def second_moment(rows: Tensor) -> Tensor:
    """Rows (..., m, i) to (..., i, i). Many rows are summed in float64, or small eigenvalues would be lost."""
    parts = rows.split(LONGEST_SUM * (32 if rows.is_cuda else 1), dim=-2)  # a GPU sums in tiles, and calls cost more
    if len(parts) == 1 or rows.dtype == torch.float64:
        return _gram(rows)
    total = torch.zeros(*rows.shape[:-2], rows.shape[-1], rows.shape[-1], dtype=torch.float64, device=rows.device)
    for part in parts:
        total += _gram(part)
    return total


def _gram(rows: Tensor) -> Tensor:
    """Rows (..., m, i) to (..., i, i); for one matrix on a CPU, products known by symmetry are skipped."""
    size = rows.shape[-1]
    if rows.is_cuda or size <= NARROWEST or rows.numel() != rows.shape[-2] * size:
        return product(rows.transpose(-1, -2), rows)
    found = rows.new_zeros(size, size)
    add_gram(found, rows.reshape(-1, size))
    return mirror(found).reshape(*rows.shape[:-2], size, size)


class Factors:
    """Sums of a a^T and g g^T of one block, in float64, so that small eigenvalues survive a million examples.

    Large dense blocks, very long sides, and the outputs of a layer with `without_basis` outputs have no matrix.
    """

    def __init__(self, block: Block, device: torch.device, without_basis: int | None = None) -> None:
        def zeros(side: int, kept: bool) -> Tensor | None:
            shape = (*block.matrix_shape[:-2], side, side)  # (e, i, i) for a kronecker block, (i, i) for others
            return torch.zeros(shape, dtype=torch.float64, device=device) if kept else None

        self.block, i = block, block.matrix_shape[-1]
        self.inputs, self.outputs = zeros(i, block.kind == "rows" or has_exact_block(block)), None
        if block.kind == "kronecker":
            o = block.matrix_shape[1]
            self.inputs, self.outputs = zeros(i, i <= LARGEST_SIDE), zeros(o, o <= LARGEST_SIDE and o != without_basis)
        # number of (example, position) pairs summed, weighted by the examples' weights; and number of chunks whose
        # gradients were summed over positions first, rather than position by position
        self.counts = torch.zeros(2, dtype=torch.float64, device="cpu")
        found = {"inputs": self.inputs, "outputs": self.outputs, "counts": self.counts}
        self.state = {name: value for name, value in found.items() if value is not None}

    @property
    def positions(self) -> float:
        """Number of (example, position) pairs."""
        return float(self.counts[0])

    def add(self, tangent: Tangent, weights: Tensor | None = None, whole: bool = False) -> None:
        """Add a chunk of the training set. Gradients already include the square roots of the examples' weights (n,).

        With `whole`, gradient matrices G are summed over positions first, then G^T G and G G^T are added.
        """
        if not isinstance(tangent, Kronecker):
            values = tangent.values if isinstance(tangent, Dense) else tangent.aggregate()[2]
            if self.inputs is not None:
                self.inputs += second_moment(widened(values).flatten(0, 1))
            return
        share = 1.0 if weights is None or not len(weights) else float(weights.mean())  # mean weight of an example
        self.counts[0] += share * tangent.g.shape[0] * tangent.positions
        if whole and self.inputs is not None and self.outputs is not None:
            below, above = gradient_moments(widened(tangent.inputs()), widened(tangent.grads()))
            self.inputs += below
            self.outputs += above
            self.counts[1] += 1.0
            return
        if self.inputs is not None:
            a = widened_on_cpu(tangent.inputs())
            self.inputs += sum_of_outer_products(
                a if weights is None else a * weights.sqrt().to(a.dtype).reshape(-1, 1, 1, 1), 1
            )
        if self.outputs is not None:
            self.outputs += sum_of_outer_products(widened_on_cpu(tangent.grads()), 2)

    def basis(self, notes: list[str]) -> tuple[Basis, Tensor | None]:
        """The Kronecker eigenbasis, and the eigenvalues in it where both factors or an exact block are known."""
        name = self.block.name
        inputs = outputs = spectrum = below = above = None
        if self.inputs is not None:
            below, inputs = eigenvectors(self.inputs, f"the input factor of {name}", notes)
        if self.outputs is not None:
            above, outputs = eigenvectors(self.outputs, f"the output factor of {name}", notes)
        if self.block.kind == "dense":
            spectrum = below
        elif above is not None and below is not None:
            spectrum = above.unsqueeze(-1) * below.unsqueeze(-2)
            tiny = torch.finfo(spectrum.dtype).tiny
            spectrum /= below.sum(-1).clamp_min(tiny).reshape(-1, 1, 1) if self.counts[1] > 0 else self.positions or 1.0
        elif self.block.kind == "kronecker":
            sides = " and ".join(side for side, one in (("inputs", below), ("outputs", above)) if one is None)
            notes.append(f"the {sides} of {name} are too many for a basis of their own: taken as they are, one by one")
        return Basis(self.block, inputs, outputs), spectrum


class KroneckerFactors(Accumulator):
    """Pass 1: the Kronecker factors A and B of every layer, and exact blocks of small parameters without layers.

    The factors only determine the basis in which eigenvalues are summed. With many examples, one output of each is
    enough for that: inputs are added for every example, gradients for one output each, in turn. With `whole`, gradients
    of layers used at several positions are summed over positions first.
    """

    label = "Kronecker factors"

    def __init__(self, gradients: LayerGradients, whole: bool = False, every: int | None = None) -> None:
        gradients.require_factors()
        problem = gradients.problem
        self.problem, self.blocks = problem, gradients.blocks
        self.bases = [Basis(block) for block in gradients.blocks]
        self.whole = whole
        self.sampled = samples_outputs(problem, gradients.blocks, whole)
        self.every = example_step(problem, gradients.blocks) if every is None else every
        self.seen = torch.zeros((), dtype=torch.float64, device="cpu")  # number of examples added
        self.count = 1 if self.sampled else problem.k - (problem.sketch is not None)  # the last one is the residual
        self.cotangents = (
            one_output_each(problem) if self.sampled else ConstantCotangents(gradients.identity().rows[: self.count])
        )
        # No basis for the many outputs of the network: a factor costs their square, and a fit that uses a few mixtures
        # of them should cost no more than these.
        without = problem.width if problem.sketch is not None and problem.width > LARGEST_CLASSES else None
        self.factors = [Factors(block, problem.device, without) for block in self.blocks]
        self.state = {"seen": self.seen, **by_block([one.state for one in self.factors])}

    def add(self, where: slice, views: list[BasisView]) -> None:
        """Add a a^T and g g^T."""
        problem, weights = self.problem, self.problem.sample_weights
        curved = not problem.identity_hessians and self.count == problem.k
        self.seen += len(range(*where.indices(problem.n)))
        for factors, view in zip(self.factors, pop_each(views), strict=True):
            tangent = view.tangent
            whole = self.whole and isinstance(tangent, Kronecker) and tangent.positions > 1
            tangent = mix_cotangents(tangent, problem.hessian_roots[where]) if curved else tangent
            factors.add(tangent, None if weights is None else weights[where], whole)

    def eigenbases(
        self, ridge: float, tolerance: float, notes: list[str], products: bool = False, truncate_dense: bool = False
    ) -> tuple[list[Basis], list[Tensor | None]]:
        """The leading directions of each block's Kronecker eigenbasis, and with `products` KFAC's eigenvalues there.

        At most `tolerance` of the homoscedastic variance at this ridge lies outside them. KFAC's eigenvalues are the
        products of those of A and B. Exact blocks keep all directions unless `truncate_dense`.
        """
        problem, precision = self.problem, working_precision(self.problem)
        scale = problem.n / float(self.seen)

        def decomposed(factors: Factors, notes: list[str]) -> Eigenbasis:
            positions = scale * factors.positions / problem.total_weight
            basis, values = factors.basis(notes)
            values = None if values is None else scale * values
            if factors.block.kind == "kronecker" or truncate_dense:
                basis = truncate(basis, values, positions, problem.k, ridge, tolerance)
            problem.passes.trim_memory()
            return basis.to(precision), values if products else None

        found = decompose(self.factors, decomposed, problem, notes)
        notes += describe_blocks(self.blocks)
        if self.every > 1:
            notes.append(f"bases of layers come from {int(self.seen)} of {problem.n} training examples")
        if self.sampled:
            notes.append("bases of layers come from one output of each example, in turn")
        kept, size = sum(math.prod(basis.shape) for basis, _ in found), sum(block.numel for block in self.blocks)
        if kept < size:
            notes.append(
                f"eigenvalues kept one by one for {kept} of {size} directions; outside, at most "
                f"{tolerance:g} of the homoscedastic variance, their mean serves"
            )
        return [basis for basis, _ in found], [values for _, values in found]


def samples_outputs(problem: Linearization, blocks: Sequence[Block], whole: bool) -> bool:
    """Whether the basis comes from one output of each example; never with `whole` gradients."""
    return problem.n >= enough_examples(blocks) and problem.k > 1 and not whole


def example_step(problem: Linearization, blocks: Sequence[Block], examples: int = 1) -> int:
    """Step between the examples that are enough for a basis; each position in a sequence counts as an example.

    At least `examples` examples are used.
    """
    counted = problem.n if problem.sketch is None else problem.sketch.counted
    return max(1, min(counted // enough_examples(blocks), problem.n // examples))


def enough_examples(blocks: Sequence[Block]) -> int:
    """How many examples are enough for a basis, given the largest output side with a basis among the layers."""
    sides = (block.matrix_shape[1] for block in blocks if block.kind != "dense")
    return max(MANY_EXAMPLES, EXAMPLES_PER_SIDE * max((side for side in sides if side <= LARGEST_SIDE), default=0))


def one_output_each(problem: Linearization) -> Cotangents:
    """One column of every example's Hessian root, in turn, weighted to stand for all: one output for squared error."""
    roots, count = problem.hessian_roots, problem.hessian_roots.shape[2]

    def chosen(where: slice, n: int) -> Tensor:
        step = where.step or 1
        at = torch.arange(where.start, where.start + n * step, step, device=problem.device)
        return (math.sqrt(count) * roots[at, :, at // step % count]).unsqueeze(0)

    return chosen


def describe_blocks(blocks: Sequence[Block]) -> list[str]:
    """Say in words which parameters have a Kronecker form, an exact block or a diagonal."""
    kinds: dict[str, list[Block]] = {"Kronecker": [], "exact block": [], "diagonal": []}
    for block in blocks:
        exact = "exact block" if has_exact_block(block) else "diagonal"
        kinds["Kronecker" if block.kind != "dense" else exact].append(block)
    notes = []
    for kind, some in kinds.items():
        if some:
            names = ", ".join(block.name for block in some[:4]) + (", ..." if len(some) > 4 else "")
            weights, many = sum(block.numel for block in some), len(some)
            notes.append(f"{kind}: {weights} weight{'s' * (weights > 1)} in {many} block{'s' * (many > 1)} ({names})")
    return notes


LARGEST_SHARE = 0.7  # largest share of a block's directions in a truncated basis; if more are leading, all are kept
LARGEST_COST = 0.85  # largest cost on a CPU of a truncated basis, relative to the whole one
LARGEST_RATIO = 1e5
"""No basis is truncated if an eigenvalue exceeds this many ridges. The squared length outside is a difference. Its
float32 rounding error, weighted by 1 / lambda, would be a thousandth of the leverage here, and all of it at 1e8. Where
products are rounded on a GPU, the part outside is measured directly, and this does not matter."""
INPUTS_PER_POSITION = 12  # with fewer, squared lengths would cost a GPU more than a truncation saves


def truncate(
    basis: Basis, spectrum: Tensor | None, positions: float, cotangents: int, ridge: float, tolerance: float
) -> Basis:
    """Keep the directions of a block that carry all but `tolerance` of the homoscedastic variance.

    That variance is sum s^2 / (s + lambda)^2, the mean of Ho over the training set, for KFAC's eigenvalues s (e, o, i)
    or those of an exact block (p,). With many positions, squared lengths cost more than this saves. Groups would have
    leading directions of their own.
    """
    if spectrum is None or tolerance <= 0 or ridge <= 0:
        return basis
    rounded = products_are_rounded(spectrum.device)
    if float(spectrum.max()) > LARGEST_RATIO * ridge and not rounded:
        return basis
    if basis.block.kind == "dense":
        assert basis.inputs is not None
        leading = _largest((spectrum / (spectrum + ridge)).square(), tolerance)
        few = len(leading) <= LARGEST_SHARE * len(spectrum) and not rounded
        return Basis(basis.block, basis.inputs[:, leading].contiguous()) if few else basis
    if len(spectrum) > 1:
        return basis
    if spectrum.is_cuda and positions > 1 and INPUTS_PER_POSITION * positions > spectrum.shape[2]:
        return basis
    weight = (spectrum[0] / (spectrum[0] + ridge)).square()
    rows, columns = _largest(weight.sum(1), tolerance / 2), _largest(weight.sum(0), tolerance / 2)
    few = len(rows) * len(columns) <= LARGEST_SHARE * weight.numel()
    if few and (spectrum.is_cuda or _saves(weight.shape, (len(rows), len(columns)), positions, cotangents)):
        return basis.select(rows, columns)
    return basis


def _saves(shape: Sequence[int], kept: tuple[int, int], t: float, c: int) -> bool:
    """Whether leading directions of a layer at t positions take fewer products than all, squared lengths included.

    Factors are rotated, then multiplied to matrices; squared lengths take products of all pairs of positions.
    """
    (o, i), (few_o, few_i) = shape, kept
    whole = t * i * i + c * t * o * (o + i)
    lengths = t * t * (i + c * o) + c * c * t * o if t > 1 else 0.0
    return t * i * few_i + c * t * few_o * (o + few_i) + lengths < LARGEST_COST * whole


def _largest(weights: Tensor, leave: float) -> Tensor:
    """Sorted positions of the largest weights; together the others have at most a share `leave`."""
    ordered, order = weights.sort(descending=True)
    gathered = ordered.cumsum(0)
    needed = int(torch.searchsorted(gathered, (1.0 - leave) * gathered[-1])) + 1
    if len(weights) > 8 * ALIGNED:
        needed += -needed % ALIGNED
    return order[: min(needed, len(order))].sort().values


Eigenbasis = tuple[Basis, Tensor | None]
"""A basis, and KFAC's eigenvalues in it."""


def decompose(
    factors: Sequence[Factors],
    make: Callable[[Factors, list[str]], Eigenbasis],
    problem: Linearization,
    notes: list[str],
) -> list[Eigenbasis]:
    """The bases of all blocks, one after the other; with several processes, each block is made by one of them."""
    process_group, label = problem.passes.process_group, "the eigenvectors of all layers"
    if process_group.alone:
        return [make(one, notes) for one in problem.progress.track(factors, "eigenvectors, layer", len(factors))]
    sides = ([side for side in (one.inputs, one.outputs) if side is not None] for one in factors)
    cubes = [float(sum(side.numel() * side.shape[-1] for side in some)) for some in sides]  # about as many operations
    owners, own = assign_by_cost(cubes, process_group.size), list[str]()
    mine: dict[int, list[Tensor | None]] = {}
    for at, owner in enumerate(owners):
        if owner == process_group.rank:
            basis, spectrum = make(factors[at], own)
            mine[at] = [basis.inputs, basis.outputs, spectrum]
    shapes = {at: [None if one is None else (one.shape, one.dtype) for one in parts] for at, parts in mine.items()}
    every = process_group.all_gather_object(label, (shapes, own))
    found = []
    for at, owner in enumerate(owners):
        if owner != process_group.rank:
            wanted = every[owner][0][at]
            mine[at] = [one and torch.empty(one[0], dtype=one[1], device=problem.device) for one in wanted]
        inputs, outputs, spectrum = mine.pop(at)
        process_group.broadcast([part for part in (inputs, outputs, spectrum) if part is not None], owner, label)
        found.append((Basis(factors[at].block, inputs, outputs), spectrum))
    notes += [note for _, each in every for note in each]
    return found


# --- Pass 2: eigenvalues ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockSpectrum:
    """The curvature of a block, diagonal in a basis: U diag(s) U^T."""

    basis: Basis  # U
    curvature: DiagonalMoments  # s = sum over examples and outputs of squared gradients
    noise: DiagonalMoments  # the same, outputs weighted by the noise: Sigma for squared error, else the Hessian
    score: Tensor  # sum_i J_i^T r_i, shaped as the block's matrix
    rotation: Basis | None = None  # from U to the meats' own basis, if they have one

    def solve(self, matrices: Tensor, ridge: float) -> Tensor:
        """F_lam^-1 v for matrices (..., *block.matrix_shape)."""
        return self.basis.solve(self.curvature.damped(ridge), matrices)

    def into_rotated(self, matrix: Tensor) -> Tensor:
        """Coordinates of a matrix in the meats' own basis."""
        assert self.rotation is not None
        leading = self.basis.to(matrix.dtype).to_coordinates(matrix)[last_coordinates(self.rotation.shape)]
        return self.rotation.to(matrix.dtype).to_coordinates(leading)


class MomentSums:
    """Sums for one block: squares in its basis for `count` sets of weights, and weighted gradients, not rotated.

    With a `rotation` to the meats' own basis, squares in that basis are summed as well.
    """

    def __init__(self, basis: Basis, count: int, device: torch.device, rotation: Basis | None = None) -> None:
        self.basis, self.rotation, self.rounded = basis, rotation, products_are_rounded(device)
        shapes = {"inside": (count, *basis.shape), "length": (count,), "total": basis.block.matrix_shape}
        if rotation is not None:
            shapes["rotated"] = (count, *rotation.shape)
        self.state = {name: torch.zeros(one, dtype=torch.float64, device=device) for name, one in shapes.items()}
        self.inside, self.length, self.total = (self.state[name] for name in ("inside", "length", "total"))
        self.rotated = self.state.get("rotated", self.inside[:0])

    def add(self, view: BasisView, squared: Tensor, summed: Tensor | None, mixing: Tensor | None = None) -> None:
        """Add a chunk, with weights of the squares (count, c), and optionally of the gradients in the total (n, k).

        The c cotangents whose gradients are squared are the view's k, or mixtures (n, k, c) of them.
        """
        if summed is not None:
            self.total += weighted_sum(view.tangent, summed)
        if not len(squared):
            return
        each = squared.double().unsqueeze(1)  # (count, n or 1, c)
        if mixing is not None and mixing.shape[1] == 1:  # no need to form multiples of one cotangent
            each, mixing = (squared.double() @ mixing[:, 0].double().square().T).unsqueeze(2), None
        for part, rotated in view.chunks() if mixing is None else view.mixed(mixing):
            weights = each if each.shape[1] == 1 else each[:, part]
            self.inside += rotated.squares(weights)
            if self.rotation is not None:
                self.rotated += rotate(rotated, self.rotation).squares(weights)
        if not view.complete:
            wide = None if mixing is None else mixing.double()
            lengths = view.squared_lengths() if wide is None else (wide * (view.gram_matrices().double() @ wide)).sum(1)
            self.length += (each * lengths.double()).sum((1, 2))

    def finish(self) -> list[DiagonalMoments]:
        """The sums, one for each set of weights."""
        rest, found = self.basis.missing, []
        for inside, length in zip(self.inside, self.length, strict=True):
            left = float(length if self.rounded else length - inside.sum())
            found.append(DiagonalMoments(inside, max(left, 0.0) / rest if rest else 0.0))
        return found


def by_block(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of all blocks in one dictionary, without empty ones, each name prefixed by the block's number."""
    named = ((f"{at}.{name}", one) for at, state in enumerate(states) for name, one in state.items())
    return {name: one for name, one in named if one.numel()}


@dataclass(frozen=True)
class Pullback:
    """The c cotangents of each example that pass 2 pulls back, and how it squares and sums their gradients."""

    cotangents: Cotangents
    count: int  # c
    weights: Tensor  # (s, q) of the squares: for the curvature, and for the noise if it needs its own
    mixing: Tensor | None = None  # (n, c, q) mixtures of the cotangents that are squared; `None` for themselves
    residuals: Tensor | None = None  # (n, c) weights of the gradients in the score
    label: str = "eigenvalues"


def all_outputs(problem: Linearization, noise: Tensor | None) -> Pullback:
    """All outputs of every example, mixed by the roots of the Hessians.

    With squared error, outputs are pulled back along the eigenvectors of the noise covariance (k, k), so that one set
    of gradients serves curvature and noise. With other losses the two are the same, up to a dispersion.
    """
    mixing = None if problem.identity_hessians else problem.hessian_roots
    frame = torch.eye(problem.k, dtype=problem.dtype, device=problem.device)
    weights = frame.new_ones(1, problem.hessian_roots.shape[2])
    if problem.sketch is not None and noise is None:  # its columns, without the residual
        frame, mixing = frame[:, :-1], None
    elif mixing is None and noise is not None and problem.k > 1:  # with one output the noise is just a factor
        sizes, frame = eigh(noise)
        problem.passes.process_group.broadcast([sizes, frame], 0, "eigenvalues")
        weights = torch.cat([weights, sizes.clamp_min(0.0).unsqueeze(0)])
    residuals = None if noise is None else problem.residuals @ frame
    return Pullback(ConstantCotangents(frame.T), frame.shape[1], weights, mixing, residuals)


def random_mixtures(problem: Linearization, noise: Tensor | None, mixtures: int) -> Pullback:
    """A few random mixtures of each example's outputs, without the score.

    Averaged over random signs z, the square of J^T R z is the sum of squares of all columns of J^T R. Over many
    examples the sums agree within some per cent along each direction.
    """
    roots, device = problem.hessian_roots, problem.device
    signs = balanced_signs(roots.shape[2]).to(problem.residuals)
    draw = torch.Generator("cpu").manual_seed(0)
    order = torch.randint(len(signs), (problem.n,), generator=draw, device="cpu").to(device)
    noise_root, scales = None, signs.new_ones(1)
    if problem.identity_hessians and noise is not None:  # scaled, as half precision underflows for small numbers
        size = noise.diagonal().max().clamp_min(torch.finfo(noise.dtype).tiny)
        values, vectors = eigh(noise / size)
        noise_root = vectors * values.clamp_min(0.0).sqrt() @ vectors.T
        scales = torch.stack([torch.ones_like(size), size])

    def cotangents(where: slice, n: int) -> Tensor:
        """(c, n, k) mixtures of some examples' outputs, and the same times the noise's root."""
        chosen = signs[(order[where] + torch.arange(mixtures, device=device).unsqueeze(1)) % len(signs)]
        rows = (roots[where] @ chosen.unsqueeze(3)).squeeze(3)
        return rows if noise_root is None else torch.cat([rows, chosen @ noise_root])

    weights = (torch.diag(scales.double()) / mixtures).repeat_interleave(mixtures, 1)
    return Pullback(cotangents, weights.shape[1], weights)


def residuals_alone(problem: Linearization) -> Pullback:
    """The residual of every example, for the score alone; of length one, as half precision underflows."""
    residuals = problem.residuals
    lengths = torch.linalg.vector_norm(residuals, dim=1, keepdim=True)
    lengths = torch.where(lengths > 0, lengths, 1.0)

    def unit(where: slice, n: int) -> Tensor:
        return (residuals[where] / lengths[where]).unsqueeze(0)

    return Pullback(unit, 1, lengths.new_zeros(0, 1), residuals=lengths, label="score")


class SpectrumSums(Accumulator):
    """Pass 2: EKFAC's eigenvalues, those of the homoscedastic meat, and the score.

    Without `noise`, the homoscedastic meat and the score are left out. All outputs are pulled back unless `pullback`
    says otherwise. About one in `every` examples is used.
    """

    def __init__(
        self,
        gradients: LayerGradients,
        bases: Sequence[Basis],
        noise: Tensor | None,
        pullback: Pullback | None = None,
        every: int = 1,
    ) -> None:
        self.problem, self.bases, self.noise, self.every = gradients.problem, bases, noise, every
        self.pullback = pullback or all_outputs(gradients.problem, noise)
        self.label, self.cotangents, self.count = self.pullback.label, self.pullback.cotangents, self.pullback.count
        weights = self.pullback.weights
        self.seen = torch.zeros((), dtype=torch.float64, device="cpu")  # number of examples added
        self.sums = [MomentSums(basis, len(weights), self.problem.device) for basis in bases]
        self.state = {"seen": self.seen, **by_block([one.state for one in self.sums])}
        self.given = [one for one in (weights, noise) if one is not None and one.numel()]

    def add(self, where: slice, views: list[BasisView]) -> None:
        """Add squares in the basis, and J_i^T r_i."""
        pullback = self.pullback
        self.seen += len(self.problem.outputs[where])
        mixing, residuals = (None if one is None else one[where] for one in (pullback.mixing, pullback.residuals))
        for sums, view in zip(self.sums, pop_each(views), strict=True):
            sums.add(view, pullback.weights, residuals, mixing)

    def spectrum(self) -> list[BlockSpectrum]:
        """The eigenvalues of every block."""
        found, one_output = [], self.problem.identity_hessians and self.problem.k == 1
        for basis, sums in zip(self.bases, self.sums, strict=True):
            moments = sums.finish()
            check_finite_sums(moments[0].inside, f"the squares of {basis.block.name}")
            if self.every > 1:
                moments = [one.times(self.problem.n / float(self.seen)) for one in moments]
            if self.noise is not None and one_output:
                moments.append(moments[0].times(float(self.noise)))
            found.append(BlockSpectrum(basis, moments[0], moments[-1], sums.total))
        return found


class TwoBasisSpectrumSums(SpectrumSums):
    """Pass 2, and sums of G^T G and G G^T for residual-weighted gradients G among the leading directions of each block.

    Their eigenvectors are the meats' own bases. `leading` is `None` for a block that keeps one basis.
    """

    def __init__(
        self, gradients: LayerGradients, bases: Sequence[Basis], noise: Tensor, directions: int | None
    ) -> None:
        super().__init__(gradients, bases, noise)
        self.leading = [leading_basis(basis, directions) for basis in bases]
        sides = [[] if basis is None else basis.tensors for basis in self.leading]  # inputs, and outputs if there are
        self.factors = [
            [one.new_zeros(*one.shape[:-2], *2 * one.shape[-1:], dtype=torch.float64) for one in some] for some in sides
        ]
        meats = [{str(side): one for side, one in enumerate(each)} for each in self.factors]
        self.state |= {f"meat.{name}": one for name, one in by_block(meats).items()}

    def add(self, where: slice, views: list[BasisView]) -> None:
        """Add squares, and the second moments of J_i^T r_i."""
        assert self.pullback.residuals is not None
        residuals = self.pullback.residuals[where].unsqueeze(2)
        for basis, sums, view in zip(self.leading, self.factors, views, strict=True):
            if basis is None:
                continue
            for _, rotated in view.mixed(residuals):
                part = leading_part(rotated, basis.shape)
                found: tuple[Tensor, ...]
                if isinstance(part, Factored):
                    found = gradient_moments(part.a.unsqueeze(2), part.g.unsqueeze(3))
                elif len(sums) == 2:
                    found = matrix_moments(part.matrices())
                else:
                    rows = part.matrices().flatten(0, 1)
                    found = (rows.T @ rows,)
                for into, one in zip(sums, found, strict=True):
                    into += one
        super().add(where, views)

    def two_bases(self, notes: list[str]) -> list[BlockSpectrum]:
        """The eigenvalues of every block, with the rotation from the curvature's basis to the meats'."""
        found = self.spectrum()
        for at, (basis, sums) in enumerate(zip(self.leading, self.factors, strict=True)):
            if basis is None:
                continue
            sides = [
                eigenvectors(one, f"the {side} factor of the meat of {basis.block.name}", notes)[1].to(like)
                for side, one, like in zip(("input", "output"), sums, basis.tensors, strict=False)
            ]
            found[at] = replace(found[at], rotation=Basis(basis.block, *sides))
        parts = [one for block in found if block.rotation is not None for one in block.rotation.tensors]
        self.problem.passes.process_group.broadcast(parts, 0, "the eigenvectors of the meats")  # so that signs agree
        return found


def fit_spectrum(
    gradients: LayerGradients, bases: Sequence[Basis], noise: Tensor | None, notes: list[str], every: int = 1
) -> list[BlockSpectrum]:
    """Pass 2 from all outputs, or with many examples from a few mixtures of the outputs of some.

    Without the noise, the homoscedastic meat and the score are left out. About one in `every` examples is used.
    """
    problem = gradients.problem
    if problem.sketch is None and samples_outputs(problem, gradients.blocks, whole=False):
        mixtures = 1 if noise is None else math.ceil(MANY_MIXTURES / problem.n)  # a core needs only the order
        every = max(every, problem.n // MANY_MIXTURES)
        pullback = random_mixtures(problem, noise, mixtures)
        if pullback.count < problem.k:
            sums = gradients.accumulate(SpectrumSums(gradients, bases, noise, pullback, every))
            found = sums.spectrum()
            what = f"{mixtures} random mixture{'s' * (mixtures > 1)} of the outputs of each of {int(sums.seen)}"
            notes.append(f"eigenvalues come from {what} training examples")
            if noise is None:
                return found
            scores = gradients.accumulate(SpectrumSums(gradients, bases, None, residuals_alone(problem))).sums
            return [replace(block, score=sums.total) for block, sums in zip(found, scores, strict=True)]
    return gradients.accumulate(SpectrumSums(gradients, bases, noise, every=every)).spectrum()


def balanced_signs(size: int) -> Tensor:
    """(h, size) rows of signs whose columns are orthogonal, h the next power of two.

    Examples:
        >>> balanced_signs(2)
        tensor([[ 1.,  1.],
                [ 1., -1.]])
    """
    found = torch.ones(1, 1, device="cpu")
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found[:, :size]


def noise_covariance(problem: Linearization) -> Tensor:
    """(k, k) covariance of the residuals, for squared error; the identity for other losses."""
    if not problem.identity_hessians:
        return torch.eye(problem.k, dtype=problem.dtype, device=problem.device)
    root = problem.noise(problem.residuals, None).roots[0]  # the same for every example
    return root @ root.T
