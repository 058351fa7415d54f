"""What a structure costs: bytes held in each stage of a fit, and work of each step.

A structure gives it by `cost`, from the sizes of a problem; `whence.estimate` adds it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from whence.jacobian.gradients import Block


@dataclass(frozen=True)
class ProblemSizes:
    """What memory and time depend on."""

    n: int  # training examples
    k: int  # outputs
    q: int  # columns of the roots of the loss's Hessian; 0 for squared error
    d: int  # selected weights
    item: int  # bytes of a number of the algebra
    working: int  # bytes of a number of the gradients
    row_chunk: int  # examples whose rows of the Jacobian are held at once
    layer_chunk: int  # examples whose gradients are held at once, layer by layer
    row_bytes: float  # of a chunk of rows of the Jacobian, and of the passes that make it
    layer_bytes: float  # of a chunk of a batch with the gradients of all its layers
    example_bytes: float  # of residuals, leverages and weights of the training examples
    blocks: tuple[Block, ...]  # of parameters
    limit: float  # bytes that may be taken
    device: torch.device  # where it is computed
    dual: bool = True  # whether the kernel may be taken, which is no sum over examples that a checkpoint could hold

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
    """Work of a step of a fit, or of a prediction."""

    read: float = 0.0  # examples that are read
    forward: float = 0.0  # examples that are run forward
    layers: float = 0.0  # examples whose gradients are computed layer by layer, for all outputs
    rows: float = 0.0  # examples whose rows of the Jacobian are computed
    algebra: float = 0.0  # floating-point operations in the dtype of the algebra
    working: float = 0.0  # floating-point operations in the dtype of the gradients
    cubes: float = 0.0  # sizes of the matrices that are decomposed, cubed and summed


@dataclass(frozen=True)
class Cost:
    """Memory and work of a structure."""

    name: str  # of the structure
    stages: Mapping[str, float]  # bytes held at once in each stage of the fit, beside the model and the data
    steps: Mapping[str, Work]  # work of each step of the fit, after the outputs of the training examples are there
    prediction: Work  # work of one prediction
    bounded: bool = False  # whether the memory is an upper bound, since the structure chooses its size from the data

    @property
    def memory(self) -> float:
        """Bytes at the peak."""
        return max(self.stages.values())
