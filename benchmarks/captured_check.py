"""Are captured steps right, and how quick are they? To be run on a GPU before studies that rely on them.

    python -m benchmarks.captured_check --data DIR --device cuda --out captured_check.json

For each network of the studies: milliseconds of a step as it is and captured, and how far weights and running means lie
apart after the same steps both ways, beside two runs without a capture (sums on a GPU are not repeated bit by bit).
Then a ResNet-18 is trained for some epochs on the images that are there, and asked about new ones.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence_paper.captured import Adam, Momentum, Plan, Rule, Trainer, constant, drawn_moves, in_a_stream, one_cycle
from whence_paper.disentanglement.cases import convolutions

from . import networks
from .data import read_cifar
from .record import save, say, surroundings
from .training import SHIFT, accuracy, losses_of, train_captured


@dataclass(frozen=True)
class Kind:
    """A network, and how it is trained."""

    make: Callable[[int], nn.Module]
    rule: Rule
    batch: int
    half: bool
    shift: int


def kinds(width: int) -> dict[str, Kind]:
    """The networks of the studies."""
    return {
        "ResNet-18": Kind(lambda k: networks.resnet18(k, width), Adam(5e-2), 256, True, SHIFT),
        "ViT": Kind(lambda k: networks.ViT(32, 4, 3, k, 3 * width, 6, 3), Adam(5e-2), 256, True, SHIFT),
        "ResNet-9": Kind(lambda k: networks.resnet9(k, width), Momentum(), 64, True, 0),
        "CNN": Kind(lambda k: convolutions(k, 3, 32), Adam(), 128, False, 0),
    }


def trained(kind: Kind, data: tuple[Tensor, Tensor], steps: int, graphs: bool) -> tuple[nn.Module, float]:
    """A network after some steps, and milliseconds of one of them, without the first training of its kind."""
    draw = torch.Generator().manual_seed(0)
    index, weight = in_a_stream(len(data[0]), -(-steps * kind.batch // len(data[0])), kind.batch, draw)
    index, weight = index[:steps], weight[:steps]
    moves = drawn_moves(index, kind.shift, draw) if kind.shift else None
    cycle = one_cycle(1e-3, steps) if isinstance(kind.rule, Adam) else constant(0.01, 0.9, steps)
    trainer = Trainer(kind.rule, losses_of("cross-entropy"), half=kind.half, shift=kind.shift, graphs=graphs)
    for _ in range(2):
        torch.manual_seed(0)
        network = kind.make(10).to(data[0].device)
        synchronize()
        start = time.perf_counter()
        trainer(network, *data, Plan(index, weight, *cycle, moves))
        synchronize()
        spent = time.perf_counter() - start
    return network, 1000 * spent / steps


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def apart(one: nn.Module, other: nn.Module) -> float:
    """Relative distance of all weights and running means; infinite if the two counted other numbers of batches."""
    both = [list(net.state_dict().values()) for net in (one, other)]
    counts = [[int(value) for value in values if not value.is_floating_point()] for values in both]
    first, second = (torch.cat([v.flatten().double() for v in values if v.is_floating_point()]) for values in both)
    return float((first - second).norm() / second.norm()) if counts[0] == counts[1] else float("inf")


def main() -> None:
    """All kinds, then one training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("out/captured_check.json"))
    given = parser.parse_args()
    split = read_cifar(given.data, 2)
    data = split.inputs[: given.n].to(given.device), split.labels[: given.n].to(given.device)
    record: dict[str, Any] = {**surroundings(), "steps": given.steps, "rows": []}
    for name, kind in kinds(given.width).items():
        (plain, eager_ms), (again, _), (captured, ms) = (
            trained(kind, data, given.steps, graphs) for graphs in (False, False, True)
        )
        row = {
            "network": name,
            "plain_ms": round(eager_ms, 2),
            "captured_ms": round(ms, 2),
            "apart": apart(captured, plain),
            "apart_by_chance": apart(again, plain),
        }
        record["rows"].append(row)
        say(row)
        save(given.out, record)
    start = time.perf_counter()
    torch.manual_seed(0)
    network = networks.resnet18(10, given.width).to(given.device)
    settings = {"loss": "cross-entropy", "epochs": given.epochs, "batch": 256, "peak": 3e-3, "decay": 5e-2, "seed": 0}
    train_captured(network, *data, images=True, **settings)
    synchronize()
    seconds = time.perf_counter() - start
    tests, labels = split.test_inputs[:5000].to(given.device), split.test_labels[:5000].to(given.device)
    record["training"] = {"seconds": round(seconds, 2), "accuracy": accuracy(network, tests, labels)}
    save(given.out, record)
    say(f"ResNet-18, {given.epochs} epochs of {len(data[0])} images:", record["training"])


if __name__ == "__main__":
    main()
