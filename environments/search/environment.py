"""Questions that take several searches: a planner and a worker, a verifier that routes, and a single agent.

`Search` follows MATPO (arXiv 2510.04678): the planner asks a worker, which searches in a context of its own and
answers with a summary. `RoutedSearch` follows the search team of Dr. MAS (arXiv 2602.08847): a verifier says whether
to search or to answer. Corpora are files or data sets and are searched offline; without any, tasks are generated.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from verl_atgrpo import Agent, Message, Outcome, Score, Split, Team
from verl_atgrpo.environments.common.options import Turns, check_installed, option_error, with_options
from verl_atgrpo.environments.common.records import DataSetEnvironment
from verl_atgrpo.environments.common.replies import after_thoughts
from verl_atgrpo.environments.common.words import read_word
from verl_atgrpo.environments.common.workflow import chat
from verl_atgrpo.environments.search.answers import contains, exact, f1, normalised
from verl_atgrpo.environments.search.corpus import (
    ASKED,
    CITIES,
    PEOPLE,
    Corpus,
    Document,
    Question,
    contains_title,
    read_corpus,
    read_questions,
    two_hop,
)
from verl_atgrpo.play.messages import Reply
from verl_atgrpo.play.tool_use import ToolUse, use_tools

_DOCUMENT = 2000
"""Characters of a document, from its start, that a search shows."""
_LONGEST, _WORDS = 100, 8
"""Most characters and words of a query: the whole prompt as a query would find whatever it names."""
_OWN = 1
"""Words of the planner's own question that a question to the worker may leave out and still be a copy of it."""
_QUESTION = 500
"""Most characters of a question to the worker, whose prompt it is, and of the worker's answer."""
_ASK = "Answer with a few words and nothing else."


@with_options
class SearchEnvironment(DataSetEnvironment[Question]):
    """Questions over a corpus; subclasses define who searches."""

    train: object = None
    """Training questions (columns: question, answer, context, supporting_facts); null for both splits: generated
    ones."""
    val: object = None
    """Validation questions."""
    corpus: object = None
    """Documents (columns: title, text); null: the contexts of all questions."""
    results: Annotated[int, Ge(1), Le(100)] = 3
    """Documents that a search returns."""
    max_turns: Turns = 4
    """Replies of the agent that answers; rounds of the routed team."""
    max_searches: Turns = 3
    """Replies of a worker, each a search or its answer."""
    people: Annotated[int, Ge(4), Le(len(PEOPLE))] | None = None
    """People of a generated task (48)."""
    cities: Annotated[int, Ge(4), Le(len(CITIES))] | None = None
    """Cities of a generated task (24)."""
    seed: int | None = None
    """Generated tasks derive from it (0)."""

    def __post_init__(self) -> None:
        check_installed("bm25s", "bm25s, which searches,", "search")
        self.generated = self.train is None and self.val is None
        if self.generated:
            if self.corpus is not None:
                raise option_error(
                    "corpus: generated questions have their own documents; set train and val, or corpus: null"
                )
            return
        for name in ("people", "cities", "seed"):
            if (value := getattr(self, name)) is not None:
                raise option_error(f"{name}={value}: has no effect on the questions of a data set; set it to null")
        self._read()

    def _read(self) -> None:
        shared = None if self.corpus is None else read_corpus(self.corpus, "corpus")
        self.read_tasks(lambda split, section, where: read_questions(section, where))
        everything = [question for tasks in self._tasks.values() for question in tasks]
        corpus = shared or Corpus(document for question in everything for document in question.corpus.documents)
        if not corpus.documents:
            raise option_error("corpus=null: the questions have no column context; name a corpus of documents")
        for split, tasks in self._tasks.items():
            self._tasks[split] = tuple(replace(question, corpus=corpus) for question in tasks)

    def task(self, split: Split, index: int) -> Question:
        """Returns question `index` of `split`."""
        if self.generated:
            return two_hop(split, index, self.seed or 0, self.people or 48, self.cities or 24).question
        return super().task(split, index)

    def num_tasks(self, split: Split) -> int | None:  # type: ignore[override]
        """Returns the number of questions of a data set; None for generated ones."""
        return None if self.generated else super().num_tasks(split)

    def data_sets(self, split: Split) -> dict[str, int]:
        """Returns the named data sets of `split` and how many questions each has."""
        return {} if self.generated else super().data_sets(split)

    def fingerprint(self, task: Question) -> str:
        """Returns the question, with a generated task's documents."""
        own = " ".join(document.text for document in task.corpus.documents) if self.generated else ""
        return f"{task.text.casefold()} {own}".strip()

    def task_key(self, task: Question) -> str:
        """Returns the question, or the chain of facts of a generated one, which decides its split."""
        return " ".join((*task.supporting, *task.answers)) if self.generated else self.fingerprint(task)

    def dedup_text(self, task: Question) -> str | None:
        """Returns the question; None for generated ones, which look alike."""
        return None if self.generated else task.text

    # ------------------------------------------------------------------ scores

    def score_answer(self, task: Question, answer: str) -> Score:
        """Scores an answer: 1 for the team if it matches exactly, and for the agent `likeness`."""
        return Score(team=float(exact(answer, task.answers)), local=self.likeness(answer, task.answers))

    def likeness(self, answer: str, right: Sequence[str]) -> float:
        """Returns an answer's F1; of a generated task its exact match, as a list of some names would earn F1."""
        return float(exact(answer, right)) if self.generated else f1(answer, right)

    def score_search(self, wanted: Sequence[str], corpus: Corpus, seen: str, query: str) -> Score:
        """Scores a query: 1 if it finds a wanted document that is not in what was seen.

        Args:
            wanted: titles; of a generated task each is wanted when those before it were seen.
            corpus: what is searched.
            seen: the agent's prompt.
            query: its words.
        """
        if _too_long(query):
            return Score()
        if self.generated:
            shown = [one.title for one in corpus.documents if one.title in wanted and _shown(one) in seen]
            wanted = [title for title in wanted if title not in shown][:1]
        found = corpus.search(query, self.results)
        return Score(local=float(any(one.title in wanted and _shown(one) not in seen for one in found)))

    def outcome(self, task: Question, answer: str | None, **metrics: float) -> Outcome:
        """Returns the outcome of an episode: exact match, as the papers' reward, and F1 as a metric."""
        right = answer is not None and exact(answer, task.answers)
        return Outcome(right, float(right), {"f1": 0.0 if answer is None else f1(answer, task.answers), **metrics})

    def searched(self, task: Question, query: str) -> str:
        """Returns the results of a search as agents see them."""
        if _too_long(query):
            return f"A query has at most {_WORDS} words and {_LONGEST} characters."
        found = task.corpus.search(query, self.results)
        return "\n".join(map(_shown, found)) or "Nothing was found."

    async def look_up(
        self,
        task: Question,
        wanted: Sequence[str],
        agent: Agent,
        prompt: list[Message],
        turns: int,
        score_end: Callable[[str], Score],
    ) -> ToolUse:
        """Lets an agent search until it answers.

        Args:
            task: the question.
            wanted: titles of the documents that it has to find.
            agent: who searches.
            prompt: what it is asked.
            turns: most replies.
            score_end: the score of an answer.
        """

        def search(query: str) -> str:
            """Searches the documents for words."""
            return self.searched(task, query)

        def score(before: Sequence[Message], reply: Reply) -> Score:
            if not reply.calls:
                return Score() if reply.unparsed else score_end(reply.text)
            queries = [_argument(call.arguments, "query") for call in reply.calls if call.name == "search"]
            seen = "\n".join(str(message["content"]) for message in before)
            worth = [
                self.score_search(wanted, task.corpus, seen, query).local for query in queries if query is not None
            ]
            # Of calls side by side the mean: one of many would find something whatever the question.
            return Score(local=sum(worth) / len(reply.calls))

        most = self.results * (_DOCUMENT + 1)
        return await use_tools(agent, prompt, [search], score, max_turns=turns, max_characters=most)


class Search(SearchEnvironment):
    """A planner asks a worker, who searches in a context of its own and answers with a summary (MATPO)."""

    agents: ClassVar[tuple[str, ...]] = ("planner", "worker")

    async def run(self, task: Question, team: Team) -> Outcome:
        """Plays one episode; success means that the planner's answer matches exactly."""
        searches = 0

        async def ask_worker(question: str) -> str:
            """Asks a worker, who can search and knows nothing but your question."""
            nonlocal searches
            if len(question) > _QUESTION:
                return f"A question has at most {_QUESTION} characters."
            done = await self.look_up(
                task,
                self.wanted(task, question),
                team.worker,
                self.worker_prompt(question),
                self.max_searches,
                lambda answer: self.score_summary(task, question, answer),
            )
            searches += done.calls
            return "The worker gave no answer." if done.answer is None else done.answer.text[:_QUESTION]

        def score(before: Sequence[Message], reply: Reply) -> Score:
            if not reply.calls:
                return Score() if reply.unparsed else self.score_answer(task, reply.text)
            asked = [_argument(call.arguments, "question") for call in reply.calls if call.name == "ask_worker"]
            calls = [call for message in before for call in message.get("tool_calls") or ()]
            earlier = "\n".join(
                (_argument(call["function"]["arguments"], "question") or "")[:_QUESTION] for call in calls
            )
            worth = [self.score_question(task, earlier, question) for question in asked if question is not None]
            return Score(local=sum(worth) / len(reply.calls))  # as in `look_up`

        system = (
            "You answer questions. A worker can search documents for you; it knows nothing but what you ask it. Ask "
            f"for one fact at a time. When you know the answer, {_ASK[0].lower()}{_ASK[1:]}"
        )
        prompt = chat(task.text, system)
        # No time-out: the worker's requests have their own, and wait while weights are synced.
        done = await use_tools(team.planner, prompt, [ask_worker], score, max_turns=self.max_turns, timeout=None)
        answer = None if done.answer is None else done.answer.text
        return self.outcome(task, answer, questions=float(done.calls), searches=float(searches))

    def worker_prompt(self, question: str) -> list[Message]:
        """Returns the worker's prompt."""
        return chat(question, f"You search documents to answer a question. {_ASK}")

    def wanted(self, task: Question, question: str) -> Sequence[str]:
        """Returns the titles of what a worker has to find: of a generated task, from the first one that is named."""
        if not self.generated:
            return task.supporting
        named = contains_title(question, task.supporting)
        return task.supporting[task.supporting.index(named[0]) :] if named else ()

    def score_question(self, task: Question, earlier: str, question: str) -> float:
        """Scores a question to the worker: 1 if it names a supporting document not asked about before.

        One that repeats the planner's own question is worth nothing, nor is one that is too long, which is not asked.
        Of a generated task, whose names can be guessed, it names the document that is next and no other, and asks
        about a person only for the city.
        """
        if len(question) > _QUESTION or len(_words(task.text) - _words(question)) <= _OWN:
            return 0.0
        new = [title for title in task.supporting if title not in contains_title(earlier, task.supporting)]
        named = contains_title(question, task.supporting)
        if not self.generated:
            return float(bool(set(named) & set(new)))
        others = [one.title for one in task.corpus.documents if one.title not in task.supporting]
        one_fact = named == new[:1] and not contains_title(question, others)
        return float(one_fact and bool(named) and not (named[0] == task.supporting[0] and ASKED in _words(question)))

    def score_summary(self, task: Question, question: str, answer: str) -> Score:
        """Scores a worker's answer by its likeness to the answer or the title of a supporting document.

        Documents that the question names do not count, nor do those that the task names, which are no news. Of a
        generated task only what was asked for is right: a person's city, or the river.
        """
        if self.generated:
            person, city = task.supporting
            both = ASKED in _words(question)
            named = contains_title(question, task.supporting)
            right = task.answers if city in named or (both and named) else (city,) if person in named else ()
            return Score(local=self.likeness(answer, right))
        named = contains_title(f"{task.text}\n{question}", task.supporting)
        # A title without words, such as !!!, would be an empty answer's.
        further = [title for title in task.supporting if title not in named and normalised(title)]
        return Score(local=self.likeness(answer, (*task.answers, *further)))


@with_options
class RoutedSearch(SearchEnvironment):
    """A verifier says whether to search or to answer, and one of two others does it (Dr. MAS)."""

    agents: ClassVar[tuple[str, ...]] = ("verifier", "searcher", "answerer")
    max_searches: Turns = field(default=1, init=False)

    async def run(self, task: Question, team: Team) -> Outcome:
        """Plays one episode; success means that the answer matches exactly."""
        found: list[str] = []
        for _ in range(self.max_turns):
            verdict = await team.verifier.act(
                self.prompt(task, found, "Is this enough to answer? Say search or answer."),
                functools.partial(_routed, self.enough(task, found)),
            )
            said = read_word(verdict.text, ("search", "answer"))
            if said is not None and said.value == "answer":
                break
            query = await team.searcher.act(
                self.prompt(task, found, "Write the words to search for, and nothing else."),
                functools.partial(self._score_query, task, "\n".join(found)),
            )
            found.append(self.searched(task, after_thoughts(query.text).strip()))
        answer = await team.answerer.act(
            self.prompt(task, found, _ASK), lambda reply: self.score_answer(task, after_thoughts(reply))
        )
        return self.outcome(
            task, after_thoughts(answer.text), searches=float(len(found)), enough=float(self.enough(task, found))
        )

    def _score_query(self, task: Question, seen: str, reply: str) -> Score:
        return self.score_search(task.supporting, task.corpus, seen, after_thoughts(reply).strip())

    def enough(self, task: Question, found: Sequence[str]) -> bool:
        """Returns whether what was found has the answer and all supporting documents; nothing is never enough."""
        text = "\n".join(found)
        documents = [one for one in task.corpus.documents if one.title in task.supporting and _shown(one) in text]
        return (
            bool(found) and contains(text, task.answers) and {one.title for one in documents} == set(task.supporting)
        )

    def prompt(self, task: Question, found: Sequence[str], ask: str) -> list[Message]:
        """Returns a prompt: the question, what was found, and the instruction."""
        return chat("\n".join((task.text, *(found or ["Nothing was found yet."]), ask)))


@with_options
class SingleSearch(SearchEnvironment):
    """One agent searches until it answers."""

    agents: ClassVar[tuple[str, ...]] = ("solo",)
    max_searches: Turns = field(default=1, init=False)

    async def run(self, task: Question, team: Team) -> Outcome:
        """Plays one episode; success means that the answer matches exactly."""
        prompt = chat(task.text, f"You search documents to answer a question. {_ASK}")
        done = await self.look_up(
            task, task.supporting, team.solo, prompt, self.max_turns, lambda answer: self.score_answer(task, answer)
        )
        return self.outcome(task, None if done.answer is None else done.answer.text, searches=float(done.calls))


def _too_long(query: str) -> bool:
    return len(query) > _LONGEST or len(re.findall(r"\w+", query)) > _WORDS


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def _shown(document: Document) -> str:
    return document.shown[:_DOCUMENT]


def _routed(enough: bool, reply: str) -> Score:
    said = read_word(reply, ("search", "answer"))
    return Score() if said is None or (said.value == "answer") != enough else said.worth(1.0)


def _argument(arguments: str, name: str) -> str | None:
    """Returns the one text argument of a call, or None if that is not what it has."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    value = given.get(name) if isinstance(given, dict) and len(given) == 1 else None
    return value if isinstance(value, str) else None
