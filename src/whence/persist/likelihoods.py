"""Likelihoods by name and options; one that a user wrote is handed over again when the fit is loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from whence.errors import InputError
from whence.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

from .record import Draft, Saved

KNOWN = (Gaussian, Categorical, Bernoulli)


def write_likelihood(draft: Draft, likelihood: Likelihood) -> None:
    """Write its name and options down."""
    kind = type(likelihood)
    draft.note(name=likelihood.name, own=_own(likelihood))
    if kind is Categorical or kind is Bernoulli:
        draft.note(**asdict(likelihood))  # type: ignore[call-overload]  # options differ by likelihood


def read_likelihood(saved: Saved, given: Likelihood | None) -> Likelihood:
    """The likelihood of the fit: made again, or the one given, where a user wrote it."""
    own, name = saved.text("own"), saved.text("name")
    if own:
        if given is None or _own(given) != own:
            got = "none" if given is None else f"a {type(given).__name__}"
            raise InputError(
                f"expected the likelihood that was fitted with, {own!r}, got {got}. It is not part of whence, so that "
                "it is not in the file: whence.load(path, model, likelihood=...)."
            )
        return given
    kinds: dict[str, Any] = {kind.name: kind for kind in KNOWN}
    kind = kinds[saved.text("name", *kinds)]
    found: Likelihood = kind() if kind is Gaussian else kind(**_options(saved, name))
    if given is not None and (type(given) is not type(found) or given != found) and kind is not Gaussian:
        raise InputError(f"expected the likelihood that was fitted with, {found!r}, got {given!r}. Leave it out.")
    return found


def _own(likelihood: Likelihood) -> str:
    """Where a user's own class lives; empty for those of whence."""
    kind = type(likelihood)
    return "" if kind in KNOWN else f"{kind.__module__}.{kind.__qualname__}"


def _options(saved: Saved, name: str) -> dict[str, Any]:
    dispersion = saved.text("dispersion", "fixed", "pearson")
    if name == "bernoulli":
        return {"pos_weight": _weights(saved, "pos_weight"), "dispersion": dispersion}
    return {
        "weight": _weights(saved, "weight"),
        "ignore_index": saved.whole("ignore_index", -(2**63), 2**63),
        "label_smoothing": saved.number("label_smoothing", 0.0, 1.0),
        "dispersion": dispersion,
    }


def _weights(saved: Saved, name: str) -> list[float] | None:
    found = saved.facts.get(name)
    if found is not None and not (isinstance(found, list) and all(type(one) in (int, float) for one in found)):
        raise saved.wrong(name, "a list of numbers")
    return found
