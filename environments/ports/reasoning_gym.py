"""reasoning-gym's data sets (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import asyncio
import functools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from verl_atgrpo import Environment, Message, Outcome, Score, Split, Team, stable_hash
from verl_atgrpo.environments.common.limited import LimitedProcess
from verl_atgrpo.environments.common.options import Turns, check_installed, option_error, with_options
from verl_atgrpo.environments.common.replies import after_thoughts, labelled, labels, repeats
from verl_atgrpo.environments.common.splits import draw_for
from verl_atgrpo.environments.common.workflow import Style, chat
from verl_atgrpo.environments.ports import scorer
from verl_atgrpo.environments.ports.foreign import FAULTS, line
from verl_atgrpo.play.quoting import quoted, shortened

LONGEST = 10_000
"""Most characters of an answer; a longer one does not parse."""
_FORMAT = 0.1
_SCORER = LimitedProcess(scorer.__name__)
"""Of all data sets of this process."""
_CONSTANTS = (
    *("0", "1", "-1", "2", "10", "0.5", "nan", "inf", "-inf", "0j", "nan+nanj", "True", "False", "None", "yes", "no"),
    *("A", "a", "x", "all", "[]", "()", "{}", "''", ".", "-", "?", "heads", "tails", "impossible"),
)
"""Answers that must not pay whatever the question is."""
_PROBES = ("1", "the quick brown fox", "1 + 1", "x", "[1]", "[[1, 0], [0, 1]]")
"""Answers that show whether a scorer evaluates them."""
_TRIED, _MARGIN = 8, 0.3
"""Questions on which constants are tried, and how much more than chance one may earn there."""
_TAG, _END_TAG = re.compile("<answer>", re.IGNORECASE), re.compile("</answer>", re.IGNORECASE)
_LABELS = labels("(?!)", "(?:the )?final answer")
_MARKUP = " \t\r\n*_`.$"
_WRAPPED = re.compile(r"(?s)\*\*([^*]+)\*\*|`([^`]+)`|```\w*\n([^`]*?)\n?```|\$?\\boxed\{([^{}]*)\}\$?")
_MATH = re.compile(r"(?s)\$([^$]+)\$|\\\((.+)\\\)|\\text\{([^{}]*)\}")
_ASK = "Write the final answer, and nothing but it, into one <answer> element at the very end."


@dataclass(frozen=True)
class ReasoningTask:
    """A question, its data set's entry, and the seed from which a scorer makes both again."""

    question: str
    entry: Mapping[str, Any]
    seed: int


@with_options
class ReasoningGym(Environment):
    """A solver drafts, a checker sees the draft and answers; after a wrong answer both try again.

    Replies are scored in a process of their own (`scorer`). Refused is a data set that cannot be made, or whose scorer
    rewards nonsense or evaluates replies as code.
    """

    agents: ClassVar[tuple[str, ...]] = ("solver", "checker")

    dataset: str = ""
    """Name of the data set, or `composite`."""
    options: Mapping[str, Any] | None = None
    """Its options; of `composite` a list `datasets` of mappings with name, weight, config."""
    level: Annotated[int, Ge(0), Le(100)] | None = None
    """Level of reasoning-gym's own curriculum of the data set, from 0: all that it makes harder, as far as each goes.
    `options` come before it."""
    max_turns: Turns = 2
    """Most turns of an episode."""
    style: Style = "full"
    """`full` prompts ask for <answer>...</answer>; with `compact` the reply is the answer."""
    seed: int = 0
    """Tasks derive from it."""

    def __post_init__(self) -> None:
        check_installed("reasoning_gym", "reasoning-gym", "reasoning-gym")
        self.where = f"dataset={self.dataset!r}"
        self._options = {**self._of_level(), **(self.options or {})}
        self._check_dataset()

    def _of_level(self) -> dict[str, Any]:
        """Returns the data set's options at a level of its curriculum."""
        from reasoning_gym.factory import DATASETS, create_curriculum, has_curriculum

        if self.level is None or self.dataset not in DATASETS:
            return {}
        if not has_curriculum(self.dataset):
            raise option_error(f"level={self.level}: reasoning-gym has no curriculum of {self.dataset!r}; use options")
        curriculum = create_curriculum(self.dataset)
        numbers = {name: len(attribute.levels) for name, attribute in curriculum.attributes.items()}
        if self.level >= max(numbers.values()):
            highest = max(numbers.values()) - 1
            raise option_error(f"level={self.level}: the curriculum of {self.dataset!r} ends with level {highest}")
        for name, number in numbers.items():
            curriculum.set_attr_level(name, min(self.level, number - 1))
        config = curriculum.generate_configuration()
        # What it changes, as other options may be of types that JSON, by which scorers are asked, has not.
        usual = vars(type(config)())
        return {
            key: value
            for key, value in vars(config).items()
            if key not in ("seed", "size") and value != usual.get(key)
        }

    def _check_dataset(self) -> None:
        from reasoning_gym.factory import DATASETS

        for key in ("seed", "size"):
            if key in self._options:
                raise option_error(
                    f"options.{key}={self._options[key]!r} is set for each task: remove it (at_grpo.environment.seed "
                    "is the one to set)"
                )
        mixed = self.dataset == "composite"
        try:
            named = [part["name"] for part in self._options["datasets"]] if mixed else [self.dataset]
        except FAULTS as error:
            raise option_error(
                f"{self.where}: at_grpo.environment.options.datasets is a list of {{name, weight, config}}"
            ) from error
        for name in named:
            if name not in DATASETS or (mixed and name == "composite"):
                raise option_error(f"{self.where}: reasoning-gym has no data set {name!r}")
            if name == "codeio":
                raise option_error(
                    f"{self.where}: 'codeio' runs its programs in this process to make a task; leave it out"
                )
        self._modules = sorted({DATASETS[name][0].__module__ for name in named})
        try:
            task = self._draw(0)
            parts = [(part["name"], part.get("config", {})) for part in self._options["datasets"]] if mixed else []
            drawn = [(self._drawn(name, options, 0), name, options) for name, options in parts]
        except FAULTS as error:
            raise option_error(f"{self.where}, options={self._options}: cannot be made, {line(error)}") from error
        for part in drawn or [(task, self.dataset, self._options)]:
            self._check_evaluating(*part)
        if (paid := self._paid(task, "the quick brown fox")) > 2 * _FORMAT:
            raise option_error(f"{self.where}: its scorer gives {paid:g} for a wrong answer")
        gold = task.entry.get("answer")
        if isinstance(gold, str) and (paid := self._paid(task, gold)) < 1:
            raise option_error(f"{self.where}: its scorer gives only {paid:g} for its own answer {gold!r:.80}")
        self._check_constants()

    def _check_evaluating(self, task: ReasoningTask, name: str, options: Mapping[str, Any]) -> None:
        """Raises EnvironmentConfigError if a scorer executes one of a few answers; later ones would earn nothing."""
        for answer in (*_PROBES, str(task.entry.get("answer"))):
            if self._ask(name, options, task, answer)[1]:
                raise option_error(
                    f"{self.where}: the scorer of {name!r} evaluates replies as Python; use another data set"
                )

    def _check_constants(self) -> None:
        """Raises EnvironmentConfigError if a constant earns more than the best of the tasks' own answers would."""
        tasks = [self._draw(seed) for seed in range(_TRIED)]

        def earned(answer: str) -> float:
            return sum(self._paid(task, answer) for task in tasks) / len(tasks)

        own = [task.entry.get("answer") for task in tasks]
        chance = max((earned(answer) for answer in own if isinstance(answer, str)), default=0.0)
        constant = max(_CONSTANTS, key=earned)
        if (paid := earned(constant)) > chance + _MARGIN:
            raise option_error(
                f"{self.where}: its scorer gives {paid:.2g} on average for the answer {constant!r} to every question, "
                f"and at most {chance:.2g} for the right answer to one of them"
            )

    # ------------------------------------------------------------------ tasks

    def task(self, split: Split, index: int) -> ReasoningTask:
        """Returns task `index` of `split`; splits are disjoint because the question decides the split."""
        rng = random.Random(stable_hash("reasoning_gym", self.dataset, self.seed, split, index))
        task: ReasoningTask | None = draw_for(split, lambda: self._draw(rng.getrandbits(31)), self.task_key)
        if task is None:
            raise option_error(
                f"{self.where}, options={self._options}: hardly any question is for the split {split!r}; use options "
                "that allow more questions"
            )
        return task

    def _draw(self, seed: int) -> ReasoningTask:
        return self._drawn(self.dataset, self._options, seed)

    def _drawn(self, dataset: str, options: Mapping[str, Any], seed: int) -> ReasoningTask:
        _, entry = scorer.draw(dataset, options, seed)
        return ReasoningTask(str(entry["question"]).strip(), entry, seed)

    def fingerprint(self, task: ReasoningTask) -> str:
        """Returns the question without case and layout."""
        return _flat(task.question)

    # ------------------------------------------------------------------ replies and scores

    def parse(self, reply: str) -> str | None:
        """Returns the answer in a reply, or None if it is not in the agreed format."""
        return parse_answer(reply, self.style)

    async def grade(self, task: ReasoningTask, answer: str | None) -> float:
        """Returns the data set's score of an answer, between 0 and 1; 1 is solved.

        An answer that repeats half of the question scores 0, unless it is the data set's own: many scorers accept the
        right words anywhere in an answer. So does one whose score takes more than `scorer.CPU_SECONDS` or
        `scorer.MEMORY_BYTES`.
        """
        return 0.0 if answer is None else await asyncio.to_thread(self._paid, task, answer)

    def _paid(self, task: ReasoningTask, answer: str) -> float:
        gold = task.entry.get("answer")
        if not (isinstance(gold, str) and _MATH.fullmatch(gold)):
            answer = _bare(answer, _MATH)
        if repeats(answer, task.question) and not (isinstance(gold, str) and _flat(answer) == _flat(gold)):
            return 0.0
        return self._ask(self.dataset, self._options, task, answer)[0]

    def _ask(self, dataset: str, options: Mapping[str, Any], task: ReasoningTask, answer: str) -> tuple[float, bool]:
        """Returns the score, and whether the scorer wanted to execute the answer.

        Raises EnvironmentConfigError if the scorer's process draws another question than this one.
        """
        request = {
            "modules": self._modules,
            "dataset": dataset,
            "options": dict(options),
            "seed": task.seed,
            "answer": answer,
        }
        score, evaluates, question = _SCORER.ask(request) or (0.0, False, task.question)
        if question != task.question and not evaluates:
            raise option_error(
                f"{self.where}: another process draws another question of {dataset!r} from the same seed, as by the "
                "order of a set: set PYTHONHASHSEED=0 for all processes, or use another data set"
            )
        return score, evaluates

    async def _score(self, task: ReasoningTask, reply: str) -> Score:
        answer = self.parse(reply)
        return Score(team=await self.grade(task, answer), local=_FORMAT * (answer is not None))

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
        graded = await self.grade(task, answers[-1] or None)
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
    box around the whole answer are removed. Dollars are, too, where the data set's own answer has none (`_paid`).
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


def _bare(answer: str, wrapped: re.Pattern[str] = _WRAPPED) -> str:
    """Returns an answer without markup around the whole of it."""
    while (match := wrapped.fullmatch(answer)) is not None:
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
        graded = await self.grade(task, answers[-1] or None)
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
