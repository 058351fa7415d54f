"""Images side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from whence.errors import ShapeError
from whence.report.page import Group

from .style import LINE, STYLES, axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def gallery(
    images: Tensor,  # (m, h, w) or (m, h, w, 3), between 0 and 1
    names: Sequence[str] | None = None,
    groups: Sequence[Group] | None = None,
    columns: int = 8,
    ax: Axes | None = None,
) -> Axes:
    """Images in rows, the first at the top left, each with its name below and a frame in the colour of its group.

    Examples:
        >>> ax = plots.gallery(torch.rand(3, 8, 8), names=["a", "b", "c"], columns=2, ax=Figure().subplots())
        >>> len(ax.images), ax.texts[2].get_text()
        (3, 'c')
    """
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise ShapeError(f"expected images of shape (m, h, w) or (m, h, w, 3), got {tuple(images.shape)}.")
    for what, given in (("names", names), ("groups", groups)):
        if given is not None and len(given) != len(images):
            raise ShapeError(f"expected {len(images)} {what}, one for each image, got {len(given)}.")
    ax = axes(ax)
    from matplotlib.patches import Rectangle  # an extra: only plots need it

    pitch = 1.2 if names is None else 1.45  # from one row to the next, in widths of an image
    for place, image in enumerate(images.detach().cpu().numpy()):
        left, top = 1.2 * (place % columns), -pitch * (place // columns)
        ax.imshow(image, cmap="gray", vmin=0, vmax=1, extent=(left, left + 1, top - 1, top), interpolation="nearest")
        colour = LINE if groups is None else STYLES[groups[place].tone][0]
        ax.add_patch(Rectangle((left, top - 1), 1, 1, fill=False, edgecolor=colour, linewidth=1.8, clip_on=False))
        if names is not None:
            ax.text(left + 0.5, top - 1.07, names[place], ha="center", va="top", fontsize="small", color=colour)
    rows = math.ceil(len(images) / columns)
    ax.set(xlim=(-0.1, 1.2 * columns - 0.1), ylim=(-pitch * rows + 0.1, 0.1), aspect="equal")
    ax.set_axis_off()
    return ax
