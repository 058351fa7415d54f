"""The page on moving from laplace-torch: its numbers are laplace-torch's, wherever that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pages import BLOCK, DOCS, printed, same_words

PAGE = DOCS / "tutorials" / "laplace.md"


@pytest.mark.slow  # laplace-torch and what it needs take long to import
@pytest.mark.skipif(find_spec("laplace") is None, reason="laplace-torch is a peer of the benchmarks: make bench")
@pytest.mark.filterwarnings("ignore:::laplace", "ignore:::backpack", "ignore:::curvlinops", "ignore:::asdfghjkl")
def test_all_blocks_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    every = list(BLOCK.finditer(PAGE.read_text(encoding="utf-8")))
    assert sum(bool(block["skip"]) for block in every) == 3
    with torch.random.fork_rng(devices=[]):
        for block, out in printed(PAGE, every):
            same_words(out, block["shown"])
