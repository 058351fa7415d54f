"""Write the report of a fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whence.results import Diagnostics
from whence.tracing.trust import Trust

from .fitted import Reportable
from .gather import gather
from .page import Section
from .render import build, save

TITLE = "How uncertain are these predictions, and why?"


def write(
    fitted: Reportable,
    path: str | Path,
    test: Any,
    train: Any,
    names: Sequence[str] | None,
    views: tuple[Any, Any, Any],
    *,
    ids: Any = None,
    title: str = TITLE,
    about: Sequence[str] = (),
    sections: Sequence[Section] = (),
    trust: Trust | Diagnostics | None = None,
    level: float = 0.95,
    traced: int = 500,
) -> Path:
    """Write a report of a fit and return where it is.

    `whence.Tracer.report` tells what the arguments are; views are its images, texts and table.
    """
    content = gather(
        fitted,
        test,
        train,
        names,
        views,
        ids=ids,
        title=title,
        about=(about,) if isinstance(about, str) else about,
        sections=sections,
        trust=trust,
        level=level,
        traced=traced,
    )
    return save(build(content), path)
