"""What a structure costs: bytes held in each stage of a fit, and work of each step.

A structure tells it by `cost`, from the sizes of a problem; `whence.estimate` adds it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from whence.jacobian.gradients import Block


@dataclass(frozen=True)
class ProblemSizes:
    """What memory and time depend on.

    Attributes:
        n: training examples.
        k: outputs.
        q: columns of the roots of the loss's Hessian; 0 for squared error.
        d: selected weights.
        item: bytes of a number of the algebra.
        working: bytes of a number of the gradients.
        row_chunk: examples whose rows of the Jacobian are held at once.
        layer_chunk: examples whose gradients are held at once, layer by layer.
        row_bytes: of a chunk of rows of the Jacobian, and of the passes that make it.
        layer_bytes: of a chunk of a batch with the gradients of all its layers.
        example_bytes: of residuals, leverages and weights of the training examples.
        blocks: of parameters.
        limit: bytes that may be taken.
        device: where it is computed.
        dual: whether the kernel may be taken, which is no sum over examples that a checkpoint could hold.
    """

    n: int
    k: int
    q: int
    d: int
    item: int
    working: int
    row_chunk: int
    layer_chunk: int
    row_bytes: float
    layer_bytes: float
    example_bytes: float
    blocks: tuple[Block, ...]
    limit: float
    device: torch.device
    dual: bool = True

    @property
    def numbers(self) -> int:
        """Residuals in all, n k."""
        return self.n * self.k

    @property
    def rotations(self) -> float:
        """Operations to bring the gradients of an example into a Kronecker basis."""
        shapes = [block.matrix_shape for block in self.blocks if block.kind == "kronecker"]
        return sum(2.0 * e * (i * i + self.k * o * o) for e, o, i in shapes)


@dataclass(frozen=True)
class Work:
    """Work of a step of a fit, or of a prediction.

    Attributes:
        read: examples that are read.
        forward: examples that are run forward.
        layers: examples whose gradients are computed layer by layer, for all outputs.
        rows: examples whose rows of the Jacobian are computed.
        algebra: floating-point operations in the dtype of the algebra.
        working: floating-point operations in the dtype of the gradients.
        cubes: sizes of the matrices that are decomposed, cubed and summed.
    """

    read: float = 0.0
    forward: float = 0.0
    layers: float = 0.0
    rows: float = 0.0
    algebra: float = 0.0
    working: float = 0.0
    cubes: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Memory and work of a structure.

    Attributes:
        name: of the structure.
        stages: bytes held at once in each stage of the fit, beside the model and the data.
        steps: work of each step of the fit, after the outputs of the training examples are there.
        prediction: work of one prediction.
        bounded: whether the memory is an upper bound, since the structure chooses its size from the data.
    """

    name: str
    stages: Mapping[str, float]
    steps: Mapping[str, Work]
    prediction: Work
    bounded: bool = False

    @property
    def memory(self) -> float:
        """Bytes at the peak."""
        return max(self.stages.values())
