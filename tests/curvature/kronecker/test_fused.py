"""Kernels that read gradients once, against products in double precision."""

from __future__ import annotations

import pytest
import torch

from whence.curvature import rotation

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 2, 40), (7, 10, 1000), (130, 10, 4104), (5, 32, 264), (64, 3, 129)])
def test_kernels_agree_with_double_precision(shape: tuple[int, int, int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    n, c, p = shape
    draw = torch.Generator("cuda").manual_seed(sum(shape))
    values = torch.randn(n, c, p, generator=draw, device="cuda").bfloat16()
    weights = torch.rand(6, p, generator=draw, device="cuda").bfloat16()
    kernels = rotation.fused_kernels(values)
    if kernels is None:
        pytest.skip("Triton does not run here")
    wide = values.double()
    wanted = torch.einsum("ncp,p,ndp->ncd", wide, weights[0].double(), wide)
    found = kernels.grams(values, weights[0].float().sqrt())
    assert torch.allclose(found.double(), wanted, rtol=0, atol=5e-3 * float(wanted.abs().max()))
    wanted = torch.einsum("wp,ncp->wnc", weights.double(), wide.square())
    found = kernels.squares(values.flatten(0, 1), weights).reshape(-1, n, c)
    assert torch.allclose(found.double(), wanted, rtol=1e-2)
