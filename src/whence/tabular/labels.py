"""Labels that the other rows contradict, the list of labels to check and rows to label first, and the answers to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pandas

from whence.display import listing
from whence.errors import InputError, did_you_mean
from whence.influence.training import WrongLabels, wrong_labels
from whence.report.usual import frame_of
from whence.runtime.files import replacing
from whence.tabular.files import read_table, write_csv
from whence.tabular.fitted import FittedTable, Prepared
from whence.tabular.predictions import RowPredictions, distinct_names
from whence.tabular.target import Target

CHECK, LABEL = "check the label", "label"
DOUBTFUL = 2.0  # standard deviations beyond which the other rows contradict a number
POOL = 1_500  # outputs of rows without a label, those with the largest variances, from which rows are chosen


def judge_labels(predictions: RowPredictions, train: Any) -> pandas.DataFrame:
    """The label of each row, and what the other rows predict instead; `train` are the positions of the training rows.

    Training rows are judged by the fit without them, all others by the prediction itself, with the same formula: for
    classes suspicion is 1 - p(label), for numbers |label - suggested| over the standard deviation of an observation.

    Columns are `label` and `suggested`, numbers or indices of classes; `sure`, the probability of the suggested class,
    or the standard deviation of an observation around a number; `suspicion` and `rank`, which orders ties of it;
    `contradicted`; and `counted`, whether the label is used to estimate the share of wrong ones.
    """
    target, tracer = predictions.fitted.model.target, predictions.fitted.tracer
    labels, chances, uncertainty = predictions.values, predictions.probabilities, predictions.uncertainty
    if target.classes:
        suggested, sure = chances.argmax(1), chances.max(1)
        suspicion = 1.0 - chances[numpy.arange(len(labels)), numpy.nan_to_num(labels).astype(int)]
    else:
        suggested = uncertainty.mean[:, 0].numpy()
        sure = (uncertainty.laplace[:, 0] + tracer.noise_scale).sqrt().numpy()
        suspicion = numpy.abs(labels - suggested) / sure
    columns = {"suggested": suggested, "sure": sure, "suspicion": suspicion, "rank": numpy.zeros(len(labels))}
    frame = frame_of({"label": labels, **columns}).astype(float)
    left_out = tracer.training_frame()
    names = ["suggested", "suggested_probability" if target.classes else "suggested_std", "suspicion", "suspect_rank"]
    frame.loc[train, list(columns)] = left_out[names].to_numpy(dtype=float)
    known = frame["label"].notna()
    frame.loc[~known, "suspicion"] = numpy.nan
    contradicted = frame["label"] != frame["suggested"] if target.classes else frame["suspicion"] > DOUBTFUL
    frame["contradicted"], frame["counted"] = known & contradicted, known
    if predictions.fitted.model.learner == "trees":  # their splits have learned the labels of training rows
        frame.loc[train, "counted"] = False
    return frame


def doubtful_rows(judged: pandas.DataFrame) -> Any:
    """Positions of the rows whose label the other rows contradict, the most doubtful one first."""
    ordered = judged[judged["contradicted"]].sort_values(["suspicion", "rank"], ascending=[False, True])
    return ordered.index.to_numpy()


def estimate_wrong(judged: pandas.DataFrame, target: Target) -> WrongLabels | None:
    """How many labels are wrong in all; `None` for numbers."""
    if not target.classes:
        return None
    label, suggested, sure = judged.loc[judged["counted"], ["label", "suggested", "sure"]].to_numpy().T
    return wrong_labels(label, suggested, sure, len(target.classes))


def suggestions(judged: pandas.DataFrame, target: Target) -> pandas.DataFrame:
    """Columns for a file: the suggested label (the name of a class, or a number), how sure it is, the suspicion."""
    found = judged[["suggested", "sure", "suspicion"]]
    if target.classes:
        found = found.assign(suggested=numpy.array(target.classes, dtype=object)[found["suggested"].astype(int)])
    return found.rename(columns={"sure": "suggested_probability" if target.classes else "suggested_std"})


def work_items(prepared: Prepared, fitted: FittedTable, judged: pandas.DataFrame, most: int) -> pandas.DataFrame:
    """Labels that the other rows contradict, the most doubtful first, then rows to label first; at most `most` of each.

    Columns are `row` in the file, `todo`, an empty `answer`, `label`, `suggested`, how sure that is, `suspicion`, and
    the cells of all columns except the target.
    """
    target = prepared.model.target
    check, label = doubtful_rows(judged)[:most], rows_to_label(prepared, fitted, most)
    at = numpy.concatenate([check, label]).astype(int)
    cells, found = prepared.frame.iloc[at], suggestions(judged, target).iloc[at].reset_index(drop=True)
    items = frame_of({"row": cells.index, "todo": [CHECK] * len(check) + [LABEL] * len(label)}).assign(answer="")
    if not target.classes:  # as it can be copied into the file
        found["suggested"] = [target.spell(value, 6) for value in found["suggested"]]
    items = items.assign(label=cells[target.name].to_numpy()).join(found)
    return items.join(distinct_names(cells.drop(columns=target.name), items.columns))


def write_items(path: Path, items: pandas.DataFrame, target: Target) -> None:
    """Write work items as CSV; or as JSON, as tasks for Label Studio with the suggested labels as predictions."""
    if path.suffix.lower() != ".json":
        write_csv(path, items)
        return
    texts = items.drop(columns="answer").astype(object).fillna("").astype(str)
    last = texts.columns.get_loc("suspicion") + 1
    kind, key = ("choices", "choices") if target.classes else ("textarea", "text")
    tasks = []
    parts = (part.to_dict("records") for part in (texts.iloc[:, :last], texts.iloc[:, last:]))
    for item, cells in zip(*parts, strict=True):
        result = {"from_name": "answer", "to_name": "cells", "type": kind, "value": {key: [item["suggested"]]}}
        tasks.append({"data": {**item, "cells": cells}, "predictions": [{"result": [result]}]})
    with replacing(path) as part:
        part.write_text(json.dumps(tasks, indent=1), encoding="utf-8")


def rows_to_label(prepared: Prepared, fitted: FittedTable, most: int) -> Any:
    """Positions of rows without a label whose labels would reduce the variance of all of them most."""
    unlabelled, frame = prepared.split.unlabelled, prepared.frame
    if not len(unlabelled):
        return unlabelled
    pool = max(1, POOL // prepared.model.target.outputs)
    if len(unlabelled) > pool:
        variance = fitted.tracer.predict(fitted.batches(frame.iloc[unlabelled])).hec3.sum(1)
        unlabelled = unlabelled[variance.argsort(descending=True)[:pool].sort().values.cpu().numpy()]
    chosen = fitted.tracer.suggest(min(most, len(unlabelled)), pool=fitted.batches(frame.iloc[unlabelled])).index
    return unlabelled[chosen.cpu().numpy()]


def read_answers(path: Path, prepared: Prepared) -> tuple[pandas.Series, int]:
    """Answers in a filled file of `work_items`, by the row of the table, and how many rows have none.

    Labels in the file are compared with those of the table, so that answers to another table are refused.
    """
    frame, target = prepared.frame, prepared.model.target
    if path.suffix.lower() == ".json":
        raise InputError(f"expected answers as CSV, got {path.name}. Label Studio exports its annotations as CSV, too.")
    items = read_table(path, 0).frame
    absent = [name for name in ("row", "label", "answer") if name not in items.columns]
    if absent:
        raise InputError(
            f"expected the columns row, label and answer in {path.name}, as `whence table --export` writes them, got "
            f"none named {listing(absent)}. Columns there are: {listing(list(items.columns), 20)}."
        )
    given = items.dropna(subset="answer").drop_duplicates(["row", "answer"]).set_index("row")
    if given.empty:
        raise InputError(f"expected answers in {path.name}, got none in {len(items)} rows. Fill in column `answer`.")
    known = given.index.isin(frame.index.astype(str))
    if not known.all():
        raise InputError(
            f"expected rows of this table in {path.name}, got row {given.index[~known][0]!r}, which was not read from "
            "it. Pass the table that was exported, with the same --rows and --seed."
        )
    if given.index.has_duplicates:
        row = given.index[given.index.duplicated()][0]
        both = " and ".join(map(repr, given.loc[row, "answer"]))
        raise InputError(f"expected one answer for row {row} in {path.name}, got {both}. Keep one.")
    given.index = given.index.astype(int)
    now = frame.loc[given.index, target.name]
    other = ~numpy.isclose(target.parse(given["label"]), target.parse(now), rtol=1e-9, atol=0.0, equal_nan=True)
    if other.any():
        row = given.index[other][0]
        raise InputError(
            f"expected answers to this table in {path.name}, got the label {given['label'][row]!r} in row {row}, where "
            f"the table has {now[row]!r}. Was another table exported, or was this one changed since? Export it again."
        )
    odd = given["answer"][numpy.isnan(target.parse(given["answer"]))]
    if len(odd):
        wanted = f"one of the classes {listing(list(map(repr, target.classes)), 10)}" if target.classes else "a number"
        raise InputError(
            f"expected {wanted} as the answer for row {odd.index[0]} in {path.name}, got {odd.iloc[0]!r}."
            + did_you_mean(odd.iloc[0], target.classes)
        )
    return given["answer"], int(items["answer"].isna().sum())


def apply_answers(prepared: Prepared, answers: pandas.Series) -> Prepared:
    """The table with answers in place of labels: held-out rows stay held out, rows that had no label train now."""
    target, split, frame = prepared.model.target, prepared.split, prepared.frame.copy()
    frame.loc[answers.index, target.name] = target.spelled(answers)
    values = target.parse(frame[target.name])
    unlabelled = numpy.flatnonzero(numpy.isnan(values))
    train = numpy.union1d(split.train, numpy.setdiff1d(split.unlabelled, unlabelled))
    split = replace(split, train=train, unlabelled=unlabelled)
    return replace(prepared, frame=frame, values=values, split=split)
