"""The results of a tracer: predictions with their variances, and the diagnostics of a fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from whence.data.batches import combine
from whence.display import Column, Shown, Table, count, listing, number, numbers, places, rows_shown
from whence.errors import InputError, shortly
from whence.likelihoods import Likelihood

if TYPE_CHECKING:
    import pandas


MAX_OUTPUTS = 64  # most outputs with covariances; for more outputs, only variances are computed, this many at a time


@dataclass(frozen=True)
class ChosenOutputs:
    """The outputs that were predicted, if not all of them."""

    index: Tensor  # (m, ..., c) positions of the outputs among all k
    probabilities: Tensor | None  # (m, ..., c) of these classes, if the likelihood has classes


@dataclass(frozen=True)
class Uncertainty(Shown):
    """Predictions and their variances, in squared units of the outputs.

    All variances are those of the *mean function* f(x): how far the prediction would move with other training data.
    They do not contain the noise of a new observation around f(x).

    If a network has outputs at several positions (tokens, pixels), each position is a prediction: shapes (m, k) below
    are then (m, ..., k). If only some outputs were used, k is their number, and `chosen` says which.

    Attributes:
        mean: (m, k) outputs of the network.
        covariances: (m, k, k) for each estimator, if they were computed.
        variances: (m, k) for each estimator, if the covariances were not computed.
        later: computes the covariances when they are first used.
        likelihood: likelihood of the network, which defines what its outputs mean.
        chosen: which outputs were used; `None` for all.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> u = whence.fit(net, [(x, 2 * x + 1)], ridge=0.1, progress=False).predict(x[:3])
        >>> low, high = u.interval(0.95)
        >>> bool((low < u.mean).all()), u.ratio.shape, u.covariance("hec3").shape
        (True, torch.Size([3]), torch.Size([3, 1, 1]))
        >>> list(u.to_frame().columns[:3])
        ['mean', 'hec0', 'hec1']
    """

    shared: ClassVar = ("later", "likelihood")

    mean: Tensor
    covariances: dict[str, Tensor]
    variances: dict[str, Tensor] = field(default_factory=dict)
    later: Callable[[], Mapping[str, Tensor]] | None = None
    likelihood: Likelihood | None = None
    chosen: ChosenOutputs | None = None

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def ho(self) -> Tensor:
        """(m, k) variances if the noise were the same everywhere and the training inputs were fixed."""
        return self.variance("ho")

    @property
    def hec0(self) -> Tensor:
        """(m, k) White's sandwich variances."""
        return self.variance("hec0")

    @property
    def hec1(self) -> Tensor:
        """(m, k) White's sandwich variances, scaled for degrees of freedom."""
        return self.variance("hec1")

    @property
    def hec2(self) -> Tensor:
        """(m, k) sandwich variances with residuals divided by sqrt(1 - leverage)."""
        return self.variance("hec2")

    @property
    def hec3(self) -> Tensor:
        """(m, k) jackknife variances: over other inputs and other noise, which may vary from input to input."""
        return self.variance("hec3")

    @property
    def jackknife(self) -> Tensor:
        """(m, k) the full, centred jackknife."""
        return self.variance("jackknife")

    @property
    def laplace(self) -> Tensor:
        """(m, k) Bayesian variances: a Laplace posterior with the mean noise variance of the residuals."""
        return self.variance("laplace")

    @property
    def ratio(self) -> Tensor:
        """(m,) trace HeC3 / trace Ho: above one if leave-one-out residuals nearby are larger than average."""
        ho, hec3 = self.trace("ho"), self.trace("hec3")
        return torch.where(ho == 0, torch.ones_like(ho), hec3 / ho)

    def variance(self, estimator: str) -> Tensor:
        """(m, k) variance of each output, for the estimator of this name."""
        if estimator in self.variances:
            return self.variances[estimator].clamp_min(0.0)
        return torch.diagonal(self.covariance(estimator), dim1=-2, dim2=-1).clamp_min(0.0)

    def trace(self, estimator: str = "hec3") -> Tensor:
        """(m,) total variance of the outputs used."""
        return self.variance(estimator).sum(-1)

    @property
    def estimators(self) -> tuple[str, ...]:
        """Names of the estimators."""
        return tuple(sorted({*self.covariances, *self.variances}))

    def covariance(self, estimator: str = "hec3") -> Tensor:
        """(m, k, k) covariance between the outputs of each prediction, computed now if necessary."""
        if estimator not in self.estimators:
            raise InputError(f"expected one of {', '.join(self.estimators)}, got {estimator!r}.")
        if estimator not in self.covariances:
            k = self.mean.shape[-1]
            if self.later is None and k > MAX_OUTPUTS:
                most = f"at most {MAX_OUTPUTS} outputs for covariances between them"
                raise InputError(f"expected {most}, got {k}. Predict with a list of outputs.")
            if self.later is None:
                raise InputError(
                    "expected inputs that can be read again, got none: an iterator is spent, and results gathered from "
                    "processes have no inputs. Compute covariances at once with predict(x, covariance=True), or pass a "
                    "loader or a batch."
                )
            self.covariances.update(self.later())
        return self.covariances[estimator]

    @property
    def probabilities(self) -> Tensor:
        """(m, k) probabilities of the classes, for categorical and Bernoulli likelihoods."""
        if self.chosen is not None and self.chosen.probabilities is not None:
            return self.chosen.probabilities
        return self._by_row(self._known_likelihood().probabilities)

    def probability_covariance(self, estimator: str = "hec3") -> Tensor:
        """(m, k, k) covariance of the probabilities, by the delta method: L Cov(f) L with L = diag(p) - p p^T.

        This is a first-order result without a bound, although no probability can have a standard deviation above 1/2.
        If one is larger, the logits vary too much for a linear approximation: treat the probability as unknown. The
        margin over its standard deviation still ranks such predictions.
        """
        likelihood = self._known_likelihood("covariances of probabilities")
        of_one = torch.func.jacrev(lambda row: likelihood.probabilities(row.unsqueeze(0)).squeeze(0))
        covariance = self.covariance(estimator)
        slope = self._by_row(torch.func.vmap(of_one)).to(covariance.dtype)
        return slope @ covariance @ slope.mT

    def probability_std(self, estimator: str = "hec3") -> Tensor:
        """(m, k) standard deviations of the probabilities, by the delta method; see `probability_covariance`."""
        return self.probability_covariance(estimator).diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()

    @property
    def margin(self) -> Tensor:
        """(m,) the largest logit minus the second largest; for separate logits |f|, (m,) for one, (m, k) for many."""
        contrasts = self._by_row(self._known_likelihood("a margin").contrasts)
        return _single(torch.einsum("...ck,...k->...c", contrasts, self.mean))

    def margin_variance(self, estimator: str = "hec3") -> Tensor:
        """(m,) or (m, k) variance of the margin. With a margin of few standard deviations the class may change."""
        contrasts = self._by_row(self._known_likelihood("the variance of a margin").contrasts)
        covariance = self.covariance(estimator)
        contrasts = contrasts.to(covariance.dtype)
        return _single(torch.einsum("...ck,...kj,...cj->...c", contrasts, covariance, contrasts).clamp_min(0.0))

    def _by_row(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function of rows (N, k) to the means, with or without positions."""
        *shape, k = self.mean.shape
        found = of(self.mean.reshape(-1, k))
        return found.reshape(*shape, *found.shape[1:])

    def _known_likelihood(self, of_all: str = "") -> Likelihood:
        """The likelihood. Raises if there is none, or if all outputs are needed and only some were predicted."""
        if self.likelihood is None:
            known = "expected results with a likelihood for probabilities, got none."
            raise InputError(f"{known} Take them from Tracer.predict.")
        if of_all and self.chosen is not None:
            raise InputError(f'expected all outputs for {of_all}, got some of them. Predict with outputs="all".')
        return self.likelihood

    def interval(self, level: float = 0.95, estimator: str = "hec3") -> tuple[Tensor, Tensor]:
        """Lower and upper confidence bounds (m, k) of the mean function, from the normal distribution.

        These bound f(x) itself. A new observation has its own noise in addition.
        """
        given: Any = level  # might be the name of an estimator
        if not isinstance(given, Real) or not 0.0 < level < 1.0:
            raise InputError(f"expected a level between 0 and 1, got {shortly(given)}. For 95 % pass 0.95.")
        reach = NormalDist().inv_cdf(0.5 + level / 2) * self.variance(estimator).sqrt()
        return self.mean - reach, self.mean + reach

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per prediction: means, variances of each output, traces and the ratio.

        For classes there are logits instead of means, and their probabilities. Variances are those of the logits.
        `probability_std` is the standard deviation of the probabilities, if covariances were computed.

        With several positions, there is one row for each, with its position in the first columns. If only some outputs
        were used, columns "output" say which.
        """
        shape = self.mean.shape[:-1]
        columns: dict[str, Tensor] = {}
        if len(shape) > 1:
            axes = [torch.arange(size, device=self.mean.device) for size in (shape[0], shape[1:].numel())]
            columns["prediction"], columns["position"] = torch.meshgrid(*axes, indexing="ij")
        if self.chosen is not None:
            columns |= _by_output("output", self.chosen.index, shape)
        columns |= _by_output("logit" if self._has_classes else "mean", self.mean, shape)
        if self._has_classes:
            columns |= _by_output("probability", self.probabilities, shape)
            columns |= _by_output("margin", self.margin, shape) if self.chosen is None else {}
            columns |= {} if self._stds is None else _by_output("probability_std", self._stds, shape)
        for name in self.estimators:
            columns[name] = self.trace(name)
            if self.mean.shape[-1] > 1:
                columns |= _by_output(name, self.variance(name), shape)
        columns["ratio"] = self.ratio
        return frame({name: column.reshape(-1) for name, column in columns.items()})

    def __repr__(self) -> str:
        if not len(self):
            return f"Uncertainty(no predictions, {count(self.mean.shape[-1], 'output')})"
        ho, hec3, ratio = (number(float(one.nanmedian())) for one in (self.trace("ho"), self.trace("hec3"), self.ratio))
        logits = " of the logits" if self._has_classes else ""
        return f"Uncertainty({self._size()}; median variance{logits} Ho {ho}, HeC3 {hec3}, median ratio {ratio})"

    def _size(self) -> str:
        """Number of predictions, positions and outputs."""
        *shape, k = self.mean.shape
        positions = "" if len(shape) == 1 else f" at {' x '.join(map(str, shape[1:]))} positions"
        return f"{count(shape[0], 'prediction')}{positions}, {count(k, 'output')}"

    @property
    def _has_classes(self) -> bool:
        return self.likelihood is not None and self.likelihood.has_classes

    @property
    def _stds(self) -> Tensor | None:
        """Standard deviations of the probabilities, if covariances were computed."""
        return self.probability_std() if self.chosen is None and "hec3" in self.covariances else None

    def _table(self) -> Table:
        *shape, k = self.mean.shape
        if not math.prod(shape):
            return Table(self._size())
        (rows, more), positions = rows_shown(math.prod(shape), "to_frame()"), math.prod(shape[1:])
        columns = [places(rows)]
        if len(shape) > 1:
            columns = [Column("no., position", tuple(f"{row // positions}, {row % positions}" for row in range(rows)))]
        if self.chosen is not None:
            columns.append(Column("output", _listed(self.chosen.index.expand(*self.mean.shape), rows), left=True))
        ho, hec3, ratio = (values.reshape(-1)[:rows] for values in (self.trace("ho"), self.trace("hec3"), self.ratio))
        if self._has_classes:
            columns += self._class_columns(rows)
            note = "Standard deviations of the probabilities over other training sets (HeC3); logits: to_frame()."
            if self._stds is None:
                note = "Standard deviations: probability_std(). Logits and their variances: to_frame()."
        else:
            columns.append(Column("mean", _listed(self.mean, rows), left=k > 1))
            if k == 1:
                bounds = zip(*(_listed(bound, rows) for bound in self.interval(0.95)), strict=True)
                columns.append(Column("95% interval", tuple(f"{low} to {high}" for low, high in bounds)))
            bars = (hec3 / hec3.nan_to_num(0.0).max()).nan_to_num(0.0)
            columns.append(Column("Ho", numbers(ho.tolist())))
            columns.append(Column("HeC3", numbers(hec3.tolist()), bars=tuple(bars.tolist())))
            note = f"Variances of the prediction itself{', summed over outputs' if k > 1 else ''}."
        columns.append(Column("HeC3/Ho", tuple(f"{value:.2f}" for value in ratio.tolist())))
        return Table(self._size(), tuple(columns), f"{note}\n{more}".strip())

    def _class_columns(self, rows: int) -> list[Column]:
        """The most probable class with its probability, or the probabilities of all outputs."""
        p, columns = self.probabilities, []
        stds = torch.full_like(p, math.nan) if self._stds is None else self._stds
        if self.chosen is None and self._known_likelihood().couples_outputs and p.shape[-1] > 1:
            best = p.argmax(-1, keepdim=True)
            columns = [Column("class", _listed(best, rows))]
            p, stds = p.gather(-1, best), stds.gather(-1, best)
        if p.shape[-1] > 1:
            return [Column("probability", _listed(p, rows), left=True)]
        pairs = zip(p.flatten()[:rows].tolist(), stds.flatten()[:rows].tolist(), strict=True)
        return [*columns, Column("probability", tuple(probability_text(*pair) for pair in pairs))]


def _listed(values: Tensor, rows: int) -> tuple[str, ...]:
    """The numbers (m, ..., k) of each of the first predictions as text."""
    first = values.reshape(-1, values.shape[-1])[:rows].tolist()
    return tuple(listing(numbers(row) if values.is_floating_point() else row, 3) for row in first)


def _padded(values: Tensor, positions: tuple[int, ...]) -> Tensor:
    """(m, t, ...) padded to more positions with missing values."""
    if values.shape[1 : 1 + len(positions)] == positions:
        return values
    wide = values.new_full((len(values), *positions, *values.shape[1 + len(positions) :]), _missing(values))
    wide[tuple(map(slice, values.shape))] = values
    return wide


def _single(values: Tensor) -> Tensor:
    return values.squeeze(-1) if values.shape[-1] == 1 else values


def _missing(values: Tensor) -> float:
    """The value for a missing number: NaN, or -1 for integers."""
    return float("nan") if values.is_floating_point() else -1


def mask_of_outputs(inputs: Mapping[str, Any]) -> Any:
    """The mask of attention at the positions of the outputs, if any: an encoder-decoder model has its decoder's."""
    return inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")


def without_padding(u: Uncertainty, inputs: Mapping[str, Any]) -> Uncertainty:
    """Set positions that the inputs' mask of attention marks as padding to NaN, or to -1 for positions of outputs."""
    mask = mask_of_outputs(inputs)
    shape = u.mean.shape[:-1]
    if not isinstance(mask, Tensor) or mask.shape != shape or len(shape) == 1:
        return u

    def masked(values: Sequence[Tensor]) -> Tensor:
        where = (mask == 0).reshape(*shape, *[1] * (values[0].ndim - len(shape)))
        return values[0].masked_fill(where, _missing(values[0]))

    return combine([u], masked)


def join(parts: Sequence[Uncertainty]) -> Uncertainty:
    """Join several batches. Sequences that are shorter in one batch than in another are padded with NaN."""
    most = tuple(max(sizes) for sizes in zip(*(part.mean.shape[1:-1] for part in parts), strict=True))
    return combine([combine([part], lambda values: _padded(values[0], most)) for part in parts], torch.cat)


def _by_output(name: str, values: Tensor, shape: torch.Size) -> dict[str, Tensor]:
    """(m, ...) or (m, ..., 1) values as one column, (m, ..., k) values as a column for each output."""
    if values.shape == shape or values.shape[-1] == 1:
        return {name: values.reshape(shape)}
    return {f"{name}_{output}": column for output, column in enumerate(values.unbind(-1))}


MAX_STD = 0.5  # no probability has a larger standard deviation; a larger first-order value says nothing


def probability_text(probability: float, std: float = math.nan) -> str:
    """A probability with its standard deviation.

    Examples:
        >>> probability_text(0.9123, 0.0312), probability_text(0.6, 0.8), probability_text(0.6)
        ('0.912 ± 0.031', '0.600 ± 0.5 or more', '0.600')
    """
    if math.isnan(std):
        return f"{probability:.3f}"
    return f"{probability:.3f} ± {f'{std:.3f}' if std <= MAX_STD else f'{MAX_STD} or more'}"


def frame(columns: Mapping[Any, Tensor | Sequence[str]]) -> pandas.DataFrame:
    """Make a data frame.

    Examples:
        >>> frame({"index": torch.tensor([3, 5]), "word": ["a", "b"]})["index"].tolist()
        [3, 5]
    """
    try:
        import pandas  # an extra: needed only for tables
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("expected pandas for a table. Install it: pip install 'whence[report]'.") from error

    arrays = {name: one.cpu().numpy() if isinstance(one, Tensor) else one for name, one in columns.items()}
    return pandas.DataFrame(arrays)


@dataclass(frozen=True)
class Finding:
    """One fact about a fit: a name, its value, and a sentence.

    Examples:
        >>> Finding("ridge", 1.0, "lambda on the sum scale").words
        'lambda on the sum scale'
    """

    name: str
    value: float | str
    words: str

    @property
    def shown(self) -> str:
        """The value as text."""
        return self.value if isinstance(self.value, str) else number(self.value, 4)


@dataclass(frozen=True)
class Diagnostics(Shown):
    """What was approximated, guarded or repaired, in words and numbers.

    Examples:
        >>> d = Diagnostics((Finding("ridge", 1.0, "lambda on the sum scale"),))
        >>> d["ridge"]
        1.0
        >>> print(d)
        ridge: 1 (lambda on the sum scale)
    """

    findings: tuple[Finding, ...]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __getitem__(self, name: str) -> float | str:
        """The value of the first finding with that name."""
        return {one.name: one.value for one in reversed(self.findings)}[name]

    def __repr__(self) -> str:
        return f"Diagnostics({count(len(self.findings), 'finding')})"

    def table(self, title: str) -> Table:
        """Name, value and meaning of each finding. A text value without a sentence takes the place of the sentence."""
        rows = [
            (one.name, one.shown, one.words)
            if one.words or not isinstance(one.value, str)
            else (one.name, "", one.value)
            for one in self
        ]
        return Table(title, tuple(Column("", cells, left=at != 1) for at, cells in enumerate(zip(*rows, strict=True))))

    def _table(self) -> Table:
        return self.table("What was approximated, guarded or repaired")

    def __str__(self) -> str:
        values = (one.value if isinstance(one.value, str) else f"{one.value:.6g}" for one in self)
        pairs = zip(self, values, strict=True)
        return "\n".join(f"{one.name}: {value}" + f" ({one.words})" * bool(one.words) for one, value in pairs)
