"""Gradients in half precision, and eigenvalues from mixtures of outputs: answers stay what they are."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whence
from whence.curvature import accumulate, kronecker, rotation
from whence.errors import InputError, SingularCurvatureError
from whence.jacobian import gradients
from whence.jacobian.gradients import product
from whence.jacobian.network import Network, in_half
from whence.jacobian.rules import linear
from whence.jacobian.rules.base import Intercept
from whence.jacobian.rules.channels_last import ConvolutionBackward, ScaleBackward, fast_relu, has_channels_last, run
from whence.jacobian.rules.norms import over_positions
from whence.tracer import Tracer

CLASSES = 8


def images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """A pattern for each class, of any strength, and noise."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (n,), generator=draw)
    return patterns[labels] * torch.rand(n, 1, 1, 1, generator=draw) + torch.randn(n, 2, 6, 6, generator=draw), labels


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """Trained for a while; smooth, so that rounding switches no unit off."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU(), nn.Conv2d(6, 4, 3, padding=1), nn.GELU()]
    layers += [nn.Conv2d(4, 8, 3, stride=2), nn.GELU()]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, CLASSES))
    x, labels = images(400, 1)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        (net(x) - whence.one_hot(labels, CLASSES)).square().mean().backward()
        optimizer.step()
    return net.eval()


def traced(network: nn.Module, structure: Any, n: int = 400, precision: Any = "float32", **options: Any) -> Tracer:
    x, labels = images(n, 1)
    targets = labels if options.get("likelihood") == "categorical" else whence.one_hot(labels, CLASSES)
    loader = list(zip(x.split(150), targets.split(150), strict=True))
    execution = whence.Execution(precision=precision)
    return whence.fit(network, loader, structure=structure, ridge=1.0, execution=execution, progress=False, **options)


def rank_correlation(one: Tensor, other: Tensor) -> float:
    ranks = torch.stack([values.argsort().argsort().double() for values in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


def check_same(found: Tracer, wanted: Tracer, ratio: float = 0.995) -> None:
    """The floors for a faster fit."""
    x = images(150, 2)[0]
    one, other = found.predict(x), wanted.predict(x)
    assert torch.equal(one.mean, other.mean)
    for name in ("ho", "hec3"):
        assert rank_correlation(one.variance(name).sum(1), other.variance(name).sum(1)) > 0.999
    assert rank_correlation(one.ratio, other.ratio) > ratio
    assert found.degrees_of_freedom == pytest.approx(wanted.degrees_of_freedom, rel=0.02)


STRUCTURES = [
    whence.EKFAC(),
    whence.EKFAC(tolerance=0.3),
    whence.EKFAC(meat="two_bases"),
    whence.KFAC(),
    whence.Core(size=200),
    whence.Sketch(size=300),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_half_precision(structure: Any, as_on_a_gpu: bool, network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU rotations are in half precision as well, and matrices are formed in bfloat16."""
    for module in (accumulate, kronecker, rotation):  # which changes the basis
        monkeypatch.setattr(module, "products_are_rounded", lambda device: as_on_a_gpu)
    wanted = traced(network, structure)
    if as_on_a_gpu:
        for module in (gradients, linear):
            monkeypatch.setattr(module, "matched", half_or_single)
        monkeypatch.setattr(kronecker, "widened_on_cpu", lambda values: values)
    check_same(traced(network, structure, precision="fp16"), wanted)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("positions", [3, 30])
@pytest.mark.parametrize("structure", [whence.EKFAC(), whence.KFAC()], ids=str)
def test_bfloat16_weights_as_on_a_gpu(
    structure: Any, positions: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients have no more digits, so that matrices are formed in bfloat16 as well."""
    for module in (accumulate, kronecker, rotation):
        monkeypatch.setattr(module, "products_are_rounded", lambda device: True)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(100, positions, 12, generator=draw).bfloat16()
    y = torch.randint(5, (100, positions), generator=draw)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 5)).bfloat16().eval()

    def fit() -> Tracer:
        data = list(zip(x.split(40), y.split(40), strict=True))
        return whence.fit(net, data, "categorical", structure, ridge=10.0, hessian_columns=columns, progress=False)

    found = fit()
    monkeypatch.setattr(accumulate, "products_are_rounded", lambda device: False)
    wanted = fit()
    for name in ("ho", "hec3"):
        one, other = (tracer.predict(x[:20], outputs="predicted").variance(name) for tracer in (found, wanted))
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.0)


ORDERS = {  # of (c, n, e, o, t) in memory, as (n, c, e, t, o)
    "rows": lambda g: g.permute(1, 0, 2, 4, 3).contiguous(),
    "images": lambda g: g.transpose(0, 1).contiguous().transpose(3, 4),
    "rows, cotangents first": lambda g: g.transpose(3, 4).contiguous().transpose(0, 1),
    "images, cotangents first": lambda g: g.permute(1, 0, 2, 4, 3),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kept", [(16, 32), (16, 48), (72, 32), (72, 48)])
def test_coarse_views(order: str, kept: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside and outside a basis, in whatever order of memory, to three digits of the same in double precision."""
    monkeypatch.setattr(gradients, "matched", half_or_single)
    torch.manual_seed(0)
    n, c, t, o, i = 6, 5, 16, 48, 72
    block = gradients.Block("w", ("w",), ((o, i),), "kronecker")
    below, above = (torch.linalg.qr(torch.randn(size, size)).Q for size in (i, o))
    a = (torch.randn(n, 1, t, i) * torch.logspace(0, -2, i) @ below.T).half()
    g = (1e-3 * above @ (torch.randn(c, n, 1, o, t) * torch.logspace(0, -2, o).unsqueeze(1))).half()
    found, wanted = (
        (
            rotation.Basis(block, below[None, :, : kept[0]].to(dtype), above[None, :, : kept[1]].to(dtype)),
            gradients.Kronecker(block, gradients.Whole(a.to(half)), gradients.Whole(ORDERS[order](g).to(half))),
        )
        for dtype, half in ((torch.float32, torch.float16), (torch.float64, torch.float64))
    )
    weights = torch.rand(2, 1, *kept[::-1]) + 0.1
    outside, mixing, step = torch.full((2, 1, 1, 1), 5.0), torch.randn(n, c, 3), 1e-6 * torch.randn(1, o, i)

    def seen(basis: rotation.Basis, tangent: gradients.Kronecker, coarse: bool) -> list[Tensor]:
        dtype = basis.tensors[0].dtype
        sums = rotation.Weights(basis, weights.to(dtype), outside.to(dtype), True)

        def view() -> rotation.BasisView:
            return rotation.BasisView(tangent, basis, True, coarse=coarse)

        mixed = torch.cat([one.matrices() for _, one in view().mixed(mixing.to(dtype))])
        along = rotation.directional_derivatives(view().tangent, step.to(dtype))
        total = rotation.weighted_sum(tangent, 1e-6 * mixing[..., 0].to(dtype))
        return [sums.grams(view()), sums.variances(view()), mixed, along, total]

    for one, other in zip(seen(*found, coarse=True), seen(*wanted, coarse=False), strict=True):
        assert float((one - other).norm() / other.norm()) < 5e-3


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (1, 2), (2, 1)])
def test_sums_of_gradients_without_windows(groups: int, stride: int) -> None:
    """In half precision by a convolution; the same as with the windows of the images."""
    torch.manual_seed(0)
    n, channels, o = 5, 4, 6
    windows = linear.Windows((3, 3), (stride, stride), ((1, 1), (1, 1)), (1, 1), groups)
    images = torch.randn(n, channels, 7, 6).half()
    a = linear.Unfolded(images, windows, gradients.Layout(), n)
    g = torch.randn(n, groups, a.shape[2], o // groups)
    wanted = torch.einsum("neto,neti->eoi", g.double(), a.tensor().double())
    torch.testing.assert_close(a.total(g).double(), wanted, rtol=1e-4, atol=1e-4)
    single = linear.Unfolded(images.double(), windows, gradients.Layout(), n)
    torch.testing.assert_close(single.total(g.double()), wanted)


def half_or_single(values: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """As `matched` does on a GPU."""
    return (values, basis.half()) if values.dtype == torch.float16 else (values.to(basis.dtype), basis)


def test_half_precision_is_saved(network: nn.Module, tmp_path: Path) -> None:
    tracer = traced(network, whence.EKFAC(), precision="fp16")
    x = images(5, 2)[0]
    tracer.save(tmp_path / "fit")
    loaded = whence.load(tmp_path / "fit", network)
    assert loaded.problem.half
    assert torch.equal(loaded.predict(x).hec3, tracer.predict(x).hec3)


@pytest.mark.parametrize("structure", ["ekfac", "core", "sketch"])
def test_gradients_that_overflow_are_refused(structure: str) -> None:
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1e5], [1e5], [-1e5], [1.0]]))
    execution = whence.Execution(precision="fp16")
    with pytest.raises(SingularCurvatureError, match='another precision than "fp16"'):
        whence.fit(net, [(x, x)], structure=structure, ridge=1.0, execution=execution, progress=False)


def test_half_precision_is_for_single_precision_and_approximations(network: nn.Module) -> None:
    assert not traced(network, whence.Exact(), precision="fp16").problem.half
    with pytest.raises(InputError, match="precision to be one of 'float32', 'tf32', 'fp16'"):
        whence.Execution(precision="bf16")  # type: ignore[arg-type]


def test_products_of_half_precision_are_sums_in_single_precision() -> None:
    ones = torch.ones(3, 1, 4096, dtype=torch.bfloat16)  # from 256 on bfloat16 misses every other number
    assert product(ones[..., :4095], ones[..., :4095].mT).flatten().tolist() == [4095.0] * 3


# --- Images with channels last ----------------------------------------------------------------------------------------


class Viewing(nn.Module):
    """Takes its images apart by `view`, which wants channels first."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x)
        return self.head(found.view(len(found), -1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_convolutional_network_gets_channels_last_if_it_takes_them(network: nn.Module) -> None:
    net, (x, _) = deepcopy(network).cuda(), images(6, 1)
    viewing = Viewing(net[:-2], net[-1])
    for model in (net, viewing, nn.Sequential(nn.Flatten(), nn.Linear(72, 2)).cuda()):
        seen: list[Tensor] = []
        handle = model.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        call = in_half(Network(model), x.cuda())
        seen.clear()
        found = call(x.cuda())
        handle.remove()
        assert seen[0].is_contiguous(memory_format=torch.channels_last) == (model is net)
        assert torch.allclose(found.float(), model(x.cuda()), atol=2e-2)


GEOMETRIES: list[dict[str, Any]] = [{}, {"stride": 2}, {"dilation": 2}, {"groups": 2}, {"padding": 2, "stride": 3}]


@pytest.mark.parametrize("options", GEOMETRIES, ids=str)
@pytest.mark.parametrize("vectorized", [False, True])
def test_a_backward_pass_with_channels_last_is_that_of_torch(options: dict[str, int], vectorized: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 4 // options.get("groups", 1), 3, 3)
    x = torch.randn(5, 4, 11, 10).half().contiguous(memory_format=torch.channels_last).requires_grad_()
    plain = x.detach().float().contiguous().requires_grad_()
    out = functional.conv2d(plain, weight, **options)
    pairs = [(options.get(name, default),) * 2 for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    assert has_channels_last(x)
    same = run(ConvolutionBackward, out.detach().half(), x, weight, (*pairs, options.get("groups", 1)))
    assert torch.equal(same, out.half())
    cotangents = torch.randn(3, *out.shape).half()

    def pulled(cotangent: Tensor) -> Tensor:
        return torch.autograd.grad(same, x, cotangent, retain_graph=True)[0]

    found = torch.func.vmap(pulled)(cotangents) if vectorized else torch.stack([pulled(one) for one in cotangents])
    for one, cotangent in zip(found, cotangents, strict=True):
        (wanted,) = torch.autograd.grad(out, plain, cotangent.float(), retain_graph=True)
        assert torch.allclose(one.float(), wanted, atol=2e-3 * float(wanted.abs().max()))
        assert one.is_contiguous(memory_format=torch.channels_last)


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("vectorized", [False, True])
def test_backward_passes_of_scales_and_relus_are_those_of_torch(vectorized: bool, device: str) -> None:
    torch.manual_seed(0)
    draw = torch.randn(5, 6, 7, 3, device=device)
    x = draw.half().contiguous(memory_format=torch.channels_last).requires_grad_()
    scale = torch.randn(6, device=device).half()
    with Intercept(fast_relu):
        relu = functional.relu(x)
    scaled = run(ScaleBackward, x.detach() * scale.reshape(-1, 1, 1), x, scale)
    assert type(relu.grad_fn).__name__ == "ReluBackward"
    assert torch.equal(relu, x.clamp_min(0.0))
    cotangents = torch.randn(4, 5, 7, 3, 6, device=device).half().permute(0, 1, 4, 2, 3)
    wanted = {relu: cotangents * (x > 0), scaled: cotangents * scale.reshape(-1, 1, 1)}
    for out, expected in wanted.items():

        def pulled(cotangent: Tensor, out: Tensor = out) -> Tensor:
            return torch.autograd.grad(out, x, cotangent, retain_graph=True)[0]

        found = torch.func.vmap(pulled)(cotangents) if vectorized else torch.stack([pulled(one) for one in cotangents])
        assert torch.equal(found, expected)


def test_relus_in_place_and_of_other_tensors_are_left_alone() -> None:
    x = torch.randn(2, 3, 4, 5).half().contiguous(memory_format=torch.channels_last).requires_grad_()
    with Intercept(fast_relu):
        for found in (functional.relu(x * 1.0, inplace=True), torch.relu(x.float()), torch.relu(x.detach())):
            assert type(found.grad_fn).__name__ == "ReluBackward0" or found.grad_fn is None


def test_sums_over_positions_with_channels_last() -> None:
    grads = torch.randn(2, 5, 4, 3, 6).half().permute(1, 0, 4, 2, 3)  # (n, c, x, h, w)
    z = torch.randn(5, 6, 4, 3).half()
    for given, wanted in ((None, grads.float()), (z, grads.float() * z.float().unsqueeze(1))):
        assert torch.allclose(over_positions(grads, given).float(), wanted.sum((3, 4)), atol=2e-2)


# --- Eigenvalues from mixtures of outputs -----------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_all_mixtures_give_the_eigenvalues_of_all_outputs(network: nn.Module, likelihood: str) -> None:
    """With as many balanced signs as outputs nothing is left to chance."""
    tracer = traced(network, whence.EKFAC(), likelihood=likelihood)
    bread: Any = tracer.bread
    bases = [block.basis for block in bread.blocks]
    pullback = kronecker.random_mixtures(tracer.problem, bread.noise, CLASSES)
    sums = kronecker.SpectrumSums(bread.gradients, bases, bread.noise, pullback)
    found, wanted = bread.gradients.accumulate(sums).spectrum(), bread.blocks
    scale = max(float(one.curvature.inside.max()) for one in wanted)
    for kind in ("curvature", "noise"):
        for block, true in zip(found, wanted, strict=True):
            one, other = getattr(block, kind), getattr(true, kind)
            assert torch.allclose(one.inside, other.inside, rtol=1e-3, atol=1e-6 * scale)
            assert one.outside == pytest.approx(other.outside, rel=1e-3, abs=1e-6 * scale)
    alone = kronecker.residuals_alone(tracer.problem)
    sums = bread.gradients.accumulate(kronecker.SpectrumSums(bread.gradients, bases, None, alone))
    for one, other in zip([each.total for each in sums.sums], [block.score for block in wanted], strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("structure", [whence.EKFAC(), whence.Core(size=400)], ids=str)
def test_many_examples_need_few_mixtures(
    structure: Any, likelihood: str, network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What chance adds falls with the number of mixtures of all examples: here with a tenth of those in use."""
    monkeypatch.setattr(kronecker, "MANY_MIXTURES", 9000)
    n = 3000
    monkeypatch.setattr(kronecker, "samples_outputs", lambda *_, **__: False)
    wanted = traced(network, structure, n, likelihood=likelihood)
    monkeypatch.setattr(kronecker, "samples_outputs", lambda *_, whole: True)
    monkeypatch.setattr(kronecker.KroneckerFactors, "__init__", all_outputs(kronecker.KroneckerFactors.__init__))
    found = traced(network, structure, n, likelihood=likelihood)
    assert "random mixture" in str(found.diagnostics)
    assert "random mixture" not in str(wanted.diagnostics)
    check_same(found, wanted, ratio=0.97)


def all_outputs(init: Any) -> Any:
    """The factors of all outputs, so that the bases are the same."""

    def wrapped(self: Any, stream: Any, whole: bool = False) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kronecker, "samples_outputs", lambda *_: False)
            init(self, stream, whole)

    return wrapped
