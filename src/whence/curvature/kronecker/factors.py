"""Kronecker factors of every block, in one pass over the training set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature.eigen import eigenvectors
from whence.tangents.forms import Block, Dense, Kronecker, Rows, Tangent, Whole

from .basis import Basis
from .rotate import raised
from .stream import LayerStream

LONGEST_SUM = 8192
"""Rows whose products are summed in their own precision."""


@dataclass
class Factors:
    """Sums of a a^T and g g^T of one block, in float64.

    Attributes:
        inputs: (e, i, i) of a kronecker block, (p, p) of a dense one; `None` where there is none.
        outputs: (e, o, o) of a kronecker block, (1, d, d) of a row block.
        positions: number of (example, position) pairs summed, counted by the weights of the examples.
    """

    block: Block
    inputs: Tensor | None
    outputs: Tensor | None
    positions: float = 0.0

    @classmethod
    def empty(cls, block: Block, largest_exact: int, device: torch.device) -> Factors:
        """Zeros of the right sizes; dense blocks above `largest_exact` entries get no matrix."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        if block.kind == "kronecker":
            e, o, i = block.matrix_shape
            return cls(block, zeros(e, i, i), zeros(e, o, o))
        if block.kind == "rows":
            d = block.matrix_shape[1]
            return cls(block, None, zeros(1, d, d))
        exact = block.numel <= largest_exact
        return cls(block, zeros(block.numel, block.numel) if exact else None, None)

    def add(self, tangent: Tangent, weights: Tensor | None = None) -> None:
        """Count one piece of the training set; gradients hold the roots of the examples' weights (n,) already."""
        share = 1.0 if weights is None or not len(weights) else float(weights.mean())
        if isinstance(tangent, Kronecker):
            a, g = raised(tangent.inputs()), raised(tangent.grads())
            self.positions += share * tangent.examples * tangent.positions
            a = a if weights is None else a * weights.sqrt().to(a.dtype).reshape(-1, 1, 1, 1)
            _add(self.inputs, _second_moment(a.transpose(0, 1).flatten(1, 2)))
            _add(self.outputs, _second_moment(g.permute(2, 0, 1, 3, 4).flatten(1, 3)))
        elif isinstance(tangent, Dense):
            if self.inputs is not None:
                _add(self.inputs, _second_moment(raised(tangent.values).flatten(0, 1)))
        else:
            values = raised(tangent.aggregate().values)
            self.positions += share * tangent.index.numel()
            _add(self.outputs, _second_moment(values.flatten(0, 1)).unsqueeze(0))

    def add_weighted(self, tangent: Tangent) -> None:
        """Count the matrices G of one piece by G^T G and G G^T: the factors that fit their own second moment best."""
        if not isinstance(tangent, Kronecker):
            self.add(tangent)
            return
        a, g = raised(tangent.inputs()), raised(tangent.grads())
        alike_out = torch.einsum("nceto,nceso->nets", g, g)
        alike_in = torch.einsum("neti,nesi->nets", a, a)
        _add(self.inputs, torch.einsum("neti,netj->eij", a, alike_out @ a))
        _add(self.outputs, torch.einsum("nceto,ncetp->eop", g, torch.einsum("nets,nceso->nceto", alike_in, g)))

    def basis(self, facts: list[str]) -> tuple[Basis, Tensor | None]:
        """The Kronecker eigenbasis, and KFAC's eigenvalues in it (kronecker blocks only)."""
        name = self.block.name
        inputs = outputs = spectrum = below = above = None
        if self.inputs is not None:
            below, inputs = eigenvectors(self.inputs, f"the input factor of {name}", facts)
        if self.outputs is not None:
            above, outputs = eigenvectors(self.outputs, f"the output factor of {name}", facts)
        if above is not None and below is not None:
            spectrum = above.unsqueeze(-1) * below.unsqueeze(-2) / (self.positions or 1.0)
        elif below is not None:
            spectrum = below
        return Basis(self.block, inputs, outputs), spectrum


def _second_moment(rows: Tensor) -> Tensor:
    """Rows (..., m, i) to (..., i, i), summed in float64 where they are many, or small eigenvalues would drown."""
    parts = rows.split(LONGEST_SUM * (32 if rows.is_cuda else 1), dim=-2)  # a GPU sums in tiles, and calls cost more
    if len(parts) == 1 or rows.dtype == torch.float64:
        return rows.transpose(-1, -2) @ rows
    total = torch.zeros(*rows.shape[:-2], rows.shape[-1], rows.shape[-1], dtype=torch.float64, device=rows.device)
    for part in parts:
        total += part.transpose(-1, -2) @ part
    return total


def _add(total: Tensor | None, value: Tensor) -> None:
    """Sums of many batches are kept in float64, so that small eigenvalues survive a million examples."""
    assert total is not None
    total.add_(value)


def combine(tangent: Tangent, weights: Tensor) -> Tangent:
    """Other cotangents as combinations of those pulled back: weights (n, c, q)."""
    if isinstance(tangent, Kronecker):
        grads = raised(tangent.grads())
        weights = weights.to(grads.dtype)
        if grads.shape[1] == 1:
            mixed = grads * weights.reshape(len(grads), -1, 1, 1, 1)
        else:
            mixed = torch.einsum("nceto,ncq->nqeto", grads, weights)
        return Kronecker(tangent.block, tangent.a, Whole(mixed))
    if isinstance(tangent, Rows):
        grads = raised(tangent.grads)
        mixed = torch.einsum("nctd,ncq->nqtd", grads, weights.to(grads.dtype))
        return Rows(tangent.block, tangent.index, mixed, tangent.weights)
    values = raised(tangent.values)
    turned = weights.transpose(1, 2).to(values.dtype)  # (n, q, c)
    return Dense(tangent.block, turned * values if values.shape[1] == 1 else turned @ values)


def gather_factors(
    stream: LayerStream, largest_exact: int, residual_weighted: bool
) -> tuple[list[Factors], list[Factors] | None]:
    """One pass: factors of the curvature, and, where asked for, of the residual-weighted meat."""
    problem = stream.problem
    plain = [Factors.empty(block, largest_exact, problem.device) for block in stream.blocks]
    weighted = [Factors.empty(block, largest_exact, problem.device) for block in stream.blocks]
    for where, tangents in stream.read("Kronecker factors", stream.identity(), problem.k):
        for at, tangent in enumerate(tangents):
            roots = problem.hessian_roots
            weights = None if problem.sample_weights is None else problem.sample_weights[where]
            plain[at].add(tangent if roots is None else combine(tangent, roots[where]), weights)
            if residual_weighted:
                weighted[at].add_weighted(combine(tangent, problem.residuals[where].unsqueeze(2)))
    return plain, weighted if residual_weighted else None
