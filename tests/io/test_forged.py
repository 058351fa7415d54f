"""Files that are damaged, forged or something else are refused in words, and nothing of them is believed."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whence
from fits_to_save import Fit, classes, regression
from forging import Forged

# --- The file --------------------------------------------------------------------------------------------------------


def refused(path: Path, model: nn.Module, message: str, error: type[Exception] = whence.CorruptArtifactError) -> None:
    with pytest.raises(error, match=message) as caught:
        whence.load(path, model)
    assert isinstance(caught.value, whence.WhenceError)


def test_missing_files_are_missing_files(fit: Fit, tmp_path: Path) -> None:
    refused(tmp_path / "nothing.whence", fit.model, r"nothing\.whence', where there is none\. Pass", FileNotFoundError)


def test_what_is_no_file(fit: Fit, path: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.whence").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "broken.whence", fit.model, "where there is none", FileNotFoundError)
    refused(tmp_path, fit.model, "which is not a regular file", whence.InputError)
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", fit.model, "which is not a regular file", whence.InputError)
    refused(Path("/dev/zero"), fit.model, "which is not a regular file", whence.InputError)


def test_a_link_is_followed(fit: Fit, path: Path, tmp_path: Path) -> None:
    (tmp_path / "link.whence").symlink_to(path)
    assert torch.equal(whence.load(tmp_path / "link.whence", fit.model).leverage, fit.tracer.leverage)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"\x10" + b"\x00" * 200, b"{" * 100])
def test_other_files(content: bytes, fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    refused(tmp_path / "other", fit.model, "expected a (whole )?file")


def test_a_plain_safetensors_file(fit: Fit, tmp_path: Path) -> None:
    from safetensors.torch import save_file  # used by this test alone

    save_file(fit.model.state_dict(), tmp_path / "weights.safetensors")
    refused(tmp_path / "weights.safetensors", fit.model, "expected a file saved by whence, got something else")


def test_another_format(fit: Fit, path: Path, forged: Forged) -> None:
    for other in (0, 1, 2):
        forged.metadata["format"] = other
        message = rf"expected a file of format 10, got format {other} in .*, which another version of whence wrote\."
        refused(forged.write(path), fit.model, message, whence.FormatError)


def test_truncated(fit: Fit, path: Path) -> None:
    raw = path.read_bytes()
    for size in {0, 7, 8, 9, 100, len(raw) // 2, len(raw) - 1}:
        path.write_bytes(raw[:size])
        refused(path, fit.model, "expected a (whole )?file")
    path.write_bytes(raw + b"\0")
    refused(path, fit.model, "safetensors says")


def test_a_header_that_is_said_to_be_huge(fit: Fit, path: Path) -> None:
    raw = path.read_bytes()
    for length in (2**63, 2**40, len(raw), 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little") + raw[8:])
        refused(path, fit.model, "safetensors says")


def test_a_header_that_is_huge(fit: Fit, path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2**36)  # sparse: takes no disk
        file.write((2**30).to_bytes(8, "little"))
    refused(path, fit.model, "safetensors says")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_tensors_that_are_said_to_be_huge(fit: Fit, path: Path, forged: Forged) -> None:
    name = next(iter(forged.table))
    entry = forged.table[name]
    before = peak()
    for shape, offsets in (
        ([2**40], [0, 2**43]),
        ([2**24, 2**24], [0, 2**51]),
        ([2**47, 2**47, 2**47], [0, 2**144]),
        ([2**70], [0, 2**73]),
        ([-1], [0, -8]),
        ([1.5], [0, 12]),
        ([True], [0, 8]),
        ([1] * 9, [0, 8]),
        ("3", [0, 24]),
    ):
        entry["shape"], entry["data_offsets"] = shape, offsets
        refused(forged.write(path), fit.model, "got a damaged one in .*: safetensors says: ")
    assert peak() - before < 64 * 2**20


LIES: dict[str, Callable[[Forged], Any]] = {
    "transposed": lambda f: f.table["problem.outputs"].update(shape=f.table["problem.outputs"]["shape"][::-1]),
    "flat": lambda f: f.table["bread.whiten.inverse"].update(shape=[676]),
    "dtype": lambda f: f.table["problem.outputs"].update(dtype="I64"),
    "unknown dtype": lambda f: f.table["problem.outputs"].update(dtype="O"),
    "another precision": lambda f: f.manifest.update(dtype="torch.float32"),
    "renamed": lambda f: f.table.update({"bread.whiten.reverse": f.table.pop("bread.whiten.inverse")}),
    "missing": lambda f: f.table.pop("bread.whiten.inverse"),
    "overlap": lambda f: f.table["bread.whiten.inverse"].update(data_offsets=[0, 5408]),
    "another tensor": lambda f: f.manifest["bread"]["whiten"]["inverse"].update(tensor="problem.outputs"),
    "no tensor": lambda f: f.manifest["bread"]["whiten"].update(inverse=[[1.0]]),
    "order": lambda f: f.manifest["bread"]["whiten"]["inverse"].update(order=[0, 0]),
    "no order": lambda f: f.manifest["bread"]["whiten"]["inverse"].update(order="01"),
    "expanded": lambda f: f.manifest["bread"]["whiten"]["inverse"].update(shape=[10**9, 26, 26]),
    "parameters": lambda f: f.manifest.update(parameters=["0.weight"]),
    "unknown parameters": lambda f: f.manifest.update(parameters=["../../secret"]),
    "no parameters": lambda f: f.manifest.update(parameters=[]),
    "repeated": lambda f: f.manifest.update(parameters=["0.weight"] * 4),
    "limits": lambda f: f.manifest.update(limits=[1]),
    "structure": lambda f: f.manifest["bread"].update({"class": "FittedDual"}),
    "unknown structure": lambda f: f.manifest["bread"].update({"class": "os.system"}),
    "another class": lambda f: f.manifest["bread"].update(whiten=f.manifest["adjusted"]),
    "another object": lambda f: f.manifest["bread"].update(whiten={"same": "adjusted"}),
    "no object": lambda f: f.manifest["bread"].update(whiten={"same": "bread"}),
    "another sandwich": lambda f: f.manifest["sandwich"].update(
        {"class": "SpectralSandwich", "names": [], "weights": []}
    ),
    "meats": lambda f: f.manifest["sandwich"]["matrices"].pop("ho"),
    "ridge": lambda f: f.manifest["bread"].update(ridge=-1.0),
    "words": lambda f: f.manifest["bread"].update(ridge="1"),
    "no number": lambda f: f.manifest["bread"].update(ridge=float("nan")),
    "infinite": lambda f: f.manifest["bread"].update(ridge=float("inf")),
    "huge": lambda f: f.manifest["bread"].update(ridge=10**400),
    "policy": lambda f: f.manifest["loo"].update(policy="none"),
    "recenter": lambda f: f.manifest["loo"].update(recenter=True),
    "flag": lambda f: f.manifest["loo"].update(recenter=1),
    "notes": lambda f: f.manifest.update(loader_notes="none"),
    "diagnostics": lambda f: f.manifest["diagnostics"]["findings"][0].update(value={}),
    "model": lambda f: f.manifest.update(model=None),
    "modules": lambda f: f.manifest["model"].update(modules=[[]]),
    "rows": lambda f: f.manifest["model"]["tensors"].update({"0.weight": []}),
    "tables": lambda f: f.manifest["model"].update(tensors=[[]]),
    "part": lambda f: f.manifest.update(bread=[]),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_manifest_that_lies(lie: Callable[[Forged], Any], fit: Fit, path: Path, forged: Forged) -> None:
    lie(forged)
    refused(forged.write(path), fit.model, "expected a whole file as whence saved it, got a damaged one")


def test_tensors_that_do_not_belong(fit: Fit, path: Path, forged: Forged) -> None:
    end = len(forged.data)
    forged.table["../../etc/passwd"] = {"dtype": "F64", "shape": [2], "data_offsets": [end, end + 16]}
    forged.data += bytes(16)
    refused(forged.write(path), fit.model, "tensors that do not belong to it, '../../etc/passwd' first")
    assert not (path.parent / ".." / ".." / "etc").exists()


@pytest.mark.parametrize("depth", [10, 10_000, 400_000])
def test_nested_manifests(depth: int, fit: Fit, path: Path, forged: Forged) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        refused(forged.write(path, opening * depth + "1" + closing * depth), fit.model, "got a damaged one")
    forged.table["deep"] = "@"
    length = 2 * depth - len('"@"')
    raw = forged.sealed().replace(b'"@"', b"[" * depth + b"]" * depth)
    path.write_bytes((int.from_bytes(raw[:8], "little") + length).to_bytes(8, "little") + raw[8:])
    refused(path, fit.model, "got a damaged one")


def test_large_manifests(fit: Fit, path: Path, forged: Forged) -> None:
    before = peak()
    refused(forged.write(path, "[" + "[]," * 4_000_000 + "[]]"), fit.model, "more entries than any fit")
    refused(forged.write(path, json.dumps("x" * (17 * 2**20))), fit.model, "more entries than any fit")
    assert peak() - before < 400 * 2**20  # what it takes to write such a file here


@pytest.mark.parametrize("text", ["", "null", "3", '"', "{", '{"a":1,"a":2}', "NaN", '{"a":Infinity}', "\ud800"])
def test_manifests_that_are_none(text: str, fit: Fit, path: Path, forged: Forged) -> None:
    refused(forged.write(path, text), fit.model, "got a damaged one")


def test_positions_beyond_the_end(tmp_path: Path) -> None:
    fit = regression("core")
    fit.tracer.save(tmp_path / "fit.whence")
    forged = Forged((tmp_path / "fit.whence").read_bytes())
    name = next(name for name in forged.table if "indices" in name and forged.table[name]["shape"] != [0])
    start = forged.table[name]["data_offsets"][0]
    for position in (-1, 10**6, 2**62):
        forged.data = forged.data[:start] + position.to_bytes(8, "little", signed=True) + forged.data[start + 8 :]
        refused(forged.write(tmp_path / "fit.whence"), fit.model, "positions below")


def test_groups_that_do_not_exist(tmp_path: Path) -> None:
    fit = regression("primal", groups=[0, 0, 1, 1, 2, 2, 3, 3, 4])
    fit.tracer.save(tmp_path / "fit.whence")
    forged = Forged((tmp_path / "fit.whence").read_bytes())
    start = forged.table["loo.groups.index"]["data_offsets"][0]
    forged.data = forged.data[:start] + (99).to_bytes(8, "little") + forged.data[start + 8 :]
    refused(forged.write(tmp_path / "fit.whence"), fit.model, "positions below 5")


def test_options_of_a_likelihood_that_no_likelihood_has(tmp_path: Path) -> None:
    fit = classes("ekfac", "categorical")
    fit.tracer.save(tmp_path / "fit.whence")
    whole = Forged((tmp_path / "fit.whence").read_bytes())
    for wrong in ({"label_smoothing": 7.0}, {"weight": "abc"}, {"weight": [-1.0]}, {"class": "os"}):
        forged = whole.copy()
        forged.manifest["likelihood"].update(wrong)
        with pytest.raises(whence.WhenceError):
            whence.load(forged.write(tmp_path / "fit.whence"), fit.model)


def test_blocks_that_the_model_does_not_have(tmp_path: Path) -> None:
    fit = regression("ekfac", "convolution")
    fit.tracer.save(tmp_path / "fit.whence")
    whole = Forged((tmp_path / "fit.whence").read_bytes())
    for wrong in ({"groups": 3}, {"kind": "rows"}, {"kind": "dense"}, {"parameters": []}, {"groups": 0}):
        forged = whole.copy()
        forged.manifest["bread"]["gradients"]["sizes"]["blocks"][0].update(wrong)
        with pytest.raises(whence.WhenceError):
            whence.load(forged.write(tmp_path / "fit.whence"), fit.model).predict(fit.test)


def test_words_of_a_file_do_not_reach_the_terminal_as_they_are(fit: Fit, path: Path, forged: Forged) -> None:
    said = {"name": "note\x1b[2J", "value": "\x1b]0;title\x07", "words": "two\nlines"}
    forged.manifest["diagnostics"]["findings"][0].update(said)
    forged.manifest["bread"]["notes"] = ["\x1b[31mred"]
    again = whence.load(forged.write(path), fit.model)
    assert str(again.diagnostics).splitlines()[0] == "note\ufffd[2J: \ufffd]0;title\ufffd (two\ufffdlines)"
    assert again.bread.notes == ["\ufffd[31mred"]
    forged.manifest["model"]["modules"][""] = "\x1b[2J" + "x" * 10_000
    with pytest.raises(whence.StaleModelError) as caught:
        whence.load(forged.write(path), fit.model)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_likelihood_by_its_name(fit: Fit, path: Path) -> None:
    with pytest.raises(whence.InputError, match="expected the likelihood as an object"):
        whence.load(path, fit.model, likelihood="gaussian")  # type: ignore[arg-type]


def test_too_large_for_the_memory(fit: Fit, path: Path) -> None:
    with pytest.raises(whence.TooLargeError, match=r"expected the fit in .* to fit in 1\.0 KiB, but it takes about"):
        whence.load(path, fit.model, max_memory=1024)
