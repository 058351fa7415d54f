"""The estimators, each as the weight it gives to a training example.

With alignments a_i = J F_lam^-1 J_i^T every variance is sum_i a_i W_i W_i^T a_i^T:

    Ho       W_i W_i^T = Sigma             homoscedastic noise, inputs fixed
    HeC0     W_i = e_i                     White's sandwich, the infinitesimal jackknife
    HeC1     HeC0 times n k / (n k - dof)
    HeC2     W_i = (I - H_ii)^-1/2 e_i
    HeC3     W_i = (I - H_ii)^-1 e_i       leave one example out: the jackknife
"""

from __future__ import annotations

from torch import Tensor

from whence.curvature.base import Meats

from .leave_one_out import LeftOut

ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")


def make_meats(residuals: Tensor, noise_root: Tensor, left_out: LeftOut, by_output: bool) -> Meats:
    """Weights of the training examples for every estimator.

    Args:
        residuals: e (n, k).
        noise_root: root of the noise covariance, (1, k, q) or (n, k, q).
        left_out: leave-one-out residuals.
        by_output: treat outputs apart (the paper's stacked diag(u^2)).
    """

    def column(vectors: Tensor) -> Tensor:
        return vectors.diag_embed() if by_output else vectors.unsqueeze(-1)

    roots = {
        "ho": noise_root,
        "hec0": column(residuals),
        "hec2": column(left_out.hec2),
        "hec3": column(left_out.hec3),
    }
    return Meats(roots, left_out.hec3)


def finish(covariances: dict[str, Tensor], shift: Tensor | None, n: int, hc1: float) -> dict[str, Tensor]:
    """Add the estimators that follow from others.

    Args:
        covariances: (m, k, k) by name.
        shift: (m, k) sum_i a_i u_i; `None` where the covariances hold the jackknife already.
        n: number of training examples.
        hc1: n k / (n k - dof).
    """
    found = {**covariances, "hec1": covariances["hec0"] * hc1}
    if shift is not None:
        centre = shift.unsqueeze(2) * shift.unsqueeze(1) / n
        found["jackknife"] = (covariances["hec3"] - centre) * ((n - 1) / n)
    return found
