"""Numbers and lists as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from whence import display


def number(value: float, digits: int = 3) -> str:
    """A number with a few digits.

    Examples:
        >>> number(500000.0), number(0.001234), number(12.0), number(float("nan"))
        ('500,000', '0.00123', '12', 'unknown')
    """
    return "unknown" if math.isnan(value) else display.number(value, digits)


def percent(share: float) -> str:
    r"""A share in per cent, with a space before the sign that does not break.

    Examples:
        >>> percent(0.1234), percent(0.0123), percent(0.00001), percent(0.0)
        ('12\xa0%', '1.2\xa0%', 'less than 0.1\xa0%', '0\xa0%')
    """
    if share <= 0:
        return "0\xa0%"
    if share < 0.001:
        return "less than 0.1\xa0%"
    return f"{100 * share:.1f}\xa0%" if share < 0.1 else f"{100 * share:.0f}\xa0%"


def first_few(parts: Sequence[str], most: int = 4) -> str:
    """The first few of a list.

    Examples:
        >>> first_few("abc"), first_few("abcde")
        ('a, b, c', 'a, b, c, d, …')
    """
    return ", ".join(parts[:most]) + (", …" if len(parts) > most else "")
