"""Table 2: what a repair is judged by."""

from __future__ import annotations

import torch
from torch import nn

from whence_paper.data import read_images
from whence_paper.images import table2
from whence_paper.images.tasks import Task


def test_points_of_the_class_and_points_that_become_right_anyway_are_told_apart():
    images = read_images("digits", None)
    task = Task(images, 0, 200)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    before = network(images.test_inputs).argmax(1) == task.test_answers
    noisy = task.test_points_of(task.noisy)
    nothing, everything = before.clone(), torch.ones_like(before)
    anyway = nothing | (torch.arange(len(before)) % 2 == 0)  # every second point becomes right by training on
    made = table2.Repaired(task, network, {"none": anyway, "clean": nothing | noisy, "add": everything})
    settings, _ = table2.EXPERIMENT.parse(["--quick"])
    found = table2.judge(settings, lambda seed: made, "exact", 0)
    wrong = ~before
    assert found["none"]["improved"] == int((wrong & anyway).sum())
    assert found["clean"]["improved"] == found["clean"]["improved_of_the_class"] == int((wrong & noisy).sum())
    assert found["clean"]["auroc"] == found["clean"]["auroc_of_the_class"]
    assert found["add"]["improved"] == int(wrong.sum())
    assert found["add"]["improved_of_the_class"] == int((wrong & task.test_points_of(task.missing)).sum())
    assert found["add"]["improved_anyway"] == found["none"]["improved"]
    assert found["clean"]["auroc_not_anyway"] != found["clean"]["auroc"]
