"""Search: the corpus, exact match and F1 by hand, who searches, scores, data sets, and reward hacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.scripted_policy import bounded

pytest.importorskip("bm25s", reason="needs the extra `search`")

from verl_atgrpo import EnvironmentConfigError, Score, ScriptedTeam, check_environment, make, play
from verl_atgrpo.environments.search.answers import contains, exact, f1, normalised
from verl_atgrpo.environments.search.corpus import Corpus, Document, Facts, Question, contains_title, two_hop
from verl_atgrpo.environments.search.environment import RoutedSearch, Search, SingleSearch
from verl_atgrpo.environments.search.environment import _argument as argument
from verl_atgrpo.play.testing import Script
from verl_atgrpo.play.types import EpisodeRecord

FACTS = Facts((("Anna", "Faro"), ("Boris", "Alba")), (("Faro", "Adda"), ("Alba", "Cher")), "Anna")
TASK = FACTS.question


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(env: Any, scripts: dict[str, Script], task: Question = TASK, **options: Any) -> EpisodeRecord:
    return bounded(play(env, task, ScriptedTeam(scripts, **options)))


# ------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    ("said", "answers", "right", "share"),
    [
        ("The Adda.", ("Adda",), True, 1.0),
        ("adda!", ("Cher", "Adda"), True, 1.0),
        # Two of three words, both of two: precision 2/3, recall 1.
        ("river Adda Italy", ("Adda Italy",), False, 0.8),
        ("Adda Adda", ("Adda",), False, 2 / 3),
        ("Cher", ("Adda",), False, 0.0),
        ("", ("Adda",), False, 0.0),
        ("yes", ("yes",), True, 1.0),
        ("yes it is", ("yes",), False, 0.0),  # as HotpotQA has it
        ("no", ("no way",), False, 0.0),
        ("the", ("a",), True, 1.0),
        ("x" * 5000, ("Adda",), False, 0.0),
    ],
)
def test_exact_match_and_f1_by_hand(said: str, answers: tuple[str, ...], right: bool, share: float) -> None:
    assert exact(said, answers) == right
    assert f1(said, answers) == pytest.approx(share)


def test_answers_in_texts_are_whole_words() -> None:
    assert normalised("  The U.S.A, an  apple ") == "usa apple"
    assert contains("It lies on the Adda, they say.", ("Adda",))
    assert not contains("It lies on the Addax.", ("Adda",))
    assert contains("x " * 3000 + "Adda.", ("Adda",)), "results are longer than answers"
    assert contains("They were born in Ohio.", ("yes",)), "no document says yes"


# ------------------------------------------------------------------ the corpus


def test_searches_by_hand() -> None:
    corpus = Corpus([*FACTS.documents, *FACTS.documents])
    assert len(corpus.documents) == 4, "the same document is there once"

    def titles(query: str, most: int = 9, corpus: Corpus = corpus) -> list[str]:
        return [one.title for one in corpus.search(query, most)]

    assert titles("Anna") == ["Anna"]
    # Its own document has the word twice, that of its inhabitant once.
    assert titles("Faro") == ["Faro", "Anna"]
    assert titles("Faro", 1) == ["Faro"]
    assert titles("lives") == titles("lives", corpus=Corpus(FACTS.documents[::-1])), "at ties a lot decides"
    firsts = {titles("lives", 1, Corpus(FACTS.documents, salt))[0] for salt in range(20)}
    assert firsts == {"Anna", "Boris"}, "it is drawn for every corpus"
    assert titles("") == titles("the") == titles("\U0001f600") == titles("nobody") == []


def test_titles_are_found_as_whole_words() -> None:
    titles = ["It", "A", "Anna", "New York (state)"]
    assert contains_title("Which city is it? a hint: Annapolis", titles) == []
    assert contains_title("Who directed It, and who is ANNA of new york (state)?", titles) == ["It", *titles[2:]]


def test_generated_questions_take_two_searches() -> None:
    for index in range(30):
        facts = two_hop("train", index, 0, people=12, cities=6)
        person, city, river = facts.chain
        question = facts.question
        assert question.text == f"Which river does the city of {person} lie on?" and question.answers == (river,)
        first = question.corpus.search(question.text, 2)
        assert all(river not in one.text for one in first if one.title != city)
        assert question.corpus.search(city, 1)[0].text == f"{city} lies on the {river}."
        assert not set(question.supporting) - {one.title for one in question.corpus.documents}


# ------------------------------------------------------------------ a planner and a worker


def planner(prompt: str, k: int) -> str:
    told = prompt.splitlines()
    if "Adda" in told[-1]:
        return "Adda"
    return called("ask_worker", question="Which river is in Faro?" if "Faro" in told[-1] else "Where does Anna live?")


def worker(prompt: str, k: int) -> str:
    if "lies on the Adda" in prompt:
        return "Adda"
    if "lives in Faro" in prompt:
        return "Faro"
    return called("search", query="Faro" if "Faro" in prompt else "Anna")


def test_searches_side_by_side_earn_their_mean() -> None:
    def all_names(prompt: str, k: int) -> str:
        return "".join(called("search", query=name) for name in ("Anna", "Boris", "Carl", "Dora"))

    record = played(Search(), {"planner": planner, "worker": all_names})
    assert record_score(record, "worker.0") == Score(local=0.25)

    def all_questions(prompt: str, k: int) -> str:
        return called("ask_worker", question="Where does Anna live?") + called("ask_worker", question="Who is it?")

    record = played(Search(), {"planner": all_questions, "worker": worker})
    assert record_score(record, "planner.0") == Score(local=0.5)


def test_a_planner_asks_a_worker_with_a_context_of_its_own() -> None:
    record = played(Search(), {"planner": planner, "worker": worker})
    assert record.outcome.success
    assert record.outcome.metrics == {"f1": 1, "questions": 2, "searches": 2}
    names = ["worker.0", "worker.1", "planner.0", "worker.2", "worker.3", "planner.1", "planner.2"]
    assert sorted(one.name for one in record.decisions) == sorted(names)
    prompts = {one.name: "".join(map(chr, one.prompt_ids)) for one in record.decisions}
    for name, question in (("worker.0", "Where does Anna live?"), ("worker.2", "Which river is in Faro?")):
        assert prompts[name].startswith("tools: search\n") and prompts[name].endswith(f"\n{question}")
        assert TASK.text not in prompts[name]
    assert prompts["planner.2"].endswith("\nFaro\n\nAdda"), "the planner sees answers, not results"
    assert {name: record_score(record, name) for name in names} == {
        "planner.0": Score(local=1.0),
        "worker.0": Score(local=1.0),
        "worker.1": Score(local=1.0),
        "planner.1": Score(local=1.0),
        "worker.2": Score(local=1.0),
        "worker.3": Score(local=1.0),
        "planner.2": Score(team=1.0, local=1.0),
    }


def record_score(record: EpisodeRecord, name: str) -> Score:
    (found,) = [one.candidates[one.committed].score for one in record.decisions if one.name == name]
    return found


@pytest.mark.parametrize(
    ("says", "scores"),
    [
        # It asks about the same person again, for a made-up tool, and with a wrong argument.
        ([called("ask_worker", question="Anna?"), called("ask_worker", question="anna!")], [1.0, 0.0]),
        ([called("ask_worker", question="anna?"), called("ask_worker", question="ANNA?")], [1.0, 0.0]),
        ([called("find", question="Anna?")], [0.0]),
        ([called("ask_worker", about="Anna")], [0.0]),
        ([called("ask_worker", question="Anna?", more=1)], [0.0]),
        (["<tool_call>Anna Faro</tool_call>"], [0.0]),
        # All names in one reply: an answer is compared as a whole.
        (["Adda Cher Anna Faro"], [0.0]),
        # Its own question, whole, in part or in other words; nothing; the second fact before the first.
        ([called("ask_worker", question=TASK.text)], [0.0]),
        ([called("ask_worker", question=f"Please tell me: {TASK.text.upper()}")], [0.0]),
        ([called("ask_worker", question="river city Anna")], [0.0]),
        ([called("ask_worker", question="Where does Anna live, and on which river is it?")], [0.0]),
        ([called("ask_worker", question="")], [0.0]),
        ([called("ask_worker", question="Which river is in Faro?")], [0.0]),
        # All cities at once, without having read which one it is.
        ([called("ask_worker", question="Anna?"), called("ask_worker", question="Faro Alba?")], [1.0, 0.0]),
        ([called("ask_worker", question="Anna?"), called("ask_worker", question="Faro?")], [1.0, 1.0]),
        ([called("ask_worker", question=7)], [0.0]),
        (['<tool_call>{"name": "ask_worker", "arguments": {"question": ' + "[" * 5000 + "}</tool_call>"], [0.0]),
    ],
)
def test_what_a_planner_earns(says: list[str], scores: list[float]) -> None:
    env = Search(max_turns=len(says))
    turns = iter(says)
    record = played(env, {"planner": lambda prompt, k: next(turns), "worker": lambda prompt, k: "Faro"})
    found = [one.candidates[0].score.local for one in record.decisions if one.agent == "planner"]
    assert found == pytest.approx(scores)


@pytest.mark.parametrize(
    ("says", "scores"),
    [
        ([called("search", query="Anna"), called("search", query="Anna lives"), "Faro"], [1.0, 0.0, 1.0]),
        ([called("search", query="nobody"), "I do not know."], [0.0, 0.0]),
        (["Anna"], [0.0]),
        ([called("search", query="Anna"), "Anna"], [1.0, 0.0]),  # no news, though the results have it
        # Every title at once finds the documents, and is a search as well; a summary of everything is cut off.
        ([called("search", query="Anna Boris Faro Alba")], [1.0]),
        # A list of everything.
        (["Adda Bure Cher Drina Ebro Fulda Garonne Havel Isar Jiu Kupa Loire Meuse Neris Oise Piave"], [0.0]),
        # The river was not asked for, nor the person.
        (["Adda"], [0.0]),
        ([called("search", query="")], [0.0]),
        # More words than a query may have.
        ([called("search", query="Anna " * 9)], [0.0]),
        ([called("search", query="Anna,Boris,Clara,David,Elena,Felix,Greta,Henry,Irene")], [0.0]),
    ],
)
def test_what_a_worker_earns(says: list[str], scores: list[float]) -> None:
    env = Search(max_turns=1, max_searches=len(says))
    turns = iter(says)
    scripts = {"planner": lambda prompt, k: called("ask_worker", question="Anna?"), "worker": lambda p, k: next(turns)}
    record = played(env, scripts)
    assert [one.candidates[0].score.local for one in record.decisions if one.agent == "worker"] == pytest.approx(
        scores
    )


def test_nothing_that_was_said_or_found_is_an_answer() -> None:
    """A title may have no word, and data no supporting facts."""
    corpus = Corpus([Document("!!!", "A band."), Document("Faro", "A city.")])
    banded = Question("Who?", ("Nic",), ("!!!", "Faro"), corpus)
    search = Search()
    search.generated = False
    assert search.score_summary(banded, "Which band?", "").local == 0
    assert search.score_summary(banded, "Which band?", "Faro").local == 1
    routed, asked = RoutedSearch(), Question("Is it?", ("yes",), (), corpus)
    assert not routed.enough(asked, []) and routed.enough(asked, ["Faro: A city."])


def test_deeply_nested_arguments_are_none() -> None:
    """verl's parser of gpt-oss hands them over as they were written."""
    assert argument('{"query": ' + "[" * 5000 + "]" * 5000 + "}", "query") is None
    assert argument('{"query": "Anna"}', "query") == "Anna"


def gold(task: Question) -> dict[str, Script]:
    person, city = task.supporting
    river = task.said

    def plans(prompt: str, k: int) -> str:
        last = prompt.splitlines()[-1]
        if river in last:
            return river
        return called("ask_worker", question=f"River of {city}?" if city in last else f"City of {person}?")

    def works(prompt: str, k: int) -> str:
        if "River" in prompt:
            return river if river in prompt else called("search", query=city)
        return city if "lives in" in prompt else called("search", query=person)

    def single(prompt: str, k: int) -> str:
        last = prompt.splitlines()[-1] if "lives in" in prompt or "lies on" in prompt else ""
        if river in prompt:
            return river
        return called("search", query=city if "lives in" in last else person)

    def verifies(prompt: str, k: int) -> str:
        return "answer" if river in prompt and "lives in" in prompt else "search"

    return {
        "planner": plans,
        "worker": works,
        "solo": single,
        "verifier": verifies,
        "searcher": lambda prompt, k: city if "lives in" in prompt else person,
        "answerer": lambda prompt, k: river,
    }


@pytest.mark.parametrize("name", ["search", "search_routed", "search_single"])
def test_the_environments_keep_the_contract(name: str) -> None:
    options = {"people": 12, "cities": 6}
    listing = " ".join(gold(TASK)["answerer"]("", 0) for _ in range(2))
    exploit = {agent: (lambda prompt, k: listing) for agent in gold(TASK)}
    check_environment(name, options, gold=gold, exploits=[lambda task: exploit], tasks=6, bounds=(0, 1))


def test_a_single_agent_searches_and_answers() -> None:
    record = played(SingleSearch(), {"solo": gold(TASK)["solo"]})
    assert record.outcome.success and record.outcome.metrics == {"f1": 1, "searches": 2}


def test_a_verifier_routes() -> None:
    scripts = gold(TASK)
    team = {agent: scripts[agent] for agent in RoutedSearch.agents}
    record = played(RoutedSearch(), team)
    assert [one.agent for one in record.decisions] == [
        "verifier",
        "searcher",
        "verifier",
        "searcher",
        "verifier",
        "answerer",
    ]
    assert record.outcome.metrics == {"f1": 1, "searches": 2, "enough": 1}
    assert [one.candidates[0].score.local for one in record.decisions] == [1, 1, 1, 1, 1, 1]
    thoughtful = {
        agent: (lambda p, k, script=script: f"<think>It lies on it.</think>\n{script(p, k)}")
        for agent, script in team.items()
    }
    assert [one.candidates[0].score.local for one in played(RoutedSearch(), thoughtful).decisions] == [1] * 6
    hasty = played(RoutedSearch(), {**team, "verifier": lambda prompt, k: "answer"})
    assert [one.candidates[0].score.local for one in hasty.decisions] == [0, 1]
    assert hasty.outcome.metrics["enough"] == 0


# ------------------------------------------------------------------ data sets

HOTPOT = [
    {
        "question": "Which river does Anna's city lie on?",
        "answer": "Adda",
        "context": {"title": ["Anna", "Faro"], "sentences": [["Anna lives", " in Faro."], ["Faro lies on the Adda."]]},
        "supporting_facts": {"title": ["Anna", "Faro", "Anna"], "sent_id": [0, 0, 1]},
    },
]
WIKI = [
    {
        "question": "Who lives in Alba?",
        "answer": ["Boris", "Boris of Alba"],
        "context": [["Boris", ["Boris lives in Alba."]]],
        "supporting_facts": [["Boris", 0]],
    },
]


def written(path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


def test_questions_of_hotpotqa_and_2wiki_and_their_contexts(tmp_path: Path) -> None:
    env = make("search", train=written(tmp_path / "a.jsonl", HOTPOT), val=written(tmp_path / "b.jsonl", WIKI))
    first, second = env.task("train", 0), env.task("val", 0)
    assert (first.answers, first.supporting) == (("Adda",), ("Anna", "Faro"))
    assert (second.answers, second.supporting) == (("Boris", "Boris of Alba"), ("Boris",))
    assert first.corpus is second.corpus
    assert [one.text for one in first.corpus.documents] == [
        "Anna lives in Faro.",
        "Faro lies on the Adda.",
        "Boris lives in Alba.",
    ]
    assert env.num_tasks("train") == env.num_tasks("val") == 1
    assert env.task_key(first) == first.text.casefold() and env.dedup_text(first) == first.text


def test_columns_may_be_json(tmp_path: Path) -> None:
    rows = [{**WIKI[0], "context": json.dumps(WIKI[0]["context"]), "supporting_facts": '[["Boris", 0]]'}]
    section = written(tmp_path / "a.jsonl", rows)
    task = make("search_single", train=section, val=section).task("train", 0)
    assert task.supporting == ("Boris",) and task.corpus.documents == (Document("Boris", "Boris lives in Alba."),)


def test_a_corpus_of_its_own(tmp_path: Path) -> None:
    rows = [{"question": "?", "answer": "Adda"}]
    corpus = written(tmp_path / "c.jsonl", [{"title": "Faro", "text": "It lies on the Adda."}])
    sections = {name: written(tmp_path / f"{name}.jsonl", rows) for name in ("train", "val")}
    env = make("search_single", **sections, corpus=corpus)
    assert env.task("val", 0).corpus.search("faro", 3) == [Document("Faro", "It lies on the Adda.")]
    assert isinstance(env, SingleSearch) and env.searched(env.task("val", 0), "Faro") == "Faro: It lies on the Adda."
    with pytest.raises(EnvironmentConfigError, match="corpus=null: the questions have no column context"):
        make("search", **sections)
    with pytest.raises(EnvironmentConfigError, match="people=5: has no effect on the questions of a data set"):
        make("search", **sections, corpus=corpus, people=5)
    with pytest.raises(EnvironmentConfigError, match=r"environment\.max_searches is not an option of 'search_routed'"):
        make("search_routed", max_searches=2)
    with pytest.raises(EnvironmentConfigError, match="corpus: generated questions have their own documents"):
        make("search", corpus=corpus)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "", "answer": "b"},
        {"question": "q", "answer": "A"},
        {"question": "q", "answer": []},
        {"question": "q", "answer": 3},
    ],
)
def test_questions_without_a_text_are_refused(row: dict[str, Any], tmp_path: Path) -> None:
    section = written(tmp_path / "a.jsonl", [row])
    with pytest.raises(EnvironmentConfigError, match=r"environment\.train: the question .* has the answer"):
        make("search", train=section, val=section)
