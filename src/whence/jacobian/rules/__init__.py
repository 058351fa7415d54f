"""The readers of all function calls that the capture understands."""

from __future__ import annotations

from whence.jacobian.rules import composite, embeddings, linear, norms, parameters
from whence.jacobian.rules.base import Function, Reader

READERS: dict[Function, Reader] = {
    **linear.READERS,
    **norms.READERS,
    **embeddings.READERS,
    **composite.READERS,
    **parameters.READERS,
}
