"""Seconds and memory on one GPU for networks of CIFAR-10's size: fit on 50,000 images, Ho and HeC3 of 10,000.

    python -m benchmarks.gpu_cifar --data DIR --device cuda --out results/gpu_cifar.json

Without `--data` the images are noise (timings only). With fewer than 50,000 training images at hand, they are repeated
with flips and shifts up to that number for the timings; the record says so. Data lie on the GPU beforehand.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import whence

from . import networks
from .data import Split, batches, random_images, read_cifar
from .record import save, say, surroundings
from .reference import forward_backward, wall_seconds
from .scores import auroc, median_scale, spearman
from .training import accuracy, augment, train
from .variants import Variant, parse, precision, sampling

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": networks.resnet18,
    "vit": partial(networks.ViT, 32, 4, 3, 10, 192, 12, 3),
    "vit-6": partial(networks.ViT, 32, 4, 3, 10, 192, 6, 3),
    "vit-small": partial(networks.ViT, 32, 4, 3, 10),
    "tiny": partial(networks.resnet18, 10, 4),
    "tiny-vit": partial(networks.ViT, 32, 8, 3, 10, 16, 2, 2),
}
FEW_BATCHES = 3
"""Batches of a fit that is not counted: kernels are loaded, chosen and compiled."""
STRUCTURES = ("ekfac", "ekfac:tf32=1", "core", "core:tf32=1", "ekfac:bfloat16=1", "sketch")


def enlarge(images: Tensor, labels: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The first n images; where there are fewer, the same again with flips and shifts."""
    draw = torch.Generator().manual_seed(0)
    parts, answers = [images[:n]], [labels[:n]]
    while sum(map(len, parts)) < n:
        wanted = min(len(images), n - sum(map(len, parts)))
        moved = [augment(some, draw) for some in images[:wanted].split(100)]
        parts.append(torch.cat(moved))
        answers.append(labels[:wanted])
    return torch.cat(parts), torch.cat(answers)


def prepare(name: str, split: Split, given: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """Train a network as long as asked for, and take the reference: forward + k backward passes."""
    device = torch.device(given.device)
    torch.manual_seed(given.seed)
    network = NETWORKS[name]().to(device)
    targets = whence.one_hot(split.labels, 10)
    with precision(True):
        learn = partial(train, network, split.inputs, targets, epochs=given.epochs, flips=True)
        seconds = wall_seconds(learn, device) if given.epochs else 0.0
    network.eval()
    entry: dict[str, Any] = {
        "network": name,
        "parameters": networks.size(network),
        "epochs": given.epochs,
        "trained_on": len(split.labels),
        "train_s": seconds,
        "accuracy": accuracy(network, split.test_inputs, split.test_labels),
        "n": given.n,
        "test": len(split.test_labels),
        "batch": given.batch,
        "rows": [],
    }
    parts = split.test_inputs.split(given.batch)
    for tf32 in (False, True) if given.reference else ():
        with precision(tf32):
            forward_backward(network, parts[:1])
            label = "reference_test_tf32_s" if tf32 else "reference_test_s"
            entry[label] = wall_seconds(partial(forward_backward, network, parts), device)
    return network, entry


def measure(
    network: nn.Module, loader: list[tuple[Tensor, Tensor]], split: Split, variant: Variant, given: argparse.Namespace
) -> tuple[dict[str, Any], whence.Uncertainty]:
    """Seconds and memory of one structure, twice for predictions: the first call may have kernels to choose.

    So has the first fit of a process, which is to a few images here, and timed apart.
    """
    device = torch.device(given.device)
    options = {**variant.options}
    tests = list(split.test_inputs.split(given.batch))
    if variant.bfloat16:
        network = deepcopy(network).bfloat16()
        loader = [(x.bfloat16(), y) for x, y in loader]
        tests = [x.bfloat16() for x in tests]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    kept: list[Any] = []
    n = variant.n or given.n
    loader = loader[: math.ceil(n / given.batch)]
    ridge = given.ridge_share * n

    def fit(some: list[tuple[Tensor, Tensor]]) -> None:
        kept[:] = [whence.fit(network, some, structure=variant.structure, ridge=ridge, progress=False, **options)]

    row: dict[str, Any] = {"structure": variant.name}
    with precision(variant.tf32), sampling(variant.everything):
        if device.type == "cuda":
            row["few_images_s"] = wall_seconds(lambda: fit(loader[:FEW_BATCHES]), device)
            kept.clear()
            torch.cuda.reset_peak_memory_stats()
        row["fit_s"] = wall_seconds(lambda: fit(loader), device)
        row["fit_peak_gib"] = _peak(device, held)
        tracer = kept[0]
        row["predict_s"] = wall_seconds(lambda: kept.append(tracer.predict(tests)), device)
        row["predict_again_s"] = wall_seconds(lambda: tracer.predict(tests), device)
        row["predict_peak_gib"] = _peak(device, held)
    row["freedom"] = tracer.degrees_of_freedom
    row["notes"] = [finding.value for finding in tracer.diagnostics if finding.name == "note"]
    return row, kept[1]


def judge(found: whence.Uncertainty, plain: whence.Uncertainty | None, labels: Tensor) -> dict[str, float]:
    """AUROC for misclassified points, and agreement with the same structure in plain float32."""
    wrong = found.mean.argmax(1) != labels
    top = found.mean.float().topk(2, dim=1).values
    scores = {"margin": top[:, 1] - top[:, 0], "ho": found.ho.sum(1), "hec3": found.hec3.sum(1), "ratio": found.ratio}
    result = {f"auroc_wrong_{name}": auroc(score, wrong) for name, score in scores.items()}
    if plain is not None:
        for name in ("ho", "hec3"):
            mine, theirs = found.variance(name).sum(1), plain.variance(name).sum(1)
            result[f"rank_{name}_to_plain"] = spearman(mine, theirs)
            result[f"scale_{name}_to_plain"] = median_scale(mine, theirs)
        result["rank_ratio_to_plain"] = spearman(found.ratio, plain.ratio)
    return result


def show_profile(network: nn.Module, loader: list[tuple[Tensor, Tensor]], structure: str, path: Path) -> None:
    """What takes the time in a fit on 200 images and a prediction of them."""
    variant = parse(structure)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    tables = []
    few = [(loader[0][0][:200], loader[0][1][:200])]
    ridge = 0.01 * len(few[0][0])
    with precision(variant.tf32):
        tracer = whence.fit(network, few, structure=variant.structure, ridge=ridge, progress=False)
        for label, work in (
            ("fit", lambda: whence.fit(network, few, structure=variant.structure, ridge=ridge, progress=False)),
            ("predict", lambda: tracer.predict(few[0][0])),
        ):
            with profile(activities=kinds, record_shapes=True) as seen:
                seconds = wall_seconds(work, next(network.parameters()).device)
            table = seen.key_averages(group_by_input_shape=True).table(
                sort_by=order, row_limit=25, max_name_column_width=40, max_shapes_column_width=90
            )
            tables.append(f"{structure}, {label}, {seconds:.2f} s under the profiler\n{table}")
    path.write_text("\n\n".join(tables))


def _peak(device: torch.device, held: int) -> float | None:
    return (torch.cuda.max_memory_allocated() - held) / 2**30 if device.type == "cuda" else None


def run_network(name: str, split: Split, given: argparse.Namespace, record: dict[str, Any]) -> None:
    """All structures of one network."""
    network, entry = prepare(name, split, given)
    record["networks"].append(entry)
    said = (
        f"{name}: {entry['parameters']} parameters, accuracy {entry['accuracy']:.3f}, trained {entry['train_s']:.1f} s"
    )
    if given.reference:
        said += f", forward + k backward of the test set {entry['reference_test_s']:.2f} s "
        said += f"(TF32 {entry['reference_test_tf32_s']:.2f} s)"
    say(said)
    inputs, labels = enlarge(split.inputs, split.labels, given.n)
    loader = batches(inputs, whence.one_hot(labels, 10), given.batch)
    plain: dict[str, whence.Uncertainty] = {}
    for text in given.structures:
        if time.perf_counter() > given.deadline:
            say(f"out of time before {text}")
            return
        variant = parse(text)
        try:
            row, found = measure(network, loader, split, variant, given)
            kind = f"{variant.structure.name}, {variant.n}"
            row.update(judge(found, plain.get(kind), split.test_labels))
            plain.setdefault(kind, found)
            said = f"fit {row['fit_s']:.2f} s, predict {row['predict_s']:.2f} s, again {row['predict_again_s']:.2f} s, "
            said += f"peak {row['fit_peak_gib']} / {row['predict_peak_gib']} GiB, dof {row['freedom']:.0f}"
        except (whence.WhenceError, RuntimeError) as error:
            row = {"structure": text, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
            said = row["failed"]
        say(f"  {text:20s} {said}")
        entry["rows"].append(row)
        save(given.out, record)
        if text == given.profile and "failed" not in row:
            show_profile(network, loader, text, given.out.parent / f"profile-{name}.txt")


def profile_arguments(about: str | None, out: str, n: int) -> argparse.ArgumentParser:
    """The options of programs that look into one network: its name, sizes, and where the record goes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", choices=NETWORKS, default="resnet18")
    parser.add_argument("--n", type=int, default=n)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--commit", help="recorded as the commit, where there is no repository")
    parser.add_argument("--tiny", action="store_true", help="a few images and a small network: does it run?")
    return parser


def main() -> None:
    """Run the networks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets; noise when not given")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_cifar.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["resnet18", "vit"])
    parser.add_argument("--structures", nargs="+", default=STRUCTURES)
    parser.add_argument("--n", type=int, default=50_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--no-reference", dest="reference", action="store_false", help="no forward + k backward alone")
    parser.add_argument("--ridge-share", type=float, default=0.01, help="lambda / n")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", help="a structure whose time is broken down in a table beside the record")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop cleanly after this time")
    parser.add_argument("--commit", help="recorded as the commit, where there is no repository")
    parser.add_argument("--tiny", action="store_true", help="a few images and the smallest networks: does it run?")
    given = parser.parse_args()
    given.deadline = time.perf_counter() + given.seconds
    if given.tiny:
        given.networks, given.n, given.test, given.batch, given.epochs = ["tiny", "tiny-vit"], 60, 30, 20, 1
    given.out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device(given.device)
    split = read_cifar(given.data) if given.data else random_images(given.n, given.test, (3, 32, 32))
    split = Split(*(part.to(device) for part in vars(split).values()))
    least = 100 if given.tiny else len(split.labels)
    split = Split(
        split.inputs[:least], split.labels[:least], split.test_inputs[: given.test], split.test_labels[: given.test]
    )
    record = {
        **surroundings(given.commit),
        "data": f"CIFAR-10, {len(split.labels)} training images" if given.data else "random images",
        "repeated_with_flips_and_shifts": given.n > len(split.labels),
        "networks": [],
    }
    for name in given.networks:
        run_network(name, split, given, record)
    say(f"wrote {given.out}")


if __name__ == "__main__":
    main()
