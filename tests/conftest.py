"""What every test shares: a fixed seed, one thread, the devices that are there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import browsers

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a machine without the dev extra still runs the tests that draw no examples
    settings = None

SEED = 20240229
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)

if settings is not None:
    # The same examples in every run, so that a failure seen in CI is seen here too.
    settings.register_profile("whence", derandomize=True, deadline=None, max_examples=25)
    settings.load_profile("whence")


def pytest_configure() -> None:
    """Keep to one thread, so that parallel test processes do not fight for cores, unless OMP_NUM_THREADS says more."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    if "cuda" in DEVICES:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say at the very end, in one line, which tests no browser was there for."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", ()) if reporter is not None else ()
    count = sum(browsers.MISSING in str(report.longrepr) for report in reports)
    if count:
        reporter.write_line(f"Skipped: {count} tests of pages in a browser, for there is {browsers.MISSING}.")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed torch's own generator, from which modules draw their initial weights."""
    torch.manual_seed(SEED)


@pytest.fixture
def generator() -> torch.Generator:
    """A CPU generator in a known state: draw on the CPU and move the result, and every device sees the same data."""
    return torch.Generator().manual_seed(SEED)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn: the CPU, and CUDA when there is one."""
    return torch.device(request.param)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium of this machine, started through Playwright."""
    if os.environ.get("WHENCE_REQUIRE_BROWSER"):
        import playwright.sync_api as playwright  # missing is an error here
    else:
        playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[dev]'")
    if browsers.PATH is None:
        without = pytest.fail if os.environ.get("WHENCE_REQUIRE_BROWSER") else pytest.skip
        without(browsers.MISSING)
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(
            executable_path=browsers.PATH, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield started
        started.close()
