"""A value critic: what the frozen base of a policy's adapter reads of a prompt, and a regression of how episodes end.

In a step it scores first, with a regression that has not seen the step's episodes, and learns from them then. There is
nothing to train: one forward pass of the prompts without the adapter, and a system of linear equations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
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
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit, Update

_UNKNOWN = 0.5
"""The value of everything before the first episodes; no score has a weight then."""


class ValueCritic:
    """Values of the prompts of all agents with a trained policy, each by the base of that policy."""

    name = "critic"

    def __init__(self, critic: CriticSettings, units: Sequence[PolicyUnit]) -> None:
        self._lam, self._decay, self._hindsight = critic.lam, critic.decay, critic.hindsight
        self._units = {unit.name: unit for unit in units}
        self._seen: dict[str, Moments] = {}
        """Of each base, and of each part of a mixture, whose rewards have sizes of their own."""

    def train(self, batch: Batch, global_steps: int) -> Update:
        """Scores candidates, then learns from how their episodes ended; returns their rows for removal.

        Writes the tag `score` into the rows. Raises PolicyFailed if a worker dies.
        """
        groups: dict[str, list[int]] = {}
        for number, tags in enumerate(batch.tags):
            base = self._units[tags["policy"]].host.name
            groups.setdefault(f"{base} {part_of(tags['agent'])}", []).append(number)
        values = torch.full((len(batch),), _UNKNOWN, dtype=torch.float64)
        found, rows = Update(batch, {}, {}), Batch()
        for group, numbers in groups.items():
            update = Update(batch.take(numbers), {}, found.timing)
            states = self._states(update, global_steps)
            rows += update.rows
            seen = self._seen.get(group)
            if seen is not None:
                values[numbers] = seen.values(states)
            learned = Moments.of(states, batch.take(numbers).column("episode_reward"))
            self._seen[group] = learned if seen is None else seen.then(learned, self._decay)
        batch.tag(score=scores(values, batch.tags, self._lam).tolist())
        ends = batch.column("episode_reward").double()
        found.metrics.update(agreement(values, batch.tags, "episode_reward"))
        found.metrics.update(brier=float((values - ends).square().mean()), rows=float(len(batch)))
        found.metrics["cut_share"] = float(batch.column("cut").double().mean())
        return Update(rows, found.metrics, found.timing)

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
        return torch.stack([of_key[key] for key in keys])

    def empty_cache(self) -> None:
        """Frees the caches of the workers that have read prompts."""
        for host in {unit.host.name: unit.host for unit in self._units.values()}.values():
            host.empty_cache()

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: the sums of the regressions, and whether they are with hindsight."""
        return {"seen": {group: astuple(one) for group, one in self._seen.items()}, "hindsight": self._hindsight}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what a checkpoint keeps; that of another kind, or of other prompts, is of no use."""
        if state.get("hindsight") == self._hindsight:
            self._seen = {group: Moments(*one) for group, one in state.get("seen", {}).items()}
