"""What the script of a page needs, as JSON that cannot end the element it stands in."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .causes import Traced
from .ids import Ids
from .items import Shown
from .meaning import UNKNOWN
from .predictions import REACH, Predictions, half_widths
from .training import Training

OUTPUTS = 8
"""Numbers of one prediction that are shown."""


def payload(predictions: Predictions, traced: Traced, training: Training, shown: Shown, ids: Ids) -> dict[str, Any]:
    """Numbers of all predictions as packed arrays, causes of the traced ones, and the inputs that are shown."""
    explanation, meaning = traced.explanation, predictions.meaning
    arrays = {
        "ho": _floats(explanation.ho),
        "hec3": _floats(explanation.hec3),
        "noise": _floats(explanation.noise),
        "noiseP": _floats(explanation.noise_p),
        "scarcityP": _floats(explanation.scarcity_p),
        "verdict": _bytes(explanation.noisy.long() + 2 * explanation.scarce.long()),
    }
    known = predictions.known
    if known is not None:
        arrays["right"] = _bytes(torch.where(known, predictions.right.long(), 2))
    data: dict[str, Any] = {
        "m": len(predictions),
        "kind": meaning.kind,
        "names": list(meaning.names),
        "form": shown.form,
        "columns": list(shown.columns),
        "ids": ids.test,
        "level": explanation.level,
        "arrays": {**arrays, **_answers(predictions, traced)},
        "traced": traced.chosen.tolist(),
        "check": _causes(traced.check.index, traced.check.share),
        "near": _causes(traced.near.index, traced.near.share),
        "test": {number: item.plain for number, item in shown.test.items()},
        "train": _examples(traced, training, shown, ids),
    }
    return data


def _answers(predictions: Predictions, traced: Traced) -> dict[str, str]:
    """Predictions and targets, by the kind of task."""
    meaning, truth = predictions.meaning, predictions.truth
    if meaning.kind == "numbers":
        few = slice(0, OUTPUTS)
        found = {
            "mean": _floats(predictions.answers[:, few]),
            "half": _floats((REACH * predictions.uncertainty.hec3.cpu().double().sqrt())[:, few]),
            "wide": _floats((REACH * (predictions.uncertainty.hec3.cpu().double() + predictions.noise).sqrt())[:, few]),
        }
        return found if truth is None else {**found, "truth": _floats(truth[:, few])}
    found = {"confidence": _floats(predictions.confidence), "half": _floats(half_widths(predictions, traced))}
    if meaning.kind == "answers":
        found["answer"] = _bytes(predictions.answers)
        return found if truth is None else {**found, "truth": _bytes(torch.where(truth == UNKNOWN, 2, truth))}
    found["answer"] = _ints(predictions.answers)
    return found if truth is None else {**found, "truth": _ints(truth)}


def _causes(index: Tensor, share: Tensor) -> list[list[list[float]]]:
    """For each traced prediction pairs of a training example and its share."""
    rows = zip(index.tolist(), share.tolist(), strict=True)
    return [[[i, round(s, 4)] for i, s in zip(where, shares, strict=True)] for where, shares in rows]


def _examples(traced: Traced, training: Training, shown: Shown, ids: Ids) -> dict[int, list[Any]]:
    """Training examples that are named: label, what the others say, by how much, the input, the name."""
    doubted = training.contradicted
    named = {*traced.check.index.flatten().tolist(), *traced.near.index.flatten().tolist(), *shown.train}
    return {
        number: [
            training.label(number),
            training.opinion(number),
            training.doubt(number),
            int(doubted[number]),
            shown.train[number].plain if number in shown.train else None,
            ids.example(number),
        ]
        for number in sorted(named)
    }


def as_json(data: dict[str, Any]) -> str:
    r"""JSON without any character that HTML or a script would read as its own.

    Examples:
        >>> print(as_json({"text": "</script><!--"}))
        {"text":"\u003c/script\u003e\u003c!--"}
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII: half characters and line ends are escaped
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _floats(values: Tensor) -> str:
    return _packed(values.detach().cpu().numpy().astype("<f4"))


def _ints(values: Tensor) -> str:
    return _packed(values.cpu().numpy().astype("<i4"))


def _bytes(values: Tensor) -> str:
    return _packed(values.cpu().numpy().astype("u1"))


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
