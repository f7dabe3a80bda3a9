"""Parsing of Sudoku grids in replies and in programs' output."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from verl_atgrpo.environments.common.replies import after_thoughts, fence, labelled, labels
from verl_atgrpo.environments.common.workflow import Style
from verl_atgrpo.environments.sudoku.grid import EMPTY, layout

# Rows may be spaced or Python lists; 0 means an empty cell, too.
_ROW = str.maketrans("0", EMPTY, " \t\r,'\"[]")
_EMPTY = str.maketrans("0_", EMPTY * 2)
_LABELS = labels(
    r"(?:(?:final|solved|completed?|filled|full|updated|sudoku|solution) )*grid",
    r"(?:the )?(?:(?:final|solved|completed?|filled) )*(?:answer|solution|sudoku|puzzle)",
)
_ROWS_OF_A_LINE = re.compile(r"\][ \t]*,?[ \t]*\[")
_ROW_LABEL = re.compile(r"(?:row|r)[ \t]*[1-9][ \t]*[:.)]", re.IGNORECASE)
_GAP = re.compile(r"[ \t,|&\u2502\u2551\u2503]+")
_RULE = re.compile(r"[ \t|+:=\u2500-\u257f-]*[=\u2500-\u257f-][ \t|+:=\u2500-\u257f-]*|[ \t]*[\[\]][ \t,]*")
"""Lines between rows: borders of boxes and Markdown tables, and single brackets."""
_AROUND = " \t*`'\"\\"


def read_rows(lines: Sequence[str], size: int) -> str | None:
    """Returns the grid in `lines`, or None unless they are `size` rows of `size` digits, `.` or 0."""
    if len(lines) != size or any(len(line) > 8 * size for line in lines):
        return None
    rows = [line.translate(_ROW) for line in lines]
    grid = "".join(rows)
    if any(len(row) != size for row in rows) or grid.strip(layout(size).digits + EMPTY):
        return None
    return grid


def read_row(line: str, size: int) -> str | None:
    """Returns the cells of a row, or None.

    Cells may be separated (by blanks, commas, bars), grouped by box or joined; bold, bracketed or quoted; `.`, 0 and
    `_` are empty cells. The row may begin with `Row 1:`.
    """
    if len(line) > _longest(size):
        return None
    line = _ROW_LABEL.sub("", line.strip(_AROUND), count=1)
    line = re.sub(r"[\[\](){}*`'\"]", " ", line).strip(" \t,|&\\\u2502\u2551\u2503")
    cells = [cell.strip("_") or cell for cell in _GAP.split(line)]
    box = math.isqrt(size)
    if [len(cell) for cell in cells] not in ([1] * size, [size], [box] * box):
        return None
    row = "".join(cells).translate(_EMPTY)
    return None if row.strip(layout(size).digits + EMPTY) else row


def parse_grid(reply: str, style: Style, size: int) -> str | None:
    """Returns the grid that `reply` gives in the agreed format, or None.

    `compact`: only the rows. `full`: the rows below the last label `Grid:`, as `read_row` parses them, fenced or not,
    with borders of boxes or of a Markdown table between them, or one list of lists; without that label, below `Final
    answer:` or `Solution:`. Too many rows do not parse. No prompt has such a label, so echoing one earns nothing.
    """
    if style == "compact":
        return read_rows(reply.strip().split("\n", size), size)
    for label in labelled(after_thoughts(reply), _LABELS, _window(size), boxes=False):
        found = _read_below(label.lines, size)
        if found is not None or label.named:
            return found
    return None


def _read_below(lines: Sequence[str], size: int) -> str | None:
    first, *below = lines
    if first.strip(" \t*_"):
        if not first.lstrip().startswith("[["):
            return None
        below = [first, *below]
    rows: list[str] = []
    opened = False
    for line in _split(below, size):
        language = fence(line)
        if language is not None and not opened and not rows:
            opened = True
        elif (row := read_row(line, size)) is not None:
            rows.append(row)
        elif language is not None or not _between_rows(line, size):
            break
        if len(rows) > size:
            return None
    return "".join(rows) if len(rows) == size else None


def parse_printed(output: str, size: int) -> str | None:
    """Returns the grid in the last `size` rows of a program's output, or None if anything but borders follows."""
    rows: list[str] = []
    text = output.rstrip()
    lines = text[-_window(size) :].split("\n")[len(text) > _window(size) :]  # the first one may be cut
    for line in reversed(list(_split(lines, size))):
        if (row := read_row(line, size)) is not None:
            rows.insert(0, row)
            if len(rows) == size:
                return "".join(rows)
        elif not _between_rows(line, size):
            return None
    return None


def _between_rows(line: str, size: int) -> bool:
    return not line.strip() or (len(line) <= _longest(size) and _RULE.fullmatch(line) is not None)


def _split(lines: Iterable[str], size: int) -> Iterable[str]:
    """Yields the lines; a line with several rows of a list of lists is split."""
    for line in lines:
        if len(line) > size * _longest(size):
            yield line
        else:
            yield from _ROWS_OF_A_LINE.sub("]\n[", line.rstrip("\r")).split("\n")


def _longest(size: int) -> int:
    """Returns the most characters of a row."""
    return 16 * size + 32


def _window(size: int) -> int:
    """Returns the characters to read for a grid, including borders and blank lines."""
    return 4 * size * _longest(size)
