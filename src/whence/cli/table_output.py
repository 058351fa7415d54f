"""What `whence table` says at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from whence.cli.output import Output, figure, percent
from whence.tabular.results import Results
from whence.tabular.study import Prepared, Study

ADVICE = {
    "confident": "nothing to do",
    "noisy labels nearby": "similar training rows err more than others: check the labels of those named in `check`",
    "scarce data": "few training rows are similar: collect more like these",
    "both": "check the labels, and collect more",
}
DOUBT = {
    "regression": "  doubt: standard deviations between the label and what the other rows say",
    "classification": "  doubt: grows as the other rows leave the label less of a chance",
}
SUSPECTS = 5


def advice_for(verdict: str) -> str:
    """What to do, where the training rows are listed below the advice and not in a column of a file."""
    return ADVICE[verdict].replace("in `check`", "below")


def about_data(data: Path, ready: Prepared) -> dict[str, Any]:
    """What is known before the training, as it goes into JSON."""
    model, parts = ready.model, ready.parts
    return {
        "data": data,
        "rows": {
            "file": ready.table.total,
            "used": len(ready.table),
            "train": len(parts.train),
            "test": len(parts.test),
        },
        "target": {"name": model.target.name, "task": model.target.task, "classes": model.target.classes},
        "columns": [{"name": one.name, "kind": one.kind, "words": one.words()} for one in model.columns],
        "left_out": [{"name": one.name, "reason": one.reason} for one in model.left],
        "notes": ready.notes,
    }


def about_results(done: Study, results: Results, doubts: Any) -> dict[str, Any]:
    """What is known after it."""
    model, parts, tracer = done.model, done.parts, done.tracer
    return {
        "network": {
            "inputs": len(model.inputs),
            "width": model.width,
            "weights": model.weights,
            "weight_decay": done.trained.weight_decay,
            "validation_rows": sum(map(len, parts.validation)),
        },
        "fit": {
            "structure": done.structure,
            "ridge": tracer.ridge,
            "degrees_of_freedom": tracer.degrees_of_freedom,
            "newton_change": float(tracer.diagnostics["Newton change"]),
            "recentered": done.recentered,
        },
        "scores": {one.name: {"value": one.value, "words": one.words} for one in results.scores(parts.test)},
        "verdicts": {"held_out": _count(results, parts.test), "all": _count(results, numpy.arange(len(done.table)))},
        "suspects": _suspects(done, results, doubts),
    }


def tell_results(output: Output, content: dict[str, Any]) -> None:
    """What the network found, for people."""
    _tell_fit(output, content)
    rows = content["rows"]
    output.head(f"On {rows['test']:,} held-out rows, never trained on")
    scores = content["scores"]
    output.rows(["", "", ""], [[name, figure(one["value"]), one["words"]] for name, one in scores.items()], right=(1,))
    _tell_verdicts(output, content["verdicts"], rows["test"], rows["used"])
    if content["suspects"]:
        output.head("Training labels to check first")
        named = f"{content['target']['name']} in the file"
        output.rows(
            ["row", named, "predicted", "doubt"],
            [
                [f"{one['row']}", one["label"], one["predicted"], figure(one["suspicion"])]
                for one in content["suspects"]
            ],
            right=(0, 3),
        )
        output.say(DOUBT[content["target"]["task"]])
    output.say()
    for name, path in content["files"].items():
        if path is not None:
            output.file({"csv": "All rows", "report": "Report", "saved": "Saved"}[name], path)
    output.fact("Time", f"{content['seconds']:.0f} s")


def tell_data(output: Output, content: dict[str, Any]) -> None:
    """What was found in the file, for people."""
    rows, target = content["rows"], content["target"]
    kinds: dict[str, int] = {}
    for column in content["columns"]:
        kinds[column["kind"]] = kinds.get(column["kind"], 0) + 1
    many = {"number": "numbers", "category": "categories", "date": "dates"}
    listed = ", ".join(f"{count} {many[kind] if count > 1 else kind}" for kind, count in kinds.items())
    output.fact("Data", f"{rows['used']:,} rows; columns used: {listed}")
    for left in content["left_out"]:
        output.fact("", f"left out {left['name']!r}: {left['reason']}")
    classes = f", {len(target['classes'])} classes" if target["classes"] else ""
    output.fact("Target", f"{target['name']}: {target['task']}{classes}")
    for note in content["notes"]:
        output.fact("Note", note)


def _tell_fit(output: Output, content: dict[str, Any]) -> None:
    network, fit, rows = content["network"], content["fit"], content["rows"]
    output.fact(
        "Network",
        f"{network['inputs']} inputs, two hidden layers of {network['width']}, {network['weights']:,} weights; "
        f"weight decay {network['weight_decay']:g}, chosen by {network['validation_rows']:,} validation rows",
    )
    exact = "exact algebra" if fit["structure"] == "exact" else f"structure {fit['structure']}, an approximation"
    left = fit["newton_change"]
    optimum = (
        f"the network stopped short of its optimum (by {percent(left)} of its errors), and the fit took the last step"
        if fit["recentered"]
        else f"the network is near its optimum (a last step would change its errors by {percent(left)})"
    )
    output.fact("Fit", f"{exact} on {rows['train']:,} rows; {optimum}")


def _tell_verdicts(output: Output, verdicts: dict[str, dict[str, int]], tested: int, used: int) -> None:
    counts = verdicts["held_out"]
    told = sum(counts.values())
    if not told:
        return
    few = "" if told == tested else f" ({told:,} of them)"
    output.head(f"Why are predictions uncertain? Verdicts on the held-out rows{few}")
    rows = [[name, f"{count:,}", percent(count / told), ADVICE[name]] for name, count in counts.items()]
    output.rows(["", "", "", ""], rows, right=(1, 2))
    if sum(verdicts["all"].values()) < used:
        output.say("  Not all rows have a verdict, which would take long: --verdicts all")


def _count(results: Results, which: Any) -> dict[str, int]:
    words = results.verdicts()
    found = [words[place] for place in which.tolist()]
    return {name: found.count(name) for name in ADVICE} if any(found) else {}


def _suspects(done: Study, results: Results, doubts: Any) -> list[dict[str, Any]]:
    """Training rows with the most doubtful labels."""
    known = numpy.flatnonzero(numpy.isfinite(doubts))
    first = known[numpy.argsort(-doubts[known], kind="stable")][:SUSPECTS]
    target = done.model.target
    predicted = results.predicted
    found = []
    for place in first.tolist():
        answer = target.classes[predicted.center[place]] if target.classes else figure(float(predicted.center[place]))
        found.append(
            {
                "row": int(done.table.rows[place]),
                "label": str(done.table.columns[target.name][place]) if target.classes else figure(done.values[place]),
                "predicted": answer,
                "suspicion": float(doubts[place]),
            }
        )
    return found
