"""Fits of language models: bases from some of the sequences, too few columns, and the memory they take."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from networks import Decoder
from whence.runtime.memory import drop_pages, on_disk
from whence.trust import trust_of_fit

WORDS, LENGTH = 13, 6


def sequences(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, WORDS, (n, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def batches(n: int, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(one.split(size) for one in sequences(n)), strict=True))


def fit(data: list[tuple[Tensor, Tensor]], structure: Any, **options: Any) -> whence.Tracer:
    model = Decoder(WORDS).double().eval()
    options = {"ridge": 0.5, "hessian_columns": 3, "parameters": ["layer.linear*", "head.*"], **options}
    return whence.fit(model, data, "categorical", structure, progress=False, **options)


@pytest.mark.parametrize("size", [3, 8, 40, 64])
def test_bases_from_some_of_the_sequences(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core of all coordinates does not depend on its basis; EKFAC's eigenvalues are those of all sequences in it."""
    monkeypatch.setattr("whence.curvature.kronecker.MANY_EXAMPLES", 1)
    monkeypatch.setattr("whence.curvature.kronecker.EXAMPLES_PER_SIDE", 5)  # 64 of 384 positions
    monkeypatch.setattr("whence.curvature.core.RANKED", 4)
    data, test = batches(64, size), sequences(4, 1)[0]
    exact = fit(data, whence.Exact("primal"))
    core = fit(data, whence.Core(size=10_000, tolerance=0))
    note = next(note for note in map(str, core.bread.notes) if "training examples" in note)
    seen = int(note.split("come from ")[1].split()[0])
    assert seen < 48
    for name in ("ho", "hec3"):
        wanted = exact.predict(test, outputs="predicted").variance(name)
        torch.testing.assert_close(core.predict(test, outputs="predicted").variance(name), wanted, rtol=1e-6, atol=0)
    ekfac = fit(data, whence.EKFAC(tolerance=0))
    assert any("training examples" in str(note) for note in ekfac.bread.notes)
    total = sum(float(one.curvature.inside.sum()) for one in ekfac.bread.blocks)  # type: ignore[attr-defined]
    curved = sum(float(rows[:, :-1].square().sum()) for _, rows in exact.bread.rows.read("rows"))  # type: ignore[attr-defined]
    assert total == pytest.approx(curved, rel=1e-6)


def test_eigenvalues_from_some_of_the_sequences_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences that are all alike, one is as good as all."""
    x, y = sequences(1)
    alike = [(x.expand(8, -1), y.expand(8, -1))] * 6
    shares = []
    for many in (10**6, 1):
        monkeypatch.setattr("whence.curvature.kronecker.MANY_EXAMPLES", many)
        monkeypatch.setattr("whence.curvature.kronecker.EXAMPLES_PER_SIDE", 1)
        monkeypatch.setattr("whence.curvature.core.RANKED", 1)
        torch.manual_seed(0)
        notes = fit(alike, whence.Core(size=5, tolerance=0), hessian_columns=40).bread.notes
        shares.append(next(note for note in notes if "degrees of freedom" in note))
        assert any("of 48 training examples" in note for note in notes) == (many == 1)
    first, second = (float(note.split(" coordinates, ")[1].split(" %")[0]) for note in shares)
    assert first == pytest.approx(second, abs=3.0)  # signs of columns differ


def column_check(tracer: whence.Tracer) -> Any:
    return next(check for check in trust_of_fit(tracer) if check.name == "Hessian columns")


@pytest.mark.parametrize(("n", "columns", "level"), [(240, 1, "do not trust"), (240, 3, "careful"), (240, 12, "fine")])
def test_too_few_columns_are_said_so(n: int, columns: int, level: str) -> None:
    """What the check says of Ho and HeC3 against a fit with all outputs."""
    data, test = batches(n, n), sequences(20, 1)[0]
    every = fit(data, whence.Exact("primal"), ridge=0.5, hessian_columns="all").predict(test, outputs="predicted")
    ratios = {"ho": 0.0, "hec3": 0.0}
    for seed in range(4):
        execution = whence.Execution(seed=seed)
        tracer = fit(data, whence.Exact("primal"), ridge=0.5, hessian_columns=columns, execution=execution)
        found = tracer.predict(test, outputs="predicted")
        for name in ratios:
            ratios[name] += float((found.variance(name) / every.variance(name)).mean()) / 4
    check = column_check(tracer)
    assert check.level == level
    assert check.numbers["Ho times"] == pytest.approx(ratios["ho"], rel=0.2)
    assert check.numbers["HeC3 times"] == pytest.approx(ratios["hec3"], rel=0.4)
    assert ("Use hessian_columns=" in check.words) == (level != "fine")
    assert ("Hessian columns" in str(tracer.diagnostics)) == (level != "fine")


def test_enough_columns_as_the_check_says_are_fine() -> None:
    data = batches(120, 120)
    few = column_check(fit(data, whence.Exact("primal"), ridge=0.5, hessian_columns=2))
    wanted = int(few.words.split("hessian_columns=")[1].split()[0])
    assert column_check(fit(data, whence.Exact("primal"), ridge=0.5, hessian_columns=wanted)).level == "fine"


def test_structures_without_an_inverse_of_columns_are_not_checked() -> None:
    names = [check.name for check in trust_of_fit(fit(batches(12, 12), whence.EKFAC(), hessian_columns=1))]
    assert "Hessian columns" not in names


class Tower(nn.Module):
    """A decoder of several equal layers."""

    def __init__(self, layers: int = 24, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += len(x)
        hidden = self.words(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def refused(structure: Any, limit: float) -> tuple[str, int]:
    """The error, and how many examples were run before it."""
    model, execution = Tower().eval(), whence.Execution(max_memory=limit)
    given: dict[str, Any] = {"parameters": "layers.*", "ridge": 1.0, "hessian_columns": 2, "progress": False}
    with pytest.raises(whence.errors.TooLargeError) as error:
        whence.fit(model, batches(512, 8), "categorical", structure, execution=execution, **given)
    return str(error.value), model.runs


@pytest.mark.parametrize(
    ("structure", "limit"), [(whence.Core(size=16), 6e5), (whence.EKFAC(), 6e5), (whence.Sketch(size=1024), 1e7)]
)
def test_what_would_fit_is_said_before_the_first_pass(structure: Any, limit: float) -> None:
    message, runs = refused(structure, limit)
    assert f"a fit by {structure.name} of 25,344 weights" in message
    assert runs < 64  # a few examples of the first batch, of 512
    ways = message.split("What would fit: ")[1].split(", or ")
    assert ways
    for way in ways:  # what is named does fit
        options: dict[str, Any] = {"structure": structure, "parameters": "layers.*"}
        if way.startswith("structure="):
            options["structure"] = eval(way.removeprefix("structure=").split(")")[0] + ")", {"whence": whence})
        elif "parameters=" in way:
            options["parameters"] = eval(way.split("parameters=")[1].split("]")[0] + "]")
        else:
            continue
        options |= {"ridge": 1.0, "hessian_columns": 2, "progress": False}
        execution = whence.Execution(max_memory=limit)
        whence.fit(Tower().eval(), batches(64, 8), "categorical", execution=execution, **options)


def test_fewer_layers_and_low_rank_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where all directions are kept."""
    monkeypatch.setattr("whence.curvature.plan.keeps_all_directions", lambda *_: True)
    message, _ = refused(whence.EKFAC(), 4e6)
    assert "of 24 layers (" in message
    assert "LoRA of rank 8 (12,288 weights" in message


class Starving(whence.Core):
    """Runs out of memory whatever the plan."""

    def fit(self, problem: Any, ridge: Any, meat_roots: Any = None) -> Any:
        raise torch.cuda.OutOfMemoryError(f"CUDA out of memory with {problem.budget.limit} bytes")


def test_a_device_that_is_full_after_all_names_the_first_plan() -> None:
    message, _ = refused(Starving(size=512), 2**30)
    assert "expected the fit to take 1.0 GiB at most on cpu, got out of memory (CUDA out of memory" in message
    assert "1048576 bytes), with smaller chunks as well. Select fewer parameters" in message


def test_a_single_example_that_is_too_large() -> None:
    message, _ = refused(whence.Sketch(size=16), 1e4)
    assert "Use shorter sequences" in message


def test_features_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as from memory, without another pass through the network, and nothing is left behind."""
    data, test = batches(40, 8), sequences(3, 1)[0]
    wanted = fit(data, whence.Sketch(size=30))
    monkeypatch.setattr("whence.curvature.features.CACHE_SHARE", 0.0)
    execution = whence.Execution(scratch=tmp_path / "scratch")
    found = fit(data, whence.Sketch(size=30), execution=execution)
    rows = found.bread.rows  # type: ignore[attr-defined]
    assert not rows.in_memory
    assert rows._mapped.shape == (40, 4, rows.features.size)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert any("on disk" in note for note in found.bread.notes)
    ones = torch.ones(1, rows.features.size, dtype=torch.float64)
    monkeypatch.setattr(Decoder, "forward", None)
    torch.testing.assert_close(rows.times(ones), wanted.bread.rows.times(ones))  # type: ignore[attr-defined]
    monkeypatch.undo()
    for name in ("ho", "hec3"):
        one, other = (tracer.predict(test, outputs="predicted").variance(name) for tracer in (found, wanted))
        torch.testing.assert_close(one, other, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.attribute(test, top=3).hec3.share, wanted.attribute(test, top=3).hec3.share)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_a_file_are_dropped_and_nothing_is_lost(tmp_path: Path) -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssFile", "RssShmem"))) // 1024

    mapped, before = on_disk(tmp_path, (16, 2**20), torch.float32), resident()
    mapped.copy_(torch.arange(16.0).unsqueeze(1))
    assert resident() - before > 60  # MiB
    for low in (0, 4):
        drop_pages(mapped[low : low + 8])
    assert resident() - before < 24
    drop_pages(mapped[3, 5:9])  # less than a page
    drop_pages(mapped[:, 7])  # no part of the file in one piece
    assert torch.equal(mapped, torch.arange(16.0).unsqueeze(1).expand_as(mapped))


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.curvature.features.CACHE_SHARE", 0.0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(whence.errors.TooLargeError, match=r"expected .* free in .*scratch"):
        fit(batches(8, 8), whence.Sketch(size=30), execution=whence.Execution(scratch=tmp_path / "scratch"))


def test_the_disk_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.curvature.core.cached_rows_bytes", lambda *_: 0.0)
    options: dict[str, Any] = {"parameters": ["layer.linear*", "head.*"], "hessian_columns": 3}
    execution = whence.Execution(scratch=tmp_path)
    found = whence.estimate(
        Decoder(WORDS).double().eval(),
        batches(40, 8),
        "categorical",
        whence.Sketch(size=30),
        execution=execution,
        **options,
    )
    assert found.disk == 40 * 4 * 30 * 8
    assert "disk" in str(found)
