"""Numbers that a fit needs must be numbers: squares of very large or small outputs, gradients and ridges are not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whence.curvature import Bread
from whence.errors import InputError
from whence.estimators import LeftOut
from whence.likelihoods import Noise
from whence.tangents.linearization import Linearization


def check_range(problem: Linearization, bread: Bread, left_out: LeftOut, noise: Noise) -> None:
    """Raise where squares of what the fit is made of are too large, or too small, to be numbers."""
    parts = {
        "the leverages of the training examples": bread.hats,
        "their leave-one-out residuals, squared": left_out.hec3.square(),
        "the variance of the noise": noise.covariance,
    }
    for what, values in parts.items():
        bad = ~torch.isfinite(values)
        if bool(bad.any()):
            raise _out_of_range(problem, f"{int(bad.sum())} numbers that are infinite or NaN in {what}")
    size, tiny = float(problem.residuals.abs().max()), torch.finfo(problem.dtype).tiny
    scale = max(size, float(problem.outputs.abs().max()))
    if problem.hessian_roots is None and size > 0 and scale**2 < tiny:
        raise _out_of_range(problem, f"residuals of at most {size:.3g}, whose squares vanish")


def check_variances(problem: Linearization, found: Mapping[str, Tensor], where: str) -> None:
    """Raise where variances of predictions are too large to be numbers; HeC1 may be infinite by its definition."""
    for name, values in found.items():
        if name != "hec1" and not bool(torch.isfinite(values).all()):
            bad = int((~torch.isfinite(values)).flatten(1).any(1).sum())
            raise _out_of_range(problem, f"{name} of {bad} of {len(values)} predictions in {where} infinite or NaN")


def _out_of_range(problem: Linearization, got: str) -> InputError:
    used = next(iter(problem.selection.parameters.values())).dtype
    names = sorted({str(one).removeprefix("torch.") for one in (problem.dtype, used)})
    largest = float(problem.outputs.abs().max()), float(problem.residuals.abs().max())
    return InputError(
        f"expected variances that {' and '.join(names)} can hold, got {got}. Outputs are up to {largest[0]:.3g} here, "
        f"residuals up to {largest[1]:.3g}, and variances go with the squares of these, of gradients, and of "
        "1 / ridge. Scale inputs and targets to about one, choose a ridge nearer to the size of the curvature, or use "
        "model.double()."
    )
