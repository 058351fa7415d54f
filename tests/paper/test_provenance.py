"""What a record says about where its numbers come from."""

from __future__ import annotations

import re

from whence_paper import provenance
from whence_paper.provenance import command_line


def test_the_command_does_not_tell_folders_of_this_machine():
    assert (
        command_line("whence reproduce table1", ["--data", "/home/me/data", "--quick"])
        == "whence reproduce table1 --data data --quick"
    )


def test_the_commit_is_that_of_the_sources_or_unknown(monkeypatch):
    monkeypatch.delenv("WHENCE_COMMIT", raising=False)
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|unknown", provenance.commit())
    monkeypatch.setattr(provenance, "_git", lambda *arguments: "abcdef0" if arguments[0] == "rev-parse" else " M file")
    assert provenance.commit() == "abcdef0+"
    monkeypatch.setenv("WHENCE_COMMIT", "told")
    assert provenance.commit() == "told"
