"""Grids and scripted players of Sudoku, and all 4 x 4 grids by brute force."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

from fakes.scripted_episodes import Script
from hypothesis import strategies as st

from verl_atgrpo.environments.sudoku.grid import State, SudokuTask, enter

STYLES = [{"style": "full", "tool": "grid"}, {"style": "compact", "tool": "grid"}]
ALL_OPTIONS = [*STYLES, {"style": "full", "tool": "python"}]


def all_4x4() -> list[str]:
    """Every full 4x4 grid, by brute force over rows: an independent check of the rules."""
    rows = list(itertools.permutations("1234"))
    boxes = [[(r, c), (r, c + 1), (r + 1, c), (r + 1, c + 1)] for r in (0, 2) for c in (0, 2)]
    return [
        "".join(map("".join, grid))
        for grid in itertools.product(rows, repeat=4)
        if all(len(set(column)) == 4 for column in zip(*grid, strict=True))
        and all(len({grid[r][c] for r, c in box}) == 4 for box in boxes)
    ]


FULL_4X4 = all_4x4()


def fitting(givens: str) -> list[str]:
    """The full 4x4 grids that keep `givens`."""
    return [full for full in FULL_4X4 if all(a in (".", b) for a, b in zip(givens, full, strict=True))]


def grid(drawing: str) -> str:
    return drawing.replace(" ", "").replace("\n", "")


def rows(text: str, gap: str = "", size: int = 4) -> str:
    return "\n".join(gap.join(text[start : start + size]) for start in range(0, len(text), size))


PUZZLE = SudokuTask(4, grid("12.. ..12 2..3 .3.1"), grid("1234 3412 2143 4321"))
"""Eight holes, so one correct digit is an eighth."""
STANDING, SOLVED = PUZZLE.givens, PUZZLE.solution
RIGHT = grid("123. ..12 2..3 .3.1")
RIGHT_TOO = grid("12.. 3.12 2..3 .3.1")
WRONG = grid("124. ..12 2..3 .3.1")
WRONG_TOO = grid("12.. 4.12 2..3 .3.1")
"""Wrong, but no rule is broken yet."""
CLASH = grid("1233 3412 2143 4321")
"""Two 3s in row 1, and one of them clashes with a given; the other six digits are right."""
CHANGED = grid("2134 3412 2143 4321")
STATES = [
    functools.reduce(enter, answers, State.initial(PUZZLE)) for answers in ([], [RIGHT], [WRONG], [RIGHT, CLASH])
]
WIKIPEDIA = grid(
    "53..7.... 6..195... .98....6. 8...6...3 4..8.3..1 7...2...6 .6....28. ...419..5 ....8..79",
)
WIKIPEDIA_SOLVED = grid(
    "534678912 672195348 198342567 859761423 426853791 713924856 961537284 287419635 345286179",
)


def full(text: str) -> str:
    return f"Grid:\n{rows(text, ' ')}"


def written(text: str, options: dict[str, Any]) -> str:
    return full(text) if options["style"] == "full" else rows(text)


def grids_in(prompt: str) -> list[str]:
    """All 4x4 grids in a prompt."""
    lines = [line.replace(" ", "").partition(">")[0] for line in prompt.split("\n")]
    marks = "".join("x" if re.fullmatch("[.1-4]{4}", line) else "-" for line in lines)
    return [
        "".join(lines[m.start() + k : m.start() + k + 4])
        for m in re.finditer("x+", marks)
        for k in range(0, len(m.group()), 4)
    ]


def oracle(options: dict[str, Any]) -> Script:
    return lambda prompt, k: written(fitting(grids_in(prompt)[0])[0], options)


entries = st.lists(st.sampled_from(".1234"), min_size=16, max_size=16).map("".join)
partial = st.lists(st.booleans(), min_size=16, max_size=16).map(
    lambda kept: "".join(b if keep else a for a, b, keep in zip(STANDING, SOLVED, kept, strict=True))
)
on_givens = entries.map(lambda text: "".join(a if a != "." else b for a, b in zip(STANDING, text, strict=True)))
