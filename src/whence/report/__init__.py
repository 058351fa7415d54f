"""Results as one HTML file that needs nothing beside it: no network, no other file.

`Tracer.report` writes it. Sections of your own are made of the plain data in here: words, tables, facts.
"""

from whence.report.content import Facts, Group, Row, Section, Table, Tone, Words
from whence.report.page import write

__all__ = ["Facts", "Group", "Row", "Section", "Table", "Tone", "Words", "write"]
