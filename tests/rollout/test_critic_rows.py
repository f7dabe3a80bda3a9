"""A critic's rows: what it reads, which episodes it learns from, and that hindsight is nowhere else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("verl")

from verl_atgrpo import Environment, Outcome, Score, ScriptedTeam, Team, make, play
from verl_atgrpo.lab.tiny_models.tiny import build_tokenizer
from verl_atgrpo.play.types import EpisodeRecord
from verl_atgrpo.train.config.rules import ConfigError
from verl_atgrpo.train.rollout.critic_rows import CriticText, check_hindsight, critic_rows, hindsights
from verl_atgrpo.train.rollout.episode_rows import Row

TOKENIZER = build_tokenizer(())
SECRET = "the answer is 47"


class Pair(Environment):
    """A drafter and a checker, whose score asks a judge; the first draft is not trained on."""

    agents = ("drafter", "checker", "judge")

    def task(self, split: str, index: int) -> int:
        return index

    def fingerprint(self, task: int) -> str:
        return str(task)

    def hindsight(self, task: int) -> str:
        return SECRET

    async def run(self, task: int, team: Team) -> Outcome:
        async def by_judge(reply: str) -> Score:
            verdict = await team.judge.act(f"is {reply} right?")
            return Score(local=float(verdict.text == "y"))

        await team.drafter.act("draft", train=False)
        await team.drafter.act("say", lambda reply: Score(local=float(reply == "b")))
        await team.checker.act("check", by_judge)
        return Outcome(True, 1.0)


def made(kind: Any, hindsight: str = SECRET, longest: int = 10_000, agents: Any = Pair.agents) -> list[Row]:
    says = {"drafter": lambda prompt, k: "b", "checker": lambda prompt, k: "x", "judge": lambda prompt, k: "y"}
    record: EpisodeRecord = asyncio.run(play(Pair(), 0, ScriptedTeam(says, scheme="parallel")))
    for decision in record.decisions:
        decision.prompt_ids[:] = TOKENIZER.encode(f"{decision.name}?")
        for candidate in decision.candidates:
            candidate.generation.token_ids[:] = TOKENIZER.encode(candidate.text)
    text = CriticText.of(TOKENIZER, hindsight)
    return list(critic_rows("u", 3, record, "critic", kind, text, agents, longest))


def read(row: Row) -> tuple[str, str]:
    return TOKENIZER.decode(row.prompt_ids), TOKENIZER.decode(row.generation.token_ids)


def test_a_value_is_asked_of_every_prompt() -> None:
    rows, yes = made("value"), TOKENIZER.decode(TOKENIZER.encode(" yes")[:1])
    # Neither of the draft that is not trained on, nor of a decision within a score.
    assert [read(row) for row in rows] == [
        (f"{SECRET}\n{name}?\nSuccess?", yes) for name in ("drafter.1", "checker.0")
    ]
    assert {(row.tags["policy"], row.tags["episode"], row.tags["episode_success"]) for row in rows} == {
        ("critic", "u_3", True)
    }
    assert rows[0].tags["place"] < rows[1].tags["place"]


def test_a_likelihood_is_that_of_the_candidate_itself() -> None:
    assert [read(row) for row in made("likelihood", agents=["drafter"])] == [(f"{SECRET}\ndrafter.1?", "b")]


def test_keys_are_the_critics_own() -> None:
    rows = made("value")
    of_team = {f"u_3_{number}" for number in range(4)}  # the draft, the answer, the judge's and the checker's
    assert {row.tags["critic"] for row in rows} <= of_team and not of_team & {row.key for row in rows}
    assert len({row.key for row in rows}) == len(rows)


def test_a_long_prompt_loses_its_beginning_and_never_the_hindsight() -> None:
    whole = made("value", agents=["drafter"])[0]
    short = made("value", agents=["drafter"], longest=len(whole.prompt_ids) - 3)[0]
    assert len(short.prompt_ids) == len(whole.prompt_ids) - 4
    assert read(short)[0].startswith(f"{SECRET}\n") and read(short)[0].endswith("ter.1?\nSuccess?")
    assert read(made("value", hindsight="")[0])[0] == "drafter.1?\nSuccess?"


def test_hindsight_needs_room() -> None:
    check_hindsight(hindsights(Pair()), TOKENIZER, 2 * len(TOKENIZER.encode(f"{SECRET}\n")))
    with pytest.raises(ConfigError, match=r"^at_grpo\.critic: Environment\.hindsight says \d+ tokens of a task, and"):
        check_hindsight(hindsights(Pair()), TOKENIZER, len(TOKENIZER.encode(SECRET)))


@pytest.mark.parametrize("name", ["plan_path", "sudoku", "number_search"])
def test_environments_say_what_solves_a_task(name: str) -> None:
    environment = make(name)
    task = environment.task("train", 1)
    said = environment.hindsight(task)
    assert said and said == make(name).hindsight(make(name).task("train", 1))
    assert environment.hindsight(environment.task("train", 2)) != said or name == "number_search"
