"""Tables: California housing and bank marketing."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .sources import DataError, Source, find

_CALIFORNIA = [
    [Source("california-housing/cal_housing.csv.gz")],
    [
        Source(
            "california-housing/cal_housing.tgz",
            "https://ndownloader.figshare.com/files/5976036",
            "sha256:aaa5c9a6afe2225cc2aed2723682ae403280c4a3695a2ddda4ffb5d8215ea681",
        )
    ],
]
_BANK_TABLE = "d1513ec63b385506f7cfce9f2c5caa9fe99e7ba4e8c3fa264b3aaf0f849ed32d"
"""sha256 of bank-full.csv itself; the archive around it is made anew by its source from time to time."""
_BANK = [
    [Source("bank-marketing/bank-full.csv.gz")],
    [Source("bank-marketing/bank-marketing.zip", "https://archive.ics.uci.edu/static/public/222/bank+marketing.zip")],
]


@dataclass(frozen=True)
class Housing:
    """California housing, not standardised.

    Attributes:
        names: of the eight features, scikit-learn's.
        inputs: (n, 8).
        targets: (n,) median house value in 100,000 dollars.
    """

    names: tuple[str, ...]
    inputs: Tensor
    targets: Tensor

    @property
    def places(self) -> Tensor:
        """(n, 2) longitude and latitude."""
        return self.inputs[:, [7, 6]]


@dataclass(frozen=True)
class Bank:
    """Bank marketing: was a term deposit subscribed?

    Attributes:
        columns: values as text, by the name of the column; all n long, without the answer.
        targets: (n,) whether it was.
    """

    columns: dict[str, list[str]]
    targets: Tensor


def read_california(folder: Path | None) -> Housing:
    """20,640 districts, with the eight features of scikit-learn and its target, in float64."""
    form, (path,) = find(folder, "California housing", _CALIFORNIA)
    if form == 0:
        with gzip.open(path, "rt") as text:
            rows = np.loadtxt(text, delimiter=",", skiprows=1)
    else:
        with tarfile.open(path) as archive:
            raw = archive.extractfile("CaliforniaHousing/cal_housing.data")
            rows = np.loadtxt(io.TextIOWrapper(raw, "ascii") if raw else [], delimiter=",")
    lon, lat, age, rooms, bedrooms, people, homes, income, value = rows.T
    table = np.c_[income, age, rooms / homes, bedrooms / homes, people, people / homes, lat, lon]
    names = ("MedInc", "HouseAge", "AveRooms", "AveBedrms", "Population", "AveOccup", "Latitude", "Longitude")
    return Housing(names, torch.from_numpy(table), torch.from_numpy(value / 1e5))


def read_bank(folder: Path | None) -> Bank:
    """45,211 calls, 16 columns. `duration` is known only after the call: leave it out of a fair model."""
    form, (path,) = find(folder, "bank marketing", _BANK)
    content = gzip.decompress(path.read_bytes()) if form == 0 else _unzip(path)
    found = hashlib.sha256(content).hexdigest()
    if found != _BANK_TABLE:
        raise DataError(f"expected sha256 {_BANK_TABLE} of bank-full.csv in {path}, got {found}. Fetch it again.")
    rows = list(csv.DictReader(io.StringIO(content.decode("ascii")), delimiter=";"))
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "y"}
    return Bank(columns, torch.tensor([row["y"] == "yes" for row in rows]))


def _unzip(path: Path) -> bytes:
    """bank-full.csv out of bank.zip out of the archive."""
    with zipfile.ZipFile(path) as outer, outer.open("bank.zip") as raw:
        inner = io.BytesIO(raw.read())
    with zipfile.ZipFile(inner) as archive:
        return archive.read("bank-full.csv")
