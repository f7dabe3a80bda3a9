"""Writing records: JSON lines in files of bounded size, the oldest episodes deleted first.

The format is documented in docs/report.md; `reader` reads it.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FORMAT = 1
METRICS, TRAIN, VAL = "metrics", "train", "val"
_FILE = re.compile(rf"({METRICS}|{TRAIN}|{VAL})-(\d{{4,}})-(\d{{4,}})\.jsonl")
_FILES = 8
"""Files among which the allowed megabytes are split: deleting the oldest one loses an eighth."""


def file_parts(path: Path) -> tuple[str, int, int] | None:
    """Returns (kind, attempt, part) of a file of records, or None if it is none."""
    found = _FILE.fullmatch(path.name)
    return (found[1], int(found[2]), int(found[3])) if found else None


def metrics_row(step: int, seconds: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of the metrics file; what is no number is left out, what is not finite becomes text.

    Args:
        step: the training step.
        seconds: since the epoch.
        values: as verl's loggers get them.
    """
    numbers = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        numbers[name] = plain(number)
    return {"step": step, "time": round(seconds, 3), "data": numbers}


def plain(number: float) -> float | str:
    """Returns a number as JSON can hold it: as text, `nan` or `inf`, if it is not finite."""
    return number if math.isfinite(number) else str(number)


class RecordFiles:
    """The files of one attempt at a run: a resumed run is another attempt, in files of its own."""

    def __init__(self, folder: Path, max_megabytes: float, from_step: int, about: Mapping[str, Any]) -> None:
        """Begins an attempt; nothing is written yet.

        Args:
            folder: gets the files; made if it is not there.
            max_megabytes: how much the files of episodes may take together.
            from_step: the step the attempt goes on from; rows of later steps that are there already no longer count.
            about: what the report says about the run.
        """
        self._folder = folder
        self._max_bytes = int(max_megabytes * 1e6)
        self._attempt = 1 + max((attempt for _, attempt, _ in self._existing().values()), default=0)
        self._header = {"format": FORMAT, "from_step": from_step, "about": about}
        self._part = {METRICS: 0, TRAIN: 0, VAL: 0}
        self._failing = False

    def append(self, kind: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes rows; an error of the disk is logged and costs these rows only, not the training."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if not lines:
            return
        try:
            self._append(kind, lines.encode(errors="replace"))
        except OSError as error:
            if not self._failing:
                logger.error("%s: no records can be written (%s); training goes on without them", self._folder, error)
            self._failing = True
            self._part[kind] += 1  # the last line of the file may be torn
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

    def _existing(self) -> dict[Path, tuple[str, int, int]]:
        return {path: parts for path in self._folder.glob("*.jsonl") if (parts := file_parts(path))}

    def _rotate(self) -> None:
        """Deletes the oldest files of training episodes, then those of validation: there one sees the learning."""
        current = {self._path(kind) for kind in self._part}
        sizes = {path: path.stat().st_size for path, parts in self._existing().items() if parts[0] != METRICS}
        total = sum(sizes.values())
        for path in sorted(sizes, key=lambda path: file_parts(path) or ()):  # training first, by the alphabet
            if total > self._max_bytes and path not in current:
                path.unlink()
                total -= sizes[path]
