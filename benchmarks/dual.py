"""The yardstick: the exact estimators through the kernel of the training set, for several ridges at once.

Nothing here shares algebra with the structures under test. Rows of the Jacobian come from the capture, which is fast,
and are compared with `torch.func.jacrev` on a few examples of every network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from whence.jacobian.capture import Capture

COLUMNS = 8192
"""Parameters whose products are summed at once, in float64."""


@dataclass(frozen=True)
class Exact:
    """Exact variances of test points, traces over outputs.

    Attributes:
        ho: (m,) homoscedastic.
        hec0: (m,) by plain residuals.
        hec3: (m,) leave-one-out, whole examples.
        hec3_output: (m,) leave-one-out, single outputs: the paper's stacked reading.
        freedom: degrees of freedom.
        largest: largest leverage.
    """

    ho: Tensor
    hec0: Tensor
    hec3: Tensor
    hec3_output: Tensor
    freedom: float
    largest: float


@dataclass(frozen=True)
class Kernels:
    """K (n k, n k) of the training set, its products with test points (m k, n k), and residuals (n, k)."""

    train: Tensor
    cross: Tensor
    residuals: Tensor

    def exact(self, ridge: float) -> Exact:
        """All estimators at one ridge."""
        n, k = self.residuals.shape
        damped = self.train.clone()
        damped.diagonal().add_(ridge)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        del damped
        blocks = torch.diagonal(inverse.reshape(n, k, n, k), dim1=0, dim2=2).permute(2, 0, 1)
        left = ridge * blocks  # I - H = lambda (K + lambda)^-1
        leverage = 1.0 - torch.diagonal(left, dim1=1, dim2=2)
        errors = self.residuals
        without = torch.linalg.solve(left, errors)
        apart = errors / (1.0 - leverage)
        values, vectors = torch.linalg.eigh(errors.T @ errors / n)
        noise = vectors * values.clamp_min(0.0).sqrt()
        sums: list[list[Tensor]] = [[], [], [], []]
        for some in self.cross.split(500 * k):
            aligned = (some @ inverse).reshape(-1, k, n, k)
            sums[0].append((aligned @ noise).square().sum((1, 2, 3)))
            sums[1].append((aligned * errors).sum(3).square().sum((1, 2)))
            sums[2].append((aligned * without).sum(3).square().sum((1, 2)))
            sums[3].append((aligned * apart).square().sum((1, 2, 3)))
        ho, hec0, hec3, hec3_output = map(torch.cat, sums)
        return Exact(ho, hec0, hec3, hec3_output, float(leverage.sum()), float(leverage.max()))


def kernels(network: nn.Module, inputs: Tensor, targets: Tensor, test_inputs: Tensor, batch: int) -> Kernels:
    """Products of all training rows, and of test rows with training rows, in float64."""
    _compare(network, inputs[:3])
    train, outputs = _rows(network, inputs, batch)
    test, _ = _rows(network, test_inputs, batch)
    size = train.shape[0]
    inner = torch.zeros(size, size, dtype=torch.float64, device=train.device)
    cross = torch.zeros(len(test), size, dtype=torch.float64, device=train.device)
    for some, other in zip(train.split(COLUMNS, 1), test.split(COLUMNS, 1), strict=True):
        wide = some.double()
        inner.addmm_(wide, wide.T)
        cross.addmm_(other.double(), wide.T)
    return Kernels(inner, cross, targets.double() - outputs.double())


def _rows(network: nn.Module, inputs: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Rows (n k, d) in the network's precision, and outputs (n, k)."""
    capture = Capture(network, dict(network.named_parameters()), example_inputs=inputs[:8])
    outputs, low = [], 0
    rows: Tensor | None = None
    for some in inputs.split(batch):
        ran = capture.run(some)
        n, k = ran.outputs.shape
        units = torch.eye(k, device=some.device).unsqueeze(1).expand(k, n, k)
        tangents = ran.tangents(units, last=True)
        width = sum(one.block.numel for one in tangents)
        if rows is None:
            rows = torch.empty(len(inputs) * k, width, device=some.device)
        at = 0
        for one in tangents:
            rows[low : low + n * k, at : at + one.block.numel] = one.materialize().reshape(n * k, -1)
            at += one.block.numel
        outputs.append(ran.outputs)
        low += n * k
    assert rows is not None
    return rows, torch.cat(outputs)


def _compare(network: nn.Module, inputs: Tensor) -> None:
    """The captured rows against automatic differentiation: their Gram matrices must agree."""
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    buffers = dict(network.named_buffers())

    def single(values: dict[str, Tensor], example: Tensor) -> Tensor:
        return functional_call(network, (values, buffers), (example.unsqueeze(0),)).squeeze(0)

    with sdpa_kernel(SDPBackend.MATH):
        jacobian = vmap(jacrev(single), in_dims=(None, 0))(parameters, inputs)
    flat = torch.cat([part.flatten(2) for part in jacobian.values()], 2).flatten(0, 1).double()
    found = _rows(network, inputs, len(inputs))[0].double()
    wanted = flat @ flat.T
    error = float((found @ found.T - wanted).abs().max() / wanted.abs().max())
    if error > 1e-3:
        raise RuntimeError(f"expected captured rows to agree with jacrev, got Gram matrices {error:.2g} apart.")
