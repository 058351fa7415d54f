"""Results as one HTML file that needs nothing beside it: no network, no other file, no script.

A `Page` is plain data: words, tables, pictures, points. `build` turns it into HTML, and everything that was text stays
text. The functions in `blocks` make the parts of a page from results of `whence`; none of them sees a model.
"""

from .blocks import facts, most_uncertain, rank_scatter
from .page import Card, Facts, Gallery, Group, Number, Page, Point, Row, Scatter, Section, Table, Tone, Words
from .render import build, write

__all__ = [
    "Card",
    "Facts",
    "Gallery",
    "Group",
    "Number",
    "Page",
    "Point",
    "Row",
    "Scatter",
    "Section",
    "Table",
    "Tone",
    "Words",
    "build",
    "facts",
    "most_uncertain",
    "rank_scatter",
    "write",
]
