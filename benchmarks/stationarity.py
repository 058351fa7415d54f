"""Does it matter that a network was stopped before the optimum? The check `stationarity` against real retraining.

Two parts, one row a fit. **Digits**: small networks trained by Adam the ordinary way, for a few epochs or many, with
and without weight decay; one class has random labels, one is missing. Fits with and without the last step (`recenter`)
are compared with each other (HeC3 and verdicts) and with 20 networks retrained on bootstrap samples of the training
set, from the same first weights. **Sine**: networks of 8 tanh units on 60 points, stopped after so many steps of
L-BFGS; how often the 95 % interval by HeC3 holds the mean of networks trained to the end, and the mean of networks
stopped as early.

    python -m benchmarks.stationarity
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn
from torch.nn import functional as F

import whence
from whence.trust import trust_of_fit

from .record import save, say, surroundings
from .scores import auroc, spearman

N, TESTED, BOOTSTRAPS, EPOCHS, DECAYS = 400, 150, 20, (5, 30), (0.0, 0.01)
POINTS, RIDGE, SETS, STEPS = 60, 0.1, 8, (3, 6, 12, 25, 200)


def network(kind: str) -> nn.Module:
    """The same first weights each time."""
    torch.manual_seed(1)
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    convolutions = (
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 12, 3, padding=1),
        nn.ReLU(),
    )
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 10))


def train(kind: str, x: Tensor, y: Tensor, epochs: int, decay: float, weights: Tensor) -> nn.Module:
    """Adam on mean cross-entropy + decay / 2 |w|^2, batches of 32 in the same order each time."""
    model, order = network(kind), Generator().manual_seed(5)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=decay)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=order).split(32):
            optimiser.zero_grad()
            losses = F.cross_entropy(model(x[batch]), y[batch], reduction="none")
            (losses * weights[batch]).mean().backward()
            optimiser.step()
    return model.eval()


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Training images and labels, test images and classes, and the class whose labels are random."""
    found, generator = load_digits(), Generator().manual_seed(seed)
    order = torch.randperm(len(found.data), generator=generator)
    images = torch.tensor(found.data[order] / 16).float().reshape(-1, 1, 8, 8)
    classes = torch.tensor(found.target[order]).long()
    noisy, missing = torch.randperm(10, generator=generator)[:2].tolist()
    chosen = (classes[:-TESTED] != missing).nonzero().squeeze(1)[:N]
    labels = classes[chosen]
    labels[labels == noisy] = torch.randint(10, (int((labels == noisy).sum()),), generator=generator)
    return images[chosen], labels, images[-TESTED:], classes[-TESTED:], noisy


def of_digits(kind: str, epochs: int, decay: float, seed: int = 3) -> dict[str, Any]:
    """One network of digits."""
    x, y, tests, classes, noisy = digits(seed)
    model = train(kind, x, y, epochs, decay, torch.ones(len(x)))
    ridge: Any = whence.ridge_from_weight_decay(decay, len(x), loss="cross_entropy") if decay else "auto"
    plain, moved = (
        whence.fit(model, [(x, y)], "categorical", ridge=ridge, recenter=recenter, progress=False)
        for recenter in (False, True)
    )
    hec3 = [tracer.predict(tests).hec3.sum(1).double() for tracer in (plain, moved)]
    explained = [tracer.explain(tests) for tracer in (plain, moved)]
    same = sum(a == b for a, b in zip(explained[0].verdicts, explained[1].verdicts, strict=True)) / len(tests)
    draws, outputs = Generator().manual_seed(9), []
    for _ in range(BOOTSTRAPS):
        counts = torch.bincount(torch.randint(len(x), (len(x),), generator=draws), minlength=len(x)).float()
        outputs.append(train(kind, x, y, epochs, decay, counts)(tests).detach().double())
    retrained = torch.stack(outputs).var(0).sum(1)
    check = trust_of_fit(plain)["stationarity"]
    return {
        "network": kind,
        "epochs": epochs,
        "weight_decay": decay,
        "level": check.level,
        "standard_errors": check.numbers["standard errors"],
        "factor": check.numbers["after the step"],
        "true_factor": float((hec3[0] / hec3[1]).median()),
        "rank_with_recentered": spearman(hec3[0], hec3[1]),
        "same_verdicts": same,
        "hec3_over_retrained": [float((one / retrained).median()) for one in hec3],
        "rank_with_retrained": [spearman(one, retrained) for one in hec3],
        "noise_of_noisy_class": [auroc(one.noise, classes == noisy) for one in explained],
    }


def of_sine(steps: int) -> list[dict[str, Any]]:
    """Networks stopped after so many steps, one for each training set."""
    sets = [sine_data(seed) for seed in range(SETS)]
    tests = torch.linspace(-2, 2, 30, dtype=torch.float64).unsqueeze(1)
    models = [sine_network(*data, steps) for data in sets]
    own = torch.stack([model(tests).detach() for model in models])
    end = torch.stack([sine_network(*data, STEPS[-1])(tests).detach() for data in sets]).mean(0)
    rows = []
    for model, data in zip(models, sets, strict=True):
        tracer = whence.fit(model, [data], ridge=RIDGE, progress=False)
        low, high = tracer.predict(tests).interval(0.95)
        check = trust_of_fit(tracer)["stationarity"]
        rows.append(
            {
                "steps": steps,
                "level": check.level,
                "standard_errors": check.numbers["standard errors"],
                "factor": check.numbers["after the step"],
                "covers_end": float(((low < end) & (end < high)).double().mean()),
                "covers_own": float(((low < own.mean(0)) & (own.mean(0) < high)).double().mean()),
                "hec3_over_retrained": float((tracer.predict(tests).hec3 / own.var(0)).median()),
            }
        )
    return rows


def sine_data(seed: int) -> tuple[Tensor, Tensor]:
    """Points of a sine with noise."""
    generator = Generator().manual_seed(seed)
    x = torch.rand(POINTS, 1, generator=generator, dtype=torch.float64) * 4 - 2
    return x, (2 * x).sin() + 0.3 * torch.randn(POINTS, 1, generator=generator, dtype=torch.float64)


def sine_network(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """So many steps of L-BFGS towards the optimum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = (model(x) - y).square().sum() + RIDGE * sum(p.square().sum() for p in model.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    return model.eval()


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/stationarity.json"))
    out = parser.parse_args().out
    began, sine = time.perf_counter(), []
    for steps in STEPS:
        sine += of_sine(steps)
        say(sine[-1])
    found = []
    for kind in ("mlp", "cnn"):
        for epochs in EPOCHS:
            for decay in DECAYS:
                found.append(of_digits(kind, epochs, decay))
                say(found[-1])
    save(out, {**surroundings(), "seconds": round(time.perf_counter() - began), "digits": found, "sine": sine})


if __name__ == "__main__":
    main()
