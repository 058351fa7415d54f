"""Examples that use parameters which the first batch does not: experts that data are sent to, a head for each task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from whence.processes import Processes
from whence.tangents.batches import Batch, Inputs, batch_size, take, to_device
from whence.tangents.capture import Capture

AT_ONCE = 64
"""Examples that are run at once."""

FEW = 7
"""Examples that a proof is made on."""


def examples_using(
    wanted: set[str], capture: Capture, batches: Iterable[Batch], crew: Processes, device: torch.device
) -> list[Inputs]:
    """A few examples for each of these parameters that any of the data use, the same in every process.

    Costs a forward pass for each batch until all are found.

    Args:
        wanted: names of parameters.
        capture: of the model.
        batches: the data of this process.
        crew: the processes that share the data.
        device: of the model.
    """
    mine = list(_found(set(wanted), capture, batches))
    told = crew.tell("parameters not used so far", to_device(mine, torch.device("cpu")) if not crew.alone else mine)
    missing, chosen = set(wanted), []
    for names, few in (one for each in told for one in each):
        if missing.intersection(names):
            missing -= names
            chosen.append(to_device(few, device))
    return chosen


def _found(wanted: set[str], capture: Capture, batches: Iterable[Batch]) -> Iterator[tuple[set[str], Inputs]]:
    for batch in batches:
        for low in range(0, batch.size, AT_ONCE):
            some = take(batch.inputs, slice(low, low + AT_ONCE))
            here = wanted & capture.uses(some)
            while here:
                few = _narrowed(capture, some, here)
                names = wanted & capture.uses(few)
                if not here & names:  # by no few of them
                    break
                yield names, few
                here -= names
                wanted -= names
        if not wanted:
            return


def _narrowed(capture: Capture, inputs: Inputs, wanted: set[str]) -> Inputs:
    """Few of the examples, that still use one of the parameters."""
    while (n := batch_size(inputs, "this batch")) > FEW:
        first, second = take(inputs, slice(0, n // 2)), take(inputs, slice(n // 2, n))
        inputs = first if wanted & capture.uses(first) else second
    return inputs
