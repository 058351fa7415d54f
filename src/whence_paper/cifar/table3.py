"""Table 3: which predictions on CIFAR-10 are wrong? AUROC and cost of Ho, HeC3, a deep ensemble, and the margin.

Networks of each architecture are the members of the ensemble, and serve one by one as the single network. Estimators
are fitted to the first few of them, on a random part of the training set (--fit-size), with lambda in proportion.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import whence
from whence_paper.data import Images
from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Configuration, Record
from whence_paper.scores import auroc

from . import cases
from .cases import Architecture
from .fits import ESTIMATORS, WAYS, fit
from .scores import of_both, of_members, of_outputs, of_variances, with_largest_output
from .table3_shown import check, show
from .training import Loss, outputs

Get = Callable[[], Images]
Step = tuple[Configuration, Callable[[], dict[str, Any]]]


def options(parser: argparse.ArgumentParser) -> None:
    """Those of CIFAR-10, and how much to do."""
    cases.add_options(parser)
    add = parser.add_argument
    add("--fits", type=int, help="networks of each architecture to fit estimators to (default 3)")
    add("--differences", type=int, help="of these, how many with variances of differences too (default all)")
    add("--ways", nargs="+", choices=sorted(WAYS), default=["EKFAC, all layers", "dense, last layer"])
    add("--sweep", type=float, nargs="*", default=[], help="further lambdas, as shares of n, for the first network")
    add("--sweep-size", type=int, default=5000, help="images that the sweep is fitted on")
    add("--cross-entropy", type=int, default=0, help="networks to train by cross-entropy as well (default none)")
    add("--only", nargs="+", choices=("network", "fit", "ensemble"), default=["network", "fit", "ensemble"])
    add("--seconds", type=float, default=float("inf"), help="begin nothing new after this time")


def arrays(settings: Settings, wanted: Configuration) -> Path:
    """Where the predictions of a run are kept."""
    keys = ("kind", "architecture", "loss", "epochs", "shift", "seed", "way", "ridge share", "fit size")
    words = [str(wanted[key]) for key in keys if key in wanted]
    name = "-".join(words).replace(" ", "_").replace(",", "")
    return settings.out / "predictions" / f"{name}{'-quick' if settings.quick else ''}.npz"


def kept_outputs(paths: Iterable[Path]) -> Tensor:
    """Outputs (e, m, k) of several networks."""
    return torch.stack([torch.from_numpy(np.load(path)["outputs"].astype(np.float32)) for path in paths])


def judge_network(one: Architecture, wanted: Configuration, settings: Settings, get: Get) -> dict[str, Any]:
    """Train a network; how well its outputs alone tell which are wrong."""
    images = get()
    network, seconds = cases.trained(_trained(wanted), one, images, settings)
    found = outputs(network, images.test_inputs).cpu()
    path = arrays(settings, wanted)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, outputs=found.half().numpy())
    wrong = found.argmax(1) != images.test_labels.cpu()
    seen = outputs(network, images.inputs[:10_000]).cpu().argmax(1) == images.labels[:10_000].cpu()
    return {
        "accuracy": float((~wrong).double().mean()),
        "training_accuracy": float(seen.double().mean()),
        "train_s": seconds,
        "auroc": {name: auroc(value, wrong) for name, value in of_outputs(found).items()},
    }


def judge_fit(one: Architecture, wanted: Configuration, settings: Settings, get: Get) -> dict[str, Any]:
    """Fit estimators to a network; how well they tell which predictions are wrong."""
    images = get()
    network, _ = cases.trained(_trained(wanted), one, images, settings)
    data = cases.fitting_data(images, wanted["fit size"], wanted["loss"])
    likelihood = "categorical" if wanted["loss"] == "cross-entropy" else "gaussian"
    apart = settings.differences is None or wanted["seed"] < settings.differences
    tests, way = images.test_inputs, wanted["way"]
    found, facts = fit(network, data, tests, way, wanted["ridge share"], likelihood, differences=apart)
    found.save(arrays(settings, wanted))
    wrong = found.outputs.argmax(1) != images.test_labels.cpu()
    areas: dict[str, dict[str, float]] = {}
    for estimator in ESTIMATORS:
        scores = {**of_variances(found, estimator), **of_both(found, estimator)}
        areas[estimator] = {name: auroc(value, wrong) for name, value in scores.items()}
    ratio = found.variances["hec3"].sum(1) / found.variances["ho"].sum(1)
    return {**facts, "auroc": areas, "ratio": auroc(ratio, wrong), "with largest output": with_largest_output(found)}


def judge_ensemble(paths: list[Path], labels: Get) -> dict[str, Any]:
    """The networks together: their variance and their mean, for its own mistakes and those of each member."""
    members = kept_outputs(paths)
    truth = labels().test_labels.cpu()
    scores, mean = of_members(members), members.double().mean(0)
    wrong = mean.argmax(1) != truth
    return {
        "accuracy": float((~wrong).double().mean()),
        "auroc": {name: auroc(value, wrong) for name, value in scores.items()},
        "auroc_members": [
            {name: auroc(value, one.argmax(1) != truth) for name, value in scores.items()} for one in members
        ],
    }


def _trained(wanted: Configuration) -> Configuration:
    """The part of a configuration that decides the network."""
    other = ("kind", "way", "ridge share", "fit size", "members")
    return {key: value for key, value in wanted.items() if key not in other}


def steps(settings: Settings, get: Get) -> Iterator[Step]:
    """All runs, the most important first."""
    fits = settings.fits or (1 if settings.quick else 3)
    size = 150 if settings.quick else settings.fit_size
    made = cases.architectures(settings)

    def fitted(one: Architecture, seed: int, way: str, share: float, n: int, loss: Loss = "squared error") -> Step:
        about = {**cases.configuration(one, settings, seed, loss), "kind": "fit"}
        wanted = {**about, "way": way, "ridge share": share, "fit size": n}
        return wanted, partial(judge_fit, one, wanted, settings, get)

    def network(one: Architecture, seed: int, loss: Loss = "squared error") -> Step:
        wanted = {**cases.configuration(one, settings, seed, loss), "kind": "network"}
        return wanted, partial(judge_network, one, wanted, settings, get)

    for one in made:
        members = [network(one, seed) for seed in settings.seeds]
        yield from members
        paths = [arrays(settings, wanted) for wanted, _ in members]
        about = {**cases.configuration(one, settings, 0), "kind": "ensemble", "members": len(paths)}
        yield about, partial(judge_ensemble, paths, get)
        for seed in settings.seeds[:fits]:
            yield from (fitted(one, seed, way, settings.ridge_share, size) for way in settings.ways)
    for one in made:
        first = settings.seeds[0]
        yield from (fitted(one, first, "EKFAC, all layers", share, settings.sweep_size) for share in settings.sweep)
    for one in made:
        for seed in settings.seeds[: settings.cross_entropy]:
            yield network(one, seed, "cross-entropy")
            yield from (fitted(one, seed, way, settings.ridge_share, size, "cross-entropy") for way in settings.ways)


def compute(settings: Settings, record: Record) -> None:
    """Make what is missing, until time is over. A run that fails is told and stops no other."""
    began, failed = time.perf_counter(), 0
    get = cache(partial(cases.read, settings))  # when a run is missing
    for wanted, work in steps(settings, get):
        if wanted["kind"] not in settings.only or record.find(wanted) is not None:
            continue
        if time.perf_counter() - began > settings.seconds:
            print(f"out of time before {wanted['kind']} {wanted['architecture']} {wanted['seed']}", flush=True)
            break
        about = f"{wanted['kind']} {wanted['architecture']} {wanted['seed']} {wanted.get('way', '')}".strip()
        try:
            found = _brief(record.once(wanted, work).results)
        except (RuntimeError, OSError, whence.WhenceError) as error:  # such as a device out of memory
            failed += 1
            found = f"failed: {type(error).__name__}: {error}"
        print(f"{time.perf_counter() - began:.0f} s: {about} {found}", flush=True)
    if failed:
        print(f"{failed} of the runs failed; the same command tries them again", flush=True)


def _brief(results: dict[str, Any]) -> str:
    areas = results["auroc"]
    if "hec3" in areas:
        return f"Ho {areas['ho']['sum']:.3f} HeC3 {areas['hec3']['sum']:.3f} in {results['fit_s']:.1f} s"
    first = next(iter(areas))
    return f"accuracy {results['accuracy']:.3f}, {first} {areas[first]:.3f}"


EXPERIMENT = Experiment("table3", __doc__ or "", compute, show, check, options, runs=(10, 2))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
