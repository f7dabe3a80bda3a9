"""Reading the records of a run back, over all its attempts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from verl_atgrpo.report.records import FORMAT, METRICS, file_parts

logger = logging.getLogger(__name__)

FOLDER = "record"
EpisodeKey = tuple[str, int, int, int]
"""Split, step, task, episode."""


@dataclass
class Run:
    """What the records of a run say, without what was superseded."""

    about: dict[str, Any] = field(default_factory=dict)
    metrics: dict[int, dict[str, float | str]] = field(default_factory=dict)
    """Step -> metrics; values that were not finite are text."""
    episodes: dict[EpisodeKey, list[dict[str, Any]]] = field(default_factory=dict)
    """The decisions of every recorded episode, in their order."""


def find(run: Path) -> Path:
    """Returns the folder of records of a run; raises ValueError if it has none."""
    places = [run, run / FOLDER, run / "checkpoints" / FOLDER]
    for place in places:
        if any(file_parts(path) for path in place.glob("*.jsonl")):
            return place
    raise ValueError(
        f"{run}: no records here, in {FOLDER}/ or in checkpoints/{FOLDER}/; name the folder that is "
        "trainer.default_local_dir of a run with trainer.v1.trainer_mode=at_grpo and without at_grpo.record=null"
    )


def read(folder: Path) -> Run:
    """Reads all attempts, oldest first; raises ValueError for a file that is damaged other than in its last line."""
    known = [(path, parts) for path in folder.glob("*.jsonl") if (parts := file_parts(path))]
    files = sorted((attempt, kind, part, path) for path, (kind, attempt, part) in known)
    run = Run()
    for _, attempt in groupby(files, key=lambda file: file[0]):
        begun = False
        episodes: dict[EpisodeKey, list[dict[str, Any]]] = {}
        for _, kind, _, path in attempt:
            rows = _rows(path)
            header = next(rows, None)
            if header is None:
                continue
            if header.get("format") != FORMAT:
                raise ValueError(f"{path}: format {header.get('format')!r}, this version reads format {FORMAT}")
            if not begun:
                _supersede(run, header)
                begun = True
            for row in rows:
                if kind == METRICS:
                    run.metrics[row["step"]] = {**run.metrics.get(row["step"], {}), **row["data"]}
                else:
                    key = (row["split"], row["step"], row["task"], row["episode"])
                    episodes.setdefault(key, []).append(row)
        run.episodes.update(episodes)
    for decisions in run.episodes.values():
        decisions.sort(key=lambda row: row["decision"])
    return run


def _supersede(run: Run, header: dict[str, Any]) -> None:
    """Drops what an attempt does again: all steps after the one it goes on from."""
    last = header["from_step"]
    run.about = header["about"]
    run.metrics = {step: row for step, row in run.metrics.items() if last > 0 and step <= last}
    run.episodes = {key: rows for key, rows in run.episodes.items() if last > 0 and key[1] <= last}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text().split("\n")
    # A complete file ends in a newline: what stands behind the last one was not written to its end.
    if torn := lines.pop():
        logger.warning("%s: the last line is torn and left out (%d characters)", path, len(torn))
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error})") from error
