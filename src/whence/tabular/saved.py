"""A traced table in a folder: numbers and words only, no pickles, nothing that is ever run.

`table.json` holds columns, target and how the network was trained, `network.safetensors` its weights,
`training.safetensors` the encoded training rows, which verdicts need, and `fit.whence` the fit itself.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from whence import Tracer, __version__, load
from whence.errors import CorruptArtifactError, InputError
from whence.tabular.model import TableModel
from whence.tabular.study import Study, training_data

FORMAT = "whence table"
VERSION = 1
DESCRIPTION, WEIGHTS, TRAINING, FIT = "table.json", "network.safetensors", "training.safetensors", "fit.whence"


@dataclass(frozen=True)
class Saved:
    """What was loaded.

    Attributes:
        model: how rows become inputs.
        tracer: the fit.
        training_rows: row of the file of each training example.
        inputs: (n, inputs) the encoded training rows.
        values: (n,) their targets.
        about: what else was written down.
    """

    model: TableModel
    tracer: Tracer
    training_rows: Any
    inputs: torch.Tensor
    values: torch.Tensor
    about: dict[str, Any]


def save(study: Study, folder: Path, about: dict[str, Any]) -> None:
    """Write a study to a folder, which is there whole or not at all.

    Args:
        study: what to save.
        folder: new, empty, or an earlier one of the same kind, which is replaced.
        about: what else to write down, as JSON.
    """
    parts = study.parts
    with replacing_folder(folder, DESCRIPTION) as new:
        description = {"format": FORMAT, "version": VERSION, "whence": __version__, **study.model.to_json()}
        (new / DESCRIPTION).write_text(json.dumps({**description, "about": about}, indent=1), encoding="utf-8")
        save_file(study.tracer.problem.network.model.state_dict(), new / WEIGHTS)
        rows = torch.as_tensor(study.table.rows[parts.train].astype("int64"), device="cpu")
        values = torch.as_tensor(study.values[parts.train], device="cpu")
        save_file({"inputs": study.inputs[parts.train], "values": values, "rows": rows}, new / TRAINING)
        study.tracer.save(new / FIT)


def load_saved(folder: Path, progress: bool) -> Saved:
    """Read what `save` wrote.

    Args:
        folder: where it is.
        progress: show how far along long work is.
    """
    description = read_description(folder)
    try:
        model = TableModel.from_json(description)
        network = model.network()
        network.load_state_dict(load_file(folder / WEIGHTS))
        training = load_file(folder / TRAINING)
        inputs, values, rows = training["inputs"], training["values"], training["rows"].numpy()
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptArtifactError(
            f"expected a table saved by `whence table --save` in {folder}, got damaged files: {reason}. Make it anew."
        ) from error
    loader = training_data(model, inputs, values)
    tracer = load(folder / FIT, network.eval(), loader, progress=progress)
    return Saved(model, tracer, rows, inputs, values, description.get("about", {}))


def read_description(folder: Path) -> dict[str, Any]:
    """The description of a saved table."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise InputError(
            f"expected a folder saved by `whence table --save`, got {folder}, which "
            + (f"has no {DESCRIPTION}." if folder.is_dir() else "does not exist.")
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        known = description["format"] == FORMAT and description["version"] == VERSION
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifactError(f"expected the description of a saved table, got damaged JSON: {path}.") from error
    if not known:
        raise CorruptArtifactError(
            f"expected {FORMAT!r} of version {VERSION} in {path}, got {description['format']!r} of version "
            f"{description['version']!r}. It may come from another whence; this one is {__version__}."
        )
    found: dict[str, Any] = description
    return found


@contextmanager
def replacing_folder(folder: Path, mark: str) -> Iterator[Path]:
    """A folder to write to, which takes the place of another once everything is in it, and vanishes on an error.

    Args:
        folder: new, empty, or one that holds a file of the name `mark`.
        mark: that file.
    """
    check_folder(folder, mark)
    part = folder.parent / f".whence-{secrets.token_hex(8)}.part"
    part.mkdir()
    try:
        yield part
        if folder.exists():
            old = part.with_suffix(".old")
            os.replace(folder, old)
            os.replace(part, folder)
            shutil.rmtree(old)
        else:
            os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def check_folder(folder: Path, mark: str = DESCRIPTION) -> None:
    """Raise where saving would fail, or would overwrite something else."""
    if not folder.absolute().parent.is_dir():
        raise InputError(f"expected a folder that exists to save in, got {folder.parent}. Make it first.")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"expected the name of a folder to save to, got the file {folder}.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / mark).is_file():
        raise InputError(f"expected a new folder to save to, got {folder}, which holds something else. Name another.")
