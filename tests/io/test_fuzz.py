"""Thousands of damaged and forged files: each is refused by an error of whence, and none by a crash.

Damage without a forger (bytes flipped, cut, moved, manifests edited by hand) must never be believed. A forger who
computes the checksum anew may lie about numbers, which no checksum can tell; then the file may load, and the fit must
answer in the right shape or refuse.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whence
from fits_to_save import Fit, classes, regression
from forging import Forged, look, replace, spots

FITS: dict[str, Callable[[], Fit]] = {
    "primal": lambda: regression("primal", groups=[0, 0, 1, 1, 2, 2, 3, 3, 4]),
    "dual": lambda: regression("dual", recenter=True),
    "core": lambda: regression("core"),
    "ekfac, two bases": lambda: classes("ekfac, two bases", whence.Categorical(weight=[1.0, 2.0, 3.0])),
}


def flip(raw: bytearray, draw: random.Random) -> None:
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)


def overwrite(raw: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(raw))
    length = min(draw.choice((1, 2, 8, 64)), len(raw) - start)
    raw[start : start + length] = draw.randbytes(length)


def cut(raw: bytearray, draw: random.Random) -> None:
    del raw[draw.randrange(len(raw)) :]


def take_out(raw: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(raw))
    del raw[start : start + draw.choice((1, 8, 100))]


def put_in(raw: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(raw))
    raw[start:start] = draw.randbytes(draw.choice((1, 8, 100)))


def exchange(raw: bytearray, draw: random.Random) -> None:
    one, two, length = draw.randrange(len(raw)), draw.randrange(len(raw)), draw.choice((1, 8, 32))
    raw[one : one + length], raw[two : two + length] = raw[two : two + length], raw[one : one + length]


def zero_out(raw: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(raw))
    end = min(start + 512, len(raw))
    raw[start:end] = bytes(end - start)


DAMAGE = (flip, overwrite, cut, take_out, put_in, exchange, zero_out)


def damage(whole: bytes, draw: random.Random) -> bytes:
    """A file that is not the same any more."""
    while True:
        raw = bytearray(whole)
        draw.choice(DAMAGE)(raw, draw)
        if raw != whole:
            return bytes(raw)


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 10**30, 0.5, -0.5, 1e300, 1e-300, "", "x", "primal", "exact",
    [], {}, [0], [1, 0], ["nan"], ["inf"], [[]], {"a": 1}, "../../x", "\u0000", [1] * 50,
)  # fmt: skip


def edit(whole: Forged, draw: random.Random) -> Forged:
    """A manifest or a table of tensors that says something else."""
    forged = whole.copy()
    part = forged.manifest if draw.random() < 0.7 else forged.table
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = spots(part)
        if draw.random() < 0.7:  # the table of the model is long, and not all there is
            places = [place for place in places if place[0] != "model"] or places
        place = draw.choice(places)
        kind = draw.randrange(4)
        if kind == 0:
            replace(part, place, draw.choice(VALUES))
        elif kind == 1 and isinstance(look(part, place[:-1]), dict):
            del look(part, place[:-1])[place[-1]]
        elif kind == 2:
            replace(part, place, look(part, draw.choice(places)))
        else:
            old = look(part, place)
            number = isinstance(old, (int, float)) and not isinstance(old, bool)
            replace(part, place, old * draw.choice((-1, 2, 0.5, 10**6)) if number else draw.choice(VALUES))
    if draw.random() < 0.2 and forged.data:
        raw = bytearray(forged.data)
        draw.choice((flip, overwrite, cut, zero_out))(raw, draw)
        forged.data = bytes(raw)
    return forged


@pytest.fixture(scope="module", params=FITS)
def fit(request: pytest.FixtureRequest) -> Fit:
    return FITS[request.param]()


def rewrite(path: Path, content: bytes) -> None:
    """In place: to empty a file first makes some file systems wait for the disk."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def is_refused(path: Path, model: nn.Module) -> bool:
    """By an error of whence; any other error is passed on."""
    try:
        whence.load(path, model)
    except whence.WhenceError:
        return True
    return False


def check_damaged(fit: Fit, path: Path, times: int, seed: int) -> None:
    fit.tracer.save(path)
    whole, draw = path.read_bytes(), random.Random(seed)
    for _ in range(times):
        rewrite(path, damage(whole, draw))
        assert is_refused(path, fit.model)


def check_edited(fit: Fit, path: Path, times: int, seed: int) -> None:
    """Manifests edited by hand: the checksum stays that of the file as it was."""
    fit.tracer.save(path)
    whole, draw = Forged(path.read_bytes()), random.Random(seed)
    for _ in range(times):
        forged = edit(whole, draw)
        if not forged.says_the_same_as(whole):
            rewrite(path, forged.with_checksum(whole.metadata["sha256"]))
            assert is_refused(path, fit.model)


def check_forged(fit: Fit, path: Path, times: int, seed: int) -> Counter[str]:
    """Edited and sealed again: an answer of the right shape, or an error of whence."""
    fit.tracer.save(path)
    whole, draw = Forged(path.read_bytes()), random.Random(seed)
    wanted = fit.tracer.predict(fit.test).mean.shape
    ends: Counter[str] = Counter()
    for _ in range(times):
        rewrite(path, edit(whole, draw).sealed())
        try:
            data = fit.batches if "Dual" in type(fit.tracer.bread).__name__ and draw.random() < 0.5 else None
            found = whence.load(path, fit.model, data, progress=False).predict(fit.test)
        except whence.WhenceError as error:
            ends[type(error).__name__] += 1
            continue
        assert found.mean.shape == wanted
        assert all(found.variance(name).shape == wanted for name in found.estimators)
        ends["loaded"] += 1
    return ends


def test_damaged_files(fit: Fit, tmp_path: Path) -> None:
    check_damaged(fit, tmp_path / "fit.whence", 2000, seed=1)


def test_edited_manifests(fit: Fit, tmp_path: Path) -> None:
    check_edited(fit, tmp_path / "fit.whence", 500, seed=2)


def test_forged_files(fit: Fit, tmp_path: Path) -> None:
    ends = check_forged(fit, tmp_path / "fit.whence", 100, seed=3)
    assert ends["CorruptArtifactError"] > 30
    assert ends["loaded"] > 0  # some lies cannot be told


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_more(fit: Fit, seed: int, tmp_path: Path) -> None:
    check_damaged(fit, tmp_path / "fit.whence", 5000, seed=100 + seed)
    check_edited(fit, tmp_path / "fit.whence", 2000, seed=200 + seed)
    check_forged(fit, tmp_path / "fit.whence", 1000, seed=300 + seed)


def test_a_bit_of_every_byte(tmp_path: Path) -> None:
    """Of a small file, every byte matters."""
    x = torch.linspace(-1, 1, 5, dtype=torch.float64).unsqueeze(1)
    model = torch.nn.Linear(1, 1, dtype=torch.float64).eval()
    path = tmp_path / "fit.whence"
    whence.fit(model, [(x, x)], structure="diagonal", ridge=0.1, progress=False).save(path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        rewrite(path, whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        assert is_refused(path, model)
