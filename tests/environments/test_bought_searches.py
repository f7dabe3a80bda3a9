"""Search cannot be solved without reading: queries and questions that are the same for every task earn nothing.

The other agents, and what the player does with the results, are honest: only the words are bought.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from fakes.scripted_episodes import of, scripted

pytest.importorskip("bm25s", reason="needs the extra `search`")

from verl_atgrpo import Environment, Split, make
from verl_atgrpo.environments.search.corpus import FAMILIES, GIVEN, KINDS, PLACES, RIVERS, Question
from verl_atgrpo.environments.search.environment import SearchEnvironment
from verl_atgrpo.play import tools
from verl_atgrpo.play.testing import Script

TASKS: Mapping[Split, int] = {"train": 40, "val": 40}
MOST = 0.14
"""What a guess may earn: 3 of 48 people are found by a word that all have, 2 standard errors of 40 tasks more."""
TURNS = 3
"""As many as honest players need."""

Words = Callable[[Question, str], str]
"""(task, prompt) -> a query, a question or an answer."""
CONSTANTS = {
    "blank": "",
    "blanks": " \n\t ",
    "punctuation": "?!.,;:",
    "nonsense": "\U0001f600 \u200b xyzzy",
    "a word of all people": "lives",
    "a word of all cities": "lies",
    "words of both": "lives in lies on the",
    "the question's words": "Which river does the city of lie on?",
    "all given names": " ".join(GIVEN),
    "all families": " ".join(FAMILIES),
    "all kinds of cities": " ".join(KINDS),
    "all places": " ".join(PLACES),
    "all places in one word": ",".join(PLACES),
    "all rivers": " ".join(RIVERS),
    "half of the places": " ".join(PLACES[:8]),
    "half of the rivers": " ".join(RIVERS[8:]),
    "four people": "Anna Berg Boris Costa Clara Duval David Ekman",
    "two cities": "New Alba Old Faro",
    "a river": RIVERS[3],
    "a city": "Port Parma",
    "markup": "<tool_call>lives</tool_call> </think>",
    "a number": "0",
}
VOCABULARY = (*GIVEN, *FAMILIES, *KINDS, *PLACES, *RIVERS, "lives", "lies", "in", "on", "the", "which", "does", "of")
COPIES: dict[str, Words] = {
    "the question": lambda task, prompt: task.text,
    "the question twice": lambda task, prompt: f"{task.text} {task.text}",
    "the question without a word": lambda task, prompt: task.text.partition(" ")[2],
    "the question in other letters": lambda task, prompt: task.text.upper(),
    "the question backwards": lambda task, prompt: " ".join(task.text.split()[::-1]),
    "the prompt": lambda task, prompt: prompt,
    "the prompt's start": lambda task, prompt: prompt[:500],
    "the prompt's last line": lambda task, prompt: prompt.splitlines()[-1],
}
BOUGHT: dict[str, Words] = {
    **{name: lambda task, prompt, words=words: words for name, words in CONSTANTS.items()},
    **COPIES,
}


def call(tool: str, argument: str, words: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': {argument: words}})}</tool_call>"


def read(task: Question, prompt: str) -> str | None:
    """The answer of a reader who trusts nothing but the documents: the river if both are there."""
    city = re.search(rf"{task.supporting[0]} lives in (\w+ \w+)\.", prompt)
    river = city and re.search(rf"{city[1]} lies on the (\w+)", prompt)
    return river[1] if river else None


def honest_query(task: Question, prompt: str) -> str:
    city = re.search(rf"{task.supporting[0]} lives in (\w+ \w+)\.", prompt)
    return city[1] if city else task.supporting[0]


def solo(task: Question, query: Words) -> Mapping[str, Script]:
    queries = iter(range(TURNS))

    def script(prompt: str, k: int) -> str:
        answer = read(task, prompt)
        if answer is None and next(queries) < TURNS - 1:
            return call("search", "query", query(task, prompt))
        return answer or RIVERS[0]

    return {"solo": script}


def routed(task: Question, query: Words) -> Mapping[str, Script]:
    return {
        "verifier": lambda prompt, k: "answer" if read(task, prompt) else "search",
        "searcher": lambda prompt, k: query(task, prompt) or " ",  # a reply has a token
        "answerer": lambda prompt, k: read(task, prompt) or RIVERS[0],
    }


def honest_question(task: Question, prompt: str) -> str:
    told = prompt.splitlines()[-1]
    person = task.supporting[0]
    return f"Which river is in {told}?" if len(told.split()) == 2 else f"Where does {person} live?"


def team(task: Question, question: Words = honest_question, query: Words | None = None) -> Mapping[str, Script]:
    """A planner who passes on what it is told, and a worker who reads what the question names."""
    questions = iter(range(TURNS))

    def planner(prompt: str, k: int) -> str:
        told = prompt.splitlines()[-1]
        if told in RIVERS:
            return told
        if next(questions) < TURNS - 1:
            return call("ask_worker", "question", question(task, prompt))
        return RIVERS[0]

    def worker(prompt: str, k: int) -> str:
        asked = re.search(r"(?:does|in) (\w+ \w+)(?: live)?\?", prompt)
        if asked is None:
            return "I do not know."
        fact = re.search(rf"{asked[1]} (?:lives in (\w+ \w+)\.|lies on the (\w+))", prompt)
        if fact is not None:
            return fact[1] or fact[2]
        return call("search", "query", asked[1] if query is None else query(task, prompt))

    return {"planner": planner, "worker": worker}


@cache
def environment(name: str) -> SearchEnvironment:
    more: dict[str, object] = {"max_searches": 2} if name == "search" else {}
    made = make(name, max_turns=TURNS, **more)
    assert isinstance(made, SearchEnvironment)
    return made


@cache
def tasks(name: str, split: Split, count: int) -> list[Question]:
    return [environment(name).task(split, index) for index in range(count)]


def earned(
    name: str, split: Split, agent: str, play: Callable[[Question], Mapping[str, Script]], count: int
) -> tuple[float, float]:
    """Returns the share of solved tasks, and the mean local score of an agent's decisions but for the last one."""
    env: Environment = environment(name)
    solved, scores = 0, []
    for task in tasks(name, split, count):
        record = scripted(env, task, play(task))
        solved += record.outcome.success
        scores += [one.candidates[0].score.local for one in of(agent, record) if one.turn < TURNS - 1]
    return solved / count, sum(scores) / len(scores) if scores else 0.0


PLAYERS: dict[str, tuple[str, str, Callable[[Question, Words], Mapping[str, Script]], Words]] = {
    "single": ("search_single", "solo", solo, honest_query),
    "routed": ("search_routed", "searcher", routed, honest_query),
    "planner": ("search", "planner", team, honest_question),
    "worker": (
        "search",
        "worker",
        lambda task, words: team(task, query=words),
        lambda task, prompt: re.findall(r"(?:does|in) (\w+ \w+)", prompt)[0],
    ),
}


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches without a thread for each, which takes half of the time; test_tools.py has the threads."""

    async def direct(run: Callable[[], Any]) -> Any:
        return run()

    monkeypatch.setattr(tools, "_in_thread", direct)


@pytest.mark.parametrize("split", TASKS)
@pytest.mark.parametrize("player", PLAYERS)
def test_honest_words_solve_every_task(player: str, split: Split) -> None:
    name, agent, play, honest = PLAYERS[player]
    assert earned(name, split, agent, lambda task: play(task, honest), 20) == (1.0, 1.0)


def check(player: str, bought: str, split: Split, count: int, most: float) -> None:
    name, agent, play, _ = PLAYERS[player]
    solved, score = earned(name, split, agent, lambda task: play(task, BOUGHT[bought]), count)
    assert solved <= most, f"{bought} solves {solved:.2f}"
    assert score <= most, f"{bought} earns {score:.2f}"


@pytest.mark.slow
@pytest.mark.parametrize("split", TASKS)
@pytest.mark.parametrize("player", PLAYERS)
def test_words_that_are_the_same_for_every_task_earn_no_more_than_a_guess(player: str, split: Split) -> None:
    # A worker's prompt is one fact's question, so a copy of that is a query. Each is bought in one of the splits.
    words = list(CONSTANTS if player == "worker" else BOUGHT)
    for bought in words[list(TASKS).index(split) :: len(TASKS)]:
        check(player, bought, split, TASKS[split], MOST)


@pytest.mark.parametrize("player", PLAYERS)
def test_the_same_of_few_tasks(player: str) -> None:
    """What paid before, in the fast suite: 20 tasks, so that 4 may be lucky."""
    copies = () if player == "worker" else ("the question", "the prompt")
    for bought in ("blank", "a word of all people", "words of both", "all families", *copies):
        check(player, bought, "train", 20, 0.2)


@pytest.mark.slow
def test_no_word_of_the_corpus_finds_what_is_needed() -> None:
    env = environment("search_single")
    for split, count in TASKS.items():
        drawn = tasks("search_single", split, count)
        for word in VOCABULARY:
            mean = sum(env.score_search(task.supporting, task.corpus, "", word).local for task in drawn) / count
            assert mean <= MOST, f"{word!r} earns {mean:.2f}"


@pytest.mark.parametrize(
    ("constant", "right"),
    # Two searches are needed, then it is enough; the searches go on as long as there are rounds.
    [("search", 2 / 3), ("answer", 0.0), ("search answer", 0.0), ("?", 0.0), ("no", 0.0)],
)
def test_a_verdict_that_is_always_the_same_earns_only_where_it_is_right(constant: str, right: float) -> None:
    scores: list[float] = []
    for task in tasks("search_routed", "train", 20):
        record = scripted(
            environment("search_routed"), task, {**routed(task, honest_query), "verifier": lambda prompt, k: constant}
        )
        scores += [one.candidates[0].score.local for one in of("verifier", record)]
    assert sum(scores) / len(scores) == pytest.approx(right)


@pytest.mark.parametrize("player", ["single", "routed"])
def test_a_query_that_is_repeated_earns_once(player: str) -> None:
    name, agent, play, _ = PLAYERS[player]
    solved, score = earned(name, "train", agent, lambda task: play(task, lambda task, prompt: task.supporting[0]), 20)
    assert solved <= 0.2 and score <= 1 / (TURNS - 1)


def test_the_order_of_results_tells_nothing() -> None:
    """Of documents that a query finds equally, the one that is asked for is as often last as first."""
    drawn = tasks("search_single", "train", 200)
    places = []
    for task in drawn:
        found = [one.title for one in task.corpus.search("lives", 48)]
        places.append(found.index(task.supporting[0]))
    assert len(set(places)) > 30 and 16 < sum(places) / len(places) < 31


def test_documents_share_their_names_with_others() -> None:
    for task in tasks("search_single", "train", 50):
        titles = [one.title for one in task.corpus.documents]
        for title in task.supporting:
            for word in title.split():
                assert sum(word in other.split() for other in titles) >= 2
