"""Adapter for reasoning-gym's data sets (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_atgrpo.environment import Environment, EnvironmentConfigError, Message, Outcome, Score, Split, stable_hash
from verl_atgrpo.environments.adapters.foreign import FAULTS, line, seeded
from verl_atgrpo.environments.common.options import Turns, check_installed, checked_options
from verl_atgrpo.environments.common.replies import after_thoughts, labelled, labels
from verl_atgrpo.environments.common.splits import draw_for
from verl_atgrpo.environments.common.workflow import Style, chat
from verl_atgrpo.quoting import quoted, shortened
from verl_atgrpo.team import Team

LONGEST = 10_000
"""Most characters of an answer; a longer one does not parse."""
_FORMAT = 0.1
_EVALUATING = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
"""Data sets whose scorers pass a reply to Python's eval or to sympy's parse_expr, which calls eval; in reasoning-gym
0.1.25."""
_CONSTANTS = (
    *("0", "1", "-1", "2", "10", "0.5", "nan", "inf", "-inf", "0j", "nan+nanj", "True", "False", "None", "yes", "no"),
    *("A", "a", "x", "all", "[]", "()", "{}", "''", ".", "-", "?", "heads", "tails", "impossible"),
)
"""Answers that must not pay whatever the question is."""
_TRIED, _MARGIN = 8, 0.3
"""Questions on which constants are tried, and how much more than chance one may earn there."""
_RUNAWAY = re.compile(r"[eE][+-]?[\d_,]{4}")
"""Numbers that a scorer would expand to all their digits."""
_TAG, _END_TAG = re.compile("<answer>", re.IGNORECASE), re.compile("</answer>", re.IGNORECASE)
_LABELS = labels("(?!)", "(?:the )?final answer")
_MARKUP = " \t\r\n*_`.$"
_WRAPPED = re.compile(r"(?s)\*\*([^*]+)\*\*|`([^`]+)`|```\w*\n([^`]*?)\n?```|\$?\\boxed\{([^{}]*)\}\$?")
_ASK = "Write the final answer, and nothing but it, into one <answer> element at the very end."


@dataclass(frozen=True)
class ReasoningTask:
    """A question and the objects with which its data set scores an answer."""

    question: str
    entry: Mapping[str, Any]
    dataset: Any
    """reasoning-gym's data set, of size 1."""


class ReasoningGym(Environment):
    """A solver drafts, a checker sees the draft and answers; after a wrong answer both try again."""

    agents: ClassVar[tuple[str, ...]] = ("solver", "checker")

    @checked_options
    def __init__(
        self,
        dataset: str = "",
        options: Mapping[str, Any] | None = None,
        max_turns: Turns = 2,
        style: Style = "full",
        seed: int = 0,
    ) -> None:
        """Makes one task to check that the data set's scorer is usable.

        Args:
            dataset: name of the data set, or `composite`.
            options: options of the data set; for `composite` a list `datasets` of mappings with name, weight, config.
            max_turns: turns of an episode (T).
            style: `full` prompts say what an answer looks like (<answer>...</answer>); with `compact` the prompt is
                the question with earlier answers, and the reply is the answer.
            seed: tasks derive from it.

        Raises EnvironmentConfigError for an invalid value, and for a data set that cannot be made, or whose scorer
        rewards nonsense or evaluates replies as code.
        """
        check_installed("reasoning_gym", "reasoning-gym", "reasoning-gym")
        self.where = f"at_grpo.environment.dataset={dataset!r}"
        self.dataset, self.options = dataset, dict(options or {})
        self.max_turns, self.style, self.seed = max_turns, style, seed
        self._check_dataset()

    def _check_dataset(self) -> None:
        from reasoning_gym.factory import DATASETS

        for key in ("seed", "size"):
            if key in self.options:
                raise EnvironmentConfigError(
                    f"at_grpo.environment.options.{key}={self.options[key]!r} is set for each task: remove it "
                    "(at_grpo.environment.seed is the one to set)"
                )
        mixed = self.dataset == "composite"
        try:
            named = [part["name"] for part in self.options["datasets"]] if mixed else [self.dataset]
        except FAULTS as error:
            raise EnvironmentConfigError(
                f"{self.where}: at_grpo.environment.options.datasets is a list of {{name, weight, config}}"
            ) from error
        for name in named:
            if name not in DATASETS or (mixed and name == "composite"):
                raise EnvironmentConfigError(f"{self.where}: reasoning-gym has no data set {name!r}")
            if name in _EVALUATING:
                raise EnvironmentConfigError(
                    f"{self.where}: the scorer of {name!r} evaluates replies as Python in this process; "
                    "use another data set"
                )
        try:
            task = self._draw(0)
        except FAULTS as error:
            raise EnvironmentConfigError(
                f"{self.where}, options={self.options}: cannot be made, {line(error)}"
            ) from error
        if (paid := self.grade(task, "the quick brown fox")) > 2 * _FORMAT:
            raise EnvironmentConfigError(f"{self.where}: its scorer gives {paid:g} for a wrong answer")
        gold = task.entry.get("answer")
        if isinstance(gold, str) and (paid := self.grade(task, gold)) < 1:
            raise EnvironmentConfigError(
                f"{self.where}: its scorer gives only {paid:g} for its own answer {gold!r:.80}"
            )
        self._check_constants()

    def _check_constants(self) -> None:
        """Raises EnvironmentConfigError if a constant earns more than the best of the tasks' own answers would."""
        tasks = [self._draw(seed) for seed in range(_TRIED)]

        def earned(answer: str) -> float:
            return sum(self.grade(task, answer) for task in tasks) / len(tasks)

        own = [task.entry.get("answer") for task in tasks]
        chance = max((earned(answer) for answer in own if isinstance(answer, str)), default=0.0)
        constant = max(_CONSTANTS, key=earned)
        if (paid := earned(constant)) > chance + _MARGIN:
            raise EnvironmentConfigError(
                f"{self.where}: its scorer gives {paid:.2g} on average for the answer {constant!r} to every question, "
                f"and at most {chance:.2g} for the right answer to one of them"
            )

    # ------------------------------------------------------------------ tasks

    def task(self, split: Split, index: int) -> ReasoningTask:
        """Returns task `index` of `split`; splits are disjoint because the question decides the split."""
        rng = random.Random(stable_hash("reasoning_gym", self.dataset, self.seed, split, index))
        task: ReasoningTask | None = draw_for(split, lambda: self._draw(rng.getrandbits(31)), self.task_key)
        if task is None:
            raise EnvironmentConfigError(
                f"{self.where}, options={self.options}: hardly any question is for the split {split!r}; "
                "use options that allow more questions"
            )
        return task

    def _draw(self, seed: int) -> ReasoningTask:
        from reasoning_gym import create_dataset
        from reasoning_gym.composite import DatasetSpec

        options = dict(self.options)
        if self.dataset == "composite":
            options["datasets"] = [
                DatasetSpec(**{"config": {}, "weight": 1.0, **part}) for part in options["datasets"]
            ]
        with seeded(seed):
            dataset = create_dataset(self.dataset, seed=seed, size=1, **options)
            entry = dataset[0]
        return ReasoningTask(str(entry["question"]).strip(), entry, dataset)

    def fingerprint(self, task: ReasoningTask) -> str:
        """Returns the question without case and layout."""
        return _flat(task.question)

    # ------------------------------------------------------------------ replies and scores

    def parse(self, reply: str) -> str | None:
        """Returns the answer in a reply, or None if it is not in the agreed format."""
        return parse_answer(reply, self.style)

    def grade(self, task: ReasoningTask, answer: str | None) -> float:
        """Returns the data set's score of an answer, between 0 and 1; 1 is solved.

        An answer that repeats the question scores 0: many scorers accept the right words anywhere in an answer.
        """
        if answer is None or _RUNAWAY.search(answer) or _flat(task.question) in _flat(answer):
            return 0.0
        try:
            with seeded(0):
                score = float(task.dataset.score_answer(answer, task.entry))
        except FAULTS:  # some scorers raise on an answer of another form
            return 0.0
        return min(1.0, max(0.0, score))  # max() turns nan into 0

    def _score(self, task: ReasoningTask, reply: str) -> Score:
        answer = self.parse(reply)
        return Score(team=self.grade(task, answer), local=_FORMAT * (answer is not None))

    # ------------------------------------------------------------------ the workflow

    async def run(self, task: ReasoningTask, team: Team) -> Outcome:
        """Plays until solver and checker agree; success means that the checker's last answer scores 1."""
        score = functools.partial(self._score, task)
        answers: list[str] = []
        agreed = False
        while len(answers) < self.max_turns and not agreed:
            draft = await team.solver.act(functools.partial(self._prompt, task, answers), score)
            final = await team.checker.act(functools.partial(self._prompt, task, answers, draft.text), score)
            answers.append(self.parse(final.text) or "")
            agreed = bool(answers[-1]) and answers[-1] == self.parse(draft.text)
        graded = self.grade(task, answers[-1] or None)
        return Outcome(graded == 1, graded, {"turns": float(len(answers))})

    def _prompt(self, task: ReasoningTask, answers: Sequence[str], draft: str | None = None) -> list[Message]:
        if self.style == "compact":
            parts = [task.question, *(answer[:20] for answer in answers)]
            parts += [] if draft is None else [f"Draft {draft.strip()[:20]}"]
            return chat("\n".join(parts))
        role = "solver" if draft is None else "checker"
        parts = [task.question]
        if answers:
            parts.append(f"The checker has answered this, and the solver something else:\n{_listed(answers)}")
        if draft is not None:
            parts.append(f"A solver drafted this; it may be wrong:\n{quoted(shortened(draft))}")
        return chat("\n\n".join([*parts, _ASK]), f"You are the {role} of a team that answers a question.")


def parse_answer(reply: str, style: Style) -> str | None:
    r"""Returns the answer in a reply, or None if it is not in the agreed format.

    `compact`: the whole reply. `full`: the last <answer> element, in any case, with only markup after it; without one,
    the text after `Final answer:` or in the last `\boxed{...}`, at the reply's end. Bold, code quotes, a fence or a
    box around the whole answer are removed.
    """
    text = reply.strip() if style == "compact" else _answer(after_thoughts(reply).strip())
    return text if text is not None and 0 < len(text) <= LONGEST else None


def _answer(text: str) -> str | None:
    tags = [match.span() for match in _TAG.finditer(text)]
    if tags:
        start = tags[-1][1]
        end = _END_TAG.search(text, start)
        return None if end is None or text[end.end() :].strip(_MARKUP) else _bare(text[start : end.start()].strip())
    for label in labelled(text, _LABELS, 2 * LONGEST):
        lines = [line for line in label.lines if line.strip(_MARKUP)]
        return _bare(lines[0].strip("* \t_")) if len(lines) == 1 else None
    return None


def _bare(answer: str) -> str:
    """Returns an answer without markup around the whole of it."""
    while (match := _WRAPPED.fullmatch(answer)) is not None:
        answer = (match[match.lastindex or 0] or "").strip()
    return answer


class SingleReasoningGym(ReasoningGym):
    """One agent answers, sees its earlier answers, and stops when it repeats one (the paper's single agent).

    Its prompts show no draft and no verdict; it has as many turns as the team.
    """

    agents: ClassVar[tuple[str, ...]] = ("solo",)

    async def run(self, task: ReasoningTask, team: Team) -> Outcome:
        """Plays one episode; success means that the last answer scores 1."""
        answers: list[str] = []
        repeated = False
        while len(answers) < self.max_turns and not repeated:
            asked = functools.partial(self._single_prompt, task, answers)
            reply = await team.solo.act(asked, functools.partial(self._score, task))
            answer = self.parse(reply.text) or ""
            repeated = bool(answer) and answer in answers[-1:]
            answers.append(answer)
        graded = self.grade(task, answers[-1] or None)
        return Outcome(graded == 1, graded, {"turns": float(len(answers))})

    def _single_prompt(self, task: ReasoningTask, answers: Sequence[str]) -> list[Message]:
        if self.style == "compact":
            return chat("\n".join([task.question, *(answer[:20] for answer in answers)]))
        parts = [task.question]
        if answers:
            parts.append(f"You have answered:\n{_listed(answers)}")
            parts.append("Check your last answer: give it again if it is right, and another one if not.")
        return chat("\n\n".join([*parts, _ASK]), "You answer a question.")


def _listed(answers: Sequence[str]) -> str:
    return "\n".join(quoted(shortened(answer or "(none)")) for answer in answers)


def _flat(text: str) -> str:
    return " ".join(text.casefold().split())
