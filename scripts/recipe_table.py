"""The rows of recipes/README.md's table: recipes, each with what the command line adds to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).parents[1] / "recipes" / "README.md"


class Job(NamedTuple):
    """What a command trains."""

    recipe: str
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.recipe, *self.overrides))


def jobs(text: str | None = None) -> list[Job]:
    """Returns the jobs of the table in `text`, by default the README's, in its order."""
    lines = (README.read_text() if text is None else text).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| `--config-name=` |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        recipes, added, *_ = (re.findall(r"`(.+?)`", cell) for cell in line.split("|")[1:])
        found += [Job(recipe, tuple(" ".join(added).split())) for recipe in recipes]
    return found
