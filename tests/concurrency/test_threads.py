"""Many threads in one process: the same answers, to the bit, as one after the other; and nothing is left changed."""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.backends import mha

import whence
from whence.runtime.model_state import locked

THREADS = 4
PATIENCE = 60.0
STRUCTURES: dict[str, whence.Structure] = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "matrix-free": whence.Exact(road="matrix_free"),
    "core": whence.Core(size=30),
    "ekfac": whence.EKFAC(),
    "two bases": whence.EKFAC(meat="two_bases"),
}


@pytest.fixture(autouse=True)
def _restless() -> Iterator[None]:
    """Change threads a thousand times as often as usual: what can be mixed up, will be."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Settings of the process are as they were, once all threads are done."""
    before = process_settings()
    yield
    assert process_settings() == before


def process_settings() -> dict[str, Any]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "fast attention": mha.get_fastpath_enabled(),
        "attention kernels": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        "rounding": (cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.enabled),
        "warnings": list(warnings.filters),
    }


def mlp(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).double().eval()


class Attentive(nn.Module):
    """Three tokens of four numbers: its kernels are chosen by switches of the whole process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layer(x.reshape(-1, 3, 4)).mean(1))
        return outputs


def attentive() -> nn.Module:
    return Attentive().double().eval()


def data(model: nn.Module, n: int = 14) -> list[tuple[Tensor, Tensor]]:
    width = 12 if isinstance(model, Attentive) else 4
    x, y = torch.randn(n, width, dtype=torch.float64), torch.randn(n, 2, dtype=torch.float64)
    return list(zip(x.split(9), y.split(9), strict=True))


def fit(model: nn.Module, loader: Any, structure: Any = "exact", **options: Any) -> whence.Tracer:
    return whence.fit(model, loader, structure=structure, ridge=0.5, progress=False, **options)


def at_once(works: list[Callable[[], Any]]) -> list[Any]:
    """What the pieces of work give, each in a thread of its own, started together."""
    start = threading.Barrier(len(works))

    def begin(work: Callable[[], Any]) -> Any:
        start.wait(PATIENCE)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(begin, work) for work in works]
        return [future.result(PATIENCE) for future in futures]


def numbers(tracer: whence.Tracer, x: Tensor) -> list[Tensor]:
    """All that a prediction says."""
    found = tracer.predict(x)
    names = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")
    return [found.mean, found.ratio, *(found.covariance(name) for name in names)]


def same(found: Any, wanted: Any) -> bool:
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", STRUCTURES)
def test_one_tracer_asked_by_many_threads(name: str) -> None:
    model = mlp()
    tracer = fit(model, data(model), STRUCTURES[name])
    parts = torch.randn(6, 4, dtype=torch.float64).split(2)
    wanted = [numbers(tracer, part) for part in parts]
    found = at_once([lambda: [numbers(tracer, part) for part in parts]] * THREADS)
    assert all(same(a, b) for answers in found for a, b in zip(answers, wanted, strict=True))


def test_many_threads_asking_for_different_things(tmp_path: Path) -> None:
    model = attentive()
    loader = data(model)
    tracer = fit(model, loader)
    x = torch.randn(3, 12, dtype=torch.float64)

    def saved() -> list[Tensor]:
        path = tmp_path / f"{threading.get_ident()}.whence"
        tracer.save(path)
        return numbers(whence.load(path, model, loader, progress=False), x)

    works: list[Callable[[], list[Tensor]]] = [
        lambda: numbers(tracer, x),
        lambda: [tracer.attribute(x).hec3.share, tracer.attribute(x).ho.share],
        lambda: [tracer.explain(x).ratio, tracer.loo_residuals],
        lambda: [torch.tensor(tracer.training_frame().leverage.tolist())],
        saved,
    ]
    wanted = [work() for work in works]
    found = at_once([*works, *works])
    assert [same(answer, wanted[at % len(works)]) for at, answer in enumerate(found)] == [True] * 2 * len(works)


def test_different_models_fitted_at_once() -> None:
    models = [mlp(5), attentive(), mlp(7), mlp(6)]
    loaders = [data(model) for model in models]
    structures = ["ekfac", "core", whence.Exact(road="matrix_free"), "exact"]
    choices = ["all", "last_layer", "2.*", "last_layer"]

    def work(at: int) -> list[Tensor]:
        tracer = fit(models[at], loaders[at], structures[at], parameters=choices[at])
        return [tracer.leverage, *numbers(tracer, loaders[at][0][0][:3])]

    wanted = [work(at) for at in range(4)]
    found = at_once([lambda at=at: work(at) for at in range(4)])  # type: ignore[misc]
    assert all(map(same, found, wanted))
    hooks = [len(module._forward_pre_hooks) for model in models for module in model.modules()]
    assert set(hooks) == {0}


def test_one_model_fitted_and_asked_at_once() -> None:
    model = mlp()
    loader, x = data(model), torch.randn(4, 4, dtype=torch.float64)
    asked = fit(model, loader, "core")
    works: list[Callable[[], list[Tensor]]] = [
        lambda: numbers(fit(model, loader, "exact"), x),
        lambda: numbers(fit(model, loader, "ekfac", parameters="last_layer"), x),
        lambda: numbers(asked, x),
        lambda: [torch.tensor(whence.estimate(model, loader, structure="ekfac").parameters)],
    ]
    wanted = [work() for work in works]
    found = at_once([*works, *works])
    assert all(same(answer, wanted[at % 4]) for at, answer in enumerate(found))


def test_random_states_are_set_back_once_all_are_done() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(1), np.random.rand(1), random.random()  # noqa: NPY002  drawn for nothing, as models may
            outputs: Tensor = self.inner(x)
            return outputs

    models = [Drawing().eval() for _ in range(THREADS)]
    loaders = [data(model) for model in models]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    at_once([lambda at=at: fit(models[at], loaders[at], "ekfac") for at in range(THREADS)])  # type: ignore[misc]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]  # noqa: NPY002


# --- Whose turn it is -------------------------------------------------------------------------------------------------


def held_by_another(model: nn.Module, wanted: nn.Module) -> bool:
    """Whether a thread that has `model` keeps another from `wanted`, and lets it in afterwards."""
    entered, leave, reached = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with locked(model):
            entered.set()
            leave.wait(PATIENCE)

    def want() -> None:
        with locked(wanted):
            reached.set()

    threads = [threading.Thread(target=hold), threading.Thread(target=want)]
    threads[0].start()
    assert entered.wait(PATIENCE)
    threads[1].start()
    waits = not reached.wait(0.3)
    leave.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert reached.is_set()
    return waits


def test_threads_wait_for_each_other() -> None:
    body, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert held_by_another(body, body)
    assert held_by_another(body, other)


def test_a_model_is_given_back_after_an_error() -> None:
    model = mlp()
    with pytest.raises(whence.InputError):
        fit(model, [(torch.full((3, 4), float("nan"), dtype=torch.float64), torch.zeros(3, 2))])
    assert at_once([lambda: fit(model, data(model)).ridge]) == [0.5]
