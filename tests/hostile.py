"""The corpus of hostile programs in tests/sandbox/programs: what each tries, and where that is expected to work.

Its README says how to add one; `scripts/sandbox_table.py` writes the table of docs/sandbox.md from the corpus.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_atgrpo.sandbox import runner
from verl_atgrpo.sandbox.launcher import LEVELS

FOLDER = Path(__file__).parent / "sandbox" / "programs"
USERS = ("root", "user")
"""The job runs as root, whose programs get users of their own, or as another user, whose programs are his."""
_ROW_KEYS = {"can", "cost", "works", "needs", "unless", "programs"}
_PROGRAM_KEYS = {"tries", "code", "cost", "works", "needs", "unless", "limits", "then", "expect", "alone", "slow"}


@dataclass(frozen=True, eq=False)
class Program:
    """One hostile program; the README of the folder has the meaning of the fields."""

    tries: str
    code: str
    cost: str
    works: Mapping[str, Sequence[str]]
    """User of the job -> levels at which the program reaches its aim."""
    limits: Mapping[str, Any]
    expect: Mapping[str, Any]
    then: str = ""
    needs: str = ""
    unless: str = ""
    alone: bool = False
    slow: bool = False

    def works_at(self, level: str, user: str) -> bool:
        """Returns whether the program is expected to reach its aim on this machine."""
        return level in self.works.get(user, ()) and not (self.unless == "cgroup" and runner.cgroup())

    @property
    def can_run(self) -> bool:
        """Whether this machine's processor is the one that the program needs."""
        return not self.needs or platform.machine() == self.needs.replace("-", "_")


@dataclass(frozen=True)
class Row:
    """What a program can do at some levels: a row of the table, with all programs that try it."""

    can: str
    programs: tuple[Program, ...]

    def cell(self, level: str) -> str:
        """Returns "no", "yes", or "yes*" if it does not work where the job runs as root."""
        root, user = (any(level in program.works.get(name, ()) for program in self.programs) for name in USERS)
        if root and not user:
            raise ValueError(f"{self.can}, {level}: works as root and not as another user, which the table cannot say")
        return "no" if not user else "yes" if root else "yes\\*"


@functools.cache
def corpus() -> tuple[Row, ...]:
    """Returns all rows, in the order of the files' names; raises ValueError for an entry that cannot be read."""
    return tuple(map(read, sorted(FOLDER.glob("*.yaml"))))


def programs() -> Iterator[Program]:
    """Yields the programs of all rows."""
    for row in corpus():
        yield from row.programs


def read(path: Path) -> Row:
    """Returns the row of a file; raises ValueError that names file and program."""
    row = yaml.safe_load(path.read_text())
    check(path.name, row, _ROW_KEYS, {"can", "cost", "programs"})
    shared = {key: value for key, value in row.items() if key not in ("can", "programs")}
    found = []
    for entry in row["programs"]:
        where = f"{path.name}: {entry.get('tries')}"
        check(where, entry, _PROGRAM_KEYS, {"tries", "code"})
        entry = {"works": {}, "limits": {}, "expect": {}, **shared, **entry}
        for user, levels in entry["works"].items():
            if user not in USERS or not set(levels) <= set(LEVELS):
                raise ValueError(f"{where}: works={{{user}: {levels}}}: users are {USERS}, levels {LEVELS}")
        found.append(Program(**entry))
    return Row(row["can"], tuple(found))


def check(where: str, entry: Mapping[str, Any], known: set[str], required: set[str]) -> None:
    """Raises ValueError if an entry has unknown keys or lacks required ones."""
    if not set(entry) <= known or not required <= set(entry):
        raise ValueError(f"{where}: keys are {sorted(entry)}; {sorted(required)} are required, {sorted(known)} known")


def table() -> str:
    """Returns the table of docs/sandbox.md, in which a "no" is an empty cell, and what works at no level."""
    head = ["a program can ...", *(f"`{level}`" for level in LEVELS)]
    cells = {row.can: [row.cell(level).removeprefix("no") for level in LEVELS] for row in corpus()}
    rows = [[can, *found] for can, found in cells.items() if any(found)]
    never = "; ".join(can for can, found in cells.items() if not any(found))
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))
    return f"{lines}\n\nAt no level: {never}."


def seen_users() -> tuple[str, ...]:
    """Returns the users as whom programs can be tried here: root can try both."""
    return USERS if os.getuid() == 0 else ("user",)
