"""Two orders of the same predictions: where they differ lies the source of the doubt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from whence.errors import InputError, ShapeError
from whence.report.page import Group, Tone, in_order
from whence.report.ranking import ranks, score
from whence.results import Uncertainty
from whence.tracing import Explanation
from whence.tracing.verdicts import BOTH, CONFIDENT, NOISY, SCARCE

from .style import LINE, STYLES, axes, quiet, rim

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rank_scatter(uncertainty: Uncertainty, groups: Sequence[Group] | None = None, ax: Axes | None = None) -> Axes:
    """Rank by Ho against rank by HeC3: above the line noise, to the lower right scarcity.

    Args:
        uncertainty: of m predictions.
        groups: one for each prediction; they set colour, shape and legend.
        ax: where to draw.

    Examples:
        >>> u = tracer.predict(x)
        >>> ax = plots.rank_scatter(u, plots.by_source(u), ax=Figure().subplots())
        >>> len(ax.collections) > 0
        True
    """
    m = len(uncertainty)
    kinds = [Group("predictions")] * m if groups is None else list(groups)
    if len(kinds) != m:
        raise ShapeError(f"expected {m} groups, one for each prediction, got {len(kinds)}.")
    ax = axes(ax)
    x, y = (100 * ranks(score(uncertainty, name)).cpu().numpy() for name in ("ho", "hec3"))
    ax.plot([0, 100], [0, 100], color=LINE, linewidth=1, linestyle=(0, (4, 4)), zorder=1)
    for group in reversed(in_order(kinds)):  # plain ones first, so that the others lie on top
        chosen = np.array([kind == group for kind in kinds])
        colour, marker, area, opacity = STYLES[group.tone]
        ax.scatter(
            x[chosen],
            y[chosen],
            s=area,
            c=colour,
            marker=marker,
            alpha=opacity,
            linewidths=0 if rim(group) == "white" else 1.2,
            edgecolors=rim(group),
            label=group.name,
            zorder=2,
        )
    ax.set(xlim=(-2, 102), ylim=(-2, 102), aspect="equal", xlabel="rank by Ho, %", ylabel="rank by HeC3, %")
    quiet(ax)
    if groups is not None:
        handles, names = ax.get_legend_handles_labels()
        below = (0.5, -0.16)
        ax.legend(
            handles[::-1], names[::-1], loc="upper center", bbox_to_anchor=below, frameon=False, handletextpad=0.2
        )
    return ax


def by_source(uncertainty: Uncertainty, share: float = 0.1) -> list[Group]:
    """A group for each prediction: uncertain by HeC3, uncertain by Ho, or neither.

    Uncertain are the predictions among the highest `share` by either estimator. Each goes with the estimator that ranks
    it higher, which is the side of the diagonal that it has in `rank_scatter`.

    Examples:
        >>> import torch
        >>> variances = {"ho": torch.tensor([1.0, 2.0, 3.0, 9.0]), "hec3": torch.tensor([9.0, 1.0, 2.0, 3.0])}
        >>> u = Uncertainty(torch.zeros(4, 1), {name: v.reshape(4, 1, 1) for name, v in variances.items()})
        >>> [group.tone for group in by_source(u, share=0.25)]
        ['noise', 'plain', 'plain', 'scarcity']
    """
    if not 0.0 < share <= 1.0:
        raise InputError(f"expected a share between 0 and 1, got {share!r}.")
    ho, hec3 = (ranks(score(uncertainty, name)) for name in ("ho", "hec3"))
    m = len(uncertainty)
    edge = 1.0 - (max(round(share * m), 1) - 0.5) / max(m - 1, 1)
    noise = Group("uncertain by HeC3: noisy labels nearby", "noise")
    scarcity = Group("uncertain by Ho: few examples nearby", "scarcity")
    plain = Group("neither")
    return [
        plain if max(a, b) < edge else noise if b > a else scarcity
        for a, b in zip(ho.tolist(), hec3.tolist(), strict=True)
    ]


def by_verdict(explanation: Explanation) -> list[Group]:
    """A group for each prediction of `tracer.explain(x)`; those with both faults in blue with a rim.

    Examples:
        >>> [group.tone for group in plots.by_verdict(tracer.explain(torch.tensor([[0.0], [30.0]]).double()))]
        ['plain', 'scarcity']
    """
    tones: dict[str, Tone] = {NOISY: "noise", BOTH: "noise", SCARCE: "scarcity", CONFIDENT: "plain"}
    return [Group(verdict, tones[verdict]) for verdict in explanation.verdicts]
