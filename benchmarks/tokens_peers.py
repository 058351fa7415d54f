"""The peers' part of `benchmarks.tokens`: kronfluence and bergson on the same models and sequences.

    python -m benchmarks.tokens_peers --shape llama-1b --device cuda --dtype bfloat16 --out peers.json

kronfluence fits its EKFAC factors, in half precision as its examples for language models do, and scores 8 queries
against all training sequences. bergson writes its index of projected gradients, 16 x 16 numbers a layer, and looks up
the same queries in it. Both see the linear layers of the blocks, or of the last blocks alone, as `kronfluence@2`.
Neither has variances.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .influences import FACTORS, analyzer_of
from .record import say
from .tokens import add_options, built, parsed, passed, peak, sequences, spent, trace, traced, write

PROJECTION = 16
"""Sides of what bergson keeps of a layer's gradient: the figure of its documentation, and of its published speeds."""


class Timer:
    """Seconds, peaks and speeds of the parts of a study."""

    def __init__(self, given: argparse.Namespace, once: float) -> None:
        self.given, self.once, self.row = given, once, dict[str, Any]()

    def part(self, name: str, work: Callable[[], object]) -> None:
        """Add a part's seconds, multiple of forward + backward, tokens a second and GiB."""
        given = self.given
        if given.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        took = spent(work, given.device)
        self.row[f"{name}, seconds"] = took
        self.row[f"{name}, multiple"] = took / self.once
        self.row[f"{name}, tokens a second"] = given.sequences * given.tokens / took
        self.row[f"{name}, peak, GiB"] = peak(given.device)
        say(name, f"{took:.2f} s, {self.row[f'{name}, peak, GiB']:.1f} GiB")

    def summed(self, parts: tuple[str, ...]) -> dict[str, Any]:
        """The row, with the fit as the sum of some of its parts."""
        took = sum(self.row[f"{part}, seconds"] for part in parts)
        whole = {"seconds": took, "multiple": took / self.once}
        whole["tokens a second"] = self.given.sequences * self.given.tokens / took
        whole["peak, GiB"] = max(self.row[f"{part}, peak, GiB"] for part in parts)
        return {**whole, **self.row}


def kronfluence(model: nn.Module, known: TensorDataset, asked: TensorDataset, timer: Timer, names: list[str]) -> Any:
    """Its factors in three steps, then the scores of the queries; gives the scores (m, n)."""
    from kronfluence.utils.common.factor_arguments import all_low_precision_factor_arguments  # a peer, present or not
    from kronfluence.utils.common.score_arguments import all_low_precision_score_arguments

    given = timer.given
    half = getattr(torch, given.dtype)
    known, asked = (TensorDataset(*(part.cpu() for part in one.tensors)) for one in (known, asked))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        analyzer = analyzer_of(model, folder, classes=True, cpu=given.device == "cpu", modules=names, copies=False)
        arguments = all_low_precision_factor_arguments(strategy="ekfac", dtype=half)
        common: dict[str, Any] = {"factors_name": FACTORS, "factor_args": arguments, "overwrite_output_dir": True}
        read: dict[str, Any] = {"dataset": known, "per_device_batch_size": given.batch}
        timer.part("factors", lambda: analyzer.fit_covariance_matrices(**common, **read))
        timer.part("eigenvectors", lambda: analyzer.perform_eigendecomposition(**common))
        timer.part("eigenvalues", lambda: analyzer.fit_lambda_matrices(**common, **read))
        timer.part(
            "queries",
            lambda: analyzer.compute_pairwise_scores(
                scores_name="pairs",
                factors_name=FACTORS,
                query_dataset=asked,
                train_dataset=known,
                per_device_query_batch_size=len(asked),
                per_device_train_batch_size=given.batch,
                score_args=all_low_precision_score_arguments(damping_factor=None, dtype=half),
                overwrite_output_dir=True,
            ),
        )
        return analyzer.load_pairwise_scores("pairs")["all_modules"]


def bergson(model: nn.Module, known: TensorDataset, asked: TensorDataset, timer: Timer, names: list[str]) -> Any:
    """Its index of projected gradients, then a search with those of the queries; gives the scores (m, n), sorted."""
    from bergson import Attributor, GradientProcessor, IndexConfig, collect_gradients  # a peer, present or not
    from bergson.data import allocate_batches
    from datasets import Dataset

    given, inner = timer.given, model.blocks
    assert isinstance(inner, nn.Module)
    labelled = [torch.cat([x[:1], y]) for x, y in known]  # its labels are the inputs, one place later
    rows = {"input_ids": [row.tolist() for row in labelled], "length": [given.tokens + 1] * len(known)}
    data = Dataset.from_dict(rows)
    own = {name.removeprefix("blocks.model.") for name in names}  # as it calls them
    inner.requires_grad_(False)
    inner.get_input_embeddings().requires_grad_(True)  # its way to let gradients pass through all layers
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        where = Path(folder) / "index"
        at_once = given.batch * (given.tokens + 1)
        config = IndexConfig(run_path=str(where), projection_dim=PROJECTION, token_batch_size=at_once)
        config.partial_run_path.mkdir(parents=True)
        processor = GradientProcessor(projection_dim=PROJECTION)
        batches = allocate_batches(data["length"][:], config.token_batch_size)

        def build() -> None:
            collect_gradients(inner, data, processor, config, batches=batches, target_modules=own)
            shutil.move(config.partial_run_path, where)

        timer.part("index", build)
        index = Attributor(where, device=given.device)
        kept: list[Tensor] = []

        def ask() -> None:
            x, y = asked.tensors
            with index.trace(inner.base_model, len(known), modules=own) as result:
                logits = inner(input_ids=x).logits
                nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum").backward()
            kept.append(result.scores)

        ask()  # warm
        timer.part("queries", ask)
        return kept[-1]


PEERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "kronfluence": (kronfluence, ("factors", "eigenvectors", "eigenvalues")),
    "bergson": (bergson, ("index",)),
}
"""By name, what is run, and which parts of it are the fit."""


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Every peer, on a model of its own."""
    torch.manual_seed(0)
    if given.device == "cpu":
        torch.set_num_threads(given.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    for text in given.peers:
        name, _, last = text.partition("@")
        work, fit = PEERS[name]
        model, batches = built(given), sequences(given)
        trace(model, given.layers, int(last or 0))
        passes = passed(model, batches, given)
        if not last or not found:
            found = {**passes, **found}
        known = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
        asked = TensorDataset(*(part[: given.queries].roll(1, 1) for part in known.tensors))
        timer = Timer(given, passes["forward + backward, seconds"])
        scores = work(model, known, asked, timer, traced(model, given.layers, int(last or 0)))
        expected = (given.queries, given.sequences)
        if tuple(scores.shape) != expected or not bool(torch.isfinite(scores.float()).all()):
            raise FloatingPointError(f"expected {expected} finite scores from {name}, got {tuple(scores.shape)}")
        label = name + (f", the last {last} of {given.layers} blocks" if last else "")
        found[label] = {**(passes if last else {}), **timer.summed(fit), "version": version(name)}
        say(label, found[label])
        write(given, found)
        del model, batches, known, asked, scores
    return found


def version(name: str) -> str:
    """Of a package."""
    from importlib.metadata import version as installed

    return installed(name)


def main() -> None:
    """Measure and write everything down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    parser.add_argument("--queries", type=int, default=8, help="sequences that are scored against all others")
    parser.add_argument("--folder", help="for what they write")
    parser.add_argument("--packages", help="folder with packages that are not installed")
    given = parsed(parser)
    if given.packages:
        sys.path.append(given.packages)  # last: what is installed comes first
    write(given, measure(given))


if __name__ == "__main__":
    main()
