"""The options of a fit, checked at the door."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from .curvature.base import NO_GROUPS, Structure
from .errors import InputError
from .likelihoods import Likelihood
from .tangents.linearization import Linearization


def check_ridge(ridge: float | str) -> float | None:
    """The ridge as a number, or `None` for "loo"."""
    if isinstance(ridge, str) and ridge == "loo":
        return None
    try:
        value = float(ridge) if not isinstance(ridge, str) else None
    except (TypeError, ValueError):
        value = None
    if value is None:
        raise InputError(
            f'expected ridge to be a number or "loo", got {ridge!r}. It is lambda in sum of squared errors + lambda '
            "||w||^2; see whence.ridge_from_weight_decay."
        )
    if not math.isfinite(value) or value < 0:
        raise InputError(
            f"expected ridge >= 0 and finite, got {ridge}. It is lambda in sum of squared errors + lambda ||w||^2; "
            "see whence.ridge_from_weight_decay."
        )
    return value


def check_apart(loss: Likelihood, loo: str) -> None:
    """Raise when outputs are to be left out one by one that cannot be."""
    if loo == "output" and loss.couples_outputs:
        raise InputError(
            f'expected loo="example" with likelihood {loss.name!r}, whose outputs depend on each other, got "output". '
            "A single class cannot be left out."
        )


def check_groups(groups: Any, loo: str, structure: Structure) -> None:
    """Raise when whole groups are to be left out and cannot be."""
    if groups is None:
        return
    if loo != "example":
        raise InputError(f'expected loo="example" with groups, which are left out as a whole, got "{loo}".')
    if not structure.takes_groups:
        raise InputError(NO_GROUPS.format(repr(structure)))


def check_positions(problem: Linearization, loo: str) -> None:
    """Raise when positions are to be left out and there are none."""
    if loo != "example" and problem.sketch is not None:
        raise InputError(
            f'expected loo="example" where only {problem.sketch.columns} mixtures of the outputs are looked at, got '
            f'{loo!r}. Fit with outputs="all" to leave out single {loo}s.'
        )
    if loo == "position" and problem.units is None:
        raise InputError(
            'expected a network that answers at several positions, (n, positions, k), for loo="position", got one row '
            f'of {problem.k} outputs an example. Use loo="example".'
        )


def check_columns(outputs: Any) -> int | None:
    """How many columns of the loss's Hessian are looked at: 0 to decide by the number of outputs, `None` for all."""
    if isinstance(outputs, str) and outputs in ("auto", "all"):
        return 0 if outputs == "auto" else None
    if isinstance(outputs, bool) or not isinstance(outputs, Integral) or int(outputs) < 1:
        raise InputError(
            'expected outputs to be "auto", "all", or the number of columns of each example\'s Hessian to look at, at '
            f"least 1, got {outputs!r}. Single outputs are chosen in predict(x, outputs=[...])."
        )
    return int(outputs)


def check_sizes(chunk_size: Any, max_memory: Any) -> None:
    """Raise unless sizes are sizes."""
    if chunk_size is not None and not (isinstance(chunk_size, Integral) and int(chunk_size) >= 1):
        raise InputError(f"expected chunk_size to be a whole number of examples, at least 1, got {chunk_size!r}.")
    if max_memory is not None and not (isinstance(max_memory, Real) and 1 <= float(max_memory) < math.inf):
        raise InputError(f"expected max_memory to be a number of bytes, at least 1, got {max_memory!r}.")


def check_choices(**choices: tuple[str, tuple[str, ...]]) -> None:
    """Raise unless each option is one of those allowed."""
    for name, (given, allowed) in choices.items():
        if given not in allowed:
            raise InputError(f"expected {name} to be one of {', '.join(map(repr, allowed))}, got {given!r}.")


HINTS = {
    **dict.fromkeys(
        ("classification", "crossentropy", "crossentropyloss", "softmax"), ' Cross-entropy is "categorical".'
    ),
    **dict.fromkeys(("bce", "binary", "bcewithlogitsloss", "sigmoid"), ' Binary cross-entropy is "bernoulli".'),
    **dict.fromkeys(("regression", "mse", "mseloss", "squarederror", "normal"), ' Squared error is "gaussian".'),
    **dict.fromkeys(("full", "dense"), ' Without approximation it is "exact".'),
    **dict.fromkeys(("kron", "kronecker"), ' Kronecker factors are "kfac".'),
    "diag": ' The diagonal is "diagonal".',
}
"""What people call things elsewhere, and what they are called here."""


def named(given: Any, known: dict[str, Any], kind: type, what: str) -> Any:
    """An object of a kind, given itself or by its name."""
    if isinstance(given, kind):
        return given
    if isinstance(given, str) and given in known:
        return known[given]()
    hint = HINTS.get(str(given).lower().removesuffix("()").replace("_", ""), "")
    raise InputError(
        f"expected {what} to be one of {', '.join(map(repr, known))} or a {kind.__name__}, got {given!r}.{hint}"
    )
