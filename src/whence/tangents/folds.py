"""What is left out of the training data at once, when a ridge is chosen by leave-one-out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Folds:
    """Parts of the training data that are left out, one after the other; whole examples, if not told otherwise.

    Attributes:
        groups: (n,) number of each example's group, counted from zero, where whole groups are left out.
        width: how many outputs of an example are left out at once, where single positions or outputs are.

    Examples:
        >>> import torch
        >>> Folds(width=1).blocks(torch.eye(2).expand(3, 2, 2)).shape
        torch.Size([6, 1, 1])
    """

    groups: Tensor | None = None
    width: int | None = None

    def blocks(self, matrices: Tensor) -> Tensor:
        """Matrices (n, k, k) of examples as the blocks (N, w, w) of what is left out of them at once."""
        n, k = matrices.shape[:2]
        if self.width is None or self.width == k:
            return matrices
        shaped = matrices.reshape(n, k // self.width, self.width, k // self.width, self.width)
        return shaped.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1)

    def parts(self, vectors: Tensor) -> Tensor:
        """Vectors (n, k) of examples as those (N, w) of what is left out of them at once."""
        return vectors if self.width is None else vectors.reshape(-1, self.width)
