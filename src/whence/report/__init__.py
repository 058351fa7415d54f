"""Results as one self-contained HTML file: no network and no other file is needed. `Tracer.report` writes it."""

from whence.report.page import write

__all__ = ["write"]
