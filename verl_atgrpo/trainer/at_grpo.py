"""verl's synchronous trainer with what a team needs: episodes, fixed optimizer steps, per-agent metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from verl_atgrpo import compat, platform_choice
from verl_atgrpo.config import SECTION, AtGrpoConfig
from verl_atgrpo.rollout.client import DecisionClient
from verl_atgrpo.run_check import MODE, check_run
from verl_atgrpo.trainer.metrics import every_episode_failed, rollout_metrics, step_metrics
from verl_atgrpo.trainer.mini_batches import spread_padding

if TYPE_CHECKING:
    from verl_atgrpo.rollout.manager import TeamRolloutManager


def wire(config: DictConfig) -> None:
    """Sets the keys of verl that follow from the `at_grpo:` section, so that a recipe need not name them."""
    with open_dict(config):
        config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = (
            "verl_atgrpo.rollout.manager.TeamRolloutManager"
        )
        config.data.custom_cls = {"path": "pkg://verl_atgrpo.trainer.dataset", "name": "TeamTaskDataset"}
        config.data.train_files, config.data.val_files = "train", "val"
        # The dataset is handed `data` alone, and rollout workers read the same section.
        config.data[SECTION] = config[SECTION]
        config.algorithm.at_grpo_estimator = config[SECTION].get("estimator", "at_grpo")
        # verl's own way to replace an episode that failed; it fetches tasks one by one.
        config.trainer.v1.sampler.sync_refill_failed_groups = True
        config.data.gen_batch_size = 1


@register_trainer(MODE)
class AtGrpoTrainer(PPOTrainerSync):  # type: ignore[misc]
    """Trains one shared policy from the episodes of a team."""

    def __init__(self, config: DictConfig) -> None:
        compat.check_symbols(cpu=platform_choice.wants_cpu())
        check_run(config)
        wire(config)
        self.settings = AtGrpoConfig.from_config(config)
        self._optimizer_steps = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        self._replaced = 0
        self._counts: Counter[str] = Counter()
        super().__init__(config)
        self.replay_buffer.poll_interval = self.settings.poll_interval

    @property
    def trainer_mode(self) -> str:
        """The mode verl's base class shall see: it compares with the literal "sync" in several places."""
        return "sync"

    @trainer_mode.setter
    def trainer_mode(self, mode: str) -> None:
        assert mode == MODE, mode

    # ------------------------------------------------------------ episodes

    def get_llm_client(self) -> DecisionClient:
        """Returns the client that rollout workers draw candidates with."""
        client: DecisionClient = self.llm_server_manager.get_client(client_cls=DecisionClient)
        return client

    def prepare_step(self) -> dict[str, Any]:
        """Hands a step's tasks to the rollout."""
        self._replaced = 0
        metrics: dict[str, Any] = super().prepare_step()
        return metrics

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """Replaces failed episodes by new tasks; stops the run if that does not end."""
        self._collect_report()
        self._replaced += num_prompts
        if self._replaced > self.settings.max_failed_episodes:
            raise RuntimeError(
                f"{self._replaced} episodes of step {self.global_steps} failed ({dict(self._counts)}), more than "
                f"{SECTION}.max_failed_episodes={self.settings.max_failed_episodes}; the rollout workers' log says why"
            )
        submitted: int = super()._add_prompts_to_generate(num_prompts)
        return submitted

    def _collect_report(self) -> None:
        """Adds up what the workers counted; raises RuntimeError if one of them met a defect."""
        manager: TeamRolloutManager = self.agent_loop_manager
        report = manager.drain_report()
        self._counts.update(report.counts)
        if report.error is not None:
            raise RuntimeError(f"the rollout stopped on a defect: {report.error}")

    def _validate(self) -> dict[str, float]:
        """Returns the team's success on the validation tasks (`val-core/<environment>/acc/mean@n`)."""
        try:
            metrics: dict[str, float] = super()._validate()
        finally:
            # A defect leaves verl with an empty batch; its own error would not say why.
            self._collect_report()
        if every_episode_failed(metrics):
            raise RuntimeError("every validation episode failed; the rollout workers' log says why")
        return metrics

    # ------------------------------------------------------------ optimizer steps

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Returns what the number of rows must be a multiple of: every rank and mini-batch gets equally many."""
        multiple: int = dp_size * self._optimizer_steps
        return multiple

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **kwargs: Any) -> KVBatchMeta:
        """Pads, balances tokens over ranks, and spreads rows and padding over mini-batches."""
        batch = super()._balance_batch(batch, metrics=metrics, **kwargs)
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        padding = [bool(tags.get("is_padding", False)) for tags in batch.tags]
        batch.reorder(spread_padding(padding, ranks, self._optimizer_steps, seed=self.global_steps))
        metrics["team/padding_rows"] = float(sum(padding))
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Updates the policy in the configured number of optimizer steps, whatever the number of rows."""
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        real_rows = sum(not tags.get("is_padding", False) for tags in batch.tags)
        batch.extra_info.update(
            {
                "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0.0,
                "distillation_use_topk": False,
                "distillation_only": False,
                # The denominator of sequence-mean losses: real rows only, the same in every mini-batch.
                "global_batch_size": real_rows / self._optimizer_steps,
                "mini_batch_size": len(batch) // self._optimizer_steps,
                "epochs": actor.ppo_epochs,
                "seed": actor.data_loader_seed,
                "dataloader_kwargs": {"shuffle": False},
                "temperature": rollout.temperature,
            }
        )
        output: TensorDict = self.actor_rollout_wg.update_actor(batch)
        update_metrics = rename_dict(output["metrics"], "actor/")
        update_metrics["perf/mfu/actor"] = update_metrics.pop("actor/mfu")
        metrics.update(reduce_metrics(update_metrics))
        metrics["team/optimizer_steps"] = float(self._optimizer_steps * actor.ppo_epochs)
        return batch

    # ------------------------------------------------------------ metrics

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        """Adds the team's metrics to verl's."""
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        metrics.update(step_metrics([tags for tags in batch.tags if not tags.get("is_padding", False)]))
        self._collect_report()
        metrics.update(rollout_metrics(self._counts))
        self._counts.clear()
