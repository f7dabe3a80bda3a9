"""Agents as judges: a grade by a rubric for one reply, or a ranking of all candidates of a decision.

Both are for async scores, which evaluation does not call:

    async def by_judge(reply: str) -> Score:
        return Score(local=await grade(team.judge, question, reply, "Is every claim supported by the text?"))

    await team.writer.act(question, by_judge)

The judge is not trained by them: that takes a score of its verdict (`math_judged` has one). It may be a frozen policy
(docs/policies.md), or a model that another server has (`EndpointJudge`). Replies are quoted and shortened, and nothing
that is written in them is read as a verdict.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from verl_atgrpo import Agent, Candidate, EnvironmentConfigError, Score, stable_hash
from verl_atgrpo.environments.common.replies import after_thoughts
from verl_atgrpo.environments.common.workflow import chat
from verl_atgrpo.play.decision import PromptSource
from verl_atgrpo.play.messages import Prompt, as_messages
from verl_atgrpo.play.quoting import quoted, shortened
from verl_atgrpo.play.remote import RemoteModel, RemotePolicy
from verl_atgrpo.play.scoring import end_in_evaluation

_GRADE = re.compile(r"(?im)^[ \t*#]*grade[ \t*]*:[ \t*]*([0-9]{1,4})(?:[ \t]*/[ \t]*([0-9]{1,4}))?[ \t.*]*$")
_ORDER = re.compile(r"(?im)^[ \t*#]*order[ \t*]*:[ \t*]*([0-9][0-9, \t>]{0,400}?)[ \t.*]*$")


@dataclass(eq=False)
class EndpointJudge:
    """A judge that an OpenAI-compatible server has; asked like an agent of the team, and never trained or recorded.

    The first request connects. Raises EnvironmentConfigError if the source is no such URL, or the variable that it
    names is not set.
    """

    source: str
    """`MODEL@http(s)://host/v1[#KEY_VARIABLE]`, as for `verl-atgrpo eval`; the environment variable has the key."""
    _: KW_ONLY
    temperature: float = 0.0
    """That it answers at."""
    max_tokens: int = 1024
    """Of a verdict."""
    timeout: float = 300.0
    """Seconds for one, with retries."""

    def __post_init__(self) -> None:
        try:
            endpoint = RemoteModel.parse(self.source)
            if endpoint is None:
                raise ValueError(f"{self.source!r} is no MODEL@http(s)://host/v1")
            endpoint.key()
        except ValueError as error:
            raise EnvironmentConfigError(f"a judge's endpoint: {error}") from error
        self._endpoint = endpoint
        self._policy: RemotePolicy | None = None

    async def act(self, prompt: PromptSource, *, train: bool = False) -> Candidate:
        """Returns the server's answer; ends a score of evaluation, as an agent's does.

        Args:
            prompt: a text or chat messages, or a function that returns them.
            train: as of an agent; True is refused.

        Raises:
            ValueError: it should be trained.
            EpisodeFailed: no answer in time, or the server refused.
            ImportError: openai is missing.
            PolicyUnusable: the server refuses every request.
        """
        if train:
            raise ValueError(f"{self._endpoint} is a model of another server, which is not trained; use train=False")
        end_in_evaluation()
        if self._policy is None:
            self._policy = RemotePolicy(
                self._endpoint,
                sampling={"temperature": self.temperature, "top_p": 1.0, "top_k": -1},
                max_response_length=self.max_tokens,
                chat_template_kwargs={},
                request_timeout=self.timeout,
            )
        asked = self._policy.encode(as_messages(prompt() if callable(prompt) else prompt))
        return Candidate(await self._policy.generate("judge", asked, None), Score(), 0.0)


async def grade(judge: Agent | EndpointJudge, question: str, reply: str, rubric: str, points: int = 10) -> float:
    """Returns the judge's grade of a reply, between 0 and 1; 0 if it gives none.

    Args:
        judge: the agent that is asked.
        question: what the reply answers.
        reply: the reply to be judged.
        rubric: what is looked at.
        points: the best grade; the worst is 0.
    """
    ask = f"Grade: and a whole number from 0 (worst) to {points} (best)"
    said = _GRADE.findall(await _verdict(judge, question, {"An answer": reply}, rubric, ask))
    given, of = said[-1] if said else ("0", "")
    return int(given) / points if int(given) <= points and of in ("", str(points)) else 0.0


async def rank(judge: Agent | EndpointJudge, question: str, replies: Sequence[str], rubric: str) -> list[float]:
    """Returns a worth for each of the replies: from 1 for the best in even steps to 0 for the worst.

    Equal replies have the same worth. They are shown once each, in an order drawn from their texts, as judges prefer
    some places. All are worth 0 if the judge's order is none of all replies. If all are equal, the judge is not asked,
    and they are worth 1.

    Args:
        judge: the agent that is asked.
        question: what the replies answer.
        replies: those of one decision, as `score_all` gets them.
        rubric: what is looked at.
    """
    shown = sorted(set(replies))
    if len(shown) == 1:
        return [1.0] * len(replies)
    random.Random(stable_hash("rank", question, *shown)).shuffle(shown)
    answers = {f"Answer {number}": reply for number, reply in enumerate(shown, 1)}
    ask = f"Order: and the numbers 1 to {len(shown)}, the best answer first"
    said = _ORDER.findall(await _verdict(judge, question, answers, rubric, ask))
    order = [int(number) for number in re.findall("[0-9]+", said[-1])] if said else []
    if sorted(order) != list(range(1, len(shown) + 1)):
        return [0.0] * len(replies)
    worth = {shown[number - 1]: 1 - place / (len(shown) - 1) for place, number in enumerate(order)}
    return [worth[reply] for reply in replies]


async def _verdict(
    judge: Agent | EndpointJudge, question: str, answers: Mapping[str, str], rubric: str, last_line: str
) -> str:
    """Returns what a judge says of answers, by the names that they have in its prompt."""
    ask = f"Think first. Then write the last line: {last_line}."

    def prompt() -> Prompt:
        shown = [f"{name}:\n{quoted(shortened(reply))}" for name, reply in answers.items()]
        return chat("\n\n".join((question, *shown, rubric, ask)), "You judge answers.")

    return after_thoughts((await judge.act(prompt, train=False)).text)
