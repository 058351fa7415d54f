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
from whence.jacobian.sketches import SketchedBatches, joint_basis, mixtures

TEST = inputs(5, 11)
EXACT = [whence.Exact("primal"), whence.Exact("dual"), whence.Core(size=99, tolerance=0)]


def assert_close(found: Any, wanted: Any, name: str = "", rtol: float = 1e-7) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-3 * rtol * np.abs(wanted).max(), err_msg=name)


def columns_of(tracer: whence.Tracer) -> np.ndarray:
    """S (n, K, c) of a fit, as it was looked at."""
    problem = tracer.problem
    assert isinstance(problem.batches, SketchedBatches)
    assert problem.hessian_roots is not None
    bases = torch.cat([batch.inputs.basis for batch in problem.batches])
    return (bases.double() @ problem.hessian_roots).numpy()


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


def test_mixtures_are_unbiased() -> None:
    """The mean of M M^T over many examples is the identity, to five standard errors."""
    n = 4000
    for columns in (1, 2, 4):
        mixed = mixtures(torch.tensor([0, 2])[: columns // 2].expand(n, -1), 5, columns, 0, 0)
        products = mixed @ mixed.transpose(1, 2)
        error = products.std(0) / n**0.5
        assert ((products.mean(0) - torch.eye(5, dtype=torch.float64)).abs() <= 5 * error + 1e-12).all()
        kept = {0, 2} if columns == 4 else {0} if columns == 2 else set()
        for at in range(5):
            assert (float(error[at].max()) < 1e-12) is (at in kept)  # the largest are as they are


def test_mixtures_belong_to_examples_not_to_batches() -> None:
    largest = torch.rand(7, 9, generator=torch.Generator().manual_seed(0)).topk(2, dim=1).indices
    whole = mixtures(largest, 9, 4, 3, 10)
    parts = [mixtures(largest[:3], 9, 4, 3, 10), mixtures(largest[3:], 9, 4, 3, 13)]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert not torch.equal(mixtures(largest, 9, 4, 4, 10), whole)


def columns_to_span() -> Tensor:
    """Four examples with three columns of a root and a residual: parallel ones, zeros, and a tiny residual."""
    columns = torch.randn(4, 50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    columns[0, :, 3] = 1e-3 * columns[0, :, 1]
    columns[1, :, 2] = 0.0
    columns[3, :, 3] *= 1e-9
    return columns


def test_bases_are_isometries_and_hold_the_columns() -> None:
    columns = columns_to_span()
    basis, coordinates = joint_basis(columns[:, :, :3], columns[:, :, 3], torch.full((4,), 1e-16, dtype=torch.float64))
    size = columns.norm(dim=1, keepdim=True)
    torch.testing.assert_close((basis @ coordinates) / size.clamp_min(1e-300), columns / size.clamp_min(1e-300))
    grams = basis.transpose(1, 2) @ basis
    torch.testing.assert_close(grams @ grams, grams)
    ranks = torch.tensor([3.0, 3, 4, 4], dtype=torch.float64)
    torch.testing.assert_close(torch.diagonal(grams, dim1=1, dim2=2).sum(1), ranks)


@pytest.mark.parametrize("kind", ["apart", "equal", "dependent", "nearly dependent", "residual of noise"])
def test_bases_move_no_more_than_their_columns(kind: str) -> None:
    """B of perturbed columns with T of the plain ones is C to sqrt(2) times the perturbation, and so are T."""
    draw = torch.Generator().manual_seed(3)
    columns = torch.randn(8, 30, 5, generator=draw, dtype=torch.float64)
    if kind == "equal":  # all singular values are one
        columns = torch.linalg.qr(columns).Q
    elif kind == "dependent":
        columns[:, :, 4] = columns[:, :, 0] - 2 * columns[:, :, 1]
        columns[:, :, 2] = columns[:, :, 3]
    elif kind == "nearly dependent":
        columns[:, :, 4] = columns[:, :, 0] + 1e-7 * columns[:, :, 4]
    elif kind == "residual of noise":
        columns[:, :, 4] *= 1e-8
    noise = 1e-8 * torch.randn(columns.shape, generator=draw, dtype=torch.float64)
    rounding = torch.full((8,), 1e-9, dtype=torch.float64)
    one, other = (joint_basis(c[:, :, :4], c[:, :, 4], rounding) for c in (columns, columns + noise))
    size = columns[:, :, :4].flatten(1).norm(dim=1)
    for found, wanted in ((other[0] @ one[1], columns), (one[1], other[1])):
        gap = (found - wanted)[:, :, :4].flatten(1).norm(dim=1) / size
        assert float(gap.max()) < (1e-4 if kind == "residual of noise" else 1e-7), gap
        gap = (found - wanted)[:, :, 4].norm(dim=1) / (columns[:, :, 4].norm(dim=1) + 1e-4 * size)
        assert float(gap.max()) < 1e-3, gap


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
            generator = torch.Generator().manual_seed(seed)
            tracer = whence.fit(
                net, [(x, y)], hessian_columns=columns, execution=whence.Execution(generator=generator), **options
            )
            draws.append((tracer.predict(TEST, outputs="all").hec3.sum(1) / wanted - 1).abs().mean())
        gaps.append(float(torch.stack(draws).mean()))
    assert gaps[0] > gaps[1] > gaps[2] > gaps[3]
    assert gaps[2] < 0.2
    assert gaps[3] < 1e-8


class Tagger(nn.Module):
    """Five classes at every position, with the whole sentence in sight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(3, 3).double(), nn.Linear(3, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden + hidden.mean(1, keepdim=True))


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
    assert "of 70 outputs, 16 columns of the loss's Hessian were used" in str(tracer.diagnostics)
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
    with pytest.raises(whence.InputError, match=r'expected loo="example" where only 2 mixtures'):
        PROBLEMS["three logits"].fit(hessian_columns=2, loo="output")
    problem = categorical(3)
    with pytest.raises(whence.InputError, match=r"expected dispersion='fixed' in a fit of mixtures"):
        whence.fit(
            problem.model,
            [(problem.x, problem.y)],
            whence.Categorical(dispersion="pearson"),
            hessian_columns=2,
            progress=False,
        )


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
    if outputs == "all":
        assert tracer.split(test).hec3.shape == (2, 4)
    else:
        with pytest.raises(whence.InputError, match="separate noise from design, got one of some mixtures"):
            tracer.split(test)
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
