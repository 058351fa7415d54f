"""A report as one HTML file: templates, style and script, and the data that the script reads."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence._version import __version__
from whence.display import number, percent
from whence.errors import InputError
from whence.influence.fitted import Fitted
from whence.report.content import TONES, Report
from whence.report.task import UNKNOWN
from whence.report.traced import LargestShares
from whence.trust.checks import MEANING

if TYPE_CHECKING:
    import jinja2

SCRIPTS = ("data", "elements", "detail", "scatter", "filters", "table", "start")
"""Files of the page's one script, in order."""
MOST_OUTPUTS = 8  # numbers of one prediction that are shown


def write(fitted: Fitted, path: str | Path, *args: Any, **options: Any) -> Path:
    """Write a report of a fit and return its path; see `Report` for the other arguments."""
    environment = jinja_environment()
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(f"expected a folder that exists, got {target.parent} in {target}. Make it first.")
    # A lone surrogate (half a character, from broken text) cannot be encoded, so its code is shown.
    target.write_bytes(render(environment, Report(fitted, *args, **options)).encode("utf-8", "xmlcharrefreplace"))
    return target


def jinja_environment() -> jinja2.Environment:
    """Templates in which all text is escaped."""
    try:
        import jinja2  # an extra: only reports need it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("expected jinja2 for a report. Install it: pip install 'whence[report]'.") from error

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("whence.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters.update(number=number, percent=percent, thousands="{:,}".format)
    environment.globals.update(version=__version__, tones=TONES, meaning=MEANING)
    return environment


def render(environment: jinja2.Environment, report: Report) -> str:
    """The self-contained HTML of a report.

    All text is escaped, and the JSON of the script holds no character that HTML would interpret (jinja's `tojson`). A
    content security policy is a second protection: the page allows only its own style and script, by their hashes, and
    no request.
    """
    folder = files("whence.report").joinpath("templates")
    style, *parts = (
        folder.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", *(f"{one}.js" for one in SCRIPTS))
    )
    trusted = {"style": style, "script": '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"}
    hashes = {f"{name}_hash": _hash(text) for name, text in trusted.items()}
    safe = {name: environment.filters["safe"](text) for name, text in trusted.items()}
    return environment.get_template("report.html.j2").render(report=report, data=script_data(report), **safe, **hashes)


def script_data(report: Report) -> dict[str, Any]:
    """Numbers of all predictions as packed arrays, examples behind the traced ones, and the inputs shown."""
    predictions, traced, training, inputs = report.predictions, report.traced, report.training, report.inputs
    behind = {*traced.check.examples.flatten().tolist(), *traced.near.examples.flatten().tolist(), *inputs.train}
    return {
        "m": len(predictions),
        "kind": predictions.task.kind,
        "names": predictions.task.names,
        "form": inputs.form,
        "columns": inputs.columns,
        "ids": report.test_ids,
        "level": traced.explanation.level,
        "classes": traced.explanation.classes,
        "logits": predictions.task.likelihood.has_classes,
        "noiseLimit": traced.explanation.noise_limit,
        "scarcityLimit": traced.explanation.scarcity_limit,
        "arrays": _arrays(report),
        "traced": traced.chosen.tolist(),
        "check": _pairs(traced.check),
        "near": _pairs(traced.near),
        "test": inputs.test,
        "impossible": inputs.impossible,
        "train": {
            example: [
                *training.texts(example),
                int(training.contradicted[example]),
                inputs.train.get(example),
                report.example_id(example),
            ]
            for example in sorted(behind)
        },
    }


def _arrays(report: Report) -> dict[str, str]:
    """Numbers of all predictions: variances, verdicts, answers and targets, by the kind of task."""
    predictions, explanation, targets = report.predictions, report.traced.explanation, report.predictions.targets
    arrays = {name: _pack(getattr(explanation, name)) for name in ("ho", "hec3", "noise", "scarcity", "probability")}
    arrays["scarcityP"] = _pack(explanation.scarcity_p)
    arrays["undecided"] = _pack(explanation.undecided, "u1")
    arrays["verdict"] = _pack(report.verdicts, "u1")
    if predictions.known is not None:
        arrays["right"] = _pack(torch.where(predictions.known, predictions.right.long(), 2), "u1")
    if predictions.task.kind == "regression":
        columns = {"mean": predictions.answers, "half": predictions.half_width, "wide": predictions.new_half_width}
        columns |= {} if targets is None else {"truth": targets}
        return arrays | {name: _pack(values[:, :MOST_OUTPUTS]) for name, values in columns.items()}
    kind = "u1" if predictions.task.kind == "multilabel" else "<i4"
    arrays["confidence"] = _pack(predictions.confidence.clamp(0.0, 1.0))
    arrays["half"] = _pack(predictions.probability_half_width(report.traced.uncertainty))
    arrays["answer"] = _pack(predictions.answers, kind)
    if targets is not None:
        arrays["truth"] = _pack(torch.where(targets == UNKNOWN, 2, targets) if kind == "u1" else targets, kind)
    return arrays


def _pairs(shares: LargestShares) -> list[list[tuple[int, float]]]:
    """For each traced prediction pairs of a training example and its share."""
    rows = zip(shares.examples.tolist(), shares.share.tolist(), strict=True)
    return [[(example, round(share, 4)) for example, share in zip(*row, strict=True)] for row in rows]


def _pack(values: Tensor, kind: str = "<f4") -> str:
    return base64.b64encode(values.detach().cpu().contiguous().numpy().astype(kind).tobytes()).decode("ascii")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
