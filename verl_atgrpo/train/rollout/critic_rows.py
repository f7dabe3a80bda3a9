"""The rows of a critic: for every decision what it reads, and of which tokens it gives the log-prob."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.environment_check import tasks_of
from verl_atgrpo.play.types import EpisodeRecord, Generation
from verl_atgrpo.train.config.rules import ConfigError
from verl_atgrpo.train.estimators.critic import Kind
from verl_atgrpo.train.rollout.episode_rows import Row

QUESTION, ANSWER = "\nSuccess?", " yes"
"""What a critic of kind `value` reads after a prompt, and the word of whose first token it gives the log-prob."""
_LOOKED_AT = 64
"""Training tasks whose hindsight is looked at before the start."""
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
            return list(tokenizer.encode(text, add_special_tokens=False)) if text else []

        return cls(ids(f"{hindsight}\n") if hindsight else [], ids(QUESTION), ids(ANSWER)[:1])


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
            "scope": "",
            "policy": policy,
            "temperature": 1.0,
            "group": uid,
            "episode": f"{uid}_{session}",
            "place": number,
            "episode_success": record.outcome.success,
        }
        prompt = [*text.hindsight, *shown, *asked]
        yield Row(f"{uid}_{session}_{total + number}", uid, prompt, Generation(list(answer), [], ""), 0.0, tags)


def hindsights(environment: Environment) -> list[str]:
    """Returns what an environment says in hindsight of its first training tasks."""
    size = tasks_of(environment, "train")
    number = _LOOKED_AT if size is None else min(size, _LOOKED_AT)
    return [environment.hindsight(environment.task("train", index)) for index in range(number)]


def check_hindsight(texts: Iterable[str], tokenizer: Any, longest: int) -> None:
    """Raises ConfigError if what an environment says in hindsight leaves less than half of a row for the prompt."""
    for text in texts:
        if 2 * (tokens := len(CriticText.of(tokenizer, text).hindsight)) > longest:
            raise ConfigError(
                f"at_grpo.critic: Environment.hindsight says {tokens} tokens of a task, and prompt and answer have "
                f"room for {longest}; say less, or raise data.max_prompt_length"
            )
