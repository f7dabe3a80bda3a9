"""The report: a self-contained HTML file that loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from verl_atgrpo.files import write_text
from verl_atgrpo.lab.report import counted
from verl_atgrpo.lab.report.panels import MOST_POINTS, figures, panels
from verl_atgrpo.lab.report.records import Run, find, read

_SCRIPTS = ("curves.js", "episodes.js", "page.js")
_KEPT = ("agent", "turn", "scope", "policy", "prompt", "prompt_tokens", "committed", "candidates")


def write(run: Path, out: Path, max_megabytes: float) -> str:
    """Writes the report of a run; returns one line that describes it.

    Raises ValueError if the run's records are missing or damaged, or `max_megabytes` is no positive number; or
    OSError.
    """
    if not 0 < max_megabytes < math.inf:
        raise ValueError(f"--max-megabytes {max_megabytes}: a number above 0")
    records = read(find(run))
    write_text(out, render(records, max_megabytes))
    return (
        f"wrote {out}: {counted(len(records.metrics), 'step')}, {counted(len(records.episodes), 'recorded episode')}"
    )


def render(run: Run, max_megabytes: float) -> str:
    """Returns the page; episodes are limited to `max_megabytes`, with their steps evenly spaced."""
    style = _part("page.css")
    script = "\n".join(_part(name) for name in _SCRIPTS)
    shown = contents(run, max_megabytes)
    # Only our own script runs, identified by hash, whatever the models' replies contain.
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    parts = {
        "title": html.escape(shown["title"]),
        "policy": html.escape(policy),
        "style": style,
        "script": script,
        "data": embedded(shown),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def contents(run: Run, max_megabytes: float) -> dict[str, Any]:
    """Returns the page's data: `title`, `about`, `notes`, `figures`, `panels`, `episodes`."""
    section = run.about.get("section", {})
    policies = list(section.get("policies") or run.about.get("models", {}))
    drawn = panels(run.metrics, policies)
    episodes, notes = _within(run, int(max_megabytes * 1e6))
    if len(run.metrics) > MOST_POINTS:
        notes.insert(0, f"Curves of more than {MOST_POINTS} points are averaged over neighbouring steps.")
    if not drawn:
        notes.insert(0, "No metrics were recorded yet.")
    return {
        "title": str(run.about.get("experiment") or "a run of verl-atgrpo"),
        "about": about(run.about),
        "notes": notes,
        "figures": figures(run.metrics),
        "panels": drawn,
        "episodes": episodes,
    }


def about(run: Mapping[str, Any]) -> list[str]:
    """Returns a short description of a run (`Run.about`): environment, candidates, estimator, policies."""
    section = run.get("section", {})
    environment = dict(section.get("environment", {}))
    phrases = []
    if environment:
        name = environment.pop("name", "")
        options = ", ".join(f"{key} {value}" for key, value in environment.items())
        phrases.append(f"{name} ({options})" if options else str(name))
    if section.get("scheme") == "parallel":
        phrases.append(f"{counted(section.get('candidates', 0), 'episode')} a task")
    elif "candidates" in section:
        k = section["candidates"]
        of_agents = ", ".join(f"{agent} {own}" for agent, own in k.items()) if isinstance(k, dict) else ""
        phrases.append(f"candidates a decision: {of_agents}" if of_agents else f"{counted(k, 'candidate')} a decision")
    if branch := section.get("branch"):
        at = branch["at"]
        points = at if isinstance(at, str) else ", ".join(f"{agent} {turn}" for agent, turn in at.items())
        phrases.append(f"branches at: {points}")
    if "estimator" in section:
        phrases.append(f"estimator {section['estimator']}")
    frozen = run.get("frozen", [])
    for policy, model in run.get("models", {}).items():
        phrases.append(f"policy {policy}: {model}" + (" (frozen)" if policy in frozen else ""))
    return phrases


def embedded(value: Any) -> str:
    """Returns JSON for an HTML element, escaped so that it cannot open or close a tag or a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def thinned(sizes: Mapping[int, int], budget: int) -> list[int]:
    """Returns the steps to keep so that their sizes sum to at most `budget`: every n-th and the last."""
    steps = sorted(sizes)
    stride = 1
    while steps:
        kept = sorted({*steps[::stride], steps[-1]}) if stride < len(steps) else steps[-1:]
        if sum(sizes[step] for step in kept) <= budget:
            return kept
        if len(kept) == 1:
            break
        stride *= 2
    return []


def _within(run: Run, budget: int) -> tuple[list[dict[str, Any]], list[str]]:
    sizes: dict[str, dict[int, int]] = {"val": defaultdict(int), "train": defaultdict(int)}
    episodes = []
    for (split, step, task, episode), decisions in sorted(run.episodes.items()):
        first = decisions[0]
        entry = {
            "split": split,
            "step": step,
            "task": task,
            "episode": episode,
            "success": first["success"],
            "reward": first["episode_reward"],
            "failed": first.get("failed", False),
            "decisions": [{key: row.get(key, "") for key in _KEPT} for row in decisions if not row.get("failed")],
        }
        sizes[split][step] += len(embedded(entry).encode())
        episodes.append(entry)
    kept: dict[str, list[int]] = {}
    notes = []
    # Validation first, because it repeats the same tasks; training gets the rest of the budget.
    for split, share, name in (("val", 2, "validation"), ("train", 1, "training step")):
        kept[split] = thinned(sizes[split], budget // share)
        budget -= sum(sizes[split][step] for step in kept[split])
        if len(kept[split]) < len(sizes[split]):
            recorded, shown = counted(len(sizes[split]), name), len(kept[split])
            notes.append(f"Of {recorded} with recorded episodes, {shown} on this page; more with --max-megabytes.")
    return [entry for entry in episodes if entry["step"] in kept[entry["split"]]], notes


def _part(name: str) -> str:
    return files("verl_atgrpo.lab.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
