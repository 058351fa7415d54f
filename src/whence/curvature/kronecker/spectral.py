"""EKFAC, KFAC and the diagonal: one curvature that is diagonal in a basis, whichever basis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from whence.curvature.base import Alignments, Bread, Meats, NewtonStep, Predicted, RidgePath, Sandwich, Weigh
from whence.tangents.batches import Inputs, batch_size, take
from whence.tangents.forms import Tangent

from .align import align
from .basis import Basis
from .factored import Factored, Parts, complement_of, seen_once
from .meats import MeatSums, centre, gather_meats
from .moments import Spectrum, Squares, check_invertible, states
from .stream import LayerStream, working_precision
from .view import View, views
from .weights import Weights, sum_of, times_noise

BATCH = 500
"""Training examples that are taken to be multiplied with at once, where memory is planned."""


class SpectralBread(Bread):
    """F ~ U diag(s) U^T, block by block: every estimator is a weighted sum of squares of U^T phi.

    Attributes:
        bases: U of each block.
        spectrum: s of each block, and what was summed along with it.
    """

    def __init__(
        self,
        stream: LayerStream,
        bases: Sequence[Basis],
        spectrum: Spectrum,
        ridge: float,
        noise: Tensor,
        facts: list[str],
        weigh: Weigh | None,
    ) -> None:
        """Take leverage blocks, the Newton step's effect and, where the weights are known, the meats in one pass."""
        self.stream = stream
        self.problem = stream.problem
        self.bases = bases
        self.spectrum = spectrum
        self.ridge = ridge
        self.noise = noise
        self.path: RidgePath | None = None
        self.facts = facts
        check_invertible(bases, spectrum.curvature, ridge)
        freedom = sum(
            float((s.inside / (s.inside + ridge)).sum()) + basis.outside * s.outside / (s.outside + ridge or 1.0)
            for s, basis in zip(spectrum.curvature, bases, strict=True)
        )
        self.degrees_of_freedom = float(stream.together(torch.tensor([freedom], dtype=torch.float64, device="cpu")))
        selected = self.problem.selection.parameters
        self._step = []
        for at, (score, basis) in enumerate(zip(spectrum.score, bases, strict=True)):
            here = {name: selected[name].detach().double() for name in basis.block.parameters}
            self._step.append(self.solve(at, score - ridge * basis.block.to_matrix(here)))
            self.problem.passes.give_back()
        self._meats: MeatSums | None = None
        self.hats, self._change = self._leverage(weigh)

    def solve(self, at: int, matrix: Tensor) -> Tensor:
        """F_lam^-1 times something shaped as the matrix of block `at`."""
        basis = self.bases[at].to(matrix.dtype)
        squares = self.spectrum.curvature[at]
        weights = 1.0 / (squares.inside + self.ridge)
        if not basis.outside:
            return basis.out_of(basis.into(matrix) * weights.to(matrix.dtype))
        beyond = 1.0 / (squares.outside + self.ridge)  # inside too, and less of it there: nothing as large in between
        solved = basis.out_of(basis.into(matrix) * (weights - beyond).to(matrix.dtype))
        return solved.add_(matrix, alpha=beyond)

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w), with this curvature for F."""
        squared = torch.tensor(
            [sum(float(step.square().sum()) for step in self._step)], dtype=torch.float64, device="cpu"
        )
        size = float(self.stream.together(squared)) ** 0.5
        weights = self.problem.weights()
        relative = size / max(float(weights.norm()), torch.finfo(torch.float64).tiny)
        direction = None
        if with_direction:
            direction = self.stream.joined(self._step).to(self.problem.dtype)
        return NewtonStep(self._change, relative, direction)

    def sandwich(self, meats: Meats) -> SpectralSandwich:
        """Squares of the weighted gradients in the same basis."""
        roots = dict(meats.roots)
        scale = times_noise(roots.get("ho"), self.problem.hessian_roots, self.noise)
        if scale is not None:
            del roots["ho"]
        if self._meats is not None:
            squares, total = self._meats.finish()
            rest = {name: root for name, root in roots.items() if name not in squares}
            if rest:
                squares.update(gather_meats(self.stream, self.open_meats(rest), rest).finish()[0])
        else:
            squares, total = gather_meats(self.stream, self.open_meats(roots), roots).finish()

        def of(at: int) -> Iterator[Squares]:
            if scale is not None:
                yield self.spectrum.noise[at].times(scale)
            yield from (one[at] for one in squares.values())
            yield centre(self.bases[at], squares["hec3"][at], total[at], meats.deletions)

        return SpectralSandwich.make(self, [*["ho"] * (scale is not None), *squares, "jackknife"], of)

    def open_meats(self, roots: Mapping[str, Tensor]) -> MeatSums:
        """Where the squares of the weighted gradients are summed."""
        return MeatSums(self.bases, roots, self.problem.device)

    def alignments(self, inputs: Inputs) -> Alignments:
        """Precondition the gradients of the inputs, then contract them with the layers of the training examples."""
        for where, directions in self._preconditioned(inputs):
            yield where, self._align(directions, where.stop - where.start, self.problem.seen(inputs))

    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """The same with the layers of other inputs."""
        k, j = self.problem.seen(inputs), self.problem.seen(others[0])
        found = []
        for where, directions in self._preconditioned(inputs):
            m = where.stop - where.start
            parts = [
                self._contract(tangents, directions, (len(out), j, m, k))
                for batch in others
                for _, tangents, out in self.stream.of(batch, 0, self.stream.identity(j), j)
            ]
            found.append(torch.cat(parts, dim=2))
        return torch.cat(found).to(self.problem.dtype)

    def precondition(self, vectors: Tensor) -> Tensor:
        """The inverse of this curvature."""
        given = self.problem.selection.unflatten(vectors.double())
        solved = [self.solve(at, basis.block.to_matrix(given)) for at, basis in enumerate(self.bases)]
        return self.stream.joined(solved, len(vectors)).to(vectors.dtype)

    def at(self, ridge: float, weigh: Weigh | None) -> SpectralBread:
        """The same bases and eigenvalues: one pass, for the leverages and the meats."""
        return SpectralBread(self.stream, self.bases, self.spectrum, ridge, self.noise, [], weigh)

    def _preconditioned(self, inputs: Inputs) -> Iterator[tuple[slice, list[Tensor | Factored]]]:
        """F_lam^-1 J^T of some inputs at a time, (m k, *shape) for each block, or factored where that serves."""
        problem, precision = self.problem, working_precision(self.problem)
        k = problem.seen(inputs)
        size = batch_size(inputs, "this batch")
        most = max(1, int(0.05 * problem.budget.limit) // self._row(inputs, k, precision))
        outside = [complement_of(basis, precision) for basis in self.bases]
        for low in range(0, size, most):
            where = slice(low, min(low + most, size))
            pieces: list[list[Tensor | Parts]] = [[] for _ in self.bases]
            for _, tangents, _ in self.stream.of(take(inputs, where), 0, self.stream.identity(k), k):
                for at, (tangent, basis) in enumerate(zip(tangents, self.bases, strict=True)):
                    once = seen_once(tangent)
                    if once is not None:
                        pieces[at].append(Parts.of(once, basis, precision, outside[at]))
                    else:
                        pieces[at].append(self.solve(at, tangent.materialize().flatten(0, 1).to(precision)))
            yield where, [self._joined(at, piece, outside[at]) for at, piece in enumerate(pieces)]

    def _joined(self, at: int, pieces: Sequence[Tensor | Parts], complement: Tensor | None) -> Tensor | Factored:
        """The preconditioned gradients of one block; factored where all of them are seen once."""
        basis, parts = self.bases[at], [one for one in pieces if isinstance(one, Parts)]
        if len(parts) == len(pieces):
            return Factored.of(parts, basis, self.spectrum.curvature[at], self.ridge, complement)
        whole = [self.solve(at, one.matrices(basis, complement)) if isinstance(one, Parts) else one for one in pieces]
        return torch.cat(whole)

    def _row(self, inputs: Inputs, k: int, precision: torch.dtype) -> int:
        """Bytes that the preconditioned gradients of one input take, and its products with a batch of examples."""
        numbers = min(self.problem.n, BATCH) * self.problem.k * k
        for _, tangents, _ in self.stream.of(take(inputs, slice(0, 1)), 0, self.stream.identity(k), k):
            for tangent, basis in zip(tangents, self.bases, strict=True):  # one seen once is kept factored
                numbers += k * basis.block.numel if seen_once(tangent) is None else math.prod(basis.shape)
        return numbers * torch.finfo(precision).bits // 8

    def _align(self, directions: list[Tensor | Factored], m: int, k: int) -> Iterator[tuple[slice, Tensor]]:
        c = self.problem.k
        for where, tangents in self.stream.read("alignments", self.stream.identity(), c):
            yield where, self._contract(tangents, directions, (where.stop - where.start, c, m, k))

    def _fitting(self, at: int, tangent: Tangent, one: Tensor | Factored) -> Tensor | Factored:
        """Directions as matrices where gradients that they are multiplied with are not seen once, as they are."""
        if not isinstance(one, Factored) or seen_once(tangent) is not None:
            return one
        return self.solve(at, one.parts.matrices(self.bases[at], one.complement))

    def _contract(
        self, tangents: Sequence[Tangent], directions: list[Tensor | Factored], shape: tuple[int, int, int, int]
    ) -> Tensor:
        """(m, k, n, c) inner products of all gradients with all directions (m k, ...), summed over blocks."""
        n, c, m, k = shape
        for at, (tangent, one) in enumerate(zip(tangents, directions, strict=True)):
            directions[at] = self._fitting(at, tangent, one)
        summed = [  # (n, c, m k)
            one.align(tangent) if isinstance(one, Factored) else align(tangent, one)
            for tangent, one in zip(tangents, directions, strict=True)
        ]
        whole = self.stream.together(sum_of(summed, (n, c, m * k), self.problem))
        return whole.reshape(n, c, m, k).permute(2, 3, 0, 1)

    def _leverage(self, weigh: Weigh | None) -> tuple[Tensor, Tensor]:
        problem = self.problem
        hats = torch.zeros(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        change = torch.zeros(problem.n, problem.k, dtype=problem.dtype, device=problem.device)
        precision = working_precision(problem)
        weights = [
            Weights.of(basis, [(1.0 / (s.inside + self.ridge), 1.0 / (s.outside + self.ridge or 1.0))], 1, precision)
            for basis, s in zip(self.bases, self.spectrum.curvature, strict=True)
        ]
        steps = [
            (step if basis.outside else basis.to(step.dtype).into(step)).to(precision)
            for step, basis in zip(self._step, self.bases, strict=True)
        ]
        state, given = {"hats": hats, "change": change}, [one for w in weights for one in (w.inside, w.outside)] + steps
        if weigh is not None:  # no examples tell how many weights each will have
            none = slice(0, 0)
            self._meats = self.open_meats(weigh(none, hats[none], change[none]))
            state.update(states(self.stream, self._meats.sums))
            given += self._meats.given
        for where, tangents in self.stream.read("leverage", self.stream.identity(), problem.k, state, given):
            ready = self.stream.views(tangents, self.bases)
            for at, view in enumerate(ready):
                hats[where] += weights[at].grams(view)[0]
                change[where] += view.along(steps[at])
                if self._meats is None or self._meats.in_views_alone:
                    view.let_go()
                del view
            self.stream.together(hats[where])
            self.stream.together(change[where])
            if weigh is not None and self._meats is not None:
                self._meats.add(ready, weigh(where, hats[where], change[where]))
            self.stream.forget(where)
            self.stream.spare(ready)
            del ready, tangents  # the next piece needs the room
        return hats, change


@dataclass(frozen=True)
class SpectralSandwich(Sandwich):
    """Weighted sums of squares of U^T phi.

    Attributes:
        names: estimators, in the order of the weights.
        weights: of each block: d / (s + lambda)^2 for each meat, 1 / (s + lambda) for Laplace.
    """

    variances_alone: ClassVar[bool] = True

    bread: SpectralBread
    names: tuple[str, ...]
    weights: list[Weights]

    @classmethod
    def make(
        cls, bread: SpectralBread, meats: Sequence[str], of: Callable[[int], Iterator[Squares]]
    ) -> SpectralSandwich:
        """Divide by the bread on both sides, one block and one meat at a time."""
        precision = working_precision(bread.problem)
        names = (*meats, "laplace")
        weights = []
        for at, curvature in enumerate(bread.spectrum.curvature):
            inside, outside = curvature.inside + bread.ridge, curvature.outside + bread.ridge or 1.0
            # One division after the other: squares of small and large ridges are no numbers.
            pairs = ((one.inside / inside / inside, one.outside / outside / outside) for one in of(at))
            each = chain(pairs, [(1.0 / inside, 1.0 / outside)])
            weights.append(Weights.of(bread.bases[at], each, len(names), precision))
        return cls(bread, names, weights)

    def predict(self, inputs: Inputs) -> Predicted:
        """One forward pass, k backward passes, and a few products."""
        dtype = self.bread.problem.dtype
        outputs, grams = self._sum(inputs, lambda weights, view: weights.grams(view), 2)
        return Predicted(outputs.to(dtype), dict(zip(self.names, grams.to(dtype), strict=True)), None)

    def variances(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The same without the covariances between outputs: gradients are read once for all estimators."""
        dtype = self.bread.problem.dtype
        outputs, found = self._sum(inputs, lambda weights, view: weights.variances(view), 1)
        return outputs.to(dtype), dict(zip(self.names, found.to(dtype), strict=True))

    def _sum(self, inputs: Inputs, of: Callable[[Weights, View], Tensor], sides: int) -> tuple[Tensor, Tensor]:
        """Outputs, and sums over blocks of something (w, n, k) or (w, n, k, k), with one or two sides."""
        stream, k = self.bread.stream, self.bread.problem.seen(inputs)
        outputs, sums = [], []
        with stream.by_few_threads(batch_size(inputs, "this batch"), k):
            for _, tangents, out in stream.of(inputs, 0, stream.identity(k), k):
                ready = views(tangents, self.bread.bases, self.bread.problem.device)
                found = [of(weights, one) for weights, one in zip(self.weights, ready, strict=True)]
                shape = (len(self.names), len(out), *[k] * sides)
                sums.append(stream.together(sum_of(found, shape, self.bread.problem)))
                outputs.append(out)
                stream.spare(ready)
                del ready, tangents  # the next piece needs the room
        return torch.cat(outputs), torch.cat(sums, dim=1)
