"""Files of data sets: where they are looked for, where they come from, and how they are known to be the right ones."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A file of a data set.

    Attributes:
        path: inside the folder of data sets.
        url: its public source, or `None` for a form that is found in folders only.
        checksum: as "sha256:..." or "md5:..." of the file; empty where only what is in it can be checked.
    """

    path: str
    url: str | None = None
    checksum: str = ""


class DataError(SystemExit):
    """Data are missing or not what they should be. Ends a command with its words."""


def cache_folder() -> Path:
    """Where downloads are kept: $WHENCE_DATA, else in the user's cache."""
    told = os.environ.get("WHENCE_DATA")
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(told) if told else (Path(home) if home else Path.home() / ".cache") / "whence" / "data"


def find(folder: Path | None, name: str, forms: list[list[Source]]) -> tuple[int, list[Path]]:
    """The files of a data set, in the first of its forms that is there.

    Args:
        folder: with all data sets; `None` for the cache, into which missing files are downloaded.
        name: of the data set, for errors.
        forms: each a list of the files it needs.

    Returns:
        Which form, and its files.
    """
    home = cache_folder() if folder is None else folder
    for number, form in enumerate(forms):
        paths = [home / source.path for source in form]
        if all(path.exists() for path in paths):
            return number, paths
    if folder is None:
        for number, form in enumerate(forms):
            if all(source.url for source in form):
                return number, [download(source, home) for source in form]
    wanted = " or ".join(", ".join(source.path for source in form) for form in forms)
    missing = [source.path for source in forms[0] if not (home / source.path).exists()]
    raise DataError(
        f"expected {name} as {wanted} in {home}, got no {missing[0]}. Name a folder that has it with --data, or leave "
        "--data out to download it where there is a network."
    )


def download(source: Source, home: Path) -> Path:
    """Fetch a file that is not there yet, and keep it if its checksum is right."""
    path = home / source.path
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partly = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(source.url or "", timeout=60) as raw, partly.open("wb") as kept:
            while block := raw.read(1 << 20):
                kept.write(block)
        check(partly, source)
        partly.replace(path)
    except (urllib.error.URLError, OSError) as error:
        raise DataError(
            f"expected to download {source.url}, got {error}. Without a network, name a folder that has "
            f"{source.path} with --data."
        ) from error
    finally:
        partly.unlink(missing_ok=True)
    return path


def check(path: Path, source: Source) -> None:
    """Raise unless a file has the checksum of its source."""
    if not source.checksum:
        return
    kind, _, wanted = source.checksum.partition(":")
    with path.open("rb") as raw:
        found = hashlib.new(kind, usedforsecurity=False)
        while block := raw.read(1 << 20):
            found.update(block)
    if found.hexdigest() != wanted:
        raise DataError(
            f"expected {kind} {wanted} of {source.path} from {source.url}, got {found.hexdigest()}. The source has "
            "changed or the download broke; it was not kept."
        )
