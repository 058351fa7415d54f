"""What all curvatures share: `Structure.fit` returns a `FittedCurvature`, whose `Sandwich` predicts variances."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy
import torch
from torch import Tensor

from whence.curvature.cost import Cost, ProblemSizes
from whence.data.batches import Inputs
from whence.display import Column, Shown, Table, count
from whence.errors import InputError, ShapeError, SingularCurvatureError
from whence.jacobian.linearization import Linearization


@dataclass(frozen=True)
class Groups:
    """Which training examples belong together."""

    index: Tensor  # (n,) number of each example's group, counted from zero
    total: int  # number of groups
    counted: int  # number of groups with an example of weight above zero

    @classmethod
    def of(cls, labels: Any, problem: Linearization) -> Groups:
        """From n labels of any sortable kind: numbers or words."""
        given = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else labels
        try:
            array = numpy.asarray(given)
            names, index = numpy.unique(array, return_inverse=True)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"expected groups as labels of one kind, numbers or words, got a {type(labels).__name__} that cannot "
                "be sorted. Number the groups, or make all labels strings."
            ) from error
        if array.shape != (problem.n,):
            raise ShapeError(
                f"expected groups of shape ({problem.n},), one label for each training example in the order of the "
                f"data set, got {array.shape}."
            )
        if array.dtype.kind == "f" and not numpy.isfinite(array).all():
            at = int(numpy.flatnonzero(~numpy.isfinite(array))[0])
            raise InputError(
                f"expected groups without missing labels, got {array[at]} for training example {at}. Give examples "
                "that stand alone a label of their own."
            )
        number = torch.as_tensor(index.reshape(-1), device=problem.device)
        weights = problem.sample_weights
        counted = len(names) if weights is None else len(number[weights > 0].unique())
        if counted < 2:
            raise InputError(
                f"expected at least two groups with examples that count, got {counted}. A label is for each group, "
                "not for the whole data set."
            )
        return cls(number, len(names), counted)


AROUND = 4  # ridges shown on each side of the best


@dataclass(frozen=True)
class RidgePath(Shown):
    """The leave-one-out error of the linearized model over a grid of ridges.

    Attributes:
        ridges: (g,) the grid.
        errors: (g,) mean over training examples of the squared leave-one-out residual; for other losses, of how far
            the loss at the leave-one-out prediction is above the network's own loss. The fit decides what is left out:
            single examples, positions or outputs, or whole groups.

    Examples:
        >>> import torch
        >>> RidgePath(torch.tensor([0.1, 1.0, 10.0]), torch.tensor([2.0, 1.5, 3.0]))
        RidgePath(3 ridges; smallest leave-one-out error at 1)
    """

    ridges: Tensor
    errors: Tensor

    @property
    def best(self) -> float:
        """The ridge with the smallest error."""
        return float(self.ridges[self.errors.argmin()])

    def __repr__(self) -> str:
        """Size and best."""
        return f"RidgePath({count(len(self.ridges), 'ridge')}; smallest leave-one-out error at {self.best:.3g})"

    def _table(self) -> Table:
        least = int(self.errors.argmin())
        low = max(0, min(least - AROUND, len(self.ridges) - 2 * AROUND - 1))
        here = slice(low, low + 2 * AROUND + 1)
        ridges, errors = self.ridges[here].tolist(), self.errors[here].tolist()
        columns = (
            Column("ridge", tuple(f"{ridge:.3g}" for ridge in ridges)),
            Column("error", tuple(f"{error:.5g}" for error in errors)),
            Column("", tuple("<- smallest" if low + row == least else "" for row in range(len(ridges))), left=True),
        )
        title = f"Leave-one-out error over {count(len(self.ridges), 'ridge')}"
        return Table(title, columns, f"{len(ridges)} of them around the smallest; ridges and errors hold all.")


@dataclass(frozen=True)
class NewtonStep:
    """The Newton step from the weights to the optimum of the linearized, penalised problem (the paper's Delta w)."""

    change: Tensor  # (n, k) change of the outputs on the training examples
    relative: float  # norm of the step over the norm of the weights
    direction: Tensor | None  # (d,) the step itself, if requested


@dataclass(frozen=True)
class Meats:
    """Weights of the training examples in each estimator: the meats of Ho, HeC0, HeC2 and HeC3."""

    # W_i for each estimator, (n, k, q), or (1, k, q) when all examples share it. The variance is
    # sum_i a_i W_i W_i^T a_i^T with the alignments a_i = J F_lam^-1 J_i^T
    roots: Mapping[str, Tensor]
    total: Tensor  # (n, k) the vectors u_i whose weighted sum centres the full jackknife
    deletions: int  # number of deletions in the jackknife: examples, positions, outputs or groups that count
    # examples that belong together. Every estimator but Ho sums their a_i W_i before squaring; the noise of Ho is
    # independent from example to example
    groups: Groups | None = None

    def pooled(self, name: str) -> Groups | None:
        """The groups if this estimator sums over them, else `None`."""
        return None if name == "ho" else self.groups


@dataclass(frozen=True)
class Predicted:
    """Predictions of a sandwich for one batch."""

    outputs: Tensor  # (m, k) of the network
    covariances: dict[str, Tensor]  # (m, k, k) for each estimator of the meats, and "laplace"
    # (m, k) J F_lam^-1 sum_i J_i^T u_i, which centres the full jackknife; `None` if the covariances already include the
    # jackknife
    shift: Tensor | None


MeatRoots = Callable[[slice, Tensor, Tensor], Mapping[str, Tensor]]
"""Maps a slice of the training examples, their leverage blocks (n, k, k) and the Newton step's change of their outputs
(n, k) to their weights W (n, k, q) in each heteroscedastic estimator. Weights depend on each example alone, so a
structure can compute leverages and meats in one pass."""


Alignments = Iterator[tuple[slice, Iterator[tuple[slice, Tensor]]]]
"""Yields (which inputs, chunks), some inputs at a time; chunks yield (which training examples, a (m, k, n, k))."""


NO_GROUPS = (
    'expected structure "exact" (primal or dual road), "core" or "sketch" with groups, got {}. Leaving groups out '
    "needs the products between the gradients of their members, which this structure does not keep."
)


class Sandwich(ABC):
    """F_lam^-1 M F_lam^-1 between the gradients of a test point, for the meat M of every estimator."""

    variances_alone: ClassVar[bool] = False
    """Whether variances cost markedly less than covariances, so that `variances` is worth calling."""

    @abstractmethod
    def predict(self, inputs: Inputs) -> Predicted:
        """Covariances of the outputs for one batch."""

    def variances(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs (m, k), and variances (m, k) by name, including the jackknife's; only with `variances_alone`."""
        raise NotImplementedError(f"{type(self).__name__} gives covariances; call predict.")


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedCurvature(ABC):
    """A fitted curvature: leverage blocks, Newton step, alignments and the sandwich."""

    problem: Linearization  # the linearized training problem
    ridge: float  # lambda, on the sum scale
    leverage_blocks: Tensor  # (n, k, k) blocks J_i F_lam^-1 J_i^T of the training examples
    notes: list[str]  # what was approximated or repaired, in words
    path: RidgePath | None = None  # the leave-one-out curve, if the ridge was chosen by it

    @property
    def degrees_of_freedom(self) -> float:
        """Trace of the hat matrix: sum_i trace of R_i^T Q_i R_i, from the leverage blocks Q (n, k, k)."""
        roots, blocks = self.problem.hessian_roots, self.leverage_blocks
        if self.problem.identity_hessians:
            return float(blocks.diagonal(dim1=1, dim2=2).sum())
        return float((roots * (blocks @ roots)).sum())

    @abstractmethod
    def newton_step(self, with_direction: bool) -> NewtonStep:
        """The step to the optimum of the linearized problem."""

    @abstractmethod
    def sandwich(self, meats: Meats) -> Sandwich:
        """The sandwich that predicts variances, from the examples' weights in each estimator."""

    def group_leverage_blocks(self, groups: Groups) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (members (g, size), blocks J_g F_lam^-1 J_g^T (g, size k, size k)), as many groups as memory allows."""
        raise InputError(NO_GROUPS.format(type(self).__name__))

    @abstractmethod
    def alignments(self, inputs: Inputs) -> Alignments:
        """Alignments a_i = J F_lam^-1 J_i^T of one batch with every training example.

        Yields (which inputs, chunks) for as many inputs as memory allows at once; chunks yield (which training
        examples, a (m, k, n, k)) in order, in the precision of the computation, and must be read before the next
        inputs are requested. Nothing of size n times the number of parameters is ever held.
        """

    def training_alignments(self, index: Tensor) -> Tensor | None:
        """Alignments (s, k, n, k) of training examples with every one, without their gradients; `None` if that fails.

        It takes features of the training examples that are in memory. `index` (s,) is ascending.
        """
        return None

    @abstractmethod
    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """J F_lam^-1 J'^T of one batch with the inputs of other batches, (m, k, p, k)."""

    def precondition(self, vectors: Tensor) -> Tensor:
        """Approximate F_lam^-1 v for vectors (q, d), symmetric and positive: preconditions exact solves."""
        return vectors / self.ridge if self.ridge > 0 else vectors

    def to_dense(self) -> Tensor:
        """The inverse curvature behind leverages, alignments and predictions, as one (d, d) matrix."""
        problem = self.problem
        return self.precondition(torch.eye(problem.selection.size, dtype=problem.dtype, device=problem.device))


class Structure(ABC):
    """Options of a curvature that is not fitted yet."""

    name: ClassVar[str]
    # default formula for leave-one-out residuals from this structure's leverages
    policy: ClassVar[Literal["exact", "one_plus_q"]] = "exact"
    tf32: ClassVar[bool] = False  # whether its results stay the same when products are rounded to TF32
    takes_groups: ClassVar[bool] = False  # whether whole groups of examples can be left out
    # whether all its passes are sums over examples, which processes can share and checkpoints resume
    additive: ClassVar[bool] = False

    def resolve(self, problem: Linearization, ridge: float | None) -> tuple[Structure, str]:
        """The structure to fit, and why: itself and "", unless it chooses among others, as `Auto` does."""
        return self, ""

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit to a problem of these sizes, for `whence.estimate`."""
        raise InputError(
            f"expected a structure with a method `cost`, got {type(self).__name__}, whose needs only its author knows. "
            "Define cost(sizes), as whence.curvature.Core does."
        )

    @abstractmethod
    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots) -> FittedCurvature:
        """Fit the curvature at a ridge lambda on the sum scale, or one chosen by leave-one-out if it is `None`.

        `meat_roots` gives the weights that `sandwich` will need, to structures that sum meats and leverages together.
        """


def times_hessian(vectors: Tensor, roots: Tensor, where: slice | Tensor = slice(None)) -> Tensor:
    """L_i v_i for vectors (..., n, k) of some examples and Hessians L = R R^T."""
    some = roots[where]
    return torch.einsum("nkq,...nq->...nk", some, torch.einsum("nkq,...nk->...nq", some, vectors))


def multiple_of_hessians(root: Tensor, problem: Linearization) -> float | None:
    """The factor c if W_i W_i^T = c L_i for the weights W (n, k, q) of all examples, else `None`."""
    roots = problem.hessian_roots
    if root.shape != roots.shape:
        return None
    times = float(root.norm() / roots.norm().clamp_min(torch.finfo(root.dtype).tiny))
    near = max(1e-9, 16 * torch.finfo(root.dtype).eps)
    return times**2 if torch.allclose(root, times * roots, rtol=near, atol=1e-3 * near * times) else None


def singular(ridge: float, null: int, size: int, more: str = "") -> SingularCurvatureError:
    """The error for a curvature that has no inverse."""
    return SingularCurvatureError(
        f"expected an invertible curvature, got at least {null} of {size} directions without information at "
        f"ridge={ridge:g}. Raise `ridge` (for example to n times the weight decay), or select fewer parameters.{more}"
    )


class AdditiveStructure(Structure):
    """A structure whose passes are sums over the data, and whose results stay the same with rounded products."""

    tf32: ClassVar[bool] = True
    additive: ClassVar[bool] = True
