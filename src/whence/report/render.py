"""From a page to HTML."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

from whence.errors import InputError

from .page import Page

if TYPE_CHECKING:
    import jinja2


def build(page: Page) -> str:
    """The HTML of a page, complete in itself.

    All text is escaped. The page forbids itself scripts and every request (a content security policy), so that what
    it shows cannot run or call home.

    Examples:
        >>> html = build(Page("Two <b>claims</b>", ("An answer.",), ()))
        >>> "<h1>Two &lt;b&gt;claims&lt;/b&gt;</h1>" in html
        True
    """
    return _environment().get_template("page.html.j2").render(page=page)


def write(page: Page, path: str | Path) -> Path:
    """Write the HTML of a page to a file and return where it is."""
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(f"expected a folder that exists, got {target.parent} in {target}. Make it first.")
    # A lone surrogate (half a character, from broken text) cannot be encoded; it is shown by its number.
    target.write_bytes(build(page).encode("utf-8", "xmlcharrefreplace"))
    return target


def _environment() -> jinja2.Environment:
    import jinja2  # an extra: only reports need it

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("whence.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = lambda picture: (
        "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
    )
    return environment
