"""J v, the change of all outputs along a direction in the weights: two ways to get it without the rows of J."""

from __future__ import annotations

import os
import threading
from typing import cast

import torch
from torch import Tensor
from torch.func import jvp, vmap

from .backward import gradients
from .batches import Inputs
from .forward import Network
from .select import Selection


class _OneAtATime:
    """Torch counts the nesting of forward-mode derivatives for the whole process: two threads would share a level."""

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self.lock = threading.RLock()


_FORWARD_MODE = _OneAtATime()


def forward_mode(network: Network, selection: Selection, inputs: Inputs, directions: Tensor) -> Tensor:
    """J v by forward-mode differentiation, all directions at once: (q, d) -> (q, n, k)."""
    parameters = selection.detached()

    def along(direction: Tensor) -> Tensor:
        pair = jvp(lambda values: network.with_parameters(values, inputs), (parameters,), (selection.like(direction),))
        return cast(Tensor, pair[1])

    with _FORWARD_MODE.lock, torch.no_grad():  # no graph of the parameters that were not selected
        found: Tensor = vmap(along, randomness="same")(directions)
    return found


def twice_backward(network: Network, selection: Selection, inputs: Inputs, directions: Tensor) -> Tensor:
    """J v as the derivative of u -> <J^T u, v>, which is linear in u: (q, d) -> (q, n, k)."""
    free = selection.free()
    with torch.enable_grad():
        outputs = network.with_parameters(free, inputs)
        if not outputs.requires_grad:
            return outputs.new_zeros(len(directions), *outputs.shape)
        u = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, list(free.values()), u, create_graph=True, materialize_grads=True)
        found = []
        for direction in directions:
            tangent = selection.like(direction)
            inner = torch.stack([(g * tangent[name]).sum() for name, g in zip(free, pulled, strict=True)]).sum()
            found.append(gradients(inner, [u], torch.ones_like(inner))[0])
    return torch.stack(found)
