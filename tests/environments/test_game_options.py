"""Options of the drafting games: each error is one line with the key and the value."""

from __future__ import annotations

import math
import os
import re
import sys
from typing import Any

import pytest

from verl_atgrpo import EnvironmentConfigError, make

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "plan_path": [
        ({"size": 1}, "size=1"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_moves": 0}, "max_moves=0"),
        ({"wall_density": 0.7}, "wall_density=0.7"),
        ({"wall_density": -0.1}, "wall_density=-0.1"),
        ({"wall_density": math.nan}, "wall_density=nan"),
        ({"min_distance": 0}, "min_distance=0"),
        ({"size": 5, "min_distance": 6}, "min_distance=6"),
        ({"min_distance": 3, "max_distance": 2}, "max_distance=2 is below min_distance=3"),
        ({"tool": "bash"}, "tool='bash'"),
        ({"style": "terse"}, "style='terse'"),
        ({"style": "compact"}, "style=compact"),
        ({"few_shot": 2}, "few_shot=2"),
        ({"few_shot": 2, "tool": "moves", "style": "compact"}, "few_shot=2"),
        ({"size": "5"}, "size='5'"),
        ({"size": 5.5}, "size=5.5"),
        ({"max_turns": None}, "max_turns=None"),
        ({"max_moves": [4]}, "max_moves=[4]"),
        ({"wall_density": "high"}, "wall_density='high'"),
        ({"few_shot": -1, "tool": "moves"}, "few_shot=-1"),
        ({"few_shot": "two", "tool": "moves"}, "few_shot='two'"),
    ],
    "sokoban": [
        ({"size": 4}, "size=4"),
        ({"size": "6"}, "size='6'"),
        ({"size": True}, "size=True"),
        ({"boxes": 0}, "boxes=0"),
        ({"boxes": 1.0}, "boxes=1.0"),
        ({"wall_density": 0.7}, "wall_density=0.7"),
        ({"wall_density": math.nan}, "wall_density=nan"),
        ({"wall_density": "high"}, "wall_density='high'"),
        ({"min_solution": 0}, "min_solution=0"),
        ({"max_solution": 0}, "max_solution=0"),
        ({"min_solution": 9, "max_solution": 8}, "max_solution=8 is below min_solution=9"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_moves": None}, "max_moves=None"),
        ({"tool": "bash"}, "tool='bash'"),
        ({"style": "compact"}, "style is not an option"),
        ({"seed": "one"}, "seed='one'"),
        ({"levels": 3}, "levels=3"),
        ({"levels": "/nowhere/at/all.txt"}, "levels='/nowhere/at/all.txt'"),
        ({"levels": os.curdir}, "levels='.'"),
        ({"levels": sys.executable}, "levels='"),
        *(({"levels": "any", name: 6}, f"{name}=6") for name in ("size", "boxes", "min_solution", "seed")),
        ({"levels": "any", "max_solution": 6}, "max_solution=6"),
        ({"levels": "any", "wall_density": 0.1}, "wall_density=0.1"),
    ],
    "sudoku": [
        ({"size": 6}, "size=6"),
        ({"size": "9"}, "size='9'"),
        ({"size": 4.0}, "size=4.0"),
        ({"size": [4]}, "size=[4]"),
        ({"clues": 3}, "clues=3"),
        ({"clues": 16}, "clues=16"),
        ({"clues": 17, "size": 9}, "clues=17"),
        ({"clues": 81, "size": 9}, "clues=81"),
        ({"clues": 8, "size": 9}, "clues=8"),
        ({"clues": True}, "clues=True"),
        ({"clues": "many"}, "clues='many'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_turns": 1.5}, "max_turns=1.5"),
        ({"tool": "moves"}, "tool='moves'"),
        ({"style": "terse"}, "style='terse'"),
        ({"style": "compact"}, "style=compact"),
        ({"holes": 8}, "holes is not an option"),
    ],
}


@pytest.mark.parametrize(
    ("game", "options", "named"), [(game, *case) for game, cases in REFUSED.items() for case in cases]
)
def test_option_errors_name_key_and_value(game: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=re.escape(f"at_grpo.environment.{named}")) as caught:
        make(game, **options)
    assert "\n" not in str(caught.value)
