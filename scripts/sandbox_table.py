"""Writes the table of isolation levels in docs/sandbox.md from the corpus of hostile programs.

Run `python scripts/sandbox_table.py` after a change in tests/sandbox/programs; a test compares. The tests of the
corpus try every program at every level, as root and as another user.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "sandbox.md"
BEGIN, END = "<!-- Written by scripts/sandbox_table.py from tests/sandbox/programs. -->", "<!-- End -->"


def page() -> str:
    """Returns the page with a current table."""
    sys.path.append(str(ROOT / "tests"))
    hostile = importlib.import_module("hostile")
    before, begun, rest = PAGE.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"{PAGE}: the table belongs between {BEGIN} and {END}, which are not there")
    return f"{before}{BEGIN}\n\n{hostile.table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
