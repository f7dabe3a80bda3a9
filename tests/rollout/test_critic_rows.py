"""A critic's rows: what it reads, which episodes it learns from, and that hindsight is nowhere else."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes.simulated_engine import Lengths, SimulatedEngine, run_virtually
from fakes.simulated_worker import SimulatedWorker
from omegaconf import DictConfig, OmegaConf

from verl_atgrpo import Environment, Outcome, Score, ScriptedTeam, Team, make, play
from verl_atgrpo.lab.tiny_models.tiny import build_tokenizer
from verl_atgrpo.play.types import EpisodeRecord
from verl_atgrpo.train.chat import Chat
from verl_atgrpo.train.config import check
from verl_atgrpo.train.config.chat_rules import hindsights, of_hindsight
from verl_atgrpo.train.config.schema import ConfigError
from verl_atgrpo.train.config.section import parse_section
from verl_atgrpo.train.rollout.episode_rows import (
    RECORDED,
    SUBMISSION,
    Row,
    critic_rows,
    training_rows,
    untrained_rows,
)
from verl_atgrpo.train.rows import queue
from verl_atgrpo.train.rows.batch import Batch
from verl_atgrpo.train.rows.step_rows import StepRows
from verl_atgrpo.train.serving.requests import Gate
from verl_atgrpo.train.trainer.recorder import SampledRow, decisions

TOKENIZER = build_tokenizer(())
SECRET = "the answer is 47"
ADAPTER = {"base": "one", "lora": {"rank": 4}}
CRITIC = {
    "agents": {"all": "player"},
    "policies": {"player": ADAPTER, "critic": ADAPTER},
    "critic": {"kind": "likelihood", "policy": "critic"},
    "scheme": "parallel",
    "estimator": "dr_mas",
    "candidates": 2,
}
"""A section with a critic, without the environment."""


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

        await team.drafter.act("draft", train=False, candidates=task or 1)
        await team.drafter.act("say", lambda reply: Score(local=float(reply == "b")))
        await team.checker.act("check", by_judge)
        return Outcome(True, 1.0)


def record_of(drafts: int = 1) -> EpisodeRecord:
    says = {"drafter": lambda prompt, k: "b", "checker": lambda prompt, k: "x", "judge": lambda prompt, k: "y"}
    record: EpisodeRecord = asyncio.run(play(Pair(), drafts, ScriptedTeam(says, scheme="parallel")))
    for decision in record.decisions:
        decision.prompt_ids[:] = TOKENIZER.encode(f"{decision.name}?")
        for candidate in decision.candidates:
            candidate.generation.token_ids[:] = TOKENIZER.encode(candidate.text)
    return record


class Tokenizers(dict[str, Any]):
    """One for all policies."""

    def __missing__(self, policy: str) -> Any:
        return TOKENIZER


def made(kind: str, hindsight: str = SECRET, longest: int = 10_000, agents: Any = Pair.agents) -> list[Row]:
    record, critic = record_of(), "critic" if kind == "likelihood" else None
    return list(critic_rows("u", 3, record, critic, Tokenizers(), hindsight, agents, longest))


def read(row: Row) -> tuple[str, str]:
    return TOKENIZER.decode(row.prompt_ids), TOKENIZER.decode(row.generation.token_ids)


def test_a_value_is_asked_of_every_prompt() -> None:
    rows, end = made("value"), TOKENIZER.eos_token
    # Neither of the draft that is not trained on, nor of a decision within a score.
    assert [read(row) for row in rows] == [
        (f"{SECRET}\n{name}?\n{agent}, turn {turn}. Success?", end)
        for name, agent, turn in (("drafter.1", "drafter", 2), ("checker.0", "checker", 1))
    ]
    assert [(row.tags["policy"], row.tags["episode"], row.tags["episode_success"]) for row in rows] == [
        ("drafter", "u_3", True),
        ("checker", "u_3", True),
    ], "the agents' own policy reads it"
    assert rows[0].tags["place"] < rows[1].tags["place"]


class AtOnce(Pair):
    """Both agents act at the same time, twice; the one named in the task ends last."""

    async def run(self, task: str, team: Team) -> Outcome:
        for _ in range(2):
            ended = asyncio.Event()

            async def late(agent: str, first: asyncio.Event) -> None:
                await getattr(team, agent).act(agent, lambda reply: waiting(first if agent == task else None))
                first.set()

            await asyncio.gather(*(late(agent, ended) for agent in ("drafter", "checker")))
        return Outcome(True, 1.0)


async def waiting(event: asyncio.Event | None) -> Score:
    if event is not None:
        await event.wait()
    return Score()


@pytest.mark.parametrize("last", ["drafter", "checker"])
def test_agents_that_act_at_once_have_not_seen_each_other(last: str) -> None:
    says = dict.fromkeys(("drafter", "checker"), lambda prompt, k: "b")
    record: EpisodeRecord = asyncio.run(play(AtOnce(), last, ScriptedTeam(says, scheme="parallel")))
    rows = critic_rows("u", 0, record, None, Tokenizers(), "", Pair.agents, 100)
    tags = sorted((row.tags for row in rows), key=lambda one: one["order"])
    assert [(one["agent"], one["after"]) for one in tags] == [
        ("drafter", 0),
        ("checker", 0),
        ("drafter", 2),
        ("checker", 2),
    ]
    ended_last = [one["place"] for one in tags if one["agent"] == last]
    assert ended_last == [1, 3]


def test_a_likelihood_is_that_of_the_candidate_itself() -> None:
    assert [read(row) for row in made("likelihood", agents=["drafter"])] == [(f"{SECRET}\ndrafter.1?", "b")]


@pytest.mark.parametrize("drafts", [1, 3])
def test_a_score_is_for_the_row_of_its_decision(drafts: int) -> None:
    """However many candidates a decision before it has, which is not trained on."""
    record = record_of(drafts)
    of_critic = list(critic_rows("u", 3, record, None, Tokenizers(), SECRET, Pair.agents, 10_000))
    team = {row.key: row.tags for row in training_rows("u", 3, record, "parallel")}
    scored = {row.tags["critic"]: row.tags for row in of_critic}
    assert scored.keys() == team.keys() - {key for key, tags in team.items() if tags["scope"]}
    for key, tags in scored.items():
        assert (tags["agent"], tags["turn"]) == (team[key]["agent"], team[key]["turn"])
    every = {*team, *(row.key for row in untrained_rows("u", 3, record, "parallel"))}
    assert len(every) == drafts + 3 and not every & {row.key for row in of_critic}
    assert len({row.key for row in of_critic}) == len(of_critic) == 2


def test_a_long_prompt_loses_its_beginning_before_the_hindsight_loses_its_end() -> None:
    whole = made("value", agents=["drafter"])[0]
    short = made("value", agents=["drafter"], longest=len(whole.prompt_ids) - 3)[0]
    assert len(short.prompt_ids) == len(whole.prompt_ids) - 4
    assert read(short)[0].startswith(f"{SECRET}\n") and read(short)[0].endswith("ter.1?\ndrafter, turn 2. Success?")
    assert read(made("value", hindsight="")[0])[0] == "drafter.1?\ndrafter, turn 2. Success?"
    long = made("value", hindsight=SECRET * 1000, agents=["drafter"], longest=100)[0]
    assert len(long.prompt_ids) + len(long.generation.token_ids) == 100
    assert read(long)[0].startswith(SECRET) and read(long)[0].endswith("drafter, turn 2. Success?")
    assert [row.tags["cut"] for row in (whole, short, long)] == [False, True, True]


def test_hindsight_needs_room() -> None:
    size = len(TOKENIZER.encode(f"{SECRET}\n"))

    def data(prompt: int) -> DictConfig:
        return OmegaConf.create({"max_prompt_length": prompt, "max_response_length": size})

    given = {"environment": {"name": "plan_path"}, **CRITIC}
    texts = hindsights(parse_section(given), Pair())
    check(of_hindsight(texts, TOKENIZER, data(2 * size)))
    with pytest.raises(
        ConfigError, match=rf"^at_grpo\.critic: .* says {size} tokens of a task, which with the prompt"
    ):
        check(of_hindsight(texts, TOKENIZER, data(2 * size - 1)))


@pytest.mark.parametrize("name", ["plan_path", "sudoku", "number_search"])
def test_environments_say_what_solves_a_task(name: str) -> None:
    environment = make(name)
    task = environment.task("train", 1)
    said = environment.hindsight(task)
    assert said and said == make(name).hindsight(make(name).task("train", 1))
    assert environment.hindsight(environment.task("train", 2)) != said or name == "number_search"


# ---------------------------------------------------------------------- from the worker on


class Characters(Lengths):
    """A tokenizer with a token for each character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(map(chr, token_ids))


class Noting(SimulatedEngine):
    """An engine that notes the prompts that it was asked."""

    prompts: list[str]

    async def attempt(self, replica: int, request_id: str, prompt_ids: list[int], *request: Any) -> Any:
        self.prompts.append("".join(map(chr, prompt_ids)))
        return await super().attempt(replica, request_id, prompt_ids, *request)


def written(monkeypatch: pytest.MonkeyPatch, validate: bool, **given: object) -> tuple[Noting, Batch, dict[str, str]]:
    """Plays a task of `Pair` with a critic `given`: the engine, the rows, and the text of each by its key."""
    engine, rows, texts = Noting(), Batch(), dict[str, str]()
    engine.prompts = []

    async def write(keys: list[str], fields: Any, tags: list[dict[str, Any]], partition: str) -> None:
        rows.keys.extend(keys)
        rows.tags.extend(tags)
        for key, prompt, answer in zip(keys, fields["prompts"], fields["responses"], strict=True):
            texts[key] = Characters().decode([*prompt.tolist(), *answer.tolist()])

    async def ignore(*_: Any) -> None: ...

    monkeypatch.setattr(queue, "write", write)
    monkeypatch.setattr(queue, "set_status", ignore)
    worker = SimulatedWorker(engine, lambda *_: None)
    critic = {"critic": {"kind": "value", **given}}
    worker._settings = parse_section({"environment": {"name": "plan_path"}, **CRITIC, **critic})
    worker._environment = Pair()
    worker._policy_of = worker._validation_policy_of = dict.fromkeys(Pair.agents, "player")
    worker._chats = {name: Chat(Characters()) for name in ("player", "critic")}
    worker.llm_client = SimpleNamespace(clients=dict.fromkeys(worker._chats, engine))
    worker._training_clients = worker._validation_clients = worker._patient(Gate())
    split = "val" if validate else "train"
    prompt = {"uid": "u", "split": split, "index": 0, "global_steps": 1, SUBMISSION: 0, RECORDED: True}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    run_virtually(worker._run_prompt({**prompt, "data_source": "pair"}, sampling, {"validate": validate}))
    assert worker._report.error is None
    return engine, rows, texts


@pytest.mark.parametrize("kind", ["value", "likelihood"])
def test_hindsight_reaches_the_critic_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    policy = {"policy": "critic"} if kind == "likelihood" else {}
    engine, found, texts = written(monkeypatch, validate=False, kind=kind, **policy)
    rows = StepRows()
    rows.add(found)
    once, again = list(rows.of_critic.keys), StepRows()
    again.add(Batch(found.keys[::-1], found.tags[::-1]))
    for one in (rows, again):
        one.sort()
    assert rows.of_critic.keys == again.of_critic.keys and sorted(once) == sorted(rows.of_critic.keys)
    team = rows + rows.untrained
    assert len(rows.of_critic) == 4 and len(team) == 8, "two decisions of two episodes; with drafts and judges"
    assert all(SECRET in texts[key] for key in rows.of_critic.keys)
    pairs = zip(team.keys, team.tags, strict=True)
    shown = [SampledRow(key, tags, [*map(ord, texts[key])], [1], 0.0) for key, tags in pairs]
    recorded = decisions(shown, "train", 1, {"player": Characters()})
    assert len(recorded) == 8 == len(engine.prompts)
    assert SECRET not in str([recorded, team.tags, [texts[key] for key in team.keys], engine.prompts, caplog.text])


def test_evaluation_asks_no_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows, texts = written(monkeypatch, validate=True)
    assert {tags["policy"] for tags in rows.tags} == {"player"} and SECRET not in str([texts, engine.prompts])


def test_hindsight_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows, texts = written(monkeypatch, validate=False, hindsight=False)
    assert any("critic" in tags for tags in rows.tags) and SECRET not in str(texts)
