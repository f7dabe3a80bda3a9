"""Problems, scripts and episodes of scripted teams for the tests of mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fakes.coding_problems import write
from fakes.scripted_episodes import Script, scripted

from verl_atgrpo import Environment
from verl_atgrpo.play.types import EpisodeRecord

DATA = Path("/work/shared/data")
NAMES = ["math_single", "math", "math_ensemble", "math_debate", "math_drafts", "math_refined", "math_judged"]
QUESTION, GOLD = "Which number is it?", "738291"


def box(answer: str) -> str:
    return f"So it is \\boxed{{{answer}}}."


def program(answer: object) -> str:
    return f"```python\nprint({answer!r})\n```"


def sources(folder: Path, **rows: list[dict[str, object]]) -> dict[str, Any]:
    """The options `train` and `val`, by default with one problem each."""
    found = {}
    for split in ("train", "val"):
        given = rows.get(split) or [{"question": QUESTION + split, "answer": f"It takes 12 steps.\n#### {GOLD}"}]
        found[split] = {"path": write(folder, given, f"{split}.jsonl")}
    return found


def episode(env: Environment, scripts: Mapping[str, Script], candidates: int = 1) -> EpisodeRecord:
    return scripted(env, env.task("train", 0), scripts, candidates)


def by_turn(*replies: str) -> Script:
    return lambda prompt, k: replies[prompt.count("The two do not agree")]
