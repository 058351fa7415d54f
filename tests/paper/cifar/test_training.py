"""Moved and mirrored images, and a classifier that learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from whence_paper.cifar.training import Recipe, augmented, draw_moves, outputs, train
from whence_paper.networks import ViT, resnet18


def test_images_are_cut_out_of_their_padded_pictures():
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(6, 3, 8, 8, generator=draw)
    padded = F.pad(images, (2, 2, 2, 2)).permute(0, 2, 3, 1).contiguous()
    chosen = torch.tensor([4, 1, 1, 5, 0, 2, 3, 4] * 4)
    drawn = []
    moves = torch.empty(3, 6, dtype=torch.long)
    for some in chosen.split(4):
        draw_moves(moves, 5, True, draw)
        drawn.append(augmented(padded, some, 8, moves))
    cut = torch.cat(drawn)
    assert cut.shape == (32, 3, 8, 8)
    mirrored = 0
    for place, image in zip(chosen.tolist(), cut, strict=True):
        whole = F.pad(images[place], (2, 2, 2, 2))
        places = [(top, left) for top in range(5) for left in range(5)]
        plain = [torch.equal(image, whole[:, t : t + 8, s : s + 8]) for t, s in places]
        turned = [torch.equal(image, whole[:, t : t + 8, s : s + 8].flip(2)) for t, s in places]
        assert any(plain) or any(turned)
        mirrored += any(turned) and not any(plain)
    assert 4 < mirrored < 28


def test_without_room_images_stay_as_they_are():
    images = torch.rand(4, 1, 8, 8)
    moves = torch.ones(3, 4, dtype=torch.long)
    draw_moves(moves, 1, False, torch.Generator().manual_seed(0))
    assert torch.equal(augmented(images.permute(0, 2, 3, 1), torch.arange(4), 8, moves), images)


@pytest.mark.parametrize("loss", ["squared error", "cross-entropy"])
def test_a_classifier_learns(loss):
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (120,), generator=draw)
    images = 0.1 * torch.randn(120, 1, 4, 4, generator=draw)
    images[torch.arange(120), 0, labels] += 1.0  # a bright row tells the class
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    train(network, images, labels, 3, Recipe(10, rate=1e-2, batch=20, shift=0, mirror=True, loss=loss), seed=0)
    assert not network.training
    assert float((outputs(network, images).argmax(1) == labels).double().mean()) > 0.95


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ViT", "ResNet-18"])
def test_steps_that_are_replayed_are_the_steps(kind, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (330,), generator=draw).cuda()
    images = torch.randn(330, 3, 8, 8, generator=draw).cuda()
    found = []
    for captured in (True, False):
        monkeypatch.setattr("whence_paper.replayed.can_capture", lambda inputs, captured=captured: captured)
        torch.manual_seed(0)
        network = (ViT(8, 2, 3, 3, 32, 2, 2) if kind == "ViT" else resnet18(3, 8)).cuda()
        train(network, images, labels, 3, Recipe(4, rate=1e-3, batch=32, shift=1), seed=0)  # the last batch has 10
        found.append(outputs(network, images))
    # bfloat16 has three digits, and 40 steps of them part ways slowly; steps that are skipped or repeated differ by far
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.05
