"""One basis or two for the bread and the meats of EKFAC: quality against the exact dual, and cost.

    python -m benchmarks.two_bases --data DIR --out results/two_bases.json --device cuda

For each network and draw: rank correlations of Ho, HeC0, HeC3 and of both ratios to Ho with the exact ones over test
points, median scales, AUROC of the ratios for the noisy class, and seconds as multiples of one forward and k backward
passes over the same data.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whence

from . import networks
from .data import Split, Task, batches, read_digits
from .dual import Exact, kernels
from .quality import CASES, Case, prepare
from .record import attempt, save, say, surroundings
from .reference import forward_backward, wall_seconds
from .scores import auroc, median_scale, spearman
from .variants import Variant, parse, precision

SMALL = {
    "small-mlp-2": Case("mnist", 600, True, lambda k: networks.mlp(784, 128, 128, k), 60),
    "small-cnn-2": Case("fashion-mnist", 600, True, lambda k: networks.cnn(k, (16, 32, 64, 128)), 100),
    "mnist-mlp-2": Case("mnist", 6000, True, lambda k: networks.mlp(784, 256, 256, k)),
}
ALL = {**CASES, **SMALL}

VARIANTS = (
    "ekfac:meat=one_basis,basis=positions",
    "ekfac:meat=two_bases,basis=positions,corner=64",
    "ekfac:meat=two_bases,basis=positions,corner=None",
    "ekfac:meat=one_basis,basis=gradients",
    "ekfac:meat=two_bases,basis=gradients,corner=16",
    "ekfac:meat=two_bases,basis=gradients,corner=32",
    "ekfac:meat=two_bases,basis=gradients,corner=64",
    "ekfac:meat=two_bases,basis=gradients,corner=128",
    "ekfac:meat=two_bases,basis=gradients,corner=None",
    "core:size=2048,basis=positions",
    "core:size=2048,basis=gradients",
)


def compare(found: whence.Uncertainty, truth: Exact, noisy: Tensor) -> dict[str, float]:
    """All scores of one variant."""
    ho, hec0, hec3 = (one.sum(1).to(truth.ho) for one in (found.ho, found.hec0, found.hec3))
    return {
        "rank_ho": spearman(ho, truth.ho),
        "rank_hec0": spearman(hec0, truth.hec0),
        "rank_hec3": spearman(hec3, truth.hec3),
        "rank_ratio0": spearman(hec0 / ho, truth.hec0 / truth.ho),
        "rank_ratio3": spearman(hec3 / ho, truth.hec3 / truth.ho),
        "auroc_ratio0": auroc(hec0 / ho, noisy),
        "auroc_ratio3": auroc(hec3 / ho, noisy),
        "scale_ho": median_scale(ho, truth.ho),
        "scale_hec0": median_scale(hec0, truth.hec0),
        "scale_hec3": median_scale(hec3, truth.hec3),
    }


def best_of(times: int, work: Callable[[], object], device: torch.device) -> float:
    """The shortest of several timings."""
    return min(wall_seconds(work, device) for _ in range(times))


def measure(
    network: nn.Module, task: Task, variant: Variant, ridge: float, truth: Exact, units: tuple[float, float], batch: int
) -> dict[str, Any]:
    """Fit one variant, predict the test points, compare, and time both."""
    loader, tested = batches(task.inputs, task.targets, batch), list(task.test_inputs.split(batch))
    device = task.inputs.device

    def fit() -> whence.Tracer:
        return whence.fit(network, loader, structure=variant.structure, ridge=ridge, progress=False, **variant.options)

    def predict() -> whence.Uncertainty:
        found = tracer.predict(tested)
        found.ho, found.hec3  # noqa: B018  # variances are computed when they are asked for
        return found

    with precision(variant.tf32):
        tracer = fit()
        found = predict()
        fit_s, predict_s = best_of(2, fit, device), best_of(3, predict, device)
    return {
        **compare(found, truth, task.test_labels == task.noisy),
        "fit_s": fit_s,
        "predict_s": predict_s,
        "fit_multiple": fit_s / units[0],
        "predict_multiple": predict_s / units[1],
        "freedom": tracer.degrees_of_freedom,
        "notes": [finding.value for finding in tracer.diagnostics if finding.name == "note"],
    }


def run(name: str, split: Split, seed: int, given: argparse.Namespace, record: dict[str, Any]) -> None:
    """Train one network, take the exact numbers, then every variant; the record is saved after each."""
    given.seed = seed
    network, task, entry = prepare(name, ALL[name], split, given)
    record["cases"].append(entry)
    products = kernels(network, task.inputs, task.targets, task.test_inputs, given.row_batch)
    device, noisy = task.inputs.device, task.test_labels == task.noisy
    units = (
        best_of(3, lambda: forward_backward(network, task.inputs.split(given.batch)), device),
        best_of(3, lambda: forward_backward(network, task.test_inputs.split(given.batch)), device),
    )
    for share in given.ridges:
        truth = products.exact(share * entry["n"])
        exact = {
            "auroc_ratio0": auroc(truth.hec0 / truth.ho, noisy),
            "auroc_ratio3": auroc(truth.hec3 / truth.ho, noisy),
            "freedom": truth.freedom,
        }
        entry["rows"].append({"structure": "exact", "ridge_share": share, **exact})
        say(
            f"{name} seed {seed} at {share:g} n: {entry['parameters']} parameters, accuracy {entry['accuracy']:.3f}, "
            f"AUROC of the exact ratios {exact['auroc_ratio0']:.3f} {exact['auroc_ratio3']:.3f}"
        )
        for text in given.variants:
            row: dict[str, Any] = {"structure": text, "ridge_share": share}
            measuring = partial(measure, network, task, parse(text), share * entry["n"], truth, units, given.batch)
            said = attempt(row, measuring, summary)
            say(f"  {text:52s} {said}")
            entry["rows"].append(row)
            save(given.out, record)


def summary(row: dict[str, Any]) -> str:
    """One line."""
    ranks = " ".join(f"{row['rank_' + one]:.3f}" for one in ("ho", "hec0", "hec3", "ratio0", "ratio3"))
    scales = " ".join(f"{row['scale_' + one]:.2f}" for one in ("ho", "hec0", "hec3"))
    return (
        f"ranks (Ho, HeC0, HeC3, HeC0/Ho, HeC3/Ho) {ranks} | AUROC {row['auroc_ratio0']:.3f} {row['auroc_ratio3']:.3f} "
        f"| scales {scales} | fit {row['fit_multiple']:.1f} predict {row['predict_multiple']:.2f}"
    )


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=Path("out/two_bases.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", nargs="+", choices=ALL, default=["small-mlp-2", "small-cnn-2"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--ridges", nargs="+", type=float, default=[0.01], help="as shares of n")
    parser.add_argument("--n", type=int, help="training examples, in place of each case's")
    parser.add_argument("--test", type=int, default=500)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--row-batch", type=int, default=100, help="examples whose Jacobian rows are formed at once")
    parser.add_argument("--commit", help="recorded as the commit, where there is no repository")
    given = parser.parse_args()
    record: dict[str, Any] = {**surroundings(given.commit), "cases": []}
    read: dict[str, Split] = {}
    for name in given.cases:
        data = ALL[name].data
        if data not in read:
            read[data] = read_digits(given.data, data)
        for seed in given.seeds:
            run(name, read[data], seed, given, record)
    say(f"wrote {given.out}")


if __name__ == "__main__":
    main()
