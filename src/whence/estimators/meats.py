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

ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")


def finish(covariances: dict[str, Tensor], shift: Tensor | None, n: int, hc1: float) -> dict[str, Tensor]:
    """Add the estimators that follow from others.

    Args:
        covariances: (m, k, k) by name.
        shift: (m, k) sum_i a_i u_i; `None` where the covariances hold the jackknife already.
        n: how many are left out one after the other: examples, or their outputs.
        hc1: n k / (n k - dof).
    """
    found = {**covariances, "hec1": covariances["hec0"] * hc1}
    if shift is not None:
        centre = shift.unsqueeze(2) * shift.unsqueeze(1) / n
        found["jackknife"] = (covariances["hec3"] - centre) * ((n - 1) / n)
    return found
