"""From the covariance of logits to that of probabilities and of decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from whence.data.batches import Inputs, take
from whence.display import Column, Shown, Table, count, listing, number, numbers, places, rows_shown
from whence.errors import InputError
from whence.jacobian.network import OutputMixtures, OutputView, SelectedOutputs
from whence.likelihoods import Likelihood

if TYPE_CHECKING:
    import pandas


def likelihood_of(likelihood: Likelihood | None) -> Likelihood:
    """The likelihood, or an error where results were put together without one."""
    if likelihood is None:
        raise InputError(
            "expected results that know their likelihood for probabilities, got none. Take them from Tracer.predict."
        )
    return likelihood


def by_row(of: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """What a function says about rows (N, ...), for values (m, ..., k) that have positions or none."""
    shape = values[0].shape[:-1]
    if len(shape) == 1:
        return of(*values)
    found = of(*(value.reshape(-1, *value.shape[len(shape) :]) for value in values))
    return found.reshape(*shape, *found.shape[1:])


def slopes(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """(m, k, k) derivative of the probabilities in the outputs: diag(p) - p p^T for softmax.

    Examples:
        >>> import torch
        >>> from whence import Bernoulli
        >>> slopes(Bernoulli(), torch.zeros(1, 1))
        tensor([[[0.2500]]])
    """

    def one(row: Tensor) -> Tensor:
        return likelihood.probabilities(row.unsqueeze(0)).squeeze(0)

    found: Tensor = torch.func.vmap(torch.func.jacrev(one))(outputs)
    return found


def delta_method(likelihood: Likelihood, outputs: Tensor, covariance: Tensor) -> Tensor:
    """(m, k, k) covariance of the probabilities, L Cov(f) L^T to first order."""
    slope = slopes(likelihood, outputs).to(covariance.dtype)
    return slope @ covariance @ slope.transpose(1, 2)


def margins(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """(m,) or (m, c) how far each decision is from being another."""
    return _single(torch.einsum("mck,mk->mc", likelihood.contrasts(outputs), outputs))


def margin_variances(likelihood: Likelihood, outputs: Tensor, covariance: Tensor) -> Tensor:
    """(m,) or (m, c) variances of the margins."""
    contrasts = likelihood.contrasts(outputs).to(covariance.dtype)
    return _single(torch.einsum("mck,mkj,mcj->mc", contrasts, covariance, contrasts).clamp_min(0.0))


def _single(values: Tensor) -> Tensor:
    return values.squeeze(1) if values.shape[1] == 1 else values


AT_ONCE = 64
"""Outputs whose covariances are computed together; of more, variances come so many at a time, without covariances."""

SKETCH_BYTES = 64 * 2**20
"""Random signs of one piece are kept under this size."""

Answer = Callable[[OutputView, bool], dict[str, Tensor]]
"""From a view of some inputs to covariances (m, c, c) by name; or, if told that they serve, to variances (m, c)."""


@dataclass(frozen=True)
class Look:
    """What a user wants to see of the outputs.

    Attributes:
        kind: all outputs, that of the predicted class, some by their positions, or random sketches of all.
        index: positions, where they are given.
        sketches: how many, where they are asked for.
    """

    kind: Literal["all", "predicted", "some", "sketches"]
    index: tuple[int, ...] = ()
    sketches: int = 0

    @classmethod
    def of(cls, given: Any) -> Look:
        """Read what a user says.

        Examples:
            >>> Look.of("predicted").kind, Look.of([3, 1]).index, Look.of(16).sketches
            ('predicted', (3, 1), 16)
        """
        if isinstance(given, str) and given in ("all", "predicted"):
            return cls("all" if given == "all" else "predicted")
        if _whole(given):
            if int(given) < 2:
                raise InputError(
                    f"expected at least two random sketches, for a standard error, got outputs={given}. "
                    f"A single output goes into a list: outputs=[{given}]."
                )
            return cls("sketches", sketches=int(given))
        listed = given.tolist() if isinstance(given, Tensor) and given.ndim == 1 else given
        several = isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed) > 0
        if several and all(map(_whole, listed)):
            return cls("some", tuple(int(one) for one in listed))
        raise InputError(
            'expected outputs to be "all", "predicted", a list of positions such as [0, 3], or a number of random '
            f"sketches, got {given!r}."
        )

    def positions(self, likelihood: Likelihood, outputs: Tensor) -> Tensor:
        """(N, c) which of outputs (N, k) are looked at."""
        n, k = outputs.shape
        if self.kind == "predicted":
            return likelihood.predicted(outputs).unsqueeze(1)
        listed = range(k) if self.kind == "all" else self.index
        wrong = [one for one in listed if not 0 <= one < k]
        if wrong:
            raise InputError(f"expected positions of outputs between 0 and {k - 1}, got {wrong[0]} in outputs=[...].")
        return torch.tensor(list(listed), device=outputs.device).expand(n, -1)


@dataclass(frozen=True)
class Chosen:
    """What was looked at, where it was not all outputs.

    Attributes:
        index: (m, ..., c) positions of the outputs among all k; `None` for sketches.
        probabilities: (m, ..., c) of these classes, where the likelihood has classes.
        sketches: whether the variances are of random sketches, each with the trace of the covariance as its mean.
    """

    index: Tensor | None
    probabilities: Tensor | None
    sketches: bool


@dataclass(frozen=True)
class Seen:
    """What was found for one batch, with m predictions at positions of any shape.

    Attributes:
        mean: (m, ..., c) outputs that were looked at; all k of them for sketches.
        chosen: which they are; `None` if all.
        covariances: (m, ..., c, c) by name; empty where variances alone were computed.
        variances: (m, ..., c) by name, or of sketches (m, ..., s).
    """

    mean: Tensor
    chosen: Chosen | None
    covariances: dict[str, Tensor]
    variances: dict[str, Tensor]


def look_at(
    look: Look,
    likelihood: Likelihood,
    inputs: Inputs,
    outputs: Tensor,
    answer: Answer,
    covariance: bool,
    generator: torch.Generator,
) -> Seen:
    """Variances of what is looked at, in as many views as memory wants.

    Args:
        look: what to see.
        likelihood: knows the predicted class.
        inputs: a batch of m.
        outputs: (m, ..., k) of the network for it.
        answer: a sandwich.
        covariance: whether covariances between the outputs of a position are wanted.
        generator: for random signs.
    """
    k, shape = outputs.shape[-1], outputs.shape[:-1]
    flat = outputs.reshape(-1, k)
    if look.kind == "sketches":
        found = _sketched(look.sketches, inputs, outputs, answer, generator)
        variances = {name: value.reshape(*shape, look.sketches) for name, value in found.items()}
        return Seen(outputs, Chosen(None, None, True), {}, variances)
    index = look.positions(likelihood, flat)
    c = index.shape[1]
    full = covariance and c <= AT_ONCE
    found = _picked(inputs, index.reshape(shape[0], -1, c), k, answer, full)
    shaped = {name: value.reshape(*shape, *value.shape[2:]) for name, value in found.items()}
    mean = flat.gather(1, index).reshape(*shape, c)
    chosen = None
    if look.kind != "all":
        chances = likelihood.probabilities(flat).gather(1, index).reshape(*shape, c) if likelihood.has_classes else None
        chosen = Chosen(index.reshape(*shape, c), chances, False)
    return Seen(mean, chosen, shaped if full else {}, {} if full else shaped)


def blank(seen: Seen, inputs: Inputs) -> Seen:
    """NaN, or -1 for positions of outputs, where the inputs' "attention_mask" says that there is only padding."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    shape = seen.mean.shape[:-1]
    if not isinstance(mask, Tensor) or mask.shape != shape or len(shape) == 1:
        return seen
    hidden = mask == 0

    def without(values: Tensor) -> Tensor:
        shown = hidden.reshape(*shape, *[1] * (values.ndim - len(shape)))
        return values.masked_fill(shown, float("nan") if values.is_floating_point() else -1)

    chosen = seen.chosen
    if chosen is not None:
        index, chances = (None if one is None else without(one) for one in (chosen.index, chosen.probabilities))
        chosen = Chosen(index, chances, chosen.sketches)
    covariances, variances = (
        {name: without(value) for name, value in one.items()} for one in (seen.covariances, seen.variances)
    )
    return Seen(without(seen.mean), chosen, covariances, variances)


def _picked(inputs: Inputs, index: Tensor, k: int, answer: Answer, full: bool) -> dict[str, Tensor]:
    """Covariances (m, t, c, c) of outputs (m, t, c) at t positions, or variances (m, t, c)."""
    m, t, c = index.shape
    places = index + k * torch.arange(t, device=index.device).reshape(1, t, 1)
    parts: dict[str, list[Tensor]] = {}
    for low, high in _spans(t, max(1, AT_ONCE // c)):
        pieces: dict[str, list[Tensor]] = {}
        flat = places[:, low:high].reshape(m, -1)
        for start, stop in _spans(flat.shape[1], flat.shape[1] if full else AT_ONCE):
            for name, value in answer(SelectedOutputs(inputs, flat[:, start:stop]), full).items():
                pieces.setdefault(name, []).append(value)
        for name, values in pieces.items():
            parts.setdefault(name, []).append(_by_position(torch.cat(values, dim=1), high - low, full))
    return {name: torch.cat(values, dim=1) for name, values in parts.items()}


def _by_position(values: Tensor, t: int, full: bool) -> Tensor:
    """(m, t c, t c) to (m, t, c, c), or (m, t c) to (m, t, c)."""
    m = len(values)
    if not full:
        return values.reshape(m, t, -1)
    c = values.shape[1] // t
    return values.reshape(m, t, c, t, c).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _sketched(
    sketches: int, inputs: Inputs, outputs: Tensor, answer: Answer, generator: torch.Generator
) -> dict[str, Tensor]:
    """v^T C v (m, t, s) of random signs v, one position after the other: its mean is the trace of C."""
    k, m = outputs.shape[-1], len(outputs)
    t = outputs.numel() // (m * k)
    rows = max(1, SKETCH_BYTES // (k * sketches * outputs.element_size()))
    parts: dict[str, list[Tensor]] = {}
    for low, high in _spans(m, rows):
        some = take(inputs, slice(low, high))
        pieces: dict[str, list[Tensor]] = {}
        for at in range(t):
            signs = torch.randint(
                0, 2, (high - low, k, sketches), generator=generator, dtype=torch.int8, device=generator.device
            )
            basis = (2 * signs - 1).to(outputs)
            for name, value in answer(OutputMixtures(some, basis, at * k), False).items():
                pieces.setdefault(name, []).append(value)
        for name, values in pieces.items():
            parts.setdefault(name, []).append(torch.stack(values, dim=1))
    return {name: torch.cat(values) for name, values in parts.items()}


def _whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _spans(size: int, step: int) -> Iterator[tuple[int, int]]:
    return ((low, min(low + step, size)) for low in range(0, size, step))


def join(parts: Sequence[Seen]) -> Seen:
    """Several batches as one; where sequences are shorter in one batch than in another, what is missing is NaN."""
    first = parts[0]
    positions = [part.mean.shape[1:-1] for part in parts]
    most = tuple(max(sizes) for sizes in zip(*positions, strict=True))

    def one(values: Sequence[Tensor | None]) -> Tensor | None:
        found = [_padded(value, most) for value in values if value is not None]
        return torch.cat(found) if found else None

    def together(name: str) -> dict[str, Tensor]:
        keys = getattr(first, name)
        return {key: torch.cat([_padded(getattr(part, name)[key], most) for part in parts]) for key in keys}

    chosen = first.chosen
    if chosen is not None:
        several = [part.chosen for part in parts if part.chosen is not None]
        index, chances = one([each.index for each in several]), one([each.probabilities for each in several])
        chosen = Chosen(index, chances, chosen.sketches)
    means = [_padded(part.mean, most) for part in parts]
    return Seen(torch.cat(means), chosen, together("covariances"), together("variances"))


def _padded(values: Tensor, positions: tuple[int, ...]) -> Tensor:
    """(m, t, ...) with more positions: NaN, or -1 among whole numbers, where there is nothing."""
    if values.shape[1 : 1 + len(positions)] == positions:
        return values
    shape = (len(values), *positions, *values.shape[1 + len(positions) :])
    wide = values.new_full(shape, float("nan") if values.is_floating_point() else -1)
    wide[tuple(slice(0, size) for size in values.shape)] = values
    return wide


@dataclass(frozen=True)
class Uncertainty(Shown):
    """Predictions and the variances of each, in units of the outputs squared.

    All variances are of the *mean function* f(x): how far the prediction would move with other training data. They do
    not contain the noise of a new observation around f(x).

    Where a network answers at several positions (tokens, pixels), each position is a prediction: shapes (m, k) below
    are then (m, ..., k). Where only some outputs were looked at, k is their number, and `chosen` says which.

    Attributes:
        mean: (m, k) outputs of the network.
        covariances: (m, k, k) for each estimator, as far as they were computed.
        variances: (m, k) for each estimator, where the covariances were not computed.
        later: computes the covariances when they are asked for.
        likelihood: of the network, which knows what its outputs mean.
        chosen: which outputs were looked at, unless all.

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

    mean: Tensor
    covariances: dict[str, Tensor]
    variances: Mapping[str, Tensor] = field(default_factory=dict)
    later: Callable[[], Mapping[str, Tensor]] | None = None
    likelihood: Likelihood | None = None
    chosen: Chosen | None = None

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.mean)

    @property
    def ho(self) -> Tensor:
        """(m, k) variances if noise were the same everywhere and the training inputs fixed."""
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
        """(m, k) jackknife variances: other inputs, other noise, noise that may differ from place to place."""
        return self.variance("hec3")

    @property
    def jackknife(self) -> Tensor:
        """(m, k) the full, centred jackknife."""
        return self.variance("jackknife")

    @property
    def laplace(self) -> Tensor:
        """(m, k) variances of the Bayesian reading: a Laplace posterior with the residuals' mean noise variance."""
        return self.variance("laplace")

    @property
    def ratio(self) -> Tensor:
        """(m,) trace HeC3 / trace Ho: above one where leave-one-out residuals nearby are larger than average."""
        ho, hec3 = self.trace("ho"), self.trace("hec3")
        return torch.where(ho == 0, torch.ones_like(ho), hec3 / ho)

    def variance(self, estimator: str) -> Tensor:
        """(m, k) variance of each output, by the name of the estimator."""
        if self.chosen is not None and self.chosen.sketches:
            raise InputError(
                "expected outputs that were looked at one by one for their variances, got random sketches of all. Ask "
                "for trace(...) and trace_error(...), or predict with outputs='all', 'predicted' or a list."
            )
        if estimator in self.variances:
            return self.variances[estimator].clamp_min(0.0)
        return torch.diagonal(self.covariance(estimator), dim1=-2, dim2=-1).clamp_min(0.0)

    def trace(self, estimator: str = "hec3") -> Tensor:
        """(m,) total variance of the outputs that were looked at; of random sketches, an unbiased estimate for all."""
        if self.chosen is not None and self.chosen.sketches:
            return self._sketches(estimator).mean(-1)
        return self.variance(estimator).sum(-1)

    def trace_error(self, estimator: str = "hec3") -> Tensor:
        """(m,) standard error of `trace` over the random signs of the sketches; zero without sketches."""
        if self.chosen is not None and self.chosen.sketches:
            values = self._sketches(estimator)
            return values.std(-1) / math.sqrt(values.shape[-1])
        return torch.zeros_like(self.trace(estimator))

    def _sketches(self, estimator: str) -> Tensor:
        if estimator not in self.variances:
            raise InputError(f"expected one of {', '.join(self.estimators)}, got {estimator!r}.")
        return self.variances[estimator]

    @property
    def estimators(self) -> tuple[str, ...]:
        """Names of the estimators."""
        return tuple(sorted({*self.covariances, *self.variances}))

    def covariance(self, estimator: str = "hec3") -> Tensor:
        """(m, k, k) covariance between the outputs of each prediction; computed now if it was not yet."""
        if estimator not in self.estimators:
            raise InputError(f"expected one of {', '.join(self.estimators)}, got {estimator!r}.")
        if estimator not in self.covariances:
            if (self.chosen is not None and self.chosen.sketches) or (
                self.later is None and self.mean.shape[-1] > AT_ONCE
            ):
                raise InputError(
                    f"expected at most {AT_ONCE} outputs, looked at one by one, for covariances between them. Predict "
                    "with a list of outputs."
                )
            if self.later is None:
                raise InputError(
                    "expected inputs that are kept or can be read again, got none: a large iterator is spent, and "
                    "results gathered from processes have no inputs. Ask for covariances at once with predict(x, "
                    "covariance=True), or pass a loader or a batch."
                )
            self.covariances.update(self.later())
        return self.covariances[estimator]

    @property
    def probabilities(self) -> Tensor:
        """(m, k) probabilities of the classes, for categorical and Bernoulli likelihoods."""
        if self.chosen is not None and self.chosen.probabilities is not None:
            return self.chosen.probabilities
        return by_row(likelihood_of(self.likelihood).probabilities, self.mean)

    def probability_covariance(self, estimator: str = "hec3") -> Tensor:
        """(m, k, k) covariance of the probabilities, by the delta method: L Cov(f) L with L = diag(p) - p p^T.

        To first order, which nothing bounds: no probability has a standard deviation above 1/2. Where one comes out
        larger, logits scatter too far for a tangent, and the probability is to be taken for unknown; the margin over
        its standard deviation still ranks such predictions.
        """
        likelihood = likelihood_of(self.likelihood)
        self._check_all("covariances of probabilities")
        by_row(likelihood.probabilities, self.mean[:1])  # the error for outputs that are no logits comes first
        return by_row(partial(delta_method, likelihood), self.mean, self.covariance(estimator))

    @property
    def margin(self) -> Tensor:
        """(m,) the largest logit less the second largest; for logits apart |f|, (m,) for one and (m, k) for many."""
        likelihood = likelihood_of(self.likelihood)
        self._check_all("a margin")
        return by_row(partial(margins, likelihood), self.mean)

    def margin_variance(self, estimator: str = "hec3") -> Tensor:
        """(m,) or (m, k) variance of the margin: a margin of few standard deviations may turn into another class."""
        likelihood = likelihood_of(self.likelihood)
        self._check_all("the variance of a margin")
        by_row(likelihood.contrasts, self.mean[:1])  # the error for outputs that are no logits comes first
        return by_row(partial(margin_variances, likelihood), self.mean, self.covariance(estimator))

    def _check_all(self, what: str) -> None:
        if self.chosen is not None and not self.chosen.sketches:
            raise InputError(f'expected all outputs for {what}, got some of them. Predict with outputs="all".')

    def interval(self, level: float = 0.95, estimator: str = "hec3") -> tuple[Tensor, Tensor]:
        """Lower and upper confidence bounds (m, k) of the mean function, from the normal distribution.

        These bound f(x) itself. A new observation scatters around f(x) with the noise on top.
        """
        try:
            sound = 0.0 < level < 1.0
        except TypeError:  # the name of an estimator in the place of the level
            sound = False
        if not sound:
            raise InputError(f"expected a level between 0 and 1, got {level!r}. For 95 % pass 0.95.")
        reach = NormalDist().inv_cdf(0.5 + level / 2) * self.variance(estimator).sqrt()
        return self.mean - reach, self.mean + reach

    def to_frame(self) -> pandas.DataFrame:
        """One row a prediction: means, variances of each output, traces and the ratio.

        With positions, one row for each of them, and its place in front. Where only some outputs were looked at,
        columns "output" say which; of random sketches there are traces and their standard errors.
        """
        try:
            import pandas  # an extra: only tables need it
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "expected pandas for a table. Install it: pip install 'whence[report]'."
            ) from error

        return pandas.DataFrame({name: column.reshape(-1).cpu().numpy() for name, column in _columns(self).items()})

    def __repr__(self) -> str:
        """Sizes and medians."""
        *shape, k = self.mean.shape
        if not len(self):
            return f"Uncertainty(no predictions, {count(k, 'output')})"
        middle = {name: float(self.trace(name).nanmedian()) for name in ("ho", "hec3")}
        where = "" if len(shape) == 1 else f" at {' x '.join(map(str, shape[1:]))} positions"
        return (
            f"Uncertainty({count(shape[0], 'prediction')}{where}, {count(k, 'output')}; "
            f"median variance Ho {number(middle['ho'])}, HeC3 {number(middle['hec3'])}, "
            f"median ratio {number(float(self.ratio.nanmedian()))})"
        )

    def _table(self) -> Table:
        *shape, k = self.mean.shape
        positions = "" if len(shape) == 1 else f" at {' x '.join(map(str, shape[1:]))} positions"
        sketches = self.chosen is not None and self.chosen.sketches
        title = f"{count(shape[0], 'prediction')}{positions}, {'random sketches of ' * sketches}{count(k, 'output')}"
        total = math.prod(shape)
        if not total:
            return Table(title)
        rows, more = rows_shown(total, "to_frame()")
        each = math.prod(shape[1:])
        numbering = places(rows)
        if len(shape) > 1:
            numbering = Column("no., position", tuple(f"{row // each}, {row % each}" for row in range(rows)))
        ho, hec3, ratio = (values.reshape(-1)[:rows] for values in (self.trace("ho"), self.trace("hec3"), self.ratio))
        bars = (hec3 / hec3.nan_to_num(0.0).max()).nan_to_num(0.0)
        columns = (
            numbering,
            *([] if sketches else _answers(self, rows)),
            Column("Ho", numbers(ho.tolist())),
            Column("HeC3", numbers(hec3.tolist()), bars=tuple(bars.tolist())),
            Column("HeC3/Ho", tuple(f"{value:.2f}" for value in ratio.tolist())),
        )
        note = f"Variances of the prediction itself{', summed over outputs' if k > 1 else ''}."
        return Table(title, columns, f"{note}\n{more}".strip())


def _columns(u: Uncertainty) -> dict[str, Tensor]:
    """The columns of `Uncertainty.to_frame`."""
    shape = u.mean.shape[:-1]
    columns: dict[str, Tensor] = {}
    if len(shape) > 1:
        axes = [torch.arange(size, device=u.mean.device) for size in (shape[0], shape[1:].numel())]
        columns["prediction"], columns["position"] = torch.meshgrid(*axes, indexing="ij")
    sketches = u.chosen is not None and u.chosen.sketches
    if u.chosen is not None and u.chosen.index is not None:
        columns |= _by_output("output", u.chosen.index, shape)
    if not sketches:
        columns |= _by_output("mean", u.mean, shape)
    if u.likelihood is not None and u.likelihood.has_classes and not sketches:
        columns |= _by_output("probability", u.probabilities, shape)
        if u.chosen is None:
            columns |= _by_output("margin", u.margin, shape)
    for name in u.estimators:
        columns[name] = u.trace(name)
        if sketches:
            columns[f"{name}_error"] = u.trace_error(name)
        elif u.mean.shape[-1] > 1:
            columns |= _by_output(name, u.variance(name), shape)
    columns["ratio"] = u.ratio
    return columns


def _by_output(name: str, values: Tensor, shape: torch.Size) -> dict[str, Tensor]:
    """(m, ...) or (m, ..., 1) values as one column, (m, ..., k) values as a column for each output."""
    if values.shape == shape or values.shape[-1] == 1:
        return {name: values.reshape(shape)}
    return {f"{name}_{output}": column for output, column in enumerate(values.unbind(-1))}


def _answers(u: Uncertainty, rows: int) -> list[Column]:
    """What is predicted, for a table: a class with its probability, or numbers with bounds."""

    def several(values: Tensor) -> tuple[str, ...]:
        return tuple(listing(numbers(row), 3) for row in values.reshape(-1, values.shape[-1])[:rows].tolist())

    k, likelihood = u.mean.shape[-1], u.likelihood
    columns = []
    if u.chosen is not None and u.chosen.index is not None:
        index = u.chosen.index.expand(*u.mean.shape).reshape(-1, k)[:rows].tolist()
        columns.append(Column("output", tuple(listing(row, 3) for row in index), left=True))
    elif likelihood is not None and likelihood.has_classes and likelihood.couples_outputs and k > 1:
        best = u.probabilities.reshape(-1, k)[:rows].max(dim=1)
        probabilities = tuple(f"{value:.3f}" for value in best.values.tolist())
        return [Column("class", tuple(map(str, best.indices.tolist()))), Column("probability", probabilities)]
    if likelihood is not None and likelihood.has_classes:
        return [*columns, Column("probability", several(u.probabilities), left=k > 1)]
    columns.append(Column("mean", several(u.mean), left=k > 1))
    if k == 1:
        low, high = (bound.reshape(-1)[:rows].tolist() for bound in u.interval(0.95))
        bounds = zip(numbers(low), numbers(high), strict=True)
        columns.append(Column("95% interval", tuple(f"{a} to {b}" for a, b in bounds)))
    return columns


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing about a fit: a name, its value, and a sentence.

    Examples:
        >>> Finding("ridge", 1.0, "lambda on the sum scale").words
        'lambda on the sum scale'
    """

    name: str
    value: float | str
    words: str


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
        """All findings in order."""
        return iter(self.findings)

    def __getitem__(self, name: str) -> float | str:
        """The value of the first finding of that name."""
        for finding in self.findings:
            if finding.name == name:
                return finding.value
        raise KeyError(name)

    def __repr__(self) -> str:
        """How many findings; `print` shows them."""
        return f"Diagnostics({count(len(self.findings), 'finding')})"

    def _table(self) -> Table:
        return findings_table(self, "What was approximated, guarded or repaired")

    def __str__(self) -> str:
        """One line a finding."""
        lines = []
        for finding in self.findings:
            value = finding.value if isinstance(finding.value, str) else f"{finding.value:.6g}"
            lines.append(f"{finding.name}: {value} ({finding.words})" if finding.words else f"{finding.name}: {value}")
        return "\n".join(lines)


def findings_table(diagnostics: Diagnostics, title: str) -> Table:
    """Name, value and meaning of each finding; a value that is text and has no sentence stands in its place."""
    rows = []
    for finding in diagnostics:
        value = finding.value if isinstance(finding.value, str) else number(finding.value)
        only_text = isinstance(finding.value, str) and not finding.words
        rows.append((finding.name, "", value) if only_text else (finding.name, value, finding.words))
    names, values, texts = zip(*rows, strict=True) if rows else ((), (), ())
    return Table(title, (Column("", names, left=True), Column("", values), Column("", texts, left=True)))
