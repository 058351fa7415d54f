"""Time or memory of one subject on one model, in a process of its own; started by `benchmarks.cost`.

Prints a JSON line whenever something new is known; the last one counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.jacobian.capture import Capture
from whence.jacobian.gradients import Dense, Kronecker

from .memory import METHOD, extra_bytes
from .models import MODELS, Model
from .peers import PEERS, Subject, subject
from .reference import cpu_seconds, forward_backward

PATIENCE = 40.0
"""CPU seconds that a sweep or a prediction may take before the rest is left out or extrapolated."""


def best(work: Callable[[], object], least: float = 1.0, most: int = 10) -> float:
    """Smallest CPU time of as many runs as make up `least` seconds."""
    times = [cpu_seconds(work)]
    while sum(times) < least and len(times) < most:
        times.append(cpu_seconds(work))
    return min(times)


def sweep(work: Callable[[int], object], sizes: Sequence[int]) -> tuple[int, dict[int, float]]:
    """The batch size that takes least CPU time, and all times; larger sizes are left out once it takes too long."""
    times: dict[int, float] = {}
    for size in sorted(set(sizes)):
        times[size] = best(partial(work, size), least=0.3)
        if sum(times.values()) > PATIENCE:
            break
    return min(times, key=lambda size: times[size]), times


class Bench:
    """One subject on one model."""

    def __init__(self, name: str, model: Model, who: Subject, prepared: Path) -> None:
        self.model, self.who = model, who
        self.network, self.inputs, self.targets, self.tests = model.load(prepared)
        n, self.test = len(self.inputs), len(self.tests)
        self.result: dict[str, Any] = {
            "model": name,
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "frozen": who.frozen(self.network),
            "version": who.version(),
            "n": n,
            "test": self.test,
            "threads": torch.get_num_threads(),
        }
        self.untouched = deepcopy(self.network)
        self.few = min(n, max(n // 8, max(model.sweep)))

    def tell(self, **news: Any) -> None:
        self.result.update(news)
        print(json.dumps(self.result), file=sys.__stdout__, flush=True)

    def reference(self, inputs: Tensor, batch: int) -> float:
        return best(lambda: forward_backward(self.untouched, inputs.split(batch)))

    def time(self) -> None:
        """Reference, fit, predict, reference again."""
        some, answers = self.inputs[: self.few], self.targets[: self.few]
        forward_backward(self.untouched, [some[:8]])
        sizes = [min(size, self.few) for size in self.model.sweep]
        batch, times = sweep(lambda size: forward_backward(self.untouched, some.split(size)), sizes)
        before = self.reference(self.inputs, batch), self.reference(self.tests, batch)
        self.tell(reference_batch=batch, reference_sweep=times, reference_fit_s=[before[0]])
        self.who.fit(self.network, some[:32], answers[:32], 32)
        batch_fit, times = sweep(lambda size: self.who.fit(self.network, some, answers, size), sizes)
        self.tell(fit_batch=batch_fit, fit_sweep=times, sweep_n=self.few)
        fits: list[Any] = []

        def fit() -> None:
            fits[:] = [self.who.fit(self.network, self.inputs, self.targets, batch_fit)]

        seconds = best(fit)
        self.tell(fit_s=seconds, fit_multiple=seconds / before[0])  # stands if the predictions do not end
        self.predict(fits[0])
        after = self.reference(self.inputs, batch), self.reference(self.tests, batch)
        self.tell(
            reference_fit_s=[before[0], after[0]],
            reference_predict_s=[before[1], after[1]],
            fit_multiple=2 * self.result["fit_s"] / (before[0] + after[0]),
        )
        if "predict_s" in self.result:
            self.tell(predict_multiple=2 * self.result["predict_s"] / (before[1] + after[1]))

    def predict(self, fitted: Any) -> None:
        """Seconds for all test points, from as many of them as patience allows."""
        if self.who.predict(fitted, self.tests[:2], 2) is None:
            return
        sizes = self.model.points if self.who.squared else self.model.sweep
        sizes = [min(size, self.test) for size in sizes]
        few = self.tests[: max(sizes)]
        batch, times = sweep(lambda size: self.who.predict(fitted, few, size), sizes)
        each = times[batch] / len(few)
        points = self.test if each * self.test < PATIENCE else max(len(few), int(PATIENCE / each))
        points = min(points, self.test)
        seconds = best(lambda: self.who.predict(fitted, self.tests[:points], batch)) * self.test / points
        self.tell(predict_batch=batch, predict_sweep=times, predict_points=points, predict_s=seconds)

    def memory(self, batch_fit: int, batch_predict: int | None) -> None:
        """Extra bytes of fit and predict, beside those of the factors and of a batch."""
        forward_backward(self.untouched, [self.inputs[:8]])
        self.who.fit(self.network, self.inputs[:32], self.targets[:32], 32)
        fits: list[Any] = []
        taken = extra_bytes(lambda: fits.append(self.who.fit(self.network, self.inputs, self.targets, batch_fit)))
        self.tell(memory_method=METHOD, fit_extra_mb=taken / 1e6)
        factors, example = sizes_of(self.untouched, self.inputs[:2], self.model.outputs)
        self.tell(
            factors_mb=factors / 1e6,
            batch_mb=min(batch_fit, len(self.inputs)) * example / 1e6,
            example_mb=example / 1e6,
        )
        if batch_predict:
            part = self.tests[: max(batch_predict, 2)]
            taken = extra_bytes(lambda: self.who.predict(fits[0], part, batch_predict))
            self.tell(predict_extra_mb=taken / 1e6)


def sizes_of(network: nn.Module, inputs: Tensor, outputs: int) -> tuple[float, float]:
    """Bytes of the Kronecker factors and eigenvalues in float64, and of one example's activations and k gradients."""
    names = {name: p for name, p in network.named_parameters() if p.requires_grad}
    ran = Capture(network, names, example_inputs=inputs).run(inputs)
    n = len(inputs)
    factors = example = 0.0
    for one in ran.tangents(torch.eye(outputs).unsqueeze(1).expand(outputs, n, outputs), last=True):
        shape = one.block.matrix_shape
        if isinstance(one, Kronecker):
            e, o, i = shape
            factors += 8.0 * e * (o * o + i * i + o * i)
            example += 4.0 * (one.inputs().numel() + one.grads().numel()) / n
        else:
            held = one.values if isinstance(one, Dense) else one.grads
            factors += 8.0 * one.block.numel * (min(one.block.numel, 1024) + 1)
            example += 4.0 * held.numel() / n
    return factors, example


def retry_in_double() -> None:
    """Let float32 eigendecompositions that fail be done in float64: two of the peers stop there otherwise."""
    plain = torch.linalg.eigh

    def eigh(matrix: Tensor, *rest: Any, **options: Any) -> Any:
        try:
            return plain(matrix, *rest, **options)
        except RuntimeError:
            found = plain(matrix.double(), *rest, **options)
            return torch.return_types.linalg_eigh(tuple(part.to(matrix.dtype) for part in found))

    torch.linalg.eigh = eigh  # type: ignore[assignment]


def main() -> None:
    """Measure one pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("subject")
    parser.add_argument("prepared", type=Path, help="what Model.prepare saved")
    parser.add_argument("--memory", nargs=2, type=int, metavar=("FIT_BATCH", "PREDICT_BATCH"))
    given = parser.parse_args()
    model = MODELS[given.model]
    if given.subject in PEERS:
        retry_in_double()
    who = subject(given.subject)
    try:
        who.version()
    except ImportError as error:
        print(json.dumps({"model": given.model, "missing": str(error)}), flush=True)
        return
    with contextlib.redirect_stdout(sys.stderr):  # peers print
        bench = Bench(given.model, model, who, given.prepared)
        if given.memory:
            bench.memory(given.memory[0], given.memory[1] or None)
        else:
            bench.time()


if __name__ == "__main__":
    main()
