"""Symmetric products, triangular solves, eigendecompositions, and the order of scores."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from whence.errors import SingularCurvatureError
from whence.runtime.model_state import one_thread

SMALL = 512  # matrices up to this size are decomposed in less time by one thread than by two


MANY, MATRICES = 2**15, 2**12  # numbers, and matrices, that are decomposed at once on a GPU


def few_at_once(matrices: Tensor, most: int | None = None) -> tuple[Tensor, ...]:
    """Small matrices (n, k, k) in pieces that may be decomposed at once; in one piece on a CPU.

    cuSOLVER takes a workspace of 300 kB and more for the eigenvectors of each matrix, however small: 15 GB for 50,000
    examples of ten classes. A piece has `MANY` numbers and `MATRICES` matrices at most.

    Examples:
        >>> [len(piece) for piece in few_at_once(torch.zeros(5, 3, 3), most=18)]
        [2, 2, 1]
    """
    if most is None and not matrices.is_cuda:
        return (matrices,)
    each = max(1, matrices.shape[-1] * matrices.shape[-2])
    pieces: tuple[Tensor, ...] = matrices.split(min(MATRICES, max(1, (MANY if most is None else most) // each)))
    return pieces


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh` of (..., m, m): eigenvalues, ascending, and eigenvectors.

    Over small matrices several threads mostly wait for one another.

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


PANELS = 4  # at least so many make a symmetric product, with 5/8 of the products of the whole or less
NARROWEST, WIDEST = 64, 512  # columns of one: of fewer a second thread has too little to do, of more little is gained


def panels(size: int) -> list[slice]:
    """Columns of a matrix in parts, from left to right.

    Examples:
        >>> panels(150)
        [slice(0, 64, None), slice(64, 128, None), slice(128, 150, None)]
    """
    step = min(max(-(-size // (16 * PANELS)) * 16, NARROWEST), WIDEST)
    return [slice(low, min(low + step, size)) for low in range(0, size, step)]


def add_gram(matrix: Tensor, rows: Tensor) -> None:
    """Add rows^T rows to a matrix (r, r), of perhaps higher precision: below the diagonal, `mirror` does the rest."""
    for here in panels(len(matrix)):
        matrix[here, : here.stop] += rows[:, here].T @ rows[:, : here.stop]


def mirror(matrix: Tensor) -> Tensor:
    """Copy what `add_gram` has summed up below the diagonal to above it, in place.

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
    """C^-1 B for lower triangles C and B (r, r), without most of their zeros.

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
    """About the largest eigenvalue of the inverse of C C^T, for a Cholesky factor C: by power iteration, from below.

    Examples:
        >>> round(inverse_norm(torch.diag(torch.tensor([1.0, 0.5, 0.1]))), 3)
        100.0
    """
    vector = factor.new_ones(len(factor), 1)
    for _ in range(steps):
        vector = torch.cholesky_solve(vector / vector.norm(), factor)
    return float(vector.norm())


def largest_first(scores: Tensor, ties: Tensor | None = None) -> Tensor:
    """Places of the scores (n,) from the largest to the smallest, NaN last; equal ones in the order they come in.

    Unless `ties` (n,) order equal scores, the largest first.

    Examples:
        >>> largest_first(torch.tensor([0.5, float("nan"), 2.0, 1.0])).tolist()
        [2, 3, 0, 1]
    """
    if ties is None:
        return (-scores).argsort(stable=True)
    first = (-ties).argsort(stable=True)
    return first[(-scores[first]).argsort(stable=True)]


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row (m, n) and their places, (m, count) each; NaN only where there is nothing else.

    Examples:
        >>> largest(torch.tensor([[0.5, float("nan"), 2.0]]), 2)[1].tolist()
        [[2, 0]]
    """
    found = scores.topk(count, dim=-1)
    if not bool(found.values[..., :1].isnan().any()):  # a NaN would lead
        return found.values, found.indices
    index = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).topk(count, dim=-1).indices
    return scores.gather(-1, index), index


def eigenvectors(matrix: Tensor, where: str, notes: list[str]) -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending, clamped at zero) and eigenvectors of symmetric positive matrices (..., m, m), in float64.

    `torch.linalg.eigh` fails to converge, or gives NaN without a word, on matrices with many rows of zeros (pixels that
    are always zero, units that never fire): in float32 often, in float64 now and then. Such rows are eigenvectors
    already and are set aside. Where it fails all the same, other drivers are tried, and the notes get a line; nothing
    is ever added to the matrix. `where` names the matrix in messages.

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
    values, vectors = second_driver(matrix)
    return values.clamp_min(0.0), vectors


def second_driver(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The same by numpy, which is built with another library than torch."""
    values, vectors = (torch.from_numpy(one).to(matrix.device) for one in numpy.linalg.eigh(matrix.cpu().numpy()))
    return values, vectors


def check_finite_sums(sums: Tensor, where: str) -> None:
    """Raise when sums over the gradients of the training set are not finite."""
    if not bool(torch.isfinite(sums).all()):
        raise gradients_not_finite(f"in {where}")


def gradients_not_finite(where: str) -> SingularCurvatureError:
    """The error for gradients that are NaN or infinite somewhere."""
    return SingularCurvatureError(
        f"expected finite gradients of the outputs in the weights, got NaN or infinity {where}. Look for a square "
        "root, a logarithm or a norm at zero in the model; gradients in float16 may overflow: use a float32 model, and "
        'another precision than "fp16".'
    )
