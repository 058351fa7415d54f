"""Every function call the capture understands, by the function called."""

from __future__ import annotations

from whence.jacobian.rules import attention, convolution, embeddings, linear, norms, parameters, recurrent
from whence.jacobian.rules.base import Function, Reader

READERS: dict[Function, Reader] = {
    **linear.READERS,
    **convolution.READERS,
    **norms.READERS,
    **embeddings.READERS,
    **attention.READERS,
    **recurrent.READERS,
    **parameters.READERS,
}
