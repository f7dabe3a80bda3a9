"""Workflows for mathematics in which an answer's worth shows later: drafts, criticism, judgement.

None of their new roles can be scored by a formula: a draft is worth what becomes of it, a verifier what it makes the
refiner do, a judge how well it foretells the outcome. See docs/workflows.md for what differs from the papers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from verl_atgrpo import Message, Outcome, Score, Team
from verl_atgrpo.environments.common.options import with_options
from verl_atgrpo.environments.common.words import read_word
from verl_atgrpo.environments.math.answers import parse_answer
from verl_atgrpo.environments.math.team import ASK_REASONING, Attempt, MathEnvironment, MathTask, dialogue
from verl_atgrpo.play.user_code import gather_or_cancel

VERDICTS = ("right", "wrong")
_TRAINS_JUDGE = (0.2, 0.8)
"""Shares of correct candidates between which the judge is trained (RLAnything's filter of the judge's tasks): where
nearly all are correct, it would learn to say so of all."""
_UNREADABLE = -2.0
"""Reward of a vote that says neither (RLAnything)."""


class MathRefined(MathEnvironment):
    """A generator answers, a verifier criticises, a refiner answers again (MALT, arXiv 2412.01928).

    The verifier has no score: train it by branching (`at_grpo.scheme=branch`).
    """

    agents: ClassVar[tuple[str, ...]] = ("generator", "verifier", "refiner")
    schemes: ClassVar[Mapping[str, tuple[str, ...]]] = {"verifier": ("parallel", "branch")}

    async def run(self, task: MathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the refiner's answer is correct."""
        await self.check(task)
        first = await self.reason(team.generator, task, dialogue("generator", task, [], ASK_REASONING))
        criticism = await team.verifier.act(partial(self.verifier_prompt, task, first))
        asked = partial(self.refiner_prompt, task, first, criticism.text)
        refined = await self.reason(team.refiner, task, asked)
        before = float(await task.solved_by(first.answer))
        return await self.outcome(task, refined.answer, first_correct=before)

    def verifier_prompt(self, task: MathTask, first: Attempt) -> list[Message]:
        """Returns the verifier's prompt about the generator's answer."""
        find = "Check this answer step by step. Say what is wrong with it, or that it is right."
        return dialogue("verifier", task, [first.quote("The generator")], find)

    def refiner_prompt(self, task: MathTask, first: Attempt, criticism: str) -> list[Message]:
        """Returns the refiner's prompt about an answer and what the verifier said of it."""
        said_of_it = Attempt(criticism, None).quote("The verifier")
        again = f"Give the right answer. {ASK_REASONING}"
        return dialogue("refiner", task, [first.quote("The generator"), said_of_it], again)


@with_options
class MathDrafts(MathEnvironment):
    """A drafter answers several times without being trained; a refiner improves the best draft (iGRPO, 2602.09000)."""

    agents: ClassVar[tuple[str, ...]] = ("drafter", "refiner")
    drafts: Annotated[int, Ge(1), Le(64)] = 4
    """Drafts in training, of which the best by score is refined; one in evaluation."""

    async def run(self, task: MathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the refiner's answer is correct."""
        await self.check(task)
        prompt = dialogue("drafter", task, [], ASK_REASONING)
        draft = await self.reason(team.drafter, task, prompt, train=False, candidates=self.drafts)
        refined = await self.reason(team.refiner, task, partial(self.refiner_prompt, task, draft))
        before = float(await task.solved_by(draft.answer))
        return await self.outcome(task, refined.answer, draft_correct=before)

    def refiner_prompt(self, task: MathTask, draft: Attempt) -> list[Message]:
        """Returns the refiner's prompt about a draft."""
        return dialogue("refiner", task, [draft.quote("A draft")], f"Improve this draft. {ASK_REASONING}")


@with_options
class MathJudged(MathEnvironment):
    """A solver answers, and a judge that learns votes on each of its candidates (RLAnything, arXiv 2602.02488).

    With O = 1 for a correct answer and -1 for another one, and votes S of 1 (right) and -1 (wrong), a candidate of the
    solver earns O + mean S, and each vote on it (O + mean S) * S; one that says neither counts 0 and earns -2. The
    judge is trained on the candidates of a decision of which 20 to 80% are correct.
    """

    agents: ClassVar[tuple[str, ...]] = ("solver", "judge")
    schemes: ClassVar[Mapping[str, tuple[str, ...]]] = {"judge": ("tree",)}
    votes: Annotated[int, Ge(2), Le(64)] = 4
    """The judge's votes on each candidate in training."""

    async def run(self, task: MathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the solver's answer is correct.

        A last vote, which is not trained, is compared with the outcome: the metric `judge_right`.
        """
        await self.check(task)

        async def by_judge(replies: Sequence[str]) -> list[Score]:
            answers = [parse_answer(reply) for reply in replies]
            correct = await gather_or_cancel([task.solved_by(answer) for answer in answers])
            low, high = _TRAINS_JUDGE
            train = len(replies) == 1 or low <= sum(correct) / len(replies) <= high
            # In order: the numbers of the judge's turns follow from the candidates'.
            judged = [self._total(task, team, *pair, train) for pair in zip(replies, correct, strict=True)]
            return [Score(local=total) for total in await gather_or_cancel(judged)]

        answer = await team.solver.act(dialogue("solver", task, [], ASK_REASONING), score_all=by_judge)
        verdict = await team.judge.act(partial(self.judge_prompt, task, answer.text), train=False)
        correct = await task.solved_by(parse_answer(answer.text))
        foretold = vote(verdict.text) == (1.0 if correct else -1.0)
        return await self.outcome(task, parse_answer(answer.text), judge_right=float(foretold))

    async def _total(self, task: MathTask, team: Team, reply: str, correct: bool, train: bool) -> float:
        """Returns what a candidate earns, O + mean S, after the judge's votes on it."""
        signed = 1.0 if correct else -1.0
        total = signed

        def agreement(verdicts: Sequence[str]) -> list[Score]:
            nonlocal total
            votes = [vote(verdict) for verdict in verdicts]
            total = signed + sum(one or 0.0 for one in votes) / len(votes)
            return [Score(local=_UNREADABLE if one is None else total * one) for one in votes]

        asked = partial(self.judge_prompt, task, reply)
        await team.judge.act(asked, score_all=agreement, candidates=self.votes, train=train)
        return total

    def judge_prompt(self, task: MathTask, reply: str) -> list[Message]:
        """Returns the judge's prompt about a reply of the solver."""
        answered = Attempt(reply, None).quote("The solver")
        return dialogue("judge", task, [answered], "Is the final answer right or wrong? Answer with one word.")


def vote(verdict: str) -> float | None:
    """Returns 1 for "right", -1 for "wrong", None for a verdict that says neither or both."""
    said = read_word(verdict, VERDICTS)
    return None if said is None else 1.0 if said.value == "right" else -1.0
