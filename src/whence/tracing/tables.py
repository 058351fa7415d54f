"""Tables of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas


def frame(columns: Mapping[str, Sequence[Tensor | list[str]]]) -> pandas.DataFrame:
    """A data frame from columns that come in pieces.

    Examples:
        >>> frame({"index": [torch.tensor([3]), torch.tensor([5])], "word": [["a"], ["b"]]})["index"].tolist()
        [3, 5]
    """
    try:
        import pandas  # an extra: only tables need it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("expected pandas for a table. Install it: pip install 'whence[report]'.") from error

    joined = {}
    for name, pieces in columns.items():
        tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
        words = [word for piece in pieces if not isinstance(piece, Tensor) for word in piece]
        joined[name] = torch.cat(tensors).cpu().numpy() if tensors else words
    return pandas.DataFrame(joined)
