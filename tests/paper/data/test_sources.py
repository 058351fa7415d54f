"""Files of data sets: from a folder, from a source that is checked, or an error that says what to do."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from whence_paper.data import read_images
from whence_paper.data.sources import DataError, Source, find


@pytest.fixture
def served(tmp_path) -> Source:
    """A file at a URL (of this machine's disk, which urllib reads as well)."""
    path = tmp_path / "served.bin"
    path.write_bytes(b"digits")
    return Source("set/kept.bin", path.as_uri(), "sha256:" + hashlib.sha256(b"digits").hexdigest())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("WHENCE_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_a_folder_files_are_downloaded_once(served, cache):
    assert find(None, "set", [[served]]) == (0, [cache / "set/kept.bin"])
    assert (cache / "set/kept.bin").read_bytes() == b"digits"
    Path(served.url.removeprefix("file://")).unlink()
    assert find(None, "set", [[served]])[0] == 0


def test_a_download_with_another_checksum_is_not_kept(served, cache):
    changed = Source(served.path, served.url, "md5:" + "0" * 32)
    with pytest.raises(DataError, match="expected md5 000"):
        find(None, "set", [[changed]])
    assert list((cache / "set").iterdir()) == []


def test_without_a_network_the_error_names_the_way_out(cache):
    with pytest.raises(DataError, match=r"name a folder that has set/kept.bin with --data"):
        find(None, "set", [[Source("set/kept.bin", "file:///nowhere/at/all", "md5:0")]])


def test_the_form_that_is_there_is_taken(tmp_path, served):
    folder = tmp_path / "mine"
    (folder / "set").mkdir(parents=True)
    (folder / "set" / "kept.bin").write_bytes(b"digits")
    assert find(folder, "set", [[Source("set/other.bin")], [served]]) == (1, [folder / "set/kept.bin"])


def test_a_folder_is_never_written_to(tmp_path, served):
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(DataError, match=r"expected set as set/kept.bin in .*mine, got no set/kept.bin"):
        find(folder, "set", [[served]])
    assert list(folder.iterdir()) == []


def test_an_unknown_set_is_told():
    with pytest.raises(DataError, match="expected one of mnist"):
        read_images("imagenet", None)
