"""Kernels that read gradients once, against products in double precision."""

from __future__ import annotations

import pytest
import torch

from whence.jacobian import gradients

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 2, 40), (7, 10, 1000), (130, 10, 4104), (5, 32, 264), (64, 3, 129)])
def test_kernels_agree_with_double_precision(shape: tuple[int, int, int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    n, c, p = shape
    draw = torch.Generator("cuda").manual_seed(sum(shape))
    values = torch.randn(n, c, p, generator=draw, device="cuda").bfloat16()
    weights = torch.rand(6, p, generator=draw, device="cuda").bfloat16()
    kernels = gradients.fused_kernels(values)
    if kernels is None:
        pytest.skip("Triton does not run here")
    wide = values.double()
    wanted = torch.einsum("ncp,p,ndp->ncd", wide, weights[0].double(), wide)
    found = kernels.grams(values, weights[0].float().sqrt())
    assert torch.allclose(found.double(), wanted, rtol=0, atol=5e-3 * float(wanted.abs().max()))
    wanted = torch.einsum("wp,ncp->wnc", weights.double(), wide.square())
    found = kernels.squares(values.flatten(0, 1), weights).reshape(-1, n, c)
    assert torch.allclose(found.double(), wanted, rtol=1e-2)
    mixing = torch.randn(n, c, 3, generator=draw, device="cuda").bfloat16()
    apart = values.transpose(0, 1).contiguous().transpose(0, 1)  # cotangents before examples
    for given in (values, apart):
        wanted = torch.einsum("ncp,ncq->nqp", wide, mixing.double())
        assert torch.allclose(kernels.mixtures(given, mixing).double(), wanted, rtol=1e-2, atol=1e-2)
        wanted = torch.einsum("ncp,np->nc", wide, wide[:, 0])
        found = kernels.inner_products(given, values[:, 0])
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (3, 2, 40, 64), (2, 7, 1000, 72), (10, 30, 16, 512), (4, 5, 9, 3)])
def test_kernels_of_images_agree_with_double_precision(shape: tuple[int, int, int, int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    draw = torch.Generator("cuda").manual_seed(sum(shape))
    grads = torch.randn(*shape, generator=draw, device="cuda").half()
    z = torch.randn(*shape[1:], generator=draw, device="cuda").half()
    kernels = gradients.fused_kernels(grads)
    if kernels is None:
        pytest.skip("Triton does not run here")
    for given, wanted in ((None, grads.double()), (z, grads.double() * z.double())):
        summed = wanted.sum(2).transpose(0, 1)
        found = kernels.over_positions(grads, given)
        assert torch.allclose(found.double(), summed, rtol=2e-3, atol=2e-3 * float(summed.abs().max()))
    assert torch.equal(kernels.times_channels(grads, z[0, 0]), grads * z[0, 0])
    assert torch.equal(kernels.where_positive(grads, z), torch.where(z > 0, grads, 0.0))
