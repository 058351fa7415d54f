"""Approximate structures against the exact dual, on networks trained with one class's labels at random.

    python -m benchmarks.quality --data DIR --out results/quality.json --device cuda

For each network, ridge and structure: rank correlation of Ho, HeC3 and their ratio with the exact ones over test
points, median scale of both variances, AUROC of the ratio for the noisy class, seconds, degrees of freedom.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whence

from . import networks
from .data import Split, Task, batches, corrupt, random_images, read_digits
from .dual import Exact, kernels
from .record import attempt, save, say, surroundings
from .reference import forward_backward, wall_seconds
from .scores import auroc, median_scale, spearman
from .training import accuracy, train
from .variants import Variant, parse, precision


@dataclass(frozen=True)
class Case:
    """A network and the data it is trained on."""

    data: str
    n: int
    meta: bool
    make: Callable[[int], nn.Module]
    epochs: int = 20


CASES = {
    "fashion-cnn-2": Case("fashion-mnist", 6000, True, networks.cnn),
    "mnist-cnn-10": Case("mnist", 2500, False, networks.cnn),
    "fashion-cnn-10": Case("fashion-mnist", 2500, False, networks.cnn),
    "mnist-mlp-10": Case("mnist", 2500, False, lambda k: networks.mlp(784, 256, 256, k)),
    "mnist-vit-10": Case("mnist", 2500, False, lambda k: networks.ViT(28, 4, 1, k, width=64, depth=3), 40),
}
SHARES = (0.01, 1e-3, 1e-4)
"""Ridges as shares of n."""

ALL = (
    "core",
    *(f"core:size={r}" for r in (8192, 4096, 2048, 1024)),
    "ekfac",
    *(f"sketch:size={r}" for r in (8192, 4096, 2048)),
    "ekfac:leverage=clip",
    "kfac",
    "diagonal",
    "core:loo=output",
    "ekfac:loo=output",
    "core:precision=float32",
)
FEW = ("core:size=8192", "ekfac", "core:size=2048", "sketch:size=8192")


def measure(network: nn.Module, task: Task, variant: Variant, ridge: float, truth: Exact, batch: int) -> dict[str, Any]:
    """Fit one structure, predict the test points, compare."""
    loader = batches(task.inputs, task.targets, batch)
    cuda = task.inputs.is_cuda
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with precision(variant.tf32):
        start = _now(cuda)
        tracer = whence.fit(
            network, loader, structure=variant.structure, ridge=ridge, progress=False, **variant.options
        )
        fitted = _now(cuda)
        found = tracer.predict(list(task.test_inputs.split(batch)))
        done = _now(cuda)
    wanted = truth.hec3_output if variant.options.get("loo") == "output" else truth.hec3
    result = {
        **compare(found.ho.sum(1), found.hec3.sum(1), truth.ho, wanted, task.test_labels == task.noisy),
        "fit_s": fitted - start,
        "predict_s": done - fitted,
        "freedom": tracer.degrees_of_freedom,
        "guarded": tracer.diagnostics["guarded leverages"],
        "largest_leverage": tracer.diagnostics["largest leverage"],
        "notes": [finding.value for finding in tracer.diagnostics if finding.name == "note"],
    }
    if cuda:
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def compare(ho: Tensor, hec3: Tensor, true_ho: Tensor, true_hec3: Tensor, noisy: Tensor) -> dict[str, float]:
    """All scores of one structure."""
    ho, hec3 = ho.to(true_ho), hec3.to(true_ho)
    ratio, true_ratio = hec3 / ho, true_hec3 / true_ho
    return {
        "rank_ho": spearman(ho, true_ho),
        "rank_hec3": spearman(hec3, true_hec3),
        "rank_ratio": spearman(ratio, true_ratio),
        "scale_ho": median_scale(ho, true_ho),
        "scale_hec3": median_scale(hec3, true_hec3),
        "auroc_ratio": auroc(ratio, noisy),
        "auroc_ratio_exact": auroc(true_ratio, noisy),
        "auroc_hec3": auroc(hec3, noisy),
        "auroc_hec3_exact": auroc(true_hec3, noisy),
        "auroc_ho": auroc(ho, noisy),
        "auroc_ho_exact": auroc(true_ho, noisy),
    }


def prepare(name: str, case: Case, split: Split, given: argparse.Namespace) -> tuple[nn.Module, Task, dict[str, Any]]:
    """Draw the task and train the network."""
    device = torch.device(given.device)
    task = corrupt(split, given.n or case.n, given.test, given.seed, meta=case.meta)
    task = Task(*(part.to(device) if isinstance(part, Tensor) else part for part in vars(task).values()))
    torch.manual_seed(given.seed)
    epochs = given.epochs or case.epochs
    network = case.make(task.targets.shape[1]).to(device)
    seconds = wall_seconds(lambda: train(network, task.inputs, task.targets, epochs=epochs), device)
    parts = task.inputs.split(given.batch)
    forward_backward(network, parts[:1])
    entry = {
        "case": name,
        "data": case.data if given.data else "random images",
        "n": len(task.inputs),
        "outputs": task.targets.shape[1],
        "parameters": networks.size(network),
        "epochs": epochs,
        "seed": given.seed,
        "noisy_class": task.noisy,
        "missing_class": task.missing,
        "test": len(task.test_labels),
        "accuracy": accuracy(network, task.test_inputs, task.test_answers),
        "train_mse": float((network_outputs(network, task.inputs) - task.targets).square().mean()),
        "train_s": seconds,
        "reference_s": wall_seconds(lambda: forward_backward(network, parts), device),
        "rows": [],
    }
    return network, task, entry


def run_case(name: str, case: Case, split: Split, given: argparse.Namespace, record: dict[str, Any]) -> None:
    """Train, take the exact numbers, then every structure; the record is saved after each."""
    cases_left = len(given.cases) - len(record["cases"])
    deadline = time.perf_counter() + (given.deadline - time.perf_counter()) / cases_left
    network, task, entry = prepare(name, case, split, given)
    record["cases"].append(entry)
    start = time.perf_counter()
    products = kernels(network, task.inputs, task.targets, task.test_inputs, given.row_batch)
    products.cross.sum().item()
    entry["kernel_s"] = time.perf_counter() - start
    say(
        f"{name}: {entry['parameters']} parameters, accuracy {entry['accuracy']:.3f}, trained in "
        f"{entry['train_s']:.1f} s, kernels in {entry['kernel_s']:.1f} s, "
        f"forward + k backward {entry['reference_s']:.2f} s"
    )
    for number, share in enumerate(given.ridges):
        ridge = share * entry["n"]
        truth = products.exact(ridge)
        for text in given.structures or (ALL if number == 0 else FEW):
            if time.perf_counter() > deadline:
                say(f"out of time before {text} at {share:g} n")
                return
            row: dict[str, Any] = {
                "structure": text,
                "ridge_share": share,
                "exact_freedom": truth.freedom,
                "exact_largest_leverage": truth.largest,
            }
            measuring = partial(measure, network, task, parse(text), ridge, truth, given.batch)
            said = attempt(row, measuring, summary)
            say(f"  {share:<6g} {text:22s} {said}")
            entry["rows"].append(row)
            save(given.out, record)


def network_outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    """Outputs without a graph."""
    with torch.no_grad():
        return torch.cat([network(some) for some in inputs.split(1000)])


def summary(row: dict[str, Any]) -> str:
    """One line."""
    return (
        f"rank Ho {row['rank_ho']:.3f} HeC3 {row['rank_hec3']:.3f} ratio {row['rank_ratio']:.3f} | scale "
        f"{row['scale_ho']:.2f} {row['scale_hec3']:.3g} | AUROC {row['auroc_ratio']:.3f} (exact "
        f"{row['auroc_ratio_exact']:.3f}) | dof {row['freedom']:.0f} ({row['exact_freedom']:.0f}) | fit "
        f"{row['fit_s']:.2f} s predict {row['predict_s']:.2f} s"
    )


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets; random images when not given")
    parser.add_argument("--out", type=Path, default=Path("out/quality.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--structures", nargs="+", help="in place of the default lists, such as core:size=1024")
    parser.add_argument("--ridges", nargs="+", type=float, default=SHARES, help="as shares of n")
    parser.add_argument("--n", type=int, help="training examples, in place of each case's")
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--row-batch", type=int, default=100, help="examples whose Jacobian rows are formed at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop cleanly after this time")
    parser.add_argument("--commit", help="recorded as the commit, where there is no repository")
    given = parser.parse_args()
    given.deadline = time.perf_counter() + given.seconds
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    record: dict[str, Any] = {**surroundings(given.commit), "cases": []}
    read: dict[str, Split] = {}
    for name in given.cases:
        case = CASES[name]
        if case.data not in read:
            fake = given.data is None
            read[case.data] = random_images(8000, 2000, (1, 28, 28)) if fake else read_digits(given.data, case.data)
        run_case(name, case, read[case.data], given, record)
    say(f"wrote {given.out}")


if __name__ == "__main__":
    main()
