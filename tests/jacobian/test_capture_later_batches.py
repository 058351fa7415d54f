"""What the first examples do not show: gates that are shut, experts that wait, rows that are reordered later.

Everything is compared with tangents by one backward pass for each example and output, run alone, and dense algebra.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
import whence
from capture_oracle import assert_captures, selected
from whence.errors import UncapturedParameterError
from whence.jacobian.capture import Capture

WIDTH, OUTPUTS, BATCH = 4, 2, 6
RIDGE = 0.3


# --- Models -----------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A second path that opens where the first input is positive, through an operation that may have no rule."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(WIDTH, OUTPUTS)
        self.weight = nn.Parameter(torch.randn(WIDTH, OUTPUTS))
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, OUTPUTS) if way == "bilinear" else None
        self.cell = nn.RNN(WIDTH, OUTPUTS, batch_first=True) if way == "rnn" else None

    def path(self, x: Tensor) -> Tensor:
        if self.bilinear is not None:
            return self.bilinear(x, x) + x @ self.weight
        if self.cell is not None:
            return self.cell(torch.stack([x, x.flip(1)], 1))[0][:, -1] + x @ self.weight
        if self.way == "tensordot":
            return torch.tensordot(x, self.weight, 1)
        return torch.einsum("ni,io->no", x, self.weight) + x @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.relu(x[:, :1]) * self.path(x)


class Experts(nn.Module):
    """Examples are sent to one of two experts by the sign of their first input."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, OUTPUTS)) for _ in "ab"]
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        out = x.new_zeros(len(x), OUTPUTS)
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero().squeeze(1)
            if len(rows) or not self.skip:
                out = out.index_copy(0, rows, expert(hidden[rows]))
        return out


class Heads(nn.Module):
    """One head for each task; a batch is of one task, or of both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, OUTPUTS), nn.Linear(WIDTH, OUTPUTS)])
        self.scale = nn.ParameterList([torch.ones(OUTPUTS), torch.ones(OUTPUTS)])

    def forward(self, x: Tensor) -> Tensor:
        hidden, second = torch.tanh(self.trunk(x)), x[:, :1] > 0
        if not bool(second.any()):
            return self.heads[0](hidden) * self.scale[0]
        if bool(second.all()):
            return self.heads[1](hidden) * self.scale[1]
        return torch.where(second, self.heads[1](hidden) * self.scale[1], self.heads[0](hidden) * self.scale[0])


class Added(nn.Module):
    """A second head is added where it is asked for, through an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, OUTPUTS)
        self.weight = nn.Parameter(torch.randn(WIDTH, OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if bool((x[:, 0] > 0).any()):
            out = out + F.relu(x[:, :1]) * torch.einsum("ni,io->no", x, self.weight)
        return out


def unsort_stack(y: Tensor, order: Tensor) -> Tensor:
    rows: list[Any] = [None] * len(y)
    for at, place in enumerate(order.tolist()):
        rows[place] = y[at]
    return torch.stack(rows)


def unsort_assign(y: Tensor, order: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    for at, place in enumerate(order.tolist()):
        out[place] = y[at]
    return out


UNSORT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda y, order: y[order.argsort()],
    "index_select": lambda y, order: y.index_select(0, order.argsort()),
    "gather": lambda y, order: y.gather(0, order.argsort()[:, None].expand_as(y)),
    "scatter": lambda y, order: torch.zeros_like(y).scatter(0, order[:, None].expand_as(y), y),
    "index_put": lambda y, order: torch.zeros_like(y).index_put((order,), y),
    "index_copy": lambda y, order: torch.zeros_like(y).index_copy(0, order, y),
    "cat": lambda y, order: torch.cat([y[int(at) : int(at) + 1] for at in order.argsort()]),
    "stack": unsort_stack,
    "assign": unsort_assign,
    "permutation matrix": lambda y, order: torch.eye(len(y), dtype=y.dtype)[order.argsort()] @ y,
    "embedding": lambda y, order: F.embedding(order.argsort(), y),
}


class Sorted(nn.Module):
    """Examples are sorted by their first input, as sequences are by length, and put back in the end."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.body = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(descending=True, stable=True)
        return UNSORT[self.way](self.body(x[order]), order)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"gate, {way}": (lambda way=way: Gated(way)) for way in ("einsum", "tensordot", "bilinear", "rnn")},
    "experts": lambda: Experts(skip=False),
    "experts, those without examples left out": lambda: Experts(skip=True),
    "heads": Heads,
    "added head": Added,
    **{f"sorted, {way}": (lambda way=way: Sorted(way)) for way in UNSORT},
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs whose first number is negative and falls in the first two batches, and does as it likes in the others."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * BATCH, WIDTH, generator=draw, dtype=torch.float64)
    x[: 2 * BATCH, 0] = -x[: 2 * BATCH, 0].abs().sort().values - 0.1
    x[2 * BATCH : 3 * BATCH, 0] = x[2 * BATCH : 3 * BATCH, 0].abs() + 0.1
    return x, torch.randn(4 * BATCH, OUTPUTS, generator=draw, dtype=torch.float64)


def batches(x: Tensor, y: Tensor, size: int = BATCH) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make().double().eval()


# --- Tangents ---------------------------------------------------------------------------------------------------------


@every_model
def test_later_batches_give_the_gradients_of_single_examples(make: Callable[[], nn.Module]) -> None:
    model, (x, _) = made(make), data()
    capture = Capture(model, selected(model), example_inputs=x[:BATCH])
    for start in range(0, len(x), BATCH):
        assert_captures(capture, model, x[start : start + BATCH])
    assert_captures(capture, model, x)
    assert_captures(capture, model, x[-1:])


# --- Fits -------------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize(
    "structure",
    [
        whence.Exact(road="primal"),
        whence.Exact(road="dual"),
        whence.Core(size=400, tolerance=0.0),
        whence.Sketch(size=400),
    ],
    ids=["exact, primal", "exact, dual", "core", "sketch"],
)
def test_fits_are_dense_algebra(make: Callable[[], nn.Module], structure: whence.Structure) -> None:
    model, (x, y) = made(make), data()
    points = data(seed=2)[0]
    tracer = whence.fit(model, batches(x, y), structure=structure, ridge=RIDGE, progress=False)
    f, tangents, _ = oracles.tangents_of(model, x)
    residuals = y.numpy() - f
    wanted = oracles.covariances(
        oracles.tangents_of(model, points)[1], tangents, residuals, RIDGE, sigma=oracles.noise_covariance(residuals)
    )
    predicted = tracer.predict(points)
    for name in ("hec0", "hec3"):
        found = np.asarray(predicted.covariance(name))
        np.testing.assert_allclose(found, wanted[name], rtol=1e-6, atol=1e-8 * abs(wanted[name]).max(), err_msg=name)


every_diagonal = pytest.mark.parametrize(
    "structure", [whence.EKFAC(), whence.KFAC(), whence.Diagonal()], ids=["ekfac", "kfac", "diagonal"]
)


def same_predictions(one: whence.Tracer, two: whence.Tracer) -> None:
    points = data(seed=2)[0]
    for name in ("hec3", "laplace"):
        found, wanted = (np.asarray(tracer.predict(points).covariance(name)) for tracer in (one, two))
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8 * abs(wanted).max(), err_msg=name)


@every_diagonal
@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("gate", "heads", "added"))])
def test_the_order_of_the_data_does_not_matter(name: str, structure: whence.Structure) -> None:
    model, (x, y) = made(MODELS[name]), data()
    some = ((x, y), (x.roll(2 * BATCH, 0), y.roll(2 * BATCH, 0)))  # of every second example another output is drawn
    same_predictions(
        *(whence.fit(model, batches(*one), structure=structure, ridge=RIDGE, progress=False) for one in some)
    )


@every_diagonal
@pytest.mark.parametrize("way", UNSORT)
def test_sorting_leaves_the_fit_of_the_plain_network(way: str, structure: whence.Structure) -> None:
    model, (x, y) = made(lambda: Sorted(way)), data()
    same_predictions(
        *(
            whence.fit(one, batches(x, y), structure=structure, ridge=RIDGE, progress=False)
            for one in (model, model.body)
        )
    )


def test_experts_of_later_batches_are_layers_of_their_own() -> None:
    model, (x, y) = made(lambda: Heads()), data()
    tracer = whence.fit(model, batches(x, y), structure=whence.EKFAC(), ridge=RIDGE, progress=False)
    kinds = {block.name: block.kind for block in tracer.bread.gradients.blocks}
    assert kinds["heads.1.weight"] == kinds["heads.0.weight"] == "kronecker"
    assert not [note for note in tracer.diagnostics if "do not depend on heads.1" in str(note)]


def test_rows_that_were_reordered_are_noted() -> None:
    model, (x, y) = made(lambda: Sorted("index")), data()
    tracer = whence.fit(model, batches(x, y), structure=whence.Core(size=400), ridge=RIDGE, progress=False)
    assert any("reorders the examples" in str(finding) for finding in tracer.diagnostics)


def test_reordering_that_starts_with_predictions() -> None:
    model, (x, y) = made(lambda: Sorted("index")), data()
    x, y = x[: 2 * BATCH], y[: 2 * BATCH]
    points = data(seed=2)[0]
    for structure in (whence.Core(size=400), whence.EKFAC(), whence.Exact()):
        tracer = whence.fit(model, batches(x, y), structure=structure, ridge=RIDGE, progress=False)
        together = np.asarray(tracer.predict(points).covariance("hec3"))
        apart = np.concatenate([np.asarray(tracer.predict(point[None]).covariance("hec3")) for point in points])
        np.testing.assert_allclose(together, apart, rtol=1e-6, atol=1e-9 * abs(apart).max())


def test_saved_fits_with_experts_are_loaded_and_agree(tmp_path: Any) -> None:
    model, (x, y) = made(lambda: Heads()), data()
    points = data(seed=2)[0]
    tracer = whence.fit(model, batches(x, y), structure=whence.EKFAC(), ridge=RIDGE, progress=False)
    tracer.save(tmp_path / "fit.whence")
    wanted = np.asarray(tracer.predict(points).covariance("hec3"))
    for loader in (None, batches(x, y)):
        again = whence.load(tmp_path / "fit.whence", model, train_loader=loader)
        first = np.asarray(again.predict(points[:1]).covariance("hec3"))
        np.testing.assert_allclose(first, wanted[:1], rtol=1e-8)
        np.testing.assert_allclose(np.asarray(again.predict(points).covariance("hec3")), wanted, rtol=1e-8)


# --- What is refused --------------------------------------------------------------------------------------------------


class Twofold(nn.Module):
    """A linear layer whose weight is used by `einsum`, too, on later data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if bool((x[:, 0] > 0).any()):
            out = out + F.relu(x[:, :1]) * torch.einsum("ni,oi->no", x, self.linear.weight)
        return out


class Turned(nn.Module):
    """A square weight that is used the other way round on later data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        later = bool((x[:, 0] > 0).any())
        return F.linear(x, self.weight) + (F.relu(x[:, :1]) * F.linear(x, self.weight.t()) if later else 0)


@pytest.mark.parametrize("make", [Twofold, Turned])
def test_another_form_on_later_batches_is_refused_and_never_wrong(make: Callable[[], nn.Module]) -> None:
    model, (x, _) = made(make), data()
    y = torch.randn(len(x), model(x).shape[1], dtype=torch.float64)
    with pytest.raises(UncapturedParameterError, match=r"weight to be used as on the first batch.*every kind"):
        whence.fit(model, batches(x, y), structure="core", ridge=RIDGE, progress=False)
    assert_captures(Capture(model, selected(model), example_inputs=x[2 * BATCH :]), model, x)
    tracer = whence.fit(model, batches(x, y), structure=whence.Exact(road="primal"), ridge=RIDGE, progress=False)
    wanted = oracles.leverage_blocks(oracles.tangents_of(model, x)[1], RIDGE)
    np.testing.assert_allclose(tracer.leverage, np.diagonal(wanted, axis1=1, axis2=2), rtol=1e-6, atol=1e-9)
