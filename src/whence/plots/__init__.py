"""Pictures of results with matplotlib. Each function takes an `Axes`, or makes one, and returns it.

Colours are Okabe and Ito's, which colour-blind readers tell apart: blue for noise, vermillion for scarcity. No setting
of matplotlib is changed.

Examples:
    Those of the functions go on from here.

    >>> import torch, whence
    >>> from matplotlib.figure import Figure
    >>> from whence import plots
    >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
    >>> net, y = torch.nn.Linear(1, 1).double(), 2 * x + (99 * x).sin()
    >>> tracer = whence.fit(net, [(x, y)], recenter=True, progress=False)
"""

from whence.plots.curves import bands, ridge_path, risk_coverage
from whence.plots.images import decision_regions, gallery
from whence.plots.scatter import by_source, by_verdict, leverage_residual, rank_scatter, source_map

__all__ = [
    "bands",
    "by_source",
    "by_verdict",
    "decision_regions",
    "gallery",
    "leverage_residual",
    "rank_scatter",
    "ridge_path",
    "risk_coverage",
    "source_map",
]
