"""The reference: what is public has a docstring and an example, which the tests run with all other doctests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import whence
from whence import plots

# Bases to derive from, which pages of their own show ("extending"), and variants of what has an example beside them.
ELSEWHERE = {"Likelihood", "Structure"}
NAMES = sorted(set(whence.__all__) - {"__version__"})


def members(thing: Any) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class defines, as functions."""
    for base in inspect.getmro(thing) if inspect.isclass(thing) else ():
        for name, value in vars(base).items() if base.__module__.startswith("whence") else ():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if not name.startswith("_") and inspect.isfunction(function):
                yield name, function


@pytest.mark.parametrize("name", NAMES)
def test_what_is_public_is_documented(name: str) -> None:
    thing = getattr(whence, name)
    assert inspect.getdoc(thing)
    assert [member for member, function in members(thing) if not inspect.getdoc(getattr(thing, member))] == []


@pytest.mark.parametrize("name", [*NAMES, *(f"plots.{name}" for name in plots.__all__)])
def test_what_is_public_has_an_example(name: str) -> None:
    thing = getattr(plots, name.removeprefix("plots.")) if name.startswith("plots.") else getattr(whence, name)
    if name in ELSEWHERE or (inspect.isclass(thing) and issubclass(thing, whence.WhenceError)):
        thing = whence.WhenceError  # one example for all errors
    texts = [inspect.getdoc(thing), *(inspect.getdoc(function) for _, function in members(thing))]
    assert any(">>> " in (text or "") for text in texts)


def test_what_has_an_example_elsewhere_is_still_public() -> None:
    assert set(whence.__all__) >= ELSEWHERE
