"""The rate of a training goes as torch's own schedule has it, and reaches the optimiser in either form."""

from __future__ import annotations

import pytest
import torch

from whence_paper.replayed import one_cycle, set_rate


@pytest.mark.parametrize("steps", [8, 97, 400])
def test_the_rate_rises_and_falls_as_torch_has_it(steps):
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps, pct_start=0.25)
    for step in range(steps):
        assert one_cycle(step, steps, 2e-3) == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9)
        optimiser.step()
        if step < steps - 1:
            theirs.step()


def test_a_rate_that_is_a_tensor_is_changed_in_place():
    weight = torch.zeros(1, requires_grad=True)
    held = torch.tensor(0.1)
    for rate in (0.1, held):
        optimiser = torch.optim.SGD([weight], rate)
        set_rate(optimiser, 0.25)
        assert float(optimiser.param_groups[0]["lr"]) == 0.25
    assert float(held) == 0.25
