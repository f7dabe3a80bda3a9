"""The table of what was measured, its JSON, and the comparison with a baseline of the same card."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from one_gpu.measures import Measure

WORSE = 0.05
"""Share by which a steady figure may be worse than the baseline."""
_LOG_LINES = 30


@dataclass
class Result:
    """What became of a part."""

    name: str
    state: Literal["done", "failed", "not run"]
    does: str = ""
    seconds: float = 0.0
    measures: list[Measure] = field(default_factory=list)
    reason: str = ""
    """Why it failed, or was not run."""
    log: str = ""
    """The last lines of a failed one's log."""


@dataclass
class Check:
    """One run of all parts."""

    card: str
    about: dict[str, Any]
    """Commit, versions, options, date."""
    results: list[Result]

    def save(self, path: Path) -> None:
        """Writes it as JSON; what is no number becomes null."""
        path.write_bytes(TypeAdapter(Check).dump_json(self, indent=1) + b"\n")

    @staticmethod
    def load(path: Path) -> Check:
        """Reads what `save` has written."""
        return TypeAdapter(Check).validate_json(path.read_bytes())

    @property
    def failed(self) -> bool:
        """Whether a part failed or a target was missed."""
        return any(
            result.state == "failed" or any(measure.met is False for measure in result.measures)
            for result in self.results
        )


def worse(check: Check, baseline: Check) -> list[str]:
    """Returns a line for each steady figure that is more than `WORSE` worse than the baseline's, or is missing."""
    now = {(result.name, measure.name): measure for result in check.results for measure in result.measures}
    ended = {result.name for result in check.results if result.state == "done"}
    lines = []
    for result in baseline.results:
        for before in result.measures:
            if not before.steady or result.name not in ended:
                continue
            measure = now.get((result.name, before.name))
            if measure is None:
                lines.append(f"{result.name}, {before.name}: is not measured any more")
            elif not (lost := measure.worse_than(before.value)) <= WORSE:
                lines.append(
                    f"{result.name}, {before.name}: {_number(measure.value)} {before.unit}, {lost:.0%} worse than the "
                    f"baseline's {_number(before.value)}"
                )
    return lines


def table(check: Check, baseline: Check | None = None) -> str:
    """Returns everything as text: a row for each figure, then what failed, was not run, or got worse."""
    rows = [("part", "measured", "", "target", "", "baseline")]
    before = {}
    if baseline is not None:
        before = {(result.name, one.name): one.value for result in baseline.results for one in result.measures}
    for result in check.results:
        for number, one in enumerate(result.measures):
            bound = "" if one.target is None else f"{'<=' if one.better == 'lower' else '>='} {_number(one.target)}"
            verdict = {None: "", True: "met", False: "MISSED"}[one.met]
            old = before.get((result.name, one.name))
            name = result.name if number == 0 else ""
            value = f"{_number(one.value)} {one.unit}".strip()
            rows.append((name, one.name, value, bound, verdict, "" if old is None else _number(old)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    for result in check.results:
        if result.state == "failed":
            lines += ["", f"FAILED: {result.name} ({result.does}): {result.reason}", *_indented(result.log)]
    left = [result for result in check.results if result.state == "not run"]
    lines += ["", *(f"not run: {result.name} ({result.does}): {result.reason}" for result in left)] if left else []
    if baseline is not None:
        lost = worse(check, baseline)
        commit = baseline.about.get("commit", "an unknown commit")
        lines += ["", *(f"WORSE: {line}" for line in lost)]
        lines += [f"against the baseline of this card ({commit}): {len(lost) or 'nothing'} worse by over {WORSE:.0%}"]
    targets = [one.met for result in check.results for one in result.measures if one.met is not None]
    failed = sum(result.state == "failed" for result in check.results)
    lines += [
        "",
        f"{check.card}: {sum(targets)} of {len(targets)} targets met; of {len(check.results)} parts {failed} failed, "
        f"{len(left)} not run",
    ]
    return "\n".join(lines)


def last_lines(log: Path, most: int = _LOG_LINES) -> str:
    """Returns the end of a log, without the colours and the lines that progress bars overwrite."""
    if not log.exists():
        return ""
    text = log.read_bytes()[-64_000:].decode(errors="replace")
    lines = [line.rsplit("\r", 1)[-1] for line in re.sub(r"\x1b\[[0-9;]*m", "", text).split("\n")]
    return "\n".join([line for line in lines if line.strip()][-most:])


def baseline_path(folder: Path, card: str) -> Path:
    """Returns the file of a card's baseline."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '_', card.lower()).strip('_')}.json"


def _indented(text: str) -> Sequence[str]:
    return [f"    {line}" for line in text.splitlines()]


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    if value == 0 or 0.001 <= abs(value) < 100_000:
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.1e}"
