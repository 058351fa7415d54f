"""A fitted table in a folder: numbers and words only, no pickles, nothing that is ever run.

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from whence import __version__, load
from whence.errors import CorruptArtifactError, InputError
from whence.tabular.fitted import FittedTable, TableModel

FORMAT = "whence table"
VERSION = 2
DESCRIPTION, WEIGHTS, TRAINING, FIT = "table.json", "network.safetensors", "training.safetensors", "fit.whence"


def save_table(fitted: FittedTable, folder: Path, about: dict[str, Any]) -> None:
    """Write a fitted table to a folder, which is there whole or not at all.

    Args:
        fitted: what to save.
        folder: new, empty, or an earlier one of the same kind, which is replaced.
        about: what else to write down, as JSON.
    """
    with replacing_folder(folder, DESCRIPTION) as new:
        description = {"format": FORMAT, "version": VERSION, "whence": __version__, **asdict(fitted.model)}
        (new / DESCRIPTION).write_text(json.dumps({**description, "about": about}, indent=1), encoding="utf-8")
        save_file(fitted.tracer.problem.network.model.state_dict(), new / WEIGHTS)
        rows = torch.as_tensor(fitted.rows.astype("int64"), device="cpu")
        save_file(
            {"inputs": fitted.inputs, "values": torch.as_tensor(fitted.values, device="cpu"), "rows": rows},
            new / TRAINING,
        )
        fitted.tracer.save(new / FIT)


def load_table(folder: Path, progress: bool) -> FittedTable:
    """Read what `save_table` wrote.

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
        inputs, values, rows = training["inputs"], training["values"].numpy(), training["rows"].numpy()
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptArtifactError(
            f"expected a table saved by `whence table --save` in {folder}, got damaged files: {reason}. Make it anew."
        ) from error
    tracer = load(folder / FIT, network.eval(), [model.batch(inputs, values)], progress=progress)
    return FittedTable(model, tracer, inputs, values, rows)


def read_description(folder: Path) -> dict[str, Any]:
    """The description of a saved table."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise InputError(
            f"expected a folder saved by `whence table --save`, got {folder}, which "
            + (f"has no {DESCRIPTION}." if folder.is_dir() else "does not exist.")
        )
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        format_, version = description["format"], description["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifactError(f"expected the description of a saved table, got damaged JSON: {path}.") from error
    if (format_, version) != (FORMAT, VERSION):
        raise CorruptArtifactError(
            f"expected {FORMAT!r} of version {VERSION} in {path}, got {format_!r} of version {version!r}. "
            f"It may come from another whence; this one is {__version__}."
        )
    return description


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
