"""The files of a training's records: written here, read for the report (`lab/report/records.py`)."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FOLDER = "record"
"""Folder of the files beside a training's checkpoints."""
FORMAT = 1
METRICS, TRAIN, VAL = "metrics", "train", "val"
_FILE = re.compile(rf"({METRICS}|{TRAIN}|{VAL})-(\d{{4,}})-(\d{{4,}})\.jsonl")
_FILES = 8
"""Number of files that share the allowed megabytes: rotation deletes an eighth at a time."""


def record_files(folder: Path) -> dict[Path, tuple[str, int, int]]:
    """Returns record file -> (kind, attempt, part), for all in a folder."""
    found = {path: _FILE.fullmatch(path.name) for path in folder.glob("*.jsonl")}
    return {path: (name[1], int(name[2]), int(name[3])) for path, name in found.items() if name}


def metrics_row(step: int, seconds: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of the metrics file (time in seconds since the epoch), of numbers alone; text for nan and inf."""
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
        """Starts an attempt; the first rows create the files, and their folder.

        `max_megabytes` is the most that all files of episodes may have. `from_step` is the step that the attempt
        resumes from; existing rows of later steps are superseded. `about` describes the run for the report.
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
                file.write(json.dumps(self._header, ensure_ascii=False).encode(errors="replace") + b"\n")
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
