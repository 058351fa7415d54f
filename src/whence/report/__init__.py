"""Results as one self-contained HTML file: no network and no other file is needed.

`Tracer.report` writes it. Build your own sections from the plain data here: words, tables, facts.
"""

from whence.report.content import Facts, Group, Row, Section, Table, Tone, Words
from whence.report.page import write

__all__ = ["Facts", "Group", "Row", "Section", "Table", "Tone", "Words", "write"]
