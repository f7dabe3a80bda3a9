"""A value critic: what the frozen base of a policy's adapter reads of a prompt, and a regression of how episodes end.

In a step it scores first, with a regression that has not seen the step's episodes, and learns from them then. There is
nothing to train: one forward pass of the prompts without the adapter, and a system of linear equations.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import torch
from torch import Tensor
from verl.utils.debug import marked_timer

from verl_atgrpo.play.types import part_of
from verl_atgrpo.train.config.schema import CriticSettings
from verl_atgrpo.train.engine.prefix_tree.engine import STATES
from verl_atgrpo.train.estimators.likelihood import agreement
from verl_atgrpo.train.estimators.value import Moments, scores
from verl_atgrpo.train.rows.batch import Batch
from verl_atgrpo.train.serving.health import naming
from verl_atgrpo.train.trainer.critic_unit import IdleSteps
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit, Update

logger = logging.getLogger(__name__)

_ALL_ALIKE = (
    "all episodes of training earned the same, so its scores are 0; a value predicts Outcome.team_reward: return one "
    "that tells episodes apart"
)


class ValueCritic:
    """Values of the prompts of all agents with a trained policy, each by the base of that policy."""

    def __init__(self, critic: CriticSettings, units: Sequence[PolicyUnit]) -> None:
        self._lam, self._decay, self._hindsight = critic.lam, critic.decay, critic.hindsight
        self._units = {unit.name: unit for unit in units}
        self._several = len({unit.host.name for unit in units}) > 1
        self._seen: dict[tuple[str, str], Moments] = {}
        """Of each base and part of a mixture."""
        self.steps = 0
        """Steps in which it has learned."""
        self._idle = IdleSteps("critic")

    def train(self, batch: Batch, global_steps: int) -> Update:
        """Scores candidates, then learns from how their episodes ended; returns their rows for removal.

        Writes the tag `score` into the rows, but for bases and parts of which it has seen no episode. Raises
        PolicyFailed if a worker dies, RuntimeError for hidden states that are not finite.
        """
        groups = [(self._units[tags["policy"]].host.name, part_of(tags["agent"])) for tags in batch.tags]
        states, rows, timing = dict[int, Tensor](), Batch(), dict[str, float]()
        for base in dict.fromkeys(base for base, _ in groups):
            of_base = [number for number, group in enumerate(groups) if group[0] == base]
            update = Update(batch.take(of_base), {}, timing)
            states |= zip(of_base, self._states(update, global_steps), strict=True)
            rows += update.rows
        rewards = torch.tensor([tags["episode_reward"] for tags in batch.tags], dtype=torch.float64)
        values = torch.full_like(rewards, torch.nan)
        shares = torch.zeros((2, len(rewards)), dtype=torch.float64)
        for group in dict.fromkeys(groups):
            mine = [number for number, other in enumerate(groups) if other == group]
            x, y, seen = torch.stack([states[number] for number in mine]), rewards[mine], self._seen.get(group)
            new = Moments.of(x, y)
            now = self._seen[group] = new if seen is None else seen.then(new, self._decay)
            if seen is not None:
                values[mine] = seen.values(x)
                shares[:, mine] = now.shares(torch.stack([values[mine], y]))
        self.steps += 1
        self._idle.count(any(one.lowest < one.highest for one in self._seen.values()), _ALL_ALIKE)
        return Update(rows, self._score(batch, values, *shares), timing)

    def _score(self, batch: Batch, values: Tensor, predicted: Tensor, ends: Tensor) -> dict[str, float]:
        """Tags the rows of episodes of which all values are known; returns the metrics, of shares.

        A share is how far a value or a reward is from the least reward to the largest: parts differ in their sizes.
        """
        unknown = {tags["episode"] for tags, value in zip(batch.tags, values.tolist(), strict=True) if isnan(value)}
        scored = [number for number, tags in enumerate(batch.tags) if tags["episode"] not in unknown]
        metrics = {"rows": float(len(batch)), "cut_share": float(batch.column("cut").double().mean())}
        if scored:
            mine = batch.take(scored)
            mine.tag(score=scores(values[scored], mine.tags, self._lam).tolist(), end=ends[scored].tolist())
            metrics |= agreement(predicted[scored], mine.tags, "end")
            metrics["brier"] = float((predicted[scored] - ends[scored]).square().mean())
        return metrics

    def _states(self, update: Update, seed: int) -> Tensor:
        """Returns what the base's output head reads at the end of each row's prompt, (N, D), in the order of the rows.

        Adds padding to the rows.
        """
        keys, unit = list(update.rows.keys), self._units[update.rows.tags[0]["policy"]]
        with naming(unit.name, "reading prompts for the critic"), unit._turn(), marked_timer("critic", update.timing):
            unit._deal(update, seed)
            options = {"calculate_entropy": False, "no_lora_adapter": True, STATES: True}
            unit._infer(unit.actor_rollout_wg.compute_log_prob, update.rows, **options)
            of_key = dict(zip(update.rows.keys, update.rows.fetch(STATES)[STATES].unbind(), strict=True))
        if self._several:
            unit.empty_cache()  # its processes have used the devices of those that read or are updated next
        states = torch.stack([of_key[key] for key in keys])
        if not states.isfinite().all():
            raise RuntimeError(
                f"policy {unit.name!r}: in step {seed} its base makes hidden states that are not finite"
            )
        return states

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: the regressions' sums, of how many steps, and whether with hindsight."""
        seen = {group: tuple(vars(one).values()) for group, one in self._seen.items()}
        return {"seen": seen, "steps": self.steps, "hindsight": self._hindsight}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what a checkpoint keeps; that of other prompts is of no use."""
        if state["hindsight"] == self._hindsight:
            self.steps = state.get("steps", 0)  # an older version's checkpoint does not say
            self._seen = {group: Moments(*one) for group, one in state["seen"].items()}
        else:
            logger.warning(
                "the critic begins anew: the run was saved with critic.hindsight=%s", str(state["hindsight"]).lower()
            )
