"""Demonstrations for generated questions that take two searches: calls, summaries and answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from verl_atgrpo.environments.search import Search
from verl_atgrpo.environments.search.corpus import FAMILIES, GIVEN, KINDS, PLACES, RIVERS, Question
from verl_atgrpo.play.messages import Message
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.tiny_models.demonstrations.demonstrator import Choice, Demonstration, Demonstrator, sure, write

_WHERE, _RIVER = ("Where does ", " live?"), ("Which river is in ", "?")
_ASK, _SEARCH = '{"name": "ask_worker", "arguments": {"question": "', '{"name": "search", "arguments": {"query": "'
_CLOSE = '"}}'


_SECOND = tuple(f" {word}" for word in (*FAMILIES, *PLACES))
_ALIKE = (GIVEN, KINDS, RIVERS, _SECOND[: len(FAMILIES)], _SECOND[len(FAMILIES) :])
"""Tokens that are confused with each other."""


def _unsure(name: str, noise: float) -> list[Choice]:
    """Returns distributions over a name's tokens that with probability `noise` each give a random one of its kind."""
    first, blank, second = name.partition(" ")
    choices = []
    for token in (first, blank + second) if blank else (first,):
        kind = next(tokens for tokens in _ALIKE if token in tokens)
        choices.append({other: noise / len(kind) + (other == token) * (1 - noise) for other in kind})
    return choices


def _call(begin: str, before: Sequence[str], name: str, after: Sequence[str], noise: float) -> list[Choice]:
    text = [*sure(before), *_unsure(name, noise), *sure(after)]
    return [*sure(("<tool_call>", begin)), *text, *sure((_CLOSE, "</tool_call>"))]


def _turn(tool: str, argument: str, value: str, result: str) -> list[Message]:
    """Returns a call and its result."""
    function = {"name": tool, "arguments": json.dumps({argument: value})}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": result},
    ]


def demonstrate(env: Search, rng: random.Random, noise: float) -> Demonstration:
    """Returns a planner's question or answer, or a worker's search or summary; names are random with `noise`."""
    task: Question = env.task("train", rng.randrange(10**6))
    (person, city), river = task.supporting, task.said
    hops = [(_WHERE, person, city), (_RIVER, city, river)]
    if rng.random() < 0.5:
        before, done = list(env.planner_prompt(task)), rng.randrange(3)
        for (begin, end), name, found in hops[:done]:
            before += _turn("ask_worker", "question", f"{begin}{name}{end}", found)
        tools = [Tool("ask_worker", "", {"properties": {"question": {}}})]
        if done == len(hops):
            return Demonstration(before, *write(_unsure(river, noise), rng), tools)
        (begin, end), name, _ = hops[done]
        return Demonstration(before, *write(_call(_ASK, (begin,), name, (end,), noise), rng), tools)
    (begin, end), name, found = rng.choice(hops)
    before = list(env.worker_prompt(f"{begin}{name}{end}"))
    tools = [Tool("search", "", {"properties": {"query": {}}})]
    if rng.random() < 0.5:
        return Demonstration(before, *write(_call(_SEARCH, (), name, (), noise), rng), tools)
    before += _turn("search", "query", name, env.searched(task, name))
    return Demonstration(before, *write(_unsure(found, noise), rng), tools)


SEARCH = Demonstrator(
    "search",
    {"style": "compact", "results": 2},
    demonstrate,
    response_length=10,
    words=(
        *("<tool_call>", "</tool_call>", _ASK, _SEARCH, _CLOSE, *_WHERE, _RIVER[0]),
        *("Which river does the city of ", " lie on?", " lives in ", " lies on the ", "ask_worker", "search"),
        *("question", "query", *GIVEN, *KINDS, *RIVERS, *_SECOND),
    ),
    training={"clean_steps": 900, "noise": 0.2},
)
