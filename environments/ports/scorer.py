"""The process in which reasoning-gym's data sets score answers, under limits and without evaluating them.

A data set and its task are made here again from its name, options and seed, so that only texts pass.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Mapping, Set
from types import CodeType
from typing import Any

from verl_atgrpo.environments.common.limited import serve
from verl_atgrpo.environments.ports.foreign import FAULTS, seeded

CPU_SECONDS = 2.0
"""CPU time of one score; a usual one takes less than a hundredth."""
MEMORY_BYTES = 4 << 30
_SIZES = {"acre": 5}
"""Sizes of data sets that have all their kinds of questions only from there on."""


class _Evaluated(Exception):
    """A scorer passes an answer to `eval` or `exec`."""


class _Guard:
    """Hears of all code that the process executes, and refuses what an answer has brought."""

    def __init__(self) -> None:
        self.learnt: set[CodeType] | None = None
        """What a task's own answer makes its scorer execute is added here."""
        self.allowed: Set[CodeType] | None = None
        """While an answer is scored: the only texts that may be executed."""
        self.met = False
        """Whether another one was met."""
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "exec" or (self.learnt is None and self.allowed is None):
            return
        code = arguments[0]
        # Modules that a scorer imports have a file's name, text that is evaluated has `<string>` or the like.
        if isinstance(code, CodeType) and (code.co_filename[:1] != "<" or code.co_filename.startswith("<frozen ")):
            return
        if self.learnt is not None:
            self.learnt.add(code)
        elif self.allowed is not None and code not in self.allowed:
            self.met = True
            raise _Evaluated


def draw(dataset: str, options: Mapping[str, Any], seed: int) -> tuple[Any, Mapping[str, Any]]:
    """Returns a data set and one of its entries."""
    from reasoning_gym import create_dataset
    from reasoning_gym.composite import DatasetSpec

    options = dict(options)
    if dataset == "composite":
        options["datasets"] = [DatasetSpec(**{"config": {}, "weight": 1.0, **part}) for part in options["datasets"]]
    size = _SIZES.get(dataset, 1)
    with seeded(seed):
        made = create_dataset(dataset, seed=seed, size=size, **options)
        return made, made[seed % size]


def main() -> None:
    """Reads {modules, dataset, options, seed, answer}; writes score, whether the scorer executes texts, and question.

    `modules` are imported first, as they register data sets.
    """
    guard = _Guard()

    @functools.lru_cache(maxsize=64)
    def task(modules: str, dataset: str, options: str, seed: int) -> tuple[Any, Mapping[str, Any], Set[CodeType]]:
        for module in json.loads(modules):
            importlib.import_module(module)
        made, entry = draw(dataset, json.loads(options), seed)
        # Its own answer: the scorer imports what it needs, and may evaluate its problem, which is no reply.
        learnt: set[CodeType] = set()
        guard.learnt = learnt
        _paid(made, str(entry.get("answer")), entry)
        guard.learnt = None
        return made, entry, learnt

    def drawn(request: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any], Set[CodeType]]:
        options = json.dumps(request["options"])
        return task(json.dumps(request["modules"]), request["dataset"], options, request["seed"])

    def answer(request: Mapping[str, Any]) -> object:
        made, entry, guard.allowed = drawn(request)
        guard.met = False
        score = _paid(made, request["answer"], entry)
        guard.allowed = None
        return score, guard.met, str(entry["question"]).strip()

    serve(answer, lambda request: CPU_SECONDS, MEMORY_BYTES, prepare=drawn)


def _paid(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    try:
        with seeded(0):
            score = float(dataset.score_answer(answer, entry))
    except (*FAULTS, _Evaluated):  # some scorers raise on an answer of another form
        return 0.0
    return min(1.0, max(0.0, score))  # max() turns nan into 0


if __name__ == "__main__":
    main()
