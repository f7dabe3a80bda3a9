"""Reads the records of a training for the report."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, Tag, TypeAdapter, model_validator

from verl_atgrpo.files import FileError, Number, Whole, lines, parse
from verl_atgrpo.train.trainer.record_files import FOLDER, FORMAT, METRICS, TRAIN, VAL, record_files

logger = logging.getLogger(__name__)

_MOST = {METRICS: 256 << 20, TRAIN: 1 << 30, VAL: 1 << 30}
"""Most bytes of all files of a kind that are read: the report holds them in memory."""
EpisodeKey = tuple[str, int, int, int]
"""Split, step, task, episode."""


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Branch(_Open):
    at: str | dict[str, Whole]


class _Section(_Open):
    """What the report's description of a run reads of `at_grpo`."""

    environment: dict[str, Any] = {}
    branch: _Branch | None = None
    policies: dict[str, Any] | None = None
    candidates: Whole | dict[str, Whole] = 0
    """Of all agents, or by agent."""


class _About(_Open):
    """What the report's description of a run reads."""

    section: _Section = _Section()
    models: dict[str, str] = {}
    frozen: list[str] = []


# A newer version may add keys to these; those that were not checked are not passed on.


class _Header(BaseModel):
    format: Any
    from_step: Whole = 0
    about: _About = _About()


class _Metrics(BaseModel):
    step: Whole
    data: dict[str, Number | Literal["nan", "inf", "-inf"]]


class _Candidate(BaseModel):
    text: str
    tokens: Whole
    team: Number
    local: Number
    reward: Number
    advantage: Number | Literal["nan", "inf", "-inf"] | None
    truncated: StrictBool
    critic: Number | None = None
    version: Annotated[list[Whole], Field(min_length=2, max_length=2)] | None = None


class _Failed(BaseModel):
    """The line of a failed episode, and the start of every decision's."""

    step: Whole
    split: Literal["train", "val"]
    task: Whole
    episode: Whole
    decision: Whole
    success: StrictBool
    episode_reward: Number
    failed: StrictBool = False


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

    Raises FileError for damage other than an incomplete last line, or more bytes than fit into memory; or OSError.
    """
    known = record_files(folder)
    for kind, most in _MOST.items():
        size = sum(path.stat().st_size for path, parts in known.items() if parts[0] == kind)
        if size > most:
            most_read = f"at most {most:,} are read: move the oldest away"
            raise FileError(f"{folder}: the files {kind}-*.jsonl have {size:,} bytes, {most_read}")
    files = sorted((attempt, kind, part, path) for path, (kind, attempt, part) in known.items())
    run = Run()
    for _, attempt in groupby(files, key=lambda file: file[0]):
        header, made = None, Run()
        for _, kind, _, path in attempt:
            for number, line in lines(path):
                if number == 1:
                    found = _header(path, line)
                    header = header or found
                elif kind == METRICS:
                    row = parse(line, _METRICS, "a line of metrics", path, number)
                    made.metrics.setdefault(row.step, {}).update(row.data)
                else:
                    decision = parse(line, _EPISODES, "a recorded decision", path, number)
                    key = (decision.split, decision.step, decision.task, decision.episode)
                    made.episodes.setdefault(key, []).append(decision.model_dump(exclude_unset=True))
        if header is not None:
            _add(run, made, header)
    for decisions in run.episodes.values():
        decisions.sort(key=lambda row: row["decision"])
    return run


def about(folder: Path) -> dict[str, Any]:
    """Returns what the newest attempt's records say of the run; raises FileError or OSError."""
    _, path = max((parts[1], path) for path, parts in record_files(folder).items())
    found = next(iter(lines(path)), None)
    return {} if found is None else _header(path, found[1]).about.model_dump(exclude_unset=True)


def _header(path: Path, line: bytes) -> _Header:
    header: _Header = parse(line, _HEADER, "the first line of a record file", path, 1)
    if header.format != FORMAT:
        raise FileError(f"{path}:1: format {header.format!r}, this version reads format {FORMAT}")
    return header


def _add(run: Run, made: Run, header: _Header) -> None:
    """Adds an attempt. It supersedes the steps after the one that it resumed from, but not if it has trained nothing.

    Such an attempt has validated a checkpoint, or ended early: it adds what is not there yet.
    """
    last = header.from_step
    if not run.about or any(step > last for step in made.metrics):
        run.about = header.about.model_dump(exclude_unset=True)
        run.metrics = {step: row for step, row in run.metrics.items() if 0 < last >= step}
        run.episodes = {key: rows for key, rows in run.episodes.items() if 0 < last >= key[1]}
        for step, row in made.metrics.items():
            run.metrics.setdefault(step, {}).update(row)
        run.episodes |= made.episodes
    else:
        run.metrics = made.metrics | run.metrics
        run.episodes = made.episodes | run.episodes
