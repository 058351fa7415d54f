"""Results as one HTML file that needs nothing beside it: no network, no other file.

`Tracer.report` writes it. Sections of your own are made of the plain data in here: words, tables, facts.
"""

from .content import Content
from .fitted import Reportable
from .page import Facts, Group, Row, Section, Table, Tone, Words
from .write import write

__all__ = ["Content", "Facts", "Group", "Reportable", "Row", "Section", "Table", "Tone", "Words", "write"]
