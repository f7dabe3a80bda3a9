"""Problems, scripts and episodes of scripted teams for the tests of mathematics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from verl_atgrpo.environment import Environment
from verl_atgrpo.team import Decision, EpisodeRecord, ScriptedTeam, play

Script = Callable[[str, int], str]
DATA = Path("/work/shared/data")
NAMES = ["math_single", "math", "math_ensemble", "math_debate"]
QUESTION, GOLD = "Which number is it?", "738291"


def box(answer: str) -> str:
    return f"So it is \\boxed{{{answer}}}."


def program(answer: object) -> str:
    return f"```python\nprint({answer!r})\n```"


def sources(folder: Path, **rows: list[dict[str, object]]) -> tuple[dict[str, str], dict[str, str]]:
    """Sections for `train` and `val`, by default with one problem each."""
    paths = []
    for split in ("train", "val"):
        given = rows.get(split) or [{"question": QUESTION + split, "answer": f"It takes 12 steps.\n#### {GOLD}"}]
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        paths.append({"path": str(path)})
    return paths[0], paths[1]


def episode(env: Environment, scripts: Mapping[str, Script], candidates: int = 1) -> EpisodeRecord:
    return asyncio.run(play(env, env.task("train", 0), ScriptedTeam(scripts, candidates=candidates)))


def prompt_of(decision: Decision) -> str:
    return "".join(map(chr, decision.prompt_ids))


def of(agent: str, record: EpisodeRecord) -> list[Decision]:
    return sorted((d for d in record.decisions if d.agent == agent), key=lambda d: d.turn)


def turn_of(prompt: str) -> int:
    return 1 + prompt.count("The two do not agree")


def by_turn(*replies: str) -> Script:
    return lambda prompt, k: replies[turn_of(prompt) - 1]
