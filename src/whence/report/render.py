"""From the content of a report to HTML."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from whence.errors import InputError

from .content import Content
from .curves import ticks
from .payload import as_json
from .words import number

if TYPE_CHECKING:
    import jinja2

SCRIPTS = ("data", "elements", "detail", "scatter", "filters", "table", "start")
"""Files of the page's one script, in order."""


def build(report: Content) -> str:
    """The HTML of a report, complete in itself.

    All text is escaped, and the data of the script is JSON without any character that HTML would read. A content
    security policy is the second wall: the page allows itself its own style and its own script, told by their hashes,
    and no request.
    """
    environment = _environment()
    safe = environment.filters["safe"]
    style, script = _file("style.css"), _script()
    return environment.get_template("report.html.j2").render(
        report=report,
        contents=_contents(report),
        style=safe(style),
        style_hash=_hash(style),
        script=safe(script),
        script_hash=_hash(script),
        data=safe(as_json(report.data)),
    )


def save(html: str, path: str | Path) -> Path:
    """Write a page to a file and return where it is."""
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(f"expected a folder that exists, got {target.parent} in {target}. Make it first.")
    # A lone surrogate (half a character, from broken text) cannot be encoded; it is shown by its number.
    target.write_bytes(html.encode("utf-8", "xmlcharrefreplace"))
    return target


def _contents(report: Content) -> list[tuple[str, str]]:
    """Sections with their titles, in order."""
    listed = [("actions", "What to do"), ("map", "Map")]
    if report.classes:
        listed.append(("classes", "Classes"))
    if report.galleries:
        listed.append(("gallery", "Most uncertain"))
    listed += [("suspects", "Labels to doubt"), ("curves", "Quality"), ("trust", "Trust")]
    listed += [(f"more-{place}", section.title) for place, section in enumerate(report.sections, 1)]
    return [*listed, ("how", "Method")]


def _script() -> str:
    parts = "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


def _file(name: str) -> str:
    return files("whence.report").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _environment() -> jinja2.Environment:
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
    environment.filters["ticks"] = ticks
    environment.filters["short"] = number
    return environment
