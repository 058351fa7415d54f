"""Fits that look at a few mixtures of the outputs: exact with all of them, and exact for the curvature they make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import loss_oracles
import oracles
import whence
from classification import ESTIMATORS, PROBLEMS, N, categorical, inputs
from networks import Decoder
from whence.data.batches import Batches
from whence.influence.fitted import leave_one_out_leverage
from whence.jacobian import functionals
from whence.jacobian.functionals import SoftmaxColumns
from whence.jacobian.jacobian import Jacobian
from whence.jacobian.network import Network, Selection
from whence.jacobian.sketches import HessianSketch, Labels, _scrambled, random_signs, random_uniform
from whence.runtime.execution import Progress

TEST = inputs(5, 11)
EXACT = [whence.Exact("primal"), whence.Exact("dual"), whence.Core(size=99, tolerance=0)]


def assert_close(found: Any, wanted: Any, name: str = "", rtol: float = 1e-7) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-3 * rtol * np.abs(wanted).max(), err_msg=name)


def columns_of(tracer: whence.Tracer) -> np.ndarray:
    """S (n, K, c) of a fit, as it was looked at."""
    problem = tracer.problem
    assert problem.sketch is not None
    assert problem.hessian_roots is not None
    with torch.no_grad():
        pairs = [(batch.inputs, problem.network(batch.inputs.inputs)) for batch in problem.batches]
    return torch.cat([columns_seen(*pair)[:, :, :-1] for pair in pairs]).numpy()


def columns_seen(view: Any, outputs: Tensor) -> Tensor:
    """A (n, K, c) of a view of outputs (n, K), by autograd."""
    rows = torch.autograd.functional.jacobian(view.apply, outputs.double())  # (n, c, n, K)
    return torch.stack([rows[at, :, at].T for at in range(len(outputs))])


def oracle(model: nn.Module, x: Tensor, residuals: np.ndarray, tracer: whence.Tracer, **options: Any) -> dict[str, Any]:
    """Covariances by their definitions, with S S^T for the Hessians."""
    columns = columns_of(tracer)
    hessians = columns @ columns.transpose(0, 2, 1)
    numbers = tracer.problem.numbers
    tangents, test_tangents = oracles.tangents_of(model, x)[1], oracles.tangents_of(model, TEST)[1]
    return loss_oracles.covariances(
        test_tangents, tangents, residuals, hessians, tracer.ridge, noise=hessians, numbers=numbers, **options
    )


@pytest.mark.parametrize("kind", ["three classes", "soft targets", "three logits"])
@pytest.mark.parametrize("structure", [*EXACT, "ekfac", whence.EKFAC(meat="two_bases"), "kfac", "diagonal"], ids=str)
def test_all_columns_are_all_outputs(structure: Any, kind: str) -> None:
    problem = PROBLEMS[kind]
    every, found = (problem.fit(structure=structure, hessian_columns=outputs) for outputs in ("all", 4))
    for name in ESTIMATORS:
        one, other = (tracer.predict(TEST, outputs=[0, 1, 2]).covariance(name) for tracer in (found, every))
        assert_close(one, other, name, rtol=1e-6)
    if found.loo.policy == "exact":  # q / (1 + q) of single coordinates depends on the coordinates
        assert_close(found.leverage.sum(1), every.leverage.sum(1))
    assert_close(found.loo_residuals.norm(dim=1), every.loo_residuals.norm(dim=1), rtol=1e-6)
    assert_close(found.residuals.norm(dim=1), every.residuals.norm(dim=1))
    assert found.degrees_of_freedom == pytest.approx(every.degrees_of_freedom)


@pytest.mark.parametrize(
    ("structure", "columns"), [*zip(EXACT, (1, 3, 2), strict=True), (whence.Exact("matrix_free"), 2)]
)
def test_leaving_out_is_exact_for_the_sketched_curvature(structure: Any, columns: int) -> None:
    problem = categorical(6)
    tracer = problem.fit(structure=structure, hessian_columns=columns)
    residuals, _ = problem.terms(oracles.tangents_of(problem.model, problem.x)[0])
    wanted = oracle(problem.model, problem.x, residuals, tracer)
    found = tracer.predict(TEST, outputs=list(range(6)))
    for name in ESTIMATORS:
        assert_close(found.covariance(name), wanted[name], name)


def test_weights_groups_and_recentering() -> None:
    problem = categorical(6)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    weights[2] = 0.0
    groups = np.arange(N) // 2
    loader = [(problem.x, problem.y, weights)]
    options: dict[str, Any] = {"ridge": 0.4, "progress": False, "hessian_columns": 3}
    tracer = whence.fit(problem.model, loader, "categorical", groups=groups, **options)
    residuals, _ = problem.terms(oracles.tangents_of(problem.model, problem.x)[0])
    wanted = oracle(problem.model, problem.x, weights.numpy()[:, None] * residuals, tracer, groups=groups)
    found = tracer.predict(TEST, outputs=list(range(6)))
    for name in ("ho", "hec0", "hec2", "hec3"):
        assert_close(found.covariance(name), wanted[name], name)
    every, moved = (
        whence.fit(problem.model, loader, "categorical", recenter=True, **{**options, "hessian_columns": outputs})
        for outputs in ("all", 6)
    )
    listed = list(range(6))
    assert_close(moved.predict(TEST, outputs=listed).mean, every.predict(TEST).mean)
    assert_close(moved.predict(TEST, outputs=listed).hec3, every.predict(TEST).hec3, rtol=1e-6)


def test_squared_error_has_one_variance_for_all_outputs() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double().eval()
    x, y = inputs(), torch.randn(N, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    every, found = (
        whence.fit(net, [(x, y)], ridge=0.3, hessian_columns=outputs, progress=False) for outputs in ("all", 5)
    )
    assert_close(found.predict(TEST).hec3, every.predict(TEST).hec3, rtol=1e-6)
    variance = float((y - net(x).detach()).square().mean())
    assert_close(found.sigma, [[variance]])
    inverse = found.predict(TEST).laplace / variance
    assert_close(inverse, every.predict(TEST).laplace / float(every.sigma.diagonal().mean()))
    unbiased = whence.fit(net, [(x, y)], ridge=0.3, hessian_columns=5, noise="unbiased", progress=False)
    assert_close(unbiased.sigma, [[variance * 5 * N / (5 * N - found.degrees_of_freedom)]])


def softmax_hessians(outputs: Tensor, weights: Tensor) -> Tensor:
    """Blocks w (diag(p) - p p^T) of outputs (n, t, k), as (n, t k, t k)."""
    p = outputs.softmax(2)
    blocks = weights[:, :, None, None] * (p.diag_embed() - p.unsqueeze(3) * p.unsqueeze(2))
    return torch.stack([torch.block_diag(*one) for one in blocks])


@pytest.mark.parametrize("columns", [1, 2, 5, 8])
@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
def test_sampled_labels_are_unbiased(columns: int, spread: float) -> None:
    """The mean of S S^T over many draws is the Hessian, and r the residual; flat, peaked and certain softmax."""
    n, t, k = 3000, 3, 6
    draw = torch.Generator().manual_seed(2)
    outputs = spread * torch.randn(1, t, k, generator=draw, dtype=torch.float64)
    y = torch.randint(0, k, (1, t), generator=draw)
    weights = torch.tensor([[1.0, 0.3, 2.0]], dtype=torch.float64)
    many, labels, loss = outputs.expand(n, -1, -1), y.expand(n, -1), whence.Categorical()
    network = Network(Given(outputs[0]))
    data = [(torch.zeros(n, 1), labels, weights.expand(n, -1))]
    batches = Batches(data, torch.device("cpu"), Progress(False))
    sketch = HessianSketch(network, loss, columns, 7, torch.float64)
    ((_, found),) = list(sketch.derivatives(batches.first(), "batch 0"))
    sketch.labels, batches.sketch = Labels(found.classes, found.floors), sketch
    view = batches.first().inputs
    seen = columns_one_by_one(view, many.flatten(1))
    roots, residuals = seen[:, :, :-1], seen[:, :, -1]
    p = outputs[0].softmax(1)
    wanted = weights[0].unsqueeze(1) * (torch.nn.functional.one_hot(y[0], k) - p)
    torch.testing.assert_close(residuals, wanted.reshape(1, -1).expand(n, -1))
    torch.testing.assert_close(found.gram, seen.mT @ seen, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.outputs, torch.einsum("nk,nkc->nc", many.flatten(1), seen), rtol=1e-9, atol=1e-9)
    products = roots @ roots.mT
    error = products.std(0) / n**0.5
    gap = (products.mean(0) - softmax_hessians(outputs, weights)[0]).abs()
    rare = 4 * products.abs().amax() / n  # what was never drawn has no standard error
    assert float((gap - 5 * error).max()) <= float(rare)
    if columns >= k:  # every label of a position is chosen once: only signs between positions are left to chance
        own = torch.block_diag(*torch.ones(t, k, k)).bool()
        assert float(gap[own].max()) < 1e-12


class Given(nn.Module):
    """The same outputs for every example."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs.expand(len(x), *self.outputs.shape)


def columns_one_by_one(view: Any, outputs: Tensor) -> Tensor:
    """As `columns_seen`, for examples that are many."""
    outputs = outputs.clone().requires_grad_()
    seen = view.apply(outputs)
    each = [torch.autograd.grad(seen[:, at].sum(), outputs, retain_graph=True)[0] for at in range(seen.shape[1])]
    return torch.stack(each, dim=2)


def test_certain_labels_keep_their_digits() -> None:
    """1 - p of a label with p = 1 - 1e-12, in single precision: the gradient of the largest output is its own sum."""
    outputs = torch.tensor([[28.0, 0.0, 0.3]])
    view = SoftmaxColumns(None, torch.tensor([[[0, 1]]]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    found = columns_one_by_one(view, outputs)[0].double()
    p = outputs[0].double().softmax(0)
    rest = float(p[1] + p[2])
    wanted = torch.tensor([[rest, -1.0], [-float(p[1]), 1.0], [-float(p[2]), -float(p[2])]], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    _, gram = view.products(outputs)
    torch.testing.assert_close(gram[0], wanted.T @ wanted, rtol=1e-5, atol=0)


def test_half_precision_is_widened_before_the_softmax() -> None:
    outputs = torch.tensor([[8.0, 0.0, 0.5]], dtype=torch.bfloat16)
    view = SoftmaxColumns(None, torch.tensor([[[0, 2]]]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    wide, half = (columns_one_by_one(view, one)[0] for one in (outputs.double(), outputs))
    torch.testing.assert_close(half.double(), wide, rtol=1e-2, atol=0)


def test_random_signs_and_numbers() -> None:
    """Balanced, independent of each other, of examples and not of batches; and the bits that were published."""
    examples, places = torch.arange(500).unsqueeze(1), torch.arange(40).expand(500, -1)
    signs = random_signs(examples, places, 70, 3)
    assert signs.shape == (500, 40, 70)
    assert set(signs.unique().tolist()) == {-1, 1}
    flat = signs.flatten(0, 1).double()
    products = flat.T @ flat / len(flat)
    assert float((products - torch.eye(70, dtype=torch.float64)).abs().max()) < 5 / len(flat) ** 0.5
    for axis in (0, 1):  # of neighbours
        one, other = signs.narrow(axis, 1, 30).double(), signs.narrow(axis, 0, 30).double()
        assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5
    uniform = random_uniform(examples, places, 3)
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    counts = torch.histc(uniform, 20, 0.0, 1.0)
    assert float((counts - 1000).abs().max()) < 5 * 1000**0.5
    torch.testing.assert_close(random_signs(examples[7:9], places[7:9], 70, 3), signs[7:9], rtol=0, atol=0)
    assert not torch.equal(random_signs(examples, places, 70, 4), signs)
    state = np.uint64(0x9E3779B97F4A7C15)  # the first number of SplitMix64 from state zero
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    assert int(state) == 0xE220A8397B1DCDAF
    assert int(_scrambled(torch.zeros(1, dtype=torch.int64))[0]) % 2**64 == int(state)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_fits_do_not_depend_on_batches_and_padding(likelihood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other batches, chunks of one example, and padding with labels that do not count, on either side."""
    x, y = sentences(6, 3)
    if likelihood != "categorical":
        y = torch.nn.functional.one_hot(y.clamp_min(0), 5).double()
    model = Tagger(mixed=False)
    options: dict[str, Any] = {"likelihood": likelihood, "ridge": 0.5, "hessian_columns": 4, "progress": False}
    wanted = whence.fit(model, [(x, y)], **options)
    assert wanted.problem.gram is not None
    ways: dict[str, list[Any]] = {"two batches": [(x[:4], y[:4]), (x[4:], y[4:])], "chunks": [(x, y)]}
    if likelihood == "categorical":
        zeros, none = torch.zeros(6, 2, 3, dtype=torch.float64), torch.full((6, 2), -100)
        for name, sides in (("right", (x, zeros, y, none)), ("left", (zeros, x, none, y))):
            ways[name] = [(torch.cat(sides[:2], 1), torch.cat(sides[2:], 1))]
    for name, data in ways.items():
        if name == "chunks":
            monkeypatch.setattr("whence.jacobian.sketches.CHUNK_BYTES", 1)
            monkeypatch.setattr("whence.jacobian.sketches.MIXTURE_BYTES", 1)
            monkeypatch.setitem(functionals.CHUNK, "cpu", 1)
        found = whence.fit(model, data, **options)
        assert found.problem.gram is not None
        assert_close(found.problem.gram, wanted.problem.gram, name, rtol=1e-9)
        for estimator in ("ho", "hec3"):
            one, other = (tracer.predict(x, outputs="all").variance(estimator) for tracer in (found, wanted))
            assert_close(one, other, f"{name}: {estimator}", rtol=1e-8)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_lengths_are_those_of_the_outputs(likelihood: str) -> None:
    """Residuals, leave-one-out residuals and their products in A, by hand; weights of examples included."""
    x, y = sentences(6, 3)
    if likelihood != "categorical":
        y = torch.nn.functional.one_hot(y.clamp_min(0), 5).double()
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0, 1.5], dtype=torch.float64)
    tracer = whence.fit(Tagger(), [(x, y, weights)], likelihood, ridge=0.5, hessian_columns=4, progress=False)
    problem = tracer.problem
    (batch,) = list(problem.batches)
    with torch.no_grad():
        seen = columns_seen(batch.inputs, problem.network(batch.inputs.inputs))
    for found, coordinates in (
        (tracer.residuals, tracer.weighted_residuals),
        (tracer.loo_residuals, tracer.adjusted.hec3),
    ):
        vectors = (seen @ coordinates.unsqueeze(2)).squeeze(2)
        vectors = torch.where(weights > 0, 1 / weights, 0.0).unsqueeze(1) * vectors
        assert_close(found.norm(dim=1), vectors.norm(dim=1))
    roots = seen[:, :, :-1]
    assert_close(tracer.noise_variance, tracer.noise_scale * roots.square().sum((1, 2)))
    frame = tracer.training_frame()
    change = -(leave_one_out_leverage(tracer) @ tracer.weighted_residuals.unsqueeze(2))
    after = seen[:, :, -1] - (roots @ change[:, :-1]).squeeze(2)  # change is S^T of the outputs' change, and r^T of it
    after = torch.where(weights > 0, 1 / weights, 0.0).unsqueeze(1) * after
    assert_close(frame["suspicion"].to_numpy(), after.norm(dim=1))


@pytest.mark.parametrize("columns", [1, 3])
def test_curvature_of_a_transformer_is_unbiased(columns: int) -> None:
    """The mean of sum_i J^T S S^T J over seeds is that of all outputs, to five standard errors in every entry."""
    model = Decoder(11, seed=5).double().eval()
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (3, 6), generator=draw)
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[1, 3:] = -100
    outputs = model(x)
    leaves = list(model.parameters())
    rows = [torch.autograd.grad(one, leaves, retain_graph=True) for one in outputs.flatten()]
    jacobians = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).reshape(3, 55, -1)
    outputs = outputs.detach()
    hessians = softmax_hessians(outputs, (y >= 0).double())
    wanted = (jacobians.mT @ hessians @ jacobians).sum(0)
    draws = []
    for seed in range(200):
        data = Batches([(x, y)], torch.device("cpu"), Progress(False))
        sketch = HessianSketch(Network(model), whence.Categorical(), columns, seed, torch.float64)
        ((seen, _),) = list(sketch.derivatives(data.first(), "batch 0"))
        pulled = columns_one_by_one(seen.inputs, outputs.flatten(1)).mT @ jacobians
        roots = pulled[:, :-1].flatten(0, 1)
        draws.append(roots.T @ roots)
        if seed == 0:  # the capture of layers gives the same rows
            selection = Selection(dict(model.named_parameters()))
            features = Jacobian(Network(model), selection, None, torch.float64)
            ((_, found),) = list(features.rows(seen.inputs, columns + 1))
            assert_close(found, pulled, rtol=1e-8)
    each = torch.stack(draws)
    error = each.std(0) / len(each) ** 0.5
    gap = (each.mean(0) - wanted).abs()
    assert float((gap - 5 * error).max()) <= 1e-9 * float(wanted.abs().max())
    assert float(error.diagonal().mean()) < 0.2 * float(wanted.diagonal().mean())  # or the test would say little


def test_whole_sentences_are_left_out_as_by_another_fit() -> None:
    """A sentence of weight zero: its residual in that fit, and the predictions, are the closed form's."""
    x, y = sentences(5, 3)
    model = Tagger()
    options: dict[str, Any] = {"likelihood": "categorical", "ridge": 0.5, "hessian_columns": 4, "progress": False}
    tracer = whence.fit(model, [(x, y)], **options)
    _, tangents, _ = oracles.tangents_of(model, x)
    jacobians = torch.as_tensor(tangents).reshape(5, 15, -1)
    (batch,) = list(tracer.problem.batches)
    with torch.no_grad():
        seen = columns_seen(batch.inputs, tracer.problem.network(batch.inputs.inputs))
    gradients = seen.mT @ jacobians  # (n, c + 1, d)
    left_out = 2
    others = [at for at in range(5) if at != left_out]
    roots = gradients[others, :-1].flatten(0, 1)
    inverse = torch.linalg.inv(roots.T @ roots + 0.5 * torch.eye(roots.shape[1], dtype=torch.float64))
    # u = r + S S^T J F_(-i)^-1 J^T r, as coordinates in (S, r)
    wanted = torch.cat([gradients[left_out, :-1] @ inverse @ gradients[left_out, -1], torch.ones(1)])
    assert_close(tracer.adjusted.hec3[left_out], wanted)


def test_more_columns_are_nearer() -> None:
    """The distance of HeC3's trace from that of a fit of all outputs, over eight draws."""
    torch.manual_seed(4)
    classes = 20
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, classes)).double().eval()
    x = inputs(40, 3)
    y = torch.randint(0, classes, (40,), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"likelihood": "categorical", "ridge": 1.0, "progress": False}
    wanted = whence.fit(net, [(x, y)], hessian_columns="all", **options).predict(TEST).hec3.sum(1)
    gaps = []
    for columns in (2, 6, 14, 20):
        draws = []
        for seed in range(8):
            execution = whence.Execution(seed=seed)
            tracer = whence.fit(net, [(x, y)], hessian_columns=columns, execution=execution, **options)
            draws.append((tracer.predict(TEST, outputs="all").hec3.sum(1) / wanted - 1).abs().mean())
        gaps.append(float(torch.stack(draws).mean()))
    assert gaps[0] > gaps[1] > gaps[2] > gaps[3]
    assert gaps[2] < 0.2
    assert gaps[3] < 1e-8


class Tagger(nn.Module):
    """Five classes at every position, with the whole sentence in sight unless words are not `mixed`."""

    def __init__(self, mixed: bool = True) -> None:
        super().__init__()
        self.mixed = mixed
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(3, 3).double(), nn.Linear(3, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden + hidden.mean(1, keepdim=True) if self.mixed else hidden)


def sentences(n: int, t: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n, t), generator=generator)
    y[0, 1:] = -100
    return torch.randn(n, t, 3, generator=generator, dtype=torch.float64), y


@pytest.mark.parametrize("structure", ["exact", "ekfac", "core"])
def test_positions_and_columns(structure: str) -> None:
    """All columns of all positions are all outputs, and sentences are left out as a whole."""
    x, y = sentences(4, 3)
    options: dict[str, Any] = {"likelihood": "categorical", "structure": structure, "ridge": 0.5, "progress": False}
    every, found = (whence.fit(Tagger(), [(x, y)], hessian_columns=outputs, **options) for outputs in ("all", 15))
    test, _ = sentences(2, 4, seed=1)
    for name in ESTIMATORS:
        one, other = (tracer.predict(test, outputs="all").variance(name) for tracer in (found, every))
        assert_close(one, other, name, rtol=1e-6)
    assert found.predict(test).hec3.shape == (2, 4, 1)  # the predicted class by default
    assert found.problem.numbers == every.problem.numbers == (4 * 3 - 2) * 4


def test_labels_of_sequences_of_other_lengths() -> None:
    """Shorter sequences in a batch of their own, and padded ones: labels are sampled and stored for each length."""
    x, y = sentences(6, 4)
    y[4:, 2:] = -100
    options: dict[str, Any] = {"likelihood": "categorical", "ridge": 0.5, "hessian_columns": 4, "progress": False}
    model = Tagger(mixed=False)
    padded = whence.fit(model, [(x, y)], **options)
    found = whence.fit(model, [(x[:4], y[:4]), (x[4:, :2], y[4:, :2])], **options)
    for name in ("ho", "hec3"):
        one, other = (tracer.predict(x, outputs="all").variance(name) for tracer in (found, padded))
        assert_close(one, other, name)


def test_sequences_of_other_lengths() -> None:
    """With mixtures of outputs, sequences of every length are seen through as many of them."""
    batches = [sentences(3, 4), sentences(2, 2, seed=2)]
    tracer = whence.fit(Tagger(), batches, "categorical", ridge=0.5, hessian_columns=20, progress=False)
    x, y = sentences(2, 2, seed=2)
    padded = torch.cat([x, torch.zeros(2, 2, 3, dtype=torch.float64)], 1), torch.cat([y, torch.full((2, 2), -100)], 1)

    class Masked(Tagger):  # the mean of the words that are there
        def forward(self, x: Tensor) -> Tensor:
            there = (x != 0).any(-1, keepdim=True)
            hidden = self.first(x).tanh()
            mean = (hidden * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)
            return self.last(hidden + mean)

    wanted = whence.fit(Masked(), [batches[0], padded], "categorical", ridge=0.5, hessian_columns="all", progress=False)
    test, _ = sentences(2, 4, seed=1)
    assert_close(tracer.predict(test, outputs="all").hec3, wanted.predict(test).hec3, rtol=1e-6)


def test_many_outputs_are_sketched_by_default_and_it_is_told() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(3, 70).double(), inputs()
    y = torch.arange(N) % 70
    tracer = whence.fit(net, [(x, y)], "categorical", "diagonal", ridge=0.3, progress=False)
    assert tracer.problem.k == 17
    assert "70 outputs" in repr(tracer)
    assert "of 70 outputs, 16 random columns of the loss's Hessian were used" in str(tracer.diagnostics)
    assert tracer.predict(TEST).hec3.shape == (5, 1)
    assert tracer.predict(TEST, outputs="all").hec3.shape == (5, 70)
    everything = whence.fit(net, [(x, y)], "categorical", "diagonal", ridge=0.3, hessian_columns="all", progress=False)
    assert everything.problem.k == 70
    assert everything.predict(TEST).hec3.shape == (5, 70)


@pytest.mark.parametrize("wrong", ["some", 0, -1, 2.5, True, [1, 2], None])
def test_columns_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(whence.InputError, match=r'expected hessian_columns to be "auto", "all", or how many columns'):
        categorical(3).fit(hessian_columns=wrong)


def test_what_needs_all_outputs() -> None:
    with pytest.raises(whence.InputError, match=r'expected loo="example" in a fit of 2 mixtures'):
        PROBLEMS["three logits"].fit(hessian_columns=2, loo="output")


@pytest.mark.parametrize("structure", ["exact", "core"])
@pytest.mark.parametrize("outputs", ["all", 4])
def test_sentences_are_traced_to_sentences(structure: str, outputs: Any) -> None:
    """Shares are of the predicted classes' variance, at all positions together."""
    options: dict[str, Any] = {"likelihood": "categorical", "structure": structure, "ridge": 0.5, "progress": False}
    tracer = whence.fit(Tagger(), [sentences(6, 3)], hessian_columns=outputs, **options)
    test, _ = sentences(2, 4, seed=1)
    found = tracer.attribute(test, top=3)
    wanted = tracer.predict(test, outputs="predicted")
    for name in ("ho", "hec3"):
        assert_close(found.shares(name).total, wanted.trace(name).sum(1), rtol=1e-6)
        assert found.shares(name).index.shape == (2, 3)
    assert found.hec3.pull.shape == (2, 3, 4)
    assert len(tracer.explain(test).verdicts) == 2
    removed = tracer.what_if(test, remove=[1])
    assert removed.change.shape == (2, 4)
    assert len(tracer.suggest(2, pool=test).index) == 2
    assert len(tracer.training_frame()) == 6
    with pytest.raises(whence.InputError, match="Change the labels in the data"):
        tracer.what_if(test, relabel={0: torch.zeros(3, dtype=torch.long)})


@pytest.mark.parametrize("outputs", ["all", 6])
@pytest.mark.parametrize("options", [{}, {"meat": "two_bases"}, {"basis": "gradients"}, None], ids=str)
def test_a_very_long_side_of_a_layer_has_no_basis(options: Any, outputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more outputs than a factor may have, EKFAC is diagonal in them: by hand, for one layer."""
    monkeypatch.setattr("whence.curvature.kronecker.LARGEST_CLASSES", 5)
    torch.manual_seed(0)
    net = nn.Linear(3, 6).double().eval()
    monkeypatch.setattr("whence.curvature.kronecker.LARGEST_SIDE", 5)
    monkeypatch.setattr("whence.curvature.accumulate.LARGEST_SIDE", 5)
    structure = whence.KFAC() if options is None else whence.EKFAC(**options)
    x, y, ridge = inputs(), torch.arange(N) % 6, 0.3
    tracer = whence.fit(net, [(x, y)], "categorical", structure, ridge=ridge, hessian_columns=outputs, progress=False)
    assert "the outputs of weight are too many for a basis of their own" in str(tracer.diagnostics)
    a = np.concatenate([x.numpy(), np.ones((N, 1))], axis=1)
    test = np.concatenate([TEST.numpy(), np.ones((len(TEST), 1))], axis=1)
    vectors = np.linalg.eigh(a.T @ a)[1]
    p = net(x).detach().softmax(1).numpy()
    squares = np.einsum("no,ni->oi", p * (1 - p), (a @ vectors) ** 2)  # the Hessian's diagonal, and turned inputs
    wanted = (test @ vectors) ** 2 @ (1 / (squares + ridge)).T
    assert_close(tracer.predict(TEST, outputs="all").laplace, wanted)


@pytest.mark.parametrize("weights", ["any", "zeros and ones"])
def test_weights_of_positions_with_squared_error(weights: str, generator: torch.Generator) -> None:
    """Mixtures hold residuals with their weights, of which the noise variance needs the root."""
    x = torch.randn(8, 3, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 3, 1, generator=generator, dtype=torch.float64)
    given = torch.rand(8, 3, generator=generator, dtype=torch.float64)
    model = torch.nn.Linear(2, 1).double().eval()
    if weights == "any":
        with pytest.raises(whence.InputError, match="other weights of positions in batch 0"):
            whence.fit(model, [(x, y, given)], hessian_columns=3, progress=False)
        return
    given = (given > 0.3).double()
    every, found = (
        whence.fit(model, [(x, y, given)], ridge=1.0, hessian_columns=outputs, progress=False) for outputs in ("all", 3)
    )
    assert found.noise_scale == pytest.approx(every.noise_scale, rel=1e-9)
    torch.testing.assert_close(found.predict(x[:2]).ho, every.predict(x[:2]).ho, rtol=1e-8, atol=1e-12)
