"""Writing records during a training, and reading them for the report."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Strict, Tag, TypeAdapter, model_validator

from verl_atgrpo.files import FileError, Number, Whole, lines, parse

logger = logging.getLogger(__name__)

FORMAT = 1
METRICS, TRAIN, VAL = "metrics", "train", "val"
_FILE = re.compile(rf"({METRICS}|{TRAIN}|{VAL})-(\d{{4,}})-(\d{{4,}})\.jsonl")
_FILES = 8
"""Number of files that share the allowed megabytes: rotation deletes an eighth at a time."""
_MOST = {METRICS: 256 << 20, TRAIN: 1 << 30, VAL: 1 << 30}
"""Most bytes of all files of a kind that are read: the report holds them in memory."""


def record_files(folder: Path) -> dict[Path, tuple[str, int, int]]:
    """Returns record file -> (kind, attempt, part), for all in a folder."""
    found = {path: _FILE.fullmatch(path.name) for path in folder.glob("*.jsonl")}
    return {path: (name[1], int(name[2]), int(name[3])) for path, name in found.items() if name}


def metrics_row(step: int, seconds: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of the metrics file; values that are not numbers are left out, non-finite ones become text.

    Args:
        step: the training step.
        seconds: since the epoch.
        values: the metrics, as passed to verl's loggers.
    """
    numbers = {}
    for name, value in values.items():
        with suppress(TypeError, ValueError):
            numbers[name] = plain(float(value))
    return {"step": step, "time": round(seconds, 3), "data": numbers}


def plain(number: float) -> float | str:
    """Returns a number for JSON: as text, `nan` or `inf`, if it is not finite."""
    return number if math.isfinite(number) else str(number)


class RecordFiles:
    """Record files of one attempt at a run; a resumed run is a new attempt with new files."""

    def __init__(self, folder: Path, max_megabytes: float, from_step: int, about: Mapping[str, Any]) -> None:
        """Starts an attempt; the first rows create the files.

        Args:
            folder: folder of the files, created if missing.
            max_megabytes: most megabytes of all files of episodes.
            from_step: the step that the attempt resumes from; existing rows of later steps are superseded.
            about: description of the run for the report.
        """
        self._folder = folder
        self._max_bytes = int(max_megabytes * 1e6)
        self._attempt = 1 + max((attempt for _, attempt, _ in record_files(folder).values()), default=0)
        self._header = {"format": FORMAT, "from_step": from_step, "about": about}
        self._part = {METRICS: 0, TRAIN: 0, VAL: 0}
        self._failing = False

    def append(self, kind: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes rows; on an OSError it logs and drops them, so that the training goes on."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if not lines:
            return
        try:
            self._append(kind, lines.encode(errors="replace"))
        except OSError as error:
            if not self._failing:
                logger.error("%s: records cannot be written (%s); training goes on without them", self._folder, error)
            self._failing = True
            self._part[kind] += 1  # the last line of the file may be incomplete
        else:
            if self._failing:
                logger.error("%s: records are written again; some are missing", self._folder)
            self._failing = False

    def _append(self, kind: str, lines: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(kind)
        if kind != METRICS and path.exists() and path.stat().st_size + len(lines) > self._max_bytes / _FILES:
            self._part[kind] += 1
            path = self._path(kind)
        with path.open("ab") as file:
            if file.tell() == 0:
                file.write(json.dumps(self._header, ensure_ascii=False).encode() + b"\n")
            file.write(lines)
        if kind != METRICS:
            self._rotate()

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}-{self._attempt:04d}-{self._part[kind]:04d}.jsonl"

    def _rotate(self) -> None:
        """Deletes the oldest files of training episodes, then those of validation, which show progress best."""
        current = {self._path(kind) for kind in self._part}
        files = record_files(self._folder)
        sizes = {path: path.stat().st_size for path, (kind, *_) in files.items() if kind != METRICS}
        total = sum(sizes.values())
        for path in sorted(sizes, key=files.__getitem__):  # "train" sorts before "val"
            if total > self._max_bytes and path not in current:
                path.unlink()
                total -= sizes[path]


FOLDER = "record"
EpisodeKey = tuple[str, int, int, int]
"""Split, step, task, episode."""


class _Line(BaseModel):
    # A newer version may add keys. Those that were not checked are not passed on.
    model_config = ConfigDict(extra="ignore")


class _Branch(BaseModel):
    model_config = ConfigDict(extra="allow")

    at: str | dict[str, Whole]


class _Section(BaseModel):
    """What the report's description of a run reads of `at_grpo`."""

    model_config = ConfigDict(extra="allow")

    environment: dict[str, Any] = {}
    branch: _Branch | None = None
    policies: dict[str, Any] | None = None
    candidates: Whole | dict[str, Whole] = 0
    """Of all agents, or by agent."""


class _About(BaseModel):
    """What the report's description of a run reads."""

    model_config = ConfigDict(extra="allow")

    section: _Section = _Section()
    models: dict[str, str] = {}
    frozen: list[str] = []


class _Header(_Line):
    format: Any
    from_step: Whole = 0
    about: _About = _About()


class _Metrics(_Line):
    step: Whole
    data: dict[str, Number | Literal["nan", "inf", "-inf"]]


class _Candidate(_Line):
    text: str
    tokens: Whole
    team: Number
    local: Number
    reward: Number
    advantage: Number | Literal["nan", "inf", "-inf"] | None
    truncated: Annotated[bool, Strict()]
    version: Annotated[list[Whole], Field(min_length=2, max_length=2)] | None = None


class _Failed(_Line):
    """The line of a failed episode, and the start of every decision's."""

    step: Whole
    split: Literal["train", "val"]
    task: Whole
    episode: Whole
    decision: Whole
    success: Annotated[bool, Strict()]
    episode_reward: Number
    failed: Annotated[bool, Strict()] = False


class _Decision(_Failed):
    agent: str
    turn: Whole
    scope: str = ""
    policy: str
    prompt: str
    prompt_tokens: Whole
    committed: Whole
    candidates: Annotated[list[_Candidate], Field(min_length=1)]

    @model_validator(mode="after")
    def _committed(self) -> _Decision:
        if self.committed >= len(self.candidates):
            raise ValueError(f"committed={self.committed}: there are {len(self.candidates)} candidates")
        return self


def _kind(line: Any) -> str:
    # Tags are in pydantic's location of an error, and must not be keys of a line.
    return "~failed" if isinstance(line, dict) and line.get("failed") is True else "~decision"


_HEADER, _METRICS = TypeAdapter(_Header), TypeAdapter(_Metrics)
_EPISODES: TypeAdapter[_Failed] = TypeAdapter(
    Annotated[Annotated[_Failed, Tag("~failed")] | Annotated[_Decision, Tag("~decision")], Discriminator(_kind)]
)


@dataclass
class Run:
    """Records of a run, without superseded rows."""

    about: dict[str, Any] = field(default_factory=dict)
    metrics: dict[int, dict[str, float | str]] = field(default_factory=dict)
    """Step -> metrics; non-finite values are text."""
    episodes: dict[EpisodeKey, list[dict[str, Any]]] = field(default_factory=dict)
    """Episode -> its decisions in order."""


def find(run: Path) -> Path:
    """Returns the folder with a run's records; raises ValueError if there is none."""
    places = [run, run / FOLDER, run / "checkpoints" / FOLDER]
    for place in places:
        if record_files(place):
            return place
    raise ValueError(
        f"{run}: no records here, in {FOLDER}/ or in checkpoints/{FOLDER}/; name the folder that is "
        "trainer.default_local_dir of a run with trainer.v1.trainer_mode=at_grpo and without at_grpo.record=null"
    )


def read(folder: Path) -> Run:
    """Reads all attempts, oldest first.

    Raises:
        FileError: damage other than an incomplete last line, or more bytes than fit into memory.
        OSError: a file cannot be read.
    """
    known = record_files(folder)
    for kind, most in _MOST.items():
        size = sum(path.stat().st_size for path, parts in known.items() if parts[0] == kind)
        if size > most:
            raise FileError(
                f"{folder}: the files {kind}-*.jsonl have {size:,} bytes, at most {most:,} are read: move the oldest "
                "away"
            )
    files = sorted((attempt, kind, part, path) for path, (kind, attempt, part) in known.items())
    run = Run()
    for _, attempt in groupby(files, key=lambda file: file[0]):
        begun = False
        episodes: dict[EpisodeKey, list[dict[str, Any]]] = {}
        for _, kind, _, path in attempt:
            for number, line in lines(path):
                if number == 1:
                    header = parse(line, _HEADER, "the first line of a record file", path, number)
                    if header.format != FORMAT:
                        raise FileError(f"{path}:1: format {header.format!r}, this version reads format {FORMAT}")
                    if not begun:
                        _supersede(run, header)
                        begun = True
                elif kind == METRICS:
                    row = parse(line, _METRICS, "a line of metrics", path, number)
                    run.metrics.setdefault(row.step, {}).update(row.data)
                else:
                    made = parse(line, _EPISODES, "a recorded decision", path, number)
                    key = (made.split, made.step, made.task, made.episode)
                    episodes.setdefault(key, []).append(made.model_dump(exclude_unset=True))
        run.episodes.update(episodes)
    for decisions in run.episodes.values():
        decisions.sort(key=lambda row: row["decision"])
    return run


def _supersede(run: Run, header: _Header) -> None:
    """Drops all steps after the one that an attempt resumes from."""
    last = header.from_step
    run.about = header.about.model_dump(exclude_unset=True)
    run.metrics = {step: row for step, row in run.metrics.items() if last > 0 and step <= last}
    run.episodes = {key: rows for key, rows in run.episodes.items() if last > 0 and key[1] <= last}
