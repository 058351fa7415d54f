"""Readers of image sets and tables, on small files in the published formats."""

from __future__ import annotations

import gzip
import io
import lzma
import struct
import tarfile

import numpy as np
import pytest
import torch

from whence_paper.data import read_bank, read_california, read_images
from whence_paper.data.sources import DataError

RNG = np.random.default_rng(0)


def test_digits_that_come_with_scikit_learn():
    digits = read_images("digits", None)
    assert digits.inputs.shape == (1300, 1, 8, 8)
    assert len(digits.test_labels) == 497
    assert float(digits.inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(digits.inputs.std()) == pytest.approx(1, abs=1e-3)
    bright = digits.brightness(digits.inputs)
    assert 0 <= float(bright.min()) < 0.01
    assert 0.99 < float(bright.max()) <= 1


def test_idx_files(tmp_path):
    home = tmp_path / "mnist"
    home.mkdir()
    images = {"train": RNG.integers(0, 256, (5, 28, 28), np.uint8), "t10k": RNG.integers(0, 256, (3, 28, 28), np.uint8)}
    for part, pixels in images.items():
        labels = np.arange(len(pixels), dtype=np.uint8)
        with gzip.open(home / f"{part}-images-idx3-ubyte.gz", "wb") as raw:
            raw.write(struct.pack(">4i", 2051, len(pixels), 28, 28) + pixels.tobytes())
        with gzip.open(home / f"{part}-labels-idx1-ubyte.gz", "wb") as raw:
            raw.write(struct.pack(">2i", 2049, len(labels)) + labels.tobytes())
    found = read_images("mnist", tmp_path)
    assert found.test_labels.tolist() == [0, 1, 2]
    back = (found.brightness(found.test_inputs) * 255).round().to(torch.uint8)
    assert np.array_equal(back.numpy()[:, 0], images["t10k"])


def pictures(count: int) -> np.ndarray:
    return RNG.integers(0, 256, (count, 3, 32, 32), np.uint8)


def test_cifar_from_the_original_archive(tmp_path):
    (tmp_path / "cifar-10").mkdir()
    batches = [pictures(2) for _ in range(6)]
    with tarfile.open(tmp_path / "cifar-10/cifar-10-binary.tar.gz", "w:gz") as archive:
        for number, batch in enumerate(batches, 1):
            rows = np.concatenate([np.array([[number], [number + 1]], np.uint8), batch.reshape(2, -1)], 1).tobytes()
            name = "test_batch" if number == 6 else f"data_batch_{number}"
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(rows)
            archive.addfile(member, io.BytesIO(rows))
    found = read_images("cifar-10", tmp_path)
    assert found.labels.tolist() == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    back = (found.brightness(found.test_inputs) * 255).round().to(torch.uint8)
    assert np.array_equal(back.numpy(), batches[5])


def test_cifar_as_residuals(tmp_path):
    home = tmp_path / "cifar-10"
    home.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        pixels = pictures(1)
        coded = pixels.copy()
        coded[:, [0, 2]] -= coded[:, 1:2]
        coded = np.diff(np.diff(coded, axis=2, prepend=np.uint8(0)), axis=3, prepend=np.uint8(0))
        with lzma.open(home / f"{name}.res.xz", "wb") as raw:
            raw.write(coded.tobytes())
    np.save(home / "labels.npy", np.arange(50_001) % 10)
    found = read_images("cifar-10", tmp_path)
    back = (found.brightness(found.test_inputs) * 255).round().to(torch.uint8)
    assert np.array_equal(back.numpy(), pixels)
    assert found.test_labels.tolist() == [0]


def test_california_from_both_forms(tmp_path):
    row = "-122.23,37.88,41.0,880.0,129.0,322.0,126.0,8.3252,452600.0"
    for name in ("one", "other"):
        (tmp_path / name / "california-housing").mkdir(parents=True)
    with gzip.open(tmp_path / "one/california-housing/cal_housing.csv.gz", "wt") as text:
        text.write(f"names\n{row}\n{row}\n")
    with tarfile.open(tmp_path / "other/california-housing/cal_housing.tgz", "w:gz") as archive:
        content = f"{row}\n{row}\n".encode()
        member = tarfile.TarInfo("CaliforniaHousing/cal_housing.data")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    first, second = (read_california(tmp_path / name) for name in ("one", "other"))
    assert torch.equal(first.inputs, second.inputs)
    assert first.targets.tolist() == [4.526, 4.526]
    assert first.places[0].tolist() == [-122.23, 37.88]
    assert first.inputs[0, 2].item() == pytest.approx(880 / 126)


def test_a_bank_table_that_is_not_the_published_one_is_refused(tmp_path):
    (tmp_path / "bank-marketing").mkdir()
    (tmp_path / "bank-marketing/bank-full.csv.gz").write_bytes(gzip.compress(b"age;y\n30;no\n"))
    with pytest.raises(DataError, match=r"expected sha256 .* of bank-full.csv"):
        read_bank(tmp_path)
