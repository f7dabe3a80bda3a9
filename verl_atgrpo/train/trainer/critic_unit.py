"""A likelihood critic: an adapter that gives candidates scores, and learns from how their episodes ended.

In a step it scores first, with weights that have not seen the step's episodes, and is then updated. Its log-probs are
those of a policy's update, its gradient has the form of a policy's (`estimators.likelihood`), so workers need nothing
new. Each optimizer step is an update of its own, as the weights of its gradient are those of the critic as it is.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from verl.utils.debug import marked_timer

from verl_atgrpo.train.config.schema import CriticSettings
from verl_atgrpo.train.engine.arrival import ARRIVED, CHANGED
from verl_atgrpo.train.estimators.likelihood import agreement, gradient_weights, has_signal
from verl_atgrpo.train.rollout.episode_rows import CRITIC
from verl_atgrpo.train.rows.batch import Batch, jagged
from verl_atgrpo.train.serving.health import naming
from verl_atgrpo.train.trainer.policy_unit import SharingUnit, Update
from verl_atgrpo.train.trainer.update_inputs import of_responses

logger = logging.getLogger(__name__)

_IDLE_STEPS = 10
_NO_PAIR = (
    "no two episodes of a task ended differently, so it has learned nothing; use more candidates, other tasks, or "
    "critic.kind: value"
)
_PER_ROW = "seq-mean-token-mean"
"""verl's loss in which tokens of a row count 1 / their number; in others a critic's mean over tokens is a weight."""


class IdleSteps:
    """Counts a critic's steps in a row without anything to learn from, and warns of ten."""

    def __init__(self, name: str) -> None:
        """Takes the beginning of the warning."""
        self._name, self._steps = name, 0

    def count(self, learned: bool, why: str) -> None:
        """Counts a step; `why` it taught nothing if it did not, and what would do."""
        self._steps = 0 if learned else self._steps + 1
        if self._steps == _IDLE_STEPS:
            logger.warning(f"{self._name}: in {self._steps} steps {why}")


class CriticUnit(SharingUnit):
    """A policy of no agent, on the workers of one that is trained."""

    _ppo_epochs = 1  # each pass has weights of its own
    steps = 0
    """Steps in which it has learned."""

    def __init__(self, *given: Any, critic: CriticSettings, **more: Any) -> None:
        """As `SharingUnit`, with the section `at_grpo.critic`."""
        super().__init__(*given, **more)
        self._epochs = critic.epochs
        self._mini_batches, self._optimizer_steps = self._optimizer_steps, 1
        self._idle = IdleSteps(f"critic {self.name!r}")

    def train(self, batch: Batch, global_steps: int) -> Update:
        """Scores candidates, then learns from how their episodes ended.

        Writes the tag `score` into the rows.

        Raises PolicyFailed if a worker dies.
        """
        with naming(self.name, "scoring and its update"), self._turn():
            self.steps = global_steps  # a run is resumed with its weights
            began, scoring = time.perf_counter(), Update(batch, {}, {})
            self._deal(scoring, seed=global_steps)
            rows, base = scoring.rows.real, self._means(scoring, of_base=True)
            rows.tag(base=[base[key] for key in rows.keys])  # once, as it never changes
            ratios = self._ratios(scoring)
            rows.tag(score=ratios.tolist())
            found, cut = agreement(ratios, rows.tags), rows.column("cut").double()
            scoring.metrics.update(found, **{"team/rows": float(len(rows)), "cut_share": float(cut.mean())})
            updates = self._by_task(rows, scoring, global_steps)
            self._idle.count(bool(updates), _NO_PAIR)
            for update in updates * self._epochs:
                # Anew each time: the gradient's weights, and the ratio that verl's loss clips, are those of now.
                self._write_advantages(update.rows, self._ratios(update))
                output = self._update_actor(update)
            if updates:
                # No server has it, so nothing has to arrive there.
                kept = {key: value for key, value in output.items() if key not in (ARRIVED, CHANGED)}
                self._add_metrics(scoring, kept, began)
                scoring.metrics["team/updated"] = 1.0
                scoring.metrics["team/optimizer_steps"] = float(len(updates) * self._epochs)
            padding = [update.rows.padding for update in updates]
            return Update(sum(padding, scoring.rows), scoring.metrics, scoring.timing)

    def _by_task(self, rows: Batch, of_step: Update, seed: int) -> list[Update]:
        """Deals rows to optimizer steps, those of a task to one; leaves out steps without anything to learn from."""
        tasks: dict[str, list[int]] = {}
        for row, tags in enumerate(rows.tags):
            tasks.setdefault(tags["group"], []).append(row)
        shuffled, dealt = list(tasks.values()), [list[int]() for _ in range(self._mini_batches)]
        random.Random(seed).shuffle(shuffled)
        for task in shuffled:
            min(dealt, key=len).extend(task)
        updates = [Update(rows.take(part), {}, of_step.timing) for part in dealt]
        updates = [update for update in updates if has_signal(update.rows.tags)]
        for update in updates:
            self._deal(update, seed)
        if updates:
            of_step.metrics["team/tokens"] = sum(update.metrics["team/tokens"] for update in updates)
        return updates

    def _ratios(self, update: Update) -> Tensor:
        """Writes the critic's log-probs; returns each real row's mean less the base's, (N,) float64."""
        means, real = self._means(update), update.rows.real
        ratios = [means[key] - tags["base"] for key, tags in zip(real.keys, real.tags, strict=True)]
        return torch.tensor(ratios, dtype=torch.float64)

    def _means(self, update: Update, of_base: bool = False) -> dict[str, float]:
        """Returns key -> mean log-prob of a row's answer; writes those of the critic for its update."""
        options = {"no_lora_adapter": True} if of_base else {}
        with marked_timer("critic", update.timing, color="olive"):
            self._infer(self.actor_rollout_wg.compute_log_prob, update.rows, calculate_entropy=False, **options)
        means: dict[str, float] = {}
        for part in update.rows.parts():
            log_probs = of_responses(part.fetch("log_probs")["log_probs"], part.lengths)
            if not of_base:
                part.put(old_log_probs=log_probs)
            of_rows = torch.segment_reduce(log_probs.values().double(), "mean", lengths=part.lengths)
            means.update(zip(part.keys, of_rows.tolist(), strict=True))
        return means

    def _write_advantages(self, batch: Batch, ratios: Tensor) -> None:
        real = batch.real
        weights, lengths = gradient_weights(ratios, real.tags), real.lengths.double()
        if self.config.actor_rollout_ref.actor.loss_agg_mode != _PER_ROW:
            weights = weights * lengths.mean() / lengths
        of_row = dict(zip(real.keys, weights.tolist(), strict=True))
        for part in batch.parts():
            values = torch.tensor([of_row.get(key, 0.0) for key in part.keys])
            part.put(advantages=jagged(torch.repeat_interleave(values, part.lengths), part.lengths))


def mix_scores(rows: Batch, of_critic: Batch, weight: float) -> None:
    """Mixes a critic's scores into the rewards of the rows that they are of, with this weight.

    The tag `critic_score` has the score, `without_critic` the reward before. Rows without a score are compared with
    one another alone.
    """
    score_of: Mapping[str, Any] = {tags[CRITIC]: tags["score"] for tags in of_critic.tags if "score" in tags}
    for key, tags in zip(rows.keys, rows.tags, strict=True):
        if key in score_of:
            tags |= {"critic_score": score_of[key], "without_critic": tags["reward"]}
            tags["reward"] = (1 - weight) * tags["reward"] + weight * score_of[key]
        elif weight:
            tags["group"] += ".unscored"
