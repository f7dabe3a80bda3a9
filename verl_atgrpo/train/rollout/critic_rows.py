"""The rows of a critic: for every decision what it reads, and of which tokens it gives the log-prob."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from verl_atgrpo.play.types import EpisodeRecord, Generation
from verl_atgrpo.train.config.answer_check import hindsight_ids
from verl_atgrpo.train.estimators.critic import Kind
from verl_atgrpo.train.rollout.episode_rows import Row

QUESTION, ANSWER = "\nSuccess?", " yes"
"""What a critic of kind `value` reads after a prompt, and the word of whose first token it gives the log-prob."""
CRITIC = "critic"
"""Tag of a critic's row: the key of the candidate's row."""


def critic_rows(
    uid: str,
    session: int,
    record: EpisodeRecord,
    policy: str,
    kind: Kind,
    tokenizer: Any,
    hindsight: str,
    agents: Collection[str],
    longest: int,
) -> Iterator[Row]:
    """Yields a row for every trained decision of these agents, in an episode of one candidate each (`parallel`).

    Args:
        policy: the critic's, as its `tokenizer`.
        hindsight: what the environment says of the task in hindsight, before the prompt.
        longest: most tokens of a row. Of a longer one the beginning of the prompt is left out, never the hindsight.
    """
    before = hindsight_ids(tokenizer, hindsight)
    question, yes = (tokenizer.encode(text, add_special_tokens=False) for text in (QUESTION, ANSWER))
    total = sum(len(decision.candidates) for decision in record.decisions)
    for number, decision in enumerate(record.decisions):
        if not decision.trained or decision.scope or decision.agent not in agents:
            continue
        said = decision.candidates[0].generation.token_ids
        asked, answer = (question, yes[:1]) if kind == "value" else ([], said)
        room = longest - len(before) - len(asked) - len(answer)
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
        answered = Generation(list(answer), [], "")
        yield Row(f"{uid}_{session}_{total + number}", uid, [*before, *shown, *asked], answered, 0.0, tags)
