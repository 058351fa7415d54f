"""Symmetric products, triangular solves, eigendecompositions, and sorting of scores."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from whence.errors import SingularCurvatureError
from whence.runtime.model_state import one_thread

SMALL = 512  # matrices up to this size are decomposed faster by one thread than by two


NUMBERS_AT_ONCE, MATRICES_AT_ONCE = 2**15, 2**12  # most numbers, and most matrices, decomposed at once on a GPU


def few_at_once(matrices: Tensor) -> tuple[Tensor, ...]:
    """Split small matrices (n, k, k) into pieces that can be decomposed at once; one piece on a CPU.

    cuSOLVER needs a workspace of 300 kB or more for the eigenvectors of each matrix, however small: 15 GB for 50,000
    examples of ten classes. A piece has at most `NUMBERS_AT_ONCE` numbers and `MATRICES_AT_ONCE` matrices.

    Examples:
        >>> [len(piece) for piece in few_at_once(torch.zeros(5, 3, 3, device="cpu"))]
        [5]
    """
    if not matrices.is_cuda:
        return (matrices,)
    each = max(1, matrices.shape[-1] * matrices.shape[-2])
    pieces: tuple[Tensor, ...] = matrices.split(min(MATRICES_AT_ONCE, max(1, NUMBERS_AT_ONCE // each)))
    return pieces


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh` of (..., m, m): eigenvalues, ascending, and eigenvectors.

    On small matrices several threads mostly wait for one another.

    Examples:
        >>> values, vectors = eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> values.tolist()
        [1.0, 2.0]
    """
    if matrices.shape[-1] == 1:
        return matrices.squeeze(-1), torch.ones_like(matrices)
    pieces = few_at_once(matrices) if matrices.dim() == 3 else (matrices,)
    with one_thread(not matrices.is_cuda and matrices.shape[-1] <= SMALL):
        pairs = [torch.linalg.eigh(some) for some in pieces]
    values, vectors = pairs[0] if len(pairs) == 1 else (torch.cat(some) for some in zip(*pairs, strict=True))
    return values, vectors


DENSE = 2000  # rows up to which all eigenvectors of a matrix are computed at once in a few seconds
STEPS, EXTRA = 8, 64  # of the subspace iteration for larger ones, and directions beside those that are wanted


def leading_eigenvectors(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, ascending, of a positive matrix (m, m), at most `count`, and their eigenvectors (m, r).

    Those of large matrices are approximate, by subspace iteration from the same start in every call.

    Examples:
        >>> values, vectors = leading_eigenvectors(torch.diag(torch.tensor([3.0, 1.0, 2.0])), 2)
        >>> values.tolist(), vectors.abs().tolist()
        ([2.0, 3.0], [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    """
    size = len(matrix)
    if size <= max(DENSE, 4 * (count + EXTRA)):
        values, vectors = eigh(matrix)
        return values[-count:], vectors[:, -count:]
    generator = torch.Generator("cpu").manual_seed(0)
    found = torch.randn(size, count + EXTRA, generator=generator, device="cpu", dtype=matrix.dtype).to(matrix.device)
    for _ in range(STEPS):
        found = torch.linalg.qr(matrix @ found).Q
    values, mixed = eigh(found.T @ matrix @ found)
    return values[-count:], (found @ mixed)[:, -count:]


PANELS = 4  # a symmetric product uses at least so many panels, with at most 5/8 of the multiplications of the whole
NARROWEST, WIDEST = 64, 512  # columns of a panel: fewer leave a second thread idle, more gain little


def panels(size: int) -> list[slice]:
    """Split the columns of a matrix into panels, from left to right.

    Examples:
        >>> panels(150)
        [slice(0, 64, None), slice(64, 128, None), slice(128, 150, None)]
    """
    step = min(max(-(-size // (16 * PANELS)) * 16, NARROWEST), WIDEST)
    return [slice(low, min(low + step, size)) for low in range(0, size, step)]


def add_gram(matrix: Tensor, rows: Tensor) -> None:
    """Add rows^T rows to a matrix (r, r), possibly of higher precision. Fills the lower part only; see `mirror`."""
    for here in panels(len(matrix)):
        matrix[here, : here.stop] += rows[:, here].T @ rows[:, : here.stop]


def mirror(matrix: Tensor) -> Tensor:
    """Copy the lower part of a matrix, summed by `add_gram`, to above the diagonal, in place.

    Examples:
        >>> sums = torch.zeros(100, 100)
        >>> rows = torch.ones(2, 100)
        >>> add_gram(sums, rows)
        >>> torch.equal(mirror(sums), rows.T @ rows)
        True
    """
    for here in panels(len(matrix))[1:]:
        matrix[: here.start, here] = matrix[here, : here.start].T
    return matrix


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """C^-1 B for lower triangles C and B (r, r), skipping most of their zeros.

    Examples:
        >>> solve_lower(torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.eye(2))
        tensor([[ 0.5000,  0.0000],
                [-0.5000,  1.0000]])
    """
    found = torch.zeros_like(right)
    for here in panels(len(right)):
        below = slice(here.start, None)
        found[below, here] = torch.linalg.solve_triangular(factor[below, below], right[below, here], upper=False)
    return found


def inverse_norm(factor: Tensor, steps: int = 12) -> float:
    """Approximate the largest eigenvalue of (C C^T)^-1, for a Cholesky factor C, by power iteration: a lower bound.

    Examples:
        >>> round(inverse_norm(torch.diag(torch.tensor([1.0, 0.5, 0.1]))), 3)
        100.0
    """
    vector = factor.new_ones(len(factor), 1)
    for _ in range(steps):
        vector = torch.cholesky_solve(vector / vector.norm(), factor)
    return float(vector.norm())


def largest_first(scores: Tensor, ties: Tensor | None = None) -> Tensor:
    """Indices of the scores (n,) from the largest to the smallest, NaN last; ties in their original order.

    If `ties` (n,) are given, they order equal scores, the largest first.

    Examples:
        >>> largest_first(torch.tensor([0.5, float("nan"), 2.0, 1.0])).tolist()
        [2, 3, 0, 1]
    """
    if ties is None:
        return (-scores).argsort(stable=True)
    first = (-ties).argsort(stable=True)
    return first[(-scores[first]).argsort(stable=True)]


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row (m, n) and their indices, (m, count) each; NaN only if nothing else is left.

    Examples:
        >>> largest(torch.tensor([[0.5, float("nan"), 2.0]]), 2)[1].tolist()
        [[2, 0]]
    """
    found = scores.topk(count, dim=-1)
    if not bool(found.values[..., :1].isnan().any()):  # a NaN would come first
        return found.values, found.indices
    index = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).topk(count, dim=-1).indices
    return scores.gather(-1, index), index


def eigenvectors(matrix: Tensor, where: str, notes: list[str]) -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending, clamped at zero) and eigenvectors of symmetric positive matrices (..., m, m), in float64.

    `torch.linalg.eigh` fails to converge, or silently returns NaN, on matrices with many rows of zeros (pixels that are
    always zero, units that never fire): often in float32, sometimes in float64. Such rows are eigenvectors already and
    are set aside. If it still fails, other drivers are tried, and a line is added to the notes. Nothing is ever added
    to the matrix. `where` names the matrix in messages.

    Examples:
        >>> values, vectors = eigenvectors(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), "here", [])
        >>> values.tolist(), vectors.tolist()
        ([0.0, 2.0], [[0.0, 1.0], [1.0, 0.0]])
    """
    exact = matrix.double()
    check_finite_sums(exact, where)
    live = torch.diagonal(exact, dim1=-2, dim2=-1) > 0
    if exact.dim() > 2 and not bool(live.all()):
        pairs = [eigenvectors(one, where, notes) for one in exact.flatten(0, -3)]
        values, vectors = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        return values.reshape(exact.shape[:-1]), vectors.reshape(exact.shape)
    if bool(live.all()):
        return _decompose(exact, where, notes)
    alive, dead = live.nonzero().squeeze(1), (~live).nonzero().squeeze(1)
    values, vectors = torch.zeros_like(exact[0]), torch.zeros_like(exact)
    vectors[dead, torch.arange(len(dead), device=exact.device)] = 1.0
    if len(alive):
        values[len(dead) :], vectors[alive, len(dead) :] = _decompose(exact[alive][:, alive], where, notes)
    return values, vectors


def _decompose(matrix: Tensor, where: str, notes: list[str]) -> tuple[Tensor, Tensor]:
    try:
        values, vectors = eigh(matrix)
        if bool(torch.isfinite(vectors).all()):
            return values.clamp_min(0.0), vectors
    except RuntimeError:  # torch.linalg.LinAlgError is one
        pass
    notes.append(f"the eigenvectors of {where} needed a second driver")
    pair = numpy.linalg.eigh(matrix.cpu().numpy())  # numpy uses another library than torch
    values, vectors = (torch.from_numpy(one).to(matrix.device) for one in pair)
    return values.clamp_min(0.0), vectors


def check_finite_sums(sums: Tensor, where: str) -> None:
    """Raise if sums over the gradients of the training set are not finite."""
    if not bool(torch.isfinite(sums).all()):
        raise gradients_not_finite(f"in {where}")


def gradients_not_finite(where: str) -> SingularCurvatureError:
    """The error for gradients with NaN or infinite values."""
    return SingularCurvatureError(
        f"expected finite gradients of the outputs in the weights, got NaN or infinity {where}. Look for a square "
        "root, a logarithm or a norm at zero in the model; gradients in float16 may overflow: use a float32 model, and "
        'another precision than "fp16".'
    )
