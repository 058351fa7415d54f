"""Leverage and neighbours of a prediction in a metric without labels.

The gradient g of a prediction is compared with the gradients g_i of the training examples' own predictions. It is the
gradient of the predicted class's output, or of all outputs of a regression or of several labels. Neither a Hessian of
the loss nor a residual is used, so that all losses and all structures share the same leverages

    q = g^T (sum_i g_i g_i^T + lambda)^-1 g

and the same weights of the training examples, a_i^2 with the alignments a_i = g^T (...)^-1 g_i. Logits have no unit, so
gradients of classes are scaled to length one, and lambda equals the contribution of one training example: q is
1 / (1 + c) for c training examples like this one. For regression lambda is the ridge of the fit.

For classes, distances between inputs of the last layer count too: see `whence.influence.features`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature.accumulate import ConstantCotangents, LayerGradients, working_precision
from whence.curvature.leaves import LeafFeatures, leading_directions
from whence.curvature.primal import Projected, sketch_features, times_lower
from whence.data.batches import Inputs
from whence.influence.features import LastFeatures, has_several_labels, outputs_and_features
from whence.influence.fitted import Fitted, predicted_outputs
from whence.jacobian.leaves import LeafSum
from whence.jacobian.views import OutputView, SelectedOutputs
from whence.linalg import eigh, solve_lower
from whence.runtime.execution import partial_data_error

FEATURES = 2048
"""Number of random projections of a gradient, if there are more weights."""

LEADING = 384
"""Number of leading directions of these, for classes if none of many examples are named. Along all others only the
length counts. With a network that has seen 50,000 images of MNIST once, 96 % of verdicts are the same as along all
2,048 (`benchmarks/price.py`)."""

LEAF_FEATURES = 768
"""Number of leading directions of the leaves of trees, if there are more leaves."""

ITERATIONS = 3
"""Steps of the subspace iteration that finds leading directions."""

FEATURE_SHARE = 0.2
"""Largest share of the fit's memory for the features of all training examples."""

LEAST_RIDGE = 1e-9
"""Lambda for a regression without a ridge, in units of the mean squared length of the gradients."""

MOST_DIRECTIONS = 4
"""Number of directions of outputs, for a regression or if every output has its own label."""

WEIGHED_AT_ONCE = 2**24
"""Numbers (predictions times training examples) that are computed at once."""


@dataclass(frozen=True)
class Neighbours:
    """Gradients of the training examples' predictions, whitened by their own second moments."""

    features: Projected | LeafFeatures
    directions: Tensor | None  # (c, k) directions of outputs; `None` for the output of the predicted class
    unit_length: bool  # whether gradients have length one
    leading: Tensor | None  # (features, r) leading directions of the features, if not all of them are kept
    whitening: Tensor  # (r, r) a lower triangle, whose transpose is a root W of (sum_i g_i g_i^T + lambda)^-1
    # (n, c, r) W^T g_i of the training examples; zero for those that do not count. If directions leave out part of the
    # gradient, (n, c, r + c): the last c coordinates hold the length of that part
    gradients: Tensor
    outside: float  # lambda, plus the second moment of the training examples along directions that are left out
    notes: tuple[str, ...]  # what is approximated

    @classmethod
    def of(
        cls, fitted: Fitted, codes: tuple[float, float] | None, quick: bool = False
    ) -> tuple[Neighbours, Tensor, LastFeatures | None]:
        """Compute them in one pass over the training data, within `using_model`.

        Also returns (n, 2) the network's probabilities for its own answers and how often two labels drawn from its
        probabilities differ, and the features of its last layer with these answers; the latter is `None` without
        classes or without such a layer.

        Args:
            fitted: the fit.
            codes: target values for other classes and for the class itself; `None` without classes.
            quick: for classes, compare gradients along few leading directions.
        """
        problem, classes = fitted.problem, codes is not None
        one_class = classes and not has_several_labels(fitted)
        directions = None if one_class else output_directions(problem.width).to(problem.device)
        item = torch.finfo(problem.dtype).bits // 8
        each = problem.n * (1 if directions is None else len(directions)) * item
        affordable = max(1, int(FEATURE_SHARE * problem.budget.limit / each))
        model = problem.network.model
        features: Projected | LeafFeatures
        if isinstance(model, LeafSum):
            features = leaf_features(fitted, model, min(LEAF_FEATURES, affordable))
        else:
            features = sketch_features(LayerGradients(problem), min(FEATURES, affordable), seed=0)
        found, seen = [], 0
        moments = torch.zeros(features.size, features.size, dtype=torch.float64, device=problem.device)
        last: list[LastFeatures | None] = []
        counted = fitted.counted
        for batch in problem.batches.plain("gradients of predictions"):
            rows, outputs, left, given = prediction_gradients(fitted, batch.inputs, features, directions, classes)
            these = slice(seen, seen + len(rows))
            seen = these.stop
            rows = torch.where(counted[these].reshape(-1, 1, 1), rows, 0.0)
            flat = rows.flatten(0, 1).double()
            moments += flat.T @ flat
            found.append((rows, torch.stack(predicted_probability(fitted, outputs, codes, these), 1), left))
            last.append(LastFeatures.of(fitted, outputs, given, codes))
        if seen != problem.n:
            raise partial_data_error()
        gradients = torch.cat([rows for rows, _, _ in found]) if found else moments.new_empty(0)
        ridge = float(moments.trace()) / max(1, int(counted.sum()))
        ridge = ridge if classes else max(fitted.bread.ridge, LEAST_RIDGE * ridge)
        ridge = outside = ridge if ridge > 0 else 1.0
        leading, rest = None, None
        if quick and classes and isinstance(features, Projected) and features.size > LEADING:
            leading, moments, mean = leading_subspace(moments, LEADING)
            leading, outside = leading.to(gradients.dtype), ridge + mean
            gradients, rest = along(gradients, leading, gradients.square().sum(2))
            rest = rest / outside
        moments.diagonal().add_(ridge)
        eye = torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
        whitening = solve_lower(torch.linalg.cholesky(moments), eye)
        single = classes and not whitening.is_cuda  # lambda is large, so single precision suffices, but TF32 does not
        whitening = whitening.to(working_precision(problem) if single else problem.dtype)
        notes = []
        if features.size < problem.selection.size:
            what = "leading directions" if isinstance(features, LeafFeatures) else "random projections"
            notes.append(
                f"Gradients are compared in {features.size:,} {what}, not in all {problem.selection.size:,} weights."
            )
        if leading is not None:
            notes.append(
                f"Gradients are compared along their {len(moments)} leading directions. Along all others only their "
                "length counts."
            )
        if directions is not None and len(directions) < problem.width:
            notes.append(
                f"Gradients are those of {len(directions)} random combinations of the {problem.width:,} outputs, not "
                "of each output."
            )
        white = times_lower(gradients.to(whitening.dtype), whitening)
        if isinstance(features, LeafFeatures):
            left_out = torch.cat([some for _, _, some in found if some is not None])
            rest = _own_leverage(white, torch.where(counted.unsqueeze(1), left_out, 0.0), gradients, ridge)
        white = white if rest is None else _with_rest(white, rest)
        answers = torch.cat([some for _, some, _ in found]) if found else torch.empty(0, 2)
        together = LastFeatures.joined(last, int(FEATURE_SHARE * problem.budget.limit / item))
        return cls(features, directions, classes, leading, whitening, white, outside, tuple(notes)), answers, together

    def whitened(self, fitted: Fitted, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """(m, c, r) whitened gradients, whose inner products are leverages and alignments.

        Also the outputs (m, ..., k), and the input of the last layer.
        """
        how = self.features, self.directions, self.unit_length, self.leading
        rows, outputs, rest, given = prediction_gradients(fitted, inputs, *how)
        white = times_lower(rows.to(self.whitening.dtype), self.whitening).to(fitted.problem.dtype)
        return white if rest is None else _with_rest(white, rest / self.outside), outputs, given

    @property
    def of_trees(self) -> bool:
        """Whether the gradients are those of trees with respect to their leaves."""
        return isinstance(self.features, LeafFeatures)

    def leverages(self) -> Tensor:
        """(n,) leverage of each training example, the mean over the directions of its outputs."""
        return self.gradients.square().sum((1, 2)) / self.gradients.shape[1]

    def leverages_without(self) -> Tensor:
        """(n,) the same, each in the fit without the example: the trace of H (1 - H)^-1 for its hat block H."""
        blocks = (self.gradients @ self.gradients.mT).double()
        values = eigh(blocks)[0].clamp(0.0, 1.0 - 1e-9)
        return (values / (1.0 - values)).sum(1).to(self.gradients.dtype) / blocks.shape[1]

    def weights(self, whitened: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which predictions, their weights a_i^2 of all training examples (m, n)), as many as fit in memory."""
        n, c = self.gradients.shape[:2]
        r = len(self.whitening)
        step = max(1, WEIGHED_AT_ONCE // max(1, n * c * c))
        flat = self.gradients[..., :r].reshape(n * c, r)
        for low in range(0, len(whitened), step):
            some = whitened[low : low + step]
            aligned = (some[..., :r].reshape(-1, r).to(flat.dtype) @ flat.T).reshape(len(some), c, n, c)
            yield slice(low, low + len(some)), aligned.square().sum((1, 3)).to(whitened.dtype)

    def moments(self, weights: Tensor) -> Tensor:
        """(r, r) weighted sum over training examples, with weights (n,), of outer products of whitened gradients."""
        flat = self.gradients[..., : len(self.whitening)].flatten(0, 1)
        return (flat * weights.to(flat.dtype).repeat_interleave(self.gradients.shape[1]).unsqueeze(1)).T @ flat


def prediction_gradients(
    fitted: Fitted,
    inputs: Inputs,
    features: Projected | LeafFeatures,
    directions: Tensor | None,
    unit_length: bool,
    leading: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(m, c, r) gradients of the predictions of one batch, as features, and the outputs (m, ..., k).

    For trees, and along leading directions, also the squared lengths (m, c) of the parts left out. The last value is
    the input (m, d) of the last layer.

    Args:
        fitted: the fit.
        inputs: inputs of the batch.
        features: projections of a gradient.
        directions: (c, k) directions of outputs; `None` for the output of the predicted class.
        unit_length: divide gradients by their length.
        leading: (features, r) directions of the features to keep; `None` for all.
    """
    problem = fitted.problem
    if isinstance(inputs, OutputView):
        inputs = inputs.inputs
    outputs, given = outputs_and_features(fitted, inputs)
    view: Inputs = inputs
    if directions is None:
        predicted = predicted_outputs(fitted, outputs)
        if predicted is None:  # squared error on coded classes
            predicted = outputs.reshape(len(outputs), -1, outputs.shape[-1]).argmax(2)
            predicted = predicted + outputs.shape[-1] * torch.arange(predicted.shape[1], device=outputs.device)
        view = SelectedOutputs(inputs, predicted)
        cotangents = outputs.new_ones(1, view.index.shape[1])
    else:
        positions = outputs[0].numel() // problem.width
        cotangents = directions.repeat(1, positions) / positions
    cotangents = cotangents.to(working_precision(problem))
    chunks = features.project(view, ConstantCotangents(cotangents), len(cotangents))
    rows = torch.cat([rows for _, rows in chunks])
    rows = rows.to(problem.dtype) if isinstance(features, LeafFeatures) else rows
    squares = rows.square().sum(2)
    rest = None
    if isinstance(features, LeafFeatures):
        whole = features.squares(view, cotangents.unsqueeze(1).expand(-1, len(rows), -1)).to(rows.dtype)
        rest, squares = (whole - squares).clamp_min(0.0), whole
    elif leading is not None:
        rows, rest = along(rows, leading, squares)
    if unit_length:
        squares = squares.clamp_min(torch.finfo(rows.dtype).tiny)
        rows = rows / squares.sqrt().unsqueeze(2)
        rest = None if rest is None else rest / squares
    return rows, outputs, rest, given


def leading_subspace(moments: Tensor, count: int) -> tuple[Tensor, Tensor, float]:
    """(r, count) orthonormal directions that nearly span the leading ones of moments (r, r), by subspace iteration.

    Also the moments along them, and the mean of the moments along all others, weighted by themselves: the moment that a
    training gradient sees there on average.

    Examples:
        >>> vectors, inside, outside = leading_subspace(torch.diag(torch.tensor([9.0, 1.0, 2.0])), 2)
        >>> vectors.abs().sum(1).round().tolist(), inside.trace().round().tolist(), round(outside, 3)
        ([1.0, 0.0, 1.0], 11.0, 1.0)
    """
    extra = min(len(moments), count + max(8, count // 8))
    generator = torch.Generator("cpu").manual_seed(0)
    found = torch.randn(len(moments), extra, generator=generator, dtype=moments.dtype, device="cpu").to(moments.device)
    for _ in range(ITERATIONS):
        found = torch.linalg.qr(moments @ (moments @ found)).Q
    vectors = found @ eigh(found.T @ moments @ found)[1].flip(1)[:, :count]
    inside = vectors.T @ moments @ vectors
    left = float(moments.trace() - inside.trace())
    square = float(moments.square().sum() - inside.square().sum())
    return vectors, inside, max(square, 0.0) / left if left > 0 else 0.0


def along(rows: Tensor, directions: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates (n, c, r) of rows (n, c, features) with squared lengths (n, c), and the squared lengths left over."""
    inside = rows @ directions
    return inside, (squares - inside.square().sum(2)).clamp_min(0.0)


def leaf_features(fitted: Fitted, model: LeafSum, most: int) -> LeafFeatures:
    """The leading directions of the leaves: those of the fit if it has them."""
    known = getattr(fitted.bread, "features", None)
    if not isinstance(known, LeafFeatures):
        columns = max(1, min(most // model.leaf_values.shape[1], len(model.scale)))
        known = LeafFeatures(model, *leading_directions(fitted.problem, model, columns, seed=0))
    return known if known.size <= most else known.leading(most)


def _own_leverage(white: Tensor, rest: Tensor, gradients: Tensor, ridge: float) -> Tensor:
    """(n, c) contribution of squared lengths (n, c) outside the features to the leverages of training examples.

    Outside, only lambda and the example itself count. A leverage is at most that of a gradient that no other shares.
    """
    inside = white.square().sum(2)
    whole = gradients.square().sum(2) + rest
    return torch.minimum(rest / (ridge + rest), (whole / (ridge + whole) - inside).clamp_min(0.0))


def _with_rest(white: Tensor, rest: Tensor) -> Tensor:
    """Whitened gradients (n, c, r) with one more coordinate for each of the c, of squared length (n, c)."""
    return torch.cat([white, torch.diag_embed(rest.sqrt())], 2)


def output_directions(outputs: int) -> Tensor:
    """(c, k) directions of outputs: each output if they are few, else random signs, the same in every call.

    Examples:
        >>> output_directions(2)
        tensor([[1., 0.],
                [0., 1.]])
        >>> output_directions(100).shape
        torch.Size([4, 100])
    """
    if outputs <= MOST_DIRECTIONS:
        return torch.eye(outputs, device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    signs = 2 * torch.randint(0, 2, (MOST_DIRECTIONS, outputs), generator=generator, device="cpu") - 1
    directions: Tensor = signs.float() / MOST_DIRECTIONS**0.5
    return directions


def predicted_probability(
    fitted: Fitted, outputs: Tensor, codes: tuple[float, float] | None, examples: slice | None = None
) -> tuple[Tensor, Tensor]:
    """(m,) probability of the predicted class, and how often two labels drawn from the network's probabilities differ.

    For outputs (m, ..., k); `nan` without classes. The mean over positions, and over outputs with their own labels.

    Args:
        fitted: the fit.
        outputs: outputs of the network.
        codes: target values for other classes and for the class itself; `None` without classes.
        examples: training examples that these are. Each is predicted by the fit without it, if that is known.
    """
    if codes is None:
        none = torch.full((len(outputs),), float("nan"), dtype=fitted.problem.dtype, device=outputs.device)
        return none, none
    likelihood = fitted.problem.likelihood
    flat = outputs.reshape(-1, outputs.shape[-1]).double()
    p = likelihood.probabilities(flat) if likelihood.has_classes else (flat - codes[0]) / (codes[1] - codes[0])
    if examples is not None and fitted.problem.sketch is None:
        change = (fitted.residuals[examples] - fitted.loo_residuals[examples]) / (codes[1] - codes[0])
        p = p + change.reshape(p.shape)
    if likelihood.has_classes and not likelihood.couples_outputs:
        p = p.clamp(0.0, 1.0)
        best, differ = torch.maximum(p, 1 - p).mean(1), (2 * p * (1 - p)).mean(1)
    else:
        p = nearest_probabilities(torch.cat([p, 1 - p], 1) if p.shape[1] == 1 else p)
        best, differ = p.amax(1), 1 - p.square().sum(1)
    both = torch.stack([best, differ]).reshape(2, len(outputs), -1).mean(2).to(fitted.problem.dtype)
    return both[0], both[1]


def nearest_probabilities(values: Tensor) -> Tensor:
    """(m, k) probabilities nearest to values (m, k): not negative, with sum one.

    Examples:
        >>> nearest_probabilities(torch.tensor([[1.2, 0.1, -0.1], [0.6, 0.5, 0.2]]))
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.4000, 0.1000]])
    """
    ordered = values.sort(dim=1, descending=True).values
    places = torch.arange(1, values.shape[1] + 1, device=values.device)
    excess = (ordered.cumsum(1) - 1.0) / places
    last = (ordered > excess).sum(1, keepdim=True) - 1
    found: Tensor = (values - excess.gather(1, last)).clamp_min(0.0)
    return found
