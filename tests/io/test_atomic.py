"""Whatever happens while a file is written, the old one or the new one is there, whole."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from fits_to_save import Fit, regression

KILLED = textwrap.dedent(
    """
    import os, random, shutil, signal, sys, time
    from pathlib import Path

    import torch

    import whence

    torch.set_num_threads(1)
    torch.manual_seed(0)
    path, draw = Path(sys.argv[1]), random.Random(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 24), torch.nn.Tanh(), torch.nn.Linear(24, 2)).double().eval()
    x, y = torch.randn(60, 4, dtype=torch.float64), torch.randn(60, 2, dtype=torch.float64)
    fits = [whence.fit(model, [(x, y)], structure=s, ridge=1.0, progress=False) for s in ("ekfac", "core")]
    wanted = {fit.degrees_of_freedom: fit.leverage for fit in fits}
    start = time.perf_counter()
    fits[0].save(path)
    took = time.perf_counter() - start
    ends = {"old": 0, "new": 0, "parts": 0}
    for trial in range(25):
        old, new = fits if trial % 2 else fits[::-1]
        old.save(path)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"x")
            new.save(path)
            os._exit(0)
        os.read(reading, 1)
        time.sleep(1.5 * took * draw.random() * (trial > 1))  # the first two at once
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading), os.close(writing)
        found = whence.load(path, model)
        assert torch.equal(found.leverage, wanted[found.degrees_of_freedom])
        ends["new" if found.degrees_of_freedom == new.degrees_of_freedom else "old"] += 1
        for part in path.parent.glob(".whence-*.part"):
            ends["parts"] += 1
            shutil.rmtree(part)
    print(ends["old"], ends["new"], ends["parts"])
    """
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
def test_a_process_that_is_killed_at_random_moments(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "fit.whence")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    old, new, parts = map(int, done.stdout.split())
    assert old + new == 25  # whole each time: what a killed process leaves is beside the file, never in its place
    assert old > 0  # killed before the end
    assert parts <= 25  # at most one each time; it may also lie beside a new file, where its folder was not yet removed


@pytest.fixture(scope="module")
def fits() -> tuple[Fit, Fit]:
    return regression("ekfac"), regression("core")


def assert_untouched(path: Path, before: bytes) -> None:
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_disk_that_is_full(fits: tuple[Fit, Fit], tmp_path: Path) -> None:
    """The system refuses to write beyond a size, wherever in the file that is."""
    path = tmp_path / "fit.whence"
    old, new = fits
    new.tracer.save(path)
    size = path.stat().st_size
    old.tracer.save(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in range(0, size, max(1, size // 40)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                new.tracer.save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert_untouched(path, before)
    new.tracer.save(path)
    assert torch.equal(whence.load(path, new.model).leverage, new.tracer.leverage)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_tells_late(
    call: str, fits: tuple[Fit, Fit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may show only when the file is brought to it, or when it is renamed."""
    path = tmp_path / "fit.whence"
    fits[0].tracer.save(path)
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left on device"):
        fits[1].tracer.save(path)
    monkeypatch.undo()
    assert_untouched(path, before)


def test_an_interrupt(fits: tuple[Fit, Fit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fit.whence"
    fits[0].tracer.save(path)
    before = path.read_bytes()

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fits[1].tracer.save(path)
    monkeypatch.undo()
    assert_untouched(path, before)


def test_places_to_save_to(fits: tuple[Fit, Fit], tmp_path: Path) -> None:
    tracer = fits[0].tracer
    with pytest.raises(whence.InputError, match="expected a folder that exists to save in"):
        tracer.save(tmp_path / "nowhere" / "fit.whence")
    with pytest.raises(whence.InputError, match="expected the name of a file to save to, got the folder"):
        tracer.save(tmp_path)
    tracer.save(str(tmp_path / ("x" * 240)))
    assert (tmp_path / ("x" * 240)).stat().st_size > 0


def test_a_link_is_replaced_and_its_target_left_alone(fits: tuple[Fit, Fit], tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "fit.whence"
    target.write_text("precious")
    link.symlink_to(target)
    fits[0].tracer.save(link)
    assert target.read_text() == "precious"
    assert not link.is_symlink()


def test_permissions_are_those_of_any_file(fits: tuple[Fit, Fit], tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        fits[0].tracer.save(tmp_path / "fit.whence")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "fit.whence").stat().st_mode) == 0o640
