"""The result file of an evaluation: one JSON line about its settings, then one for every episode.

An episode is written when it ends, so a killed run loses only those under way, and the next run with the same settings
continues the file.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

_FORMAT = "verl-atgrpo-eval/1"
_START = f'{{"format": "{_FORMAT}"'
"""How every file begins: nothing else is ever repaired or appended to."""


class EpisodeKey(NamedTuple):
    """Which episode of an evaluation."""

    task: int
    """Index of the task in the validation split."""
    seed: int
    """In the place of `at_grpo.seed`."""
    sample: int
    """Counts the episodes of this task and seed from 0."""


@dataclass(frozen=True)
class AgentUsage:
    """What one agent did in an episode."""

    policy: str
    decisions: int
    prompt_tokens: int
    generated_tokens: int
    truncated: int
    """Answers that ran into the length limit."""


@dataclass(frozen=True)
class Failure:
    """Why an episode has no outcome."""

    reason: str
    """One word, as `EpisodeFailed.reason`."""
    message: str


@dataclass(frozen=True)
class EpisodeRow:
    """One line of a result file."""

    task: int
    fingerprint: str
    """Digest of the task's fingerprint: equal for equal problems, also in other files."""
    seed: int
    sample: int
    success: bool
    team_reward: float
    metrics: dict[str, float]
    turns: int
    """The largest number of decisions that any one agent took."""
    decisions: int
    """Of all agents together."""
    agents: dict[str, AgentUsage]
    failed: Failure | None
    """Set for an episode without an outcome; it has `success` False and what was used up to then."""
    seconds: float

    @property
    def key(self) -> EpisodeKey:
        """Which episode this is."""
        return EpisodeKey(self.task, self.seed, self.sample)

    @property
    def generated_tokens(self) -> int:
        """Tokens that all agents generated."""
        return sum(agent.generated_tokens for agent in self.agents.values())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(agent.prompt_tokens for agent in self.agents.values())

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EpisodeRow:
        """Reads a line's object; raises TypeError or KeyError for another one."""
        return cls(
            **{
                **values,
                "agents": {name: AgentUsage(**usage) for name, usage in values["agents"].items()},
                "failed": None if values["failed"] is None else Failure(**values["failed"]),
            }
        )


@dataclass(frozen=True)
class Results:
    """A result file's content."""

    settings: dict[str, Any]
    """What an episode's distribution depends on."""
    made_by: dict[str, Any] = field(default_factory=dict)
    """The command that started the file."""
    rows: dict[EpisodeKey, EpisodeRow] = field(default_factory=dict)
    """The last line of every episode: one that failed may have been tried again."""


def read(path: Path) -> Results:
    """Reads a result file; a last line that was cut off is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no result file, or a line within is broken.
    """
    text = path.read_text(encoding="utf-8")
    _check_start(path, text)
    lines = text[: text.rfind("\n") + 1].splitlines()
    if not lines:
        return Results({})
    header = json.loads(lines[0])
    results = Results(header["settings"], header["made_by"])
    for number, line in enumerate(lines[1:], 2):
        try:
            row = EpisodeRow.from_json(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not an episode of an evaluation ({error})") from error
        results.rows[row.key] = row
    return results


def _check_start(path: Path, text: str) -> None:
    if not text.startswith(_START) and not _START.startswith(text):
        raise ValueError(f"{path} is no result file of verl-atgrpo eval ({_FORMAT}): name another file")


class ResultFile:
    """A result file open for appending; no other process may write to it meanwhile."""

    def __init__(self, path: Path, settings: Mapping[str, Any], made_by: Mapping[str, Any]) -> None:
        """Opens or makes the file, repairs its end and reads what is there.

        Args:
            path: the file; its folder is made if it is not there.
            settings: what an episode's distribution depends on, as JSON can hold it.
            made_by: further facts, written into a new file only.

        Raises:
            ValueError: the file is something else, or of other settings: their episodes must not be mixed.
            BlockingIOError: another process is writing to it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            self._lock(path)
            self.rows = self._open(path, json.loads(json.dumps(settings)), made_by)
        except BaseException:
            self._file.close()
            raise

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"{path}: another evaluation is writing to it") from error

    def _open(self, path: Path, settings: dict[str, Any], made_by: Mapping[str, Any]) -> dict[EpisodeKey, EpisodeRow]:
        known = read(path)
        if known.settings:
            different = differences(known.settings, settings)
            if different:
                raise ValueError(f"{path} was made with other settings, name another file: {'; '.join(different)}")
        # A line without its end was being written when the process was killed.
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        if not known.settings:
            self._write({"format": _FORMAT, "settings": settings, "made_by": dict(made_by)})
        return known.rows

    def add(self, row: EpisodeRow) -> None:
        """Writes an episode; it is with the operating system when this returns."""
        self._write(asdict(row))
        self.rows[row.key] = row

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._file.close()


def differences(known: Any, wanted: Any, where: str = "") -> list[str]:
    """Returns a line for every value in which two settings differ."""
    if isinstance(known, Mapping) and isinstance(wanted, Mapping):
        return [
            line
            for key in sorted({*known, *wanted})
            for line in differences(known.get(key), wanted.get(key), f"{where}.{key}" if where else str(key))
        ]
    return [] if known == wanted else [f"{where} was {known!r}, is {wanted!r}"]
