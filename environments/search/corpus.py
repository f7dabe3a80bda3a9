"""Documents and their search by BM25; a generated corpus whose questions take two searches."""

from __future__ import annotations

import functools
import json
import logging
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_atgrpo import Split, stable_hash
from verl_atgrpo.environments.common.options import option_error
from verl_atgrpo.environments.common.records import read_records
from verl_atgrpo.environments.common.splits import draw_for
from verl_atgrpo.environments.search.answers import normalised

GIVEN = (
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karin", "Louis", "Maria",
    "Nikos", "Olga", "Pedro", "Quinn", "Rosa", "Simon", "Tessa", "Ulrich", "Vera", "Walter", "Xenia", "Yusuf", "Zelda",
)  # fmt: skip
FAMILIES = ("Berg", "Costa", "Duval", "Ekman", "Fontana", "Gray", "Holm", "Ivers")
PLACES = (
    "Alba", "Brunn", "Corda", "Delme", "Elba", "Faro", "Gandia", "Horta", "Izmir", "Jaca", "Kalmar", "Lindau",
    "Murcia", "Narvik", "Ostia", "Parma",
)  # fmt: skip
KINDS = ("New", "Old", "Port", "Saint")
RIVERS = (
    "Adda", "Bure", "Cher", "Drina", "Ebro", "Fulda", "Garonne", "Havel", "Isar", "Jiu", "Kupa", "Loire", "Meuse",
    "Neris", "Oise", "Piave",
)  # fmt: skip
PEOPLE = tuple((given, family) for given in GIVEN for family in FAMILIES)
CITIES = tuple((kind, place) for kind in KINDS for place in PLACES)
ASKED = "river"
"""What a generated question asks for, in words; one about a person that has this word asks for two facts at once."""
_NAMESAKES = 3
"""The person of a question and two who share a name with it, so that one name does not find it; likewise the city."""

_SHORT = 3
"""Letters of a title that may be a common word."""


@dataclass(frozen=True)
class Document:
    """A title and a text; a result of a search."""

    title: str
    text: str

    @property
    def shown(self) -> str:
        """Returns it as agents see it."""
        return self.text if self.text.startswith(self.title) else f"{self.title}: {self.text}"


@dataclass(frozen=True)
class Question:
    """A question, what answers it, and where that stands."""

    text: str
    answers: tuple[str, ...]
    supporting: tuple[str, ...]
    """Titles of the documents that are needed for the answer."""
    corpus: Corpus

    @property
    def said(self) -> str:
        """The first accepted answer."""
        return self.answers[0]


class Corpus:
    """Documents that are searched by BM25 (Robertson; `bm25s` computes it), in this process and without a network."""

    def __init__(self, documents: Iterable[Document], salt: int = 0) -> None:
        """Keeps the documents; the first search makes the index.

        Args:
            documents: of several with the same title and text one is kept.
            salt: decides, with a document's text, which of equally good results come first. The query does not: in
                other words it would draw again.
        """
        self.documents = tuple(dict.fromkeys(documents))
        self._salt = salt

    @functools.cached_property
    def _index(self) -> Any:
        import bm25s

        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG, and logs every index
        index = bm25s.BM25()
        texts = [f"{document.title} {document.text}" for document in self.documents]
        index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
        return index

    @functools.cached_property
    def _lots(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The order of equally good results."""
        return np.array([stable_hash(self._salt, one.title, one.text) for one in self.documents], np.int64)

    def search(self, query: str, most: int) -> list[Document]:
        """Returns the best documents that share a word with the query, at most `most`; at ties by lot."""
        import bm25s

        (words,) = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
        if not words:
            return []
        scores = self._index.get_scores(words)
        found = scores.nonzero()[0]
        best = found[np.lexsort((self._lots[found], -scores[found]))]
        return [self.documents[number] for number in best[:most]]


@dataclass(frozen=True)
class Facts:
    """Who lives where, and which river is there: people and cities, each in a document of its own."""

    lives_in: tuple[tuple[str, str], ...]
    lies_on: tuple[tuple[str, str], ...]
    asked: str
    """The person whose city's river is asked for."""
    salt: int = 0
    """Decides the order of the documents, and of equally good results."""

    @property
    def chain(self) -> tuple[str, str, str]:
        """Person, city and river of the question."""
        city = dict(self.lives_in)[self.asked]
        return self.asked, city, dict(self.lies_on)[city]

    @property
    def documents(self) -> list[Document]:
        """The corpus, shuffled."""
        found = [Document(person, f"{person} lives in {city}.") for person, city in self.lives_in]
        found += [Document(city, f"{city} lies on the {river}.") for city, river in self.lies_on]
        random.Random(self.salt).shuffle(found)
        return found

    @property
    def question(self) -> Question:
        """The question about them: it takes two searches, and the second one's words are in the first one's result."""
        person, city, river = self.chain
        text = f"Which {ASKED} does the city of {person} lie on?"
        return Question(text, (river,), (person, city), Corpus(self.documents, self.salt))


def two_hop(split: Split, index: int, seed: int, people: int, cities: int) -> Facts:
    """Returns generated facts: every task has its own, so answers cannot be learnt by heart.

    The chain of person, city and river decides the split.
    """
    rng = random.Random(stable_hash("two_hop", seed, split, index))

    def draw() -> Facts:
        names, towns = _names(rng, PEOPLE, people), _names(rng, CITIES, cities)
        lies_on = tuple((town, rng.choice(RIVERS)) for town in towns)
        lives_in = tuple((name, towns[0] if name == names[0] else rng.choice(towns)) for name in names)
        return Facts(lives_in, lies_on, names[0], rng.getrandbits(62))

    found = draw_for(split, draw, lambda facts: " ".join(facts.chain))
    assert found is not None  # one chain in eight belongs to validation
    return found


def _names(rng: random.Random, known: Sequence[tuple[str, str]], count: int) -> list[str]:
    """Returns names of two words: one, another with its first word, another with its second word, and any others."""
    one = rng.choice(known)
    like = [rng.choice([other for other in known if other != one and other[part] == one[part]]) for part in (0, 1)]
    others = rng.sample([other for other in known if other not in (one, *like)], count - _NAMESAKES)
    return [" ".join(name) for name in (one, *like, *others)]


def read_corpus(source: object, option: str) -> Corpus:
    """Returns the corpus of a section with `path` and, if needed, `columns` (title, text).

    Raises EnvironmentConfigError if it cannot be read.
    """
    rows = read_records(source, option, {"title": "title", "text": "text"})
    return Corpus(Document(str(row["title"]), str(row["text"])) for row in rows)


def read_questions(source: object, option: str) -> list[Question]:
    """Returns the questions of a data set, each with a corpus of its own documents.

    HotpotQA and 2WikiMultihopQA have the columns `context` and `supporting_facts`, as mappings, pairs or JSON; a data
    set without them needs a corpus.

    Raises EnvironmentConfigError if it cannot be read.
    """
    names = ("question", "answer", "context", "supporting_facts")
    found = []
    for row in read_records(source, option, {name: name for name in names}, ("context", "supporting_facts")):
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        asked = isinstance(row["question"], str) and bool(row["question"].strip())
        if not asked or not answers or not all(isinstance(one, str) and normalised(one) for one in answers):
            raise option_error(
                f"{option}: the question {str(row['question'])[:80]!r} has the answer {str(row['answer'])[:80]!r}; "
                "both are texts with words, or the answer is a list of texts"
            )
        facts = _parsed(row["supporting_facts"]) or ()
        titles = facts["title"] if isinstance(facts, Mapping) else [fact[0] for fact in facts]
        own = _paragraphs(_parsed(row["context"]))
        found.append(Question(row["question"], tuple(answers), tuple(dict.fromkeys(titles)), Corpus(own)))
    return found


def _paragraphs(context: Any) -> list[Document]:
    """Returns a row's documents: `{"title": [...], "sentences": [[...], ...]}`, or pairs of title and sentences."""
    if not context:
        return []
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
    return [Document(str(title), "".join(sentences).strip()) for title, sentences in pairs]


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def contains_title(text: str, titles: Sequence[str]) -> list[str]:
    """Returns the titles that a text names as whole words; short ones (`It`) with the case of their letters."""

    def named(title: str) -> bool:
        case = 0 if len(title) <= _SHORT else re.IGNORECASE
        return re.search(rf"(?<!\w){re.escape(title)}(?!\w)", text, case) is not None

    return [title for title in titles if named(title)]
