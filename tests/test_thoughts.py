"""What stands in thoughts is graded by nothing and shown to no other agent, whoever plays what."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.coding_problems import write
from fakes.scripted_episodes import prompt_of, scripted

from verl_atgrpo import Score, ScriptedTeam, make
from verl_atgrpo.environments.common.replies import extract_python
from verl_atgrpo.play.messages import Reply
from verl_atgrpo.play.thoughts import begins, split_thought
from verl_atgrpo.play.tool_use import use_tools
from verl_atgrpo.play.types import Generation


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.parametrize(
    ("raw", "thought", "said"),
    [
        ("7", "", "7"),
        (" 7\n", "", " 7\n"),
        ("<think>5</think>7", "5", "7"),
        ("<think>\n5\n</think>\n\n7\n", "5", "7"),
        ("<think></think>7", "", "7"),
        # Not finished: it is all thought, and nothing is said.
        ("<think>is it \\boxed{3}?", "is it \\boxed{3}?", ""),
        ("7 <think>or 5", "or 5", "7"),
        # The template has begun it.
        ("5</think>7", "5", "7"),
        ("5</think></think>7", "5", "7"),
        # Several thoughts; what is between is said.
        ("<think>1</think>2<think>3</think>4", "1\n3", "24"),
        ("<think>1</think>2<think>3", "1\n3", "2"),
        ("<think>1<think>2</think>3", "1\n2", "3"),
        ("<think>1<think>2</think>3</think>4", "123", "4"),
        # As other families write it.
        ("<thinking>5</thinking>7", "5", "7"),
        ("<THINK>5</THINK>7", "5", "7"),
        ("<thought>5</thought>7", "5", "7"),
        ("<seed:think>5</seed:think>7", "5", "7"),
        ("<mm:think>5", "5", ""),
        ("[THINK]5[/THINK]7", "5", "7"),
        ("<|START_THINKING|>5<|END_THINKING|>7", "5", "7"),
        ("<|begin_of_thought|>5<|end_of_thought|>7", "5", "7"),
        ("\u25c1think\u25b75\u25c1/think\u25b77", "5", "7"),
        # Words are no tags.
        ("I [think] so, <b>thinking</b> of <thinker>", "", "I [think] so, <b>thinking</b> of <thinker>"),
    ],
)
def test_what_is_thought_and_what_is_said(raw: str, thought: str, said: str) -> None:
    assert split_thought(raw) == (thought, said)
    assert split_thought(said)[1] == said, "reading what is said again changes nothing"


@pytest.mark.parametrize(
    ("raw", "thought", "said"),
    [("5", "5", ""), ("5</think>7", "5", "7"), ("<think>5</think>7", "5", "7"), ("5<think>6", "5\n6", "")],
)
def test_a_prompt_that_begins_a_thought(raw: str, thought: str, said: str) -> None:
    assert split_thought(raw, opened=True) == (thought, said)
    assert Generation([], [], raw, opened=True).parts == (thought, said)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|Assistant|><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("Put thoughts in <think> tags.<|im_end|>\n<|im_start|>assistant\n", False),
        ("assistant:", False),
    ],
)
def test_prompts_that_begin_a_thought(prompt: str, opened: bool) -> None:
    assert begins(prompt) is opened


@pytest.mark.parametrize(
    "unit", ["<think>", "</think>", "<think>a</think>b", "</think>a", "<", "<|end_of_", "[THINK]"]
)
def test_tags_are_read_in_linear_time(unit: str) -> None:
    """Each part of an answer is moved at most once: quadratic time would be minutes here."""
    thought, said = split_thought(unit * 100_000)
    assert len(thought) + len(said) <= len(unit) * 100_000


def test_scores_environments_and_candidates_are_given_what_is_said() -> None:
    seen: list[Any] = []

    def score(reply: str) -> Score:
        seen.append(reply)
        return Score(local=float(reply == "7"))

    says = ["<think>7", "8<think>7</think>", "<think>8</think>7", "7</think>8"]
    team = ScriptedTeam({"solo": lambda prompt, k: says[k]}, candidates=4)
    chosen = asyncio.run(team.solo.act("?", score))
    assert seen == ["", "8", "7", "8"]
    assert (chosen.text, chosen.reasoning, chosen.generation.text) == ("7", "8", says[2])


def test_replies_that_are_scored_together_have_no_thoughts() -> None:
    seen: list[str] = []

    def score_all(replies: list[str]) -> list[Score]:
        seen.extend(replies)
        return [Score()] * len(replies)

    team = ScriptedTeam({"solo": lambda prompt, k: ["<think>a</think>b", "<think>a"][k]}, candidates=2)
    asyncio.run(team.solo.act("?", score_all=score_all))
    assert seen == ["b", ""]


PROGRAM = "```python\nprint({})\n```"


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (f"<think>{PROGRAM.format(1)}</think>{PROGRAM.format(2)}", "print(2)\n"),
        (f"<think>{PROGRAM.format(1)}</think>none", None),
        (f"<think>{PROGRAM.format(1)}", None),
        (f"{PROGRAM.format(1)}</think>none", None),
        (f"{PROGRAM.format(1)}<think>{PROGRAM.format(2)}", "print(1)\n"),
        (f"[THINK]{PROGRAM.format(1)}[/THINK]{PROGRAM.format(2)}", "print(2)\n"),
        (f"<think>{PROGRAM.format(1)}{'a' * 30_000}", None),
    ],
)
def test_a_program_in_a_thought_is_none(reply: str, body: str | None) -> None:
    assert extract_python(reply) == body


# ------------------------------------------------------------------ environments

GAMES: list[tuple[str, Mapping[str, Any], str, Any]] = [
    ("walk", {}, "down 2", ()),
    ("number_search", {}, "5", ()),
    ("plan_path", {"tool": "moves"}, "Moves: R, D", ()),
    ("plan_path", {"style": "compact", "tool": "moves"}, "RD", ()),
    ("sokoban", {"tool": "moves"}, "Moves: R, D, U, L", ()),
    ("sudoku", {"style": "compact", "tool": "grid"}, "1234\n3412\n2143\n4321", ()),
    ("textarena", {"game": "TicTacToe-v0", "players": 2, "shared_openings": True}, "[4]", needs("textarena")),
    ("textarena", {"game": "GuessTheNumber-v0-train"}, "[7]", needs("textarena")),
    ("textarena", {"game": "Nim-v0", "players": 2, "shared_openings": True}, "[0 1]", needs("textarena")),
    ("reasoning_gym", {"dataset": "basic_arithmetic", "style": "compact"}, "7", needs("reasoning_gym")),
    ("reasoning_gym", {"dataset": "spell_backward"}, "<answer>ab</answer>", needs("reasoning_gym")),
    ("search_routed", {}, "answer", needs("bm25s")),
]
SECRET = "Mangrove"


@pytest.mark.parametrize(
    ("name", "options", "reply"),
    [pytest.param(*one, marks=marks, id=f"{one[0]} {one[2]!r}") for *one, marks in GAMES],
)
def test_a_reply_within_a_thought_earns_what_silence_earns_and_nobody_sees_it(
    name: str, options: Mapping[str, Any], reply: str
) -> None:
    env = make(name, **options)
    task = env.task("train", 0)

    def played(said: str) -> list[tuple[list[int], list[tuple[float, float]]]]:
        episode = scripted(env, task, dict.fromkeys(env.agents, lambda prompt, k: said))
        scores = [[(one.score.team, one.score.local) for one in made.candidates] for made in episode.decisions]
        return [(made.prompt_ids, score) for made, score in zip(episode.decisions, scores, strict=True)]

    silent = played("\n")
    for thought in (f"<think>{reply}", f"<think>{SECRET}\n{reply}\n</think>", f"{reply}</think>\n", f"[THINK]{reply}"):
        assert played(thought) == silent
    after = scripted(env, task, dict.fromkeys(env.agents, lambda prompt, k: f"<think>{SECRET}</think>\n{reply}"))
    assert not any(SECRET in prompt_of(made) for made in after.decisions)
    assert played(f"<think>{SECRET}\n</think>\n{reply}") == played(reply)


@needs("math_verify")
def test_programs_and_answers_in_thoughts_solve_no_problem(tmp_path: Path) -> None:
    rows = {split: {"question": f"What is 3 times 17? {split}", "answer": "51"} for split in ("train", "val")}
    files = {split: {"path": write(tmp_path, [row], f"{split}.jsonl")} for split, row in rows.items()}
    env = make("math", **files, max_turns=1)

    def rewards(program: str, answer: str) -> list[float]:
        team = {"tool_user": lambda prompt, k: program, "reasoner": lambda prompt, k: answer}
        return sorted(made.candidates[0].score.local for made in scripted(env, env.task("train", 0), team).decisions)

    right, wrong = PROGRAM.format(51), PROGRAM.format(50)
    assert rewards(f"<think>{wrong}</think>{right}", "<think>\\boxed{50}</think>\\boxed{51}") == [1.0, 1.0]
    assert rewards(f"<think>{right}", "<think>\\boxed{51}") == [0.0, 0.0]
    assert rewards(f"{right}</think>Done.", "\\boxed{51}</think>So it is.") == [0.0, 0.0]
    assert rewards(f"{wrong}<think>{right}</think>", "\\boxed{50}<think>\\boxed{51}") == [0.2, 0.2]


# ------------------------------------------------------------------ tools and endpoints

CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'


def look(at: str) -> str:
    """Looks at something."""
    return "seen"


@pytest.mark.parametrize("reply", [f"<think>{CALL}", f"<think>{CALL}</think>7", f"{CALL}</think>7"])
def test_calls_in_thoughts_are_not_made(reply: str) -> None:
    scored: list[Reply] = []

    def score(before: Any, reply: Reply) -> Score:
        scored.append(reply)
        return Score()

    done = asyncio.run(use_tools(ScriptedTeam({"solo": lambda prompt, k: reply}).solo, "?", [look], score))
    assert (done.calls, len(scored)) == (0, 1)
    assert done.answer is not None and done.answer.text == scored[0].text == split_thought(reply)[1]
