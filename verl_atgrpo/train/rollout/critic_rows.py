"""The rows of a critic: for every decision what it reads, and of which tokens it gives the log-prob."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from verl_atgrpo.play.types import EpisodeRecord, Generation
from verl_atgrpo.train.config.answer_check import hindsight_ids
from verl_atgrpo.train.estimators.critic import Kind
from verl_atgrpo.train.rollout.episode_rows import Row

QUESTION, ANSWER = "\nSuccess?", " yes"
"""What a critic of kind `value` reads after a prompt, and the word of whose first token it gives the log-prob."""
CRITIC = "critic"
"""Tag of a critic's row: the key of the candidate's row."""


@dataclass(frozen=True)
class CriticText:
    """Token ids that a critic reads besides prompts and candidates."""

    hindsight: list[int]
    """Before the prompt: what the environment says of the task in hindsight."""
    question: list[int]
    answer: list[int]

    @classmethod
    def of(cls, tokenizer: Any, hindsight: str) -> CriticText:
        """Returns the ids of a task's texts."""

        def ids(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        return cls(hindsight_ids(tokenizer, hindsight), ids(QUESTION), ids(ANSWER)[:1])


def critic_rows(
    uid: str,
    session: int,
    record: EpisodeRecord,
    policy: str,
    kind: Kind,
    text: CriticText,
    agents: Collection[str],
    longest: int,
) -> Iterator[Row]:
    """Yields a row for every trained decision of these agents, in an episode of one candidate each (`parallel`).

    Args:
        policy: the critic's.
        longest: most tokens of a row. Of a longer one the beginning of the prompt is left out, never the hindsight.
    """
    total = sum(len(decision.candidates) for decision in record.decisions)
    for number, decision in enumerate(record.decisions):
        if not decision.trained or decision.scope or decision.agent not in agents:
            continue
        said = decision.candidates[0].generation.token_ids
        asked, answer = (text.question, text.answer) if kind == "value" else ([], said)
        room = longest - len(text.hindsight) - len(asked) - len(answer)
        shown = decision.prompt_ids[-room:] if room > 0 else []
        tags = {
            CRITIC: f"{uid}_{session}_{number}",
            "agent": decision.agent,
            "turn": decision.turn,
            "candidate": 0,
            "scope": "",
            "policy": policy,
            "temperature": 1.0,
            "group": uid,
            "episode": f"{uid}_{session}",
            "order": decision.order,
            "place": number,
            "after": decision.after,
            "episode_success": record.outcome.success,
            "episode_reward": record.outcome.team_reward,
        }
        prompt = [*text.hindsight, *shown, *asked]
        yield Row(f"{uid}_{session}_{total + number}", uid, prompt, Generation(list(answer), [], ""), 0.0, tags)
