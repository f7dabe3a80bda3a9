"""From episode records to training rows: keys, tags and rewards, without any verl.

A row is one candidate. Its key orders it within the episode, its group label says with whom it is
compared, its tags carry what the metrics need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from verl_atgrpo.estimators.spec import Need
from verl_atgrpo.estimators.uid import UidParts, anchor_of, join_uid
from verl_atgrpo.team import EpisodeRecord, Generation


@dataclass(frozen=True)
class Row:
    """One candidate, ready to be written to the trainer's queue."""

    key: str
    """`{uid}_{session}_{index}`, verl's convention; `uid` holds no underscore."""
    group: str
    """Goes into verl's `uid` field, by which advantages are computed."""
    prompt_ids: list[int]
    generation: Generation
    reward: float
    tags: dict[str, Any]


def training_rows(
    uid: str, session: int, record: EpisodeRecord, scheme: str, needs: Collection[Need] = ()
) -> Iterator[Row]:
    """Yields a row for every candidate of an episode.

    `tree`: the group is (episode, agent, turn) and the reward is the candidate's own mixed reward.
    `parallel`: the group is the task, the unit is the episode, and the reward is the shared outcome; the agent is
    named for estimators that compare agents with themselves.

    Args:
        needs: `EstimatorSpec.needs`, what the estimator reads in a row's uid beside its group. `left` counts the
            decisions in the order in which they ended.
    """
    index = 0
    for position, decision in enumerate(record.decisions):
        if scheme == "tree":
            group = f"{uid}.{session}.{decision.agent}.{decision.turn}"
            parts = UidParts(group, str(session), decision.agent) if "agent" in needs else UidParts(group)
        else:
            left = len(record.decisions) - 1 - position if "left" in needs else None
            anchor = anchor_of(decision.prompt_ids) if "anchor" in needs else None
            parts = UidParts(uid, str(session), decision.agent, left, anchor)
        group = join_uid(parts)
        for number, candidate in enumerate(decision.candidates):
            reward = candidate.reward if scheme == "tree" else record.outcome.team_reward
            tags = {
                "agent": decision.agent,
                "turn": decision.turn,
                "policy": decision.policy,
                "group": group,
                "candidate": number,
                "committed": number == decision.committed,
                "reward": reward,
                "team_reward": candidate.score.team,
                "local_reward": candidate.score.local,
                "truncated": candidate.generation.truncated,
                "resumed": candidate.generation.resumed,
                "episode": f"{uid}_{session}",
                "episode_success": record.outcome.success,
                "episode_reward": record.outcome.team_reward,
            }
            yield Row(f"{uid}_{session}_{index}", group, decision.prompt_ids, candidate.generation, reward, tags)
            index += 1


def validation_rows(uid: str, session: int, record: EpisodeRecord) -> Iterator[Row]:
    """Yields a row for every committed answer; verl scores an episode by its last row."""
    for index, decision in enumerate(record.decisions):
        candidate = decision.candidates[decision.committed]
        reward = record.outcome.team_reward
        tags = {
            "agent": decision.agent,
            "turn": decision.turn,
            "policy": decision.policy,
            "committed": True,
            "reward": candidate.reward,
            "team_reward": candidate.score.team,
            "local_reward": candidate.score.local,
            "truncated": candidate.generation.truncated,
            "episode_success": record.outcome.success,
            "episode_reward": reward,
        }
        yield Row(f"{uid}_{session}_{index}", uid, decision.prompt_ids, candidate.generation, reward, tags)


def failed_validation_row(uid: str, session: int, policy: str, token_id: int) -> Row:
    """Returns the row that stands for a validation episode that failed: no text, no reward, no success."""
    return Row(
        f"{uid}_{session}_0",
        uid,
        [token_id],
        Generation([token_id], [0.0], ""),
        0.0,
        {"failed": True, "policy": policy, "episode_success": False, "episode_reward": 0.0},
    )
