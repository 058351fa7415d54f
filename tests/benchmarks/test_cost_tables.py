"""The tables of cost: a peer that is ahead comes first, and what did not run is listed."""

from __future__ import annotations

from benchmarks.cost import line, merged
from benchmarks.cost_tables import every, winners


def row(model: str, subject: str, fit: float, predict: float | None = None) -> dict[str, object]:
    found: dict[str, object] = {"model": model, "subject": subject, "version": "1", "fit_multiple": fit}
    return found if predict is None else {**found, "predict_multiple": predict}


def test_where_a_peer_is_ahead_comes_first() -> None:
    rows = [row("M1", "ekfac", 4.0, 1.0), row("M1", "diagonal", 2.0, 3.0)]
    rows += [row("M1", "laplace", 8.0, 9.0), row("M1", "kronfluence", 3.0)]
    assert winners(rows) == [
        ["M1: fit", "kronfluence 3.0", "ekfac 4.0", "diagonal 2.0"],
        ["M1: predict", "laplace 9.0", "ekfac 1.0", "ekfac 1.0"],
    ]
    assert winners(rows[:2]) == []


def test_what_did_not_run_is_told() -> None:
    rows = [
        {"model": "M1", "subject": "laplace", "missing": "No package metadata"},
        {"model": "M1", "subject": "ekfac", "failed": "stopped"},
    ]
    told = every(rows)
    assert [one[3] for one in told] == ["not installed: No package metadata", "stopped"]
    assert {len(one) for one in told} == {10}
    lines = [line(one) for one in rows]
    assert "not installed: No package metadata" in lines[0]
    assert {one.count("|") for one in lines} == {8}


def test_records_are_put_together() -> None:
    first = {"command": "one", "commit": "a", "rows": [row("M4", "ekfac", 20.0), row("M1", "ekfac", 4.0)]}
    failed = {"model": "M1", "subject": "ekfac", "failed": "stopped"}
    second = {"command": "two", "commit": "b", "rows": [failed, row("M4", "ekfac", 10.0)]}
    found = merged([first, second])
    assert [(one["model"], one["fit_multiple"], one["commit"]) for one in found["rows"]] == [
        ("M1", 4.0, "a"),
        ("M4", 10.0, "b"),
    ]
    assert found["command"] == "one; two"
